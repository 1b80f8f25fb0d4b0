"""A trie back to its sorted rows, and two lots of sorted rows as one: changes to a set without sorting it again.

The rows of a trie are found as `tables` has written them: with one reading position for each level. Merging compares
by the prefixes that neighbours share, so most rows are placed without looking at a token of theirs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.keys import in_item_order
from itemset.trie.rows import Distinct, Rows, bounds, token_dtype
from itemset.trie.tables import Trie
from itemset.trie.walk import END, TAIL, follow, is_terminal, tail_entry


def unfold(trie: Trie, key_starts: NDArray[np.uint32] | None) -> Distinct:
    """Return the items of a whole set as `sort_unique` returned them; `order` says where each one's keys are.

    key_starts: as in `keys.Keys`. Raises ValueError if the tables are not those of a trie: of a damaged file.
    """
    tables = trie.tables
    nodes = np.cumsum([0, *trie.level_nodes])
    ends = np.unpackbits(tables.terminal.view(np.uint8), bitorder="little")[: nodes[-1]]
    terminals = [int(ends[first:end].sum()) for first, end in pairwise(nodes)]
    leaves = [edges - below for edges, below in zip(trie.level_edges, [*trie.level_nodes[1:], 0], strict=True)]
    depths = range(len(leaves))
    size = sum(d * ends + (d + 1) * alone for d, ends, alone in zip(depths, terminals, leaves, strict=True))
    width = trie.longest if trie.shortest == trie.longest else 0
    offsets = np.zeros(0 if width else trie.items + 1, np.int64)
    tokens = np.empty(size + trie.tail_tokens, tables.labels.dtype)
    lcp, numbers = np.zeros(trie.items + 1, np.uint16), np.empty(trie.items, np.uint32)
    cursors = np.zeros((3, len(leaves) + 2), np.int64)
    cursors[_NODES, : len(nodes)] = nodes
    cursors[_LEAVES, 1 : len(leaves) + 1] = np.cumsum(leaves)
    cursors[_TERMINALS, 1 : len(leaves) + 1] = np.cumsum(terminals)
    cursors[_TERMINALS] += sum(leaves)
    if not _unfold(tables, trie.longest, cursors, tokens, offsets, width, lcp, numbers):
        raise ValueError("its tables are no trie")
    order, starts = in_item_order(numbers, key_starts)
    rows = Rows(tokens, width=width) if width else Rows(tokens, offsets)
    return Distinct(rows, order, starts, lcp)


def merge(before: Distinct, gone: NDArray[np.bool_], new: Distinct) -> Distinct:
    """Return what `sort_unique` returns for the rows of `before` that stay, with the new ones after them.

    gone: [positions of `before`], which of them do not stay. `order` of the result has positions of `before` as they
    were, those of `new` after all of them.
    """
    positions, added = len(gone), len(_order(new))
    rows = len(before.rows) + len(new.rows)
    widths = {part.rows.layout[1] for part in (before, new) if len(part.rows)}
    width = widths.pop() if len(widths) == 1 else 0
    tokens = np.empty(
        len(before.rows.tokens) + len(new.rows.tokens),
        np.promote_types(before.rows.tokens.dtype, new.rows.tokens.dtype),
    )
    offsets = np.zeros(0 if width else rows + 1, np.int64)
    lcp, starts = np.zeros(rows + 1, np.uint16), np.zeros(rows + 1, np.uint32)
    order = np.empty(positions + added, np.uint32)
    count, size = _merge(_loop(before), gone, _loop(new), tokens, offsets, width, lcp, starts, order)
    tokens, lcp, starts, order = tokens[:size], lcp[: count + 1], starts[: count + 1], order[: starts[count]]
    lcp[count] = 0
    if tokens.itemsize > 2 and count:
        tokens = tokens.astype(token_dtype(int(tokens.max())), copy=False)
    merged = Rows(tokens, width=width) if width else Rows(tokens, offsets[: count + 1])
    return Distinct(merged, order, None if len(order) == count else starts, lcp)


_NODES, _LEAVES, _TERMINALS = range(3)


def _order(rows: Distinct) -> NDArray[np.uint32]:
    return np.arange(len(rows.rows), dtype=np.uint32) if rows.order is None else rows.order


def _loop(rows: Distinct) -> tuple[Any, ...]:
    """Return what the loop takes of sorted rows."""
    starts = np.zeros(0, np.uint32) if rows.starts is None else rows.starts
    return rows.rows.tokens, *rows.rows.layout, rows.lcp, _order(rows), starts


@compiled
def _unfold(tables, longest, cursors, tokens, offsets, width, lcp, numbers):  # type: ignore[no-untyped-def]
    """Fill in the items, ascending, and their numbers. Return whether the tables are those of so many items.

    cursors: [3, levels + 2], the first node of each level, and the numbers of its first leaf and terminal.
    """
    levels, items, room = cursors.shape[1] - 2, len(numbers), len(tokens)
    edge, end = np.zeros(levels + 1, np.int64), np.zeros(levels + 1, np.int64)
    path = np.zeros(levels + 1, tokens.dtype)
    end[0] = tables.row_offsets[1]
    cursors[_NODES, 0] += 1
    depth, shared, item, position = np.int64(0), np.int64(0), 0, np.int64(0)
    while depth >= 0:
        if edge[depth] == end[depth]:
            depth -= 1
            continue
        state = follow(tables, edge[depth])
        path[depth] = tables.labels[edge[depth]]
        edge[depth] += 1
        shared = min(shared, depth)
        depth += 1
        length, tail = depth, np.int64(-1)
        if state < END:  # a node, or DEAD
            if depth >= levels or state != cursors[_NODES, depth]:
                return False
            cursors[_NODES, depth] += 1
            edge[depth], end[depth] = tables.row_offsets[state], tables.row_offsets[state + 1]
            if not is_terminal(tables, state):
                continue
            kind = _TERMINALS
        else:
            depth -= 1
            kind = _LEAVES
            tail = state - TAIL if state >= TAIL else tail
        if item == items or position + length > room:
            return False
        number = cursors[kind, depth]
        cursors[kind, depth] += 1
        if number >= items:
            return False
        numbers[item] = number
        lcp[item] = shared
        for k in range(length):
            tokens[position + k] = path[k]
        position += length
        while tail >= 0:
            entry = tail_entry(tables, tail)
            if entry < 0 or length == longest or position == room:
                return False
            tokens[position] = entry & ((1 << tables.token_bits) - 1)
            position, length = position + 1, length + 1
            tail = tail + 1 if entry >> tables.token_bits == 0 else np.int64(-1)
        if width == 0:
            offsets[item + 1] = position
        elif length != width:
            return False
        item += 1
        shared = length
    return item == items and position == room


@compiled
def _merge(before, gone, new, tokens, offsets, width, lcp, starts, order):  # type: ignore[no-untyped-def]
    """Fill in the rows of both, ascending; return how many they are, and how many tokens they have."""
    old_tokens, old_offsets, old_width, old_lcp, old_order, old_starts = before
    new_tokens, new_offsets, new_width, new_lcp, new_order, new_starts = new
    i, j, count, size, keys = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    old, news = len(old_lcp) - 1, len(new_lcp) - 1
    # What the next row of each shares with the last row that was taken.
    old_shared, new_shared = np.int64(0), np.int64(0)
    while i < old or j < news:
        if i < old:
            kept = keys
            first, end = (np.int64(old_starts[i]), np.int64(old_starts[i + 1])) if len(old_starts) else (i, i + 1)
            for k in range(first, end):
                if not gone[old_order[k]]:
                    order[kept] = old_order[k]
                    kept += 1
            if kept == keys:  # none of its keys stays
                i += 1
                old_shared = min(old_shared, np.int64(old_lcp[i]))
                continue
            a, a_end = bounds(old_offsets, old_width, i)
        take_old, take_new = bool(i < old), bool(j < news)
        if take_new:
            b, b_end = bounds(new_offsets, new_width, j)
        shared = old_shared if take_old else new_shared
        if take_old and take_new:
            if old_shared != new_shared:
                take_new = bool(new_shared > old_shared)
                take_old = not take_new
                shared = max(old_shared, new_shared)
            else:
                same = np.int64(old_shared)
                while a + same < a_end and b + same < b_end and old_tokens[a + same] == new_tokens[b + same]:
                    same += 1
                if a + same == a_end or b + same == b_end:
                    take_old, take_new = bool(a + same == a_end), bool(b + same == b_end)
                else:
                    take_old = bool(old_tokens[a + same] < new_tokens[b + same])
                    take_new = not take_old
                if not take_new:
                    new_shared = same
                if not take_old:
                    old_shared = same
        lcp[count], starts[count] = shared, keys
        if take_old:
            keys = kept
            for k in range(a, a_end):
                tokens[size + k - a] = old_tokens[k]
            size += a_end - a
            i += 1
            old_shared = np.int64(old_lcp[i])
        if take_new:
            first, end = (np.int64(new_starts[j]), np.int64(new_starts[j + 1])) if len(new_starts) else (j, j + 1)
            for k in range(first, end):
                order[keys] = len(gone) + new_order[k]
                keys += 1
            if not take_old:
                for k in range(b, b_end):
                    tokens[size + k - b] = new_tokens[k]
                size += b_end - b
            j += 1
            new_shared = np.int64(new_lcp[j])
        count += 1
        if width == 0:
            offsets[count] = size
    starts[count] = keys
    return count, size
