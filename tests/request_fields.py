"""Fields of requests: the engines' own, which no check of ours may take for a misspelled word; and bad ones of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
from typing import Any

from pydantic import BaseModel


def nested(depth: int) -> dict[str, Any]:
    """A filter in so many others."""
    query: dict[str, Any] = {"tag": 1}
    for _ in range(depth):
        query = {"$not": query}
    return query


def of(**selection: Any) -> dict[str, Any]:
    return {"item_set": "tagged", **selection}


BAD_SELECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"item_filter": {"tag": 1}}, "item_filter chooses among the items of a registered set: name the set as item_set"),
    (of(item_filter="tag"), "item_filter must be an object of conditions, not 'tag'"),
    (of(item_filter=[{"tag": 1}]), "item_filter must be an object of conditions, not"),
    (of(item_filter={"tga": 1}), 'there is no attribute "tga": the set has "tag" (integer)'),
    (of(item_filter={"tag": 7}), 'no item is left: "tag" $eq 7 leaves 0'),
    (of(item_filter={"tag": True}), '"tag" (integer)'),
    (of(item_filter={"tag": {}}), "has an empty condition"),
    (of(item_filter={"tag": {"$regex": "a"}}), "$regex"),
    (of(item_filter={"$where": "1"}), '"$where" is no filter'),
    (of(item_filter={"tag": [1]}), "was given a list: write"),
    (of(item_filter={"tag": {"$in": [1] * 10_001}}), "the filter has more than 10,000 values"),
    (of(item_filter={"$or": [{"tag": 1}] * 101}), "100"),
    (of(item_filter=nested(17)), "nested more than 16 deep"),
    ({"item_set": "one", "item_filter": {"tag": 7}}, "the set has none"),
    ({"item_set": "seen", "item_filter": {"tag": 1}}, 'no item is left: "tag" $eq 1 leaves 0'),
    (of(exclude_keys="item 1"), "exclude_keys must be a list of keys, not 'item 1'"),
    (of(exclude_keys={"item 1": 1}), "exclude_keys must be a list of keys, not"),
    (of(exclude_keys=[1]), "the keys of this set are strings, not integers such as 1"),
    (of(exclude_keys=[["item 1"]]), "exclude_keys must hold keys, integers or strings"),
    (of(exclude_keys=["item 1", None]), "exclude_keys: a key is missing (null)"),
    (of(only_keys=["none"]), "no item is left: none of only_keys is a key"),
    (of(only_keys=[]), "no item is left: none of only_keys is a key"),
    (of(only_keys=["a"] * 10_001), "only_keys has 10,001 keys, the limit is 10,000"),
    ({"exclude_prompt": True}, "exclude_prompt chooses among the items of a registered set: name the set as item_set"),
    (of(exclude_prompt="yes"), "exclude_prompt must be true or false, not 'yes'"),
    (of(exclude_prompt=["item 1"]), "exclude_prompt must be true or false, not a list"),
    (of(bost={"tag": 1}), "there is no field bost: send boost beside item_set to"),
    (of(boost_kesy={"item 1": 1}), "there is no field boost_kesy: send boost_keys beside item_set to"),
    (of(boost={"tag": 1}), "boost steers ranked lists and exact draws: ask for use_beam_search and n"),
    (of(exclude_promt=True), "there is no field exclude_promt: send item_filter, exclude_keys, only_keys, exclude_pr"),
    (of(item_attributes=["tag", "tga"]), "there is no attribute 'tga': the set has \"tag\" (integer)"),
    (of(item_attributes=[]), "item_attributes must be true, or a list of one or more of their names; it is a list"),
    (of(item_attributes="tag"), "item_attributes must be true, or a list of one or more of their names; it is 'tag'"),
    ({"item_set": "one", "item_attributes": True}, "item_attributes: there is no attribute: the set has none"),
    ({"item_attributes": True}, "item_attributes are of the items of a registered set: name the set as item_set"),
    (of(item_atributes=["tag"]), "there is no field item_atributes: send item_attributes"),
    (of(filter={"tag": 1}), "there is no field 'filter': did you mean item_filter?"),
    (of(filters={"tag": 1}), "there is no field 'filters': did you mean item_filter?"),
    (of(metadata_filter={"tag": 1}), "there is no field 'metadata_filter': did you mean item_filter?"),
    (of(exclude_ids=[1]), "there is no field 'exclude_ids': did you mean exclude_keys?"),
    (of(only_items=[1]), "there is no field 'only_items': did you mean only_keys?"),
    (of(num_beams=4), "there is no field 'num_beams': did you mean width?"),
    (of(attributes=["year"]), "there is no field 'attributes': did you mean item_attributes?"),
    (of(item_fliter={"tag": 1}), "there is no field item_fliter: send item_filter"),
]
"""What chooses among the items of the named sets of `sets`, and cannot; and a part of what both engines say of it."""


def fields_of(package: str) -> set[str]:
    """The names and aliases of the fields of all request classes, by their names, in a package's protocol modules."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] not in ("protocol", "io_struct"):
            continue
        with contextlib.suppress(ImportError):
            for value in vars(importlib.import_module(module.name)).values():
                if not isinstance(value, type) or "Req" not in value.__name__:
                    continue
                if issubclass(value, BaseModel):
                    found |= value.model_fields.keys()
                    found |= {field.alias for field in value.model_fields.values() if field.alias}
                elif dataclasses.is_dataclass(value):
                    found |= {field.name for field in dataclasses.fields(value)}
    return found
