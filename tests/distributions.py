"""Small models over sets, all of whose probabilities are known, and how well draws fit a distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from oracle import dict_trie, prefixes

from itemset.ranking.scored_tree import Answer, Pass

END = 0
Item = tuple[int, ...]


@dataclass(frozen=True)
class Toy:
    """A set, and the probability of each token that may follow a prefix of its items. It answers passes."""

    items: list[Item]
    probability: dict[tuple[Item, int], float]

    @classmethod
    def of(cls, items: Sequence[Sequence[int]], of_token: Callable[[Item, int], float]) -> Toy:
        following = prefixes(dict_trie(items))
        tokens = [(before, token) for before, after, ends in following for token in after + [END] * ends]
        return cls(sorted({tuple(item) for item in items}), {pair: of_token(*pair) for pair in tokens})

    def log_prob(self, before: Item, token: int) -> float:
        return float(np.log(self.probability[before, token]))

    def __call__(self, passes: Sequence[Pass]) -> list[Answer]:
        return [
            (
                np.array([self.log_prob(tokens[:i], tokens[i]) for i in range(known, len(tokens))]),
                np.array([self.log_prob(tokens, token) for token in after.tolist()]),
            )
            for tokens, known, after in passes
        ]

    def weights(self, temperature: float = 1.0) -> np.ndarray:
        """Of each item: its probability, its end included, to the power of 1/T."""
        ended = [(*item, END) for item in self.items]
        scores = [sum(self.log_prob(item[:i], token) for i, token in enumerate(item)) for item in ended]
        return np.exp(np.array(scores) / temperature)

    def counts(self, drawn: Sequence[Item]) -> np.ndarray:
        number = {item: i for i, item in enumerate(self.items)}
        return np.bincount([number[item] for item in drawn], minlength=len(self.items))


PREFIXES = [[1], [1, 2], [1, 2, 3], [2], [2, 2, 2], [3, 1], [3, 1, 1]]
SMALL = [[1, 2], [1, 3], [2], [3, 4], [3, 5, 5]]
TRAP = {(1,): 0.9, (2,): 0.02, (3,): 0.05, (1, 2): 1e-4, (1, 3): 2e-3, (3, 4): 0.3, (3, 5): 0.1}


def toys() -> dict[str, Toy]:
    """prefixes: items that begin others. trap: a likely prefix that leads to unlikely items alone. tiny: a set of a
    probability of 10^-9. full: nothing outside the set. wide: many items, of several lengths."""
    random = np.random.default_rng(1)
    rows: dict[Item, Any] = {}

    def of_all(before: Item, token: int) -> float:
        shares = rows.setdefault(before, random.dirichlet([1, 1, 1]))
        return 1.0 if len(before) == 2 else float(shares[token - 1])

    wide = [random.integers(1, 8, random.integers(1, 5)).tolist() for _ in range(200)]
    return {
        "prefixes": Toy.of(PREFIXES, lambda *_: random.uniform(0.05, 0.3)),
        "trap": Toy.of(SMALL, lambda before, token: 0.5 if token == END else TRAP.get((*before, token), 0.9)),
        "tiny": Toy.of(SMALL, lambda *_: 10 ** random.uniform(-3.4, -2.9)),
        "full": Toy.of([[a, b] for a in (1, 2, 3) for b in (1, 2, 3)], of_all),
        "wide": Toy.of(wide, lambda *_: random.uniform(0.01, 0.12)),
    }


def fit(counts: np.ndarray, weights: np.ndarray) -> float:
    """The p-value of a chi-square test of counts against weights. Cells of fewer than eight expected are joined; 1 if
    all of them are."""
    order = np.argsort(-weights.ravel())
    expected = (weights / weights.sum()).ravel()[order] * counts.sum()
    cells, wanted, seen = [], 0.0, 0.0
    for want, count in zip(expected, counts.ravel()[order], strict=True):
        wanted, seen = wanted + want, seen + count
        if wanted >= 8:
            cells.append((wanted, seen))
            wanted = seen = 0.0
    assert seen == 0 or wanted > 0, "something was drawn that cannot be"
    if cells:
        cells[-1] = (cells[-1][0] + wanted, cells[-1][1] + seen)
    if len(cells) < 2:
        return 1.0  # too few draws to tell
    square = sum((count - want) ** 2 / want for want, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
