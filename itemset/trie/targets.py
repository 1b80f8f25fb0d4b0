"""Where an edge leads: to a node, into a tail, or nowhere, because the item ends there. In one of two forms.

The edges that lead to nodes do so in the nodes' order, and the tails of the others, the *leaves*, follow one another.
So how many of either come before an edge says where it leads. The type of `Tables.targets` tells how that is known:

*counted* (64 bits), if all items have one length: `targets` has a bit for each edge, set if it is a leaf, `node_base`
the nodes before each block of 32 edges. All tails of a level have one length: a product gives where one starts.
*stored* (16 or 32 bits), for items of any lengths: `targets` has a distance for each edge, from its block's bases.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.trie.pointers import bit, compiled, count_ones, element, load32, put_element, set_bit, store32

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


def far_block_of(targets: NDArray[Any], tail_base: NDArray[np.uint32], tail_tokens: int) -> int:
    """Return `Tables.far_block`: only there a block's base, modulo 2^32, is less than the one before."""
    if tail_tokens <= FAR or targets.itemsize == 8:
        return NO_BLOCK
    descends = np.flatnonzero(tail_base[1:] < tail_base[:-1])
    return int(descends[0]) + 1 if len(descends) else NO_BLOCK


@compiled
def is_leaf(tables, edge):  # type: ignore[no-untyped-def]
    """Return whether an edge leads to no node."""
    if tables.target_bytes == 8:
        return bit(tables.targets, edge) != 0
    return element(tables.targets, tables.target_bytes, edge) >> (tables.target_bytes * 8 - 1) != 0


@compiled
def node_at(tables, edge):  # type: ignore[no-untyped-def]
    """Return the node that an edge leads to, which is no leaf."""
    if tables.target_bytes == 8:
        return nodes_before(tables, edge) + 1
    return load32(tables.node_base, edge >> 5) + element(tables.targets, tables.target_bytes, edge)


@compiled
def tail_at(tables, edge):  # type: ignore[no-untyped-def]
    """Return where the tail of a leaf starts, -1 if it has none: the item ends with its edge."""
    if tables.target_bytes == 8:
        at = _level_of(tables, edge)
        return _counted_tail(tables, at, edge) if load32(tables.tail_base, at + LENGTH) else np.int64(-1)
    leaf = np.int64(1) << (tables.target_bytes * 8 - 1)
    target = element(tables.targets, tables.target_bytes, edge)
    return np.int64(-1) if target == 2 * leaf - 1 else tails_of(tables, edge >> 5) + (target - leaf)


@compiled
def tails_of(tables, block):  # type: ignore[no-untyped-def]
    """Return where the tails of a block of edges begin."""
    if tables.target_bytes == 8:
        return _counted_tail(tables, _level_of(tables, block << 5), block << 5)
    begins = load32(tables.tail_base, block)
    return begins + FAR if block >= tables.far_block else begins


@compiled
def nodes_before(tables, edge):  # type: ignore[no-untyped-def]
    """Count the edges before `edge` that lead to a node."""
    count = load32(tables.node_base, edge >> 5) - 1
    if tables.target_bytes == 8:
        before = load32(tables.targets, edge >> 5) & ((np.int64(1) << (edge & 31)) - 1)
        return count + (edge & 31) - count_ones(before)
    for e in range(edge & ~31, edge):
        count += 0 if is_leaf(tables, e) else 1
    return count


@compiled
def _level_of(tables, edge):  # type: ignore[no-untyped-def]
    """Return where the words of an edge's level begin in `tail_base`, of counted targets."""
    at = np.int64(0)
    while at + OF_A_LEVEL < tables.level_words and edge >= load32(tables.tail_base, at + OF_A_LEVEL + FIRST_EDGE):
        at += OF_A_LEVEL
    return at


@compiled
def _counted_tail(tables, at, edge):  # type: ignore[no-untyped-def]
    """Return where the first tail starts of the edges from `edge` on, whose level's words begin at `at`: 0 or more."""
    start = load32(tables.tail_base, at + START) | load32(tables.tail_base, at + START_HIGH) << 32
    leaves = edge - nodes_before(tables, edge)
    return (start + leaves * load32(tables.tail_base, at + LENGTH)) & (2 * MAX_TAIL_TOKENS - 1)


@compiled
def put_leaf(tables, edge, tail):  # type: ignore[no-untyped-def]
    """Make an edge a leaf, with this many tokens in its tail, in targets that began as zeros: for `set_bases`."""
    if tables.target_bytes == 8:
        set_bit(tables.targets, edge)
    else:
        put_element(tables.targets, tables.target_bytes, edge, np.int64(1) << (tables.target_bytes * 8 - 1) | tail)


@compiled
def set_bases(tables):  # type: ignore[no-untyped-def]
    """Finish what `put_leaf` began, all but the levels' words of counted targets."""
    node, tail, base = np.int64(1), np.int64(0), np.int64(0)
    if tables.target_bytes == 8:
        for block in range((tables.edges + 31) >> 5):
            store32(tables.node_base, block, node)
            node += min(32, tables.edges - block * 32) - count_ones(load32(tables.targets, block))
        return
    leaf = np.int64(1) << (tables.target_bytes * 8 - 1)
    first = np.int64(0)
    for edge in range(tables.edges):
        block = edge >> 5
        if edge & 31 == 0:
            first, base = node, tail
            store32(tables.node_base, block, node)
            store32(tables.tail_base, block, tail)
        mark = element(tables.targets, tables.target_bytes, edge)
        if mark & leaf == 0:
            put_element(tables.targets, tables.target_bytes, edge, node - first)
            node += 1
        elif mark == leaf:
            put_element(tables.targets, tables.target_bytes, edge, 2 * leaf - 1)
        else:
            put_element(tables.targets, tables.target_bytes, edge, leaf | (tail - base))
            tail += mark - leaf


def set_levels(tail_base: NDArray[np.uint32], before: NDArray[np.int64], length: int) -> None:
    """Fill in the levels' words of counted targets. before: [3, levels], edges, leaves, tail tokens before each."""
    words = tail_base.reshape(-1, OF_A_LEVEL)
    edges, leaves, tails = before[:, : len(words)]
    each = length - 1 - np.arange(len(words))
    start = tails - leaves * each  # no less than 0: tails of levels above are longer
    words[:] = np.stack((edges, start % FAR, start // FAR, each), axis=1)
