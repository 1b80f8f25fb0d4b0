"""Prefixes of a set's items as a search sees them: the tokens that an edge stands for, and what follows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.pointers import label
from itemset.trie.tables import TERMINAL, Tables
from itemset.trie.walk import END, TAIL, alive_at, follow, tail_entry


class Round(NamedTuple):
    """What a round asks of each row. scores: so far, but for the rest of a row's tokens. degree: how many edges its
    node has; none if its tokens are a whole item. edges: those of all rows, one after another. ends: whether an item
    ends at it."""

    scores: NDArray[np.float64]
    rows: NDArray[np.int64]
    degree: NDArray[np.int64]
    edges: NDArray[np.int64]
    ends: NDArray[np.bool_]

    @classmethod
    def of(
        cls, tables: Tables, scores: NDArray[np.float64], rows: NDArray[np.int64], states: NDArray[np.int64]
    ) -> Round:
        alone = states == END
        nodes = np.where(alone, 0, states)
        first, last = (tables.row_offsets[nodes + i].astype(np.int64) for i in (0, 1))
        degree = np.where(alone, 0, last - first)
        edges = np.repeat(first + degree - np.cumsum(degree), degree) + np.arange(degree.sum())
        if not tables.whole:
            alive = alive_at(tables, edges)
            degree = np.bincount(np.repeat(np.arange(len(rows)), degree)[alive], minlength=len(rows))
            edges = edges[alive]
        ends = tables.terminal[nodes >> 5] >> (nodes & 31).astype(np.uint32) & 1 != 0
        if len(tables.dead):
            ends &= ~np.isin(nodes + TERMINAL, tables.dead)
        return cls(scores, rows, degree, edges, alone | ends)


def tokens_after(tables: Tables, edges: NDArray[np.int32]) -> tuple[NDArray[np.int64], list[tuple[int, ...]]]:
    """Of each edge: the state after it, END if one item alone is there, and its token with that item's tail."""
    states, lengths = np.empty(len(edges), np.int64), np.empty(len(edges), np.int64)
    _measure(tables.pointers, edges, states, lengths)
    ends = np.cumsum(lengths)
    flat = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
    _read(tables.pointers, edges, states, ends - lengths, flat)
    tokens = flat.tolist()
    runs = [tuple(tokens[end - length : end]) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    return np.where(states >= TAIL, END, states), runs


@compiled
def _measure(tables, edges, states, lengths):  # type: ignore[no-untyped-def]
    """The state after each edge, and how many tokens the edge and its tail have."""
    for i in range(len(edges)):
        states[i] = follow(tables, np.int64(edges[i]))
        lengths[i] = 1
        if states[i] >= TAIL:
            position = states[i] - TAIL
            while (tail_entry(tables, position) >> tables.token_bits) == 0:
                position += 1
                lengths[i] += 1
            lengths[i] += 1


@compiled
def _read(tables, edges, states, starts, tokens):  # type: ignore[no-untyped-def]
    token_mask = (np.int64(1) << tables.token_bits) - 1
    for i in range(len(edges)):
        tokens[starts[i]] = label(tables, np.int64(edges[i]))
        position, at = states[i] - TAIL, starts[i] + 1
        end = starts[i + 1] if i + 1 < len(edges) else len(tokens)
        for k in range(end - at):
            tokens[at + k] = tail_entry(tables, position + k) & token_mask
