"""Where edges lead, counted and stored: both say the same on every path, and the right one is chosen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

import itemset
from itemset import ItemSet, ItemSetError
from itemset.masking import triton_kernels
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import TAIL_BASE
from itemset.masking.cpu_kernels import row_at
from itemset.opening import from_bytes
from itemset.ranking import cpu_kernels
from itemset.trie import targets
from itemset.trie.levels import LevelPlan
from itemset.trie.numbering import nth_edge
from itemset.trie.pointers import pointers_at
from itemset.trie.tables import Tables
from itemset.trie.targets import FAR, LENGTH, OF_A_LEVEL, START, START_HIGH, is_leaf, nodes_before, tails_of
from itemset.trie.validate import check_items, check_shapes
from itemset.trie.walk import END, STATE_BITS, TAIL, advance, follow

uniform = st.tuples(st.integers(1, 7), st.integers(2, 40)).flatmap(
    lambda shape: st.lists(
        st.lists(st.one_of(st.integers(0, 2), st.integers(0, shape[1])), min_size=shape[0], max_size=shape[0]),
        min_size=1,
        max_size=150,
    )
)


def stored(items: list[list[int]], **options: Any) -> ItemSet:
    """With stored targets, whatever the items' lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_MOST_LEVELS", 0)
        return itemset.build(items, **options)


def random_items(count: int = 3000, length: int = 5) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(12) for _ in range(length)] for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(items=uniform)
def test_they_say_the_same(items: list[list[int]]) -> None:
    one, other = itemset.build(items), stored(items)
    a, b = one.trie.tables, other.trie.tables
    assert (a.targets.dtype, b.targets.dtype) == (np.uint64, np.uint16)
    check_shapes(one.trie)
    check_items(one.trie)
    edges, nodes = len(a.labels), len(a.row_offsets) - 1
    a, b = a.pointers, b.pointers
    for edge in range(edges):
        assert follow(a, edge) == follow(b, edge)
        assert is_leaf(a, edge) == is_leaf(b, edge)
        assert nodes_before(a, edge) == nodes_before(b, edge)
    for block in range(len(one.trie.tables.node_base)):
        assert tails_of(a, block) == tails_of(b, block)
    for leaf, count in ((0, nodes - 1), (1, edges - nodes + 1)):
        for nth in range(-1, count + 1):
            assert nth_edge(a, nth, leaf) == nth_edge(b, nth, leaf)
    plan, plan_b = LevelPlan.of(one.trie), LevelPlan.of(other.trie)
    assert (plan.nodes, plan.tails, plan.tailed) == (plan_b.nodes, plan_b.tails, plan_b.tailed)
    tokens = sorted({tuple(item) for item in items})
    assert np.array_equal(one.lookup(tokens), other.lookup(tokens))


def test_which_one_a_set_has(tmp_path: Path) -> None:
    deep = [[1] * 17 + [a, b] for a in range(3) for b in range(3)]
    for items, dtype in (
        (random_items(), np.uint64),
        ([[7]], np.uint64),
        ([*random_items(), [1]], np.uint16),
        (deep, np.uint16),  # 19 levels have edges
        ([item[2:] for item in deep], np.uint16),
        ([item[3:] for item in deep], np.uint64),
        ([[1] * 2000, [2] * 1999], np.uint32),
    ):
        s = itemset.build(items)
        s.save(tmp_path / "items.itemset")
        assert s.trie.tables.targets.dtype == dtype
        assert itemset.load(tmp_path / "items.itemset").digest == s.digest


def test_a_bit_an_edge() -> None:
    one, other = itemset.build(random_items()).trie.tables, stored(random_items()).trie.tables
    edges, levels = len(one.labels), 5
    blocks = -(-edges // 32)
    assert one.targets.nbytes == -(-edges // 64) * 8
    assert one.tail_base.nbytes == 16 * levels
    assert other.targets.nbytes + other.tail_base.nbytes == 2 * edges + 4 * blocks


@pytest.mark.parametrize("kept", [range(0, 3000, 2), range(2990, 3000)], ids=["half", "few"])
def test_a_change_of_the_lengths_changes_the_form(kept: range) -> None:
    """From items of one length to items of several, and back, byte for byte what a build makes."""
    items, keys = random_items(), list(range(3000))
    longer, shorter = [1, 2, 3, 4, 5, 6], [12, 1, 2, 3]  # of the mean length: their sum says nothing
    whole = itemset.build(items, keys=keys)
    gone = sorted(set(keys) - set(kept))
    mixed = whole.updated(add=[longer, shorter], keys=[9000, 9001], remove=gone)
    stay = [items[i] for i in kept]
    assert mixed.to_bytes() == itemset.build([*stay, longer, shorter], keys=[*kept, 9000, 9001]).to_bytes()
    assert mixed.trie.tables.targets.dtype == np.uint16
    back = mixed.updated(remove=[9000, 9001])
    assert back.to_bytes() == itemset.build(stay, keys=list(kept)).to_bytes()
    assert back.trie.tables.targets.dtype == np.uint64


@pytest.mark.parametrize("far", [0, FAR - 64, FAR, 3 * FAR // 2])
@pytest.mark.slow
def test_kernels_follow_counted_edges_beside_stored_ones(far: int) -> None:
    """far: as many tail tokens come before those of the counted set, as in a set of a thousand million items."""
    one, other = itemset.build(random_items(400, 4)), stored(random_items(300, 3))
    arena = Arena(room_for(one) + room_for(other), DEVICE, max_sets=2, kernels="triton")
    numbers = arena.acquire(one), arena.acquire(other)
    tables = [beyond(one.trie.tables, far), other.trie.tables]
    row = arena.sets[numbers[0]]
    words = torch.from_numpy(tables[0].tail_base.view(np.int32)).to(DEVICE)
    arena.words[int(row[TAIL_BASE]) : int(row[TAIL_BASE]) + len(words)] = words
    nodes = [(which, node) for which in (0, 1) for node in range(len(tables[which].row_offsets) - 1)]
    asked = [(which, node, token) for which, node in random.Random(1).sample(nodes, 60) for token in range(0, 12, 2)]
    states = torch.tensor([node | numbers[which] << STATE_BITS for which, node, _ in asked], device=DEVICE)
    tokens = torch.tensor([token for *_, token in asked], device=DEVICE)
    marks = torch.full_like(tokens, -1, dtype=torch.int32)[:, None]
    after = triton_kernels.advance(arena, states, tokens, marks, torch.empty_like(states)).tolist()
    expected = [
        int(advance(tables[which].pointers, node, token)) | numbers[which] << STATE_BITS for which, node, token in asked
    ]
    assert after == expected
    reached = {state & (1 << STATE_BITS) - 1 for state in after}
    assert max(reached) >= TAIL + far
    assert END in reached


@pytest.mark.parametrize("far", [0, FAR - 64, 3 * FAR // 2])
def test_numba_follows_them(far: int) -> None:
    for s in (itemset.build(random_items(400, 4)), itemset.build([[3], [5]])):
        arena = Arena(room_for(s), kernels="triton")
        number, tables = arena.acquire(s), beyond(s.trie.tables, far)
        fields = arena.sets[number].numpy()
        arena.words.numpy().view(np.uint32)[fields[TAIL_BASE] :][: len(tables.tail_base)] = tables.tail_base
        place = pointers_at(row_at(arena.rows_at, number << STATE_BITS))
        for edge in range(len(tables.labels)):
            assert cpu_kernels.state_after(place, edge) == follow(tables.pointers, edge)


def beyond(tables: Tables, far: int) -> Tables:
    """Counted tables whose tails start so many tokens later."""
    words = tables.tail_base.reshape(-1, OF_A_LEVEL).copy()
    starts = words[:, START].astype(np.int64) + far
    words[:, START], words[:, START_HIGH] = starts % FAR, starts // FAR
    return replace(tables, tail_base=words.reshape(-1))


def test_a_file_whose_sections_do_not_fit_is_refused() -> None:
    s = itemset.build(random_items())
    bases = s.trie.tables.tail_base
    descending, other_length = bases.copy(), bases.copy()
    descending[OF_A_LEVEL * 4] = 0  # a walk on the host stops at the first level that begins later, one on a device not
    other_length[LENGTH] += 1
    for name, array, header in (
        ("tail_base", bases[:-4], {}),
        ("tail_base", descending, {}),
        ("tail_base", other_length, {}),
        ("targets", s.trie.tables.targets[:-1], {}),
        ("targets", s.trie.tables.targets, {"shortest": s.shortest - 1}),
    ):
        broken = replace(s.trie.tables, **{name: array})
        whole = ItemSet(s.trie.__class__(**(vars(s.trie) | {"tables": broken} | header)), s._keys)
        with pytest.raises(ItemSetError, match=f"section {name} does not fit the header"):
            from_bytes(whole.to_bytes())
