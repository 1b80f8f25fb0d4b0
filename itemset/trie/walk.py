"""Walking the trie on the host: one integer of state. Safe whatever the tables hold, but for `row_offsets`, which are
checked when a file is opened."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.trie.pointers import bit, compiled, first_edge, first_from, label, load32
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
    if state >= TAIL:
        entry = tail_entry(tables, state - TAIL)
        if entry < 0 or entry & ((1 << tables.token_bits) - 1) != token:
            return np.int64(DEAD)
        return np.int64(END) if entry >> tables.token_bits else np.int64(state + 1)
    edge = find_edge(tables, state, token)
    if edge < 0:
        return np.int64(FREE) if state == FREE else np.int64(DEAD)
    return follow(tables, edge)


@compiled
def follow(tables, edge):  # type: ignore[no-untyped-def]
    """Return the state after an edge. Reads no labels."""
    if is_leaf(tables, edge):
        position = tail_at(tables, edge)
        return np.int64(END) if position < 0 else TAIL + position
    node = node_at(tables, edge)
    return node if node < tables.nodes else np.int64(DEAD)


@compiled
def find_edge(tables, state, token):  # type: ignore[no-untyped-def]
    """Return the edge of node `state` that carries `token`, or -1."""
    if state < 0 or state >= tables.nodes:
        return np.int64(-1)
    end = min(first_edge(tables, state + 1), tables.edges)
    edge = first_from(tables.labels, tables.label_bytes, first_edge(tables, state), end, token)
    return edge if edge < end and label(tables, edge) == token and is_alive(tables, edge) else np.int64(-1)


@compiled
def is_alive(tables, edge):  # type: ignore[no-untyped-def]
    """Return whether a walk may take this edge."""
    if tables.alive and not bit(tables.alive, edge):
        return False
    return not tables.dead_count or not is_dead(tables, edge)


@compiled
def is_dead(tables, entry):  # type: ignore[no-untyped-def]
    """Return whether an entry is among the ascending ones of `dead`."""
    at = first_dead(tables, entry)
    return at < tables.dead_count and load32(tables.dead, at) == entry


@compiled
def first_dead(tables, entry):  # type: ignore[no-untyped-def]
    """Return how many entries of `dead` come before this one."""
    return first_from(tables.dead, 4, np.int64(0), tables.dead_count, entry)


@compiled
def is_terminal(tables, state):  # type: ignore[no-untyped-def]
    """Return whether an item may end here."""
    if state == END:
        return True
    if state < 0 or state >= tables.nodes or not bit(tables.terminal, state):
        return False
    return not tables.dead_count or not is_dead(tables, TERMINAL + state)


@compiled
def tail_token(tables, state):  # type: ignore[no-untyped-def]
    """Return the one token that may follow inside a tail, or -1."""
    entry = tail_entry(tables, state - TAIL)
    return entry & ((1 << tables.token_bits) - 1) if entry >= 0 else np.int64(-1)


@compiled
def tail_entry(tables, position):  # type: ignore[no-untyped-def]
    """Return token `position` of the tails with its last-of-tail bit on top, or -1 outside the tails."""
    width = tables.token_bits + 1
    at = position * width
    if position < 0 or (at >> 5) + 1 >= tables.tail_words:
        return np.int64(-1)
    pair = np.uint64(load32(tables.tails, at >> 5)) | np.uint64(load32(tables.tails, (at >> 5) + 1)) << np.uint64(32)
    return np.int64((pair >> np.uint64(at & 31)) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))


def children(tables: Tables, state: int) -> tuple[NDArray[Any], bool]:
    """Return the tokens that may follow, ascending, and whether an item may end here: none, False if DEAD or FREE."""
    if state >= TAIL:
        token = tail_token(tables.pointers, state)
        return np.array([token] if token >= 0 else [], tables.labels.dtype), False
    if state >= WAITING:
        return tables.labels[:0], state == END
    edges = np.arange(int(tables.row_offsets[state]), int(tables.row_offsets[state + 1]))
    if len(tables.alive):
        edges = edges[tables.alive[edges >> 5] >> (edges & 31).astype(np.uint32) & 1 != 0]
    if len(tables.dead):
        edges = edges[~np.isin(edges, tables.dead)]
    return tables.labels[edges], bool(is_terminal(tables.pointers, state))
