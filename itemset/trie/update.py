"""Updates of a trie: its items unfolded in their order, without those that go and with the new ones, and built again.

The longest part of a build, to sort, is not needed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.numbering import numbers_of, terminals_before
from itemset.trie.pointers import bit, bits_from, first_edge, label
from itemset.trie.rows import Distinct, Rows, token_dtype
from itemset.trie.tables import Trie, build_trie
from itemset.trie.targets import has_tail, is_leaf, tail_at


class Changed(NamedTuple):
    """A changed trie, and where its items come from.

    members: [items] uint32, for each new item number the old one, or the old number of items plus that of a new row.
    same: [new rows] int64, the old number of each new row that was an item, -1 of the others.
    """

    trie: Trie
    members: NDArray[np.uint32]
    same: NDArray[np.int64]


def change(trie: Trie, terminal_rank: NDArray[np.uint32], gone: NDArray[np.bool_], new: Distinct) -> Changed:
    """Return the trie, which must be `in_order`, without the items that are gone, and with the new rows.

    terminal_rank: of `numbering.rank_terminals`. gone: [items], by number; an item that is gone and new stays.
    """
    same = numbers_of(trie.tables, trie.tables, terminal_rank, new.rows)
    gone = gone.copy()
    gone[same[same >= 0]] = False
    fresh = np.flatnonzero(same < 0)
    if not len(fresh) and not gone.any():
        return Changed(trie, np.arange(trie.items, dtype=np.uint32), same)
    added, items = new.rows.take(fresh), trie.items - int(np.count_nonzero(gone)) + len(fresh)
    edges, nodes = np.array(trie.level_edges), np.array(trie.level_nodes)
    leaves = edges - np.append(nodes[1:], 0)
    most = int(leaves @ np.arange(1, len(edges) + 1)) + trie.tail_tokens + len(edges) * int(terminal_rank[-1])
    # Memory of which the system gives what is written.
    tokens = np.empty(most + len(added.tokens), np.promote_types(trie.tables.labels.dtype, added.tokens.dtype))
    offsets, lcp, sources = np.zeros(items + 1, np.int64), np.zeros(items + 1, np.uint16), np.empty(items, np.uint32)
    cursors = np.zeros((5, len(edges) + 1), np.int64)
    cursors[_EDGE, :-1], cursors[_NODE, :-1], cursors[_TAIL] = np.cumsum(edges) - edges, np.cumsum(nodes), -1
    out = tokens, offsets, lcp, sources
    _merge(trie.tables.pointers, terminal_rank, gone, cursors, added.tokens, added.offsets, *out)
    tokens = tokens[: offsets[-1]]
    tokens = tokens.astype(token_dtype(int(tokens.max())), copy=False)
    inner = np.flatnonzero(sources >= trie.items)
    sources[inner] = trie.items + fresh
    width = trie.longest if trie.shortest == trie.longest and (np.diff(added.offsets) == trie.longest).all() else 0
    built, members = build_trie(Rows(tokens, None if width else offsets, width=width), lcp)
    return Changed(built, sources[members], same)


_EDGE, _NODE, _TAIL, _TOKEN, _LAST = range(5)
"""Of each level: its next edge; the node that its next edge to a node leads to; where its next tail starts, -1 before
the first; and of the path to the next item, the edge's token, and where the row of that edge ends."""


@compiled
def _merge(tables, terminal_rank, gone, cursors, added, starts, tokens, offsets, lcp, sources):  # type: ignore[no-untyped-def]
    """Fill in the rows of the items that stay and of the added ones, as `build_trie` takes them, and their sources.

    cursors: [5, levels + 1], see `_EDGE`. added, starts: rows, as in `Rows`.
    """
    width, token_mask = tables.token_bits + 1, (np.int64(1) << tables.token_bits) - 1
    depth, row, more, shared, begin = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    cursors[_LAST, 0] = first_edge(tables, 1)
    while True:
        while depth >= 0 and cursors[_EDGE, depth] == cursors[_LAST, depth]:
            depth -= 1
        edge, number, length, end = np.int64(-1), np.int64(-1), np.int64(0), begin
        shared = min(shared, depth)
        while depth >= 0 and length == 0:
            edge, node = cursors[_EDGE, depth], cursors[_NODE, depth]
            cursors[_EDGE, depth] += 1
            cursors[_TOKEN, depth] = label(tables, edge)
            if is_leaf(tables, edge):
                number, length = edge - (node - 1), depth + 1
                break
            cursors[_NODE, depth] += 1
            depth += 1
            cursors[_LAST, depth] = first_edge(tables, node + 1)
            if bit(tables.terminal, node):
                leaves = tables.edges - (tables.nodes - 1)
                number, length = leaves + terminals_before(tables, terminal_rank, node), depth
        for k in range(length):
            tokens[end + k] = cursors[_TOKEN, k]
        end += length
        if length > depth >= 0 and has_tail(tables, edge, depth):
            position, entry = cursors[_TAIL, depth], np.int64(0)
            if position < 0:
                position = tail_at(tables, edge)
            while entry >> tables.token_bits == 0:
                entry = bits_from(tables.tails, position * width, width)
                tokens[end] = entry & token_mask
                position, end = position + 1, end + 1
            cursors[_TAIL, depth] = position
        if number >= 0 and gone[number]:
            continue
        while more < len(starts) - 1 and (number < 0 or _is_less(added, starts, more, tokens, begin, end)):
            size = starts[more + 1] - starts[more]
            for k in range(end - 1, begin - 1, -1):  # the item gives room
                tokens[k + size] = tokens[k]
            for k in range(size):
                tokens[begin + k] = added[starts[more] + k]
            offsets[row + 1], sources[row] = begin + size, len(gone) + more
            lcp[row] = _common(tokens, offsets, row)
            row, more, begin, end = row + 1, more + 1, begin + size, end + size
            shared = np.int64(-1)
        if number < 0:
            return
        offsets[row + 1], sources[row] = end, number
        lcp[row] = shared if shared >= 0 else _common(tokens, offsets, row)
        row, begin, shared = row + 1, end, depth


@compiled
def _is_less(added, starts, row, tokens, begin, end):  # type: ignore[no-untyped-def]
    """Return whether an added row comes before the tokens begin .. end - 1, which are another item."""
    start, size = starts[row], starts[row + 1] - starts[row]
    for k in range(min(size, end - begin)):
        if added[start + k] != tokens[begin + k]:
            return added[start + k] < tokens[begin + k]
    return size < end - begin


@compiled
def _common(tokens, offsets, row):  # type: ignore[no-untyped-def]
    """Count the tokens that a row shares with the one before."""
    begin, shared = offsets[row], 0
    before = offsets[max(row - 1, 0)]
    while shared < min(begin - before, offsets[row + 1] - begin) and tokens[before + shared] == tokens[begin + shared]:
        shared += 1
    return shared
