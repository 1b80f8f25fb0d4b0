"""Exact draws from a model's own distribution over a set, in few forward passes however many items there are.

Gumbel-top-k sampling by stochastic beam search over the trie (Kool, van Hoof and Welling 2019), run lazily, as a race
in which items ring: docs/internals/ranking.md has why it is exact. A draw depends on the seed, its number and the model
alone: not on the rounds, nor on other draws, nor on who runs the race. `beams.Beams` runs it over beams.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import numpy as np

from itemset.item_set import ItemSet
from itemset.ranking.races import Race
from itemset.ranking.scored_tree import PENDING, ScoredTree
from itemset.ranking.search import Found, Item, Rounds, check_positive

_AHEAD = 6  # by default a round takes one pass for each six before it


class CutOffError(ValueError):
    """The passes ended before the draws did. To answer with the draws that had ended would favour likely items."""


class DrawingOptions(TypedDict, total=False):
    """replace: n independent draws, among which an item may occur again, the default; if False, n distinct items, each
    drawn from what the others have left: fewer if the set has fewer.
    temperature: over items: one of probability p is drawn with a weight of p^(1/T).
    seed: of all random numbers; another one each time if None.
    width: passes in a round at least, if they can be of use; by default rounds grow with the passes so far.
    max_passes: stop after these. approximate: let the draws that are not finished then go on among the items that are
    scored; otherwise `result` raises CutOffError.
    """

    replace: bool
    temperature: float
    seed: int | None
    width: int | None
    max_passes: int | None
    approximate: bool


class Drawing(Rounds):
    """Draws of items, all of which share the passes. An answer says of each item whether it is exact: whether its race
    was run to the end.

    A round scores the prefix for which each unfinished draw waits and, up to its width, those that they will need next.
    """

    def __init__(self, item_set: ItemSet, n: int, *, end_token: int, **options: Unpack[DrawingOptions]) -> None:
        """Raises ValueError if n, width or max_passes is less than 1, or the temperature not above 0 and at most 1.

        end_token: the end of an item counts in its probability, as without it an item that is the beginning of another
        one would count twice.
        """
        temperature, self._width = options.get("temperature", 1.0), options.get("width")
        check_positive(n=n, width=self._width, max_passes=options.get("max_passes"))
        if not 0 < temperature <= 1:
            raise ValueError(f"temperature is {temperature}: make it more than 0, and at most 1")
        tree = ScoredTree(item_set, end_token=end_token, power=1 / temperature)
        super().__init__(tree, options.get("max_passes"))
        races, self._k = (n, 1) if options.get("replace", True) else (1, n)
        keys = np.random.SeedSequence(options.get("seed")).generate_state(races, "u8")
        self._races = [Race.of(key, self._k) for key in keys]
        self._known: Mapping[int, Sequence[Item]] = {}
        self._before = 0, 0
        self._approximate = options.get("approximate", False)

    @property
    def races(self) -> tuple[list[int], int]:
        """The keys of the races' roots, as int64, and how many items each race is for: for `beams.Beams`."""
        return [int(np.uint64(race.key).view(np.int64)) for race in self._races], self._k

    def begin_with(self, known: Mapping[int, Sequence[Item]], passes: int, rounds: int) -> Found | None:
        """Take over the results of `beams.Beams`, before the first round: all items of some races, by number. The
        others begin again, with the same result. passes, rounds: what those took.

        Returns the result if nothing is left to do, and something was drawn.
        """
        self._known, self._before = known, (passes, rounds)
        return self.result if len(known) == len(self._races) and any(known.values()) else None

    @property
    def result(self) -> Found:
        """The draws: no items if all of the set has a probability of zero. Raises CutOffError if the passes ended
        before the draws did, and if they may not be approximate."""
        cut = any(i not in self._known and not race.over for i, race in enumerate(self._races))
        if cut and not self._approximate:
            raise CutOffError(f"the draws need more than {self._taken} passes")
        ended = [race if i in self._known else self._ended(race) for i, race in enumerate(self._races)]
        nodes = [node for i, race in enumerate(ended) if i not in self._known for node in race.items]
        scored = iter(self.tree.items(self.tree.nodes[np.array(nodes, np.int64)]))
        items = list[Item]()
        for i, race in enumerate(self._races):
            exact = len(race.items)
            drawn = range(len(ended[i].items))
            items += self._known.get(i) or [Item(*next(scored), {"exact": n < exact}) for n in drawn]
        passes, rounds = self._before
        left = self.tree.unknown_share() if cut else 0.0
        return Found(items, passes + self._taken, rounds + self._rounds, open=left)

    def _ended(self, race: Race) -> Race:
        """Return a race at its end, among the scored items alone if it was cut off."""
        if not race.over:
            race = race.copy()
            race.run(self.tree, known_only=True)
        return race

    def _next_nodes(self) -> list[int]:
        racing = (race for i, race in enumerate(self._races) if i not in self._known)
        waiting = [race for race in racing if not race.run(self.tree)]
        nodes = list(dict.fromkeys(race.waits_for for race in waiting))[: self._left]
        if not nodes:
            return []
        self.tree.nodes["expansion"][nodes] = PENDING
        most = min(self._left, max(1, self._taken // _AHEAD) if self._width is None else self._width)
        share = math.ceil((most - len(nodes)) / len(waiting))
        for race in waiting:
            if len(nodes) >= most:
                break
            nodes += race.look_ahead(self.tree, min(share, most - len(nodes)))
        return nodes
