"""Semantic IDs whose codes are as unequal as in real catalogues, against the oracle."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
from oracle import dict_trie, prefixes

import itemset
from itemset import ItemSet, ItemSetError
from itemset.masking.host import HostState

ITEMS, LENGTH, CODES, EXPONENT = 100_000, 8, 2_048, 1.2


@pytest.fixture(scope="module")
def items() -> list[list[int]]:
    draw = np.random.default_rng(12)
    shares = np.arange(1, CODES + 1) ** -EXPONENT
    ranks = draw.choice(CODES, (ITEMS, LENGTH), p=shares / shares.sum())
    return draw.permutation(CODES)[ranks].tolist()


@pytest.fixture(scope="module")
def skewed(items: list[list[int]]) -> ItemSet:
    return itemset.build(items, vocab_size=CODES)


def test_children_and_bitmasks(items: list[list[int]], skewed: ItemSet) -> None:
    root = dict_trie(items)
    row = np.zeros(CODES // 32, np.int32)
    for before, tokens, ends in islice(prefixes(root), 0, None, 151):
        labels, terminal = skewed.children(before)
        assert (labels.tolist(), terminal) == (tokens, ends)
        state = HostState(skewed, [])
        assert state.accept(before)
        state.fill_bitmask(row)
        assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == tokens
    foreign = next(token for token in range(CODES) if token not in root[items[0][0]])
    with pytest.raises(ItemSetError, match="no item starts with"):
        skewed.children([items[0][0], foreign])


def test_items_and_keys(items: list[list[int]], skewed: ItemSet) -> None:
    first = {tuple(item): i for i, item in reversed(list(enumerate(items)))}
    assert len(skewed) == len(first)
    assert skewed.lookup(items).tolist() == [first[tuple(item)] for item in items]
    distinct = random.Random(0).sample(list(first), 20_000)
    assert skewed.tokens([first[item] for item in distinct]) == [list(item) for item in distinct]


def test_the_rows_are_unequal(skewed: ItemSet) -> None:
    """Beside this the test would mean little: the longest row below the root holds most codes, half of them two."""
    children = np.diff(skewed.trie.tables.row_offsets.astype(np.int64))[1:]
    assert children.max() > CODES / 2
    assert np.median(children) < 5
