"""Checks every kernel on the device at hand: random schedules of requests, compared with a dict trie and with each
other; sets that are copied beside running steps; rounds of lists."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_peers import Step, capture, constants, slots_of
from torch import Tensor

import itemset
from itemset import ItemSet
from itemset.masking import cpu_kernels, triton_kernels
from itemset.masking.arena import Arena, Copies, room_for
from itemset.masking.batch import CHAIN, ROW, TREE, Batch, table_row
from itemset.masking.slots import Slots

VOCABULARY, STOP = 2_048, 0
STEPS = 300
BUSY = 2_000_000  # clock cycles by which a step is held up, so that copies meet steps in flight: a host copies slowly


class Unordered(Copies):
    """Copies and steps that wait for nothing: with them the check must fail, or it checks nothing."""

    def use(self, numbers: Any, *, begins: bool) -> None:
        self._pending.clear()
        super().use(numbers, begins=begins)

    def _wait_for_readers(self, number: int) -> None:
        pass


def copies(device: str) -> dict[str, int]:
    """AssertionError if a step has masked other tokens than its set has. Returns how many would without the order."""
    checked, wrong = wrong_steps(device, ordered=True)
    assert wrong == 0, f"{wrong} of {checked} steps beside copies masked other tokens than the host path"
    print(f"{checked:,} steps beside copies agree with the host path", flush=True)
    if device == "cpu":
        return {}
    _, without = wrong_steps(device, ordered=False)
    print(f"without their order, {without} of them do not", flush=True)
    return {"steps that would go wrong without the order": without}


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
    arena = Arena(4 * max(map(room_for, sets)), device, kernels="triton")
    if not ordered:
        arena._copies = Unordered(arena.device, 1024)
    slots = slots_of(arena, 1)
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
    slots.step(batch, logits)


class Compared(Slots):
    """Before each step, every kernel in Triton is held against the one in Numba, bit for bit."""

    sets: Sequence[ItemSet]
    """Those that the arena may hold."""

    def step(self, batch: Batch, logits: Tensor) -> None:
        by_digest = {item_set.digest: item_set for item_set in self.sets}
        rows = np.zeros((len(self.arena.sets), ROW), np.int64)
        for resident in self.arena.plan.residents:
            if resident.digest in by_digest:
                rows[resident.number] = table_row(by_digest[resident.digest])
        host = SimpleNamespace(rows_at=rows.ctypes.data)
        expected = self.results(cpu_kernels, host, "cpu", batch, logits)
        for name, found in self.results(triton_kernels, self.arena, logits.device, batch, logits).items():
            assert torch.equal(found.cpu(), expected[name]), f"{name}: Triton differs from Numba"
        super().step(batch, logits)

    def results(self, kernels: Any, arena: Any, device: Any, batch: Batch, logits: Tensor) -> dict[str, Tensor]:
        """What each kernel makes of a step; nothing here is changed."""
        marks, rows = self.marks.to(device), len(batch.slots)
        batch = Batch(*(one.to(device) if isinstance(one, Tensor) else one for one in batch))
        states, again, legal, drafted = (torch.empty_like(self.row_states[:rows], device=device) for _ in range(4))
        shape = rows, logits.stride(0)
        masked, stepped = (logits.new_empty(shape, device=device)[:, : logits.shape[1]] for _ in range(2))
        ahead = torch.full((rows, 5), -7, dtype=torch.int32, device=device)  # `forced` leaves rows as they are
        cells, more = (self.cells.to(device, copy=True) for _ in range(2))
        kernels.walk(arena, cells, marks, batch, states)
        kernels.mask(arena, masked.copy_(logits), states, marks, batch.slots)
        kernels.walk(arena, more, marks, batch, again, stepped.copy_(logits))
        kernels.forced(arena, states, marks, batch.slots, ahead)
        marks = marks[batch.slots.long()]
        kernels.advance(arena, states, masked.argmax(1), marks, legal)
        kernels.advance(arena, states, batch.tokens, marks, drafted)
        return {
            "walk": states,
            "walk's cells": cells[:-1],  # the last one is nobody's
            "mask": masked,
            "step": stepped,
            "step's states": again,
            "forced": ahead,
            "advance": legal,
            "advance by drafts": drafted,
        }


class Replayed(Slots):
    """Each step is a replay of one CUDA graph (of two: chains and trees of drafts), whose tensors are overwritten in
    place. On the CPU nothing is captured."""

    def __init__(self, arena: Arena, slots: int, *, max_rows: int, max_stop_tokens: int, width: int, vocabulary: int):
        super().__init__(arena, slots, max_rows=max_rows, max_stop_tokens=max_stop_tokens)
        shapes = {"slots": (max_rows,), "history": (slots, width), "begin": (slots,), "end": (slots,)}
        shapes |= {"above": (max_rows,), "tokens": (max_rows,)}
        fixed = {name: torch.zeros(shape, dtype=torch.int32, device=arena.device) for name, shape in shapes.items()}
        fixed["above"].fill_(-1)  # a capture runs the step once: a tree of zeros has no root
        self.batch = Batch(**fixed)
        self.logits = torch.zeros(max_rows, vocabulary, device=arena.device)
        self.replay: dict[int, Step] = {}
        for layout in (CHAIN, TREE):
            step = partial(super().step, self.batch._replace(layout=layout), self.logits)
            self.replay[layout] = capture([step]) if arena.device.type == "cuda" else step

    def step(self, batch: Batch, logits: Tensor) -> None:
        self.batch.slots.fill_(-1)
        for fixed, now in zip(self.batch, batch, strict=True):
            if isinstance(fixed, Tensor) and isinstance(now, Tensor):
                fixed[: len(now)].copy_(now)
        self.logits[: len(logits)].copy_(logits)
        self.replay[batch.layout]()
        logits.copy_(self.logits[: len(logits)])


def checks(device: str, factor: float = 1, late: Callable[[], bool] = lambda: False) -> dict[str, int]:
    """Every step of random schedules of requests, against Numba and a dict trie. AssertionError at a difference.

    factor: how many times as many steps as usual. late: asked before each schedule whether to stop.
    """
    checked = 0
    schedule, kernels = from_tests("schedule"), triton_kernels
    slow = device == "cpu"  # Triton's interpreter takes milliseconds for each row of a launch
    # Few tokens are many chunks, and a node is read in many parts.
    small = {"WHOLE": 16, "STORED": 64, "SPAN": 32, "LANES": 4}
    for vocabulary, values, steps in (
        (48, {}, 15 if slow else 200),
        (48, small, 15 if slow else 200),
        (5_000, {}, 4 if slow else 100),
        (70_000, {}, 4 if slow else 100),  # labels of 32 bits
    ):
        with constants(kernels, **values), constants(schedule, VOCABULARY=vocabulary, PADDED=vocabulary + 5):
            shape = {"max_rows": schedule.MOST_ROWS, "max_stop_tokens": schedule.STOPS}
            for window in (False, True):
                if late():
                    return {"rows": checked}
                engine = schedule.Schedule(vocabulary, kernels="triton", device=device, window=window)
                engine.slots = Compared(engine.arena, schedule.SLOTS, **shape)
                engine.slots.sets = engine.sets
                engine.run(round(steps * factor))
                checked += engine.checked
                report(f"{engine.checked:,} rows agree with Numba and with the oracle", vocabulary, values)
            engine = schedule.Schedule(vocabulary + 1, kernels="triton", device=device)
            fixed = {"width": schedule.WIDTH, "vocabulary": schedule.PADDED}
            engine.slots = Replayed(engine.arena, schedule.SLOTS, **shape, **fixed)
            engine.run(round((steps if slow else 350) * factor))
            how = "on fixed tensors" if slow else "of replayed graphs"
            checked += engine.checked
            report(f"{engine.checked:,} rows {how} agree with the oracle", vocabulary, values)
    return {"rows": checked}


def check_lists(device: str, factor: float = 1, late: Callable[[], bool] = lambda: False) -> dict[str, int]:
    """Random searches of ranked lists, each function of each round in Triton against Numba. AssertionError at a
    difference. late: as of `checks`."""
    compared = from_tests("compared_lists").compared
    expand = importlib.import_module("itemset.ranking.triton_kernels")
    slow = device == "cpu"
    small = {"SUM_LANES": 8, "SUM_EACH": 2, "CHILDREN": 8, "LANES": 4, "ITEMS": 2, "OTHERS": 8, "TOKENS": 4}
    draw, calls = random.Random(0), 0
    for seed in range(round((2 if slow else 60) * factor)):
        for options in ({}, {"renormalised": True}, {"stepwise": True}, {"lockstep": True}, {"races": True}):
            if late():
                return {"calls": calls}
            vocabulary, items, most = (60, 30, 5) if slow else draw.choice([(60, 300, 40), (40_000, 5_000, 512)])
            lengths = [(1, 3), (2, 9), (4, 4)]
            sets = [
                [
                    [draw.randrange(vocabulary if i == 0 else 20) for i in range(draw.randint(*length))]
                    for _ in range(items)
                ]
                for length in lengths
            ]
            # In float32, sums of thousands of exponentials by a few lanes would differ more than is near.
            with constants(expand, **(small if seed % 2 and vocabulary == 60 else {})):
                run = compared(
                    sets, device, seed=seed, vocabulary=vocabulary, padding=seed % 3,
                    dtype=(torch.float32, torch.bfloat16, torch.float16)[seed % 3],
                    width=draw.randint(1, most), k=draw.randint(1, most),
                    end_token=vocabulary - 1 if "races" in options else draw.choice([None, vocabulary - 1]), **options,
                )  # fmt: skip
            calls += run.compared
    print(f"{calls:,} calls of rounds of lists agree with Numba", flush=True)
    return {"calls": calls}


def check_sums(device: str) -> dict[str, float]:
    """How far log-sum-exp is from float64's, in Triton, in Numba and in torch, over this many logits."""
    from itemset.ranking import cpu_kernels
    from itemset.ranking.beam_state import Items, Pass, Rows, Rules

    compared, expand = from_tests("compared_lists"), importlib.import_module("itemset.ranking.triton_kernels")
    item_set = itemset.build([[1, 2], [2, 3]])
    arena = Arena(room_for(item_set), device)
    numbers = torch.tensor([arena.acquire(item_set)], device=device)
    found = {}
    for vocabulary in (300, 40_000, 151_936):
        logits = torch.randn(1, 1, 1, vocabulary, device=device).mul(4)
        logits[..., torch.rand(vocabulary, device=device) < 0.1] = -torch.inf
        rows, items = Rows.roots(arena, numbers, 1, 2), Items.empty(1, 1, 2, torch.device(device))
        items.scores.fill_(-torch.inf)
        offsets = torch.zeros(1, 1, dtype=torch.int64, device=device)
        now = Pass(arena, logits, rows, items, offsets, 0, Rules(-1, 0, True, 0.0, 0.0, 0.0, 1.0))
        exact = float(logits.double().logsumexp(3))
        sums = {
            "Triton": expand.log_sums(now), "Numba": cpu_kernels.log_sums(compared.to_cpu(now)),
            "torch": logits.logsumexp(3),
        }  # fmt: skip
        found |= {f"{name}, {vocabulary}": float(one) - exact for name, one in sums.items()}
    return found


def report(what: str, vocabulary: int, values: dict[str, int]) -> None:
    print(f"{vocabulary:,} tokens{values or ''}: {what}", flush=True)


def from_tests(module: str) -> ModuleType:
    """schedule: random requests, and the oracle that every row is held against; compared_lists."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    return importlib.import_module(module)
