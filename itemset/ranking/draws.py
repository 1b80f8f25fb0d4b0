"""Items drawn from a model's own distribution over a set: exact, in few forward passes, however many items there are.

Masking token by token draws from another distribution: it chooses a prefix for what lies outside the set too, and then
an unlikely item has to follow (DISC, AISTATS 2025, theorem 2.1). Here items race. Let each sequence of tokens have a
clock that rings after a time of rate p, its probability. The first item of the set to ring is item x with probability
p(x) / p(set); those that ring after it are drawn without replacement. The clock of a prefix is the earliest of those
below it, again of a rate that is its probability. So the race can be run from the root down, and only the prefixes that
ring before the winner need be scored:

- The root's clock rings at time t, of rate 1.
- A prefix v rings at t because what is the earliest below it does. Each child c gets a time of rate p(c) / p(v), what
  lies outside the set, "nobody", one of the rate that is left. The earliest of these times is independent of whose it
  is, so it is put in the place of t: child c rings at t plus its time less the earliest, divided by p(v). So the
  earliest rings at t, if it is not nobody, and the others' clocks have not rung yet: times of a constant rate have no
  memory.

A prefix of probability p is scored by a draw with probability p / (p + S - S_v), S being the probability of the set and
S_v that of its items below the prefix: it has to ring before all items that are elsewhere (`expected_passes`).

Temperature. Weights w(x) = p(x)^a with a = 1/T >= 1 need no other race. Let the rate of every prefix be m(v) = p(v)^a.
For c over the children of v, and all that may follow outside the set, the sum of p(c) is at most p(v), so every
q(c) = p(c) / p(v) is at most 1 and q(c)^a <= q(c): the sum of m(c) = p(v)^a times the sum of q(c)^a is at most m(v).
So what is left, m(v) less the children's, is a rate too, of nothing that can be drawn, and takes the place of what lies
outside. An item's rate is w(x) itself, and the argument above holds word for word. For a < 1 the children's rates may
add up to more than their parent's, and there is no such race.

Random numbers. Each prefix has a key, made of its parent's key and its token by a hash (splitmix64); the root's comes
from seed and number of the draw. A key's own bits are the prefix's random number. So a draw depends on the seed, its
number and the model alone: not on the width of the rounds, their order, or how many draws there are, nor on who runs
the race: `beams.Beams` runs the same one, inside an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.clocks import Race
from itemset.ranking.scored import ASKED, ScoredTree, Shared
from itemset.ranking.search import Pass

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
        races, self._wanted = (n, 1) if replace else (1, n)
        self._races = [Race.of(key, self._wanted) for key in np.random.SeedSequence(seed).generate_state(races, "u8")]
        self._known: Mapping[int, Sequence[Draw]] = {}
        self._before = 0, 0
        self._width, self._approximate = width, approximate

    @property
    def races(self) -> tuple[list[int], int]:
        """The keys of the races' roots, as int64, and how many items each race is for: for `beams.Beams`."""
        return [int(np.uint64(race.root).view(np.int64)) for race in self._races], self._wanted

    def begin_with(self, known: Mapping[int, Sequence[Draw]], passes: int, rounds: int) -> Draws | None:
        """Take over what `beams.Beams` has found, before the first round: all items of some races, by number. The
        others begin again, and find what it would have found. passes, rounds: what that took, for the result.

        Returns the result if nothing is left to do, and something was drawn.
        """
        self._known, self._before = known, (passes, rounds)
        return self.result if len(known) == len(self._races) and any(known.values()) else None

    @property
    def result(self) -> Draws:
        """What was drawn. Raises CutOffError if the passes ended before the draws did, and if they may not be
        approximate. There is no item if all of the set has a probability of zero."""
        cut = any(i not in self._known and not race.over for i, race in enumerate(self._races))
        if cut and not self._approximate:
            raise CutOffError(f"the draws need more than {self._taken} passes")
        items = list[Draw]()
        for i, race in enumerate(self._races):
            if i in self._known:
                items += self._known[i]
                continue
            exact = len(race.found)
            found = race.found if race.over else race.among_known(self.tree.places, self.tree.steps)
            items += [Draw(*self.tree.item(place), n < exact) for n, place in enumerate(found)]
        passes, rounds = self._before
        return Draws(items, passes + self._taken, rounds + self._rounds, self.tree.unknown_share() if cut else 0.0)

    def _next_round(self) -> list[Pass]:
        places, steps = self.tree.places, self.tree.steps
        racing = (race for i, race in enumerate(self._races) if i not in self._known)
        waiting = [race for race in racing if not race.run(places, steps)]
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
            wanted += race.next_after(places, steps, min(share, most - len(wanted)))
        return self.tree.ask(wanted)


def expected_passes(masses: NDArray[np.float64], below: NDArray[np.float64], n: int) -> float:
    """How many passes n draws with replacement take on average, without any ahead of need.

    masses: of each prefix that a pass may score. below: of the set's items below it; the first prefix is the root.
    """
    each = masses / (masses + below[0] - below)
    return float(np.sum(1 - (1 - each) ** n))
