"""Counts over a set's items: what a model that walks it must choose, and what is forced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.trie.jit import compiled
from itemset.trie.pointers import first_edge, label
from itemset.trie.walk import END, TAIL, follow, is_terminal, tail_entry


@dataclass(frozen=True)
class Step:
    """What happens after a number of tokens, counted over all items.

    shared: items whose prefix of each length others share. chosen: those of them after whose prefix more than one
    token, or an end and a token, may come. alone: items that nothing follows but their own tokens, from here on.
    widest: tokens that may follow one prefix, at most.
    """

    shared: int
    chosen: int
    alone: int
    widest: int


@dataclass(frozen=True)
class Shape:
    """steps: after 0, 1, ... tokens, for as long as items share prefixes. prefixes: items that others begin with.

    by_first: items below each first token, most first: int64.
    """

    steps: list[Step]
    prefixes: int
    by_first: NDArray[np.int64]

    @property
    def choices(self) -> float:
        """Tokens of an item that a model chooses, on average; all others are forced."""
        return sum(step.chosen for step in self.steps) / (self.steps[0].shared + self.steps[0].alone)


class Counts(NamedTuple):
    """All int64. [levels]: shared, chosen and widest as in `Step`, and the tokens of the tails after a level's edges.
    lengths: items of each length. tokens: of all items, by their place in `token_ids`. by_first: items below each edge
    of the root. ends: [1], items that others begin with."""

    shared: NDArray[np.int64]
    chosen: NDArray[np.int64]
    widest: NDArray[np.int64]
    tail_tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int64]
    by_first: NDArray[np.int64]
    ends: NDArray[np.int64]


def shape_of(s: ItemSet) -> Shape:
    """Count over all items, in one pass over the nodes: 8 bytes a node of memory."""
    counts = count(s, tails=False)
    columns = (counts.shared, counts.chosen, len(s) - counts.shared, counts.widest)
    steps = [Step(*step) for step in zip(*(column.tolist() for column in columns), strict=True)]
    return Shape(steps, int(counts.ends[0]), np.sort(counts.by_first)[::-1])


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
