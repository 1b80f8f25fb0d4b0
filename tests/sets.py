"""Item sets of several shapes for the tests with real engines: their files and what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import itemset

FIRST, LAST = 100, 1000  # token ids of the items: ordinary tokens of the tiny models


@dataclass(frozen=True)
class NamedSet:
    """path: its file."""

    path: str
    items: frozenset[tuple[int, ...]]


def named_options(named_sets: Mapping[str, NamedSet]) -> dict[str, Any]:
    """The plugin's options that register them."""
    return {"item_sets": {name: one.path for name, one in named_sets.items()}}


def named_flags(named_sets: Mapping[str, NamedSet]) -> list[str]:
    """A server's flags that register them."""
    return ["--item-set", *(f"{name}={one.path}" for name, one in named_sets.items())]


def token_sets(directory: Path) -> dict[str, NamedSet]:
    """Fixed and variable length, prefixes of each other (one twice), one item, 150 tokens, 50,000 items, attributes."""
    random = np.random.default_rng(7)
    shapes = {
        "fixed": random.integers(FIRST, LAST, (300, 4)).tolist(),
        "ragged": [random.integers(FIRST, LAST, random.integers(1, 12)).tolist() for _ in range(200)],
        "prefixes": [list(range(FIRST, FIRST + n)) for n in (1, 2, 3, 5, 8)] + [[FIRST, 500], [700], [700]],
        "one": [[300, 301, 302, 303, 304]],
        "labels": [[token] for token in range(FIRST, FIRST + 150)],
        "large": random.integers(FIRST, FIRST + 300, (50_000, 6)).tolist(),
    }
    sets = {name: _save(directory / f"{name}.itemset", items) for name, items in shapes.items()}
    for name, step in {"tagged": 1, "seen": 3}.items():
        items, keys = tagged_items()[::step], tagged_keys()[::step]
        path = directory / f"{name}.itemset"
        itemset.build(items, keys=keys, attributes={"tag": [i * step % 3 for i in range(len(items))]}).save(path)
        sets[name] = NamedSet(str(path), frozenset(map(tuple, items)))
    return sets


def tagged_items() -> list[list[int]]:
    """Items with attributes, of which many share prefixes and some are equal: item i has the tag i % 3."""
    random = np.random.default_rng(11)
    return [random.integers(FIRST, FIRST + 4, random.integers(1, 7)).tolist() for _ in range(400)]


def tagged_keys() -> list[str]:
    return [f"item {i}" for i in range(400)]


def _save(path: Path, items: list[list[int]]) -> NamedSet:
    itemset.build(items).save(path)
    return NamedSet(str(path), frozenset(map(tuple, items)))
