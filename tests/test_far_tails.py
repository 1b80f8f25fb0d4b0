"""Sets whose tails go beyond what 31 and 32 bits number: 4 x 10^8 items of 8 tokens, and more.

None is built here. The tables of a small set are moved instead: before its tails lie as many zeros as are wanted, in
memory that nobody touches and the system never gives. All walks must find the same as before.
"""

from __future__ import annotations

import mmap
import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
import torch
from devices import DEVICE, KERNELS
from oracle import dict_trie, prefixes
from schedule import Schedule

import itemset
from itemset import ItemSet, ItemSetError
from itemset.masking import batch, cpu_kernels, triton_kernels
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import ANY_CONSUMED, CONSUMED, COUNT_MASK, FAR_BLOCK, LOCAL, TAIL_BASE, TAILS, WIDTHS, Batch
from itemset.masking.host import HostState, fill_bitmasks
from itemset.masking.slots import Slots
from itemset.ranking.beams import Beams, table_of
from itemset.trie import tables as trie_tables
from itemset.trie import targets as trie_targets
from itemset.trie.levels import LevelPlan
from itemset.trie.rows import as_rows
from itemset.trie.tables import COUNTS, EDGES, NODES, NONE, TAIL_TOKENS, Tables, Trie
from itemset.trie.targets import FAR, MAX_TAIL_TOKENS, NO_BLOCK
from itemset.trie.update import merged
from itemset.trie.walk import END, STATE_BITS, TAIL, advance, children, follow

MAP_NORESERVE = 0x4000  # Linux; Python 3.13 names it
LAST_SET = 4095
BITS = 3  # of a token: a token of the tails takes 4
VOCABULARY, STOP = 12, 9


def random_set() -> tuple[list[list[int]], itemset.ItemSet]:
    draw = random.Random(3)
    items = [[draw.randrange(8) for _ in range(draw.randint(1, 14))] for _ in range(900)]
    items += [[0], [7] * 14]
    return items, itemset.build(items)


ITEMS, SMALL = random_set()
STARTS = SMALL.trie.tables.tail_base.astype(np.int64)
AT_BLOCK = next(b for b in range(3, len(STARTS)) if STARTS[b] % 8 == 0 < STARTS[b])  # gaps are whole words
GAPS = {
    "2^31 in a block": 2**31 - STARTS[AT_BLOCK] - 8,
    "2^32 at the start of a block": FAR - STARTS[AT_BLOCK],
    "2^32 in a block": FAR - STARTS[AT_BLOCK] - 8,
    "2^32 before them": FAR,
    "the last of all": MAX_TAIL_TOKENS - SMALL.trie.tail_tokens // 8 * 8 - 8,
}
gaps = pytest.mark.parametrize("gap", [int(gap) for gap in GAPS.values()], ids=list(GAPS))


def zeros(words: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Memory of which the system gives what is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 4 * words, flags), np.uint32)


def moved(gap: int) -> Tables:
    """The set's tables, with so many tokens of no item before the tails."""
    tables, starts = SMALL.trie.tables, STARTS + gap
    before = gap * (BITS + 1) // 32
    tails = zeros(before + len(tables.tails))
    tails[before:] = tables.tails
    far = np.flatnonzero(starts >= FAR)
    base = (starts % FAR).astype(np.uint32)
    return replace(tables, tail_base=base, tails=tails, far_block=int(far[0]) if len(far) else NO_BLOCK)


def far_arena(gap: int) -> Arena:
    """An arena with the set as number 0, and moved as the last number that there is, 8 GB further on."""
    arena = Arena(room_for(SMALL), DEVICE, max_sets=LAST_SET + 1, kernels="triton")
    number, tables = arena.acquire(SMALL), moved(gap)
    words = arena.words.cpu().numpy().view(np.uint32)
    bases = 2**31 + len(words)
    room = bases + len(tables.tail_base)
    all_words = zeros(room + len(tables.tails))
    all_words[: len(words)] = all_words[2**31 : bases] = words
    all_words[bases:room] = tables.tail_base
    before = gap * (BITS + 1) // 32
    all_words[room + before :] = tables.tails[before:]
    arena.kept = [arena.words]  # where `rows` lead
    arena.words = torch.from_numpy(all_words.view(np.int32)).to(DEVICE)
    row = arena.sets[number].clone()
    row[: TAILS + 1] += 2**31
    row[TAIL_BASE], row[TAILS] = bases, room
    row[WIDTHS] = (row[WIDTHS] & ((1 << FAR_BLOCK) - 1)) | tables.far_block << FAR_BLOCK
    arena.sets[LAST_SET] = row
    if DEVICE == "cpu":
        far = ItemSet(replace(SMALL.trie, tables=tables), SMALL._keys)
        arena.rows[LAST_SET] = batch.table_row(far)
        arena.kept.append(far)
    return arena


def module(kernels: str) -> ModuleType:
    return cpu_kernels if kernels == "numba" else triton_kernels


def states_of(tables: Tables) -> list[int]:
    """The state after every prefix of every item, in one order."""
    states = []
    for prefix, _, _ in prefixes(dict_trie(ITEMS)):
        state = 0
        for token in prefix:
            state = int(advance(tables.pointers, state, token))
        states.append(state)
    return states


@gaps
def test_the_host_walks_them(gap: int) -> None:
    tables, near = moved(gap), SMALL.trie.tables
    there = [state + gap if state >= TAIL else state for state in states_of(near)]
    assert states_of(tables) == there
    assert max(there) > 2**32 - 2**31 + gap
    for far_state, state in zip(there, states_of(near), strict=True):
        for mine, other in zip(children(tables, far_state), children(near, state), strict=True):
            assert np.array_equal(mine, other)
    host = HostState.__new__(HostState)
    super(HostState, host).__init__(ItemSet(replace(SMALL.trie, tables=tables), SMALL._keys), [STOP])
    plain = HostState(SMALL, [STOP])
    rows = np.zeros((2, len(there), 1), np.int32)
    for row, walker, states in ((rows[0], host, there), (rows[1], plain, states_of(near))):
        fill_bitmasks([walker] * len(states), states, list(range(len(states))), row)
    assert np.array_equal(*rows)


@gaps
def test_they_are_updated(gap: int) -> None:
    """What is read there is what is read of the set itself."""
    new = as_rows([[3, 3, 3, 1], [7] * 20, [2]])
    stays = np.ones(SMALL.trie.items, np.bool_)
    stays[::7] = False
    far, near = (merged(replace(SMALL.trie, tables=one), None, stays, new) for one in (moved(gap), SMALL.trie.tables))
    for mine, other in ((far.rows.tokens, near.rows.tokens), (far.rows.offsets, near.rows.offsets)):
        assert np.array_equal(mine, other)
    assert np.array_equal(far.order, near.order)
    assert np.array_equal(far.lcp, near.lcp)


@gaps
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.slow
def test_the_kernels_walk_them(name: str, gap: int) -> None:
    kernels, arena, tables = module(name), far_arena(gap), moved(gap)
    near, far = states_of(SMALL.trie.tables), states_of(tables)
    picked = random.Random(1).sample(range(len(near)), 40)
    picked += [far.index(max(far)), far.index(min(state for state in far if state >= TAIL + gap))]
    count = len(picked) * 8
    states = torch.tensor([far[i] | LAST_SET << STATE_BITS for i in picked], device=DEVICE)
    plain = torch.tensor([near[i] for i in picked], device=DEVICE)
    marks = torch.tensor([[-1, STOP]] * count, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(len(picked), device=DEVICE)
    tokens = torch.arange(8, device=DEVICE).repeat(len(picked))
    out = torch.empty(count, dtype=torch.int64, device=DEVICE)
    after = kernels.advance(arena, states.repeat_interleave(8), tokens, marks, out).tolist()
    expected = [
        int(advance(tables.pointers, far[i], token)) | LAST_SET << STATE_BITS for i in picked for token in range(8)
    ]
    for i in range(count):
        if expected[i] == after[i]:
            continue
        raise AssertionError((picked[i // 8], i % 8, hex(expected[i]), hex(after[i])))
    logits = torch.randn(len(picked), VOCABULARY, device=DEVICE)
    masked = [kernels.mask(arena, logits.clone(), of, marks, slots) for of in (states, plain)]
    assert torch.equal(*masked)
    given = [kernels.forced(arena, of, marks, slots, slots.new_empty(len(picked), 5)) for of in (states, plain)]
    assert torch.equal(*given)


@pytest.mark.parametrize("gap", [int(GAPS["2^32 in a block"]), int(GAPS["the last of all"])])
@pytest.mark.parametrize("options", [{}, {"renormalised": True}, {"stepwise": True}], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.slow
def test_ranked_lists_are_the_same(kernels: Any, options: dict[str, Any], gap: int) -> None:
    arena, found = far_arena(gap), []
    for number in (0, LAST_SET):
        beams = Beams(arena, [number], SMALL.level_plan, width=5, k=6, end_token=None, kernels=kernels, **options)
        torch.manual_seed(1)
        while beams.passes_left:
            logits = torch.randn(beams.rows if beams.taken else 1, beams.queries, VOCABULARY)
            beams.round(logits.to(DEVICE))
        found.append(table_of(beams.found))
    assert torch.equal(*found)


def told(slots: Slots) -> list[tuple[int, int, int]]:
    """Set, state and count of committed tokens of every slot."""
    cells = slots.cells[:-1].tolist()
    return [((cell & batch.STATE) >> STATE_BITS, cell & LOCAL, cell >> CONSUMED & COUNT_MASK) for cell in cells]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_cell_holds_the_last_set_the_highest_state_and_any_count(kernels: Any) -> None:
    gap = int(GAPS["the last of all"])
    arena, item = far_arena(gap), max(ITEMS, key=len)
    states, tables = [0], moved(gap)
    for token in item:
        states.append(int(advance(tables.pointers, states[-1], token)))
    begun = next(i for i, state in enumerate(states) if state >= TAIL + FAR)
    arena.kernels = module(kernels)
    slots = Slots(arena, 2, max_rows=2, max_stop_tokens=1)
    index = torch.arange(2, device=DEVICE)
    slots.assign(index, torch.full_like(index, LAST_SET), torch.tensor([[-1, STOP]] * 2, device=DEVICE))
    window = torch.tensor([item[:begun]] * 2, dtype=torch.int32, device=DEVICE)
    ends = torch.full((2,), begun, dtype=torch.int32, device=DEVICE)
    slots.walk(Batch(index, window, ends - begun, ends))
    assert told(slots) == [(LAST_SET, states[begun], begun)] * 2
    # As if far more tokens had led there: the count begins again.
    for before in (COUNT_MASK - 1, COUNT_MASK, COUNT_MASK + 1, 3 * COUNT_MASK + 2):
        count = before & COUNT_MASK | ANY_CONSUMED
        slots.cells[:2] = (count << CONSUMED | LAST_SET << STATE_BITS | states[begun]) - (
            1 << 64
        )  # a sign, the last bit
        assert told(slots) == [(LAST_SET, states[begun], before & COUNT_MASK)] * 2
        more = torch.tensor([item[: begun + 2]] * 2, dtype=torch.int32, device=DEVICE)
        slots.walk(Batch(index, more, ends - before, ends + 2))
        assert told(slots) == [(LAST_SET, states[begun + 2], before + 2 & COUNT_MASK)] * 2


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("window", [False, True], ids=["history", "window"])
@pytest.mark.slow
def test_a_request_may_come_back_with_more_tokens_than_a_cell_counts(
    kernels: Any, window: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a count of three bits. Steps look at each request, and requests come back with up to 31 tokens."""
    for name, value in {"COUNT_MASK": 7, "ANY_CONSUMED": 8, "CONSUMED_MASK": 15}.items():
        monkeypatch.setattr(cpu_kernels, name, value)
        monkeypatch.setattr(getattr(triton_kernels, f"_{name}"), "value", value)
    for name in ("_committed", "_walk"):  # compiled anew, for these constants
        monkeypatch.setattr(cpu_kernels, name, numba.njit(getattr(cpu_kernels, name).py_func))
    schedule = Schedule(1, kernels=kernels, device=DEVICE, window=window)
    schedule.run(40)
    assert schedule.checked > 100


def test_bases_begin_again_at_the_block_that_reaches_2_32() -> None:
    """The root's 66,000 leaves have so many tail tokens that a block begins exactly there, and one token before."""
    block = 2049
    edges = 66_000
    for short in (0, 1):
        marks = np.full(edges, FAR // (block * 32), np.uint32)
        marks[: FAR % (block * 32)] += 1  # as many as make 2^32 before the block
        marks[7] -= short
        starts = np.concatenate(([0], np.cumsum(marks.astype(np.int64))))
        assert starts[block * 32] == FAR - short
        targets = marks | np.uint32(1 << 31)
        node_base, tail_base = np.empty((2, -(-edges // 32)), np.uint32)
        tables = Tables(
            np.array([0, edges], np.uint32),
            np.zeros(1, np.uint32),
            np.arange(edges, dtype=np.uint32),
            targets,
            node_base,
            tail_base,
            np.zeros(1, np.uint32),
            NONE,
            NONE,
            17,
            NO_BLOCK,
        )
        trie_targets.set_bases(tables.pointers)
        tables = replace(tables, far_block=trie_targets.far_block_of(targets, tail_base, int(starts[-1])))
        assert tables.far_block == block + short
        for edge in (0, 31, 32, block * 32 - 1, block * 32, block * 32 + 1, block * 32 + 32, edges - 1):
            assert follow(tables.pointers, edge) == TAIL + starts[edge]
        measured = int(marks.min()) + 1, int(marks.max()) + 1
        trie = Trie(tables, edges, *measured, (1,), (edges,), int(starts[-1]))
        assert LevelPlan.of(trie).tails == (int(marks.max()),)


def test_what_does_not_fit_is_refused_before_a_table_is_made() -> None:
    per_level = np.zeros((COUNTS, 3), np.int64)
    per_level[NODES, 0], per_level[EDGES, 0] = 1, 40
    for row, total, what in (
        (TAIL_TOKENS, MAX_TAIL_TOKENS + 1, "8,589,934,593 tail tokens, the limit is 8,589,934,592"),
        (EDGES, 2**31, "2,147,483,648 edges, the limit is 2,147,483,643"),
        (NODES, 2**31, "2,147,483,648 nodes, the limit is 2,147,483,643"),
    ):
        counts = per_level.copy()
        counts[row, 0] = total
        with pytest.raises(ItemSetError, match=what):
            trie_tables.allocate(counts, 1, np.uint16, 0)
    per_level[TAIL_TOKENS, 0] = MAX_TAIL_TOKENS
    tables, _ = trie_tables.allocate(per_level, 1, np.uint16, 0)
    assert len(tables.tails) * 16 >= MAX_TAIL_TOKENS
    assert END < TAIL <= LOCAL
