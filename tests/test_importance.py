"""DISC: dynamic importance sampling, as its paper has it; nearer to the distribution the more candidates it has."""

from __future__ import annotations

import numpy as np
import pytest
from distributions import END, Toy, fit, toys
from samples import SAMPLES

import itemset
from itemset.ranking.exact_sampling import CutOffError
from itemset.ranking.importance import Importance
from itemset.ranking.search import Found

TOYS = toys()


def sampled(toy: Toy, n: int, **options: int) -> Found:
    drawing = Importance(itemset.build(toy.items), n, end_token=END, **options)
    while drawing.passes:
        drawing.take(toy(drawing.passes))
    return drawing.result


def masses(toy: Toy) -> np.ndarray:
    """Of each item: the product of the legal masses along it, the weight of a candidate."""
    legal: dict[tuple[int, ...], float] = {}
    for (before, _), probability in toy.probability.items():
        legal[before] = legal.get(before, 0.0) + probability
    return np.array([np.prod([legal[item[:i]] for i in range(len(item) + 1)]) for item in toy.items])


@pytest.mark.parametrize("name", ["prefixes", "trap", "full", "wide"])
def test_what_one_candidate_gives_is_accepted_or_masked_sampling(name):
    """With one candidate: p(x) if it is accepted, with the set's probability; else what masked sampling draws."""
    toy = TOYS[name]
    weights, p = masses(toy), toy.weights()
    masked, mass = p / weights, p.sum()
    assert masked.sum() == pytest.approx(1)
    found = sampled(toy, SAMPLES, candidates=1, seed=3)
    assert fit(toy.counts([item.tokens for item in found.items]), p + (1 - mass) * masked) > 0.001
    about = [item.about for item in found.items]
    assert np.mean([one["accepted"] for one in about]) == pytest.approx(mass, abs=4 * (0.25 / SAMPLES) ** 0.5)
    known = dict(zip(toy.items, weights, strict=True))
    np.testing.assert_allclose([one["weight"] for one in about], [known[item.tokens] for item in found.items])
    assert {one["candidates"] for one in about if one["accepted"]} <= {1}
    assert {one["candidates"] for one in about if not one["accepted"]} <= {2}


def test_of_a_pool_items_come_in_proportion_to_their_weights():
    """Three candidates of a set of five: all pools can be counted."""
    toy = TOYS["trap"]
    weights, p, k = masses(toy), toy.weights(), 3
    masked, missed = p / weights, (1 - p.sum()) ** k
    pool = np.zeros(len(p))
    for chosen in np.ndindex(*[len(p)] * k):
        own = weights[list(chosen)]
        np.add.at(pool, list(chosen), np.prod(masked[list(chosen)]) * own / own.sum())
    found = sampled(toy, SAMPLES, candidates=k, seed=4)
    law = (1 - missed) * p / p.sum() + missed * pool
    assert fit(toy.counts([item.tokens for item in found.items]), law) > 0.001
    assert {item.about["candidates"] for item in found.items} <= {1, 2, 3, 6}


def test_the_most_passes_that_a_draw_takes():
    """One of the root, and of each token of each candidate one: some draws take so many, and none takes more."""
    items = [(10 * a + 100, 10 * b + 200, c + 300) for a in range(40) for b in range(40) for c in (0, 1)]
    toy = Toy.of(items, lambda before, token: 0.01)
    for candidates in (1, 2):
        passes = [sampled(toy, 1, candidates=candidates, seed=seed).passes for seed in range(20)]
        assert max(passes) == 1 + 2 * 3 * candidates


def test_draws_share_passes_and_depend_on_the_seed():
    toy = TOYS["wide"]
    few, many = sampled(toy, 3, candidates=4, seed=5), sampled(toy, 30, candidates=4, seed=5)
    assert few.items == many.items[:3]
    assert many.passes <= len(itemset.build(toy.items)) + 60
    assert many.of_item(0).keys() == {"draw", "logprob", "exact", "weight", "accepted", "candidates"}
    with pytest.raises(CutOffError, match="more than 4 passes"):
        sampled(toy, 3, candidates=4, seed=5, max_passes=4)
    with pytest.raises(ValueError, match="candidates is 0"):
        sampled(toy, 3, candidates=0)
    with pytest.raises(itemset.ItemSetError, match="follow no boosts"):
        Importance(itemset.view(itemset.build(toy.items), boost_keys={1: 50.0}), 3, end_token=END, candidates=1)
