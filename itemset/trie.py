"""The trie of an item set as flat arrays, built in one pass over the sorted items.

Nodes are the prefixes that two or more items share, in level order; edges stand in node order, labels ascending inside
a row. Where an item stands alone behind its edge, the rest of it is a *tail*: plain tokens, not a chain of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.jit import compiled
from itemset.rows import Rows, bounds

BLOCK = 32  # edges that share one pair of bases
MAX_INDEX = 2**31 - 5  # nodes, edges and tail tokens, each: a state is one of them or one of four marks


class Tables(NamedTuple):
    """What a walk reads: all of it goes to the device as it stands. Arrays are read-only.

    Behind edge e of block b = e // 32 stands, with m the highest bit of the type of `targets`:
    a node, ``node_base[b] + targets[e]``, where bit m of targets[e] is clear; else a tail, starting at
    ``tail_base[b] + (targets[e] without bit m)``; or, where targets[e] is all ones, nothing: the item ends there.

    row_offsets: [nodes + 1] uint32. Edges of node n are row_offsets[n] .. row_offsets[n + 1].
    terminal: [ceil(nodes / 32)] uint32. Bit n: an item ends at node n.
    labels: [edges] uint16 or uint32. The edge's token.
    targets: [edges] uint16, or uint32 where a tail has more than 1,056 tokens.
    node_base, tail_base: [ceil(edges / 32)] uint32.
    tails: uint32 words; token p of the tails is the (token_bits + 1) bits from bit p * (token_bits + 1) on, the highest
        of them set on the last token of a tail. One spare word at the end, so that two words can always be read.
    token_bits: bits that hold every token id of the set.
    """

    row_offsets: NDArray[np.uint32]
    terminal: NDArray[np.uint32]
    labels: NDArray[Any]
    targets: NDArray[Any]
    node_base: NDArray[np.uint32]
    tail_base: NDArray[np.uint32]
    tails: NDArray[np.uint32]
    token_bits: int


@dataclass(frozen=True)
class Trie:
    """Tables and what is known of them.

    level_nodes, level_edges: nodes and edges of each level, root first.
    tail_tokens: tokens in all tails.
    """

    tables: Tables
    items: int
    shortest: int
    longest: int
    level_nodes: tuple[int, ...]
    level_edges: tuple[int, ...]
    tail_tokens: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.tables[:-1])


def build_trie(rows: Rows, lcp: NDArray[np.uint16]) -> tuple[Trie, NDArray[np.uint32]]:
    """The trie of sorted distinct rows, with lcp as `rows.sort_unique` gives it.

    Returns the trie and `members` [N] uint32: the row behind each item number. Items are numbered by the edge at which
    they stand alone, in edge order, and after them those that end at a node, in node order.
    Raises ItemSetError where nodes, edges or tail tokens pass MAX_INDEX, before any table is made.
    """
    longest = rows.longest
    per_level = np.zeros((_COUNTS, longest + 2), np.int64)
    longest_tail = _count(*rows.layout, lcp, per_level)
    per_level[_NODES, 0] = 1
    totals = per_level.sum(axis=1)
    for name, total in zip(("nodes", "edges", "tail tokens"), totals[[_NODES, _EDGES, _TAIL_TOKENS]], strict=True):
        if total > MAX_INDEX:
            raise ItemSetError(f"the set needs {total:,} {name}, the limit is {MAX_INDEX:,}: split the set")
    nodes, edges, tail_tokens = (int(totals[i]) for i in (_NODES, _EDGES, _TAIL_TOKENS))
    token_bits = max(1, int(rows.tokens.max()).bit_length())
    wide_tail = longest_tail * (BLOCK - 1) >= 0x7FFF
    tables = Tables(
        row_offsets=np.empty(nodes + 1, np.uint32),
        terminal=np.zeros(-(-nodes // 32), np.uint32),
        labels=np.empty(edges, rows.tokens.dtype),
        targets=np.empty(edges, np.uint32 if wide_tail else np.uint16),
        node_base=np.empty(-(-edges // BLOCK), np.uint32),
        tail_base=np.empty(-(-edges // BLOCK), np.uint32),
        tails=np.zeros(-(-tail_tokens * (token_bits + 1) // 32) + 1, np.uint32),
        token_bits=token_bits,
    )
    members = np.empty(len(rows), np.uint32)
    starts = np.cumsum(per_level, axis=1) - per_level
    starts[_TERMINALS] += totals[_LEAVES]
    tables.row_offsets[nodes] = edges
    _fill(rows.tokens, *rows.layout, lcp, starts, tables, members)
    _set_targets(tables.targets, tables.node_base, tables.tail_base)
    for array in tables[:-1]:
        array.flags.writeable = False
    levels = int(np.count_nonzero(per_level[_EDGES]))
    trie = Trie(
        tables,
        items=len(rows),
        shortest=rows.shortest,
        longest=longest,
        level_nodes=tuple(per_level[_NODES, :levels].tolist()),
        level_edges=tuple(per_level[_EDGES, :levels].tolist()),
        tail_tokens=tail_tokens,
    )
    return trie, members


_NODES, _EDGES, _LEAVES, _TAIL_TOKENS, _TERMINALS = range(5)
_COUNTS = 5


@compiled
def _count(offsets, row_width, lcp, per_level):  # type: ignore[no-untyped-def]
    """Nodes (but the root), edges, leaf edges, tail tokens and terminals of each level; returns the longest tail."""
    longest_tail = 0
    for i in range(len(lcp) - 1):
        item, end = bounds(offsets, row_width, i)
        length = end - item
        left, right = np.int64(lcp[i]), np.int64(lcp[i + 1])
        alone = max(left, right)
        for depth in range(left + 1, right + 1):
            per_level[_NODES, depth] += 1
        for depth in range(left, min(alone, length - 1) + 1):
            per_level[_EDGES, depth] += 1
        if alone < length:
            tail = length - alone - 1
            per_level[_LEAVES, alone] += 1
            per_level[_TAIL_TOKENS, alone] += tail
            longest_tail = max(longest_tail, tail)
        else:
            per_level[_TERMINALS, alone] += 1
    return longest_tail


@compiled
def _fill(tokens, offsets, row_width, lcp, cursor, tables, members):  # type: ignore[no-untyped-def]
    """One pass over the items, with one write position a level. Leaves in `targets` what `_set_targets` expects:
    0 at an edge to a node, the highest bit and the tail's length at any other."""
    leaf = tables.targets.dtype.type(1 << (tables.targets.itemsize * 8 - 1))
    width = tables.token_bits + 1
    last_bit = np.uint64(1) << np.uint64(tables.token_bits)
    tables.row_offsets[0] = 0
    for i in range(len(lcp) - 1):
        item, end = bounds(offsets, row_width, i)
        length = end - item
        left, right = np.int64(lcp[i]), np.int64(lcp[i + 1])
        alone = max(left, right)
        for depth in range(left + 1, right + 1):
            node = cursor[_NODES, depth]
            cursor[_NODES, depth] += 1
            tables.row_offsets[node] = cursor[_EDGES, depth]
        for depth in range(left, min(alone, length - 1) + 1):
            edge = cursor[_EDGES, depth]
            cursor[_EDGES, depth] += 1
            tables.labels[edge] = tokens[item + depth]
            tables.targets[edge] = 0
        if alone == length:
            node = cursor[_NODES, length] - 1
            tables.terminal[node >> 5] |= np.uint32(1) << np.uint32(node & 31)
            members[cursor[_TERMINALS, length]] = i
            cursor[_TERMINALS, length] += 1
            continue
        tail = length - alone - 1
        tables.targets[cursor[_EDGES, alone] - 1] = leaf | tables.targets.dtype.type(tail)
        members[cursor[_LEAVES, alone]] = i
        cursor[_LEAVES, alone] += 1
        position = cursor[_TAIL_TOKENS, alone]
        cursor[_TAIL_TOKENS, alone] += tail
        for k in range(tail):
            bits = np.uint64(tokens[item + alone + 1 + k])
            if k == tail - 1:
                bits |= last_bit
            at = (position + k) * width
            bits <<= np.uint64(at & 31)
            tables.tails[at >> 5] |= np.uint32(bits & np.uint64(0xFFFFFFFF))
            tables.tails[(at >> 5) + 1] |= np.uint32(bits >> np.uint64(32))


@compiled
def _set_targets(targets, node_base, tail_base):  # type: ignore[no-untyped-def]
    """Turn node marks and tail lengths, in edge order, into distances from the block's bases."""
    leaf = np.int64(1) << np.int64(targets.itemsize * 8 - 1)
    node, tail = np.int64(1), np.int64(0)
    for edge in range(len(targets)):
        block = edge >> 5
        if edge & 31 == 0:
            node_base[block] = node
            tail_base[block] = tail
        mark = np.int64(targets[edge])
        if mark & leaf == 0:
            targets[edge] = node - node_base[block]
            node += 1
        elif mark == leaf:
            targets[edge] = 2 * leaf - 1
        else:
            targets[edge] = leaf | (tail - np.int64(tail_base[block]))
            tail += mark - leaf
