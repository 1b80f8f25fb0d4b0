"""The host path: one request's state with its history, and a batch's masks as bitmasks.

Numba takes microseconds to unpack the tables' arrays in each call. So a compiled function takes one address, at which
it finds the addresses of all arrays (`_addresses`), and one call serves rows of different sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from itemset.item_set import ItemSet, build
from itemset.trie.jit import compiled
from itemset.trie.tables import TERMINAL, Tables
from itemset.trie.targets import count_ones
from itemset.trie.view import leave_out
from itemset.trie.walk import (
    DEAD,
    END,
    FREE,
    TAIL,
    WAITING,
    advance,
    begin_step,
    first_dead,
    follow,
    is_alive,
    is_terminal,
    tail_token,
)


class Walk:
    """The tables of an item set, which compiled code finds at one address.

    stop_token_ids: tokens that may follow an item. One that continues an item counts as the item's token.
    """

    def __init__(self, tables: Tables, stop_token_ids: Iterable[int] = ()) -> None:
        stops = np.array(sorted(stop_token_ids), np.int64)
        addresses = _addresses(tables, stops)
        self._kept = tables, stops, tables.dead, addresses  # as long as compiled code may read there
        self._address: int = addresses.ctypes.data

    def _begin_without(self, other: Walk, tokens: Sequence[int]) -> None:
        """Begin as the other one without one of its items: in a fraction of the time."""
        tables, stops, *_ = other._kept
        dead, addresses, self._address = _without(other._address, np.array(tokens, np.int64))
        self._kept = tables, stops, dead, addresses

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token, DEAD if it is not allowed."""
        after: int = _step(self._address, state, token)
        return after

    def ends(self, state: int) -> bool:
        """Return whether an item may end in this state."""
        ends: bool = _ends(self._address, state)
        return ends

    def fill(self, state: int, row: NDArray[np.int32]) -> None:
        """Set bit t of `row` [ceil(vocabulary / 32)] if token t may follow, else clear it. Every word is written."""
        _fill_row(self._address, state, row)

    def __reduce__(self) -> Any:
        """Raise TypeError: a copy would read at addresses that another object or process owns."""
        raise TypeError("a walk holds addresses, so it cannot be copied or pickled: make a new one")


class HostState(Walk):
    """One request's place in an item set.

    If an item may end here, the stop tokens are allowed beside the children. Once it has ended, they alone are: a
    request that ignores its stop tokens goes on with them and never leaves the set.
    """

    def __init__(self, item_set: ItemSet, stop_token_ids: Iterable[int]) -> None:
        super().__init__(item_set.trie.tables, stop_token_ids)
        self._states = [0]

    @property
    def state(self) -> int:
        return self._states[-1]

    def accept(self, tokens: Iterable[int]) -> bool:
        """Take the tokens; at the first that is not allowed, stop before it and return False."""
        for token in tokens:
            after = _step(self._address, self._states[-1], token)
            if after == DEAD:
                return False
            self._states.append(after)
        return True

    def allowed_prefix(self, tokens: list[int]) -> list[int]:
        """Return the longest start of `tokens` that `accept` would take. The state stays."""
        state = self.state
        for i, token in enumerate(tokens):
            state = _step(self._address, state, token)
            if state == DEAD:
                return tokens[:i]
        return tokens

    def draft_states(self, drafts: Iterable[int]) -> list[int]:
        """Return the state of each row that verifies these drafts and of the row after them, [drafts + 1].

        After a draft that is not allowed all rows keep its row's state. After -1, which is padding, all are FREE.
        The request's own state stays.
        """
        drafts, states = list(drafts), [self._states[-1]]
        for i, token in enumerate(drafts):
            after = FREE if token == -1 else _step(self._address, states[-1], token)
            if after in (FREE, DEAD):
                return states + [FREE if after == FREE else states[-1]] * (len(drafts) - i)
            states.append(after)
        return states

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` accepted tokens. Raises ValueError if fewer were accepted."""
        if not 0 <= tokens < len(self._states):
            raise ValueError(f"cannot roll back {tokens} tokens, {len(self._states) - 1} were accepted")
        del self._states[len(self._states) - tokens :]

    def reset(self) -> None:
        del self._states[1:]

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Do `fill` for the request's own state."""
        _fill_row(self._address, self._states[-1], row)


def fill_bitmasks(
    hosts: Sequence[HostState], states: Sequence[int], rows: Sequence[int], bitmask: NDArray[np.int32]
) -> None:
    """Fill many rows of a bitmask in one compiled call, as `HostState.fill_bitmask` fills one.

    hosts, states, rows: the request of each row to fill, a state in that request's set (FREE allows all tokens), and
        the row's number.
    bitmask: [any, ceil(vocabulary / 32)] int32. Other rows stay as they are.
    Raises IndexError if `bitmask` has no such row, ValueError if the three differ in length.
    """
    if not len(hosts) == len(states) == len(rows):
        raise ValueError(f"{len(rows)} rows need a request and a state each, not {len(hosts)} and {len(states)}")
    addresses = np.array([host._address for host in hosts], np.int64)
    _fill_rows(addresses, np.array(states, np.int64), np.array(rows, np.int64), bitmask)


def allowed_rows(
    item_set: ItemSet, stop_token_ids: Iterable[int], tokens: NDArray[np.int64], allowed: NDArray[np.bool_]
) -> None:
    """Set `allowed` to True for each token that may follow a row of tokens, which starts at an item's beginning.

    tokens: [rows, any] int64. allowed: [rows, vocabulary], all False. After an item's end, and after tokens that have
    left the set, the stop tokens alone may follow.
    """
    stops = np.array(sorted(stop_token_ids), np.int64)
    _allowed_rows(item_set.trie.tables, stops, np.ascontiguousarray(tokens), allowed)


def warm_up() -> None:
    """Load the compiled walks now, so that no request waits for them."""
    state, bitmask = HostState(build([[0]]), ()), np.zeros((1, 1), np.int32)
    fill_bitmasks([state], [0], [0], bitmask)
    state.fill_bitmask(bitmask[0])
    state.accept([0])
    state.ends(state.state)


def forced_tokens(item_set: ItemSet, tokens: Iterable[int]) -> int:
    """Count the tokens that were the only ones that could follow, the stop token after an item among them.

    tokens: of an answer, from the beginning of its item on.
    """
    return int(_forced_tokens(item_set.trie.tables, np.array(list(tokens), np.int64)))


@compiled
def _forced_tokens(tables: Any, tokens: Any) -> int:
    state, forced = np.int64(0), 0
    for token in tokens:
        if state == END:
            return forced + 1
        if state >= TAIL:
            forced += 1
        elif state < WAITING:
            children = 0
            for edge in range(tables.row_offsets[state], tables.row_offsets[state + 1]):
                children += is_alive(tables, edge)
            forced += children == 1 and not is_terminal(tables, state)
        state = advance(tables, state, token)
    return forced


@compiled
def _allowed_rows(tables: Any, stops: Any, tokens: Any, allowed: Any) -> None:
    for row in range(len(tokens)):
        state = np.int64(0)
        for token in tokens[row]:
            after = advance(tables, state, token)
            state = np.int64(END) if after == DEAD else after
        if state >= TAIL:
            token = tail_token(tables, state)
            if token < allowed.shape[1]:
                allowed[row, token] = True
        elif state < WAITING:
            for edge in range(tables.row_offsets[state], tables.row_offsets[state + 1]):
                if tables.labels[edge] < allowed.shape[1] and is_alive(tables, edge):
                    allowed[row, tables.labels[edge]] = True
        if is_terminal(tables, state):
            for token in stops:
                if 0 <= token < allowed.shape[1]:
                    allowed[row, token] = True


def _addresses(tables: Tables, stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what `_tables` and `_stops` read: address and length of each array, then what else varies."""
    arrays = (*tables.sections.values(), tables.alive, tables.dead, stops)
    words = [word for array in arrays for word in (array.__array_interface__["data"][0], len(array))]
    widths = tables.token_bits, tables.far_block, tables.labels.itemsize, tables.targets.itemsize
    return np.array([*words, *widths], np.int64)


_STOPS = Tables._fields.index("token_bits")  # after the tables' arrays
_TOKEN_BITS, _FAR_BLOCK, _LABEL_BYTES, _TARGET_BYTES = range(2 * _STOPS + 2, 2 * _STOPS + 6)
_WORDS = _TARGET_BYTES + 1
_DEAD = 2 * Tables._fields.index("dead")


_ALL = np.uint32(0xFFFFFFFF)
_FEW = 20  # bits of a word: to find each of them is then faster than to look at all


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    """Return the address as the pointer that `carray` takes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _count_zeros_below(_typing: Any, _word: Any) -> Any:
    """Return how many zeros stand below the lowest one of a word that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.uint32(types.uint32), generate


@compiled
def _array(addresses: Any, field: int, dtype: Any) -> Any:
    return carray(_pointer(addresses[2 * field]), addresses[2 * field + 1], dtype)


@compiled
def _tables(addresses: Any, label: Any, target: Any) -> Any:
    return Tables(
        _array(addresses, 0, np.uint32),
        _array(addresses, 1, np.uint32),
        _array(addresses, 2, label),
        _array(addresses, 3, target),
        _array(addresses, 4, np.uint32),
        _array(addresses, 5, np.uint32),
        _array(addresses, 6, np.uint32),
        _array(addresses, 7, np.uint32),
        _array(addresses, 8, np.uint32),
        addresses[_TOKEN_BITS],
        addresses[_FAR_BLOCK],
    )


@compiled
def _stops(addresses: Any) -> Any:
    return _array(addresses, _STOPS, np.int64)


@compiled
def _step(address: int, state: int, token: int) -> Any:
    """Return the state after `token`, DEAD if it is not allowed."""
    addresses = carray(_pointer(address), _WORDS, np.int64)
    after = _begin_step(addresses, state, token)
    if after < 0:
        return _follow(addresses, -1 - after)
    if after == DEAD and _ends(address, state):
        for stop in _stops(addresses):
            if stop == token:
                return np.int64(END)
    return after


# Each of these takes tables of one type where it does not read what has several: fewer of them are compiled.
@compiled
def _begin_step(addresses: Any, state: int, token: int) -> Any:
    if addresses[_LABEL_BYTES] == 2:
        return begin_step(_tables(addresses, np.uint16, np.uint16), state, token)
    return begin_step(_tables(addresses, np.uint32, np.uint16), state, token)


@compiled
def _follow(addresses: Any, edge: int) -> Any:
    if addresses[_TARGET_BYTES] == 8:
        return follow(_tables(addresses, np.uint16, np.uint64), edge)
    if addresses[_TARGET_BYTES] == 4:
        return follow(_tables(addresses, np.uint16, np.uint32), edge)
    return follow(_tables(addresses, np.uint16, np.uint16), edge)


@compiled
def _ends(address: int, state: int) -> Any:
    addresses = carray(_pointer(address), _WORDS, np.int64)
    return is_terminal(_tables(addresses, np.uint16, np.uint16), state)


@compiled
def _without(address: int, item: Any) -> Any:
    """Return `Tables.dead` without this item, the addresses with its own, and where they are."""
    addresses = carray(_pointer(address), _WORDS, np.int64).copy()
    path, state, depth = np.empty((len(item) + 1, 2), np.int64), np.int64(0), 0
    for token in item:
        if state >= TAIL:
            break
        edge = -1 - _begin_step(addresses, state, token)
        path[depth, 0], path[depth, 1] = state, edge
        state, depth = _follow(addresses, edge), depth + 1
    if state < WAITING:
        path[depth, 0], path[depth, 1] = state, np.int64(TERMINAL) + state
        depth += 1
    dead = leave_out(_tables(addresses, np.uint16, np.uint16), path, depth)
    addresses[_DEAD], addresses[_DEAD + 1] = dead.ctypes.data, len(dead)
    return dead, addresses, addresses.ctypes.data


@compiled
def _fill_rows(addresses: Any, states: Any, rows: Any, bitmask: Any) -> None:
    for i in range(len(rows)):
        if not 0 <= rows[i] < len(bitmask):
            raise IndexError("the bitmask has no such row")
    for i in range(len(rows)):
        _fill_row(addresses[i], states[i], bitmask[rows[i]])


@compiled
def _fill_row(address: int, state: int, row: Any) -> None:
    addresses = carray(_pointer(address), _WORDS, np.int64)
    words = row.view(np.uint32)
    if addresses[_LABEL_BYTES] == 2:  # filling reads no targets, so their width does not matter
        _fill_bitmask(_tables(addresses, np.uint16, np.uint16), state, _stops(addresses), words)
    else:
        _fill_bitmask(_tables(addresses, np.uint32, np.uint16), state, _stops(addresses), words)


@compiled
def _fill_bitmask(tables: Any, state: int, stops: Any, row: Any) -> None:
    row[:] = 0xFFFFFFFF if state == FREE else 0
    if state >= TAIL:
        _set_bit(row, tail_token(tables, state))
    elif state < WAITING:
        _set_children(tables, np.int64(tables.row_offsets[state]), np.int64(tables.row_offsets[state + 1]), row)
    if is_terminal(tables, state):
        for token in stops:
            _set_bit(row, token)


@compiled
def _set_children(tables: Any, first: int, end: int, row: Any) -> None:
    gaps = _gaps(tables.labels, first, end) if end > first else 0
    few_gaps = gaps <= (end - first) >> 3
    if few_gaps or len(tables.alive):
        for block in range(first >> 5, (end + 31) >> 5):
            alive = tables.alive[block] if len(tables.alive) else _ALL
            low, high = max(first, block * 32), min(end, block * 32 + 32)
            if gaps == 0:
                _set_run(tables.labels, alive, low, high, row)
            elif few_gaps:
                _set_runs(tables.labels, alive, low, high, row)
            elif alive == _ALL:
                for edge in range(low, high):
                    _set_bit(row, np.int64(tables.labels[edge]))
            else:
                _set_alive(tables.labels, alive, low, high, row)
    else:
        for edge in range(first, end):
            _set_bit(row, np.int64(tables.labels[edge]))
    if len(tables.dead):  # sorted as the edges are: those of this node stand together
        for at in range(first_dead(tables.dead, first), len(tables.dead)):
            if tables.dead[at] >= end:
                break
            _clear_bit(row, np.int64(tables.labels[tables.dead[at]]))


@compiled
def _gaps(labels: Any, first: int, end: int) -> Any:
    """Return how many tokens between the labels of these edges are no labels."""
    return np.int64(labels[end - 1]) - np.int64(labels[first]) - (end - first - 1)


@compiled
def _set_runs(labels: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Do `_set_alive` where most labels follow one another."""
    if _gaps(labels, low, high) == 0:
        _set_run(labels, alive, low, high, row)
        return
    for first in range(low, high, 8):
        end = min(first + 8, high)
        if _gaps(labels, first, end) == 0:
            _set_run(labels, alive, first, end, row)
        else:
            _set_each(labels, alive, first, end, row)


@compiled
def _set_run(labels: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Do `_set_alive` for labels that follow one another."""
    token = np.int64(labels[low])
    bits = np.uint64(alive >> np.uint32(low & 31)) & ((np.uint64(1) << np.uint64(high - low)) - np.uint64(1))
    bits <<= np.uint64(token & 31)
    if token >> 5 < len(row):
        row[token >> 5] |= np.uint32(bits & np.uint64(0xFFFFFFFF))
    if (token >> 5) + 1 < len(row):
        row[(token >> 5) + 1] |= np.uint32(bits >> np.uint64(32))


@compiled
def _set_alive(labels: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Set the labels of those edges from `low` on, all of one word of `Tables.alive`, whose bits are set there."""
    if count_ones(alive) <= _FEW:
        alive = alive >> np.uint32(low & 31) << np.uint32(low & 31)
        if high & 31:
            alive &= (np.uint32(1) << np.uint32(high & 31)) - np.uint32(1)
        while alive:
            _set_bit(row, np.int64(labels[(low & ~31) + np.int64(_count_zeros_below(alive))]))
            alive &= alive - np.uint32(1)
    else:
        _set_each(labels, alive, low, high, row)


@compiled
def _set_each(labels: Any, alive: Any, low: int, high: int, row: Any) -> None:
    """Do `_set_alive` without a branch on a bit: many of them would be foreseen wrongly."""
    for edge in range(low, high):
        token, bit = np.int64(labels[edge]), alive >> np.uint32(edge & 31) & np.uint32(1)
        if token >> 5 < len(row):
            row[token >> 5] |= bit << np.uint32(token & 31)


@compiled
def _clear_bit(row: Any, token: int) -> None:
    if 0 <= token < len(row) * 32:
        row[token >> 5] &= ~(np.uint32(1) << np.uint32(token & 31))


@compiled
def _set_bit(row: Any, token: int) -> None:
    if 0 <= token < len(row) * 32:
        row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
