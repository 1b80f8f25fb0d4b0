"""Items drawn from a model's own distribution over a set: exact, in few forward passes, however many items there are.

Masking token by token draws from another distribution: it chooses a prefix for what lies outside the set too, and then
an unlikely item has to follow (DISC, AISTATS 2025, theorem 2.1). Here items race. Let each sequence of tokens have a
clock that rings after a time of rate p, its probability. The first item of the set to ring is item x with probability
p(x) / p(set); those that ring after it are drawn without replacement. The clock of a prefix is the earliest of those
below it, again of a rate that is its probability. So the race can be run from the root down, and only the prefixes that
ring before the winner need be scored:

- The root's clock rings at time t, of rate 1.
- A prefix v rings at t because what is the earliest below it does: child c with probability p(c) / p(v), something
  outside the set with what is left. That child's clock is t. The others' have not rung yet, and so they ring at t plus
  a time of their own rate: times of a constant rate have no memory. If something outside has rung, that holds for all.

A prefix of probability p is scored by a draw with probability p / (p + S - S_v), S being the probability of the set and
S_v that of its items below the prefix: it has to ring before all items that are elsewhere (`expected_passes`).

Temperature. Weights w(x) = p(x)^a with a = 1/T >= 1 need no other race. Let the rate of every prefix be m(v) = p(v)^a.
For c over the children of v, and all that may follow outside the set, the sum of p(c) is at most p(v), so every
q(c) = p(c) / p(v) is at most 1 and q(c)^a <= q(c): the sum of m(c) = p(v)^a times the sum of q(c)^a is at most m(v).
So what is left, m(v) less the children's, is a rate too, of nothing that can be drawn, and takes the place of what lies
outside. An item's rate is w(x) itself, and the argument above holds word for word. For a < 1 the children's rates may
add up to more than their parent's, and there is no such race.

Random numbers. Each place of the tree gets its own from its parent's by a hash (splitmix64), the root its own from seed
and number of the draw. So a draw depends on the seed, its number and the model alone: not on the width of the rounds,
their order, or how many draws there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.scored import ASKED, ITEM, NOTHING, ROOT, UNSCORED, Places, ScoredTree, Shared
from itemset.ranking.search import Pass
from itemset.trie.jit import compiled

_AHEAD = 6  # by default a round takes one pass for so many that went before


class CutOffError(ValueError):
    """The passes ended before the draws did. To answer with the draws that had ended would favour likely items."""


class Draw(NamedTuple):
    """An item that was drawn: its tokens without the end token, its log-probability over the whole vocabulary, and
    whether its race was run to the end."""

    tokens: tuple[int, ...]
    score: float
    exact: bool


class Draws(NamedTuple):
    """What was drawn, in order. passes: forward passes that all of it took, in so many rounds.

    open: 0 if every draw is exact. Else the most that items which were not looked at may have of the distribution.
    """

    items: list[Draw]
    passes: int
    rounds: int
    open: float

    def of_item(self, i: int) -> dict[str, Any]:
        """What an answer says of the item alone."""
        return {"draw": i + 1, "logprob": self.items[i].score, "exact": self.items[i].exact}

    @property
    def took(self) -> dict[str, Any]:
        """What it says of all that was drawn with it."""
        return {"passes": self.passes, "rounds": self.rounds, **({"open": self.open} if self.open else {})}


class Drawing(Shared):
    """Draws of items. Score `passes`, give the answers to `take`, until there are none; then read `result`.

    All draws share the passes. A round scores the prefix for which each unfinished draw waits. Up to its width it goes
    on with those for which they would wait next.
    """

    def __init__(
        self,
        item_set: ItemSet,
        n: int,
        *,
        end_token: int,
        replace: bool = True,
        temperature: float = 1.0,
        seed: int | None = None,
        width: int | None = None,
        max_passes: int | None = None,
        approximate: bool = False,
        paths: bool = False,
    ) -> None:
        """Raises ValueError if n, width or max_passes is less than 1, or the temperature not above 0 and at most 1.

        end_token: the end of an item counts in its probability, as without it an item that is the beginning of another
        one would count twice.
        replace: n independent draws, among which an item may occur again; if False, n distinct items, each drawn from
        what the others have left: fewer if the set has fewer.
        temperature: over items: one of probability p is drawn with a weight of p^(1/T).
        width: passes in a round at least, if so many can be of use; by default rounds grow with the passes so far.
        max_passes: stop after so many. approximate: let the draws that are not finished then go on among the items that
        have been found; otherwise `result` raises CutOffError.
        paths: give path passes, for a model that scores many rows in a pass: fewer rounds. No draw depends on it.
        """
        for name, value in (("n", n), ("width", width), ("max_passes", max_passes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: make it at least 1")
        if not 0 < temperature <= 1:
            raise ValueError(f"temperature is {temperature}: make it more than 0, and at most 1")
        super().__init__(ScoredTree(item_set, end_token=end_token, power=1 / temperature, paths=paths), max_passes)
        self._seeds, self._races = np.random.SeedSequence(seed), list[_Race]()
        self._draws, self._wanted = (n, 1) if replace else (1, n)
        self._width, self._approximate = width, approximate

    @property
    def result(self) -> Draws:
        """What was drawn. Raises CutOffError if the passes ended before the draws did, and if they may not be
        approximate. There is no item if all of the set has a probability of zero."""
        cut = any(not race.over for race in self._races)
        if cut and not self._approximate:
            raise CutOffError(f"the draws need more than {self._taken} passes")
        items = []
        for race in self._races:
            exact = len(race.found)
            found = race.found if race.over else race.among_known(self.tree.places)
            items += [Draw(*self.tree.item(place), i < exact) for i, place in enumerate(found)]
        return Draws(items, self._taken, self._rounds, self.tree.unknown_share() if cut else 0.0)

    def _next_round(self) -> list[Pass]:
        if not self._races:
            keys = self._seeds.generate_state(self._draws, np.uint64)
            self._races = [_Race.of(key, self._wanted) for key in keys]
        places = self.tree.places
        waiting = [race for race in self._races if not race.run(places)]
        left = len(waiting) if self._max_passes is None else self._max_passes - self._taken
        wanted = list(dict.fromkeys(race.waits_for for race in waiting))[: max(0, left)]
        if not wanted:
            return []
        places.first[wanted] = ASKED
        most = max(1, self._taken // _AHEAD) if self._width is None else self._width
        most = most if self._max_passes is None else min(most, left)
        share = math.ceil((most - len(wanted)) / len(waiting))
        for race in waiting:
            if len(wanted) >= most:
                break
            wanted += race.next_after(places, min(share, most - len(wanted)))
        return self.tree.ask(wanted)


@dataclass
class _Race:
    """One race: the places that have not rung, as a heap. found: the items that have, up to `wanted`.

    clocks: float64, logarithms of times. places: int32. keys: uint64, from which a place takes its random numbers.
    """

    clocks: NDArray[np.float64]
    places: NDArray[np.int32]
    keys: NDArray[np.uint64]
    size: int
    wanted: int
    found: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, key: np.uint64, wanted: int) -> _Race:
        race = cls(np.zeros(64), np.zeros(64, np.int32), np.zeros(64, np.uint64), 1, wanted)
        race.keys[0], race.clocks[0], race.places[0] = key, _log_exponential(key, 0), ROOT
        return race

    @property
    def over(self) -> bool:
        return len(self.found) == self.wanted or not self.size

    @property
    def waits_for(self) -> int:
        return int(self.places[0])

    def run(self, tree: Places, among_known: bool = False) -> bool:
        """Run on to an unscored prefix; return whether the race is over. among_known: pass by such prefixes."""
        while not self.over:
            self.size, status = _run(*tree, self.clocks, self.places, self.keys, self.size, among_known)
            if status == ITEM:
                self.found.append(int(self.places[0]))
                self.size = _pop(self.clocks, self.places, self.keys, self.size)
            elif status == _FULL:
                self.clocks, self.places, self.keys = (
                    np.concatenate([column, np.zeros_like(column)]) for column in (self.clocks, self.places, self.keys)
                )
            elif status == UNSCORED:
                return False
        return True

    def next_after(self, tree: Places, count: int) -> list[int]:
        """The next prefixes that it will wait for unless it is over before: `count` at most. They are marked ASKED."""
        ahead, found = self._copy(), list[int]()
        while len(found) < count and not ahead.run(tree):
            place = ahead.waits_for
            if tree.first[place] == UNSCORED:
                tree.first[place] = ASKED
                found.append(place)
            ahead.size = _pop(ahead.clocks, ahead.places, ahead.keys, ahead.size)
        return found

    def among_known(self, tree: Places) -> list[int]:
        """The items that it finds if unscored prefixes lead nowhere."""
        race = self._copy()
        race.run(tree, among_known=True)
        return race.found

    def _copy(self) -> _Race:
        columns = (self.clocks.copy(), self.places.copy(), self.keys.copy())
        return _Race(*columns, self.size, self.wanted, list(self.found))


def expected_passes(masses: NDArray[np.float64], below: NDArray[np.float64], n: int) -> float:
    """How many passes n draws with replacement take on average, without any ahead of need.

    masses: of each prefix that a pass may score. below: of the set's items below it; the first prefix is the root.
    """
    each = masses / (masses + below[0] - below)
    return float(np.sum(1 - (1 - each) ** n))


_FULL = -9  # a heap needs more room
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled
def mixed(key, n):  # type: ignore[no-untyped-def]
    """Number n of those that a key gives: splitmix64 (Steele, Lea and Flood 2014)."""
    z = key + (np.uint64(n) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@compiled
def uniform(key, n):  # type: ignore[no-untyped-def]
    """A number between 0 and 1, neither of which it is."""
    return (np.float64(mixed(key, n) >> _S11) + 0.5) * 2.0**-53


@compiled
def _log_exponential(key, n):  # type: ignore[no-untyped-def]
    """The logarithm of a time of rate 1."""
    return math.log(-math.log(uniform(key, n)))


@compiled
def _later(clock, mass, key, n):  # type: ignore[no-untyped-def]
    """When a place rings that has not rung at `clock`."""
    more = _log_exponential(key, n) - mass
    return max(clock, more) + math.log1p(math.exp(-abs(clock - more)))


@compiled
def _run(masses, first, second, clocks, places, keys, size, among_known):  # type: ignore[no-untyped-def]
    """Let places ring until an item or an unscored prefix is the next; return the heap's size, and which it is: ITEM,
    UNSCORED, _FULL, or NOTHING if nothing is left. The random numbers of a place: 1 and 2 its own, 3 and 4 the keys of
    its parts."""
    while size > 0:
        place, part = places[0], first[places[0]]
        if part == ITEM:
            return size, ITEM
        if part in (UNSCORED, ASKED) and not among_known:
            return size, UNSCORED
        if size >= len(places):
            return size, _FULL
        clock, key = clocks[0], keys[0]
        size = _pop(clocks, places, keys, size)
        if part < 0:
            continue
        other = second[place]
        wins = uniform(key, 1) < math.exp(masses[part] - masses[place])
        when = clock if wins else _later(clock, masses[part], key, 2)
        size = _push(clocks, places, keys, size, when, part, mixed(key, 3))
        if other >= 0:
            when = _later(clock, masses[other], key, 2) if wins else clock
            size = _push(clocks, places, keys, size, when, other, mixed(key, 4))
    return size, NOTHING


@compiled
def _push(clocks, places, keys, size, clock, place, key):  # type: ignore[no-untyped-def]
    """Add an entry to a heap; return its size."""
    at = size
    while at > 0 and clocks[(at - 1) >> 1] > clock:
        above = (at - 1) >> 1
        clocks[at], places[at], keys[at] = clocks[above], places[above], keys[above]
        at = above
    clocks[at], places[at], keys[at] = clock, place, key
    return size + 1


@compiled
def _pop(clocks, places, keys, size):  # type: ignore[no-untyped-def]
    """Take the earliest entry out of a heap; return its size."""
    size -= 1
    clock, place, key, at = clocks[size], places[size], keys[size], 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and clocks[below + 1] < clocks[below]:
            below += 1
        if clocks[below] >= clock:
            break
        clocks[at], places[at], keys[at] = clocks[below], places[below], keys[below]
        at = below
    clocks[at], places[at], keys[at] = clock, place, key
    return size
