"""Filling a row of a bitmask with what may follow in a state: compiled loops over the tables.

Most of a mask's time is here. Nodes with very many children have ready masks (`trie.levels`).
"""

from typing import Any

import numpy as np

from itemset.trie.levels import HEADER
from itemset.trie.pointers import array_at, compiled, count_ones, first_edge, label, load32
from itemset.trie.walk import FREE, TAIL, WAITING, first_dead, is_terminal, tail_token


@compiled
def fill_bitmask_of(tables: Any, state: int, stops: Any, ready: int, row: Any) -> None:
    """Set bit t of `row` [words] uint32 if token t may follow, stop tokens after an item among them, else clear it.

    All tokens may follow in FREE. Labels and stop tokens that the row has no bit for are left out. Reads no targets.
    ready: address of the ready masks (`trie.levels`), 0 if there are none. A list of exclusions leaves out more.
    """
    row[:] = 0xFFFFFFFF if state == FREE else 0
    if state >= TAIL:
        _set_bit(row, tail_token(tables, state))
    elif state < WAITING:
        first, end = first_edge(tables, state), first_edge(tables, state + 1)
        if ready and state < load32(ready, 0):
            first_word, width = load32(ready, 1), load32(ready, 2)
            masks, words = array_at(ready + 4 * (HEADER + state * width), width, np.uint32), row[first_word:]
            for word in range(min(width, len(words))):
                words[word] = masks[word]
        else:
            _set_children(tables, first, end, row)
        for at in range(first_dead(tables, first), tables.dead_count):  # in the order of the edges: a node's together
            edge = load32(tables.dead, at)
            if edge >= end:
                break
            token = label(tables, edge)
            if token < len(row) * 32:
                row[token >> 5] &= ~(np.uint32(1) << np.uint32(token & 31))
    if is_terminal(tables, state):
        for token in stops:
            _set_bit(row, token)


@compiled
def _set_children(tables: Any, first: int, end: int, row: Any) -> None:
    if not tables.alive:
        for edge in range(first, end):
            _set_bit(row, label(tables, edge))
        return
    for block in range(first >> 5, (end + 31) >> 5):  # what is alive is gone through, whatever a filter leaves
        alive = load32(tables.alive, block) & (-1 << max(first - 32 * block, 0))
        if end < 32 * (block + 1):
            alive &= (1 << (end & 31)) - 1
        while alive:
            below = count_ones(~alive & (alive - 1))  # LLVM makes one instruction of it
            _set_bit(row, label(tables, 32 * block + below))
            alive &= alive - 1


@compiled
def _set_bit(row: Any, token: int) -> None:
    if 0 <= token < len(row) * 32:
        row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
