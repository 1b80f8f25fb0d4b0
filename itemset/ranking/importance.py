"""Items drawn by dynamic importance sampling: near a model's distribution over a set, in few passes.

DISC (AISTATS 2025, algorithm 1): candidates are sampled token by token inside the set. A candidate's weight is the
product of the legal masses along it: the probability that the model, left to itself, would have stayed in the set at
every token. It is accepted with that probability, and then the draw is exact. If as many candidates are refused, as
many new ones are sampled, and one of these is taken in proportion to their weights. The more there are, the nearer
that is to the model's distribution. `exact_sampling.Drawing` is always exact.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.ranking.exact_sampling import CutOffError, mixed, uniform
from itemset.ranking.scored_tree import ITEM, PENDING, ROOT, UNSCORED, ScoredTree
from itemset.ranking.search import Found, Item, Rounds, check_positive


class Importance(Rounds):
    """Draws of items by importance, all of which share the passes: a round scores what each waits for."""

    def __init__(
        self, item_set: ItemSet, n: int, *, end_token: int, candidates: int, seed: int | None = None,
        max_passes: int | None = None,
    ) -> None:  # fmt: skip
        """Raises ValueError if n, candidates or max_passes is less than 1, ItemSetError for a set with boosts.

        candidates: sampled at most before a pool of as many is. max_passes: after these, `result` raises CutOffError.
        """
        check_positive(n=n, candidates=candidates, max_passes=max_passes)
        if item_set.is_steered:
            raise ItemSetError("draws by importance follow no boosts: give the set without them, or draw by Drawing")
        super().__init__(ScoredTree(item_set, end_token=end_token), max_passes)
        self._shares: dict[int, tuple[NDArray[np.float64], float]] = {}  # of an expansion, see `_shares_of`
        self._draws = [_Draw(key, candidates) for key in np.random.SeedSequence(seed).generate_state(n, np.uint64)]

    @property
    def result(self) -> Found:
        """Return what was drawn, in order. Raises CutOffError if the passes ended before the draws did.

        An item is missing if the pool of its draw had a weight of zero. An answer says an item's weight, whether it was
        accepted, not taken from a pool, and how many candidates were sampled, the pool's included.
        """
        if not all(draw.over for draw in self._draws):
            raise CutOffError(f"the draws need more than {self._taken} passes")
        drawn = [(draw, one) for draw in self._draws if (one := draw.taken) is not None]
        items = self.tree.items(self.tree.nodes[np.array([one.node for _, one in drawn], np.int64)])
        found = list[Item]()
        for item, (draw, one) in zip(items, drawn, strict=True):
            of_draw = {"accepted": draw.number <= draw.limit, "candidates": draw.number}
            found.append(Item(*item, {"exact": False, "weight": math.exp(one.weight), **of_draw}))
        return Found(found, self._taken, self._rounds)

    def _next_nodes(self) -> list[int]:
        return list(dict.fromkeys(node for draw in self._draws for node in draw.run(self._walk)))

    def _walk(self, one: "_Candidate") -> int:
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
    key: np.uint64
    node: int = ROOT
    weight: float = 0.0  # its logarithm
    used: int = 0  # random numbers that it has taken


@dataclass
class _Draw:
    key: np.uint64
    limit: int
    number: int = 0  # candidates that were begun: if more than `limit`, twice as many, the last of which are the pool
    under_way: list[_Candidate] = field(default_factory=list)
    over: bool = False
    taken: _Candidate | None = None  # the one that was accepted, or else taken from the pool

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
        self.over = self.number > self.limit
        if self.over and items:
            shares, _ = _shares_of(np.array([one.weight for one in items]))
            self.taken = items[_choose(shares, self.key, 0)]
        elif items and uniform(items[0].key, items[0].used) < math.exp(items[0].weight):
            self.over, self.taken = True, items[0]


def _shares_of(masses: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the sums of the first shares, of which the largest is 1, and the logarithm of all. masses: logarithms."""
    most = float(masses.max())
    shares = np.cumsum(np.exp(masses - most))
    return shares, most + math.log(shares[-1])


def _choose(shares: NDArray[np.float64], key: np.uint64, n: int) -> int:
    """Draw a place in proportion to its share, by number `n` of a key."""
    place = int(np.searchsorted(shares, uniform(key, n) * shares[-1], "right"))
    return min(place, len(shares) - 1)  # by a rounding
