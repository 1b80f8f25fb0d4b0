"""Items drawn by dynamic importance sampling: near a model's distribution over a set, in few passes.

DISC (AISTATS 2025, algorithm 1): candidates are sampled token by token inside the set. A candidate's weight is the
product of the legal masses along it: the probability that the model, left to itself, would have stayed in the set at
every token. It is accepted with that probability, and then the draw is exact. If so many candidates are refused, as
many new ones are sampled, and one of these is taken in proportion to their weights. The more there are, the nearer
that is to the model's distribution. `draws.Drawing` is always exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from itemset.item_set import ItemSet
from itemset.ranking.clocks import mixed, uniform
from itemset.ranking.draws import CutOffError
from itemset.ranking.scored import ASKED, ITEM, NOTHING, ROOT, UNSCORED, Places, ScoredTree, Shared
from itemset.ranking.search import Pass
from itemset.trie.jit import compiled


class Resampled(NamedTuple):
    """An item: its tokens without the end token, its log-probability over the whole vocabulary, and its weight.

    accepted: whether it was accepted, else it was taken from a pool. tried: candidates that were sampled, the pool's
    included.
    """

    tokens: tuple[int, ...]
    score: float
    weight: float
    accepted: bool
    tried: int


class Samples(NamedTuple):
    """What was drawn, in order. passes: forward passes that all of it took, in so many rounds."""

    items: list[Resampled]
    passes: int
    rounds: int

    def of_item(self, i: int) -> dict[str, Any]:
        """What an answer says of the item alone."""
        item = self.items[i]
        of_draw = {"weight": item.weight, "accepted": item.accepted, "candidates": item.tried}
        return {"draw": i + 1, "logprob": item.score, "exact": False, **of_draw}

    @property
    def took(self) -> dict[str, Any]:
        """What it says of all that was drawn with it."""
        return {"passes": self.passes, "rounds": self.rounds}


class Importance(Shared):
    """Draws of items by importance. Score `passes`, give the answers to `take`, until there are none; then read
    `result`. All draws share the passes; a round scores what each waits for."""

    def __init__(
        self,
        item_set: ItemSet,
        n: int,
        *,
        end_token: int,
        candidates: int,
        seed: int | None = None,
        max_passes: int | None = None,
    ) -> None:
        """Raises ValueError if n, candidates or max_passes is less than 1.

        candidates: how many are sampled at most before a pool of as many is. max_passes: after so many, `result` raises
        CutOffError.
        """
        for name, value in (("n", n), ("candidates", candidates), ("max_passes", max_passes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: make it at least 1")
        super().__init__(ScoredTree(item_set, end_token=end_token), max_passes)
        self._draws = [_Draw(key, candidates) for key in np.random.SeedSequence(seed).generate_state(n, np.uint64)]

    @property
    def result(self) -> Samples:
        """What was drawn. Raises CutOffError if the passes ended before the draws did. An item is missing if the pool
        of its draw had a weight of zero."""
        if not all(draw.over for draw in self._draws):
            raise CutOffError(f"the draws need more than {self._taken} passes")
        items = [
            Resampled(*self.tree.item(draw.found), math.exp(draw.weight), draw.accepted, draw.number)
            for draw in self._draws
            if draw.found != NOTHING
        ]
        return Samples(items, self._taken, self._rounds)

    def _next_round(self) -> list[Pass]:
        places = self.tree.places
        wanted = list(dict.fromkeys(place for draw in self._draws for place in draw.run(places)))
        left = len(wanted) if self._max_passes is None else self._max_passes - self._taken
        return self.tree.ask(wanted[:left]) if wanted[:left] else []


@dataclass
class _Candidate:
    """A walk from the root: where it is, the logarithm of its weight, and how many random numbers it has taken."""

    key: np.uint64
    place: int = ROOT
    weight: float = 0.0
    used: int = 0


@dataclass
class _Draw:
    """One draw. number: candidates that were begun; the last `limit` of twice as many are the pool."""

    key: np.uint64
    limit: int
    number: int = 0
    under_way: list[_Candidate] = field(default_factory=list)
    over: bool = False
    found: int = NOTHING
    weight: float = -math.inf
    accepted: bool = False

    def run(self, tree: Places) -> list[int]:
        """Go on until it is over, or to the unscored prefixes for which its candidates wait: these are returned."""
        while not self.over:
            if not self.under_way:
                first = self.number
                self.number = first + 1 if first < self.limit else 2 * self.limit
                self.under_way = [_Candidate(np.uint64(mixed(self.key, 8 + i))) for i in range(first, self.number)]
            waiting = []
            for one in self.under_way:
                one.place, one.weight, one.used = _walk(*tree, one.place, one.weight, one.key, one.used)
                if tree.first[one.place] in (UNSCORED, ASKED):
                    waiting.append(one.place)
            if waiting:
                return waiting
            self._judge(tree)
        return []

    def _judge(self, tree: Places) -> None:
        pool, self.under_way = self.under_way, []
        items = [one for one in pool if tree.first[one.place] == ITEM]
        if self.number <= self.limit:
            if items and uniform(items[0].key, items[0].used) < math.exp(items[0].weight):
                self._end(items[0], accepted=True)
            return
        self.over = True
        if items:
            weights = np.array([one.weight for one in items])
            shares = np.cumsum(np.exp(weights - weights.max()))
            self._end(items[int(np.searchsorted(shares, uniform(self.key, 0) * shares[-1], "right"))], accepted=False)

    def _end(self, one: _Candidate, *, accepted: bool) -> None:
        self.over, self.found, self.weight, self.accepted = True, one.place, one.weight, accepted


@compiled
def _walk(masses, first, second, place, weight, key, used):  # type: ignore[no-untyped-def]
    """Sample on inside the set to an item, an unscored prefix or an empty one; return where that is, the logarithm of
    the legal mass on the way, and how many random numbers it took."""
    while first[place] >= 0:
        part, other = first[place], second[place]
        if other < 0:  # all that may follow a prefix
            weight += masses[part] - masses[place]
            place = np.int64(part)
        else:
            place = np.int64(part if uniform(key, used) < math.exp(masses[part] - masses[place]) else other)
            used += 1
    return place, weight, used
