"""Draws from a set: the model's own distribution given the set, whatever the rounds, in as few passes as are said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from distributions import END, Toy, fit, toys
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie
from samples import SAMPLES
from strategies import item_sets
from test_search import END as LAST
from test_search import VOCABULARY, Model, log_probs, oracle
from views import made

import itemset
from itemset.ranking.exact_sampling import CutOffError, Drawing
from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import Found

TOYS = toys()
SURE = 0.001  # tests fail by chance with this probability for other seeds; these are known


@cache
def logs(prefix: tuple[int, ...]) -> np.ndarray:
    return log_probs(prefix)


def random_model(passes: Sequence[Pass]) -> list[Answer]:
    """That of `test_search`, each prefix scored once for all tests."""
    return [
        (
            np.array([logs(one.tokens[:i])[one.tokens[i]] for i in range(one.known, len(one.tokens))]),
            logs(one.tokens)[one.after],
        )
        for one in passes
    ]


def drawn(score: Callable[[Sequence[Pass]], Sequence[Answer]], drawing: Drawing) -> Found:
    while drawing.passes:
        drawing.take(score(drawing.passes))
    return drawing.result


def tokens(found: Found) -> list[tuple[int, ...]]:
    return [item.tokens for item in found.items]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.3])
@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_draws_follow_the_distribution(toy, temperature):
    found = drawn(toy, Drawing(itemset.build(toy.items), SAMPLES, end_token=END, temperature=temperature, seed=5))
    assert fit(toy.counts(tokens(found)), toy.weights(temperature)) > SURE
    assert all(item.about["exact"] for item in found.items)
    whole = dict(zip(toy.items, np.log(toy.weights()), strict=True))
    np.testing.assert_allclose([item.score for item in found.items], [whole[item.tokens] for item in found.items])


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_draws_of_one_request_are_independent(toy):
    found = tokens(drawn(toy, Drawing(itemset.build(toy.items), SAMPLES, end_token=END, seed=6)))
    p = toy.weights()
    place = {item: min(i, 3) for i, item in enumerate(sorted(toy.items, key=lambda x: -p[toy.items.index(x)]))}
    shares = np.bincount([place[item] for item in toy.items], weights=p)
    pairs = np.zeros((4, 4))[: len(shares), : len(shares)]
    np.add.at(pairs, ([place[item] for item in found[::2]], [place[item] for item in found[1::2]]), 1)
    assert fit(pairs, np.outer(shares, shares)) > SURE


@pytest.mark.parametrize(("name", "temperature"), [("prefixes", 1.0), ("prefixes", 0.5), ("trap", 1.0), ("tiny", 1.0)])
@pytest.mark.slow
def test_without_replacement_the_second_is_drawn_from_what_is_left(name, temperature):
    """The law of ordered pairs: p(x) p(y) / (1 - p(x))."""
    toy = TOYS[name]
    built, number = itemset.build(toy.items), {item: i for i, item in enumerate(toy.items)}
    pairs = np.zeros((len(number), len(number)))
    for seed in range(SAMPLES // 2):
        first, second = tokens(
            drawn(toy, Drawing(built, 2, end_token=END, seed=seed, replace=False, temperature=temperature))
        )
        pairs[number[first], number[second]] += 1
    p = toy.weights(temperature)
    p /= p.sum()
    expected = np.outer(p, p) / (1 - p)[:, None]
    np.fill_diagonal(expected, 0)
    assert fit(pairs, expected) > SURE


@settings(max_examples=12, deadline=None)
@given(
    items=item_sets(vocab_size=VOCABULARY - 1, max_items=20),
    n=st.integers(1, 30),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_draws_depend_on_the_seed_alone(items, n, seed, data):
    """Not on the width, on what a set was made from, nor on how many are drawn."""
    options: dict[str, Any] = {"seed": seed, "replace": data.draw(st.booleans()), "end_token": LAST}
    options["temperature"] = data.draw(st.sampled_from([1.0, 0.4]))
    first = drawn(random_model, Drawing(itemset.build(items), n, width=1, **options))
    for width in (4, 64, None):
        again = drawn(random_model, Drawing(made(items), n, width=width, **options))
        assert tokens(again) == tokens(first)
        assert again.rounds <= first.rounds
        assert again.passes >= first.passes
    few = drawn(random_model, Drawing(itemset.build(items), max(1, n // 2), **options))
    assert tokens(few) == tokens(first)[: len(few.items)]
    scores = {item: score for score, item in oracle(items, LAST)}
    assert [item.score for item in first.items] == pytest.approx([scores[item.tokens] for item in first.items])
    if not options["replace"]:
        assert len(set(tokens(first))) == len(first.items) == min(n, len(scores))


def test_no_prefix_is_scored_twice_and_no_round_without_need():
    items = np.random.default_rng(0).integers(0, 70, (2_000, 4)).tolist()
    model = Model()
    found = drawn(model, Drawing(itemset.build(items), 100, end_token=LAST, seed=1))
    asked = [one.tokens for passes in model.rounds for one in passes]
    assert len(asked) == len(set(asked)) == found.passes
    assert found.rounds == len(model.rounds)
    assert model.rounds[0][0].tokens == ()


def expected_passes(masses: np.ndarray, below: np.ndarray, n: int) -> float:
    """Return how many passes n draws with replacement take on average, without any ahead of need.

    masses: of each prefix that a pass may score. below: of the set's items below it; the first prefix is the root.
    """
    each = masses / (masses + below[0] - below)
    return float(np.sum(1 - (1 - each) ** n))


def passes_of(toy: Toy) -> tuple[np.ndarray, np.ndarray]:
    """Of each prefix that a pass may score: its probability, and that of the items below it. The root comes first."""
    weights = dict(zip(toy.items, toy.weights(), strict=True))
    masses, below = [1.0], [float(toy.weights().sum())]

    def visit(node: dict, prefix: tuple[int, ...], mass: float) -> None:
        for token, child in node.items():
            if token is None:
                continue
            longer, more = (*prefix, token), mass * toy.probability[prefix, token]
            masses.append(more)
            below.append(sum(weight for item, weight in weights.items() if item[: len(longer)] == longer))
            inner, at = child, longer
            while len(inner) == 1 and None not in inner:  # what is certain is scored with it
                (token,) = inner
                more *= toy.probability[at, token]
                inner, at = inner[token], (*at, token)
            if set(inner) != {None}:
                visit(inner, at, more)

    visit(dict_trie(toy.items), (), 1.0)
    return np.array(masses), np.array(below)


@pytest.mark.parametrize("n", [1, 10])
@pytest.mark.parametrize("name", ["prefixes", "trap", "full", "wide", "tiny"])
@pytest.mark.slow
def test_passes_are_as_many_as_expected(name, n):
    toy = TOYS[name]
    built, requests = itemset.build(toy.items), SAMPLES // 4
    took = [drawn(toy, Drawing(built, n, end_token=END, seed=seed, width=1)).passes for seed in range(requests)]
    expected, error = expected_passes(*passes_of(toy), n), float(np.std(took)) / requests**0.5
    assert np.mean(took) == pytest.approx(expected, abs=4 * error + 1e-9)


def test_a_limit_of_passes_is_an_error_unless_the_answer_may_be_approximate():
    toy = TOYS["wide"]
    built = itemset.build(toy.items)
    whole = drawn(toy, Drawing(built, 3, end_token=END, seed=2))
    limit = whole.passes // 2
    with pytest.raises(CutOffError, match=f"more than {limit} passes"):
        drawn(toy, Drawing(built, 3, end_token=END, seed=2, max_passes=limit))
    cut = drawn(toy, Drawing(built, 3, end_token=END, seed=2, max_passes=limit, approximate=True))
    assert cut.passes == limit
    assert len(cut.items) == 3
    assert not all(item.about["exact"] for item in cut.items)
    assert 0.1 < cut.open < 1
    enough = Drawing(built, 3, end_token=END, seed=2, max_passes=whole.passes, approximate=True)
    same = drawn(toy, enough)
    assert (tokens(same), same.open, same.took) == (tokens(whole), 0, {"passes": whole.passes, "rounds": whole.rounds})
    nothing = drawn(toy, Drawing(built, 3, end_token=END, seed=2, max_passes=1, approximate=True))
    assert (nothing.items, nothing.open) == ([], 1.0)


@pytest.mark.parametrize("name", ["trap", "wide", "prefixes"])
def test_the_open_share_bounds_what_was_not_looked_at(name):
    """In each cut-off answer: the items that are not among those scored have no more than it of the distribution."""
    toy = TOYS[name]
    built, p = itemset.build(toy.items), toy.weights() / toy.weights().sum()
    opens = []
    for limit in range(1, 30):
        asked: list[Pass] = []
        drawing = Drawing(built, 2, end_token=END, seed=limit, max_passes=limit, approximate=True)
        while drawing.passes:
            asked += drawing.passes
            drawing.take(toy(drawing.passes))
        scored = {one.tokens for one in asked if END in one.after}
        missing = sum(share for share, item in zip(p, toy.items, strict=True) if item not in scored)
        found = drawing.result
        assert {item.tokens for item in found.items} <= scored
        if found.open:
            assert missing <= found.open + 1e-12
            assert found.took["open"] == found.open
        opens.append(found.open)
    assert opens[-1] < opens[0]


def test_an_impossible_set_gives_nothing_and_a_possible_item_is_found():
    items = [[1, 2], [1, 3], [2]]

    def score(passes: Sequence[Pass]) -> list[Answer]:
        return [(np.zeros(len(one.tokens) - one.known), np.where(one.after == 2, -np.inf, -1.0)) for one in passes]

    assert tokens(drawn(score, Drawing(itemset.build(items), 9, end_token=END, seed=1))) == [(1, 3)] * 9
    assert tokens(drawn(score, Drawing(itemset.build(items), 9, end_token=END, seed=1, replace=False))) == [(1, 3)]
    assert not drawn(score, Drawing(itemset.build([[2]]), 2, end_token=2, seed=1)).items


def test_distinct_draws_at_the_lowest_temperatures():
    """Siblings lie billions of windows apart there, or in one, as floats of their size are that far apart."""
    logits = {(): [0.0, -20.0, -25.0, -30.0, -33.0, -60.0, -90.0]}

    def score(passes):
        each = [np.array(logits.get(one.tokens, [-50.0] * 6 + [0.0])) for one in passes]
        each = [one - np.logaddexp.reduce(one) for one in each]
        before = np.array(logits[()]) - np.logaddexp.reduce(logits[()])
        runs = [before[list(one.tokens[one.known :])] for one in passes]
        return [(run, one[of.after]) for run, one, of in zip(runs, each, passes, strict=True)]

    items = itemset.build([[i] for i in range(6)])
    for temperature in (1e-3, 1e-6, 1e-8, 1e-9, 1e-12, 1e-20, 1e-100):
        made = Drawing(items, 6, end_token=6, temperature=temperature, seed=1, replace=False)
        assert tokens(drawn(score, made)) == [(0,), (1,), (2,), (3,), (4,), (5,)]


def test_a_seed_left_out_is_another_each_time():
    toy = TOYS["wide"]
    built = itemset.build(toy.items)
    found = Counter(tuple(tokens(drawn(toy, Drawing(built, 9, end_token=END)))) for _ in range(4))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"n": 0}, "n is 0: make it at least 1"),
        ({"width": 0}, "width is 0"),
        ({"max_passes": 0}, "max_passes is 0"),
        ({"temperature": 0.0}, "more than 0"),
        ({"temperature": float("inf")}, "more than 0"),
        ({"temperature": float("nan")}, "more than 0"),
    ],
)
def test_what_cannot_be_drawn(what, message):
    with pytest.raises(ValueError, match=message):
        Drawing(itemset.build([[1]]), **{"n": 1, "end_token": END, **what})
