"""Items drawn by dynamic importance sampling: near a model's distribution over a set, in few passes.

DISC (AISTATS 2025, algorithm 1): candidates are sampled token by token inside the set. A candidate's weight is the
product of the legal masses along it: the probability that the model, left to itself, would have stayed in the set at
every token. It is accepted with that probability, and then the draw is exact. If as many candidates are refused, as
many new ones are sampled, and one of these is taken in proportion to their weights. The more there are, the nearer
that is to the model's distribution. `exact_sampling.Drawing` is always exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.exact_sampling import CutOffError
from itemset.ranking.races import mixed, uniform
from itemset.ranking.scored_tree import ITEM, PENDING, ROOT, UNSCORED, ScoredTree
from itemset.ranking.search import Rounds, check_positive


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
    """What was drawn, in order. passes: forward passes that all of it took, and their rounds."""

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


class Importance(Rounds[Samples]):
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

        candidates: how many are sampled at most before a pool of as many is. max_passes: after these, `result` raises
        CutOffError.
        """
        check_positive(n=n, candidates=candidates, max_passes=max_passes)
        super().__init__(ScoredTree(item_set, end_token=end_token), max_passes)
        self._shares: dict[int, tuple[NDArray[np.float64], float]] = {}  # of an expansion, see `_shares_of`
        self._draws = [_Draw(key, candidates) for key in np.random.SeedSequence(seed).generate_state(n, np.uint64)]

    @property
    def result(self) -> Samples:
        """What was drawn. Raises CutOffError if the passes ended before the draws did. An item is missing if the pool
        of its draw had a weight of zero."""
        if not all(draw.over for draw in self._draws):
            raise CutOffError(f"the draws need more than {self._taken} passes")
        drawn = [draw for draw in self._draws if draw.node >= 0]
        items = self.tree.items(self.tree.nodes[np.array([draw.node for draw in drawn], np.int64)])
        pairs = zip(items, drawn, strict=True)
        found = [Resampled(*item, math.exp(of.weight), of.accepted, of.number) for item, of in pairs]
        return Samples(found, self._taken, self._rounds)

    def _next_nodes(self) -> list[int]:
        nodes = list(dict.fromkeys(node for draw in self._draws for node in draw.run(self._walk)))
        left = len(nodes) if self._max_passes is None else self._max_passes - self._taken
        return nodes[: max(0, left)]

    def _walk(self, one: _Candidate) -> int:
        """Sample on inside the set, to an item, an unscored prefix, or a scored one without children; return the
        node's expansion: ITEM, UNSCORED or PENDING, or that of the last."""
        nodes, expansions, _ = self.tree.arrays
        while (at := int(nodes["expansion"][one.node])) >= 0 and (count := int(expansions["count"][at])):
            first = int(expansions["first"][at])
            if at not in self._shares:
                self._shares[at] = _shares_of(nodes["mass"][first : first + count])
            shares, mass = self._shares[at]
            one.weight += mass - float(nodes["mass"][one.node])
            one.node, one.used = first + _choose(shares, one.key, one.used), one.used + 1
        return at


@dataclass
class _Candidate:
    """A walk from the root: its node, the logarithm of its weight, and how many random numbers it has taken."""

    key: np.uint64
    node: int = ROOT
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
    node: int = -1
    weight: float = -math.inf
    accepted: bool = False

    def run(self, walk: Callable[[_Candidate], int]) -> list[int]:
        """Go on until it is over, or to the unscored nodes for which its candidates wait: these are returned."""
        while not self.over:
            if not self.under_way:
                first = self.number
                self.number = first + 1 if first < self.limit else 2 * self.limit
                self.under_way = [_Candidate(np.uint64(mixed(self.key, 8 + i))) for i in range(first, self.number)]
            ends = [(one, walk(one)) for one in self.under_way]
            if waiting := [one.node for one, end in ends if end in (UNSCORED, PENDING)]:
                return waiting
            self.under_way = []
            self._judge([one for one, end in ends if end == ITEM])
        return []

    def _judge(self, items: list[_Candidate]) -> None:
        if self.number <= self.limit:
            if items and uniform(items[0].key, items[0].used) < math.exp(items[0].weight):
                self._end(items[0], accepted=True)
            return
        self.over = True
        if items:
            shares, _ = _shares_of(np.array([one.weight for one in items]))
            self._end(items[_choose(shares, self.key, 0)], accepted=False)

    def _end(self, one: _Candidate, *, accepted: bool) -> None:
        self.over, self.node, self.weight, self.accepted = True, one.node, one.weight, accepted


def _shares_of(masses: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the sums of the first shares, of which the largest is 1, and the logarithm of all. masses: logarithms."""
    most = float(masses.max())
    shares = np.cumsum(np.exp(masses - most))
    return shares, most + math.log(shares[-1])


def _choose(shares: NDArray[np.float64], key: np.uint64, n: int) -> int:
    """Draw a place in proportion to its share, by number `n` of a key."""
    place = int(np.searchsorted(shares, uniform(key, n) * shares[-1], "right"))
    return min(place, len(shares) - 1)  # by a rounding
