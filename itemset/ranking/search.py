"""The best items of a set by a model's own probabilities, in few forward passes, and proven if that is asked for.

An item's score is the sum of its tokens' log-probabilities over the whole vocabulary (STATIC, arXiv 2602.22647,
Algorithm 1), with its end token's. What a pass costs is the caller's, who runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.prefixes import Round, tokens_after
from itemset.trie.jit import compiled
from itemset.trie.walk import END, TAIL, follow


class Pass(NamedTuple):
    """One forward pass over the prompt and these tokens of an item.

    Wanted are the log-probabilities of `tokens[known:]`, each after what stands before it, and those of `after` after
    all of them.
    then: of a path pass, what the pass may score besides: each continues the tokens of the one before it, by one of its
    `after`, and what follows.
    """

    tokens: tuple[int, ...]
    known: int
    after: NDArray[np.int64]
    then: tuple[Pass, ...] = ()


Answer = tuple[NDArray[Any], NDArray[Any]]
"""Of a pass: the log-probabilities of its run, [len(tokens) - known], and of `after`."""
Answers = Answer | list[Answer]
"""Of a path pass: its own answer and those of the first of its `then`, as many as were scored."""


class Ranked(NamedTuple):
    """An item that was found, its tokens without the end token, and its score."""

    tokens: tuple[int, ...]
    score: float


class Best(NamedTuple):
    """What a search has found, best first: fewer than were asked for if the set has fewer, and none twice.

    proven: whether no other item of the set can score higher than the last of them. passes: forward passes that it
    took, in so many rounds.
    """

    items: list[Ranked]
    proven: bool
    passes: int
    rounds: int

    def of_item(self, i: int) -> dict[str, Any]:
        """What an answer says of the item alone."""
        return {"rank": i + 1, "score": self.items[i].score}

    @property
    def took(self) -> dict[str, Any]:
        """What it says of the whole list."""
        return {"proven": self.proven, "passes": self.passes, "rounds": self.rounds}


class Item(Protocol):
    """An item of an answer: its tokens without the end token, and the sum of their log-probabilities."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def score(self) -> float: ...


class Found(Protocol):
    """Items that were found with forward passes, and what answers say of them: see `Best`."""

    @property
    def items(self) -> Sequence[Item]: ...
    @property
    def took(self) -> dict[str, Any]: ...
    def of_item(self, i: int) -> dict[str, Any]: ...


FoundT = TypeVar("FoundT", bound=Found)
FoundT_co = TypeVar("FoundT_co", bound=Found, covariant=True)


class Rounds(Protocol[FoundT_co]):
    """What runs by rounds of passes: score `passes`, give the answers to `take`, until there are none."""

    @property
    def passes(self) -> Sequence[Pass]: ...
    def take(self, answers: Sequence[Answer]) -> None: ...
    @property
    def result(self) -> FoundT_co: ...


def described(
    lists: Sequence[Found], item_set: ItemSet, of_set: Mapping[str, Any] = MappingProxyType({})
) -> list[list[dict[str, Any]]]:
    """What answers say of each item of some lists: what each says of it, its own keys, and what its list took.

    The keys of all of them are found together. of_set: what they say of the set.
    """
    keys = iter(item_set.keys_of([item.tokens for found in lists for item in found.items]))
    return [
        [
            {**found.of_item(i), "key": own[0], "keys": own, **found.took, **of_set}
            for i, own in enumerate(islice(keys, len(found.items)))
        ]
        for found in lists
    ]


_SELF = -1  # in place of an edge: the row itself
_PROOF_SHARE = 8  # a round of a proof takes one pass for so many that went before


class Search:
    """The search for the `k` best items. Score `passes`, give the answers to `take`, until there are none; then read
    `result`.

    A token's log-probability is never positive, so a prefix scores at least as high as everything below it. Items of
    probability zero are never found. Equal scores are ordered by tokens; of items that tie for the last place, the one
    found first stays.

    A prefix is a row here once it has been passed to the model. One that waits is its score, its parent's row and the
    edge that leads to it: 16 bytes, of which a round of 1,000 passes may bring a million.
    """

    def __init__(
        self,
        item_set: ItemSet,
        k: int,
        *,
        width: int | None = None,
        end_token: int | None = None,
        exact: bool = False,
        renormalised: bool = False,
        max_passes: int | None = None,
        proof_passes: int | None = None,
    ) -> None:
        """Raises ValueError if k, width, max_passes or proof_passes is less than 1.

        width: prefixes in a round of the beam, k if None. By default, a beam: of all that a round has found the
        `width` best go on, and those that lead to a single item are scored to its end in one pass. It finds what a
        beam of single tokens finds, or better: a single item that has come so far is not pruned on its last tokens.
        exact: after that beam search on from the best prefix, wherever it stands, until none can beat the k-th item.
        end_token: if given, the end of an item counts in its score.
        renormalised: score each token by its share among those that may stand there, as sampling inside the set does.
        The tokens of a tail then cost nothing, neither a score nor a pass.
        max_passes: give what has been found after so many, unproven. proof_passes: the same, but the beam ends first.
        """
        self._width = k if width is None else width
        for name, value in (("k", k), ("width", width), ("max_passes", max_passes), ("proof_passes", proof_passes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: make it at least 1")
        self._tables, self._k = item_set.trie.tables, k
        self._exact, self._renormalised = exact, renormalised
        self._max_passes, self._proof_passes = max_passes, proof_passes
        self._ends = np.array([] if end_token is None else [end_token], np.int64)
        self._tokens: list[tuple[int, ...]] = [()]  # of each row
        self._open = _NONE
        self._aside: list[_Prefixes] = []  # what was pruned; if there is no proof, the best of it
        self._found = _NONE  # at most k, best first; _SELF is an item that ends at its row
        self._beam, self._taken, self._rounds = True, 0, 0
        self._asked: list[Pass] | None = None

    @property
    def passes(self) -> list[Pass]:
        """The round to score next. Empty: the search has ended."""
        if self._asked is None:  # the first is made when it is wanted: often an engine makes the list by itself
            self._round = Round.of(self._tables, np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
            self._asked = self._passes(known=[0]) if self._budget() else []
        return self._asked

    def take(self, answers: Sequence[Answer]) -> None:
        """Take the answers to `passes`, one each: items are found, and `passes` becomes the next round."""
        self._taken, self._rounds = self._taken + len(self.passes), self._rounds + 1
        self._expand(answers)
        if self._beam:
            self._prune()
        best = self._pop()
        if not best.scores.size and self._beam and self._exact:
            # The beam has set a bar, which what it left aside has to beat.
            self._beam = False
            self._open, self._aside = _Prefixes.joined([self._open, *self._aside]), []
            best = self._pop()
        parents = best.parents.tolist()
        states, runs = tokens_after(self._tables, best.edges)
        first = len(self._tokens)
        self._tokens += [self._tokens[row] + run for row, run in zip(parents, runs, strict=True)]
        self._round = Round.of(self._tables, best.scores, np.arange(first, len(self._tokens)), states)
        self._asked = self._passes(known=[len(self._tokens[row]) + 1 for row in parents])

    @property
    def result(self) -> Best:
        """What has been found so far."""
        columns = [column.tolist() for column in self._found]
        _, runs = tokens_after(self._tables, np.maximum(self._found.edges, 0))
        found = [
            Ranked(self._tokens[row] + (() if edge == _SELF else run), score)
            for score, row, edge, run in zip(*columns, runs, strict=True)
        ]
        left = max(prefixes.scores.max(initial=-np.inf) for prefixes in (self._open, *self._aside))
        return Best(ordered(found), bool(left <= self._bar()), self._taken, self._rounds)

    def _bar(self) -> float:
        """What an item has to beat."""
        return float(self._found.scores[-1]) if len(self._found.scores) == self._k else -np.inf

    def _budget(self) -> int:
        """How many passes the next round may have."""
        # A proof of many passes takes them in ever larger rounds: a few of the last one's may turn out needless.
        most = self._width if self._beam else max(self._width, self._taken // _PROOF_SHARE)
        limits = (self._max_passes, None if self._beam else self._proof_passes)
        return max(0, min([most, *(limit - self._taken for limit in limits if limit is not None)]))

    def _pop(self) -> _Prefixes:
        """Take the best prefixes that can still lead to something better."""
        self._open = self._open.above(self._bar())
        best, self._open = self._open.split(self._budget())
        return best

    def _prune(self) -> None:
        """Go on with the best open prefixes, and lay the others aside."""
        self._open, others = self._open.split(self._width)
        if others.scores.size:
            self._aside.append(others if self._exact else others.split(1)[0])

    def _passes(self, known: list[int]) -> list[Pass]:
        now, labels = self._round, self._tables.labels
        passes: list[Pass] = []
        if not len(now.rows):
            return passes
        children = np.split(labels[now.edges].astype(np.int64), np.cumsum(now.degree)[:-1])
        for row, after, ends, so_far in zip(now.rows.tolist(), children, now.ends.tolist(), known, strict=True):
            if ends and len(self._ends):
                after = np.concatenate([after, self._ends])
            passes.append(Pass(self._tokens[row], so_far, after))
        return passes

    def _expand(self, answers: Sequence[Answer]) -> None:
        """Score the children of a round's prefixes: some are items, the others wait."""
        now = self._round
        totals = now.scores + np.array([float(np.sum(run)) for run, _ in answers])
        ended = now.ends & (len(self._ends) > 0)
        after = np.concatenate([np.asarray(after, np.float64) for _, after in answers])
        starts = np.cumsum(now.degree + ended) - (now.degree + ended)
        if self._renormalised:
            asked = now.degree + ended  # in a view, a node may have no children
            after -= np.repeat(np.logaddexp.reduceat(after, starts[asked > 0]), asked[asked > 0])
        # An item ends at a row that is terminal, or was one's whole tail.
        ends = np.flatnonzero(now.ends)
        of_ends = totals[ends] + (after[(starts + now.degree)[ends]] if len(self._ends) else 0.0)
        self._add(_Prefixes.of(of_ends, now.rows[ends], np.full(len(ends), _SELF)))
        children = np.ones(len(after), np.bool_)
        children[(starts + now.degree)[ended]] = False
        scores = np.repeat(totals, now.degree) + after[children]
        better = np.flatnonzero(scores > self._bar())
        opened = _Prefixes.of(scores[better], np.repeat(now.rows, now.degree)[better], now.edges[better])
        if self._renormalised or not len(self._ends):
            # Nothing more has to be scored of an item that stands alone, if its tail counts nothing or is empty.
            done = np.empty(len(opened.scores), np.bool_)
            _stand_alone(self._tables.pointers, opened.edges, self._renormalised, done)
            self._add(opened.at(done))
            opened = opened.at(~done)
        self._open = _Prefixes.joined([self._open, opened])

    def _add(self, items: _Prefixes) -> None:
        joined = _Prefixes.joined([self._found, items.above(self._bar())])
        self._found = joined.at(np.argsort(-joined.scores, kind="stable")[: self._k])


class _Prefixes(NamedTuple):
    """Prefixes as columns. scores: float64. parents: the row of all but its last tokens. edges: what leads there from
    the parent, or _SELF."""

    scores: NDArray[np.float64]
    parents: NDArray[np.int32]
    edges: NDArray[np.int32]

    @classmethod
    def of(cls, scores: NDArray[Any], parents: NDArray[Any], edges: NDArray[Any]) -> _Prefixes:
        return cls(scores.astype(np.float64), parents.astype(np.int32), edges.astype(np.int32))

    @classmethod
    def joined(cls, parts: Sequence[_Prefixes]) -> _Prefixes:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def at(self, which: NDArray[Any]) -> _Prefixes:
        return _Prefixes(self.scores[which], self.parents[which], self.edges[which])

    def above(self, bar: float) -> _Prefixes:
        return self.at(self.scores > bar)

    def split(self, n: int) -> tuple[_Prefixes, _Prefixes]:
        """The best `n`, in order, and the others. Equal scores are ordered by edge: on one level, that is by tokens."""
        chosen = np.ones(self.scores.size, np.bool_)
        if n < self.scores.size:
            worst = np.partition(self.scores, -n)[-n] if n else np.inf
            chosen = self.scores > worst
            level = np.flatnonzero(self.scores == worst)
            chosen[level[np.argsort(self.edges[level])[: n - np.count_nonzero(chosen)]]] = True
        best, others = self.at(chosen), self.at(~chosen)
        return best.at(np.lexsort((best.edges, -best.scores))), others


_NONE = _Prefixes.of(np.zeros(0), np.zeros(0), np.zeros(0))


def ordered(items: list[Ranked]) -> list[Ranked]:
    """Return them best first; equal scores are ordered by tokens."""
    return sorted(items, key=lambda one: (-one.score, one.tokens))


@compiled
def _stand_alone(tables, edges, with_tail, alone):  # type: ignore[no-untyped-def]
    """Whether one item alone is after each edge, all of whose tokens are read; or also if `with_tail`."""
    for i in range(len(edges)):
        state = follow(tables, np.int64(edges[i]))
        alone[i] = state == END or (with_tail and state >= TAIL)
