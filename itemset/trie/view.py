"""A set seen through a filter: which edges of its tables still lead to an item, and at which nodes one may still end.

A filter leaves a bit for each. What a request omits is a short sorted list: the highest entries that lead to no other.
"""

import numpy as np
from numpy.typing import NDArray

from itemset.trie.numbering import last_edge, node_of, nth_edge, own_entry
from itemset.trie.pointers import bit, compiled, first_edge, load32, store32
from itemset.trie.tables import TERMINAL, Tables
from itemset.trie.targets import is_leaf
from itemset.trie.walk import is_alive, is_terminal


def bits_of(tables: Tables, lives: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return `Tables.alive` and `.terminal` of a view, in one pass over the edges. lives: [items], which it has."""
    alive = np.zeros(-(-len(tables.labels) // 32), np.uint32)
    terminal = np.zeros(len(tables.terminal), np.uint32)
    node_lives = np.empty(tables.pointers.nodes, np.uint8)
    _mark(tables.pointers, lives.view(np.uint8), alive.ctypes.data, terminal.ctypes.data, node_lives)
    return alive, terminal


def dead_of(tables: Tables, whole: Tables, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return `Tables.dead` of a set or a view without items of its own, in a time in proportion to these.

    whole: of the whole set. numbers: ascending and distinct. With no item left, it holds all edges of the root.
    """
    ends = np.empty(len(numbers), np.int64)
    _place_ends(tables.pointers, whole.pointers, whole.terminal_rank.ctypes.data, numbers, ends)
    ends.sort()
    found = np.empty(len(ends), np.uint32)
    return np.union1d(tables.dead, found[: _climb(tables.pointers, ends[::-1].copy(), found)])


@compiled
def _mark(tables, lives, alive, terminal, node_lives):  # type: ignore[no-untyped-def]
    """From the last edge to the first: what an edge leads to comes after it. Safe as a walk is.

    alive, terminal: addresses of zeros. lives, node_lives: 0 or 1; no branch depends on them, as half would be
    mispredicted.
    """
    nodes, edges = tables.nodes, tables.edges
    leaf, ends_at = edges - (nodes - 1), len(lives)  # numbers of the items that are still to come
    child, first, word = nodes, edges, np.int64(0)
    for node in range(nodes - 1, -1, -1):
        lives_on = np.uint8(0)
        if bit(tables.terminal, node):
            ends_at = max(ends_at - 1, 0)
            lives_on = lives[ends_at]
            store32(terminal, node >> 5, load32(terminal, node >> 5) | np.int64(lives_on) << (node & 31))
        end, first = first, first_edge(tables, node)
        for edge in range(end - 1, first - 1, -1):
            if is_leaf(tables, edge):
                leaf = max(leaf - 1, 0)  # only a damaged file's are more
                here = lives[leaf]
            else:
                child = max(child - 1, 0)
                here = node_lives[child]
            lives_on |= here
            word |= np.int64(here) << (edge & 31)
            if edge & 31 == 0:
                store32(alive, edge >> 5, word)
                word = np.int64(0)
        node_lives[node] = lives_on


@compiled
def _place_ends(tables, whole, terminal_rank, numbers, ends):  # type: ignore[no-untyped-def]
    """Put down, for each item, node << 32 | entry: the node in whose row it ends, and its entry of `dead` there."""
    for i in range(len(numbers)):
        entry = own_entry(tables, last_edge(whole, terminal_rank, numbers[i]), numbers[i])
        node = entry - TERMINAL if entry >= TERMINAL else node_of(tables, entry)
        ends[i] = node << 32 | entry


@compiled
def _climb(tables, ends, found):  # type: ignore[no-untyped-def]
    """Put down the highest entries of `dead` that leave out these items; return how many there are.

    ends: of `_place_ends`, descending. What waits above them is a queue, which descends as well: parents are in the
    order of their children.
    """
    room, at, count = len(ends), 0, 0
    above, first, waiting = np.empty(room, np.int64), 0, 0
    while at < room or waiting:
        begin, node = count, ends[at] >> 32 if at < room else np.int64(-1)
        if waiting:
            node = max(node, above[first] >> 32)
        while True:
            if at < room and ends[at] >> 32 == node:
                entry, at = ends[at], at + 1
            elif waiting and above[first] >> 32 == node:
                entry, first, waiting = above[first], (first + 1) % room, waiting - 1
            else:
                break
            found[count] = entry & 0xFFFFFFFF
            count += 1
        if node <= 0 or _has_more(tables, node, count - begin):
            continue
        edge = nth_edge(tables, node - 1, 0)
        parent = node_of(tables, edge)
        if parent < node:  # but in a damaged file
            above[(first + waiting) % room] = parent << 32 | edge
            waiting, count = waiting + 1, begin
    return count


@compiled
def _has_more(tables, node, entries):  # type: ignore[no-untyped-def]
    """Return whether a node has more edges to take and items to end at than this many."""
    left = np.int64(is_terminal(tables, node)) - entries
    for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
        if left > 0:
            break
        left += is_alive(tables, edge)
    return left > 0
