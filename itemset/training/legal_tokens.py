"""Which tokens a set allowed at each place of a batch. A trainer walks the same trie, and needs the token ids alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.trie.pointers import compiled, first_edge, label, pointers_at
from itemset.trie.rows import MAX_TOKEN_ID, grown
from itemset.trie.walk import DEAD, END, FREE, TAIL, WAITING, advance, find_edge, is_alive, is_terminal, tail_token

_PLACES = 256  # whose logits are computed in one product


@dataclass(frozen=True)
class LegalTokens:
    """The legal tokens of a batch of ids [B, T], place after place. On the CPU, int64: for collators' processes."""

    shape: tuple[int, int]  # (B, T)
    places: Tensor  # [R], which of the B * T places have a constraint, ascending
    counts: Tensor  # [R], legal tokens of each
    depths: Tensor  # [R], tokens of the item before each
    tokens: Tensor  # [N], the sum of the counts
    chosen: Tensor  # [R], where in `tokens` the batch's own token stands

    @cached_property
    def owners(self) -> Tensor:
        """[N], which of the R places each legal token belongs to."""
        return torch.repeat_interleave(self.counts)

    @cached_property
    def largest(self) -> int:
        return int(self.tokens.max()) if len(self.tokens) else -1

    @cached_property
    def blocks(self) -> "list[Block]":
        """Return the places in blocks of one depth each, where they share most of their tokens."""
        blocks, firsts = [], self.counts.cumsum(0) - self.counts
        by_depth = torch.argsort(self.depths, stable=True)
        of_each = torch.unique_consecutive(self.depths[by_depth], return_counts=True)[1].tolist()
        for part in (part for of_one in by_depth.split(of_each) for part in of_one.split(_PLACES)):
            counts = self.counts[part]
            rows = torch.repeat_interleave(counts)
            entries = (firsts[part] - (counts.cumsum(0) - counts))[rows] + torch.arange(len(rows))
            tokens, columns = torch.unique(self.tokens[entries], return_inverse=True)
            blocks.append(Block(self.places[part], tokens, entries, rows * len(tokens) + columns))
        return blocks


class Block(NamedTuple):
    """A matrix of logits, [places, tokens], that holds those of some places' legal tokens."""

    places: Tensor  # [n] of B * T
    tokens: Tensor  # [u] distinct
    entries: Tensor  # which of the N legal tokens the block has
    cells: Tensor  # where each of them lies in the flat matrix


def legal_tokens(
    ids: Tensor | ArrayLike, item_set: ItemSet | Sequence[ItemSet], *, stop_tokens: int | Sequence[int],
    starts: Tensor | ArrayLike | None = None, lengths: Tensor | ArrayLike | None = None,
) -> LegalTokens:  # fmt: skip
    """Walk each row of `ids` [B, T] through its set: from its start to its stop token, or to its length if it was cut.

    item_set: of all rows, or one a row. Views are sets as well.
    stop_tokens: the model's end tokens, one of which may follow an item; none if rollouts end with the item itself.
    starts: [B] or one for all, where the item begins; places before it, such as thoughts, are free. T for a row without
        an item. By default the first id that is not negative, as of labels with -100.
    lengths: [B] or one for all, the ids of each row that are its own. What follows them, a stop token or an item that
        is complete without one is free, as is what follows the first negative id.
    Raises ItemSetError, a ValueError, for the first token that its set does not allow, and for what is no integer.
    """
    tokens = np.ascontiguousarray(_array(ids, "ids"))
    if tokens.ndim != 2:
        raise ItemSetError(f"ids must be [batch, time], not of shape {tokens.shape}: give one row as ids[None]")
    size, steps = tokens.shape
    if not tokens.size:
        return LegalTokens((size, steps), *[torch.zeros(0, dtype=torch.int64)] * 5)
    own = tokens >= 0
    begin = own.argmax(1) if starts is None else _of_rows(starts, tokens.shape, "starts")
    end = np.full(size, steps) if lengths is None else _of_rows(lengths, tokens.shape, "lengths")
    begin = np.where(own.any(1), begin, steps)
    sets = [item_set] * size if isinstance(item_set, ItemSet) else list(item_set or ())
    if len(sets) != size:
        raise ItemSetError(f"{len(sets)} sets for {size} rows: give one set for all rows, or one a row")
    # Where the tables of each row's set lie, [B, pointers]: `sets` keeps them as long as this is read.
    pointers = {id(one): one.trie.tables.pointers for one in sets}
    tables = np.array([pointers[id(one)] for one in sets], np.int64)
    stops = np.unique(_array(stop_tokens, "stop_tokens"))
    if (stops < 0).any():
        raise ItemSetError(f"the stop token {stops[0]} is no token: give the model's own, or an empty list")
    states = np.full(tokens.shape, FREE, np.int64)
    bad = _walk(tables, stops, np.minimum(tokens, MAX_TOKEN_ID + 1), begin, end, states)
    if bad >= 0:
        row, column = divmod(int(bad), steps)
        raise ItemSetError(
            f"row {row}, position {column}: token {tokens[row, column]} is not legal after {column - begin[row]} "
            f"tokens of its item, which begins at {begin[row]}. Give the set and the version that the rollout had, as "
            "`starts` where its item begins, and as `lengths` its own tokens if it was cut or padded"
        )
    places = np.flatnonzero(states != FREE)
    counts, chosen = np.empty_like(places), np.empty_like(places)
    found = _list(tables, stops, tokens, states, places, counts, chosen).copy()
    depths = places % steps - begin[places // steps]
    given = (torch.from_numpy(array) for array in (places, counts, depths, found, chosen))
    return LegalTokens((size, steps), *given)


def _array(given: Tensor | ArrayLike, name: str) -> NDArray[np.int64]:
    array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if array.size and array.dtype.kind not in "iu":
        raise ItemSetError(f"{name} must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _of_rows(given: Tensor | ArrayLike, shape: tuple[int, ...], name: str) -> NDArray[np.int64]:
    size, steps = shape
    values = _array(given, name)
    if values.shape not in ((), (size,)) or (values < 0).any() or (values > steps).any():
        raise ItemSetError(f"{name} must be 0 to {steps}, one for all rows or one for each of {size}, not {values}")
    return np.full(size, values)


@compiled
def _walk(tables: Any, stops: Any, ids: Any, begin: Any, end: Any, states: Any) -> Any:
    """Fill in the state before each token of an item. Return the first place with an illegal token, else -1."""
    for i in range(len(ids)):
        pointers, state = pointers_at(tables[i].ctypes.data), np.int64(0)
        for t in range(begin[i], end[i]):
            token = ids[i, t]
            if token < 0 or (state == END and not len(stops)):
                break
            states[i, t] = state
            after = advance(pointers, state, token)
            if after == DEAD:
                if is_terminal(pointers, state) and (stops == token).any():
                    break
                return i * ids.shape[1] + t
            state = after
    return -1


@compiled
def _list(tables: Any, stops: Any, ids: Any, states: Any, places: Any, counts: Any, chosen: Any) -> Any:
    """Return the legal tokens of all places. Fill in how many each has, and where the batch's own is."""
    found, at = np.empty(len(places), np.int64), 0
    for k in range(len(places)):
        i, t = places[k] // ids.shape[1], places[k] % ids.shape[1]
        pointers, state, first = pointers_at(tables[i].ctypes.data), states[i, t], at
        begin, end = (first_edge(pointers, state), first_edge(pointers, state + 1)) if state < WAITING else (0, 0)
        found = grown(found, at + 1 + end - begin + len(stops))
        if state >= TAIL:
            found[at] = tail_token(pointers, state)
            at += 1
        for edge in range(begin, end):
            if is_alive(pointers, edge):
                found[at] = label(pointers, edge)
                at += 1
        if is_terminal(pointers, state):
            for stop in stops:
                if find_edge(pointers, state, stop) < 0:  # else it is a token of the item
                    found[at] = stop
                    at += 1
        counts[k] = at - first
        for place in range(first, at):
            if found[place] == ids[i, t]:
                chosen[k] = place
    return found[:at]
