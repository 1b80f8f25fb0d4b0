"""A trie with some items removed and others added, without building the rest again.

Between two changes, in the order of the items, the tables hold the same at every level as before, only elsewhere. So a
changed trie is *runs* of items that are copied level by level, and *patches* between them: rows of tokens, of which the
tables are made as `tables` makes them of all rows. A patch holds what is new, and the neighbours of each change, since
how far an item stands alone depends on its neighbours.

A position between two items is the next edge of each level. Its first entries say it all: after the last of them, the
next node of a level is the one that the next edge of the level above leads to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.numbering import branches_before, items_at, numbers_of
from itemset.trie.rows import Distinct, Rows, sort_unique, token_dtype
from itemset.trie.soundness import lengths
from itemset.trie.tables import (
    COUNTS,
    EDGES,
    LEAVES,
    NODES,
    TAIL_TOKENS,
    TERMINALS,
    Trie,
    allocate,
    build_trie,
    count,
    fill,
    finish,
)
from itemset.trie.walk import DEAD, END, TAIL, follow, is_terminal, tail_entry, token_runs

_WIDEST = 0x7FFF // 31  # tokens of a tail for which targets of 16 bits are enough


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
    if not _consistent(trie.tables, trie.tail_tokens):
        raise ValueError("its tables are no trie")
    same = numbers_of(trie.tables, terminal_rank, new.rows)
    removed = gone.copy()
    removed[same[same >= 0]] = False
    numbers = np.flatnonzero(removed)
    fresh = np.flatnonzero(same < 0)
    before = items_at(trie.tables, terminal_rank, numbers, trie.longest)
    added = new.rows.take(fresh)
    tokens = np.concatenate((before.tokens, added.tokens))
    offsets = np.concatenate((before.offsets, before.offsets[-1] + added.offsets[1:]))
    sources = np.concatenate((np.full(len(numbers), -1), trie.items + fresh))
    if not len(sources):
        return Changed(trie, np.arange(trie.items, dtype=np.uint32), same)
    events = sort_unique(Rows(tokens, offsets))
    if events.order is not None:
        sources = sources[events.order]
    bits = trie.tables.token_bits
    longest = max(trie.longest, int(np.diff(offsets).max()))
    whole = int(tokens.max()) >> bits != 0 or longest > _WIDEST or trie.tables.targets.itemsize != 2
    changed = None if whole else _changed(trie, terminal_rank, events.rows, sources)
    if changed is not None and (before.tokens >> (bits - 1)).any() and not _needs(changed[0], bits):
        changed = None  # fewer bits are enough for the tokens that are left
    if changed is None:
        changed = _rebuilt(trie, terminal_rank, events.rows, sources)
    return Changed(*changed, same)


def _needs(trie: Trie, bits: int) -> bool:
    """Return whether a token of the trie has so many bits."""
    return any((run >> (bits - 1)).any() for run in token_runs(trie.tables, trie.tail_tokens))


def _rebuilt(
    trie: Trie, terminal_rank: NDArray[np.uint32], events: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]]:
    """Return the changed trie, built of all rows, and its members."""
    patches, _ = _patches_of(trie, terminal_rank, events, sources, whole=True)
    tokens = patches.tokens.astype(token_dtype(int(patches.tokens.max())), copy=False)
    built, members = build_trie(Rows(tokens, patches.offsets), patches.lcp)
    return built, patches.sources[members]


def _changed(
    trie: Trie, terminal_rank: NDArray[np.uint32], events: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]]:
    """Return the changed trie, of runs and patches, and its members."""
    patches, per_level = _patches_of(trie, terminal_rank, events, sources, whole=False)
    per_level[NODES, 0] = 1
    tables, starts = allocate(per_level, trie.tables.token_bits, trie.tables.labels.dtype, wide_tail=False)
    members = np.empty(int(per_level[[LEAVES, TERMINALS]].sum()), np.uint32)
    levels = len(trie.level_edges)
    _fill_all(trie.tables, terminal_rank, trie.tail_tokens, levels, patches, starts, tables, members, trie.items)
    inner = np.flatnonzero(members >= trie.items)
    members[inner] = patches.sources[members[inner] - trie.items]
    built, sizes = finish(tables, per_level, len(members), trie.shortest, trie.longest), np.diff(patches.offsets)
    if not trie.shortest == trie.longest == sizes.min(initial=trie.longest) == sizes.max(initial=trie.longest):
        shortest, longest = lengths(tables, np.array(built.level_nodes), np.array(built.level_edges))
        built = replace(built, shortest=int(shortest), longest=int(longest))
    return built, members


class _Patches(NamedTuple):
    """All patches, one after another; P of them, of R rows.

    tokens, offsets: the rows, as in `Rows`. sources: [R] uint32, what `Changed.members` says of them.
    first: [P + 1], the first row of each. lcp: [R + P], of each patch's rows, as `sort_unique` gives it, but that a
    patch's first row is compared with the item before the patch, and its end with the item after it.
    positions: of the items in the old trie at which each patch begins and ends, one after another; ends: [2 P + 1].
    """

    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    sources: NDArray[np.uint32]
    first: NDArray[np.int64]
    lcp: NDArray[np.uint16]
    positions: NDArray[np.int64]
    ends: NDArray[np.int64]


def _patches_of(
    trie: Trie, terminal_rank: NDArray[np.uint32], events: Rows, sources: NDArray[np.int64], *, whole: bool
) -> tuple[_Patches, NDArray[np.int64]]:
    """Return the patches, and what `tables.count` counts of the changed trie."""
    deepest = max(trie.longest, events.longest, len(trie.level_edges))
    per_level = np.zeros((COUNTS, deepest + 2), np.int64)
    about = trie.tables, terminal_rank, trie.tail_tokens, len(trie.level_edges), trie.longest
    found = _find_patches(*about, events.tokens, events.offsets, sources, whole, per_level)
    if not len(found[3]):
        raise ValueError("its tables are no trie")
    return _Patches(*found), per_level


@compiled
def _find_patches(  # type: ignore[no-untyped-def]
    tables, terminal_rank, tail_tokens, levels, longest, tokens, offsets, sources, whole, per_level
):
    """Return `_Patches`, with no `first` if the tables are no trie. tokens .. sources: the changes, ascending.

    sources: of what comes; -1 of what goes. whole: one patch of all items. per_level: zeros, to which is added what
    `tables.count` counts.
    """
    out = np.empty(1 << 10, tokens.dtype)
    out_offsets, out_sources = np.zeros(1 << 8, np.int64), np.empty(1 << 8, np.uint32)
    first, lcp = np.zeros(1 << 8, np.int64), np.zeros(1 << 8, np.uint16)
    positions, ends = np.empty(1 << 8, np.int64), np.zeros(1 << 8, np.int64)
    rows, patches, marks = np.int64(0), np.int64(0), np.int64(0)
    found, path = np.zeros(levels + 1, np.int64), np.zeros(longest + 2, tokens.dtype)
    edge, end, at = np.zeros(levels + 1, np.int64), np.zeros(levels + 1, np.int64), np.zeros(1, np.int64)
    nothing = (out, out_offsets, out_sources, first[:0], lcp, positions, ends)
    event, events = np.int64(0), np.int64(len(offsets) - 1)
    begin, close = np.zeros((4, levels), np.int64), np.zeros((4, levels), np.int64)
    _place(tables, terminal_rank, tail_tokens, np.zeros(1, np.int64), begin)
    last = _item_before(tables, levels, tokens, offsets[0], offsets[1], found)
    while event < events:
        if whole:
            last = np.int64(-1)
        shared = _enter(tables, found, last, edge, end, path, at)
        first, lcp, ends = _grown(first, patches + 2), _grown(lcp, rows + patches + 1), _grown(ends, 2 * patches + 3)
        positions = _grown(positions, marks + levels + 1)
        for depth in range(at[0] + 1):  # of a level where the next item takes its first edge, that edge is next
            positions[marks] = found[depth] + (1 if depth < shared else 0) if last >= 0 else 0
            marks += 1
        ends[2 * patches + 1] = marks
        _place(tables, terminal_rank, tail_tokens, positions[ends[2 * patches] : marks], close)
        _add_run(begin, close, per_level)
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
                out, out_offsets = _grown(out, out_offsets[rows] + size), _grown(out_offsets, rows + 2)
                out_sources, lcp = _grown(out_sources, rows + 1), _grown(lcp, rows + patches + 2)
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
            out, out_offsets = _grown(out, out_offsets[rows] + length), _grown(out_offsets, rows + 2)
            out_sources, lcp = _grown(out_sources, rows + 1), _grown(lcp, rows + patches + 2)
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
                if last >= 0 and found[last] >= _next_edge(tables, edge, max(at[0], 0), last):
                    break  # the item before the next change is still to come
        depth = at[0]
        positions = _grown(positions, marks + levels + 1)
        for k in range(max(depth, 0) + 1):
            positions[marks] = edge[k]
            marks += 1
        while depth > 0 and edge[depth] == end[depth]:
            depth -= 1
        lcp[rows + patches] = max(depth, 0)
        _place(tables, terminal_rank, tail_tokens, positions[ends[2 * patches + 1] : marks], begin)
        count(out_offsets[begun : rows + 1], 0, lcp[begun + patches : rows + patches + 1], per_level)
        patches += 1
        first[patches] = rows
        ends[2 * patches] = marks
    _place(tables, terminal_rank, tail_tokens, tables.row_offsets[1:2], close)
    _add_run(begin, close, per_level)
    return (
        out[: out_offsets[rows]],
        out_offsets[: rows + 1],
        out_sources[:rows],
        first[: patches + 1],
        lcp[: rows + patches],
        positions[:marks],
        ends[: 2 * patches + 1],
    )


@compiled
def _consistent(tables, tail_tokens):  # type: ignore[no-untyped-def]
    """Return whether what is copied is counted alike: the loops here check no index again.

    As `numbering.in_order`, but that it does not look into the tails, which takes five times as long.
    """
    nodes = np.int64(len(tables.row_offsets) - 1)
    node, position = np.int64(1), np.int64(0)
    for parent in range(nodes):
        first, end = np.int64(tables.row_offsets[parent]), np.int64(tables.row_offsets[parent + 1])
        if parent >= node or first == end:
            return False
        for edge in range(first, end):
            if edge & 31 == 0:
                if tables.node_base[edge >> 5] != node or tables.tail_base[edge >> 5] < position:
                    return False
                position = np.int64(tables.tail_base[edge >> 5])
            if edge > first and tables.labels[edge] <= tables.labels[edge - 1]:
                return False
            state = follow(tables, edge)
            if state == node:
                node += 1
            elif state >= TAIL + position:
                position = state - TAIL + 1
            elif state != END:
                return False
    last = tables.terminal[nodes >> 5] >> np.uint32(nodes & 31) if nodes & 31 else np.uint32(0)
    return node == nodes and position <= tail_tokens and last == 0 and tables.terminal[0] & np.uint32(1) == 0


@compiled
def _grown(array, size):  # type: ignore[no-untyped-def]
    """Return the array, or a copy of it with room for `size` entries."""
    if size <= len(array):
        return array
    larger = np.zeros(2 * size, array.dtype)
    larger[: len(array)] = array
    return larger


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
        low, high = np.int64(tables.row_offsets[node]), np.int64(tables.row_offsets[node + 1])
        if depth > 0 and start + depth < end and is_terminal(tables, node):
            best, edge, deep = depth - 1, found[depth - 1], False
        if start + depth == end:
            break
        first, last, token = low, high, tokens[start + depth]
        while low < high:
            middle = (low + high) >> 1
            if tables.labels[middle] < token:
                low = middle + 1
            else:
                high = middle
        if low > first:
            best, edge, deep = depth, low - 1, True
        if low == last or tables.labels[low] != token:
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
            label = entry & ((1 << tables.token_bits) - 1)
            k, position = k + 1, position + 1
            if label != tokens[k - 1]:
                less = label < tokens[k - 1]
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
            found[best] = np.int64(tables.row_offsets[state + 1]) - 1
    return best


@compiled
def _enter(tables, found, last, edge, end, path, at):  # type: ignore[no-untyped-def]
    """Prepare `_next_item` for the item of these edges; return how many tokens it shares with the one before.

    last: depth of its last edge; -1 for the first item of all.
    """
    at[0] = max(last, 0)
    edge[0], end[0] = 0, tables.row_offsets[1]
    shared, node = np.int64(0), np.int64(0)
    for depth in range(last + 1):
        first = np.int64(tables.row_offsets[node])
        if found[depth] > first or (depth > 0 and is_terminal(tables, node)):
            shared = np.int64(depth)
        edge[depth], end[depth] = found[depth] + (1 if depth < last else 0), tables.row_offsets[node + 1]
        path[depth] = tables.labels[found[depth]]
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
    leaves = len(tables.labels) - (len(tables.row_offsets) - 2)
    while depth < levels and depth < longest and edge[depth] < end[depth]:
        taken = edge[depth]
        edge[depth] += 1
        path[depth] = tables.labels[taken]
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
            return taken - branches_before(tables, taken), np.int64(length)
        depth += 1
        if state >= DEAD or depth >= levels:
            break
        at[0] = depth
        edge[depth], end[depth] = tables.row_offsets[state], tables.row_offsets[state + 1]
        if is_terminal(tables, state):
            return leaves + _terminals_before(tables, terminal_rank, state), np.int64(depth)
    return np.int64(-1), np.int64(-1)


@compiled
def _terminals_before(tables, terminal_rank, node):  # type: ignore[no-untyped-def]
    """Count the nodes before `node` at which an item ends."""
    if terminal_rank[-1] == 0:
        return np.int64(0)
    rank = np.int64(terminal_rank[node >> 5])
    for other in range(node & ~31, node):
        rank += (np.int64(tables.terminal[other >> 5]) >> (other & 31)) & 1
    return rank


@compiled
def _next_node(tables, edge):  # type: ignore[no-untyped-def]
    """Return the node that the first edge to a node leads to, from `edge` on."""
    nodes = np.int64(len(tables.row_offsets) - 1)
    return nodes if edge >= len(tables.labels) else min(nodes, branches_before(tables, edge) + 1)


@compiled
def _next_tail(tables, edge, tail_tokens):  # type: ignore[no-untyped-def]
    """Return the position of the first tail of the edges from `edge` on."""
    block, edges = edge >> 5, len(tables.labels)
    leaf = np.int64(1) << np.int64(tables.targets.itemsize * 8 - 1)
    for e in range(edge, min((block + 1) * 32, edges)):
        target = np.int64(tables.targets[e])
        if target & leaf and target != 2 * leaf - 1:
            return np.int64(tables.tail_base[block]) + target - leaf
    return np.int64(tables.tail_base[block + 1]) if block + 1 < len(tables.tail_base) else np.int64(tail_tokens)


@compiled
def _next_edge(tables, edge, depth, level):  # type: ignore[no-untyped-def]
    """Return the next edge of a level, at a position whose first entries, to `depth`, are in `edge`."""
    found = edge[min(depth, level)]
    for _ in range(depth, level):
        found = np.int64(tables.row_offsets[_next_node(tables, found)])
    return found


@compiled
def _place(tables, terminal_rank, tail_tokens, entries, place):  # type: ignore[no-untyped-def]
    """Fill in a position: for every level its next edge, and what comes next from that one on.

    place: [4, levels], the next edge, the node and the tail that come next, and the terminals before that node.
    """
    for level in range(place.shape[1]):
        edge = entries[level] if level < len(entries) else np.int64(tables.row_offsets[place[_NODE, level - 1]])
        node = _next_node(tables, edge)
        place[_EDGE, level], place[_NODE, level] = edge, node
        place[_TAIL, level] = _next_tail(tables, edge, tail_tokens)
        place[_ENDS, level] = _terminals_before(tables, terminal_rank, node)


_EDGE, _NODE, _TAIL, _ENDS = range(4)


@compiled
def _add_run(begin, end, per_level):  # type: ignore[no-untyped-def]
    """Add what the tables hold of the items between two positions: as `tables.count` counts it, and `fill` goes on."""
    for level in range(begin.shape[1]):
        edges = end[_EDGE, level] - begin[_EDGE, level]
        nodes = end[_NODE, level] - begin[_NODE, level]
        per_level[EDGES, level] += edges
        per_level[LEAVES, level] += edges - nodes
        per_level[TAIL_TOKENS, level] += end[_TAIL, level] - begin[_TAIL, level]
        per_level[NODES, level + 1] += nodes
        per_level[TERMINALS, level + 1] += end[_ENDS, level] - begin[_ENDS, level]


@compiled
def _mark(tables, patches, number):  # type: ignore[no-untyped-def]
    """Return the first entries of a position: the beginnings and ends of the patches, between those of all items."""
    if 0 <= number < len(patches.ends) - 1:
        return patches.positions[patches.ends[number] : patches.ends[number + 1]]
    alone = np.zeros(1, np.int64)
    if number >= 0:
        alone[0] = tables.row_offsets[1]
    return alone


@compiled
def _fill_all(tables, terminal_rank, tail_tokens, levels, patches, cursor, out, members, items):  # type: ignore[no-untyped-def]
    """Fill the new tables. members: of rows in patches, `items` and the number of the row."""
    begin, end = np.zeros((4, levels), np.int64), np.zeros((4, levels), np.int64)
    _place(tables, terminal_rank, tail_tokens, _mark(tables, patches, -1), begin)
    out.row_offsets[0] = 0
    for patch in range(len(patches.first)):
        _place(tables, terminal_rank, tail_tokens, _mark(tables, patches, 2 * patch), end)
        for level in range(levels):
            if begin[_EDGE, level] != end[_EDGE, level]:
                _copy_run(tables, begin, end, level, cursor, out, members)
        _add_run(begin, end, cursor)
        if patch < len(patches.first) - 1:
            a, b = patches.first[patch], patches.first[patch + 1]
            lcp = patches.lcp[a + patch : b + patch + 1]
            fill(patches.tokens, patches.offsets[a : b + 1], 0, lcp, cursor, out, members, items + a)
            _place(tables, terminal_rank, tail_tokens, _mark(tables, patches, 2 * patch + 1), begin)


@compiled
def _copy_run(tables, begin, end, level, cursor, out, members):  # type: ignore[no-untyped-def]
    """Copy one level of the items between two positions, `targets` as `fill` leaves them."""
    first, node, tail, ends = begin[_EDGE, level], begin[_NODE, level], begin[_TAIL, level], begin[_ENDS, level]
    edges, nodes, tails = end[_EDGE, level] - first, end[_NODE, level] - node, end[_TAIL, level] - tail
    bit, to, lone, position = np.uint16(1 << 15), cursor[EDGES, level], np.int64(-1), tail
    for k in range(edges):
        out.labels[to + k] = tables.labels[first + k]
        target = tables.targets[first + k]
        out.targets[to + k] = target & bit
        if target & bit and target != 0xFFFF:  # a tail, which ends where the next one begins
            starts = np.int64(tables.tail_base[(first + k) >> 5]) + (target & 0x7FFF)
            if lone >= 0:
                out.targets[lone] = bit | np.uint16(starts - position)
            lone, position = to + k, starts
    if lone >= 0:
        out.targets[lone] = bit | np.uint16(tail + tails - position)
    width = tables.token_bits + 1
    _copy_bits(tables.tails, tail * width, out.tails, cursor[TAIL_TOKENS, level] * width, tails * width)
    number, to = first - node + 1, cursor[LEAVES, level]
    for k in range(edges - nodes):
        members[to + k] = number + k
    if nodes == 0:
        return
    shift, to = cursor[EDGES, level + 1] - begin[_EDGE, level + 1], cursor[NODES, level + 1]
    for k in range(nodes):
        out.row_offsets[to + k] = np.int64(tables.row_offsets[node + k]) + shift
    if ends == end[_ENDS, level]:
        return
    number, next_end = len(tables.labels) - (len(tables.row_offsets) - 2) + ends, cursor[TERMINALS, level + 1]
    for k in range(nodes):
        if tables.terminal[(node + k) >> 5] >> np.uint32((node + k) & 31) & np.uint32(1):
            out.terminal[(to + k) >> 5] |= np.uint32(1) << np.uint32((to + k) & 31)
            members[next_end] = number
            next_end, number = next_end + 1, number + 1


@compiled
def _copy_bits(source, at, target, to, bits):  # type: ignore[no-untyped-def]
    """Copy so many bits into zeros. `source` has a word after the last bit's."""
    while bits > 0:
        shift, size = np.uint64(at & 31), min(32 - (to & 31), bits)
        pair = np.uint64(source[at >> 5]) | (np.uint64(source[(at >> 5) + 1]) << np.uint64(32))
        some = (pair >> shift) & np.uint64((1 << size) - 1)
        target[to >> 5] |= np.uint32((some << np.uint64(to & 31)) & np.uint64(0xFFFFFFFF))
        at, to, bits = at + size, to + size, bits - size
        if bits >= 32:  # whole words
            shift, word, ahead = np.uint64(at & 31), at >> 5, to >> 5
            for k in range(bits >> 5):
                pair = np.uint64(source[word + k]) | (np.uint64(source[word + k + 1]) << np.uint64(32))
                target[ahead + k] = np.uint32((pair >> shift) & np.uint64(0xFFFFFFFF))
            at, to, bits = at + (bits & ~31), to + (bits & ~31), bits & 31
