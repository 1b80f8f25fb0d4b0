"""The host path: one request's state with its history, and the mask of its row as a bitmask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet, build
from itemset.jit import compiled
from itemset.walk import DEAD, END, TAIL, WAITING, advance, is_terminal, tail_token


class HostState:
    """Where one request stands in an item set.

    Where an item may end, the stop tokens are allowed beside the children; once it has ended, they alone are, so that a
    request that ignores its stop tokens goes on with them and never leaves the set.

    stop_token_ids: the request's stop tokens; one that continues an item here counts as the item's token.
    """

    def __init__(self, item_set: ItemSet, stop_token_ids: Iterable[int]) -> None:
        self._tables = item_set.trie.tables
        self._stops = np.array(sorted(stop_token_ids), np.int64)
        self._stop_set = frozenset(stop_token_ids)
        self._states = [0]

    @property
    def state(self) -> int:
        return self._states[-1]

    @property
    def complete(self) -> bool:
        """Whether the item has ended and nothing but stop tokens can follow."""
        return self.state == END

    def step(self, state: int, token: int) -> int:
        """The state after `token`, DEAD where it is not allowed."""
        after = int(advance(self._tables, state, token))
        if after == DEAD and token in self._stop_set and is_terminal(self._tables, state):
            return END
        return after

    def accept(self, tokens: Iterable[int]) -> bool:
        """Take the tokens; at the first that is not allowed, stop before it and return False."""
        for token in tokens:
            after = self.step(self.state, token)
            if after == DEAD:
                return False
            self._states.append(after)
        return True

    def allowed_prefix(self, tokens: list[int]) -> list[int]:
        """The longest start of `tokens` that `accept` would take. The state stays."""
        state = self.state
        for i, token in enumerate(tokens):
            state = self.step(state, token)
            if state == DEAD:
                return tokens[:i]
        return tokens

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` accepted tokens. Raises ValueError where there are not so many."""
        if not 0 <= tokens < len(self._states):
            raise ValueError(f"cannot roll back {tokens} tokens, {len(self._states) - 1} were accepted")
        del self._states[len(self._states) - tokens :]

    def reset(self) -> None:
        del self._states[1:]

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Bit t of `row` [ceil(vocabulary / 32)] says whether token t may follow; every word is written."""
        _fill_bitmask(self._tables, self.state, self._stops, row.view(np.uint32))


def allowed_rows(
    item_set: ItemSet, stop_token_ids: Iterable[int], tokens: NDArray[np.int64], allowed: NDArray[np.bool_]
) -> None:
    """What may follow each row of tokens, each from the beginning of an item on: True in `allowed`, of zeros.

    tokens: [rows, any] int64. allowed: [rows, vocabulary]. Where an item has ended, or the tokens have left the set,
    the stop tokens alone may follow.
    """
    stops = np.array(sorted(stop_token_ids), np.int64)
    _allowed_rows(item_set.trie.tables, stops, np.ascontiguousarray(tokens), allowed)


def warm_up() -> None:
    """Load the compiled walks now, for both widths of token ids: a first request should not wait for them."""
    row = np.zeros(1, np.int32)
    for high in (1, 2**16):
        state = HostState(build([[0, 0, high], [0, 1]]), {0})
        state.fill_bitmask(row)
        state.accept([0, 0])
        state.fill_bitmask(row)


def forced_tokens(item_set: ItemSet, tokens: Iterable[int]) -> int:
    """How many of these tokens, from the beginning of an item on, were the only one that could follow; the stop token
    behind an item among them."""
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
            children = np.int64(tables.row_offsets[state + 1]) - np.int64(tables.row_offsets[state])
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
                if tables.labels[edge] < allowed.shape[1]:
                    allowed[row, tables.labels[edge]] = True
        if is_terminal(tables, state):
            for token in stops:
                if 0 <= token < allowed.shape[1]:
                    allowed[row, token] = True


@compiled
def _fill_bitmask(tables: Any, state: int, stops: Any, row: Any) -> None:
    row[:] = 0
    if state >= TAIL:
        _set_bit(row, tail_token(tables, state))
    elif state < WAITING:
        for edge in range(tables.row_offsets[state], tables.row_offsets[state + 1]):
            _set_bit(row, np.int64(tables.labels[edge]))
    if is_terminal(tables, state):
        for token in stops:
            _set_bit(row, token)


@compiled
def _set_bit(row: Any, token: int) -> None:
    if 0 <= token < len(row) * 32:
        row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
