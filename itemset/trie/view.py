"""A set seen through a filter: which edges of its tables still lead to an item. The tables stay as they are.

A filter leaves one bit an edge, and one a node: whether an item may end there. What one request leaves out beside is a
short sorted list: for each item the highest edge that leads to no other.
"""

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from itemset.trie.numbering import last_edge, node_of, nth_edge
from itemset.trie.pointers import array_at, bit, compiled, first_edge, load32, store32
from itemset.trie.tables import TERMINAL, Tables
from itemset.trie.targets import is_leaf
from itemset.trie.walk import first_dead, follow, is_alive, is_terminal


def bits_of(tables: Tables, lives: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return `Tables.alive` and `Tables.terminal` of a view.

    tables: of the whole set. lives: [items], which items the view has, by their numbers. One pass over the edges.
    """
    alive = np.zeros(-(-len(tables.labels) // 32), np.uint32)
    terminal = np.zeros(len(tables.terminal), np.uint32)
    node_lives = np.empty(tables.pointers.nodes, np.uint8)
    _mark(tables.pointers, lives.view(np.uint8), alive.ctypes.data, terminal.ctypes.data, node_lives)
    return alive, terminal


def dead_of(
    tables: Tables, whole: Tables, terminal_rank: NDArray[np.uint32], numbers: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Return `Tables.dead` of a set or a view without the items of these numbers, ascending and distinct.

    tables: of the set or the view; the items are among its own. whole, terminal_rank: of the whole set. With no item
    left, the answer holds all edges of the root. It takes a time in proportion to the numbers.
    """
    found = np.array(_climb(tables.pointers, whole.pointers, terminal_rank, numbers), np.int64)
    return np.union1d(tables.dead, found.astype(np.uint32))


@compiled
def _mark(tables, lives, alive, terminal, node_lives):  # type: ignore[no-untyped-def]
    """From the last edge to the first: what an edge leads to comes after it.

    alive, terminal: addresses of zeros. lives, node_lives: 0 or 1. No branch depends on them: half of them would be
    foreseen wrongly. Safe whatever the tables hold, but for `row_offsets`, as a walk is.
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
def _climb(tables, whole, terminal_rank, numbers):  # type: ignore[no-untyped-def]
    """Return, ascending, the highest entries of `dead` that leave out these items."""
    leaves = tables.edges - (tables.nodes - 1)
    # -(node << 32 | entry in its row): nodes come after those that lead to them. Tuples would take twice the time.
    waiting = [np.int64(0) for _ in range(0)]
    for number in numbers:
        end = last_edge(whole, terminal_rank, number)
        if number < leaves:
            waiting.append(-(node_of(tables, end) << 32 | end))
        else:
            node = follow(tables, end)
            waiting.append(-(node << 32 | (np.int64(TERMINAL) + node)))
    heapify(waiting)
    found = [np.int64(0) for _ in range(0)]
    while len(waiting):
        node = -waiting[0] >> 32
        row = [np.int64(0) for _ in range(0)]
        while len(waiting) and -waiting[0] >> 32 == node:
            row.append(-heappop(waiting) & 0xFFFFFFFF)
        if node == 0 or _has_more(tables, node, len(row)):
            for entry in row:
                found.append(entry)  # `extend` would copy all of it each time
        else:
            edge = nth_edge(tables, node - 1, 0)
            heappush(waiting, -(node_of(tables, edge) << 32 | edge))
    found.sort()
    return found


@compiled
def _has_more(tables, node, entries):  # type: ignore[no-untyped-def]
    """Return whether a node has more edges to take and items to end at than this many."""
    left = np.int64(is_terminal(tables, node)) - entries
    for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
        if left > 0:
            break
        left += is_alive(tables, edge)
    return left > 0


@compiled
def leave_out(tables, path, depth):  # type: ignore[no-untyped-def]
    """Return `Tables.dead` of a set or a view without an item, which is one of its own.

    What `dead_of` finds for a single item, in microseconds. path: [depth or more, 2] int64, the nodes that lead to the
    item, root first, and the entry of `dead` in the row of each. Reads neither labels nor targets.
    """
    for level in range(depth - 1, -1, -1):
        node, entry = path[level, 0], path[level, 1]
        if _has_more(tables, node, 1):
            break
    at, listed = first_dead(tables, entry), array_at(tables.dead, tables.dead_count, np.uint32)
    dead = np.empty(len(listed) + 1, np.uint32)
    dead[:at], dead[at], dead[at + 1 :] = listed[:at], entry, listed[at:]
    return dead
