"""Filling a row of a bitmask with what may follow in a state: compiled loops over the tables.

Most of a mask's time is here: there is a loop for each way in which labels lie, one after another, almost so, or apart.
"""

from typing import Any

import numpy as np

from itemset.trie.levels import HEADER
from itemset.trie.pointers import array_at, compiled, count_ones, first_edge, label, load32
from itemset.trie.walk import FREE, TAIL, WAITING, first_dead, is_terminal, tail_token

_ALL = np.uint32(0xFFFFFFFF)
_FEW = 20  # bits of a word: to find each of them is then faster than to look at all


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
    gaps = _gaps(tables, first, end) if end > first else 0
    few_gaps = gaps <= (end - first) >> 3
    if few_gaps or tables.alive:
        for block in range(first >> 5, (end + 31) >> 5):
            alive = np.uint32(load32(tables.alive, block)) if tables.alive else _ALL
            low, high = max(first, block * 32), min(end, block * 32 + 32)
            if gaps == 0:
                _set_run(tables, alive, low, high, row)
            elif few_gaps:
                _set_runs(tables, alive, low, high, row)
            elif alive == _ALL:
                for edge in range(low, high):
                    _set_bit(row, label(tables, edge))
            else:
                _set_alive(tables, alive, low, high, row)
    else:
        for edge in range(first, end):
            _set_bit(row, label(tables, edge))


@compiled
def _gaps(tables: Any, first: int, end: int) -> Any:
    """Return how many tokens between the labels of these edges are no labels."""
    return label(tables, end - 1) - label(tables, first) - (end - first - 1)


@compiled
def _set_runs(tables: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Do `_set_alive` where most labels follow one another."""
    if _gaps(tables, low, high) == 0:
        _set_run(tables, alive, low, high, row)
        return
    for first in range(low, high, 8):
        end = min(first + 8, high)
        if _gaps(tables, first, end) == 0:
            _set_run(tables, alive, first, end, row)
        else:
            _set_each(tables, alive, first, end, row)


@compiled
def _set_run(tables: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Do `_set_alive` for labels that follow one another."""
    token = label(tables, low)
    bits = np.uint64(alive >> np.uint32(low & 31)) & ((np.uint64(1) << np.uint64(high - low)) - np.uint64(1))
    bits <<= np.uint64(token & 31)
    if token >> 5 < len(row):
        row[token >> 5] |= np.uint32(bits & np.uint64(0xFFFFFFFF))
    if (token >> 5) + 1 < len(row):
        row[(token >> 5) + 1] |= np.uint32(bits >> np.uint64(32))


@compiled
def _set_alive(tables: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Set the labels of those edges from `low` on, all of one word of `Tables.alive`, whose bits are set there."""
    if count_ones(np.int64(alive)) <= _FEW:
        alive = alive >> np.uint32(low & 31) << np.uint32(low & 31)
        if high & 31:
            alive &= (np.uint32(1) << np.uint32(high & 31)) - np.uint32(1)
        while alive:
            below = count_ones(np.int64(~alive & (alive - np.uint32(1))))  # LLVM makes one instruction of it
            _set_bit(row, label(tables, (low & ~31) + below))
            alive &= alive - np.uint32(1)
    else:
        _set_each(tables, alive, low, high, row)


@compiled
def _set_each(tables: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Do `_set_alive` without a branch on a bit: many of them would be foreseen wrongly."""
    for edge in range(low, high):
        token, bit = label(tables, edge), alive >> np.uint32(edge & 31) & np.uint32(1)
        if token >> 5 < len(row):
            row[token >> 5] |= bit << np.uint32(token & 31)


@compiled
def _set_bit(row: Any, token: int) -> None:
    if 0 <= token < len(row) * 32:
        row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
