"""Sizes that `itemset info` compares: by hand for small sets, and by counting the items themselves for random ones."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import item_sets

import itemset
from itemset.cli import report


def test_two_tokens_an_item() -> None:
    s = itemset.build([[0, 0], [0, 1], [1, 0]])
    assert report.levels(s).tolist() == [[1, 2, 1], [1, 2, 0]]
    pairs, row_starts, start_mask, dense = 8 * (3 + 2), 4 * (2 + 3), 2, 5 * 2
    assert report.static_bytes(s) == pairs + row_starts + start_mask + dense
    assert report.least_bytes(s) == pytest.approx(math.log2(4) / 8)  # one of the four pairs is missing


def test_three_tokens_an_item() -> None:
    s = itemset.build([[7, 7, 7], [7, 7, 9], [9, 9, 7]])
    assert report.levels(s).tolist() == [[1, 2, 2], [1, 1, 0], [1, 2, 0]]
    pairs, row_starts, start_mask, dense = 8 * (2 + 3 + 2), 4 * (2 + 2 + 3), 2, 5 * 2 * 2
    assert report.static_bytes(s) == pairs + row_starts + start_mask + dense
    assert report.least_bytes(s) == pytest.approx(math.log2(56) / 8)  # 3 of 8


def test_items_of_different_lengths() -> None:
    s = itemset.build([[1], [1, 2], [3, 3, 4]])
    assert report.levels(s).tolist() == [[1, 2, 2], [1, 1, 0]]
    assert report.static_bytes(s) is None
    lengths = 3 * math.log2(3)
    tokens = 4 * math.log2(6 / 2) + 2 * math.log2(6 / 1)  # 1 and 3 occur twice, 2 and 4 once
    assert report.least_bytes(s) == pytest.approx((lengths + tokens - math.log2(6)) / 8)


def test_the_least_and_the_smallest() -> None:
    assert report.least_bytes(itemset.build([[5]])) == 0
    assert report.static_bytes(itemset.build([[5]])) is None
    every = itemset.build([[a, b] for a in range(20) for b in range(20)])
    assert report.least_bytes(every) == 0  # no other set of 400 such items
    assert report.least_bytes(itemset.build([[5], [5, 5]])) == pytest.approx(1 / 8)  # 2 bits, less 1 for the order


@given(item_sets())
@settings(max_examples=200, deadline=None)
def test_the_tally_counts_what_is_in_the_items(items: list[list[int]]) -> None:
    s = itemset.build(items)
    distinct = {tuple(item) for item in items}
    tally = report.count(s, tails=True)
    lengths, tokens = Counter(map(len, distinct)), Counter(chain.from_iterable(distinct))
    assert {i: int(n) for i, n in enumerate(tally.lengths) if n} == lengths
    assert dict(zip(s.token_ids.tolist(), tally.tokens.tolist(), strict=True)) == tokens
    assert report.levels(s)[:, 2].tolist() == tally.tail_tokens.tolist()
    assert tally.tail_tokens.sum() == s.trie.tail_tokens


@pytest.mark.parametrize("universe", [5, 1_000, 2**19, 2**20, 2**29, 2**40, 2**88 + 1])
@pytest.mark.parametrize("chosen", [1, 2, 5, 900, 10_000])
def test_the_number_of_subsets(universe: int, chosen: int) -> None:
    if chosen <= universe:
        exact = math.log2(math.comb(universe, chosen))
        assert report._log2_choose(universe, chosen) == pytest.approx(exact, rel=1e-9, abs=1e-6)
        assert report._log2_choose(universe, universe - chosen) == pytest.approx(exact, rel=1e-9, abs=1e-6)


def test_semantic_ids_against_the_published_figures() -> None:
    """The paper says about 90 bytes an item at a million; the layout's tables for two dense levels are apart here."""
    ids = np.random.default_rng(0).integers(0, 2_048, (200_000, 8))
    s = itemset.build(ids)
    static = report.static_bytes(s)
    assert static is not None
    sparse = static - 5 * 2_048**2
    assert 70 < sparse / len(s) < 90
    assert report.least_bytes(s) / len(s) == pytest.approx((88 - math.log2(len(s)) + math.log2(math.e)) / 8, abs=0.001)


def test_lines_for_people() -> None:
    lines = report.describe(itemset.build([[7, 7, 7], [7, 7, 9], [9, 9, 7]]))
    assert lines[1].split() == ["0", "1", "2", "2"]
    assert [line.split()[0] for line in lines[-3:]] == ["this", "STATIC", "information"]
    assert lines[-2].split()[1:3] == ["106", "35.33"]
    chain_of_prefixes = report.describe(itemset.build([[7] * n for n in range(1, 301)]))
    assert len(chain_of_prefixes) < 32
    assert "23 to 299 277 277 0" in [" ".join(line.split()) for line in chain_of_prefixes]
    assert "no layout" in chain_of_prefixes[-2]
