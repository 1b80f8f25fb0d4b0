"""Lists with quotas: the ranking of the whole set, chosen from greedily."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from test_search import END, Model, best_items, check, oracle

import itemset
from itemset.ranking.quotas import QuotaSearch, within
from itemset.ranking.search import Search
from itemset.select.views import view

Item = tuple[int, ...]
LIMITS = [{"brand": 1}, {"brand": 2}, {"tags": 1}, {"brand": 2, "tags": 3}, {"year": 2}, {"brand": 1, "year": 4}]


def catalogue(seed: int) -> tuple[list[list[int]], dict[str, list[Any]]]:
    """Items, of which some are equal, and attributes: one value, several and none, and some that are missing."""
    draw = np.random.default_rng(seed)
    items = [draw.integers(0, 6, draw.integers(1, 5)).tolist() for _ in range(int(draw.integers(3, 120)))]
    brand = [None if draw.random() < 0.2 else f"b{item[0] if seed % 2 else draw.integers(6)}" for item in items]
    tags = [[f"t{tag}" for tag in draw.integers(0, 9, draw.integers(0, 4))] for _ in items]
    return items, {"brand": brand, "tags": tags, "year": [int(draw.integers(2000, 2012)) for _ in items]}


def greedy(
    ranked: Sequence[tuple[float, Item]], values: Mapping[Item, set[tuple[str, Any]]], limits: Mapping[str, int], k: int
) -> list[tuple[float, Item]]:
    """The oracle: down the whole ranking, one after another."""
    counts, chosen = Counter[tuple[str, Any]](), list[tuple[float, Item]]()
    for score, item in ranked:
        own = {one for one in values[item] if one[0] in limits}
        if len(chosen) < k and all(counts[one] < limits[one[0]] for one in own):
            counts.update(own)
            chosen.append((score, item))
    return chosen


def values_of(items: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]]) -> dict[Item, set[tuple[str, Any]]]:
    """Those of all rows of an item."""
    values: dict[Item, set[tuple[str, Any]]] = {tuple(item): set() for item in items}
    for name, column in columns.items():
        for item, value in zip(items, column, strict=True):
            several = value if isinstance(value, list) else [] if value is None else [value]
            values[tuple(item)] |= {(name, one) for one in several}
    return values


def cases(count: int) -> list[Any]:
    return [pytest.param(seed, LIMITS[seed % len(LIMITS)], 1 + seed % 11, id=str(seed)) for seed in range(count)]


@pytest.mark.parametrize(("seed", "limits", "k"), cases(36))
def test_an_exact_list_is_the_greedy_choice_from_the_whole_ranking(seed, limits, k):
    items, columns = catalogue(seed)
    made = itemset.build(items, attributes=columns)
    expected = greedy(oracle(items, END), values_of(items, columns), limits, k)
    search = QuotaSearch(made, k, at_most=limits, most=1_000, exact=True, end_token=END)
    found = best_items(Model(), search)
    check(found, expected)
    assert found.proven


@pytest.mark.parametrize(("seed", "limits", "k"), cases(24))
@pytest.mark.parametrize("width", [1, 3, [2, 9], 200])
def test_a_beam_goes_on_until_the_list_is_full_or_the_set_has_no_more(seed, limits, k, width):
    """It is proven only if it is the exact one."""
    items, columns = catalogue(seed)
    made, values = itemset.build(items, attributes=columns), values_of(items, columns)
    expected = greedy(oracle(items, END), values, limits, k)
    found = best_items(Model(), QuotaSearch(made, k, at_most=limits, most=1_000, width=width, end_token=END))
    ranked = [(item.score, item.tokens) for item in found.items]
    assert greedy(ranked, values, limits, k) == ranked  # no item is one too many
    assert len(ranked) >= min(k, len(expected)) or "tags" in limits or len(limits) > 1
    if found.proven or width == 200:
        check(found, expected)
    assert found.proven or len(ranked) == k


@pytest.mark.parametrize(("seed", "limits", "k"), cases(24))
def test_a_list_that_an_engine_has_made_is_chosen_from_and_gone_on_with_if_it_is_short(seed, limits, k):
    items, columns = catalogue(seed)
    made = itemset.build(items, attributes=columns)
    expected = greedy(oracle(items, END), values_of(items, columns), limits, k)
    for count in (k, 3 * k, 200):
        listed = best_items(Model(), Search(made, count, width=200, end_token=END))
        model, search = Model(), QuotaSearch(made, k, at_most=limits, most=1_000, width=200, end_token=END)
        search.begin_with(listed)
        found = best_items(model, search)
        check(found, expected)
        enough = len(within(made, [item.tokens for item in listed.items], limits, k)) == k
        assert enough <= (not model.rounds)
        assert found.passes == listed.passes + sum(map(len, model.rounds))
        if count == 200:
            assert found.proven
            assert not model.rounds  # it was the whole set


@pytest.mark.parametrize("seed", range(9))
def test_what_a_view_has_no_more_counts_no_more(seed):
    """Of an item with several keys, those that pass."""
    items, columns = catalogue(seed)
    keys = [f"{i}" for i in range(len(items))]
    whole = itemset.build(items, keys=keys, attributes=columns)
    late = [i for i, year in enumerate(columns["year"]) if year >= 2004]
    kept = {"item_filter": {"year": {"$gte": 2004}}}, {"exclude_keys": sorted({*keys} - {f"{i}" for i in late})}
    for words in (*kept, {"only_keys": [f"{i}" for i in late]}) if late else ():
        rows = {name: [column[i] for i in late] for name, column in columns.items()}
        left = [items[i] for i in late]
        found = best_items(
            Model(),
            QuotaSearch(view(whole, **words), 5, at_most={"brand": 1}, most=99, exact=True, end_token=END),
        )
        check(found, greedy(oracle(left, END), values_of(left, rows), {"brand": 1}, 5))
        assert found.proven


def test_a_quota_of_no_attribute_is_refused():
    items = itemset.build([[1], [2]], attributes={"genre": ["a", "a"]})
    assert within(items, [[1], [2]], {"genre": 1}, 2) == [0]
    with pytest.raises(itemset.ItemSetError, match="there is no attribute 'gnere'"):
        within(items, [[1], [2]], {"gnere": 1}, 2)


def test_a_quota_that_no_list_can_keep_ends_at_its_limit():
    """Of one value there are 900 items, and two may stand in the list."""
    items = [[a, b, c] for a in range(9) for b in range(10) for c in range(10)]
    made = itemset.build(items, attributes={"brand": ["same"] * 900})
    passes = []
    for most in (10, 50, 300):
        found = best_items(Model(), QuotaSearch(made, 10, at_most={"brand": 2}, most=most, width=10, end_token=END))
        assert len(found.items) == 2
        assert not found.proven
        passes.append(found.passes)
    limited = QuotaSearch(made, 10, at_most={"brand": 2}, most=900, width=10, end_token=END, max_passes=12)
    assert best_items(Model(), limited).passes <= 12
    whole = best_items(Model(), QuotaSearch(made, 10, at_most={"brand": 2}, most=900, width=10, end_token=END))
    check(whole, oracle(items, END)[:2])
    assert whole.proven  # there are no others
    assert [*passes, whole.passes] == sorted({*passes, whole.passes})


def test_a_proof_ends_with_the_list():
    """And not with all that it was chosen from."""
    draw = np.random.default_rng(5)
    items = np.unique(draw.integers(0, 40, (4_000, 3)), axis=0).tolist()
    made = itemset.build(items, attributes={"brand": [item[0] for item in items]})
    passes = []
    for k in (3, 10):
        found = best_items(Model(), QuotaSearch(made, k, at_most={"brand": 1}, most=1_000, exact=True, end_token=END))
        values = values_of(items, {"brand": [item[0] for item in items]})
        check(found, greedy(oracle(items, END), values, {"brand": 1}, k))
        passes.append(found.passes)
    assert passes[0] < passes[1] < len(made)
