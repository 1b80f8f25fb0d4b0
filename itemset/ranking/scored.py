"""What is known of a model's distribution over a set: the prefixes that it has scored, and how their mass divides.

The mass of a prefix is its probability to a power of 1 or more, in logarithms. What a set has below a prefix never
weighs more than the prefix does: the rest is what lies outside the set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.prefixes import Round, tokens_after
from itemset.ranking.search import Answers, Pass
from itemset.trie.jit import compiled
from itemset.trie.pointers import first_edge
from itemset.trie.walk import follow

UNSCORED, ASKED, ITEM, NOTHING = -1, -2, -3, -4
"""In place of a first part: a prefix that nobody has asked for, one that is in a round, an item, an empty prefix."""
ROOT = 0
_SELF = -1  # in place of an edge: the item that ends at the row itself


class Places(NamedTuple):
    """The places of a tree of masses as columns; its root is the empty prefix.

    A place is a prefix, an item, or some of the children of one prefix. A scored prefix has one part, all that may
    follow it: less than itself, as others may follow outside the set. Some children have two parts, which make them up.

    masses: float64 logarithms. first, second: int32, the parts; UNSCORED, ASKED, ITEM or NOTHING as the first, and -1
    as a second that is not there.
    """

    masses: NDArray[np.float64]
    first: NDArray[np.int32]
    second: NDArray[np.int32]


class Steps(NamedTuple):
    """What follows each place token by token, as columns beside those of `Places`.

    tokens: int64, a place's own token, the end token for an item; -1 for parts that are several children.
    runs, lengths: int32, where in the last two columns the tokens stand that are certain to follow a scored place.
    after: float64, the mass of a scored place with these.
    children, counts: int32. The children after them stand side by side, those that are possible: the first, and how
        many.
    run_tokens, run_masses: int64 and float64, certain tokens, and what each adds to the mass.
    """

    tokens: NDArray[np.int64]
    runs: NDArray[np.int32]
    lengths: NDArray[np.int32]
    after: NDArray[np.float64]
    children: NDArray[np.int32]
    counts: NDArray[np.int32]
    run_tokens: NDArray[np.int64]
    run_masses: NDArray[np.float64]


LIKELY = 0.1  # a path goes on with a child that has this share of what branches off below its prefix


class _Scoring(NamedTuple):
    """One prefix that a pass scores: its row of tokens, the edges that follow, and the one by which its path goes on,
    or -1. ends: whether an item ends here."""

    row: int
    edges: NDArray[np.int64]
    ends: bool
    guess: int


class ScoredTree:
    """The tree of one prompt: `ask` gives the passes that score some prefixes, `take` their answers.

    A pass scores what follows a prefix. What is certain to follow it is scored with it: the tail of an item that stands
    alone, and tokens without an alternative in the set. A path pass scores more prefixes below its own, along a guess.

    paths: whether `ask` gives path passes.
    """

    def __init__(self, item_set: ItemSet, *, end_token: int, power: float = 1.0, paths: bool = False) -> None:
        """Raises ValueError for a power below 1, with which masses are no bounds."""
        if not power >= 1:
            raise ValueError(f"power is {power}: make it at least 1")
        self._tables, self._end, self._power, self.paths = item_set.trie.tables, end_token, power, paths
        self._tokens: list[tuple[int, ...]] = [()]  # of each row
        self._asked: list[tuple[int, list[_Scoring]]] = []
        self._size = 1
        self._masses = np.zeros(64)
        self._first, self._second = np.full(64, UNSCORED, np.int32), np.full(64, -1, np.int32)
        self._rows, self._edges = np.zeros(64, np.int32), np.zeros(64, np.int32)
        self._labels, self._after = np.full(64, -1, np.int64), np.zeros(64)
        self._runs, self._lengths, self._children, self._counts = np.zeros((4, 64), np.int32)
        self._run_size, self._run_tokens, self._run_masses = 0, np.zeros(64, np.int64), np.zeros(64)

    @property
    def places(self) -> Places:
        return Places(self._masses[: self._size], self._first[: self._size], self._second[: self._size])

    @property
    def steps(self) -> Steps:
        return Steps(
            self._labels, self._runs, self._lengths, self._after, self._children, self._counts,
            self._run_tokens, self._run_masses,
        )  # fmt: skip

    def ask(self, places: Sequence[int]) -> list[Pass]:
        """The passes that score these prefixes, none of which has been asked for."""
        which = np.array(places, np.int64)
        self._first[which] = ASKED
        rows, runs, states, known = self._read(which)
        tokens = [self._tokens[row] for row in rows]
        passes: list[list[Pass]] = [[] for _ in rows]
        scorings: list[list[_Scoring]] = [[] for _ in rows]
        going = np.arange(len(rows))
        while len(going):
            round_ = self._followed(states, runs)
            guesses = self._guesses(round_)
            children = np.split(round_.edges, np.cumsum(round_.degree)[:-1])
            of_each = zip(runs, known, children, round_.ends.tolist(), guesses.tolist(), strict=True)
            for i, (run, so_far, edges, ends, guess) in zip(going.tolist(), of_each, strict=True):
                tokens[i] += run
                self._tokens.append(tokens[i])
                scorings[i].append(_Scoring(len(self._tokens) - 1, edges, ends, guess))
                after = self._tables.labels[edges].astype(np.int64)
                passes[i].append(Pass(tokens[i], so_far, np.append(after, self._end) if ends else after))
            on = np.flatnonzero(guesses >= 0)
            going, known = going[on], [len(tokens[i]) + 1 for i in going[on].tolist()]
            states, runs = tokens_after(self._tables, guesses[on].astype(np.int32))
        self._asked += zip(which.tolist(), scorings, strict=True)
        return [first._replace(then=tuple(then)) for first, *then in passes]

    def take(self, answers: Sequence[Answers]) -> None:
        """Take the answers to the passes of `ask`, one each."""
        asked, self._asked = self._asked, []
        for (place, scorings), given in zip(asked, answers, strict=True):
            for one, (run, after) in zip(scorings, given if isinstance(given, list) else [given], strict=False):
                self._note_run(place, one.row, self._power * np.asarray(run, np.float64))
                masses = self._after[place] + self._power * np.asarray(after, np.float64)
                edges = np.append(one.edges, _SELF) if one.ends else one.edges
                possible = np.flatnonzero(masses > -np.inf)
                first = self._size
                self._children[place], self._counts[place] = first, len(possible)
                self._first[place] = self._divide(masses[possible], one.row, edges[possible])
                guessed = np.flatnonzero(edges[possible] == one.guess)
                if one.guess < 0 or not len(guessed):
                    break
                place = first + int(guessed[0])

    def item(self, place: int) -> tuple[tuple[int, ...], float]:
        """The tokens of an item, without the end token, and its log-probability."""
        return self._tokens[self._rows[place]], float(self._masses[place]) / self._power

    def unknown_share(self) -> float:
        """The most that items of unscored prefixes may have of the set's distribution: a share of 0 to 1."""
        masses, first, _ = self.places
        unscored = masses[(first == UNSCORED) | (first == ASKED)]
        if not len(unscored):
            return 0.0
        known = np.logaddexp.reduce(masses[first == ITEM]) if (first == ITEM).any() else -np.inf
        most = np.logaddexp.reduce(unscored)
        return float(np.exp(most - np.logaddexp(most, known)))

    def _read(self, which: NDArray[np.int64]) -> tuple[list[int], list[tuple[int, ...]], NDArray[np.int64], list[int]]:
        """Of unscored prefixes: the row that each continues and its tokens after that, the state after them, and how
        many of its tokens have been scored."""
        if which.tolist() == [ROOT]:
            return [0], [()], np.zeros(1, np.int64), [0]
        rows = self._rows[which].tolist()
        states, runs = tokens_after(self._tables, self._edges[which])
        return rows, runs, states, [len(self._tokens[row]) + 1 for row in rows]

    def _followed(self, states: NDArray[np.int64], runs: list[tuple[int, ...]]) -> Round:
        """What follows these states, after tokens without an alternative: states and runs are moved on by these."""
        rows = np.arange(len(states))
        round_ = Round.of(self._tables, np.zeros(len(states)), rows, states)
        certain = np.flatnonzero((round_.degree == 1) & ~round_.ends)
        while len(certain):
            starts = np.cumsum(round_.degree) - round_.degree
            states[certain], more = tokens_after(self._tables, round_.edges[starts[certain]].astype(np.int32))
            for i, run in zip(certain.tolist(), more, strict=True):
                runs[i] += run
            round_ = Round.of(self._tables, round_.scores, rows, states)
            certain = certain[(round_.degree[certain] == 1) & ~round_.ends[certain]]
        return round_

    def _guesses(self, round_: Round) -> NDArray[np.int64]:
        """Of each row the edge by which its path goes on: to the child with most children, a tail counting as one. -1
        if it has too small a share of them."""
        guesses = np.full(len(round_.degree), -1, np.int64)
        if self.paths:
            _guess(self._tables.pointers, round_.edges, np.append(0, np.cumsum(round_.degree)), guesses)
        return guesses

    def _note_run(self, place: int, row: int, masses: NDArray[np.float64]) -> None:
        first, self._run_size = self._run_size, self._run_size + len(masses)
        if self._run_size > len(self._run_tokens):
            more = max(self._run_size, 2 * len(self._run_tokens)) - len(self._run_tokens)
            self._run_tokens = np.concatenate([self._run_tokens, np.zeros(more, np.int64)])
            self._run_masses = np.concatenate([self._run_masses, np.zeros(more)])
        tokens = self._tokens[row]
        self._run_tokens[first : self._run_size] = tokens[len(tokens) - len(masses) :]
        self._run_masses[first : self._run_size] = masses
        self._runs[place], self._lengths[place] = first, len(masses)
        self._after[place] = self._masses[place] + np.sum(masses)

    def _divide(self, masses: NDArray[np.float64], row: int, edges: NDArray[np.int64]) -> int:
        """Add children and, above them, a place for each two parts; return the place of all of them. Each sum is made
        of its parts, largest and smallest alike, so that none is lost to a difference."""
        count = len(masses)
        if not count:
            return NOTHING
        first = self._size
        self._grow(2 * count - 1)
        self._masses[first : first + count] = masses
        self._first[first : first + count] = np.where(edges == _SELF, ITEM, UNSCORED)
        self._rows[first : first + count] = row
        self._edges[first : first + count] = edges
        self._labels[first : first + count] = np.where(edges == _SELF, self._end, self._tables.labels[edges])
        level, free = np.arange(first, first + count), first + count
        while len(level) > 1:
            pairs = len(level) // 2
            new = np.arange(free, free + pairs)
            left, right = level[0 : 2 * pairs : 2], level[1 : 2 * pairs : 2]
            self._first[new], self._second[new] = left, right
            self._masses[new] = np.logaddexp(self._masses[left], self._masses[right])
            level, free = np.concatenate([new, level[2 * pairs :]]), free + pairs
        return int(level[0])

    def _grow(self, more: int) -> None:
        self._size += more
        if self._size > len(self._masses):
            room = max(self._size, 2 * len(self._masses)) - len(self._masses)
            self._masses = np.concatenate([self._masses, np.zeros(room)])
            self._first = np.concatenate([self._first, np.full(room, UNSCORED, np.int32)])
            self._second = np.concatenate([self._second, np.full(room, -1, np.int32)])
            self._rows = np.concatenate([self._rows, np.zeros(room, np.int32)])
            self._edges = np.concatenate([self._edges, np.zeros(room, np.int32)])
            self._labels = np.concatenate([self._labels, np.full(room, -1, np.int64)])
            self._after = np.concatenate([self._after, np.zeros(room)])
            self._runs, self._lengths, self._children, self._counts = np.concatenate(
                [(self._runs, self._lengths, self._children, self._counts), np.zeros((4, room), np.int32)], 1
            )


class Shared(ABC):
    """What draws of one prompt share: a tree, and its passes, round by round. Score `passes`, give the answers to
    `take`, until there are none."""

    def __init__(self, tree: ScoredTree, max_passes: int | None) -> None:
        self.tree, self._max_passes, self._taken, self._rounds = tree, max_passes, 0, 0
        self._passes: list[Pass] | None = None

    @property
    def passes(self) -> list[Pass]:
        """The round to score next. Empty: the draws have ended."""
        if self._passes is None:
            self._passes = self._next_round()
        return self._passes

    def take(self, answers: Sequence[Answers]) -> None:
        """Take the answers to `passes`, one each: `passes` becomes the next round."""
        self._taken, self._rounds = self._taken + len(self.passes), self._rounds + 1
        self.tree.take(answers)
        self._passes = self._next_round()

    @abstractmethod
    def _next_round(self) -> list[Pass]: ...


@compiled
def _guess(tables, edges, starts, guesses):  # type: ignore[no-untyped-def]
    for i in range(len(guesses)):
        most, total = np.int64(0), np.int64(0)
        for edge in edges[starts[i] : starts[i + 1]]:
            state = follow(tables, np.int64(edge))
            below = np.int64(1)
            if 0 <= state < tables.nodes:
                below = max(below, first_edge(tables, state + 1) - first_edge(tables, state))
            total += below
            if below > most:
                most, guesses[i] = below, edge
        if most < LIKELY * total:
            guesses[i] = -1
