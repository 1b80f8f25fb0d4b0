"""Sets of given items that are built, or that are views of larger ones: nobody may tell them apart."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

import itemset
from itemset.select.views import filtered, without

KINDS = ["whole", "filtered", "without", "both"]


def made(items: Sequence[Sequence[int]], kind: str | None = None) -> itemset.ItemSet:
    """The set of these items. kind: one of KINDS, by default one that the items choose."""
    chosen = random.Random(repr(items))
    kind = kind or chosen.choice(KINDS)
    if kind == "whole":
        return itemset.build(list(map(list, items)))
    wanted = set(map(tuple, items))
    others = {other for item in wanted for other in _alike(item, chosen)} - wanted
    whole = itemset.build([list(item) for item in {*wanted, *others}])
    tokens = list(map(tuple, whole.items()))  # one key each: keys stand in the items' order
    extra = np.array([item not in wanted for item in tokens])
    if kind == "filtered":
        return filtered(whole, ~extra)
    if kind == "both":
        first = extra & np.array([chosen.random() < 0.5 for _ in tokens])
        return without(filtered(whole, ~first), np.flatnonzero(extra & ~first))
    return without(whole, np.flatnonzero(extra))


def _alike(item: tuple[int, ...], chosen: random.Random) -> list[tuple[int, ...]]:
    """Items that share some of its path: prefixes, longer ones, and such that leave it on the way."""
    cut = chosen.randrange(len(item) + 1)
    swerve = (*item[:cut], chosen.choice(item), chosen.randrange(max(item) + 1))
    return [one for one in (item[:cut], (*item, chosen.choice(item)), swerve, swerve[:-1]) if one]
