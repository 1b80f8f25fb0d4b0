"""Checks every kernel on the device at hand: random schedules of requests, held against torch and a dict trie."""

from __future__ import annotations

import importlib
import random
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from gpu_peers import Step, capture, constants
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import CHAIN, TREE, Batch
from itemset.masking.slots import Slots, kernels_for


class Compared(Slots):
    """Before each step, every kernel in Triton is held against the one in torch, bit for bit."""

    def step(self, batch: Batch, logits: Tensor, *, most: int | None = None) -> None:
        torch_kernels, triton_kernels = (kernels_for(self.arena.device, name) for name in ("torch", "triton"))
        expected = self.results(torch_kernels, batch, logits, most)
        for name, found in self.results(triton_kernels, batch, logits, most).items():
            assert torch.equal(found, expected[name]), f"{name}: Triton differs from torch"
        super().step(batch, logits, most=most)

    def results(self, kernels: ModuleType, batch: Batch, logits: Tensor, most: int | None) -> dict[str, Tensor]:
        """What each kernel makes of a step; nothing here is changed."""
        arena, marks, rows = self.arena, self.marks, len(batch.slots)
        states, again, legal, drafted = (torch.empty_like(self.row_states[:rows]) for _ in range(4))
        masked, stepped = (logits.new_empty(rows, logits.stride(0))[:, : logits.shape[1]] for _ in range(2))
        ahead = torch.full((rows, 5), -7, dtype=torch.int32, device=logits.device)  # `forced` leaves rows as they are
        cells = self.cells.clone()
        kernels.walk(arena, cells, marks, batch, states, most)
        kernels.mask(arena, masked.copy_(logits), states, marks, batch.slots)
        kernels.step(arena, self.cells.clone(), marks, batch, again, stepped.copy_(logits), most)
        kernels.forced(arena, states, marks, batch.slots, ahead)
        kernels.advance(arena, states, masked.argmax(1), None, legal)
        kernels.advance(arena, states, batch.tokens, marks[batch.slots.long()], drafted)
        return {
            "walk": states,
            "walk's cells": cells[:-1],  # the last one is nobody's
            "mask": masked,
            "step": stepped,
            "step's states": again,
            "forced": ahead,
            "advance": legal,
            "advance with marks": drafted,
        }


class Replayed(Slots):
    """Each step is a replay of one CUDA graph (of two: chains and trees of drafts), whose tensors are overwritten in
    place. On the CPU nothing is captured."""

    def __init__(self, arena: Arena, slots: int, *, max_rows: int, max_stop_tokens: int, width: int, vocabulary: int):
        super().__init__(arena, slots, max_rows=max_rows, max_stop_tokens=max_stop_tokens, kernels="triton")
        shapes = {"slots": (max_rows,), "history": (slots, width), "begin": (slots,), "end": (slots,)}
        shapes |= {"above": (max_rows,), "tokens": (max_rows,)}
        fixed = {name: torch.zeros(shape, dtype=torch.int32, device=arena.device) for name, shape in shapes.items()}
        self.batch = Batch(**fixed)
        self.logits = torch.zeros(max_rows, vocabulary, device=arena.device)
        self.replay: dict[int, Step] = {}
        for layout in (CHAIN, TREE):
            step = partial(super().step, self.batch._replace(layout=layout), self.logits)
            self.replay[layout] = capture([step]) if arena.device.type == "cuda" else step

    def step(self, batch: Batch, logits: Tensor, *, most: int | None = None) -> None:
        self.batch.slots.fill_(-1)
        for fixed, now in zip(self.batch, batch, strict=True):
            if isinstance(fixed, Tensor) and isinstance(now, Tensor):
                fixed[: len(now)].copy_(now)
        self.logits[: len(logits)].copy_(logits)
        self.replay[batch.layout]()
        logits.copy_(self.logits[: len(logits)])


def checks(device: str, factor: float = 1) -> None:
    """Every step of random schedules of requests, against torch and a dict trie. AssertionError at a difference.

    factor: how many times as many steps as usual.
    """
    schedule, kernels = load_schedule(), kernels_for(device, "triton")
    slow = device == "cpu"  # Triton's interpreter takes milliseconds for each row of a launch
    # Few tokens are many chunks, and a node is read in many parts.
    small = {"WHOLE": 16, "CHUNK": 16, "CHUNKS": 2, "LANES": 4}
    for vocabulary, values, steps in (
        (48, {}, 15 if slow else 200),
        (48, small, 15 if slow else 200),
        (5_000, {}, 4 if slow else 100),
        (70_000, {}, 4 if slow else 100),  # labels of 32 bits
    ):
        with constants(kernels, **values), constants(schedule, VOCABULARY=vocabulary, PADDED=vocabulary + 5):
            shape = {"max_rows": schedule.MOST_ROWS, "max_stop_tokens": schedule.STOPS}
            for window in (False, True):
                engine = schedule.Schedule(vocabulary, kernels="triton", device=device, window=window)
                engine.slots = Compared(engine.arena, schedule.SLOTS, kernels="triton", **shape)
                engine.run(round(steps * factor))
                report(f"{engine.checked:,} rows agree with torch and with the oracle", vocabulary, values)
            engine = schedule.Schedule(vocabulary + 1, kernels="triton", device=device)
            fixed = {"width": schedule.WIDTH, "vocabulary": schedule.PADDED}
            engine.slots = Replayed(engine.arena, schedule.SLOTS, **shape, **fixed)
            engine.run(round((steps if slow else 350) * factor))
            how = "on fixed tensors" if slow else "of replayed graphs"
            report(f"{engine.checked:,} rows {how} agree with the oracle", vocabulary, values)


def check_lists(device: str, factor: float = 1) -> None:
    """Random searches of ranked lists, each function of each round in Triton against torch. AssertionError at a
    difference."""
    load_schedule()
    compared = importlib.import_module("compared_lists").compared
    expand = importlib.import_module("itemset.ranking.triton_expand")
    slow = device == "cpu"
    small = {"SUM_LANES": 8, "SUM_EACH": 2, "CHILDREN": 8, "ENDS": 4, "LANES": 4, "ITEMS": 2, "OTHERS": 8, "COLUMNS": 4}
    draw, calls = random.Random(0), 0
    for seed in range(round((2 if slow else 60) * factor)):
        for options in ({}, {"renormalised": True}, {"stepwise": True}):
            vocabulary, items, most = (60, 30, 5) if slow else draw.choice([(60, 300, 40), (40_000, 5_000, 512)])
            lengths = [(1, 3), (2, 9), (4, 4)]
            sets = [
                [
                    [draw.randrange(vocabulary if i == 0 else 20) for i in range(draw.randint(*length))]
                    for _ in range(items)
                ]
                for length in lengths
            ]
            with constants(expand, **(small if seed % 2 else {})):
                run = compared(
                    sets, device, seed=seed, vocabulary=vocabulary, padding=seed % 3,
                    dtype=(torch.float32, torch.bfloat16, torch.float16)[seed % 3],
                    width=draw.randint(1, most), k=draw.randint(1, most),
                    end_token=draw.choice([None, vocabulary - 1]), **options,
                )  # fmt: skip
            calls += run.compared
    print(f"{calls:,} calls of rounds of lists agree with torch", flush=True)


def report(what: str, vocabulary: int, values: dict[str, int]) -> None:
    print(f"{vocabulary:,} tokens{values or ''}: {what}", flush=True)


def load_schedule() -> ModuleType:
    """tests/schedule.py: random requests, and the oracle that every row is held against."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    return importlib.import_module("schedule")
