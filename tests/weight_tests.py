"""What holds of the weights of answers of either engine: those of the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
from engine_words import EOS, PROMPT, Answer, Item, asked
from ranking import weights_of
from sets import NamedSet, tagged_items

SETS = ("prefixes", "ragged", "labels", "one", "tagged", "fixed")
Oracle = Callable[[Collection[Item], Item], tuple[float, float]]


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return weights_of(tiny_model)


def weighed(name: str, **words: Any) -> dict[str, Any]:
    return asked(name, return_set_weight=True, **words)


def check_weight(answer: Answer, oracle: Oracle, items: Collection[Item]) -> None:
    assert answer.tokens[-1] == EOS
    weight, score = oracle(items, answer.item)
    item = answer.said["item"]
    assert item["set_weight"] == pytest.approx(weight, abs=2e-3)
    assert score - 2e-3 <= item["set_weight"] <= 0
    assert "key" in item
    assert not [word for word, value in answer.said.items() if "logprob" in word and value is not None]


def check_weights(
    engine: Any, named_sets: dict[str, NamedSet], oracle: Oracle, greedy: dict[str, Any], bent: dict[str, Any]
) -> None:
    """In one batch with others. greedy: for an engine that can do no other. bent: what changes its distribution."""
    names = [*(name for name in SETS for _ in range(2)), "ragged"]
    words = [weighed(name, **greedy) for name in names[:-1]] + [weighed("ragged", **(greedy or bent))]
    words += [weighed("tagged", exclude_keys=["item 1"], **greedy)]
    others = [asked("ragged", logprobs=2, **greedy), {"max_tokens": 6, "logprobs": 1}]
    others += [{"choice": ["Paris"], "max_tokens": 40, **greedy}]
    *answers, without, ragged, free, paris = engine.ask([PROMPT] * len(words + others), words + others)
    for name, answer in zip(names, answers, strict=True):
        check_weight(answer, oracle, named_sets[name].items)
    check_weight(without, oracle, {tuple(item) for i, item in enumerate(tagged_items()) if i != 1})
    assert len({answer.said["item"]["set_weight"] for answer in answers}) > 5
    assert not any("set_weight" in (answer.said.get("item") or {}) for answer in (ragged, free, paris))
    for answer in (ragged, free):
        columns = answer.said.get("logprobs") or answer.said.get("output_token_logprobs")
        assert len(columns) == len(answer.tokens)
    if not greedy:
        for answer in engine.ask([PROMPT], weighed("ragged", n=3, temperature=0.7)):
            check_weight(answer, oracle, named_sets["ragged"].items)
