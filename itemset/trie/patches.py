"""Rows of a trie around changes: what is new, and the neighbours of each change.

How far an item stands alone depends on its neighbours, so these are read again beside what changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.numbering import terminals_before
from itemset.trie.pointers import first_edge, label
from itemset.trie.positions import add_run, next_edge, next_node, place_at
from itemset.trie.rows import Rows, grown
from itemset.trie.tables import COUNTS, Trie, count
from itemset.trie.walk import DEAD, END, TAIL, first_from, follow, is_terminal, tail_entry


class Patches(NamedTuple):
    """All patches, one after another; P of them, of R rows.

    tokens, offsets: the rows, as in `Rows`. sources: [R] uint32, what `Changed.members` says of them.
    first: [P + 1], the first row of each. lcp: [R + P], of each patch's rows, as `sort_unique` gives it, but that a
    patch's first row is compared with the item before the patch, and its end with the item after it.
    places: [2 P + 2, 4, levels], positions in the old trie (`positions.place_at`): before all items, where each patch
    begins and ends, and after all items.
    """

    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    sources: NDArray[np.uint32]
    first: NDArray[np.int64]
    lcp: NDArray[np.uint16]
    places: NDArray[np.int64]


def patches_of(
    trie: Trie, terminal_rank: NDArray[np.uint32], events: Rows, sources: NDArray[np.int64], *, whole: bool
) -> tuple[Patches, NDArray[np.int64]]:
    """Return the patches, and what `tables.count` counts of the changed trie."""
    deepest = max(trie.longest, events.longest, len(trie.level_edges))
    per_level = np.zeros((COUNTS, deepest + 2), np.int64)
    about = trie.tables.pointers, terminal_rank, trie.tail_tokens, len(trie.level_edges), trie.longest
    found = _find_patches(*about, events.tokens, events.offsets, sources, whole, per_level)
    if not len(found[3]):
        raise ValueError("its tables are no trie")
    return Patches(*found), per_level


@compiled
def _find_patches(  # type: ignore[no-untyped-def]
    tables, terminal_rank, tail_tokens, levels, longest, tokens, offsets, sources, whole, per_level
):
    """Return `Patches`, with no `first` if the tables are no trie. tokens .. sources: the changes, ascending.

    sources: of what comes; -1 of what goes. whole: one patch of all items. per_level: zeros, to which is added what
    `tables.count` counts.
    """
    out = np.empty(1 << 10, tokens.dtype)
    out_offsets, out_sources = np.zeros(1 << 8, np.int64), np.empty(1 << 8, np.uint32)
    first, lcp = np.zeros(1 << 8, np.int64), np.zeros(1 << 8, np.uint16)
    rows, patches = np.int64(0), np.int64(0)
    found, path = np.zeros(levels + 1, np.int64), np.zeros(longest + 2, tokens.dtype)
    edge, end, at = np.zeros(levels + 1, np.int64), np.zeros(levels + 1, np.int64), np.zeros(1, np.int64)
    event, events = np.int64(0), np.int64(len(offsets) - 1)
    places = np.empty((2 * events + 2, 4, levels), np.int64)
    nothing = (out, out_offsets, out_sources, first[:0], lcp, places)
    place_at(tables, terminal_rank, tail_tokens, edge, 0, places[0])
    last = _item_before(tables, levels, tokens, offsets[0], offsets[1], found)
    while event < events:
        if whole:
            last = np.int64(-1)
        shared = _enter(tables, found, last, edge, end, path, at)
        first, lcp = grown(first, patches + 2), grown(lcp, rows + patches + 1)
        for depth in range(at[0] + 1):  # of a level where the next item takes its first edge, that edge is next
            found[depth] = found[depth] + (1 if depth < shared else 0) if last >= 0 else 0
        place_at(tables, terminal_rank, tail_tokens, found, at[0], places[2 * patches + 1])
        add_run(places[2 * patches], places[2 * patches + 1], per_level)
        begun, changed = rows, False
        while True:
            number, length = _next_item(tables, terminal_rank, levels, longest, edge, end, path, at)
            if length < 0:
                return nothing
            here = np.int64(0)
            while event < events:
                here = np.int64(-1)
                if length > 0:
                    here = _compare(tokens, offsets[event], offsets[event + 1], path, length)
                if here >= 0:
                    break
                if sources[event] < 0:
                    return nothing  # it is no item
                size = offsets[event + 1] - offsets[event]
                out, out_offsets = grown(out, out_offsets[rows] + size), grown(out_offsets, rows + 2)
                out_sources, lcp = grown(out_sources, rows + 1), grown(lcp, rows + patches + 2)
                start = out_offsets[rows]
                for k in range(size):
                    out[start + k] = tokens[offsets[event] + k]
                out_offsets[rows + 1] = start + size
                out_sources[rows] = sources[event]
                lcp[rows + patches] = shared if rows == begun else _shared(out, out_offsets, rows)
                rows, event, changed = rows + 1, event + 1, True
            if length == 0:
                break
            if event < events and here == 0:
                event, changed = event + 1, True
                continue
            out, out_offsets = grown(out, out_offsets[rows] + length), grown(out_offsets, rows + 2)
            out_sources, lcp = grown(out_sources, rows + 1), grown(lcp, rows + patches + 2)
            start = out_offsets[rows]
            for k in range(length):
                out[start + k] = path[k]
            out_offsets[rows + 1] = start + length
            out_sources[rows] = number
            lcp[rows + patches] = shared if rows == begun else _shared(out, out_offsets, rows)
            rows += 1
            if changed and not whole:
                if event == events:
                    break
                last = _item_before(tables, levels, tokens, offsets[event], offsets[event + 1], found)
                if last >= 0 and found[last] >= next_edge(tables, edge, max(at[0], 0), last):
                    break  # the item before the next change is still to come
        depth = at[0]
        place_at(tables, terminal_rank, tail_tokens, edge, max(depth, 0), places[2 * patches + 2])
        while depth > 0 and edge[depth] == end[depth]:
            depth -= 1
        lcp[rows + patches] = max(depth, 0)
        count(out_offsets[begun : rows + 1], 0, lcp[begun + patches : rows + patches + 1], per_level)
        patches += 1
        first[patches] = rows
    edge[0] = first_edge(tables, 1)
    place_at(tables, terminal_rank, tail_tokens, edge, 0, places[2 * patches + 1])
    add_run(places[2 * patches], places[2 * patches + 1], per_level)
    return (
        out[: out_offsets[rows]],
        out_offsets[: rows + 1],
        out_sources[:rows],
        first[: patches + 1],
        lcp[: rows + patches],
        places[: 2 * patches + 2],
    )


@compiled
def _shared(tokens, offsets, row):  # type: ignore[no-untyped-def]
    """Return how many tokens a row shares with the one before."""
    a, b = offsets[row - 1], offsets[row]
    shared = np.int64(0)
    while shared < min(b - a, offsets[row + 1] - b) and tokens[a + shared] == tokens[b + shared]:
        shared += 1
    return shared


@compiled
def _compare(tokens, start, end, path, length):  # type: ignore[no-untyped-def]
    """Return -1, 0 or 1: a row comes before the item in `path`, is the same, or comes after it."""
    for k in range(min(end - start, length)):
        if tokens[start + k] != path[k]:
            return np.int64(-1) if tokens[start + k] < path[k] else np.int64(1)
    if end - start == length:
        return np.int64(0)
    return np.int64(-1) if end - start < length else np.int64(1)


@compiled
def _item_before(tables, levels, tokens, start, end, found):  # type: ignore[no-untyped-def]
    """Find the last item before a row: fill in its edges, and return the depth of the last of them, -1 if none is."""
    depth, best, deep, edge = np.int64(0), np.int64(-1), False, np.int64(-1)
    node = np.int64(0)
    while True:
        first, last = first_edge(tables, node), first_edge(tables, node + 1)
        if depth > 0 and start + depth < end and is_terminal(tables, node):
            best, edge, deep = depth - 1, found[depth - 1], False
        if start + depth == end:
            break
        token = tokens[start + depth]
        low = first_from(tables, first, last, token)
        if low > first:
            best, edge, deep = depth, low - 1, True
        if low == last or label(tables, low) != token:
            break
        found[depth] = low
        state = follow(tables, low)
        if state < DEAD and depth + 1 < levels:
            node, depth = state, depth + 1
            continue
        k, entry, less = start + depth + 1, np.int64(state == END), state == END and start + depth + 1 < end
        position = state - TAIL
        while state >= TAIL and k < end:
            entry = tail_entry(tables, position)
            if entry < 0:
                break
            here = entry & ((1 << tables.token_bits) - 1)
            k, position = k + 1, position + 1
            if here != tokens[k - 1]:
                less = here < tokens[k - 1]
                break
            if entry >> tables.token_bits:
                less = k < end
                break
        if less:
            best, edge, deep = depth, low, False
        break
    if best >= 0:
        found[best] = edge
        while deep and best + 1 < levels:
            state = follow(tables, found[best])
            if state >= DEAD:
                break
            best += 1
            found[best] = first_edge(tables, state + 1) - 1
    return best


@compiled
def _enter(tables, found, last, edge, end, path, at):  # type: ignore[no-untyped-def]
    """Prepare `_next_item` for the item of these edges; return how many tokens it shares with the one before.

    last: depth of its last edge; -1 for the first item of all.
    """
    at[0] = max(last, 0)
    edge[0], end[0] = 0, first_edge(tables, 1)
    shared, node = np.int64(0), np.int64(0)
    for depth in range(last + 1):
        first = first_edge(tables, node)
        if found[depth] > first or (depth > 0 and is_terminal(tables, node)):
            shared = np.int64(depth)
        edge[depth], end[depth] = found[depth] + (1 if depth < last else 0), first_edge(tables, node + 1)
        path[depth] = label(tables, found[depth])
        if depth < last:
            node = follow(tables, found[depth])
    return shared


@compiled
def _next_item(tables, terminal_rank, levels, longest, edge, end, path, at):  # type: ignore[no-untyped-def]
    """Put the tokens of the next item into `path`; return its number and length, 0 after the last, -1 of no trie.

    edge, end: of each level down to at[0], the next edge and the end of the row.
    """
    depth = at[0]
    while depth >= 0 and edge[depth] == end[depth]:
        depth -= 1
    at[0] = depth
    if depth < 0:
        return np.int64(-1), np.int64(0)
    leaves = tables.edges - (tables.nodes - 1)
    while depth < levels and depth < longest and edge[depth] < end[depth]:
        taken = edge[depth]
        edge[depth] += 1
        path[depth] = label(tables, taken)
        state = follow(tables, taken)
        if state >= END:
            at[0], length, position = depth, depth + 1, state - TAIL
            while state >= TAIL:
                entry = tail_entry(tables, position)
                if entry < 0 or length >= longest:
                    return np.int64(-1), np.int64(-1)
                path[length] = entry & ((1 << tables.token_bits) - 1)
                length, position = length + 1, position + 1
                if entry >> tables.token_bits:
                    break
            return taken + 1 - next_node(tables, taken), np.int64(length)
        depth += 1
        if state >= DEAD or depth >= levels:
            break
        at[0] = depth
        edge[depth], end[depth] = first_edge(tables, state), first_edge(tables, state + 1)
        if is_terminal(tables, state):
            return leaves + terminals_before(tables, terminal_rank, state), np.int64(depth)
    return np.int64(-1), np.int64(-1)
