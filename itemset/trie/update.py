"""Updates of a trie: some items less, others more, without building the rest again.

Between two changes, in the order of the items, every level of the tables holds the same as before, at another place. So
the new trie consists of *runs* of items, copied level by level, and of *patches* between them: rows around changes
(`update_patches`), whose tables are made as `tables.build_trie` makes those of all rows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.numbering import items_at, numbers_of
from itemset.trie.pointers import bit, bits_from, first_edge, label, put_bits, put_label, set_bit, store32
from itemset.trie.rows import Distinct, Rows, sort_unique, token_dtype
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
from itemset.trie.targets import is_leaf, put_leaf, tail_at, type_of_targets
from itemset.trie.update_patches import patches_of
from itemset.trie.validate import in_order, lengths_in_order
from itemset.trie.walk import token_runs


class Changed(NamedTuple):
    """A changed trie, and where its items come from.

    members: [items] uint32, for each new item number the old one, or the old number of items plus that of a new row.
    same: [new rows] int64, the old number of each new row that was an item, -1 of the others.
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
        consistent = pool.submit(in_order, trie, tails=False)  # the loops below check no index again
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
        return Changed(trie, np.arange(trie.items, dtype=np.uint32), same)
    changes = sort_unique(Rows(tokens, offsets))
    if changes.order is not None:
        sources = sources[changes.order]
    bits = trie.tables.token_bits
    spliced = None if int(tokens.max()) >> bits else _splice(trie, terminal_rank, changes.rows, sources)
    if spliced is not None and (before.tokens >> (bits - 1)).any() and not _needs(spliced[0], bits):
        spliced = None  # fewer bits are enough for the tokens that are left
    return Changed(*(spliced or _rebuild(trie, terminal_rank, changes.rows, sources)), same)


def _needs(trie: Trie, bits: int) -> bool:
    """Return whether a token of the trie has this many bits."""
    return any((run >> (bits - 1)).any() for run in token_runs(trie.tables, trie.tail_tokens))


def _rebuild(
    trie: Trie, terminal_rank: NDArray[np.uint32], changes: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]]:
    """Return the changed trie, built of all rows, and its members."""
    patches, _ = patches_of(trie, terminal_rank, changes, sources, whole=True)
    tokens = patches.tokens.astype(token_dtype(int(patches.tokens.max())), copy=False)
    built, members = build_trie(Rows(tokens, patches.offsets), patches.lcp)
    return built, patches.sources[members]


def _splice(
    trie: Trie, terminal_rank: NDArray[np.uint32], changes: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]] | None:
    """Return the changed trie, made of runs and patches, and its members; None if `targets` may need another type."""
    target_type = trie.tables.targets.dtype
    if target_type == np.uint64 and (np.diff(changes.offsets) != trie.longest).any():
        return None
    patches, per_level = patches_of(trie, terminal_rank, changes, sources, whole=False)
    per_level[NODES, 0] = 1
    items, depth = int(per_level[[LEAVES, TERMINALS]].sum()), np.arange(per_level.shape[1])
    tokens = int((per_level[LEAVES] * (depth + 1) + per_level[TERMINALS] * depth + per_level[TAIL_TOKENS]).sum())
    length = 0 if tokens % items else tokens // items  # of each, if they have one length
    due = type_of_targets(length, levels_of(per_level), max(trie.longest, changes.longest))
    if due != target_type or due == np.uint32:  # that depends on the longest tail, which is not known
        return None
    tables, starts = allocate(per_level, trie.tables.token_bits, trie.tables.labels.dtype, due, length)
    members = np.empty(items, np.uint32)
    _fill(trie.tables.pointers, patches, starts, tables.pointers, members, trie.items)
    inner = np.flatnonzero(members >= trie.items)
    members[inner] = patches.sources[members[inner] - trie.items]
    built, sizes = finish(tables, per_level, len(members), trie.shortest, trie.longest), np.diff(patches.offsets)
    if not trie.shortest == trie.longest == sizes.min(initial=trie.longest) == sizes.max(initial=trie.longest):
        shortest, longest = lengths_in_order(built)
        built = replace(built, shortest=shortest, longest=longest)
    return built, members


@compiled
def _fill(tables, patches, cursor, out, members, items):  # type: ignore[no-untyped-def]
    """Fill the new tables. members: of rows in patches, `items` and the number of the row."""
    store32(out.row_offsets, 0, 0)
    levels = patches.positions.shape[2] - 1
    for patch in range(len(patches.first)):
        begin, end = patches.positions[2 * patch], patches.positions[2 * patch + 1]
        for level in range(levels):
            if begin[EDGES, level] != end[EDGES, level]:
                _copy_run(tables, begin, end, level, cursor, out, members)
        cursor[:, : levels + 1] += end - begin
        if patch < len(patches.first) - 1:
            a, b = patches.first[patch], patches.first[patch + 1]
            lcp = patches.lcp[a + patch : b + patch + 1]
            fill(patches.tokens, patches.offsets[a : b + 1], 0, lcp, cursor, out, members, items + a)


@compiled
def _copy_run(tables, begin, end, level, cursor, out, members):  # type: ignore[no-untyped-def]
    """Copy one level of the items between two positions. `targets` are of one type, and become what `fill` leaves."""
    first, node, tail = begin[EDGES, level], begin[NODES, level + 1], begin[TAIL_TOKENS, level]
    edges, nodes = end[EDGES, level] - first, end[NODES, level + 1] - node
    tails, number = end[TAIL_TOKENS, level] - tail, begin[LEAVES, level]
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
    to = cursor[LEAVES, level]
    for k in range(edges - nodes):
        members[to + k] = number + k
    if nodes == 0:
        return
    shift, to = cursor[EDGES, level + 1] - begin[EDGES, level + 1], cursor[NODES, level + 1]
    for k in range(nodes):
        store32(out.row_offsets, to + k, first_edge(tables, node + k) + shift)
    number = tables.edges - (tables.nodes - 1) + begin[TERMINALS, level + 1]
    if begin[TERMINALS, level + 1] == end[TERMINALS, level + 1]:
        return
    next_end = cursor[TERMINALS, level + 1]
    for k in range(nodes):
        if bit(tables.terminal, node + k):
            set_bit(out.terminal, to + k)
            members[next_end] = number
            next_end, number = next_end + 1, number + 1


@compiled
def _copy_bits(source, at, target, to, bits):  # type: ignore[no-untyped-def]
    """Copy bits into zeros, from one address to another. `source` has a word after the last bit's."""
    if bits <= 0:
        return
    size = min(-to & 31, bits)
    put_bits(target, to, bits_from(source, at, size))
    at, to, bits = at + size, to + size, bits - size
    for k in range(bits >> 5):  # whole words
        store32(target, (to >> 5) + k, bits_from(source, at + 32 * k, 32))
    if bits & 31:
        put_bits(target, to + (bits & ~31), bits_from(source, at + (bits & ~31), bits & 31))
