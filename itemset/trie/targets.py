"""Where an edge leads: to a node, into a tail, or nowhere, because the item ends there. In one of two forms.

The edges that lead to nodes do so in the nodes' order, and the tails of the others, the *leaves*, follow one another.
So how many of either come before an edge says where it leads. The type of `Tables.targets` tells how that is known:

*counted* (64 bits), if all items have one length: `targets` has a bit for each edge, set if it is a leaf. `node_base`
says how many nodes come before each block of 32 edges, and the bits before the edge in its block say the rest. All
tails of a level have one length, so a product gives where a tail starts.
*stored* (16 or 32 bits), for items of any lengths: `targets` has a distance for each edge, from its block's bases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from itemset.trie.jit import compiled

BLOCK = 32  # edges that share a base
FAR = 1 << 32  # tail tokens that 32 bits tell apart
MAX_TAIL_TOKENS = 2 * FAR  # of stored targets, one block's bases are the first that begin again at 0
NO_BLOCK = 1 << 30

FIRST_EDGE, START, START_HIGH, LENGTH = range(4)
"""Of counted targets, the words of `tail_base` for each level: its first edge; where the tail of leaf 0 would start if
all leaves were of this level, 64 bits; and the length of its tails."""
OF_A_LEVEL = 4
_MOST_LEVELS = 16  # of counted targets: which of them an edge has is found by looking at one after the other


def type_of_targets(length: int, levels: int, longest_tail: int) -> type[np.unsignedinteger[Any]]:
    """Return the type of `targets`. length: tokens of each item, 0 if they differ. levels: those that have edges."""
    if length and levels <= _MOST_LEVELS:
        return np.uint64
    return np.uint32 if longest_tail * (BLOCK - 1) >= 0x7FFF else np.uint16


def sizes(dtype: Any, edges: int, levels: int) -> tuple[int, int]:
    """Return the lengths of `targets` and of `tail_base`."""
    if np.dtype(dtype).itemsize == 8:
        return -(-edges // 64), OF_A_LEVEL * levels
    return edges, -(-edges // BLOCK)


def far_block_of(targets: NDArray[Any], tail_base: NDArray[np.uint32], tail_tokens: int) -> int:
    """Return `Tables.far_block`, which a file does not hold."""
    if tail_tokens <= FAR or targets.itemsize == 8:
        return NO_BLOCK
    descends = np.flatnonzero(tail_base[1:] < tail_base[:-1])
    return int(descends[0]) + 1 if len(descends) else NO_BLOCK


@intrinsic
def count_ones(_typing: Any, _word: Any) -> Any:
    """Return how many bits of a uint32 are set."""
    return types.uint32(types.uint32), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


@compiled
def is_leaf(tables, edge):  # type: ignore[no-untyped-def]
    """Return whether an edge leads to no node."""
    if tables.targets.itemsize == 8:
        return (tables.targets[edge >> 6] >> np.uint64(edge & 63)) & np.uint64(1) != 0
    return np.int64(tables.targets[edge]) >> (tables.targets.itemsize * 8 - 1) != 0


@compiled
def node_at(tables, edge):  # type: ignore[no-untyped-def]
    """Return the node that an edge leads to, which is no leaf."""
    if tables.targets.itemsize == 8:
        return nodes_before(tables, edge) + 1
    return np.int64(tables.node_base[edge >> 5]) + np.int64(tables.targets[edge])


@compiled
def tail_at(tables, edge):  # type: ignore[no-untyped-def]
    """Return where the tail of a leaf starts, -1 if it has none: the item ends with its edge."""
    if tables.targets.itemsize == 8:
        at = level_of(tables.tail_base, edge)
        return _counted_tail(tables, at, edge) if tables.tail_base[at + LENGTH] else np.int64(-1)
    leaf = np.int64(1) << np.int64(tables.targets.itemsize * 8 - 1)
    target = np.int64(tables.targets[edge])
    return np.int64(-1) if target == 2 * leaf - 1 else tails_of(tables, edge >> 5) + (target - leaf)


@compiled
def tails_of(tables, block):  # type: ignore[no-untyped-def]
    """Return where the tails of a block of edges begin."""
    if tables.targets.itemsize == 8:
        return _counted_tail(tables, level_of(tables.tail_base, block << 5), block << 5)
    begins = np.int64(tables.tail_base[block])
    return begins + FAR if block >= tables.far_block else begins


@compiled
def next_tail(tables, edge, tail_tokens):  # type: ignore[no-untyped-def]
    """Return where the first tail starts of the edges from `edge` on."""
    block, edges = edge >> 5, len(tables.labels)
    if tables.targets.itemsize == 8:
        if edge >= edges:
            return np.int64(tail_tokens)
        return _counted_tail(tables, level_of(tables.tail_base, edge), edge)
    for e in range(edge, min((block + 1) * 32, edges)):
        position = tail_at(tables, e) if is_leaf(tables, e) else np.int64(-1)
        if position >= 0:
            return position
    return tails_of(tables, block + 1) if block + 1 < len(tables.node_base) else np.int64(tail_tokens)


@compiled
def nodes_before(tables, edge):  # type: ignore[no-untyped-def]
    """Count the edges before `edge` that lead to a node."""
    count = np.int64(tables.node_base[edge >> 5]) - 1
    if tables.targets.itemsize == 8:
        before = _leaves(tables.targets, edge >> 5) & ((np.uint32(1) << np.uint32(edge & 31)) - np.uint32(1))
        return count + (edge & 31) - np.int64(count_ones(np.uint32(before)))
    for e in range(edge & ~31, edge):
        count += 0 if is_leaf(tables, e) else 1
    return count


@compiled
def _leaves(targets, block):  # type: ignore[no-untyped-def]
    """Return the bits of a block's edges, of counted targets."""
    return np.uint32(targets[block >> 1] >> np.uint64((block & 1) << 5) & np.uint64(0xFFFFFFFF))


@compiled
def level_of(tail_base, edge):  # type: ignore[no-untyped-def]
    """Return where the words of an edge's level begin in `tail_base`, of counted targets."""
    at = 0
    while at + OF_A_LEVEL < len(tail_base) and edge >= tail_base[at + OF_A_LEVEL + FIRST_EDGE]:
        at += OF_A_LEVEL
    return at


@compiled
def _counted_tail(tables, at, edge):  # type: ignore[no-untyped-def]
    """Return where the first tail starts of the edges from `edge` on, whose level's words begin at `at`.

    What a damaged file makes of it is still no less than 0, and compared with the tails' size where they are read.
    """
    start = np.int64(tables.tail_base[at + START]) | np.int64(tables.tail_base[at + START_HIGH]) << 32
    leaves = edge - nodes_before(tables, edge)
    return (start + leaves * np.int64(tables.tail_base[at + LENGTH])) & np.int64(2 * MAX_TAIL_TOKENS - 1)


@compiled
def put_leaf(targets, edge, tail):  # type: ignore[no-untyped-def]
    """Make an edge a leaf, with so many tokens in its tail, in targets that began as zeros: for `set_bases`."""
    if targets.itemsize == 8:
        targets[edge >> 6] |= np.uint64(1) << np.uint64(edge & 63)
    else:
        targets[edge] = (np.int64(1) << np.int64(targets.itemsize * 8 - 1)) | tail


@compiled
def set_bases(targets, node_base, tail_base, edges):  # type: ignore[no-untyped-def]
    """Finish what `put_leaf` began, all but the levels' words of counted targets. Return `Tables.far_block`."""
    node, tail, base, far_block = np.int64(1), np.int64(0), np.int64(0), NO_BLOCK
    if targets.itemsize == 8:
        for block in range(len(node_base)):
            node_base[block] = node
            node += min(32, edges - block * 32) - np.int64(count_ones(_leaves(targets, block)))
        return far_block
    leaf = np.int64(1) << np.int64(targets.itemsize * 8 - 1)
    for edge in range(edges):
        block = edge >> 5
        if edge & 31 == 0:
            node_base[block], base = node, tail
            tail_base[block] = tail & (FAR - 1)
            if tail >= FAR:
                far_block = min(far_block, block)
        mark = np.int64(targets[edge])
        if mark & leaf == 0:
            targets[edge] = node - node_base[block]
            node += 1
        elif mark == leaf:
            targets[edge] = 2 * leaf - 1
        else:
            targets[edge] = leaf | (tail - base)
            tail += mark - leaf
    return far_block


def set_levels(
    tail_base: NDArray[np.uint32],
    edges: NDArray[np.int64],
    leaves: NDArray[np.int64],
    tails: NDArray[np.int64],
    length: int,
) -> None:
    """Fill in the levels' words of counted targets. edges, leaves, tails: how many come before each level."""
    for level, words in enumerate(tail_base.reshape(-1, OF_A_LEVEL)):
        tail = length - 1 - level
        start = int(tails[level]) - int(leaves[level]) * tail  # no less than 0: tails of levels above are longer
        words[[FIRST_EDGE, START, START_HIGH, LENGTH]] = edges[level], start % FAR, start // FAR, tail
