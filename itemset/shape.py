"""How a set is shaped for a model that walks it: what it must choose, and what is forced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.trie.jit import compiled
from itemset.trie.pointers import first_edge
from itemset.trie.walk import follow, is_terminal


@dataclass(frozen=True)
class Step:
    """What happens after a number of tokens, counted over all items.

    shared: items whose prefix of so many tokens others share. chosen: those of them after whose prefix more than one
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


def shape_of(s: ItemSet) -> Shape:
    """Count over all items, in one pass over the tables: 8 bytes a node of memory."""
    tables, levels, below = s.trie.tables.pointers, np.array(s.trie.level_nodes, np.int64), items_below(s)
    counts = np.zeros((3, len(levels)), np.int64)
    prefixes = _count_steps(tables, levels, below, *counts)
    shared, chosen, widest = counts.tolist()
    steps = [Step(*step) for step in zip(shared, chosen, [len(s) - one for one in shared], widest, strict=True)]
    return Shape(steps, int(prefixes), np.sort(_by_first(tables, below))[::-1])


def items_below(s: ItemSet) -> NDArray[np.int64]:
    """Return how many items pass through each node: [nodes]."""
    below = np.zeros(s.trie.tables.pointers.nodes, np.int64)
    _count_below(s.trie.tables.pointers, len(s), below)
    return below


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
def _count_steps(tables, level_nodes, below, shared, chosen, widest):  # type: ignore[no-untyped-def]
    """Fill in, by level, the fields of `Step`; return the items that others begin with."""
    node, prefixes = np.int64(0), np.int64(0)
    for depth in range(len(level_nodes)):
        for _ in range(level_nodes[depth]):
            if node < len(below):
                degree = first_edge(tables, node + 1) - first_edge(tables, node)
                ends = np.int64(is_terminal(tables, node))
                shared[depth] += below[node]
                if degree + ends > 1:
                    chosen[depth] += below[node]
                widest[depth] = max(widest[depth], degree)
                prefixes += ends
            node += 1
    return prefixes


@compiled
def _by_first(tables, below):  # type: ignore[no-untyped-def]
    """Return the items below each edge of the root."""
    first, end = first_edge(tables, 0), first_edge(tables, 1)
    counts = np.ones(end - first, np.int64)
    for edge in range(first, end):
        state = follow(tables, edge)
        if state < len(below):
            counts[edge - first] = below[state]
    return counts
