"""The best items of a set by a model's own probabilities, in few forward passes, and proven where that is asked for.

An item's score is the sum of its tokens' log-probabilities over the whole vocabulary (STATIC, arXiv 2602.22647,
Algorithm 1), with its end token's. What a pass costs is the caller's: `Score` is any way to run the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
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


Answer = tuple[NDArray[Any], NDArray[Any]]
"""Of a pass: the log-probabilities of its run, [len(tokens) - known], and of `after`."""
Score = Callable[[Sequence[Pass]], Sequence[Answer]]
"""Runs a round of passes."""


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


def described(best: Best, item_set: ItemSet) -> list[dict[str, Any]]:
    """What an answer says of each item: its rank from 1, its score and its own key, and what the list took."""
    keys = item_set.lookup([list(item.tokens) for item in best.items])
    took = {"proven": best.proven, "passes": best.passes, "rounds": best.rounds}
    return [
        {"rank": rank, "score": item.score, "key": key if isinstance(key, str) else int(key), **took}
        for rank, (item, key) in enumerate(zip(best.items, keys, strict=True), 1)
    ]


Rounds = Generator[Sequence[Pass], Sequence[Answer], Best]


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


def all_items(item_set: ItemSet, score: Score, *, end_token: int | None = None) -> list[Ranked]:
    """Every item of a small set with its score, best first, each by a pass of its own: the oracle of the search."""
    ends = np.array([] if end_token is None else [end_token], np.int64)
    items = [tuple(item) for item in item_set.items()]
    answers = score([Pass(item, 0, ends) for item in items])
    scored = [float(np.sum(run)) + float(np.sum(after)) for run, after in answers]
    ranked = [Ranked(item, total) for item, total in zip(items, scored, strict=True)]
    return sorted(ranked, key=lambda one: (-one.score, one.tokens))


def best_items(score: Score, rounds: Rounds) -> Best:
    """Run a `search` to its end."""
    passes = next(rounds)
    while True:
        try:
            passes = rounds.send(score(passes))
        except StopIteration as end:
            best: Best = end.value
            return best


def search(
    item_set: ItemSet,
    k: int,
    *,
    width: int | None = None,
    end_token: int | None = None,
    exact: bool = False,
    renormalised: bool = False,
    max_passes: int | None = None,
) -> Rounds:
    """The search for the `k` best items: yields the passes of a round, wants their answers sent, and returns a `Best`.

    A token's log-probability is never positive, so a prefix scores at least as high as everything below it. Items of
    probability zero are never found.

    width: prefixes in a round of the beam, k if None. By default, a beam: of all that a round has found the `width`
    best go on, and those that lead to a single item are scored to its end in one pass. It finds what a beam of single
    tokens finds, or better: a single item that has come so far is not pruned on its last tokens.
    exact: after that beam search on from the best prefix, wherever it stands, until none can beat the k-th item.
    end_token: where given, the end of an item counts in its score.
    renormalised: score each token by its share among those that may stand there, as sampling inside the set does. The
    tokens of a tail then cost nothing, neither a score nor a pass.
    max_passes: give what has been found after so many, unproven. Raises ValueError where k, width or max_passes is less
    than 1.
    """
    width = k if width is None else width
    for name, value in (("k", k), ("width", width), ("max_passes", 1 if max_passes is None else max_passes)):
        if value < 1:
            raise ValueError(f"{name} is {value}: make it at least 1")
    state = _Search(item_set, k, end_token, renormalised)
    beam = True
    while True:
        # A proof of many passes takes them in ever larger rounds: a few of the last one's may turn out needless.
        most = width if beam else max(width, state.passes // 8)
        taken = state.take(most if max_passes is None else min(most, max_passes - state.passes))
        if taken:
            state.score(taken, (yield [state.pass_of(one) for one in taken]))
            if beam:
                state.prune(width, keep=exact)
        elif beam and exact:
            beam = False  # it has set a bar, which what it left aside has to beat
            state.take_up()
        else:
            return state.result()


class _Search:
    def __init__(self, item_set: ItemSet, k: int, end_token: int | None, renormalised: bool) -> None:
        self._tables, self._k, self._renormalised = item_set.trie.tables, k, renormalised
        self._ends = np.array([] if end_token is None else [end_token], np.int64)
        self._open = [_Open(0.0, (), 0, 0)]  # a heap, the best first
        self._found: list[tuple[float, tuple[int, ...]]] = []  # a heap of at most k, the worst first
        self._aside: list[_Open] = []  # what was pruned, or the best of it
        self.passes = self._rounds = 0

    def _bar(self) -> float:
        """What an item has to beat."""
        return self._found[0][0] if len(self._found) == self._k else -np.inf

    def take(self, width: int) -> list[_Open]:
        """The best prefixes that can still lead to something better, at most `width`."""
        taken: list[_Open] = []
        while self._open and len(taken) < width and -self._open[0].loss > self._bar():
            taken.append(heapq.heappop(self._open))
        return taken

    def pass_of(self, one: _Open) -> Pass:
        """What has to be known of a prefix."""
        if one.alone:
            return Pass(one.tokens, one.known, self._ends)
        first, last = self._tables.row_offsets[one.state], self._tables.row_offsets[one.state + 1]
        labels = self._tables.labels[int(first) : int(last)].astype(np.int64)
        ends = self._ends if is_terminal(self._tables, one.state) else self._ends[:0]
        return Pass(one.tokens, one.known, np.concatenate([labels, ends]))

    def score(self, taken: Sequence[_Open], answers: Sequence[Answer]) -> None:
        """Take a round's answers: items are found, and what stands behind other prefixes is opened."""
        self.passes, self._rounds = self.passes + len(taken), self._rounds + 1
        for one, (run, after) in zip(taken, answers, strict=True):
            total = -one.loss + float(np.sum(run))
            if one.alone:
                self._add(total + float(np.sum(after)), one.tokens)
            else:
                self._expand(one, total, np.asarray(after, np.float64))

    def _expand(self, one: _Open, score: float, after: NDArray[np.float64]) -> None:
        first, last = int(self._tables.row_offsets[one.state]), int(self._tables.row_offsets[one.state + 1])
        if self._renormalised:
            after = after - np.logaddexp.reduce(after)
        if is_terminal(self._tables, one.state):
            self._add(score + float(np.sum(after[last - first :])), one.tokens)
        scores = score + after[: last - first]
        better = np.flatnonzero(scores > self._bar())
        for i in better[np.argsort(-scores[better], kind="stable")]:
            edge = first + int(i)
            state, token = int(follow(self._tables, edge)), int(self._tables.labels[edge])
            tokens, known = (*one.tokens, token), len(one.tokens) + 1
            if state >= TAIL:
                tokens += tuple(_tail(self._tables, state - TAIL).tolist())
            alone = state == END or state >= TAIL
            if alone and (self._renormalised or (len(tokens) == known and not len(self._ends))):
                self._add(float(scores[i]), tokens)  # nothing more of it has to be scored
                continue
            state = END if alone else state
            heapq.heappush(self._open, _Open(-float(scores[i]), tokens, state, known))

    def _add(self, score: float, tokens: tuple[int, ...]) -> None:
        if len(self._found) < self._k:
            heapq.heappush(self._found, (score, tokens))
        elif score > self._found[0][0]:
            heapq.heapreplace(self._found, (score, tokens))

    def prune(self, width: int, *, keep: bool) -> None:
        """Go on with the `width` best open prefixes. keep: lay the others aside, for `take_up`."""
        ranked = sorted(self._open)  # which is a heap
        self._aside += ranked[width:] if keep else ranked[width : width + 1]
        self._open = ranked[:width]

    def take_up(self) -> None:
        """Open what was laid aside."""
        self._open, self._aside = self._open + self._aside, []
        heapq.heapify(self._open)

    def result(self) -> Best:
        ranked = sorted(self._found, key=lambda pair: (-pair[0], pair[1]))
        left = max((-one.loss for one in self._open + self._aside), default=-np.inf)
        found = [Ranked(tokens, score) for score, tokens in ranked]
        return Best(found, left <= self._bar(), self.passes, self._rounds)


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
