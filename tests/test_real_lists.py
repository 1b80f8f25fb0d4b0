"""Lists that people have, built by the command: every text comes back with all its keys, in three tokenizers.

Those of packages that the tests' environment has anyway always run. STATIC_REAL_LISTS=FOLDER takes all others, too:
pip and apt-get fetch their packages into that folder, once.
"""

from __future__ import annotations

import functools
import json
import mimetypes
import os
import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from public_lists import (
    LISTS,
    RealList,
    Row,
    aws_operations,
    converted,
    enums,
    keys_by_text,
    rows_of,
    shipped,
    source_of,
)
from real_tokenizers import NAMES, tokenizer

import itemset
from itemset import cli
from itemset.select.filters import passing

FOLDER = os.environ.get("STATIC_REAL_LISTS", "")
slow = pytest.mark.skipif(not FOLDER, reason="STATIC_REAL_LISTS names no folder for the packages")


def languages(package: Path) -> Iterator[Row]:
    """What twelve languages call all that babel knows."""
    from babel import Locale

    for code in ("ar", "de", "el", "en", "fi", "hi", "ja", "ko", "ru", "th", "vi", "zh"):
        for one, name in Locale(code).languages.items():
            yield {"name": name, "key": f"{code} {one}", "said in": code}


def characters(package: Path) -> Iterable[Row]:
    named = ((code, unicodedata.name(chr(code), "")) for code in range(0x3000))
    return ({"name": name, "code": code, "kind": unicodedata.category(chr(code))} for code, name in named if name)


def kinds_of_files(package: Path) -> Iterable[Row]:
    return ({"kind": kind, "suffix": suffix} for suffix, kind in mimetypes.MimeTypes(filenames=()).types_map[1].items())


def databases(name: str, key: str, attribute: str, value: Any) -> RealList:
    file = shipped(f"pycountry/databases/{name}.json")
    return RealList("pycountry", file, "name", key, (attribute,), {attribute: value})


HERE = {
    "regions": databases("iso3166-2", "code", "type", "Parish"),  # 108 names are those of several
    "ISO 639-3": databases("iso639-3", "alpha_3", "alpha_2", {"$exists": True}),  # `nan` is a language
    "currencies": databases("iso4217", "alpha_3", "numeric", "008"),
    "aws": RealList("botocore", converted("aws.jsonl", aws_operations), "operation", None, ("service",),
        {"service": "s3"}),
    "languages": RealList("babel", converted("a.jsonl", languages), "name", "key", ("said in",), {"said in": "ja"}),
    "characters": RealList("numpy", converted("a.jsonl", characters), "name", "code", ("kind",), {"kind": "Nd"}),
    "kinds of files": RealList("numpy", converted("a.jsonl", kinds_of_files), "kind", "suffix"),
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a list of an installed package, made once."""

    @functools.cache
    def of(what: str) -> Path:
        found = find_spec(HERE[what].package)
        if found is None or found.origin is None:
            pytest.skip(f"{HERE[what].package} is not installed")
        return HERE[what].file(Path(found.origin).parents[1], tmp_path_factory.mktemp("made"))

    return of


def holds(one: RealList, source: Path, name: str, folder: Path) -> None:
    """Build a list, and hold all that the index says against the file."""
    own, rows, index = tokenizer(name), rows_of(source), folder / "a.itemset"
    own.save_pretrained(folder / "tokenizer")
    assert cli.main(one.command(source, str(folder / "tokenizer"), index)) == 0
    item_set, keys = itemset.load(index), keys_by_text(one, rows)
    assert (len(item_set), len(item_set.keys)) == (len(keys), len(rows))
    sample = random.Random(0).sample(list(keys), min(10_000, len(keys)))
    assert list(item_set.lookup_text(sample, own)) == [keys[text][0] for text in sample]
    numbers = np.random.default_rng(0).integers(0, len(item_set), 2_000)
    tokens = item_set.items_at(numbers)
    assert item_set.keys_of(tokens) == [keys[own.decode(item)] for item in tokens]
    if one.condition:
        left = item_set.keys.filter(passing(dict(one.condition), item_set.attributes))
        expected = [key for of in keys_by_text(one, rows, passing=True).values() for key in of]
        assert sorted(left.to_pylist()) == sorted(expected)
        assert expected
        some = itemset.view(item_set, dict(one.condition))
        assert {key for of in some.keys_of(some.items()) for key in of} == set(expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", HERE)
def test_a_list_of_an_installed_package(what: str, name: str, here: Callable[[str], Path], tmp_path: Path) -> None:
    holds(HERE[what], here(what), name, tmp_path)


@slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", LISTS)
def test_a_list_of_a_package_that_is_fetched(what: str, name: str, tmp_path: Path) -> None:
    holds(LISTS[what], source_of(what, Path(FOLDER)), name, tmp_path)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_enums_of_real_schemas_become_sets(name: str) -> None:
    """Each text of each is an answer, and nothing that only begins as one."""
    from holes import setting
    from test_long_alternations import lists, spells

    from itemset.embedded.composite_grammar import Composite
    from itemset.embedded.placement import JSON

    at, made = setting(name), lists(name, 100)
    for what, texts in enums(Path(FOLDER)).items():
        schema = {"type": "object", "properties": {"name": {"enum": texts}}, "required": ["name"]}
        compiled = made.get(JSON, json.dumps(schema | {"additionalProperties": False}))
        assert compiled is not None, what
        for text in random.Random(0).sample(texts, 10):
            written = json.dumps(text, ensure_ascii=False)
            assert spells(at, Composite(*compiled), f'{{"name": {written}}}'.encode())
            assert not spells(at, Composite(*compiled), f'{{"name": {written[:-1]}zq"}}'.encode())
