"""Rounds of ranked lists on random logits, in which every function is held against the one in torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from views import made

from itemset.masking.arena import Arena, room_for
from itemset.ranking import torch_expand, triton_expand
from itemset.ranking.beams import Beams
from itemset.ranking.torch_expand import NOTHING, Found, Rows
from itemset.trie.levels import LevelPlan


class Compared:
    """Stands in place of either module. What torch gives goes on, so that each function is judged alone."""

    def __init__(self, twin: ModuleType) -> None:
        self.twin, self.compared = twin, 0

    def both(self, name: str, *args: Any) -> tuple[Any, Any]:
        self.compared += 1
        return getattr(torch_expand, name)(*args), getattr(self.twin, name)(*args)

    def log_sums(self, logits: Tensor, rows: Rows, found: Found) -> Tensor:
        expected, sums = self.both("log_sums", logits, rows, found)
        count, queries = sums.shape[1:]
        wanted = torch.arange(queries, device=sums.device) <= rows.tails[:, :count, None]
        wanted &= (rows.scores > found.scores[:, -1:])[:, :count, None]
        torch.testing.assert_close(sums[wanted], expected[wanted])
        return expected

    def legal_sums(self, *args: Any) -> Tensor:
        expected, sums = self.both("legal_sums", *args)
        torch.testing.assert_close(sums, expected)
        return expected

    def ended(self, *args: Any) -> Tensor:
        expected, ends = self.both("ended", *args)
        ends, wanted = (torch.where(scores.isnan(), -torch.inf, scores) for scores in (ends, expected))  # as in `merge`
        torch.testing.assert_close(ends, wanted, rtol=1e-12, atol=1e-12)
        return expected

    def best(self, *args: Any) -> tuple[Tensor, Tensor]:
        (keys, places), (twin_keys, twin_places) = self.both("best", *args)
        assert torch.equal(twin_keys, keys)
        assert torch.equal(twin_places[keys != NOTHING], places[keys != NOTHING])
        return keys, places

    def follow(self, *args: Any) -> Rows:
        expected, rows = self.both("follow", *args)
        for name, column in rows._asdict().items():
            assert torch.equal(column, getattr(expected, name)), name
        return expected

    def merge(self, *args: Any) -> Found:
        expected, found = self.both("merge", *args)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        return expected


def covering(plans: Sequence[LevelPlan]) -> LevelPlan:
    """A plan for lists of different sets, of no more than 4,096 nodes a level."""
    levels = max(plan.levels for plan in plans)
    nodes = [max(plan.nodes[i] if i < plan.levels else 0 for plan in plans) for i in range(levels)]
    widest = [
        np.array([max(plan.children(i, n + 1) for plan in plans) for n in range(nodes[i])]) for i in range(levels)
    ]
    tails = [max(plan.tails[i] if i < plan.levels else 0 for plan in plans) for i in range(levels)]
    tailed = [max(plan.tailed[i] if i < plan.levels else 0 for plan in plans) for i in range(levels)]
    return LevelPlan(tuple(nodes), tuple(widest), tuple(tails), tuple(tailed), max(plan.longest for plan in plans))


def compared(
    sets: Sequence[Sequence[Sequence[int]]],
    device: str,
    *,
    seed: int,
    vocabulary: int,
    twin: ModuleType = triton_expand,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    impossible: float = 0.1,
    **options: Any,
) -> Compared:
    """Search these sets, a list each, with random logits, of which some are -inf and many are equal.

    padding: columns that lie beside the logits in memory. options: of `Beams`.
    """
    built = [made(items) for items in sets]
    arena = Arena(sum(map(room_for, built)), device)
    numbers = [arena.acquire(s) for s in built]
    beams = Beams(arena, numbers, covering([s.level_plan for s in built]), **options)
    beams._kernels = kernels = Compared(twin)  # type: ignore[assignment]
    draw, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    while beams.passes_left:
        rows = draw.choice([beams.rows, beams.width]) if beams.taken else 1
        shape = (beams.lists * rows, beams.queries, vocabulary + padding)
        logits = torch.randn(shape, generator=generator, device=device).mul(4).round_(decimals=1)
        logits[torch.rand(shape, generator=generator, device=device) < impossible] = -torch.inf
        beams.round(logits.to(dtype)[:, :, padding:])
        if draw.random() < 0.5:
            beams.narrow()
    return kernels
