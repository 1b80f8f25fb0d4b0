"""Beam searches on random logits, in which every function in Triton is held against the one in Numba."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from views import made

from itemset.masking.arena import Arena, room_for, with_addresses
from itemset.ranking import cpu_kernels, triton_kernels
from itemset.ranking.beam_state import EARLIEST, LOG, NOTHING, SCORE, TAIL, Items, Pass, Rows
from itemset.ranking.beams import Beams
from itemset.ranking.lockstep import Lockstep
from itemset.trie.levels import LevelPlan


class Compared:
    """Stands in place of either module. What Numba gives goes on, so that each function is judged alone."""

    def __init__(self) -> None:
        self.compared = 0

    def both(self, name: str, now: Pass, *args: Any) -> tuple[Any, Any]:
        self.compared += 1
        expected = getattr(cpu_kernels, name)(*map(to_cpu, (now, *args)))
        return moved(expected, now.logits.device), getattr(triton_kernels, name)(now, *args)

    def log_sums(self, now: Pass) -> Tensor:
        expected, sums = self.both("log_sums", now)
        count, queries = sums.shape[1:]
        wanted = torch.arange(queries, device=sums.device) <= now.rows.table[TAIL, :, :count, None]
        wanted &= alive(now, count)[:, :, None]
        torch.testing.assert_close(sums[wanted], expected[wanted])
        torch.testing.assert_close(sums[wanted], now.logits.float().logsumexp(3)[wanted])
        return expected

    def legal_sums(self, now: Pass) -> Tensor:
        expected, sums = self.both("legal_sums", now)
        torch.testing.assert_close(sums, expected)
        return expected

    def ended(self, now: Pass, sums: Tensor) -> Tensor:
        expected, ends = self.both("ended", now, sums)
        close(ends[:EARLIEST], expected[:EARLIEST])
        if now.rules.power:
            racing = alive(now, ends.shape[2])
            close(ends[EARLIEST][racing], expected[EARLIEST][racing])
        return expected

    def best(self, now: Pass, *args: Any) -> tuple[Tensor, Tensor]:
        (keys, places), (triton_keys, triton_places) = self.both("best", now, *args)
        assert torch.equal(triton_keys, keys)
        assert torch.equal(triton_places[keys != NOTHING], places[keys != NOTHING])
        return keys, places

    def follow(self, now: Pass, *args: Any) -> Rows:
        expected, rows = self.both("follow", now, *args)
        for column, (given, wanted) in enumerate(zip(rows.table, expected.table, strict=True)):
            if column in (SCORE, LOG):
                close(given.view(torch.float64), wanted.view(torch.float64), exactly=not now.rules.power)
            else:
                assert torch.equal(given, wanted), column
        assert torch.equal(rows.tokens, expected.tokens)
        return expected

    def merge(self, now: Pass, *args: Any) -> tuple[Items, Tensor]:
        (expected, alive_before), (items, triton_alive) = self.both("merge", now, *args)
        assert all(torch.equal(*pair) for pair in zip(items, expected, strict=True))
        assert torch.equal(triton_alive, alive_before)
        return expected, alive_before


def alive(now: Pass, count: int) -> Tensor:
    return (now.rows.scores > now.items.scores[:, -1:])[:, :count]


def close(given: Tensor, expected: Tensor, *, exactly: bool = False) -> None:
    torch.testing.assert_close(given, expected, rtol=0 if exactly else 1e-12, atol=0 if exactly else 1e-12)


def to_cpu(value: Any) -> Any:
    if isinstance(value, Arena) and value.device.type != "cpu":
        words = value.words.cpu()
        rows = with_addresses(value.sets.cpu().numpy(), words.data_ptr())
        given = {"words": words, "sets": value.sets.cpu(), "rows": rows, "rows_at": rows.ctypes.data}
        return SimpleNamespace(**given, device=torch.device("cpu"))
    return moved(value, torch.device("cpu"), to_cpu)


def moved(value: Any, device: torch.device, inner: Any = None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [(inner or (lambda part: moved(part, device)))(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def covering(plans: Sequence[LevelPlan]) -> LevelPlan:
    """A plan for lists of different sets, of no more than 4,096 nodes a level."""
    levels = max(plan.levels for plan in plans)
    nodes = [max(plan.nodes[i] if i < plan.levels else 0 for plan in plans) for i in range(levels)]
    widest = [
        np.array([max(plan.children(i, n + 1) for plan in plans) for n in range(nodes[i])]) for i in range(levels)
    ]
    tails = [max(plan.tails[i] if i < plan.levels else 0 for plan in plans) for i in range(levels)]
    tailed = [max(plan.tailed[i] if i < plan.levels else 0 for plan in plans) for i in range(levels)]
    longest, spans = max(plan.longest for plan in plans), plans[0].spans if len(plans) == 1 else ()
    return LevelPlan(tuple(nodes), tuple(widest), tuple(tails), tuple(tailed), longest, spans)


def compared(
    sets: Sequence[Sequence[Sequence[int]]],
    device: str,
    *,
    seed: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    impossible: float = 0.1,
    lockstep: bool = False,
    races: bool = False,
    narrow: bool = False,
    made_as: str | None = None,
    **options: Any,
) -> Compared:
    """Search these sets, a list each, with random logits, of which some are -inf and many are equal.

    padding: columns that lie beside the logits in memory. lockstep, races: of these beams. narrow: whether they get the
    logits of the sets' own tokens only, or of a level's, and the sums of all, half the rows at a time; the items must
    be those of all logits. made_as: the kind of `views.made`. options: of `Beams`.
    """
    built = [made(items, made_as) for items in sets]
    arena = Arena(sum(map(room_for, built)), device)
    numbers = [arena.acquire(s) for s in built]
    if races:
        options["keys"] = torch.arange(3, 3 + len(sets), device=device) << 40
    kind = Lockstep if lockstep else Beams
    beams, other = (kind(arena, numbers, covering([s.level_plan for s in built]), **options) for _ in range(2))
    own = np.unique(np.concatenate([[options["end_token"] or 0], *(s.token_ids for s in built)]))
    own = torch.from_numpy(own[own < vocabulary]).to(device)
    beams._kernels = kernels = Compared()  # type: ignore[assignment]
    draw, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    while beams.passes_left:
        rows = beams.lists * (draw.choice([beams.rows, beams.width]) if beams.taken else 1)
        if lockstep:
            rows = (
                max(1, beams.row_count * (1 if races else beams.lists)) if beams.taken else 1 if races else beams.lists
            )
        shape = (rows, beams.queries, vocabulary + padding)
        logits = torch.randn(shape, generator=generator, device=device).mul(4).round_(decimals=1)
        logits[torch.rand(shape, generator=generator, device=device) < impossible] = -torch.inf
        logits = logits.to(dtype)[:, 0 if lockstep else slice(None), padding:]
        if narrow:
            other.round(logits)
            count = rows // beams.lists
            by_list = logits[: count * beams.lists].view(beams.lists, count, beams.queries, vocabulary)
            half = max(1, count // 2)
            parts = [beams.log_sums(by_list[:, at : at + half].flatten(0, 1), at) for at in range(0, count, half)]
            sums = torch.cat(parts, 1) if parts and not options.get("renormalised") else None
            first, last = beams.span or (0, vocabulary)
            read = own[(own >= first) & (own <= last)]
            columns = torch.zeros(vocabulary, dtype=torch.int32, device=device)
            columns[read] = torch.arange(len(read), dtype=torch.int32, device=device)
            beams.round(logits[..., read], columns=columns, sums=sums)
        else:
            beams.round(logits)
        if not lockstep and draw.random() < 0.5:
            beams.narrow()
            other.narrow()
    if narrow:
        assert torch.equal(beams.found.tokens, other.found.tokens)
        torch.testing.assert_close(beams.found.scores, other.found.scores, rtol=0, atol=1e-5)
    return kernels
