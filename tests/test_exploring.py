"""Lists that explore: the best items, and draws from what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from distributions import fit
from test_search import END, Model, best_items, check, oracle

import itemset
from itemset.ranking.exact_sampling import CutOffError
from itemset.ranking.exploring import Exploring
from itemset.ranking.scored_tree import Pass
from itemset.ranking.search import Found, Search
from itemset.select.views import view


def catalogue(seed: int, most: int = 120) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 6, draw.integers(1, 5)).tolist() for _ in range(int(draw.integers(3, most)))]


def explored(found: Found) -> list[tuple[int, ...]]:
    return [item.tokens for item in found.items if item.about.get("explored")]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("made_by_engine", [False, True])
def test_the_best_come_first_and_then_others_of_the_set(seed: int, made_by_engine: bool) -> None:
    items, k, n = catalogue(seed), 1 + seed % 9, 1 + seed % 4
    made = itemset.build(items)
    search, model = Search(made, k, width=200, end_token=END), Model()
    exploring = Exploring(made, search, n, end_token=END)
    if made_by_engine:
        exploring.begin_with(best_items(model, Search(made, k, width=200, end_token=END)))
    found, ranked = best_items(model, exploring), oracle(items, END)
    check(found._replace(items=found.items[:k]), ranked[:k])
    others = explored(found)
    assert [item.tokens for item in found.items[k:]] == others
    assert len({*others}) == len(others) == min(n, max(0, len(ranked) - k))
    scores = {item: score for score, item in ranked}
    for item in found.items[k:]:
        assert item.about["logprob"] == pytest.approx(scores[item.tokens])
        assert item.score == item.about["logprob"]
    assert found.passes == sum(map(len, model.rounds))
    assert found.proven


@pytest.mark.parametrize("boosted", [False, True])
def test_they_are_drawn_by_the_model_and_the_boosts(boosted: bool) -> None:
    """The first of two draws, and both of them, as draws without replacement from what the three best leave."""
    items = sorted({tuple(item) for item in catalogue(7, 20)})
    adds = np.linspace(-1, 2, len(items)) * boosted
    whole = itemset.build([list(item) for item in items], attributes={"add": adds})
    made = view(whole, boost={"add": 1.0}) if boosted else whole
    weights = {item: np.exp(score + adds[items.index(item)]) for score, item in oracle([*map(list, items)], END)}
    left = sorted(weights, key=lambda item: -weights[item])[3:]
    counts, pairs = np.zeros(len(left)), np.zeros((len(left), len(left)))
    known = best_items(Model(), Search(made, 3, width=200, end_token=END))
    answers: dict[Any, Any] = {}

    def score(passes: Sequence[Pass]) -> list[Any]:
        for one in passes:
            if (one.tokens, one.known) not in answers:
                (answers[one.tokens, one.known],) = Model()([one])
        return [answers[one.tokens, one.known] for one in passes]

    for seed in range(700):
        exploring = Exploring(made, Search(made, 3, width=200, end_token=END), 2, end_token=END, seed=seed)
        exploring.begin_with(known)
        first, second = explored(best_items(score, exploring))
        counts[left.index(first)] += 1
        pairs[left.index(first), left.index(second)] += 1
    each = np.array([weights[item] for item in left])
    assert fit(counts, each) > 1e-3
    both = each[:, None] * each[None, :] / (each.sum() - each)[:, None]
    np.fill_diagonal(both, 0)
    assert fit(pairs, both) > 1e-3


def test_keys_of_the_best_are_no_items_of_the_rest() -> None:
    """Of a set in which different items share a key."""
    made = itemset.build([[1], [2], [3]], keys=[5, 5, 5])
    found = best_items(Model(), Exploring(made, Search(made, 1, width=9, end_token=END), 2, end_token=END))
    assert (len(found.items), explored(found)) == (1, [])


def test_a_limit_of_passes_is_an_error_of_the_draws() -> None:
    made = itemset.build(catalogue(3))
    search = Search(made, 2, width=2, end_token=END)
    exploring = Exploring(made, search, 9, end_token=END, max_passes=1)
    with pytest.raises(CutOffError):
        best_items(Model(), exploring)
