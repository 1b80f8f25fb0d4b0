"""Potentials: of each edge, the most that a boost adds to an item below it. They steer a search of the trie.

A prefix's bound, its log-probability and its potential, never rises towards an item, whose own boost is its last edge's
potential: so bar, proof and races stay what they are.

`Tables.potential` has them for all items, [edges + 1 or edges + nodes] float32: of each edge, then of each node that of
the item that ends there; in the root's place, where none ends, the root's own. Where a view leads nowhere, it has 0.
`Tables.boosted` has them for a few: [2n], ascending entries, as those of `dead`, and the potential of each; all others
have 0. Both hold the bits of floats.
"""

import numpy as np
from numpy.typing import NDArray

from itemset.trie.numbering import last_edge, node_of, nth_edge, own_entry
from itemset.trie.pointers import bit, compiled, first_edge, first_from, load32
from itemset.trie.rows import grown
from itemset.trie.tables import TERMINAL, Tables
from itemset.trie.targets import is_leaf
from itemset.trie.walk import END, advance, follow, is_alive, is_terminal, tail_token

ROOT = TERMINAL  # the entry of the root


def potentials(tables: Tables, whole: Tables, values: NDArray[np.float32], share: float = 0.0) -> NDArray[np.uint32]:
    """Return `Tables.potential` of a set or a view, in one pass over the edges.

    values: [items] boosts, by the whole set's item numbers; those of items that the view has not are not read. share:
    of draws at a temperature T above 1, 1 - 1 / T; an edge then has share * log(sum of exp(boost / share)) of what is
    below it, which bounds the weights p^(1 / T) * exp(boost) of all of it together (Hoelder's inequality).
    """
    ends = bool(whole.terminal.any())
    out = np.zeros(len(tables.labels) + (tables.pointers.nodes if ends else 1), np.float32)
    _fill(tables.pointers, whole.pointers, values, share, out, np.empty(tables.pointers.nodes, np.float32))
    return out.view(np.uint32)


def heights(tables: Tables) -> NDArray[np.uint16]:
    """Return how many tokens the longest item has from each edge on: [edges]. Of a view, the whole set's are bounds."""
    out = np.empty(len(tables.labels), np.uint16)
    _measure(tables.pointers, out, np.empty(tables.pointers.nodes, np.uint16))
    return out


def boosted_of(whole: Tables, numbers: NDArray[np.int64], values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return `Tables.boosted` for boosts of the items of these numbers, distinct ones, in a time in proportion.

    What is below 0 stands at the item alone: 0 bounds a prefix of others.
    """
    entries, found = _climb(whole.pointers, whole.terminal_rank.ctypes.data, numbers, values)
    order = np.lexsort((-found, entries))
    entries, found = entries[order], found[order]
    first = np.flatnonzero(np.diff(entries, prepend=-1))  # of entries that occur again, the largest
    return np.concatenate((entries[first].astype(np.uint32), found[first].view(np.uint32)))


def boosts_of(tables: Tables, whole: Tables, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the boost of each item [N], by its number. tables: of the set or the view; whole: of the whole set."""
    out = np.empty(len(numbers))
    _own(tables.pointers, whole.pointers, whole.terminal_rank.ctypes.data, numbers, out)
    return out


@compiled
def potential_of(tables, entry):  # type: ignore[no-untyped-def]
    """Return the potential of an edge, or of TERMINAL + a node; 0 if nothing is boosted."""
    if tables.potential:
        at = entry if entry < TERMINAL else entry - TERMINAL + tables.edges
        return np.float64(np.int32(load32(tables.potential, at)).view(np.float32))
    count = tables.boosted_count
    if count:
        at = first_from(tables.boosted, 4, np.int64(0), count, entry)
        if at < count and load32(tables.boosted, at) == entry:
            return np.float64(np.int32(load32(tables.boosted, count + at)).view(np.float32))
    return 0.0


@compiled
def _fill(tables, whole, values, share, out, of_node):  # type: ignore[no-untyped-def]
    """From the last edge to the first, as `view._mark`: what an edge leads to comes after it."""
    nodes, edges, none = tables.nodes, tables.edges, np.float32(-np.inf)
    leaf, ends_at = edges - (nodes - 1), len(values)  # numbers of the items that are still to come
    child, first = nodes, edges
    for node in range(nodes - 1, -1, -1):
        most, total = none, 0.0
        if bit(whole.terminal, node):
            ends_at -= 1
            if values[ends_at] > none and is_terminal(tables, node):
                out[edges + node], most, total = values[ends_at], values[ends_at], 1.0
        end, first = first, first_edge(tables, node)
        for edge in range(end - 1, first - 1, -1):
            if is_leaf(tables, edge):
                leaf -= 1
                here = values[leaf]
            else:
                child -= 1
                here = of_node[child]
            if here > none and is_alive(tables, edge):  # below a dead edge, others may seem alive
                out[edge] = here
                if share > 0:  # a sum of exponentials, divided by the largest
                    less = np.exp(-abs(np.float64(here) - most) / share)
                    total = 1 + total * less if here > most else total + less
                most = max(most, here)
        of_node[node] = np.float32(most + share * np.log(total)) if share > 0 and most > none else most
    out[edges] = of_node[0]


@compiled
def _measure(tables, out, of_node):  # type: ignore[no-untyped-def]
    child, first = tables.nodes, tables.edges
    for node in range(tables.nodes - 1, -1, -1):
        most = np.uint16(0)
        end, first = first, first_edge(tables, node)
        for edge in range(end - 1, first - 1, -1):
            below = np.uint16(0)
            if is_leaf(tables, edge):
                state = follow(tables, edge)
                while state != END:
                    state, below = advance(tables, state, tail_token(tables, state)), below + np.uint16(1)
            else:
                child -= 1
                below = of_node[child]
            out[edge] = below + np.uint16(1)
            most = max(most, out[edge])
        of_node[node] = most


@compiled
def _own(tables, whole, terminal_rank, numbers, out):  # type: ignore[no-untyped-def]
    for i in range(len(numbers)):
        edge = last_edge(whole, terminal_rank, numbers[i])
        out[i] = potential_of(tables, own_entry(tables, edge, numbers[i]))


@compiled
def _climb(tables, terminal_rank, numbers, values):  # type: ignore[no-untyped-def]
    """Return the entries that each item gives a potential, its own first, and these."""
    entries, found, size = np.empty(16, np.int64), np.empty(16, np.float32), 0
    for i in range(len(numbers)):
        edge = last_edge(tables, terminal_rank, numbers[i])
        entry, above = own_entry(tables, edge, numbers[i]), edge
        while True:
            entries, found = grown(entries, size + 1), grown(found, size + 1)
            entries[size], found[size] = entry, values[i]
            size += 1
            if entry == ROOT or values[i] <= 0:
                break
            if entry == above:
                node = node_of(tables, entry)
                above = nth_edge(tables, node - 1, 0) if node > 0 else np.int64(ROOT)
            entry = above
    return entries[:size], found[:size]
