"""What holds of speculation in either engine: drafts change neither answers nor how often each comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from engine_words import CITIES, PROMPT, Answer, asked, prompts
from ranking_tests import check_lists, lists_of
from samples import SAMPLES, TEMPERATURE
from sets import NamedSet

import itemset

NAMES = ["fixed", "ragged", "prefixes", "large", "one"]
MOST = {5: 18.5, 6: 20.5}  # bounds of chi-square by the number of items, in 99.9 % of cases
FREE = {"temperature": 0, "max_tokens": 9}


def greedy(names: Sequence[str]) -> list[dict[str, Any]]:
    """Requests for items of these sets, for one of the cities, and for a text without a set."""
    cities = {"choice": CITIES, "temperature": 0, "max_tokens": 40}
    return [*(asked(name, temperature=0) for name in names), cities, FREE]


def uneven(count: int) -> list[list[int]]:
    """Prompts of which some take several steps to be read."""
    return [list(range(3 + i, 12 + 9 * i)) for i in range(count)]


def repeating(named_sets: dict[str, NamedSet], count: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """Prompts that hold items of a set twice, and what is asked of each: their n-grams propose some drafts inside
    the set, and some outside."""
    asking, words = list[Any](), list[dict[str, Any]]()
    for name in ("large", "ragged", "prefixes"):
        items = sorted(named_sets[name].items)[:6]
        turned = [[*items[i:], *items[:i]] for i in range(count)]
        asking += [([token for item in some for token in item] * 2 + list(some[0][:1]))[-150:] for some in turned]
        words += [asked(name, temperature=0)] * count
    return asking, words


def check_same(engine: Any, without: Any, asking: Sequence[Any], words: list[dict[str, Any]]) -> list[Answer]:
    """An engine that speculates, or that differs otherwise, gives the answers and lists of one without that."""
    found, expected = (one.ask(list(asking), words) for one in (engine, without))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    check_lists(lists_of(engine), lists_of(without))
    return found


def check_sampled(engine: Any, named_sets: dict[str, NamedSet], names: Sequence[str], **words: Any) -> list[Answer]:
    """Sampled answers are items of their sets, also beside one of a list of texts and one without a set."""
    others = [{"max_tokens": 7}, {"choice": CITIES, "max_tokens": 40}]
    answers = engine.ask(prompts(len(names) + 2), [*(asked(name, **words) for name in names), *others])
    for name, answer in zip(names, answers, strict=False):
        assert answer.item in named_sets[name].items
    assert answers[-1].text in CITIES
    return answers[:-2]


def check_distribution(engine: Any, expected: np.ndarray, items: list[list[int]]) -> list[Answer]:
    """Chi-square over whole items of the set `few`, each drawn with its drafts. expected: each one's probability."""
    samples = SAMPLES // 64 * 8
    expected = expected * samples
    answers = engine.ask([PROMPT] * 8, asked("few", temperature=TEMPERATURE, n=samples // 8))
    counts = Counter(answer.item for answer in answers)
    observed = np.array([counts[tuple(item)] for item in items])
    assert observed.sum() == samples
    assert ((observed - expected) ** 2 / expected).sum() < MOST[len(items)], (observed, expected)
    return answers


def saved(path: Any, items: Any) -> dict[str, str]:
    """The option that registers these items as the set `few`, in a file of this folder."""
    itemset.build(items).save(path / "few.itemset")
    return {"few": str(path / "few.itemset")}
