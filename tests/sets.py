"""Item sets of several shapes for the tests with real engines: their files and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import itemset

FIRST, LAST = 100, 1000  # token ids of the items: ordinary tokens of the tiny models


@dataclass(frozen=True)
class NamedSet:
    path: str
    items: frozenset[tuple[int, ...]]


def token_sets(directory: Path) -> dict[str, NamedSet]:
    """Fixed and variable length, prefixes of each other, one item, many one-token items, 50,000 items."""
    random = np.random.default_rng(7)
    shapes = {
        "fixed": random.integers(FIRST, LAST, (300, 4)).tolist(),
        "ragged": [random.integers(FIRST, LAST, random.integers(1, 12)).tolist() for _ in range(200)],
        "prefixes": [list(range(FIRST, FIRST + n)) for n in (1, 2, 3, 5, 8)] + [[FIRST, 500], [700]],
        "one": [[300, 301, 302, 303, 304]],
        "labels": [[token] for token in range(FIRST, FIRST + 150)],
        "large": random.integers(FIRST, FIRST + 300, (50_000, 6)).tolist(),
    }
    return {name: _save(directory / f"{name}.itemset", items) for name, items in shapes.items()}


def _save(path: Path, items: list[list[int]]) -> NamedSet:
    itemset.build(items).save(path)
    return NamedSet(str(path), frozenset(map(tuple, items)))
