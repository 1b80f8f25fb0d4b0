"""The rows around changes: new items, and the neighbours of each change, whose tails depend on it.

A *position* is a place between two items, as counts of what the tables hold before it: int64 [COUNTS, levels + 1], in
the layout of `tables.count`. It follows from the next edge of the first levels down to one of them: below that, the
next node of a level is the one that the next edge of the level above leads to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.numbering import terminals_before
from itemset.trie.pointers import first_edge, label
from itemset.trie.rows import Rows, grown
from itemset.trie.tables import COUNTS, EDGES, LEAVES, NODES, TAIL_TOKENS, TERMINALS, Trie, count
from itemset.trie.targets import next_tail, nodes_before
from itemset.trie.walk import DEAD, END, TAIL, first_from, follow, is_terminal, tail_entry


class Patches(NamedTuple):
    """P patches of R rows in all, one after another.

    tokens, offsets: the rows, as in `Rows`. sources: [R] uint32, as `Changed.members`.
    first: [P + 1] int64, the first row of each patch.
    lcp: [R + P] uint16, for each patch as `sort_unique` returns it, but that its first row is compared with the item
        before the patch, and its end with the item after it.
    positions: [2 P + 2, COUNTS, levels + 1] int64, in the old trie: before all items, where each patch begins and ends,
        after all items.
    """

    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    sources: NDArray[np.uint32]
    first: NDArray[np.int64]
    lcp: NDArray[np.uint16]
    positions: NDArray[np.int64]


def patches_of(
    trie: Trie, terminal_rank: NDArray[np.uint32], changes: Rows, sources: NDArray[np.int64], *, whole: bool
) -> tuple[Patches, NDArray[np.int64]]:
    """Return the patches, and what `tables.count` counts of the changed trie.

    changes: distinct rows, ascending. sources: as `Changed.members` for each new row, -1 for a removed one.
    whole: make one patch of all items. Raises ValueError if the tables are not those of a trie.
    """
    per_level = np.zeros((COUNTS, max(trie.longest, changes.longest, len(trie.level_edges)) + 2), np.int64)
    limits = trie.tail_tokens, len(trie.level_edges), trie.longest, trie.items if whole else 0
    patches = _find(trie.tables.pointers, terminal_rank, limits, changes.tokens, changes.offsets, sources, per_level)
    if not len(patches[3]):
        raise ValueError("its tables are no trie")
    return Patches(*patches), per_level


@compiled
def _find(tables, terminal_rank, limits, tokens, offsets, sources, per_level):  # type: ignore[no-untyped-def]
    """Return the fields of `Patches`; `first` is empty if the tables are no trie.

    limits: tail tokens, levels, tokens of the longest item, and how many items one patch of all has (else 0).
    per_level: zeros, to which is added what `tables.count` counts.
    """
    tail_tokens, levels, longest, whole = limits
    changes = len(sources)
    most = whole + 3 * changes + 1  # rows: each change and its two neighbours
    out, out_offsets, out_sources = (
        np.empty(1 << 10, tokens.dtype),
        np.zeros(most + 1, np.int64),
        np.empty(most, np.uint32),
    )
    first, lcp = np.zeros(changes + 1, np.int64), np.zeros(most + changes, np.uint16)
    positions = np.zeros((2 * changes + 2, COUNTS, levels + 1), np.int64)
    nothing = (out, out_offsets, out_sources, first[:0], lcp, positions)
    near, path = np.zeros(levels + 1, np.int64), np.zeros(longest + 2, tokens.dtype)
    edge, end, at = np.zeros(levels + 1, np.int64), np.zeros(levels + 1, np.int64), np.zeros(1, np.int64)
    row, patch, change = np.int64(0), np.int64(0), np.int64(0)
    _set_position(tables, terminal_rank, tail_tokens, edge, 0, positions[0])
    last = _item_before(tables, levels, tokens, offsets[0], offsets[1], near)
    while change < changes:
        shared = _enter(tables, near, -1 if whole else last, edge, end, path, at)
        _set_position(tables, terminal_rank, tail_tokens, near, at[0], positions[2 * patch + 1])
        per_level[:, : levels + 1] += positions[2 * patch + 1] - positions[2 * patch]
        changed = False
        while True:
            number, length = _next_item(tables, terminal_rank, levels, longest, edge, end, path, at)
            if length < 0 or row + changes - change >= most:  # no trie: of one, there is room
                return nothing
            order = np.int64(0)
            while change < changes:
                order = np.int64(-1)
                if length > 0:
                    order = _compare(tokens, offsets[change], offsets[change + 1], path, length)
                if order >= 0:
                    break
                if sources[change] < 0:
                    return nothing  # it is no item
                begin, size = offsets[change], offsets[change + 1] - offsets[change]
                out = _append(out, out_offsets, row, tokens, begin, size)
                out_sources[row] = sources[change]
                lcp[row + patch] = shared if row == first[patch] else _shared(out, out_offsets, row)
                row, change, changed = row + 1, change + 1, True
            if length == 0:
                break
            if change < changes and order == 0:
                change, changed = change + 1, True
                continue
            out = _append(out, out_offsets, row, path, 0, length)
            out_sources[row] = number
            lcp[row + patch] = shared if row == first[patch] else _shared(out, out_offsets, row)
            row += 1
            if changed and not whole:
                if change == changes:
                    break
                last = _item_before(tables, levels, tokens, offsets[change], offsets[change + 1], near)
                if last >= 0 and near[last] >= _next_edge(tables, edge, max(at[0], 0), last):
                    break  # the item before the next change is still to come
        depth = max(at[0], 0)
        _set_position(tables, terminal_rank, tail_tokens, edge, depth, positions[2 * patch + 2])
        while depth > 0 and edge[depth] == end[depth]:
            depth -= 1
        lcp[row + patch] = depth
        begin = first[patch]
        count(out_offsets[begin : row + 1], 0, lcp[begin + patch : row + patch + 1], per_level)
        patch += 1
        first[patch] = row
    edge[0] = first_edge(tables, 1)
    _set_position(tables, terminal_rank, tail_tokens, edge, 0, positions[2 * patch + 1])
    per_level[:, : levels + 1] += positions[2 * patch + 1] - positions[2 * patch]
    return (
        out[: out_offsets[row]],
        out_offsets[: row + 1],
        out_sources[:row],
        first[: patch + 1],
        lcp[: row + patch],
        positions[: 2 * patch + 2],
    )


@compiled
def _append(out, offsets, row, tokens, begin, size):  # type: ignore[no-untyped-def]
    """Append a row of `size` tokens from `begin` on; return `out`, or a larger copy."""
    start = offsets[row]
    out = grown(out, start + size)
    for k in range(size):
        out[start + k] = tokens[begin + k]
    offsets[row + 1] = start + size
    return out


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
    return np.int64(np.sign(end - start - length))


@compiled
def _next_node(tables, edge):  # type: ignore[no-untyped-def]
    """Return the node that the first edge to a node leads to, from `edge` on."""
    return tables.nodes if edge >= tables.edges else nodes_before(tables, edge) + 1


@compiled
def _next_edge(tables, edge, depth, level):  # type: ignore[no-untyped-def]
    """Return the next edge of a level, at the position whose next edges, down to level `depth`, are in `edge`."""
    following = edge[min(depth, level)]
    for _ in range(depth, level):
        following = first_edge(tables, _next_node(tables, following))
    return following


@compiled
def _set_position(tables, terminal_rank, tail_tokens, edges, depth, position):  # type: ignore[no-untyped-def]
    """Fill in the position whose next edges, down to level `depth`, are in `edges`."""
    for level in range(position.shape[1] - 1):
        edge = edges[level] if level <= depth else first_edge(tables, position[NODES, level])
        node = _next_node(tables, edge)
        position[EDGES, level], position[LEAVES, level] = edge, edge - (node - 1)
        position[TAIL_TOKENS, level] = next_tail(tables, edge, tail_tokens)
        position[NODES, level + 1] = node
        position[TERMINALS, level + 1] = terminals_before(tables, terminal_rank, node)


@compiled
def _item_before(tables, levels, tokens, start, end, near):  # type: ignore[no-untyped-def]
    """Set `near` to the edges of the last item before a row; return the depth of the last, -1 if there is none."""
    depth, best, deep, edge = np.int64(0), np.int64(-1), False, np.int64(-1)
    node = np.int64(0)
    while True:
        first, last = first_edge(tables, node), first_edge(tables, node + 1)
        if depth > 0 and start + depth < end and is_terminal(tables, node):
            best, edge, deep = depth - 1, near[depth - 1], False
        if start + depth == end:
            break
        token = tokens[start + depth]
        low = first_from(tables, first, last, token)
        if low > first:
            best, edge, deep = depth, low - 1, True
        if low == last or label(tables, low) != token:
            break
        near[depth] = low
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
        near[best] = edge
        while deep and best + 1 < levels:
            state = follow(tables, near[best])
            if state >= DEAD:
                break
            best += 1
            near[best] = first_edge(tables, state + 1) - 1
    return best


@compiled
def _enter(tables, near, last, edge, end, path, at):  # type: ignore[no-untyped-def]
    """Prepare `_next_item` for the item with the edges `near`; return how many tokens it shares with the one before.

    last: depth of its last edge; -1 for the first item of all. `near` becomes the next edges of the position before it.
    """
    at[0] = max(last, 0)
    edge[0], end[0] = 0, first_edge(tables, 1)
    shared, node = np.int64(0), np.int64(0)
    for depth in range(last + 1):
        first = first_edge(tables, node)
        if near[depth] > first or (depth > 0 and is_terminal(tables, node)):
            shared = np.int64(depth)
        edge[depth], end[depth] = near[depth] + (1 if depth < last else 0), first_edge(tables, node + 1)
        path[depth] = label(tables, near[depth])
        if depth < last:
            node = follow(tables, near[depth])
    if last < 0:
        near[0] = 0
    near[:shared] += 1  # these edges lead to the item before, too
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
            return taken + 1 - _next_node(tables, taken), np.int64(length)
        depth += 1
        if state >= DEAD or depth >= levels:
            break
        at[0] = depth
        edge[depth], end[depth] = first_edge(tables, state), first_edge(tables, state + 1)
        if is_terminal(tables, state):
            return leaves + terminals_before(tables, terminal_rank, state), np.int64(depth)
    return np.int64(-1), np.int64(-1)
