"""Checks and times sets that are copied to the device beside running steps."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import Batch
from itemset.masking.copies import Copies
from itemset.masking.slots import Slots

VOCABULARY, STOP = 2_048, 0
STEPS = 300
BUSY = 200_000  # clock cycles by which a step is held up, so that copies meet steps in flight


class Unordered(Copies):
    """Copies and steps that wait for nothing: with them the check must fail, or it checks nothing."""

    def use(self, numbers: Any) -> None:
        self._pending.clear()
        super().use(numbers)

    def _wait_for_readers(self, number: int) -> None:
        pass


def copies(device: str) -> dict[str, Any]:
    """Check, then time. Returns the times in µs. AssertionError if a step has masked other tokens than its set has."""
    checked, wrong = wrong_steps(device, ordered=True)
    assert wrong == 0, f"{wrong} of {checked} steps beside copies masked other tokens than the host path"
    print(f"{checked:,} steps beside copies agree with the host path", flush=True)
    if device == "cpu":
        return {}
    _, without = wrong_steps(device, ordered=False)
    print(f"without their order, {without} of them do not", flush=True)
    return {"steps that would go wrong without the order": without} | times(device)


def pool(sets: int, items: int) -> list[itemset.ItemSet]:
    """Sets of different tokens, in a size at which a copy takes longer than a step."""
    draw = np.random.default_rng(0)
    found = []
    for first in range(sets):
        tokens = draw.integers(1, VOCABULARY, (items, 8), dtype=np.uint16)
        tokens[:, 0] = 1 + first + sets * (tokens[:, 0] % (VOCABULARY // sets - 1))
        found.append(itemset.build(tokens))
    return found


def legal(item_set: itemset.ItemSet, device: str) -> Tensor:
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool, device=device)
    allowed[torch.from_numpy(item_set.children()[0].astype(np.int64)).to(device)] = True
    return allowed


def wrong_steps(device: str, *, ordered: bool) -> tuple[int, int]:
    """An engine's life without a model: sets take each other's places in an arena that is too small for all, without
    the host ever waiting for a step. Returns how many steps were checked, and how many masked wrongly."""
    sets = pool(12, 2_000 if device == "cpu" else 400_000)
    allowed = [legal(item_set, device) for item_set in sets]
    arena = Arena(4 * max(map(room_for, sets)), device)
    if not ordered:
        arena._copies = Unordered(arena.device, 1024)
    slots = Slots(arena, 1, max_rows=1, kernels="triton")
    one = torch.zeros(1, dtype=torch.int32, device=device)
    batch = Batch(one, one[:, None], begin=one, end=one)
    marks = torch.full_like(slots.marks[:1], -1)
    marks[:, 1] = STOP
    logits = torch.zeros(1, VOCABULARY, device=device)
    draw, wrong = random.Random(0), torch.zeros(STEPS, dtype=torch.int64, device=device)
    numbers = [torch.full((1,), number, device=device) for number in range(1024)]
    _step(slots, batch, numbers[0], marks, logits)  # compiles
    for step in range(STEPS):
        which = draw.randrange(len(sets))
        resident = arena.plan.acquire(sets[which])
        arena.place(sets[which], resident.number, resident.start)
        arena.use([resident.number])
        if device != "cpu":
            torch.cuda._sleep(draw.choice([0, BUSY, 10 * BUSY]))
        _step(slots, batch, numbers[resident.number], marks, logits.zero_())
        wrong[step] = (logits[0].isfinite() != allowed[which]).any()
        arena.plan.release(resident.number)
    return STEPS, int(wrong.sum())


def _step(slots: Slots, batch: Batch, number: Tensor, marks: Tensor, logits: Tensor) -> None:
    slots.assign(batch.slots, number, marks)
    slots.step(batch, logits, most=1)


def times(device: str) -> dict[str, float]:
    """µs for which the host is busy with a new set, and for which steps that do not read it are held up.

    The set is as large as the plugins' room for inline sets is by default.
    """
    large = itemset.build(np.random.default_rng(1).integers(1, VOCABULARY, (4_800_000, 8), dtype=np.uint16))
    arena = Arena(room_for(large) + 4096, device)
    small = arena.acquire(itemset.build([[1, 2], [3]]))
    number = torch.ones(1 << 22, device=device)
    result: dict[str, float] = {"bytes": room_for(large)}
    for name, begins in (("with a copy", True), ("without a copy", False)):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        started = time.perf_counter()
        if begins:
            resident = arena.plan.acquire(large)
            arena.place(large, resident.number, resident.start)
            result["host, the first time"] = (time.perf_counter() - started) * 1e6
            first.record()
        for _ in range(200):
            arena.use([small])
            number.add_(1)
        last.record()
        torch.cuda.synchronize()
        result[f"200 steps {name}"] = first.elapsed_time(last) * 1e3
    arena._placed.clear()
    torch.cuda.synchronize()
    started = time.perf_counter()
    arena.place(large, resident.number, resident.start)
    result["host"] = (time.perf_counter() - started) * 1e6
    torch.cuda.synchronize()
    result["host and copy"] = (time.perf_counter() - started) * 1e6
    return result
