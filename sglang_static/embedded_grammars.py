"""Item sets inside SGLang's other grammars: JSON schemas, structural tags and EBNF with holes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from itemset.embedded.rewrite import mentions
from itemset.serving.body_constraints import holds_sets
from itemset.serving.constraint import EBNF, JSON, TAG, Constraint
from itemset.serving.request_fields import REFERENCE, SLATE
from sglang_static.request import CONSTRAINT, places, without_words_anywhere

KINDS = {"json_schema": JSON, "ebnf": EBNF, "structural_tag": TAG}
"""The constraints, in `sampling_params`, in which item sets can stand."""
_DISGUISE = f"item_set {secrets.token_hex(8)} "  # begins no client's text


def disguised(tag: Any) -> Any:
    """A structural tag of a body, with what SGLang's body model takes (xgrammar's `Format`) in place of its sets: a
    constant text, out of which `constraint_of` takes the set again."""

    def constant(node: dict[str, Any]) -> dict[str, Any] | None:
        if node.get("type") != REFERENCE:
            return None
        return {"type": "const_string", "value": _DISGUISE + json.dumps(node)}

    return _replaced(tag, constant) if mentions(tag) else tag


def _undisguised(tag: str) -> str:
    def item_set(node: dict[str, Any]) -> dict[str, Any] | None:
        value = node.get("value")
        if not isinstance(value, str) or not value.startswith(_DISGUISE):
            return None
        given: dict[str, Any] = json.loads(value.removeprefix(_DISGUISE))
        return given

    return json.dumps(_replaced(json.loads(tag), item_set)) if _DISGUISE in tag else tag


def _replaced(node: Any, other: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Any:
    """The same with other formats in place of those for which there is one; JSON schemas are left as they are."""
    if isinstance(node, list):
        return [_replaced(one, other) for one in node]
    if not isinstance(node, dict):
        return node
    if (replacement := other(node)) is not None:
        return replacement
    return {key: value if key == "json_schema" else _replaced(value, other) for key, value in node.items()}


def constraint_of(params: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The kind and the text of the constraint of one prompt; None if there is none in which sets can stand.

    fields: of its body, as for `request.places`.
    """
    for place in places(params, fields):
        if place.get(SLATE) is not None:
            return SLATE, place[SLATE]
    given = next(((kind, params[name]) for name, kind in KINDS.items() if params.get(name)), None)
    return (TAG, _undisguised(given[1])) if given is not None and given[0] == TAG else given


def names_sets(params: Mapping[str, Any]) -> bool:
    """Whether a set stands in the constraint of one prompt."""
    given = constraint_of(params, {})
    return given is not None and holds_sets(*given)


def with_constraint(params: Mapping[str, Any], constraint: Constraint) -> dict[str, Any]:
    """The same parameters, with the constraint in place of what it was made of."""
    own = without_words_anywhere(params)
    return {**{key: value for key, value in own.items() if key not in KINDS}, CONSTRAINT: constraint}


def validate(kind: str, spec: str) -> None:
    """Raises ValueError for what SGLang refuses with xgrammar (constrained/xgrammar_backend.py, dispatch_json)."""
    if kind == JSON:
        from sglang.srt.constrained.json_schema_validation import validate_xgrammar_json_schema

        validate_xgrammar_json_schema(json.loads(spec))
