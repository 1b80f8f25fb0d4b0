"""The best items of a set by a model's own probabilities, in few forward passes, and proven where that is asked for.

An item's score is the sum of its tokens' log-probabilities over the whole vocabulary (STATIC, arXiv 2602.22647,
Algorithm 1), with its end token's. What a pass costs is the caller's: `Score` is any way to run the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.jit import compiled
from itemset.walk import END, TAIL, follow, is_terminal, tail_entry


class Pass(NamedTuple):
    """One forward pass over the prompt and these tokens of an item.

    Wanted are the log-probabilities of `tokens[known:]`, each behind what stands before it, and those of `after` behind
    all of them.
    """

    tokens: tuple[int, ...]
    known: int
    after: NDArray[np.int64]


Score = Callable[[Sequence[Pass]], Sequence[tuple[NDArray[Any], NDArray[Any]]]]
"""Runs a round of passes: for each the log-probabilities of its run, [len(tokens) - known], and of `after`."""


class Ranked(NamedTuple):
    """An item that was found, its tokens without the end token, and its score."""

    tokens: tuple[int, ...]
    score: float


class Best(NamedTuple):
    """What a search has found, best first: fewer than were asked for where the set has fewer, and none twice.

    proven: whether no other item of the set can score higher than the last of them. passes: forward passes that it
    took, in so many rounds.
    """

    items: list[Ranked]
    proven: bool
    passes: int
    rounds: int


@dataclass(order=True)
class _Open:
    """A prefix that is not yet scored to an end: a node, or a whole item whose tail is."""

    loss: float  # minus its score so far, so that the best comes first
    tokens: tuple[int, ...]
    state: int = field(compare=False)
    known: int = field(compare=False)  # tokens that the score counts

    @property
    def alone(self) -> bool:
        """Whether the tokens are an item's, all of them: its tail has been read."""
        return self.state == END


def best_items(
    item_set: ItemSet,
    score: Score,
    k: int,
    *,
    width: int | None = None,
    end_token: int | None = None,
    exact: bool = False,
    max_passes: int | None = None,
) -> Best:
    """The `k` best items.

    A token's log-probability is never positive, so a prefix scores at least as high as everything below it.

    width: prefixes in a round, k if None. By default, a beam: of all that a round has found the `width` best go on, and
    those that lead to a single item are scored to its end in one pass. It finds what a beam of single tokens finds, or
    better: a single item that has come so far is not pruned on its last tokens.
    exact: search on from the best prefix, wherever it stands, until none can beat the k-th item.
    end_token: where given, the end of an item counts in its score.
    max_passes: give what has been found after so many, unproven. Raises ValueError where k, width or max_passes is less
    than 1.
    """
    width = k if width is None else width
    for name, value in (("k", k), ("width", width), ("max_passes", 1 if max_passes is None else max_passes)):
        if value < 1:
            raise ValueError(f"{name} is {value}: make it at least 1")
    search = _Search(item_set, score, k, end_token, max_passes)
    search.opened([_Open(0.0, (), 0, 0)])
    while search.take(width) and search.within_limits():
        if not exact:
            search.prune(width)
    return search.result()


class _Search:
    def __init__(self, item_set: ItemSet, score: Score, k: int, end_token: int | None, max_passes: int | None) -> None:
        self._tables, self._score, self._k = item_set.trie.tables, score, k
        self._ends = np.array([] if end_token is None else [end_token], np.int64)
        self._max_passes = max_passes
        self._open: list[_Open] = []
        self._found: list[tuple[float, tuple[int, ...]]] = []  # a heap of at most k, the worst first
        self._pruned = -np.inf  # the best score that was thrown away
        self._passes = self._rounds = 0

    def opened(self, some: list[_Open]) -> None:
        for one in some:
            if -one.loss > self._bar():
                heapq.heappush(self._open, one)

    def _bar(self) -> float:
        """What an item has to beat."""
        return self._found[0][0] if len(self._found) == self._k else -np.inf

    def within_limits(self) -> bool:
        return self._max_passes is None or self._passes < self._max_passes

    def take(self, width: int) -> bool:
        """One round: the best prefixes are scored, and what stands behind them opened. False where none is left."""
        if self._max_passes is not None:
            width = min(width, self._max_passes - self._passes)
        taken: list[_Open] = []
        while self._open and len(taken) < width:
            one = heapq.heappop(self._open)
            if -one.loss > self._bar():
                taken.append(one)
        if not taken:
            self._open.clear()
            return False
        asked = [self._pass(one) for one in taken]
        self._passes, self._rounds = self._passes + len(asked), self._rounds + 1
        for one, want, (run, after) in zip(taken, asked, self._score(asked), strict=True):
            total = -one.loss + float(np.sum(run))
            if one.alone:
                self._add(total + float(np.sum(after)), one.tokens)
            else:
                self._expand(one, total, want, np.asarray(after, np.float64))
        return True

    def _pass(self, one: _Open) -> Pass:
        if one.alone:
            return Pass(one.tokens, one.known, self._ends)
        first, last = self._tables.row_offsets[one.state], self._tables.row_offsets[one.state + 1]
        labels = self._tables.labels[int(first) : int(last)].astype(np.int64)
        ends = self._ends if is_terminal(self._tables, one.state) else self._ends[:0]
        return Pass(one.tokens, one.known, np.concatenate([labels, ends]))

    def _expand(self, one: _Open, score: float, want: Pass, after: NDArray[np.float64]) -> None:
        first, last = int(self._tables.row_offsets[one.state]), int(self._tables.row_offsets[one.state + 1])
        if is_terminal(self._tables, one.state):
            self._add(score + float(np.sum(after[last - first :])), one.tokens)
        scores = score + after[: last - first]
        better = np.flatnonzero(scores > self._bar())
        for i in better[np.argsort(-scores[better], kind="stable")]:
            state, token = int(follow(self._tables, first + int(i))), int(want.after[i])
            tokens, known = (*one.tokens, token), len(one.tokens) + 1
            if state == END and not len(self._ends):
                self._add(float(scores[i]), tokens)
                continue
            if state >= TAIL:
                tokens += tuple(_tail(self._tables, state - TAIL).tolist())
                state = END
            self.opened([_Open(-float(scores[i]), tokens, state, known)])

    def _add(self, score: float, tokens: tuple[int, ...]) -> None:
        if len(self._found) < self._k:
            heapq.heappush(self._found, (score, tokens))
        elif score > self._found[0][0]:
            heapq.heapreplace(self._found, (score, tokens))

    def prune(self, width: int) -> None:
        """Keep the `width` best open prefixes."""
        kept = heapq.nsmallest(width, self._open)
        if len(self._open) > width:
            self._pruned = max(self._pruned, -sorted(self._open)[width].loss)
        self._open = kept

    def result(self) -> Best:
        ranked = sorted(self._found, key=lambda pair: (-pair[0], pair[1]))
        left = max([self._pruned, *(-one.loss for one in self._open)])
        proven = left <= self._bar() or (left == -np.inf)
        return Best([Ranked(tokens, score) for score, tokens in ranked], proven, self._passes, self._rounds)


@compiled
def _tail(tables: Any, position: int) -> Any:
    """The tokens of a tail from this position on."""
    width = np.int64(tables.token_bits)
    end = position
    while (tail_entry(tables, end) >> width) & 1 == 0:
        end += 1
    tokens = np.empty(end + 1 - position, np.int64)
    for i in range(len(tokens)):
        tokens[i] = tail_entry(tables, position + i) & ((np.int64(1) << width) - 1)
    return tokens
