"""A trie with some items removed and others added, without building the rest again.

Between two changes, in the order of the items, the tables hold the same at every level as before, only elsewhere. So a
changed trie is *runs* of items that are copied level by level, and *patches* between them: rows of tokens, of which the
tables are made as `tables` makes them of all rows. A patch holds what is new, and the neighbours of each change, since
how far an item stands alone depends on its neighbours (`patches`). Where they meet is a *position* (`positions`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.numbering import items_at, numbers_of
from itemset.trie.patches import patches_of
from itemset.trie.pointers import bit, bits_from, first_edge, label, load32, put_bits, put_label, set_bit, store32
from itemset.trie.positions import EDGE, ENDS, NODE, TAIL_AT, add_run
from itemset.trie.rows import Distinct, Rows, sort_unique, token_dtype
from itemset.trie.soundness import lengths
from itemset.trie.tables import (
    EDGES,
    LEAVES,
    NODES,
    TAIL_TOKENS,
    TERMINALS,
    Trie,
    allocate,
    build_trie,
    fill,
    finish,
    levels_of,
)
from itemset.trie.targets import is_leaf, put_leaf, tail_at, tails_of, type_of_targets
from itemset.trie.walk import END, TAIL, follow, token_runs


class Changed(NamedTuple):
    """A changed trie, and what its items were.

    members: [items] uint32 by new number, the item's number before, or that of a new row plus the items there were.
    same: [new rows] int64, the number before of each new row that was an item, -1 of the others.
    """

    trie: Trie
    members: NDArray[np.uint32]
    same: NDArray[np.int64]


def change(trie: Trie, terminal_rank: NDArray[np.uint32], gone: NDArray[np.bool_], new: Distinct) -> Changed:
    """Return the trie without the items that are gone, and with the new rows.

    terminal_rank: of `numbering.rank_terminals`. gone: [items], by number; an item that is gone and new stays.
    Raises ValueError if the tables are not those of a trie: of a damaged file.
    """
    with ThreadPoolExecutor(1) as pool:
        consistent = pool.submit(_consistent, trie.tables.pointers, trie.tail_tokens)
        same = numbers_of(trie.tables, terminal_rank, new.rows)  # this and the next walk safely whatever the tables are
        removed = gone.copy()
        removed[same[same >= 0]] = False
        numbers = np.flatnonzero(removed)
        fresh = np.flatnonzero(same < 0)
        before = items_at(trie.tables, terminal_rank, numbers, trie.longest)
        if not consistent.result():
            raise ValueError("its tables are no trie")
    added = new.rows.take(fresh)
    tokens = np.concatenate((before.tokens, added.tokens))
    offsets = np.concatenate((before.offsets, before.offsets[-1] + added.offsets[1:]))
    sources = np.concatenate((np.full(len(numbers), -1), trie.items + fresh))
    if not len(sources):
        return Changed(*_as_built(trie, terminal_rank), same)
    events = sort_unique(Rows(tokens, offsets))
    if events.order is not None:
        sources = sources[events.order]
    bits = trie.tables.token_bits
    changed = None if int(tokens.max()) >> bits else _changed(trie, terminal_rank, events.rows, sources)
    if changed is not None and (before.tokens >> (bits - 1)).any() and not _needs(changed[0], bits):
        changed = None  # fewer bits are enough for the tokens that are left
    if changed is None:
        changed = _rebuilt(trie, terminal_rank, events.rows, sources)
    return Changed(*changed, same)


def _needs(trie: Trie, bits: int) -> bool:
    """Return whether a token of the trie has so many bits."""
    return any((run >> (bits - 1)).any() for run in token_runs(trie.tables, trie.tail_tokens))


def _as_built(trie: Trie, terminal_rank: NDArray[np.uint32]) -> tuple[Trie, NDArray[np.uint32]]:
    """Return the trie with its targets as they are built now, and its members: an earlier release counted none."""
    length = trie.longest if trie.shortest == trie.longest else 0
    due = type_of_targets(length, len(trie.level_edges), trie.longest)
    if due != np.uint64 or due == trie.tables.targets.dtype:
        return trie, np.arange(trie.items, dtype=np.uint32)
    every = sort_unique(items_at(trie.tables, terminal_rank, np.arange(trie.items), trie.longest))
    built, members = build_trie(every.rows, every.lcp)
    return built, members if every.order is None else every.order[members]


def _rebuilt(
    trie: Trie, terminal_rank: NDArray[np.uint32], events: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]]:
    """Return the changed trie, built of all rows, and its members."""
    patches, _ = patches_of(trie, terminal_rank, events, sources, whole=True)
    tokens = patches.tokens.astype(token_dtype(int(patches.tokens.max())), copy=False)
    built, members = build_trie(Rows(tokens, patches.offsets), patches.lcp)
    return built, patches.sources[members]


def _changed(
    trie: Trie, terminal_rank: NDArray[np.uint32], events: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]] | None:
    """Return the changed trie, of runs and patches, and its members; None if targets of another type may be due."""
    target_type = trie.tables.targets.dtype
    if target_type == np.uint64 and (np.diff(events.offsets) != trie.longest).any():
        return None
    patches, per_level = patches_of(trie, terminal_rank, events, sources, whole=False)
    per_level[NODES, 0] = 1
    items, depth = int(per_level[[LEAVES, TERMINALS]].sum()), np.arange(per_level.shape[1])
    tokens = int((per_level[LEAVES] * (depth + 1) + per_level[TERMINALS] * depth + per_level[TAIL_TOKENS]).sum())
    length = 0 if tokens % items else tokens // items  # of each, if they have one length
    due = type_of_targets(length, levels_of(per_level), max(trie.longest, events.longest))
    if due != target_type or due == np.uint32:  # that depends on the longest tail, which is not known
        return None
    tables, starts = allocate(per_level, trie.tables.token_bits, trie.tables.labels.dtype, due, length)
    members = np.empty(items, np.uint32)
    _fill_all(trie.tables.pointers, patches, starts, tables.pointers, members, trie.items)
    inner = np.flatnonzero(members >= trie.items)
    members[inner] = patches.sources[members[inner] - trie.items]
    built, sizes = finish(tables, per_level, len(members), trie.shortest, trie.longest), np.diff(patches.offsets)
    if not trie.shortest == trie.longest == sizes.min(initial=trie.longest) == sizes.max(initial=trie.longest):
        levels = np.array(built.level_nodes), np.array(built.level_edges)
        shortest, longest = lengths(tables.pointers, built.tail_tokens, *levels)
        built = replace(built, shortest=int(shortest), longest=int(longest))
    return built, members


@compiled
def _consistent(tables, tail_tokens):  # type: ignore[no-untyped-def]
    """Return whether what is copied is counted alike: the loops here check no index again.

    As `numbering.in_order`, but that it does not look into the tails, which takes five times as long.
    """
    nodes = tables.nodes
    node, position = np.int64(1), np.int64(0)
    for parent in range(nodes):
        first, end = first_edge(tables, parent), first_edge(tables, parent + 1)
        if parent >= node or first == end:
            return False
        for edge in range(first, end):
            if edge & 31 == 0:
                if load32(tables.node_base, edge >> 5) != node or tails_of(tables, edge >> 5) < position:
                    return False
                position = tails_of(tables, edge >> 5)
            if edge > first and label(tables, edge) <= label(tables, edge - 1):
                return False
            state = follow(tables, edge)
            if state == node:
                node += 1
            elif state >= TAIL + position:
                position = state - TAIL + 1
            elif state != END:
                return False
    last = load32(tables.terminal, nodes >> 5) >> (nodes & 31) if nodes & 31 else np.int64(0)
    return node == nodes and position <= tail_tokens and last == 0 and bit(tables.terminal, 0) == 0


@compiled
def _fill_all(tables, patches, cursor, out, members, items):  # type: ignore[no-untyped-def]
    """Fill the new tables. members: of rows in patches, `items` and the number of the row."""
    store32(out.row_offsets, 0, 0)
    for patch in range(len(patches.first)):
        begin, end = patches.places[2 * patch], patches.places[2 * patch + 1]
        for level in range(begin.shape[1]):
            if begin[EDGE, level] != end[EDGE, level]:
                _copy_run(tables, begin, end, level, cursor, out, members)
        add_run(begin, end, cursor)
        if patch < len(patches.first) - 1:
            a, b = patches.first[patch], patches.first[patch + 1]
            lcp = patches.lcp[a + patch : b + patch + 1]
            fill(patches.tokens, patches.offsets[a : b + 1], 0, lcp, cursor, out, members, items + a)


@compiled
def _copy_run(tables, begin, end, level, cursor, out, members):  # type: ignore[no-untyped-def]
    """Copy one level of the items between two positions. `targets` are of one type, and become what `fill` leaves."""
    first, node, tail, ends = begin[EDGE, level], begin[NODE, level], begin[TAIL_AT, level], begin[ENDS, level]
    edges, nodes, tails = end[EDGE, level] - first, end[NODE, level] - node, end[TAIL_AT, level] - tail
    to, lone, position = cursor[EDGES, level], np.int64(-1), tail
    for k in range(edges):
        put_label(out, to + k, label(tables, first + k))
        if is_leaf(tables, first + k):
            put_leaf(out, to + k, 0)
            starts = tail_at(tables, first + k)
            if starts >= 0:  # a tail ends where the next one begins
                if lone >= 0:
                    put_leaf(out, lone, starts - position)
                lone, position = to + k, starts
    if lone >= 0:
        put_leaf(out, lone, tail + tails - position)
    width = tables.token_bits + 1
    _copy_bits(tables.tails, tail * width, out.tails, cursor[TAIL_TOKENS, level] * width, tails * width)
    number, to = first - node + 1, cursor[LEAVES, level]
    for k in range(edges - nodes):
        members[to + k] = number + k
    if nodes == 0:
        return
    shift, to = cursor[EDGES, level + 1] - begin[EDGE, level + 1], cursor[NODES, level + 1]
    for k in range(nodes):
        store32(out.row_offsets, to + k, first_edge(tables, node + k) + shift)
    if ends == end[ENDS, level]:
        return
    number, next_end = tables.edges - (tables.nodes - 1) + ends, cursor[TERMINALS, level + 1]
    for k in range(nodes):
        if bit(tables.terminal, node + k):
            set_bit(out.terminal, to + k)
            members[next_end] = number
            next_end, number = next_end + 1, number + 1


@compiled
def _copy_bits(source, at, target, to, bits):  # type: ignore[no-untyped-def]
    """Copy so many bits into zeros, from one address to another. `source` has a word after the last bit's."""
    if bits <= 0:
        return
    size = min(-to & 31, bits)
    put_bits(target, to, bits_from(source, at, size))
    at, to, bits = at + size, to + size, bits - size
    for k in range(bits >> 5):  # whole words
        store32(target, (to >> 5) + k, bits_from(source, at + 32 * k, 32))
    if bits & 31:
        put_bits(target, to + (bits & ~31), bits_from(source, at + (bits & ~31), bits & 31))
