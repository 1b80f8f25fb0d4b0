"""Boosts in the search: against exhaustive scoring, by attributes and by keys, with filters, exclusions and several
keys an item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from devices import DEVICE
from distributions import fit
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import item_sets
from test_beam_draws import run_in
from test_beams import Caller, listed
from test_search import END, VOCABULARY, Model, best_items, log_probs, oracle

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.ranking.beams import Beams
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.search import Search
from itemset.select.views import tempered

KERNELS = st.sampled_from(["auto", "auto", "auto", "triton"])  # the interpreter takes twenty times as long


def steered(items: list[list[int]], data: Any) -> tuple[itemset.ItemSet, dict[tuple[int, ...], float]]:
    """A set with some selection and boosts, and the boost of each item that is left, by hand."""
    repeats = [items[i] for i in data.draw(st.lists(st.integers(0, len(items) - 1), max_size=4))]
    rows = [*items, *repeats]  # some items have several keys
    each = st.floats(-3, 3, width=32)
    margin = data.draw(st.lists(each | st.none(), min_size=len(rows), max_size=len(rows)))
    fresh = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    built = itemset.build(
        rows, attributes={"margin": pa.array(margin, pa.float64()), "fresh": fresh, "row": list(range(len(rows)))}
    )
    gone = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1))
    filtered = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1 - len(gone)))
    keys = {key: data.draw(each) for key in data.draw(st.sets(st.integers(0, len(rows) + 2), max_size=4))}
    boost = data.draw(st.sampled_from([{}, {"margin": 1.0}, {"margin": -0.5, "fresh": 2.0}]))
    only = data.draw(st.booleans())
    left = [i for i in range(len(rows)) if i not in gone | filtered]
    seen = itemset.view(
        built, {"row": {"$nin": sorted(filtered)}} if filtered else None, exclude_keys=sorted(gone) or None,
        only_keys=left if only else None, boost=boost, boost_keys=keys,
    )  # fmt: skip
    expected = dict[tuple[int, ...], float]()
    for i in left:
        added = boost.get("margin", 0) * (margin[i] or 0.0) + boost.get("fresh", 0) * fresh[i] + keys.get(i, 0.0)
        expected[tuple(rows[i])] = max(added, expected.get(tuple(rows[i]), -np.inf))
    return seen, expected


@settings(max_examples=80, deadline=None)
@given(
    items=item_sets(vocab_size=VOCABULARY - 1), k=st.integers(1, 6), end=st.sampled_from([None, END]), data=st.data()
)
def test_exact_lists_are_the_ranking_of_the_sums(items: Any, k: int, end: int | None, data: Any) -> None:
    seen, boosts = steered(items, data)
    np.testing.assert_allclose(seen.boosts_of(list(boosts)), list(boosts.values()), atol=1e-5)
    logs = {item: log for log, item in oracle([list(item) for item in boosts], end)}
    scale, alpha = data.draw(st.sampled_from([1.0, 0.5, 3.0])), data.draw(st.sampled_from([0, 0.5, 1]))
    sums = {item: logs[item] * (len(item) + (end is not None)) ** -alpha + scale * boosts[item] for item in boosts}
    expected = sorted(sums.values(), reverse=True)
    options: dict[str, Any] = {"end_token": end, "boost": scale, "normalise_length": alpha}
    best = best_items(Model(), Search(seen, k, width=data.draw(st.integers(1, 9)), exact=True, **options))
    assert best.proven
    np.testing.assert_allclose([item.score for item in best.items], expected[:k], atol=1e-5)
    np.testing.assert_allclose([item.score for item in best.items], [sums[i.tokens] for i in best.items], atol=1e-5)
    np.testing.assert_allclose([item.about["logprob"] for item in best.items], [logs[i.tokens] for i in best.items])
    wide = best_items(Model(), Search(seen, len(seen), **options))
    assert wide.proven
    assert {item.tokens for item in wide.items} == boosts.keys()
    narrow = best_items(Model(), Search(seen, k, width=1 + k // 2, **options))
    assert not narrow.proven or narrow.items[-1].score >= expected[len(narrow.items) - 1] - 1e-5


@settings(max_examples=40, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), end=st.sampled_from([None, END]), kernels=KERNELS, data=st.data())
def test_beams_find_what_the_search_finds(items: Any, end: int | None, kernels: Any, data: Any) -> None:
    seen, _ = steered(items, data)
    arena = Arena(room_for(seen), DEVICE)
    number, scale = arena.acquire(seen), data.draw(st.sampled_from([1.0, 2.5]))
    k, width = data.draw(st.integers(1, 6)), data.draw(st.integers(6, 12))
    renormalised, stepwise = data.draw(st.booleans()), data.draw(st.booleans())
    alpha = 0.0 if renormalised or end is None else data.draw(st.sampled_from([0.0, 0.7]))
    options: dict[str, Any] = {"width": width, "end_token": end, "renormalised": renormalised}
    search = Search(seen, k, boost=scale, normalise_length=alpha, **options)
    beams = Beams(
        arena, [number], seen.level_plan, k=k, stepwise=stepwise and not renormalised, kernels=kernels,
        boost=scale, normalise_length=alpha, **options,
    )  # fmt: skip
    Caller(beams).run()
    items = [(item, log) for log, item in listed(beams, 0)]
    scores = search.tree.scores(items).tolist()
    assert scores == sorted(scores, reverse=True)
    best = best_items(Model(), search)
    if stepwise or alpha:  # what stands alone may have been pruned, or beams be ordered by what is longest in the set
        assert not beams.proven or scores[-1] >= best.items[-1].score - 1e-5
        return
    np.testing.assert_allclose(scores, [item.score for item in best.items], rtol=1e-5, atol=1e-5)
    assert bool(beams.proven.all()) == best.proven


DRAWS = [(1, 1, True), (0.5, 2, True), (1, 1.5, False), (2, 0, True), (4, 1, True), (1.5, 2, False)]


@pytest.mark.parametrize(("temperature", "spread", "replace"), DRAWS)
def test_draws_follow_the_boosted_weights(temperature: float, spread: float, replace: bool) -> None:
    """An item has the share of its (p * e^b)^(1/T); without replacement the second has it of what the first left."""
    rng = np.random.default_rng(5)
    items = sorted({tuple(rng.integers(0, 4, rng.integers(1, 4)).tolist()) for _ in range(40)})
    adds = rng.normal(0, spread, len(items))
    built = itemset.build(items, attributes={"add": adds, "sold": [i % 5 == 0 for i in range(len(items))]})
    seen = itemset.view(built, {"sold": False}, boost={"add": 1.0} if spread else None)
    left = [i for i in range(len(items)) if i % 5]
    logs = {item: log for log, item in oracle([list(item) for item in items], END)}
    shares = np.array([np.exp((logs[items[i]] + adds[i]) / temperature) for i in left])
    shares /= shares.sum()
    options: dict[str, Any] = {"end_token": END, "temperature": temperature, "replace": replace}
    if replace:
        found = [best_items(Model(), Drawing(seen, 4000, seed=3, **options)).items]
    else:
        found = [best_items(Model(), Drawing(seen, 2, seed=seed, **options)).items[1:] for seed in range(1000)]
        shares = np.array(
            [(shares[j] * np.delete(shares, j) / (1 - np.delete(shares, j))).sum() for j in range(len(left))]
        )
    counts = Counter(item.tokens for one in found for item in one)
    assert counts.keys() <= {items[i] for i in left}
    np.testing.assert_allclose([item.score for item in found[0]], [logs[item.tokens] for item in found[0]])
    assert fit(np.array([counts[items[i]] for i in left]), shares) > 1e-4


class Likely:
    """A model that stays in the sets: low tokens, and the end."""

    @staticmethod
    def after(prefix: Sequence[int]) -> np.ndarray:
        logits = log_probs(prefix)
        logits[:6] += 5
        logits[END] += 3
        return logits - np.log(np.exp(logits).sum())

    def __call__(self, passes: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
        answers = []
        for tokens, known, after in passes:
            run = [self.after(tokens[:i])[tokens[i]] for i in range(known, len(tokens))]
            answers.append((np.array(run), self.after(tokens)[after]))
        return answers


@settings(max_examples=40, deadline=None)
@given(items=item_sets(vocab_size=6), kernels=KERNELS, data=st.data())
def test_races_in_beams_are_those_of_the_rounds(items: Any, kernels: str, data: Any) -> None:
    seen, _ = steered(items, data)
    temperature, replace = data.draw(st.sampled_from([1.0, 0.5, 3.0])), data.draw(st.booleans())
    options: dict[str, Any] = {"temperature": temperature, "boost": data.draw(st.sampled_from([1.0, 0.3]))}
    drawing = Drawing(seen, 3, end_token=END, replace=replace, seed=1, **options)
    if temperature > 1:
        seen = tempered(seen, temperature, options["boost"])
    beams = run_in(seen, Likely.after, drawing, END, len(seen) + 2, kernels, temperature=temperature)
    drawn = [tokens for row in range(beams.lists) for _, tokens in listed(beams, row)]
    assert drawn == [item.tokens for item in best_items(Likely(), drawing).items]
    assert beams.proven.all()


def test_what_cannot_be_boosted_is_refused() -> None:
    times = pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns"))
    logs = {"log": [-np.inf, -3.0], "tall": [np.inf, 0.0]}
    columns = {"name": ["a", "b"], "big": [2**60 + 1, 3], "made": times, "price": [2.5, 9.0], **logs}
    built = itemset.build([[1], [2]], keys=[7, 8], attributes=columns)
    for boost, message in (
        ({"pirce": 1.0}, "there is no attribute 'pirce': the set has"),
        ({"pirce": 0}, "there is no attribute 'pirce'"),
        ({"name": 1.0}, r"'name' \(string\) is no number, date or bool"),
        ({"price": True}, "the weight of 'price' is True: give a number"),
        ({"price": 10**400}, "the weight of 'price' is"),
        ({"log": 1.0}, r"changes a score by up to 3\.403e\+38"),
        ({"log": 1.0, "tall": 1.0}, "changes a score by up to"),
        ({"log": 1e39, "price": 1e-3}, "changes a score by up to"),
        ({"price": 1e6}, r"changes a score by up to 9e\+06, the limit is 1,000"),
    ):
        with pytest.raises(itemset.ItemSetError, match=message):
            itemset.view(built, boost=boost)
    for keys, message in (
        ({"seven": 1}, "'seven' is no key: the keys of this set are integers"),
        ({"7": 1, "07": 2}, "the key 7 is given twice"),
        ({7: None}, "what the key .* adds is None: give a number"),
    ):
        with pytest.raises(itemset.ItemSetError, match=message):
            itemset.view(built, boost_keys=keys)
    seen = itemset.view(built, boost={"price": 0.5, "made": 1e-3, "big": 1e-18})
    assert seen.boosts_of([[1], [2]]).tolist() == pytest.approx([1.25 + 19.67593 + 1.1529, 4.5], rel=1e-4)
    for again in ({"boost": {"price": 1}}, {"boost_keys": {7: 1}}, {"item_filter": {"price": 9}}, {"only_keys": [7]}):
        with pytest.raises(itemset.ItemSetError, match="this set has boosts"):
            itemset.view(seen, **again)
