"""Exact draws from a model's own distribution over a set, in few forward passes however many items there are.

Gumbel-top-k sampling by stochastic beam search over the trie (Kool, van Hoof and Welling 2019), run lazily, as a race
in which items ring: docs/internals/ranking.md has why it is exact. A draw depends on the seed, its number and the model
alone: not on the rounds, nor on other draws, nor on who runs the race. `beams.Beams` runs it over beams.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from itemset.item_set import ItemSet
from itemset.ranking.races import Race
from itemset.ranking.scored_tree import PENDING, ScoredTree
from itemset.ranking.search import Rounds, check_positive

_AHEAD = 6  # by default a round takes one pass for each six before it


class CutOffError(ValueError):
    """The passes ended before the draws did. To answer with the draws that had ended would favour likely items."""


class Draw(NamedTuple):
    """An item that was drawn: its tokens without the end token, its log-probability over the whole vocabulary, and
    whether its race was run to the end."""

    tokens: tuple[int, ...]
    score: float
    exact: bool


class Draws(NamedTuple):
    """The items drawn, in order. passes, rounds: what all of them took.

    open: 0 if every draw is exact, else the most that items of unscored prefixes may have of the distribution.
    """

    items: list[Draw]
    passes: int
    rounds: int
    open: float

    def of_item(self, i: int) -> dict[str, Any]:
        """Return an answer's fields for one item."""
        return {"draw": i + 1, "logprob": self.items[i].score, "exact": self.items[i].exact}

    @property
    def took(self) -> dict[str, Any]:
        """An answer's fields for all of them."""
        return {"passes": self.passes, "rounds": self.rounds, **({"open": self.open} if self.open else {})}


class Drawing(Rounds[Draws]):
    """Draws of items, all of which share the passes.

    A round scores the prefix for which each unfinished draw waits and, up to its width, those that they will need next.
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
        width: passes in a round at least, if they can be of use; by default rounds grow with the passes so far.
        max_passes: stop after these. approximate: let the draws that are not finished then go on among the items that
        are scored; otherwise `result` raises CutOffError.
        paths: give path passes, for a model that scores many rows in a pass: fewer rounds. No draw depends on it.
        """
        check_positive(n=n, width=width, max_passes=max_passes)
        if not 0 < temperature <= 1:
            raise ValueError(f"temperature is {temperature}: make it more than 0, and at most 1")
        super().__init__(ScoredTree(item_set, end_token=end_token, power=1 / temperature, paths=paths), max_passes)
        races, self._k = (n, 1) if replace else (1, n)
        self._races = [Race.of(key, self._k) for key in np.random.SeedSequence(seed).generate_state(races, "u8")]
        self._known: Mapping[int, Sequence[Draw]] = {}
        self._before = 0, 0
        self._width, self._approximate = width, approximate

    @property
    def races(self) -> tuple[list[int], int]:
        """The keys of the races' roots, as int64, and how many items each race is for: for `beams.Beams`."""
        return [int(np.uint64(race.key).view(np.int64)) for race in self._races], self._k

    def begin_with(self, known: Mapping[int, Sequence[Draw]], passes: int, rounds: int) -> Draws | None:
        """Take over the results of `beams.Beams`, before the first round: all items of some races, by number. The
        others begin again, with the same result. passes, rounds: what those took.

        Returns the result if nothing is left to do, and something was drawn.
        """
        self._known, self._before = known, (passes, rounds)
        return self.result if len(known) == len(self._races) and any(known.values()) else None

    @property
    def result(self) -> Draws:
        """The draws: no items if all of the set has a probability of zero. Raises CutOffError if the passes ended
        before the draws did, and if they may not be approximate."""
        cut = any(i not in self._known and not race.over for i, race in enumerate(self._races))
        if cut and not self._approximate:
            raise CutOffError(f"the draws need more than {self._taken} passes")
        ended = [race if i in self._known else self._ended(race) for i, race in enumerate(self._races)]
        nodes = [node for i, race in enumerate(ended) if i not in self._known for node in race.items]
        scored = iter(self.tree.items(self.tree.nodes[np.array(nodes, np.int64)]))
        items = list[Draw]()
        for i, race in enumerate(self._races):
            exact = len(race.items)
            items += self._known.get(i) or [Draw(*next(scored), n < exact) for n in range(len(ended[i].items))]
        passes, rounds = self._before
        return Draws(items, passes + self._taken, rounds + self._rounds, self.tree.unknown_share() if cut else 0.0)

    def _ended(self, race: Race) -> Race:
        """Return a race at its end, among the scored items alone if it was cut off."""
        if not race.over:
            race = race.copy()
            race.run(self.tree, known_only=True)
        return race

    def _next_nodes(self) -> list[int]:
        racing = (race for i, race in enumerate(self._races) if i not in self._known)
        waiting = [race for race in racing if not race.run(self.tree)]
        left = len(waiting) if self._max_passes is None else self._max_passes - self._taken
        nodes = list(dict.fromkeys(race.waits_for for race in waiting))[: max(0, left)]
        if not nodes:
            return []
        self.tree.nodes["expansion"][nodes] = PENDING
        most = max(1, self._taken // _AHEAD) if self._width is None else self._width
        most = most if self._max_passes is None else min(most, left)
        share = math.ceil((most - len(nodes)) / len(waiting))
        for race in waiting:
            if len(nodes) >= most:
                break
            nodes += race.look_ahead(self.tree, min(share, most - len(nodes)))
        return nodes
