"""Walking the trie on the host: one integer of state, compiled by Numba.

Safe whatever the tables hold, but for `row_offsets`, which are checked when a file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.tables import TERMINAL, Tables
from itemset.trie.targets import is_leaf, node_at, tail_at

# A state has 34 bits, on the host and on the device: a node, a position in the tails (TAIL ..) or one of these four.
STATE_BITS = 34
TAIL = 1 << 31
END = TAIL - 1  # the item is complete
DEAD = TAIL - 2  # the tokens left the set
FREE = TAIL - 3  # no set constrains this row
WAITING = TAIL - 4  # the constraint has not begun (device path): nothing does yet

NO_TOKEN = -1


@compiled
def advance(tables, state, token):  # type: ignore[no-untyped-def]
    """Return the state after one more token; END and DEAD lead to DEAD, FREE to FREE."""
    after = begin_step(tables, state, token)
    return follow(tables, -1 - after) if after < 0 else after


@compiled
def begin_step(tables, state, token):  # type: ignore[no-untyped-def]
    """Do `advance` but for following an edge: return -1 - edge where one is to be followed. Reads no targets."""
    if state >= TAIL:
        entry = tail_entry(tables, state - TAIL)
        if entry < 0 or entry & ((1 << tables.token_bits) - 1) != token:
            return np.int64(DEAD)
        return np.int64(END) if entry >> tables.token_bits else np.int64(state + 1)
    edge = find_edge(tables, state, token)
    if edge < 0:
        return np.int64(FREE) if state == FREE else np.int64(DEAD)
    return -1 - edge


@compiled
def follow(tables, edge):  # type: ignore[no-untyped-def]
    """Return the state after an edge. Reads no labels."""
    if is_leaf(tables, edge):
        position = tail_at(tables, edge)
        return np.int64(END) if position < 0 else TAIL + position
    node = node_at(tables, edge)
    return node if node < len(tables.row_offsets) - 1 else np.int64(DEAD)


@compiled
def first_from(labels, low, high, token):  # type: ignore[no-untyped-def]
    """Return the first of these ascending labels, low .. high - 1, that is no less than `token`; `high` if none is."""
    while low < high:
        middle = (low + high) >> 1
        if labels[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def find_edge(tables, state, token):  # type: ignore[no-untyped-def]
    """Return the edge of node `state` that carries `token`, or -1."""
    if state < 0 or state >= len(tables.row_offsets) - 1:
        return np.int64(-1)
    first, end = np.int64(tables.row_offsets[state]), np.int64(tables.row_offsets[state + 1])
    end = min(end, np.int64(len(tables.labels)))
    edge = first_from(tables.labels, first, end, token)
    return edge if edge < end and tables.labels[edge] == token and is_alive(tables, edge) else np.int64(-1)


@compiled
def is_alive(tables, edge):  # type: ignore[no-untyped-def]
    """Return whether a walk may take this edge."""
    if len(tables.alive) and not tables.alive[edge >> 5] >> np.uint32(edge & 31) & np.uint32(1):
        return False
    return not len(tables.dead) or not is_dead(tables.dead, edge)


@compiled
def is_dead(dead, entry):  # type: ignore[no-untyped-def]
    """Return whether an entry is among the ascending ones of `dead`."""
    at = first_dead(dead, entry)
    return at < len(dead) and np.int64(dead[at]) == entry


@compiled
def first_dead(dead, entry):  # type: ignore[no-untyped-def]
    """Return how many entries of `dead` come before this one."""
    low, high = np.int64(0), np.int64(len(dead))
    while low < high:
        middle = (low + high) >> 1
        if np.int64(dead[middle]) < entry:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def is_terminal(tables, state):  # type: ignore[no-untyped-def]
    """Return whether an item may end here."""
    if state == END:
        return True
    if state < 0 or state >> 5 >= len(tables.terminal):
        return False
    if (tables.terminal[state >> 5] >> np.uint32(state & 31)) & np.uint32(1) == 0:
        return False
    return not len(tables.dead) or not is_dead(tables.dead, TERMINAL + state)


@compiled
def tail_token(tables, state):  # type: ignore[no-untyped-def]
    """Return the one token that may follow inside a tail, or -1."""
    entry = tail_entry(tables, state - TAIL)
    return entry & ((1 << tables.token_bits) - 1) if entry >= 0 else np.int64(-1)


@compiled
def tail_entry(tables, position):  # type: ignore[no-untyped-def]
    """Return token `position` of the tails with its last-of-tail bit on top, or -1 outside the tails."""
    width = tables.token_bits + 1
    word, shift = (position * width) >> 5, (position * width) & 31
    if position < 0 or word + 1 >= len(tables.tails):
        return np.int64(-1)
    pair = np.uint64(tables.tails[word]) | (np.uint64(tables.tails[word + 1]) << np.uint64(32))
    return np.int64((pair >> np.uint64(shift)) & np.uint64((1 << width) - 1))


@compiled
def _read_tails(tables, position, tokens):  # type: ignore[no-untyped-def]
    """Fill in the tokens of the tails from a position on, all of which are there."""
    width, ids = tables.token_bits + 1, (np.uint64(1) << np.uint64(tables.token_bits)) - np.uint64(1)
    for i in range(len(tokens)):
        at = (position + i) * width
        pair = np.uint64(tables.tails[at >> 5]) | (np.uint64(tables.tails[(at >> 5) + 1]) << np.uint64(32))
        tokens[i] = (pair >> np.uint64(at & 31)) & ids


@compiled
def mark(seen, tokens):  # type: ignore[no-untyped-def]
    """Set seen[token], [ids] bool, for each token that is among the ids."""
    for token in tokens:
        if token < len(seen):
            seen[token] = True


def token_runs(tables: Tables, tail_tokens: int) -> Iterator[NDArray[Any]]:
    """Yield every token that the tables hold, in runs: the edges', then the tails'."""
    yield tables.labels
    for position in range(0, tail_tokens, 1 << 20):
        run = np.empty(min(tail_tokens - position, 1 << 20), np.uint32)
        _read_tails(tables, position, run)
        yield run


def children(tables: Tables, state: int) -> tuple[NDArray[Any], bool]:
    """Return the tokens that may follow, ascending, and whether an item may end here: none, False if DEAD or FREE."""
    if state >= TAIL:
        token = tail_token(tables, state)
        return np.array([token] if token >= 0 else [], tables.labels.dtype), False
    if state >= WAITING:
        return tables.labels[:0], state == END
    edges = np.arange(int(tables.row_offsets[state]), int(tables.row_offsets[state + 1]))
    return tables.labels[edges[alive_at(tables, edges)]], bool(is_terminal(tables, state))


def alive_at(tables: Tables, edges: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of these edges a walk may take."""
    alive = np.ones(len(edges), np.bool_)
    if len(tables.alive):
        alive = tables.alive[edges >> 5] >> (edges & 31).astype(np.uint32) & 1 != 0
    if len(tables.dead):
        alive &= ~np.isin(edges, tables.dead)
    return alive
