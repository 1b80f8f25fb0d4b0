"""The steps that `gpu.py` measures: ours and the other methods' in tables A and B, and how a step is timed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_peers import (
    LENGTH,
    STOP,
    CpuTrie,
    Ppv,
    Static,
    Step,
    Walks,
    allowed_by,
    apply_in_torch,
    capture,
    constants,
    copy_and_apply,
    fill_bitmasks,
    in_order,
    run,
    uniform,
    with_children,
    xgrammar_apply,
    zipf,
)
from gpu_report import BEAM, LARGE, TOP, Record
from numpy.typing import NDArray
from torch import Tensor

import itemset
from itemset import ItemSet
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import Batch
from itemset.masking.slots import Kernels, Slots

STEPS = 3 * LENGTH  # of a graph: a multiple of the levels, so that STATIC meets each equally often
PPV_STEPS = LENGTH  # a step of PPV is hundreds of launches
BEAM_ROWS = 140  # the paper's batch of 2 with beams of 70
Emit = Callable[[str, Any], None]


@dataclass(frozen=True)
class Plan:
    """What is measured. replays: how often each thing. logits: float32 numbers that logits may take in all."""

    rows: tuple[int, ...] = (140, 512, 1, 32)  # the most important first, here and below
    vocabularies: tuple[int, ...] = (2_048, 151_936, 32_768)
    items: tuple[int, ...] = (10**5, 10**6, 2 * 10**7)
    skewed_items: int = 10**6
    paper_items: tuple[int, ...] = (10**5, 10**6, 10**7)
    paper_vocabularies: tuple[int, ...] = (256, 2_048, 32_768)
    paper_children: tuple[int, ...] = (4, 64, 2_048)
    replays: int = 50
    logits: int = 1 << 30


QUICK = Plan(
    rows=(1, 140),
    vocabularies=(2_048, 151_936),
    items=(10**5, 10**6),
    paper_items=(10**5,),
    paper_vocabularies=(2_048,),
    replays=20,
)
CPU = Plan(
    rows=(1, 32, 140),
    vocabularies=(2_048, 32_768),
    items=(10**5, 10**6),
    paper_items=(10**5,),
    paper_vocabularies=(256, 2_048),
    paper_children=(4, 64),
    replays=5,
    logits=1 << 24,
)


class Bench:
    """A device, the logits that all steps share, and how steps are timed there."""

    def __init__(self, device: str, plan: Plan, *, deadline: float = float("inf")) -> None:
        """deadline: the second (`time.time`) from which `is_late` says so."""
        self.device, self.plan, self.cuda, self.deadline = device, plan, device == "cuda", deadline
        self.kernels: Kernels = "triton" if self.cuda else "numba"
        if not self.cuda:
            torch.set_num_threads(1)  # threads that wait for each other measure what else the machine does
        self.logits = torch.empty(plan.logits, device=device)
        self.xgrammar = xgrammar_apply()

    def is_late(self, part: str, row: str, emit: Emit) -> bool:
        """Whether the time is up before this row of a part; if so, emit that."""
        late = time.time() >= self.deadline
        if late:
            emit("skipped", {"part": part, "from": row})
        return late

    def machine(self) -> Record:
        """What the times depend on, and what is not measured here."""
        packages = ("torch", "triton", "xgrammar", "numba", "numpy")
        found: Record = {
            "device": torch.cuda.get_device_name() if self.cuda else "CPU",
            "versions": {package: installed(package) for package in packages},
            "bytes a second": self.bandwidth(),
            "launch": self.launch(),
        }
        note(", ".join([found["device"], *(f"{name} {number}" for name, number in found["versions"].items())]))
        note(f"copies: {found['bytes a second'] / 1e9:,.0f} GB/s; the smallest step: {found['launch']:.2f} µs")
        if not self.cuda:
            note("Ours is the version in Numba here.")
        if self.xgrammar is None:
            note("xgrammar is not installed: its columns are left out, and bitmasks of the CPU trie go through torch")
        return found

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
        for _ in range(replays or self.plan.replays):
            reset()
            # On the GPU this also takes long enough for the host to queue the replay after it.
            self.logits.normal_()
            if not graph:
                self.wait()  # so that the host's time to launch the steps is not hidden
            times.append(self.events(replay) if self.cuda else self.clock(replay))
        self.wait()
        return median(seconds() for seconds in times) / len(steps) * 1e6

    def round_trip(self, step: Step, undo: Step) -> float:
        """Microseconds that the host waits for a step, from the end of the work before it to the end of its own."""
        times = []
        for _ in range(self.plan.replays):
            self.wait()
            times.append(self.clock(partial(run, [step, self.wait]))())
            undo()
        return median(times) * 1e6

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
            slots = Slots(arena, rows, max_rows=rows)
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

    def steps_in_two(self, logits: list[Tensor]) -> list[Step]:
        """The same without the single launch for vocabularies of one chunk."""

        def step(slots: Slots, batch: Batch, target: Tensor) -> None:
            slots.mask(slots.walk(batch), batch.slots, target)

        return [partial(step, *parts) for parts in zip(self.slots, self.batches, logits, strict=True)]


def check_steps(steps: Sequence[Step], logits: list[Tensor], bitmasks: Tensor) -> None:
    """That the steps which are measured mask what the host path masks."""
    for i, (step, target, bitmask) in enumerate(zip(steps, logits, bitmasks, strict=True)):
        target.normal_()
        expected = target.masked_fill(~allowed_by(bitmask.to(target.device), target.shape[1]), -torch.inf)
        step()
        assert torch.equal(target, expected), f"step {i} of {steps} masks other tokens than the host path"


class Loaded:
    """One set on the device: ours in an arena, the sorted items for the peers."""

    def __init__(self, bench: Bench, items: NDArray[Any]) -> None:
        self.item_set: ItemSet = itemset.build(items)
        self.arena = Arena(room_for(self.item_set), bench.device)
        self.number = self.arena.acquire(self.item_set)
        self.bits = self.item_set.trie.tables.token_bits
        self.items = in_order(torch.from_numpy(items.astype(np.int32)).to(bench.device), self.bits)


Cells = list[tuple[int, str, int, tuple[int, ...]]]  # vocabulary, kind of set, items, rows: a set is loaded once


def goal_cells(plan: Plan) -> Cells:
    """The rows for which goals stand, the most important first."""
    (_, large), (least, *_, most) = LARGE, plan.items
    small, rows = plan.vocabularies[0], (BEAM_ROWS,)
    sets = [("uniform", most), ("uniform", least), ("Zipf", plan.skewed_items), ("uniform", plan.skewed_items)]
    first, *others = [(small, kind, items, rows) for kind, items in sets]
    return [first, (large, "uniform", least, (LARGE[0],)), *others] if large in plan.vocabularies else [first, *others]


def all_cells(plan: Plan) -> Cells:
    kinds = [("uniform", plan.items[-1]), ("Zipf", plan.skewed_items), *(("uniform", n) for n in plan.items[:-1])]
    return [(vocabulary, *kind, plan.rows) for vocabulary in plan.vocabularies for kind in kinds]


def table_a(bench: Bench, emit: Emit, *, only_goals: bool = False) -> None:
    """Emit the rows of table A; with `only_goals` those for which goals stand, beside xgrammar and the copy alone."""
    bandwidth, part = bench.bandwidth(), "goals" if only_goals else "a"
    for vocabulary, kind, count, all_rows in (goal_cells if only_goals else all_cells)(bench.plan):
        if bench.is_late(part, f"{vocabulary:,} tokens, {count:,} {kind} items", emit):
            return
        note(f"{vocabulary:,} tokens, {count:,} {kind} items ...")
        loaded = Loaded(bench, (uniform if kind == "uniform" else zipf)(count, vocabulary))
        walks = Walks.random(loaded.items, STEPS, max(all_rows))
        static = None if only_goals else Static(loaded.items, vocabulary, walks.positions)
        for rows in all_rows:
            if bench.is_late(part, f"{vocabulary:,} tokens, {count:,} {kind} items, {rows} rows", emit):
                return
            record = {"vocabulary": vocabulary, "set": kind, "items": count, "rows": rows}
            record |= cell_a(bench, loaded, static, walks.first(STEPS, rows), vocabulary)
            if bench.cuda:
                record["copy bound"] = rows * vocabulary * 4 / bandwidth * 1e6
            emit("goals" if only_goals else "A", record)
            tuned = (kind, count, rows, vocabulary) == BEAM or ((rows, vocabulary) == LARGE and count == BEAM[1])
            if bench.cuda and tuned and not only_goals:
                alternatives(bench, loaded, walks.first(STEPS, rows), vocabulary, emit)
        del loaded, static


def cell_a(bench: Bench, loaded: Loaded, static: Static | None, walks: Walks, vocabulary: int) -> Record:
    logits = bench.buffers(STEPS, walks.levels.shape[1], vocabulary)
    ours = Ours.at(loaded.arena, loaded.number, walks)
    on_host = fill_bitmasks(loaded.item_set, walks, vocabulary)
    check_steps(ours.steps(logits), logits, on_host)
    record = {"ours": bench.step(ours.steps(logits), ours.reset)}
    if bench.xgrammar is not None:
        bitmasks = on_host.to(bench.device)
        record["xgrammar"] = bench.step([partial(bench.xgrammar, *pair) for pair in zip(logits, bitmasks, strict=True)])
        if bench.cuda:
            # The copies are part of the graph: each reads pinned memory of the host when it is replayed.
            copied = zip(logits, bitmasks, on_host.pin_memory(), strict=True)
            steps = [partial(copy_and_apply, bench.xgrammar, *parts) for parts in copied]
            record["copy + xgrammar"] = bench.step(steps)
    if static is None:
        return record
    peers = static.steps(walks, logits)
    check_steps(peers, logits, fill_bitmasks(loaded.item_set, walks.in_step(), vocabulary))
    if bench.cuda:
        record["STATIC"] = bench.step(peers)
    return record | {"STATIC eager": bench.step(peers, graph=False)}


def alternatives(bench: Bench, loaded: Loaded, walks: Walks, vocabulary: int, emit: Emit) -> None:
    """Emit our step with other constants, and in two launches where one would do."""
    kernels, rows = loaded.arena.kernels, walks.levels.shape[1]
    logits = bench.buffers(STEPS, rows, vocabulary)
    ours = Ours.at(loaded.arena, loaded.number, walks)
    for name, value in [
        ("CHUNK", 512),
        ("CHUNK", 2_048),
        ("CHUNKS", 8),
        ("CHUNKS", 64),
        ("LANES", 128),
        ("LANES", 512),
    ]:
        with constants(kernels, **{name: value}):
            record = {"vocabulary": vocabulary, "rows": rows}
            record |= {constant: getattr(kernels, constant) for constant in ("CHUNK", "CHUNKS", "LANES")}
            if vocabulary <= kernels.WHOLE:
                record["one launch"] = bench.step(ours.steps(logits), ours.reset)
            emit("constants", record | {"two launches": bench.step(ours.steps_in_two(logits), ours.reset)})


def table_b(bench: Bench, emit: Emit) -> None:
    """Emit the rows of table B."""
    plan = bench.plan
    for count in plan.paper_items:
        for vocabulary in plan.paper_vocabularies:
            for children in plan.paper_children:
                if bench.is_late("b", f"{count:,} items, {vocabulary:,} tokens, {children:,} children", emit):
                    return
                note(f"table B: {count:,} items, {vocabulary:,} tokens, {children:,} children ...")
                loaded = Loaded(bench, with_children(count, vocabulary, children))
                record = {"items": count, "vocabulary": vocabulary, "children": children, "rows": BEAM_ROWS}
                emit("B", record | cell_b(bench, loaded, vocabulary))


def cell_b(bench: Bench, loaded: Loaded, vocabulary: int) -> Record:
    walks = Walks.random(loaded.items, STEPS, BEAM_ROWS)
    few = walks.first(PPV_STEPS, BEAM_ROWS)
    logits = bench.buffers(STEPS, BEAM_ROWS, vocabulary)
    ours = Ours.at(loaded.arena, loaded.number, walks)
    exact, likely = (Ppv(loaded.items, loaded.bits).steps(few, logits[:PPV_STEPS], count) for count in (None, TOP))
    trie = CpuTrie(loaded.item_set, walks.first(1, BEAM_ROWS), logits[0], bench.xgrammar or apply_in_torch)
    bitmasks = fill_bitmasks(loaded.item_set, walks, vocabulary)
    check_steps(ours.steps(logits), logits, bitmasks)
    check_steps(exact, logits[:PPV_STEPS], bitmasks[:PPV_STEPS])
    return {
        "ours": bench.step(ours.steps(logits), ours.reset),
        "PPV exact": bench.step(exact, replays=10),  # a step takes milliseconds
        f"PPV top-{TOP}": bench.step(likely),
        "CPU trie": bench.round_trip(trie.step, trie.undo),
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def installed(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None
