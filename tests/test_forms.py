"""One registered set in every place: its items in JSON strings and inside other texts, made of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import changes
import pytest
import xgrammar
from holes import FILMS
from live import OPTIONS
from real_tokenizers import NAMES, tokenizer

import itemset
from itemset import published
from itemset.embedded.holes import Vocabulary
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.serving.catalogue import Catalogue, RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.front import forms as front_forms
from itemset.serving.front.admission import Checks
from itemset.serving.front.beside import at_once
from itemset.serving.front.embedded_sets import Constraints
from itemset.serving.front.forms import Forms
from itemset.serving.front.request import ItemRequest
from itemset.serving.wire import FORM, name_of

WORDS = Words("max_model_len", "--max-model-len", "min_tokens", "--additional-config")
SPELT = [None, "json", "text"]
PLACES = [(escape, place) for escape in SPELT for place in ("json", "text")] + [(None, "space")]
LOG = logging.getLogger("test")


def options(folder: Path, **sets: Any) -> dict[str, Any]:
    return {**OPTIONS, "item_set_cache": str(folder / "cache"), "item_sets": sets}


def told(item_set: ItemSet) -> dict[tuple[int, ...], Any]:
    """What a set says of its items, by their tokens."""
    items = item_set.items()
    attributes = item_set.attributes_of(items, item_set.attributes.column_names)
    each = zip(items, item_set.keys_of(items), attributes, strict=True)
    return {tuple(item): (keys, of_keys) for item, keys, of_keys in each}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("escape", "place"), PLACES)
def test_a_form_is_the_set_that_a_build_for_its_place_gives(name: str, escape: Any, place: Any, tmp_path: Path) -> None:
    texts = [*FILMS, FILMS[0], FILMS[10]]  # two have two keys
    first = [text[0] if text[0].isalpha() else None for text in texts]  # texts are stored as numbers, some are missing
    words = [text.split() or None for text in texts]
    how: dict[str, Any] = {"attributes": {"length": [len(text) for text in texts], "first": first, "words": words}}
    own = itemset.build_text(texts, tokenizer(name), escape=escape, **how)
    own.save(tmp_path / "films.itemset")
    config = StaticConfig.of(options(tmp_path, films=str(tmp_path / "films.itemset")))
    front = Catalogue(config)
    forms, of = Forms(front, config, tokenizer(name), LOG), front.reference("films")
    reference = at_once(forms.reference(of, place, here=True))
    expected = itemset.build_text(texts, tokenizer(name), escape=place, **how)
    assert told(front[reference]) == told(expected)
    assert (reference == of) == (told(own) == told(expected))
    assert front.version_fields(reference) == front.version_fields(of)
    assert name_of(reference) == "films"
    assert told(Catalogue(config)[reference]) == told(expected)  # as an engine has it, of the reference alone


def test_a_form_follows_its_set(tmp_path: Path) -> None:
    """Each version has its own, which the next start finds; a request keeps the one that it began with."""
    own, folder = tokenizer("tiny"), tmp_path / "quotes"

    def publish(texts: list[str]) -> published.Version:
        itemset.build_text(texts, own, attributes={"length": list(map(len, texts))}).save(tmp_path / "next.itemset")
        return published.publish(tmp_path / "next.itemset", folder)

    publish(['a "b"', "c"])
    config = StaticConfig.of(options(tmp_path, quotes=str(folder)))
    checks = Checks(config, own, WORDS, ModelLimits(2112, 256, 0, {1}))
    asked = ItemRequest(item_set="quotes", escape="json")
    first = checks.made(asked)
    assert checks.made(asked).reference == first.reference
    assert {text: len(checks.made(ItemRequest(item_set="quotes", selection={"item_filter": {"length": length}},
            escape="json")).item_set) for text, length in (("c", 1), ("a", 5))} == {"c": 1, "a": 1}  # fmt: skip
    engine, version = Catalogue(config), publish(['a "b"', "d\\e", "f"])
    checks.catalogue.serve(checks.open("quotes", version.name, version.path))
    second = checks.made(asked)
    assert (len(first.item_set), len(second.item_set)) == (2, 3)
    assert sorted(own.batch_decode(second.item_set.items())) == ['a \\"b\\"', "d\\\\e", "f"]
    assert [len(engine[one.reference]) for one in (first, second)] == [2, 3]
    assert checks.catalogue.version_fields(second.reference) == {"item_set_version": version.name}
    last = second.reference
    del first, second  # a form that was closed since, and whose copy was deleted, is there again
    checks.catalogue._inline.clear()
    for copy in (tmp_path / "cache").iterdir():
        if copy.is_file() and copy.name not in {"lock", version.name}:
            copy.unlink()
    assert len(checks.made(asked).item_set) == 3
    checks.catalogue._inline.clear()  # and one whose index is damaged
    for copy in (tmp_path / "cache").glob(f"{last.removeprefix(FORM).partition('@')[0]}*"):
        copy.unlink()
    changes.flip(tmp_path / "cache" / "built" / f"{version.name}-json.itemset")
    assert len(checks.made(asked).item_set) == 3
    built = {one.name: one.stat().st_mtime_ns for one in os.scandir(tmp_path / "cache" / "built") if "json" in one.name}
    assert len(built) == 2
    again = Checks(StaticConfig.of(options(tmp_path, quotes=str(folder))), own, WORDS, ModelLimits(2112, 256, 0, {1}))
    assert again.made(asked).reference == checks.made(asked).reference


def two_sets(folder: Path) -> Checks:
    own = tokenizer("tiny")
    for name in ("a", "b"):
        itemset.build_text([f'{name} "1"'], own).save(folder / f"{name}.itemset")
    config = StaticConfig.of(options(folder, **{name: str(folder / f"{name}.itemset") for name in ("a", "b")}))
    return Checks(config, own, WORDS, ModelLimits(2112, 256, 0, {1}))


def test_requests_share_the_making_of_a_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for one hold up no other set, and one that goes leaves it to the others."""
    checks, make, begun, opened = two_sets(tmp_path), Forms._make, list[str](), threading.Event()

    def gated(forms: Forms, item_set: ItemSet, name: str, *given: Any) -> None:
        begun.append(name)
        assert name == "b" or opened.wait(60)
        make(forms, item_set, name, *given)

    monkeypatch.setattr(Forms, "_make", gated)

    async def ask() -> list[Any]:
        waiting = [asyncio.create_task(checks.prepare(ItemRequest(item_set="a", escape="json"))) for _ in range(5)]
        await asyncio.wait_for(checks.prepare(ItemRequest(item_set="b", escape="json")), 60)
        waiting.pop().cancel()
        opened.set()
        return await asyncio.gather(*waiting)

    assert len({one.reference for one in asyncio.run(ask())}) == 1
    assert begun == ["a", "b"]


def test_a_form_that_cannot_be_made_is_not_tried_by_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, tried = two_sets(tmp_path), list[int]()

    def full(*given: Any) -> None:
        tried.append(1)
        raise OSError(28, "No space left on device", "a file")

    for make, remembered, times in ((full, 60, 1), (full, 0, 2), (full, 0, 3)):
        monkeypatch.setattr(Forms, "_make", make)
        monkeypatch.setattr(front_forms, "REMEMBERED", remembered)
        for _ in range(1 if times > 1 else 3):
            with pytest.raises(ItemSetError, match="No space left on device: make room there"):
                checks.made(ItemRequest(item_set="a" if times == 1 else "b", escape="json"))
        assert len(tried) == times


def test_token_ids_have_one_spelling(tmp_path: Path) -> None:
    own = tokenizer("tiny")
    (quote,) = own.encode('"', add_special_tokens=False)
    itemset.build([[quote, 40], [41]]).save(tmp_path / "ids.itemset")
    itemset.build([[40], [41]]).save(tmp_path / "plain.itemset")
    paths = {name: str(tmp_path / f"{name}.itemset") for name in ("ids", "plain")}
    config = StaticConfig.of(options(tmp_path, **paths))
    catalogue = Catalogue(config)
    forms, plain, ids = Forms(catalogue, config, own, LOG), *map(catalogue.reference, ("plain", "ids"))
    assert at_once(forms.reference(plain, "json", here=True)) == plain
    assert at_once(forms.reference(ids, "text", here=True)) == ids
    with pytest.raises(RefusedError, match=r"'ids' is of token ids, .* must be escaped in a JSON string: build it of"):
        at_once(forms.reference(ids, "json", here=True))


def test_a_constraint_is_of_one_version_of_each_set(tmp_path: Path) -> None:
    """One that is published while a form is made changes nothing: sizes and items are of the same version."""
    own, folder = tokenizer("tiny"), tmp_path / "names"

    def publish(count: int) -> published.Version:
        itemset.build_text([f'"{i}"' for i in range(count)], own).save(tmp_path / "next.itemset")
        return published.publish(tmp_path / "next.itemset", folder)

    publish(9)
    checks = Checks(StaticConfig.of(options(tmp_path, names=str(folder))), own, WORDS, ModelLimits(2112, 256, 0, {1}))
    info = xgrammar.TokenizerInfo.from_huggingface(own, vocab_size=2112)
    constraints = Constraints(checks, lambda: Vocabulary(info), options={})
    prepare = checks.prepare

    async def late(*given: Any, here: bool = False) -> Any:
        if not here:  # else it is asked for sizes
            checks.prepare = prepare  # type: ignore[method-assign]
            version = publish(3)
            checks.catalogue.serve(checks.open("names", version.name, version.path))
        return await prepare(*given, here=here)

    checks.prepare = late  # type: ignore[method-assign]
    names = {"type": "string", "item_set": "names"}
    both = {"properties": {"many": {"type": "array", "items": names, "uniqueItems": True, "minItems": 6}, "one": names}}
    made = asyncio.run(constraints.prepare("json", both | {"type": "object", "required": ["many", "one"]}))
    assert made is not None
    assert {len(hole.made.item_set) for hole in made.holes} == {9}
