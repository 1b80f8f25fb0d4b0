"""What the host knows of a set's levels, so that a search over its trie needs no shape from the device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.pointers import first_edge
from itemset.trie.tables import Trie
from itemset.trie.targets import is_leaf, tail_at

_KEPT = 4096  # widest nodes of a level that are kept: all rows that a search may well have


@dataclass(frozen=True)
class LevelPlan:
    """How wide each level of a trie is, root first, and how long the tails after its edges are.

    nodes: nodes of each level.
    widest: per level [min(nodes, 4,096)] int64: children of the widest node, of the two widest together, and so on.
    tails: per level, tokens of the longest tail after one of its edges.
    tailed: per level, how many of its edges have a tail.
    longest: tokens of the longest item.
    """

    nodes: tuple[int, ...]
    widest: tuple[NDArray[np.int64], ...]
    tails: tuple[int, ...]
    tailed: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, trie: Trie) -> "LevelPlan":
        """Read the plan off a trie's tables: one pass over its edges, 4 ms for a million of them."""
        tables = trie.tables
        nodes, tails, tailed = (np.zeros(trie.longest + 1, np.int64) for _ in range(3))
        _measure(tables.pointers, trie.tail_tokens, nodes, tails, tailed)
        levels = int(np.count_nonzero(nodes))
        ends = np.cumsum(nodes[:levels])
        widest = []
        for first, end in zip(ends - nodes[:levels], ends, strict=True):
            children = np.diff(tables.row_offsets[first : end + 1].astype(np.int64))
            if len(children) > _KEPT:
                children = np.partition(children, -_KEPT)[-_KEPT:]
            widest.append(np.cumsum(np.sort(children)[::-1]))
        of_nodes, of_tails, of_tailed = (tuple(column[:levels].tolist()) for column in (nodes, tails, tailed))
        return cls(of_nodes, tuple(widest), of_tails, of_tailed, trie.longest)

    @property
    def levels(self) -> int:
        """Levels that have edges: an item's tokens before its tail are at most as many."""
        return len(self.nodes)

    def children(self, level: int, rows: int) -> int:
        """Return the most children that `rows` nodes of a level have together; 0 after the last level."""
        if level >= self.levels or not rows:
            return 0
        widest = self.widest[level]
        kept = min(rows, len(widest))
        last = int(widest[-1] - widest[-2]) if len(widest) > 1 else int(widest[-1])
        return int(widest[kept - 1]) + (min(rows, self.nodes[level]) - kept) * last

    def successors(self, level: int, rows: int) -> int:
        """Return the most prefixes, one token longer, of `rows` prefixes of a level: children, and steps in tails."""
        nodes = self.nodes[level] if level < self.levels else 0
        return self.children(level, rows) + max(0, rows - nodes)


@compiled
def _measure(tables, tail_tokens, nodes, tails, tailed):  # type: ignore[no-untyped-def]
    """Count the nodes and the edges with tails of each level, and measure its longest tail.

    Tails are in the order of their edges, so each ends where the next begins. Safe whatever the tables hold, but for
    `row_offsets`, as a walk is.
    """
    all_nodes = tables.nodes
    first, end, level = np.int64(0), np.int64(1), 0
    start, owner = np.int64(0), 0
    while first < end and level < len(nodes):
        nodes[level] = end - first
        branches = np.int64(0)
        for edge in range(first_edge(tables, first), first_edge(tables, end)):
            if not is_leaf(tables, edge):
                branches += 1
                continue
            begins = tail_at(tables, edge)
            if begins >= 0:
                tails[owner] = max(tails[owner], begins - start)
                start, owner = begins, level
                tailed[level] += 1
        first, end, level = end, min(end + branches, all_nodes), level + 1
    tails[owner] = max(tails[owner], tail_tokens - start)
