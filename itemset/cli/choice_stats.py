"""Counts over a set's items: what a model that walks it must choose, and what is forced."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.trie.jit import compiled
from itemset.trie.pointers import first_edge, label
from itemset.trie.walk import END, TAIL, follow, is_terminal, tail_entry


class Counts(NamedTuple):
    """Counts over all items, int64; the first four by how many tokens came before.

    shared: items whose prefix others share. chosen: those of them after whose prefix more than one token, or an end and
    a token, may come. widest: tokens that may follow one prefix, at most. tail_tokens: in the tails after these edges.
    lengths: items of each length. tokens: of all items, by their place in `token_ids`. by_first: items below each edge
    of the root. ends: [1], items that others begin with.
    """

    shared: NDArray[np.int64]
    chosen: NDArray[np.int64]
    widest: NDArray[np.int64]
    tail_tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int64]
    by_first: NDArray[np.int64]
    ends: NDArray[np.int64]


def count(s: ItemSet, *, tails: bool) -> Counts:
    """Count in one pass over the tables, without unfolding any item. tails: if False, no lengths and no tokens."""
    tables, level_nodes = s.trie.tables.pointers, np.array(s.trie.level_nodes, np.int64)
    below = np.zeros(tables.nodes, np.int64)
    _count_below(tables, len(s), below)
    sizes = [len(level_nodes)] * 4 + [s.longest + 1, len(s.token_ids), s.trie.level_edges[0], 1]
    counts = Counts(*(np.zeros(size, np.int64) for size in sizes))
    room, ids = (s.trie.tail_tokens, s.token_ids) if tails else (0, np.zeros(0, np.int64))
    _count(tables, level_nodes, room, ids, below, *counts)
    return counts


@compiled
def _count_below(tables, items, below):  # type: ignore[no-untyped-def]
    """Fill in the items that pass through each node."""
    nodes = len(below)
    for node in range(nodes - 1, -1, -1):  # children have higher numbers
        total = np.int64(is_terminal(tables, node))
        for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
            state = follow(tables, edge)
            total += below[state] if state < nodes else np.int64(1)
        below[node] = min(total, items)


@compiled
def _count(  # type: ignore[no-untyped-def]
    tables, level_nodes, room, ids, below, shared, chosen, widest, tail_tokens, lengths, tokens, by_first, prefixes
):
    """Fill in `Counts`. ids: `token_ids`. room: tokens of the tails, which are in the order of their edges."""
    mask = (1 << tables.token_bits) - 1
    node, position = np.int64(0), np.int64(0)
    for depth in range(len(level_nodes)):
        for _ in range(min(level_nodes[depth], len(below) - node)):
            first, last, ends = first_edge(tables, node), first_edge(tables, node + 1), is_terminal(tables, node)
            shared[depth] += below[node]
            chosen[depth] += below[node] if last - first + ends > 1 else 0
            widest[depth] = max(widest[depth], last - first)
            prefixes[0] += ends
            _add(lengths, depth, ends)
            for edge in range(first, last):
                state, start = follow(tables, edge), position
                items_after = below[state] if state < len(below) else np.int64(1)
                if node == 0:
                    by_first[edge - first] = items_after
                _add(tokens, np.searchsorted(ids, label(tables, edge)), items_after)
                more = state >= TAIL
                while more and position < room:
                    entry = tail_entry(tables, position)
                    _add(tokens, np.searchsorted(ids, entry & mask), 1)
                    position += 1
                    more = entry >> tables.token_bits == 0
                tail_tokens[depth] += position - start
                if state >= TAIL or state == END:
                    _add(lengths, depth + 1 + position - start, 1)
            node += 1


@compiled
def _add(counts, place, more):  # type: ignore[no-untyped-def]
    if place < len(counts):
        counts[place] += more
