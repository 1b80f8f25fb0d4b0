"""The host path: one request's state with its history, and a batch's masks as bitmasks.

Numba takes microseconds to unpack even the tables' pointers. So compiled functions find them, and the stop tokens, at
one address, and one call serves rows of different sets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet, build
from itemset.masking.batch import READY, STOP_COUNT, STOPS, table_row
from itemset.masking.bitmask import fill_bitmask_of
from itemset.masking.cpu_kernels import children_from, next_state
from itemset.trie.levels import WIDE
from itemset.trie.numbering import numbers_of
from itemset.trie.pointers import array_at, compiled, load64, pointers_at
from itemset.trie.rows import as_rows
from itemset.trie.view import dead_of
from itemset.trie.walk import DEAD, END, FREE, NO_TOKEN, TAIL, WAITING, advance, is_terminal


class Walk:
    """The tables of an item set, which compiled code finds at one address.

    stop_token_ids: tokens that may follow an item. One that continues an item counts as the item's token.
    """

    def __init__(self, item_set: ItemSet, stop_token_ids: Iterable[int] = ()) -> None:
        stops = np.array(sorted(stop_token_ids), np.int64)
        row = table_row(item_set, stops)
        self._kept = item_set, stops, item_set.trie.tables, row  # as long as compiled code may read there
        self._address: int = row.ctypes.data

    def _begin_without(self, other: "Walk", tokens: Sequence[int]) -> None:
        """Begin as the other one without one of its items."""
        item_set, stops, tables, row = other._kept
        whole, row = item_set.whole.trie.tables, row.copy()
        number = numbers_of(tables, whole, as_rows([tokens]))
        tables = replace(tables, dead=dead_of(tables, whole, number))
        row[:READY] = tables.pointers
        self._kept, self._address = (item_set, stops, tables, row), row.ctypes.data

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token, DEAD if it is not allowed."""
        return _step(self._address, state, token)

    def ends(self, state: int) -> bool:
        """Return whether an item may end in this state."""
        return _ends(self._address, state)

    def fill(self, state: int, row: NDArray[np.int32]) -> None:
        """Set bit t of `row` [ceil(vocabulary / 32)] if token t may follow, else clear it. Every word is written."""
        _fill_row(self._address, state, row)

    def __reduce__(self) -> Any:
        """Raise TypeError: a copy would read at addresses that another object or process owns."""
        raise TypeError("a walk holds addresses, so it cannot be copied or pickled: make a new one")


class HostState(Walk):
    """One request's place in an item set. Where an item may end, stop tokens are allowed, and after it they alone."""

    def __init__(self, item_set: ItemSet, stop_token_ids: Iterable[int]) -> None:
        super().__init__(item_set, stop_token_ids)
        self._states = [0]

    @property
    def state(self) -> int:
        return self._states[-1]

    def accept(self, tokens: Iterable[int]) -> bool:
        """Take the tokens; at the first that is not allowed, stop before it and return False."""
        tokens = list(tokens)
        return self.read(tokens) == len(tokens)

    def read(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first that is not allowed. Returns how many."""
        for taken, token in enumerate(tokens):
            after = _step(self._address, self._states[-1], token)
            if after == DEAD:
                return taken
            self._states.append(after)
        return len(tokens)

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

        After a draft that is not allowed all rows keep its row's state; after -1, which is padding, all are FREE.
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

    hosts, states, rows: each row's request, a state in its set (FREE allows all tokens), and the row's number.
    bitmask: [any, ceil(vocabulary / 32)] int32. Other rows stay as they are.
    Raises IndexError if `bitmask` has no such row, ValueError if the three differ in length.
    """
    if not len(hosts) == len(states) == len(rows):
        raise ValueError(f"{len(rows)} rows need a request and a state each, not {len(hosts)} and {len(states)}")
    addresses = np.array([host._address for host in hosts], np.int64)
    _fill_rows(addresses, np.array(states, np.int64), np.array(rows, np.int64), bitmask)


def warm_up() -> None:
    """Load the compiled walks now, so that no request waits for them."""
    item_set, bitmask = build([[token] for token in range(WIDE + 1)]), np.zeros((1, 1), np.int32)
    state = HostState(item_set, ())
    fill_bitmasks([state], [0], [0], bitmask)
    state.fill_bitmask(bitmask[0])
    state.accept([0])
    state.ends(state.state)
    forced_tokens(item_set, [0])


def forced_tokens(item_set: ItemSet, tokens: Iterable[int]) -> int:
    """Count an answer's tokens, from its item on, that were the only ones that could follow, stop tokens among them."""
    return int(_forced_tokens(item_set.trie.tables.pointers, np.array(list(tokens), np.int64)))


@compiled
def _forced_tokens(tables: Any, tokens: Any) -> int:
    state, forced = np.int64(0), 0
    for token in tokens:
        if state == END:
            return forced + 1
        if state >= TAIL:
            forced += 1
        elif state < WAITING:
            forced += children_from(tables, state)[1] == 1 and not is_terminal(tables, state)
        state = advance(tables, state, token)
    return forced


@compiled
def _stops(address: int) -> Any:
    return array_at(load64(address, STOPS), load64(address, STOP_COUNT), np.int64)


@compiled
def _step(address: int, state: int, token: int) -> Any:
    return next_state(address, state, token, NO_TOKEN, _stops(address))


@compiled
def _ends(address: int, state: int) -> Any:
    return is_terminal(pointers_at(address), state)


@compiled
def _fill_rows(addresses: Any, states: Any, rows: Any, bitmask: Any) -> None:
    for i in range(len(rows)):
        if not 0 <= rows[i] < len(bitmask):
            raise IndexError("the bitmask has no such row")
    for i in range(len(rows)):
        _fill_row(addresses[i], states[i], bitmask[rows[i]])


@compiled
def _fill_row(address: int, state: int, row: Any) -> None:
    fill_bitmask_of(pointers_at(address), state, _stops(address), load64(address, READY), row.view(np.uint32))
