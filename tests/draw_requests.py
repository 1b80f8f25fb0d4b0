"""Draws as both engines are asked for them: good requests, bad ones, and what their answers must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from distributions import fit
from ranking import Ranked
from samples import SAMPLES
from sets import FIRST, tagged_items, tagged_keys

CHOSEN = {"item_set": "labels", "only_keys": list(range(3, 15))}
"""Twelve of the one-token items: their keys are their numbers."""
LABELS = [(FIRST + key,) for key in CHOSEN["only_keys"]]
AT_ONCE = 1_000

LEFT = {"item_set": "tagged", "item_filter": {"tag": {"$gte": 1}}, "exclude_keys": tagged_keys()[:370]}
"""All of these are drawn without replacement."""


def left() -> set[tuple[int, ...]]:
    return {tuple(item) for i, item in enumerate(tagged_items()) if i % 3 and i >= 370}


def check_fit(
    draw: Callable[..., list[tuple[tuple[int, ...], float]]], oracle: Callable[..., Ranked], temperature: float,
    boosts: dict[str, float],
) -> None:  # fmt: skip
    """Draws of the twelve follow what the model says of each. draw: of options, the items with their scores. boosts: of
    keys."""
    known = {item: score for score, item in oracle(LABELS)}
    found: list[tuple[tuple[int, ...], float]] = []
    for seed in range(max(1, SAMPLES // AT_ONCE)):
        found += draw(**CHOSEN, boost_keys=boosts, draws=AT_ONCE, seed=seed, temperature=temperature)
    np.testing.assert_allclose([score for _, score in found], [known[item] for item, _ in found], atol=2e-3)
    counts = np.array([sum(item == label for item, _ in found) for label in LABELS])
    scores = [known[label] + boosts.get(str(key), 0) for key, label in zip(CHOSEN["only_keys"], LABELS, strict=True)]
    assert fit(counts, np.exp(np.array(scores) / temperature)) > 1e-3


def check_choices(choices: Sequence[dict[str, Any]], n: int, keys: set[Any] | None = None) -> None:
    """What the choices of an OpenAI answer say of `n` draws. keys: of all items, each drawn once."""
    items = [choice["item"] for choice in choices]
    assert [item["draw"] for item in items] == list(range(1, n + 1))
    assert [choice["index"] for choice in choices] == list(range(n))
    assert all(item["exact"] is True and "open" not in item and item["key"] == item["keys"][0] for item in items)
    assert all(item["logprob"] < 0 and math.isfinite(item["logprob"]) for item in items)
    assert len({(item["passes"], item["rounds"]) for item in items}) == 1
    assert items[0]["passes"] >= items[0]["rounds"] >= 2
    if keys is not None:
        assert {item["key"] for item in items} == keys


def check_cut_off(choices: Sequence[dict[str, Any]]) -> None:
    assert all(0 < choice["item"]["open"] <= 1 and choice["item"]["passes"] == 3 for choice in choices)
    assert not all(choice["item"]["exact"] for choice in choices)


def check_importance(choices: Sequence[dict[str, Any]], n: int) -> None:
    """Draws by importance: four candidates at most, and as many in the pool."""
    items = [choice["item"] for choice in choices]
    assert [item["draw"] for item in items] == list(range(1, n + 1))
    assert all(0 < item["weight"] <= 1 and item["logprob"] <= math.log(item["weight"]) + 1e-6 for item in items)
    assert all(item["candidates"] == 8 or item["accepted"] for item in items)
    assert not any(item["exact"] for item in items)


BY_IMPORTANCE = {"draws": 6, "draw": "importance", "candidates": 4, "seed": 2}
CUT_OFF = {"item_set": "labels", "draws": 2, "max_passes": 3, "width": 2, "seed": 1}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"draws": 0}, "draws must be a number of draws, at least 1, not 0"),
    ({"draws": "5"}, "draws must be a number of draws, at least 1, not '5'"),
    ({"draws": 1_001}, "a request for 1,001 draws is longer than this engine's limit of 1,000"),
    ({"replace": "no"}, "replace must be true or false, not 'no'"),
    ({"approximate": 1}, "approximate must be true or false, not 1"),
    ({"seed": -1}, "seed must be an integer of 0 to 2"),
    ({"temperature": 0}, "temperature must be 1e-06 to 100 for draws, not 0"),
    ({"width": 0}, "width must be a number of forward passes in a round, at least 1, not 0"),
    ({"max_passes": 10_001}, "max_passes=10,001 is more than this engine's limit of 10,000"),
    ({"max_passes": 2}, "the draws need more than 2 passes, their limit: raise max_passes, or add approximate: true"),
    ({"top_p": 0.9}, "top_p would bend the model's distribution, and draws follow it as it is: leave top_p out"),
    ({"top_k": 5}, "top_k would bend the model's distribution"),
    ({"presence_penalty": 0.5}, "presence_penalty would bend the model's distribution"),
    ({"logit_bias": {"5": 1}}, "logit_bias would bend the model's distribution"),
    ({"n": 2}, "draws says how many items to draw: leave n out"),
    ({"use_beam_search": True}, "draws and a ranked list exclude each other: leave use_beam_search or draws out"),
    ({"stream": True}, "draws have no stream: leave it out"),
    ({"logprobs": 0}, "draws have no logprobs: leave it out"),
    ({"exact": True}, "exact is for ranked lists: draws are exact, leave it out"),
    ({"item_set": None}, "draws draws items of a set: name the set as item_set"),
    ({"item_set": "raged"}, "did you mean 'ragged'"),
    ({"draws": None}, "replace is for draws: add draws, or leave it out"),
    ({"drwas": 3}, "there is no field"),
    ({"aproximate": True}, "did you mean approximate?"),
    ({"draw": 2}, 'draw must be "exact" or "importance", not 2'),
    ({"draw": "importance"}, 'draw: "importance" takes candidates: K, at most 64'),
    ({"draw": "importance", "candidates": 65}, 'draw: "importance" takes candidates: K, at most 64'),
    ({"draw": "importance", "candidates": 2}, "replace is for exact draws"),
    ({"candidates": 2}, 'candidates is for draw: "importance"; to choose among items send only_keys'),
]
"""What changes a good request for draws of `ragged` into a bad one, and a part of what is said then."""
GOOD = {"item_set": "ragged", "draws": 2, "replace": False, "max_tokens": 40, "top_p": 1, "n": 1, "stream": False}
LOST: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"draws": 2}}, "there is no field draws in structured_outputs"),
    ({"extra_body": {"draws": 2}}, "there is no field draws in extra_body"),
    ({"extra_body": {"draw": "importance"}}, "there is no field draw in extra_body"),
]
"""Where the word would be lost."""
