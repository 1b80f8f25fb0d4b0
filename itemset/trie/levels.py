"""What the host knows of a set's levels: how wide they are, so that a search needs no shape from the device; and ready
masks of the first levels' nodes, a bit for each token: these have the most children, and each request begins there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.trie.pointers import compiled, first_edge, label
from itemset.trie.tables import NONE, Trie
from itemset.trie.targets import is_leaf, tail_at
from itemset.trie.walk import is_alive

_KEPT = 4096  # widest nodes of a level that are kept: all rows that a search may well have
WIDE = 128  # children of a node for which a mask pays
HEADER = 3  # words before the rows: nodes with a row, the first word of all rows, and how many words a row has
_LEAST = 1 << 15  # bytes that ready masks may always take: the root's, for any vocabulary
_SHARE = 8  # a whole set's may take eight times less than its tables. A view is made while a request waits


@dataclass(frozen=True)
class LevelPlan:
    """How wide each level of a trie is, root first, and how long the tails after its edges are."""

    nodes: tuple[int, ...]
    # [min(nodes, 4,096)] each: children of the widest node, of the two widest together, and so on.
    widest: tuple[NDArray[np.int64], ...]
    tails: tuple[int, ...]  # tokens of the longest tail after one of the level's edges
    tailed: tuple[int, ...]  # edges that have a tail
    longest: int  # tokens of the longest item
    # The lowest and the highest token of the edges; empty if items differ in length, as nodes then need end tokens too.
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, trie: Trie) -> "LevelPlan":
        """Read the plan off a trie's tables: one pass over its edges, 4 ms for a million of them."""
        tables, nodes = trie.tables, np.array(trie.level_nodes)
        tails, tailed, low, high = np.zeros((4, len(nodes)), np.int64)
        low[:] = np.iinfo(np.int64).max
        _measure(tables.pointers, trie.tail_tokens, np.array(trie.level_edges), tails, tailed, low, high)
        widest = []
        for end, count in zip(np.cumsum(nodes), nodes, strict=True):
            children = np.diff(tables.row_offsets[end - count : end + 1].astype(np.int64))
            if len(children) > _KEPT:
                children = np.partition(children, -_KEPT)[-_KEPT:]
            widest.append(np.cumsum(np.sort(children)[::-1]))
        spans = zip(low.tolist(), high.tolist(), strict=True) if trie.shortest == trie.longest else ()
        counts = tuple(tails.tolist()), tuple(tailed.tolist())
        return cls(trie.level_nodes, tuple(widest), *counts, trie.longest, tuple(spans))

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
def _measure(tables, tail_tokens, edges, tails, tailed, low, high):  # type: ignore[no-untyped-def]
    """Count the edges with tails of each level, and measure its longest tail and its tokens. edges: of each level.

    A tail ends where the next edge's begins. Safe whatever the tables hold.
    """
    edge, start, owner = np.int64(0), np.int64(0), 0
    for level in range(len(edges)):
        for _ in range(edges[level]):
            begins, token = tail_at(tables, edge) if is_leaf(tables, edge) else np.int64(-1), label(tables, edge)
            low[level], high[level] = min(low[level], token), max(high[level], token)
            edge += 1
            if begins >= 0:
                tails[owner] = max(tails[owner], begins - start)
                start, owner = begins, level
                tailed[level] += 1
    tails[owner] = max(tails[owner], tail_tokens - start)


def ready_masks(trie: Trie) -> NDArray[np.uint32]:
    """Return a header and rows for all nodes down to the deepest level with a node of more than WIDE children, if any.

    Bit t of a row, counted from bit 32 * `first word` on, is set if a walk may take an edge with token t.
    """
    tables, end, deepest = trie.tables, 0, 0
    most = max(0 if len(tables.alive) else trie.nbytes // _SHARE, _LEAST) // 4
    low, high, first_word, width = np.iinfo(np.int64).max, 0, 0, 0
    for nodes in trie.level_nodes:
        begin, end = end, end + nodes
        if end > most:
            break
        offsets = tables.row_offsets[begin : end + 1].astype(np.int64)
        low = min(low, int(tables.labels[offsets[:-1]].min()) >> 5)
        high = max(high, int(tables.labels[offsets[1:] - 1].max()) >> 5)
        if end * (high - low + 1) > most:
            break
        if np.diff(offsets).max() > WIDE:
            deepest, first_word, width = end, low, high - low + 1
    if not deepest:
        return NONE
    rows = np.zeros((deepest, width), np.uint32)
    _fill(tables.pointers, 32 * first_word, rows)
    return np.concatenate((np.array([deepest, first_word, width], np.uint32), rows.ravel()))


@compiled
def _fill(tables: Any, first_token: int, rows: Any) -> None:
    """Set the bits of the first nodes' rows: 5 ms for four million edges. Safe whatever the labels are."""
    for node in range(len(rows)):
        row = rows[node]
        for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
            token = label(tables, edge) - first_token
            if 0 <= token < 32 * len(row) and is_alive(tables, edge):
                row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
