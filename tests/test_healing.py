"""Which prompts give up the space at their end, and whose items take it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live import OPTIONS
from real_tokenizers import NAMES, tokenizer

import itemset
from itemset.embedded.placement import JSON
from itemset.serving.catalogue import Catalogue
from itemset.serving.config import StaticConfig
from itemset.serving.front.healing import HEALED, MOST, Healing, unhealed
from itemset.serving.front.request import ItemRequest
from itemset.text import encode, space_token

TEXTS = ["red apple", "blue", "12 Monkeys (1995)"]


def healing(folder: Path, name: str, **sets: Any) -> Healing:
    files = {}
    for called, one in sets.items():
        one.save(folder / f"{called}.itemset")
        files[called] = str(folder / f"{called}.itemset")
    options = {**OPTIONS, "item_set_cache": str(folder / "cache"), "item_sets": files}
    return Healing(Catalogue(StaticConfig.of(options)), tokenizer(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_space_at_the_end_of_a_text_is_a_token(name: str) -> None:
    own = tokenizer(name)
    space = space_token(own)
    for text in ("A film: ", "Ein Film für Müßige, bitte: ", "千 ", "x\n1. "):
        *_, last = own.encode(text, add_special_tokens=False)
        assert last == space, text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_healed(name: str, tmp_path: Path) -> None:
    letters = encode(list("red"), tokenizer(name), escape="text")[0].tolist()
    sets = {
        "plain": itemset.build_text(TEXTS, tokenizer(name)),
        "spaced": itemset.build_text(TEXTS, tokenizer(name), prefix=" "),
        "inside": itemset.build_text(TEXTS, tokenizer(name), escape="json"),
        "ids": itemset.build([[70, 71], [80, 90]]),
        "codes": itemset.build([letters], tokenizer=tokenizer(name)),
        "digits": itemset.build_text(["1", "2", "3"], tokenizer(name)),
    }
    one = healing(tmp_path, name, **sets)
    asked = ItemRequest("plain")
    of = one._catalogue.reference("plain")
    assert one.healed(asked, "A film: ") == replace(asked, escape=HEALED, reference=of)
    assert unhealed(one.healed(asked, "A film: ")) == replace(asked, reference=of)
    assert one.healed(again := replace(asked, escape=HEALED), "A film: ") is again
    choice = ItemRequest(choice=TEXTS)
    assert one.healed(choice, "A film: ") == replace(choice, escape=HEALED)
    for prompt in ("A film:", "A film:  ", "A film:\n", "A film:\n ", "A film:\u00a0", " ", ""):
        assert one.healed(asked, prompt) is asked, prompt
    for other in (
        *map(ItemRequest, ("spaced", "inside", "ids", "codes", "digits", "unknown")),
        ItemRequest(choice=["1", "22"]),
        ItemRequest(choice={"a": 1}),
        ItemRequest(choice=[5, "", "\ud800"]),
        ItemRequest(constraint=(JSON, "{}")),
        replace(asked, after="</think>"),
        replace(asked, weighed="item_logprobs"),
        replace(asked, escape="json"),
    ):
        assert one.healed(other, "A film: ") is other, other


def test_a_large_set_is_not_spelt_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = healing(tmp_path, "tiny", plain=itemset.build_text(TEXTS, tokenizer("tiny")))
    monkeypatch.setattr("itemset.serving.front.healing.MOST", len(TEXTS) - 1)
    assert one.healed(asked := ItemRequest("plain"), "A film: ") is asked
    assert MOST >= 100_000
