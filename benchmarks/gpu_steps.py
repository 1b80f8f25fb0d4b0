"""The steps that `gpu.py` measures, ours and the other methods', and how a step is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_peers import (
    LENGTH,
    STOP,
    Static,
    Step,
    Walks,
    allowed_by,
    bitmasks_of,
    capture,
    copy_and_apply,
    in_order,
    loaded,
    run,
    slots_of,
    uniform,
    xgrammar_apply,
    zipf,
)
from numpy.typing import NDArray
from torch import Tensor

import itemset
from itemset import ItemSet
from itemset.masking.arena import Arena
from itemset.masking.batch import Batch
from itemset.masking.slots import Slots

STEPS = 3 * LENGTH  # of a graph: a multiple of the levels, so that STATIC meets each equally often
BEAM_ROWS = 140  # the paper's batch of 2 with beams of 70
Record = dict[str, Any]
Emit = Callable[[Record], None]


Cells = list[tuple[int, str, int, tuple[int, ...]]]  # vocabulary, kind of set, items, rows: a set is loaded once
CELLS: Cells = [(151_936, "uniform", 10**5, (512,)), (2_048, "uniform", 10**6, (140, 512))]
LARGE: Cells = [(2_048, "uniform", 2 * 10**7, (140,)), (2_048, "Zipf", 10**6, (140,)), (151_936, "Zipf", 10**6, (512,))]
SMALL: Cells = [(2_048, "uniform", 1_000, (2,)), (2_048, "Zipf", 1_000, (2,))]


class Bench:
    """A device, the logits that all steps share, and how steps are timed there."""

    def __init__(self, device: str) -> None:
        """device: "cpu" tries everything at small sizes in Triton's interpreter."""
        self.device, self.cuda = device, device == "cuda"
        self.replays = 30 if self.cuda else 1
        self.logits = torch.empty(1 << 31 if self.cuda else 1 << 19, dtype=torch.bfloat16, device=device)
        self.xgrammar = xgrammar_apply() if self.cuda else None

    def buffers(self, steps: int, rows: int, vocabulary: int) -> list[Tensor]:
        """Logits for so many steps; where there is no room for all, they take turns."""
        size = rows * vocabulary
        count = min(steps, len(self.logits) // size)
        logits = self.logits[: count * size].view(count, rows, vocabulary)
        return [logits[i % count] for i in range(steps)]

    def step(
        self, steps: Sequence[Step], reset: Step = lambda: None, *, graph: bool = True, replays: int | None = None
    ) -> float:
        """Microseconds of one of these steps. reset: undoes what they change, before each replay."""
        replay = capture(steps) if self.cuda and graph else partial(run, steps)
        times = []
        for _ in range(replays or self.replays):
            reset()
            # On the GPU this also takes long enough for the host to queue the replay after it.
            self.logits.normal_()
            if not graph:
                self.wait()  # so that the host's time to launch the steps is not hidden
            times.append(self.events(replay) if self.cuda else self.clock(replay))
        self.wait()
        return median(seconds() for seconds in times) / len(steps) * 1e6

    def events(self, work: Step) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    def clock(self, work: Step) -> Callable[[], float]:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        return lambda: seconds

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def bandwidth(self) -> float:
        """Bytes a second that a large copy reads and writes."""
        source, target = self.logits.chunk(2)
        return 2e6 * float(source.nbytes) / self.step([partial(target.copy_, source)])

    def launch(self) -> float:
        """Microseconds of the smallest step there is: one number is changed."""
        number = self.logits[:1]
        return self.step([partial(number.add_, 1)] * STEPS)


@dataclass
class Ours:
    """Our steps, and the cells to which each step's slots are put back before a replay."""

    slots: list[Slots]
    batches: list[Batch]
    cells: list[Tensor]

    @classmethod
    def at(cls, arena: Arena, number: int, walks: Walks) -> Ours:
        """Slots that have walked all but the last decoded token of each row."""
        ours = cls([], [], [])
        rows = walks.levels.shape[1]
        ids = torch.arange(rows, dtype=torch.int32, device=arena.device)
        for tokens, levels in zip(walks.tokens.int(), walks.levels, strict=True):
            slots = slots_of(arena, rows)
            marks = torch.full_like(slots.marks[:rows], -1)
            marks[:, 1] = STOP
            slots.assign(ids, torch.full_like(ids, number), marks)
            batch = Batch(ids, tokens, begin=torch.zeros_like(levels), end=levels)
            slots.walk(batch._replace(end=(levels - 1).clamp(min=0)))
            ours.slots.append(slots)
            ours.batches.append(batch)
            ours.cells.append(slots.cells.clone())
        return ours

    def reset(self) -> None:
        for slots, cells in zip(self.slots, self.cells, strict=True):
            slots.cells.copy_(cells)

    def steps(self, logits: list[Tensor]) -> list[Step]:
        return [partial(s.step, b, t) for s, b, t in zip(self.slots, self.batches, logits, strict=True)]


def differing(steps: Sequence[Step], logits: list[Tensor], bitmasks: Tensor) -> int:
    """How many of the steps that are measured mask something else than the host path."""
    count = 0
    for step, target, bitmask in zip(steps, logits, bitmasks, strict=True):
        target.normal_()
        expected = target.masked_fill(~allowed_by(bitmask.to(target.device), target.shape[1]), -torch.inf)
        step()
        count += not torch.equal(target, expected)
    return count


class Loaded:
    """One set on the device: ours in an arena, the sorted items for the peers."""

    def __init__(self, bench: Bench, items: NDArray[Any]) -> None:
        self.item_set: ItemSet = itemset.build(items)
        self.arena, self.number = loaded(self.item_set, bench.device)
        bits = self.item_set.trie.tables.token_bits
        self.items = in_order(torch.from_numpy(items.astype(np.int32)).to(bench.device), bits)


def table(bench: Bench, cells: Cells, emit: Emit, *, peers: bool) -> None:
    """Emit a row for each cell: µs of a step of ours, beside one write of its logits, xgrammar's kernel and STATIC."""
    for vocabulary, kind, count, all_rows in cells:
        here = Loaded(bench, (uniform if kind == "uniform" else zipf)(count, vocabulary))
        walks = Walks.random(here.items, STEPS, max(all_rows))
        static = Static(here.items, vocabulary, walks.positions) if peers else None
        for rows in all_rows:
            record = {"vocabulary": vocabulary, "set": kind, "items": count, "rows": rows}
            for found in cell(bench, here, static, walks.first(STEPS, rows), vocabulary):
                record |= found
            emit(record)
        del here, static


def cell(bench: Bench, here: Loaded, static: Static | None, walks: Walks, vocabulary: int) -> Iterator[Record]:
    """Yield what there is of a row, the most important first: an error later takes nothing away."""
    logits = bench.buffers(STEPS, walks.levels.shape[1], vocabulary)
    ours = Ours.at(here.arena, here.number, walks)
    on_host = bitmasks_of(here.item_set, walks, vocabulary)
    differ = differing(ours.steps(logits), logits, on_host)
    yield {"ours": bench.step(ours.steps(logits), ours.reset), "differ": differ, "ok": differ == 0}
    yield {"one write": bench.step([partial(one.fill_, 1.0) for one in logits])}
    if bench.xgrammar is not None:
        bitmasks = on_host.to(bench.device)
        yield {"xgrammar": bench.step([partial(bench.xgrammar, *pair) for pair in zip(logits, bitmasks, strict=True)])}
        # The copies are part of the graph: each reads pinned memory of the host when it is replayed.
        copied = zip(logits, bitmasks, on_host.pin_memory(), strict=True)
        yield {"copy + xgrammar": bench.step([partial(copy_and_apply, bench.xgrammar, *parts) for parts in copied])}
    if static is not None:
        peers = static.steps(walks, logits)
        yield {"STATIC differs": differing(peers, logits, bitmasks_of(here.item_set, walks.in_step(), vocabulary))}
        if bench.cuda:
            yield {"STATIC": bench.step(peers)}
        yield {"STATIC eager": bench.step(peers, graph=False, replays=5)}
