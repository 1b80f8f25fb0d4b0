"""Checks the kernels and measures a step on a GPU beside xgrammar's bitmask, STATIC, PPV and a trie on the host.

bash benchmarks/gpu.sh --json docs/benchmarks/gpu.json --plot docs/benchmarks/gpu.png
bash benchmarks/gpu.sh --interpret      the checks alone, on the CPU, through Triton's interpreter
bash benchmarks/gpu.sh --cpu            table A on the CPU, in torch, at reduced sizes

A step is `Slots.step`: each row's last committed token is walked, and its logits are masked. Rows stand at random
items, spread over all levels. On the GPU a CUDA graph holds 24 steps, each with other rows and, up to 4 GiB, other
logits; before each replay all logits are written anew, which evicts what was cached, as a model's forward pass does.
Times are medians over replays, divided by the steps. Needs torch and Triton beside this project; xgrammar is optional.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_checks import checks
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
from numpy.typing import NDArray
from torch import Tensor

import itemset
from itemset import ItemSet
from itemset.arena import Arena
from itemset.batch import Batch
from itemset.slots import Kernels, Slots, kernels_for

STEPS = 3 * LENGTH  # of a graph: a multiple of the levels, so that STATIC meets each equally often
PPV_STEPS = LENGTH  # a step of PPV is hundreds of launches
BEAM_ROWS, TOP = 140, 50  # the paper's batch of 2 with beams of 70, and the candidates of its approximate baseline
PEERS_A = ("xgrammar", "copy + xgrammar", "copy bound", "STATIC", "STATIC eager")
PEERS_B = ("PPV exact", f"PPV top-{TOP}", "CPU trie")
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured. replays: how often each thing. logits: float32 numbers that logits may take in all."""

    rows: tuple[int, ...] = (1, 32, 140, 512)
    vocabularies: tuple[int, ...] = (2_048, 32_768, 151_936)
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

    def __init__(self, device: str, plan: Plan) -> None:
        self.device, self.plan, self.cuda = device, plan, device == "cuda"
        self.kernels: Kernels = "triton" if self.cuda else "torch"
        if not self.cuda:
            torch.set_num_threads(1)  # threads that wait for each other measure what else the machine does
        self.logits = torch.empty(plan.logits, device=device)
        self.xgrammar = xgrammar_apply()

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
            # On the GPU this also takes long enough for the host to queue the replay behind it.
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
    def at(cls, arena: Arena, number: int, walks: Walks, kernels: Kernels) -> Ours:
        """Slots that have walked all but the last decoded token of each row."""
        ours = cls([], [], [])
        rows = walks.levels.shape[1]
        ids = torch.arange(rows, dtype=torch.int32, device=arena.device)
        for tokens, levels in zip(walks.tokens.int(), walks.levels, strict=True):
            slots = Slots(arena, rows, max_rows=rows, kernels=kernels)
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
        return [partial(s.step, b, t, most=1) for s, b, t in zip(self.slots, self.batches, logits, strict=True)]

    def steps_in_two(self, logits: list[Tensor]) -> list[Step]:
        """The same without the single launch for vocabularies of one chunk."""

        def step(slots: Slots, batch: Batch, target: Tensor) -> None:
            slots.mask(slots.walk(batch, most=1), batch.slots, target)

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
        self.arena = Arena(self.item_set.nbytes + 4096, bench.device)
        self.number = self.arena.acquire(self.item_set)
        self.bits = self.item_set.trie.tables.token_bits
        self.items = in_order(torch.from_numpy(items.astype(np.int32)).to(bench.device), self.bits)


def table_a(bench: Bench, bandwidth: float, records: list[Record], tuning: list[Record]) -> None:
    plan = bench.plan
    for vocabulary in plan.vocabularies:
        kinds = [("uniform", count) for count in plan.items] + [("Zipf", plan.skewed_items)]
        for kind, count in kinds:
            note(f"table A: {vocabulary:,} tokens, {count:,} {kind} items ...")
            loaded = Loaded(bench, (uniform if kind == "uniform" else zipf)(count, vocabulary))
            walks = Walks.random(loaded.items, STEPS, max(plan.rows))
            static = Static(loaded.items, vocabulary, walks.positions)
            for rows in plan.rows:
                record = {"vocabulary": vocabulary, "set": kind, "items": count, "rows": rows}
                record |= cell_a(bench, loaded, static, walks.first(STEPS, rows), vocabulary)
                if bench.cuda:
                    record["copy bound"] = rows * vocabulary * 4 / bandwidth * 1e6
                records.append(record)
                note(json.dumps(record))
                largest = (kind, count) == ("uniform", plan.items[-1])
                if bench.cuda and largest and (rows, vocabulary) in ((140, 2_048), (512, 151_936)):
                    tuning += alternatives(bench, loaded, walks.first(STEPS, rows), vocabulary)


def cell_a(bench: Bench, loaded: Loaded, static: Static, walks: Walks, vocabulary: int) -> Record:
    logits = bench.buffers(STEPS, walks.levels.shape[1], vocabulary)
    ours = Ours.at(loaded.arena, loaded.number, walks, bench.kernels)
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
    peers = static.steps(walks, logits)
    check_steps(peers, logits, fill_bitmasks(loaded.item_set, walks.in_step(), vocabulary))
    if bench.cuda:
        record["STATIC"] = bench.step(peers)
    return record | {"STATIC eager": bench.step(peers, graph=False)}


def alternatives(bench: Bench, loaded: Loaded, walks: Walks, vocabulary: int) -> list[Record]:
    """Our step with other constants, and in two launches where one would do."""
    kernels, rows = kernels_for(bench.device, bench.kernels), walks.levels.shape[1]
    logits = bench.buffers(STEPS, rows, vocabulary)
    ours = Ours.at(loaded.arena, loaded.number, walks, bench.kernels)
    one_chunk = vocabulary <= kernels.WHOLE
    # Logits of one chunk meet the same kernels whatever larger chunk is set.
    chunks = [] if one_chunk else [{"CHUNK": chunk} for chunk in (512, 1_024, 2_048)]
    records = []
    for values in [*chunks, *({"LANES": lanes} for lanes in (128, 256, 1_024))]:
        with constants(kernels, **values):
            record = {"vocabulary": vocabulary, "rows": rows, "CHUNK": kernels.CHUNK, "LANES": kernels.LANES}
            if one_chunk:
                record["one launch"] = bench.step(ours.steps(logits), ours.reset)
            records.append(record | {"two launches": bench.step(ours.steps_in_two(logits), ours.reset)})
    return records


def table_b(bench: Bench, records: list[Record]) -> None:
    plan = bench.plan
    for count in plan.paper_items:
        for vocabulary in plan.paper_vocabularies:
            for children in plan.paper_children:
                note(f"table B: {count:,} items, {vocabulary:,} tokens, {children:,} children ...")
                loaded = Loaded(bench, with_children(count, vocabulary, children))
                record = {"items": count, "vocabulary": vocabulary, "children": children, "rows": BEAM_ROWS}
                records.append(record | cell_b(bench, loaded, vocabulary))
                note(json.dumps(records[-1]))


def cell_b(bench: Bench, loaded: Loaded, vocabulary: int) -> Record:
    walks = Walks.random(loaded.items, STEPS, BEAM_ROWS)
    few = walks.first(PPV_STEPS, BEAM_ROWS)
    logits = bench.buffers(STEPS, BEAM_ROWS, vocabulary)
    ours = Ours.at(loaded.arena, loaded.number, walks, bench.kernels)
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


def table(records: list[Record], peers: tuple[str, ...]) -> str:
    """A line a record; behind each peer's time, ours divided by it. What no record has is left out."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    lines = ["| " + " | ".join(f"{name} (ours / it)" if name in peers else name for name in columns) + " |"]
    lines.append("|" + "--:|" * len(columns))
    for record in records:
        cells = []
        for name in columns:
            value = record.get(name, "")
            cell = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            cells.append(f"{cell} ({record['ours'] / value:.2f})" if name in peers and value else cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bars(records: list[Record]) -> str:
    """What table A has to hold, and its worst cell for each."""
    at = {(r["set"], r["items"], r["rows"], r["vocabulary"]): r for r in records}
    ours = {key: record["ours"] for key, record in at.items()}
    sizes = sorted({items for kind, items, *_ in at if kind == "uniform"})
    growth = {
        key: t / ours["uniform", sizes[0], *key[2:]] for key, t in ours.items() if key[:2] == ("uniform", sizes[-1])
    }
    skew = {key: t / ours["uniform", *key[1:]] for key, t in ours.items() if key[0] == "Zipf"}
    beam = {key: t for key, t in ours.items() if key == ("uniform", 2 * 10**7, 140, 2_048)}
    bitmask, copy = (
        {key: r["ours"] / r[peer] for key, r in at.items() if peer in r} for peer in ("xgrammar", "copy bound")
    )
    large = {key: ratio for key, ratio in copy.items() if key[2:] == (512, 151_936)}
    lines = ["| bar | at most | worst | where | |", "|---|--:|--:|---|---|"]
    for name, most, values in (
        ("ours / xgrammar, the bitmask on the device", 1.0, bitmask),
        ("ours / copy bound, 512 rows of 151,936 tokens", 1.3, large),
        ("µs, 140 rows of 2,048 tokens, 2 x 10^7 items", 5.0, beam),
        (f"{sizes[-1]:,} items / {sizes[0]:,} items", 1.5, growth),
        ("Zipf / uniform", 2.0, skew),
    ):
        if values:
            kind, items, rows, vocabulary = max(values, key=values.__getitem__)
            worst = values[kind, items, rows, vocabulary]
            where = f"{rows} rows of {vocabulary:,}, {items:,} {kind} items"
            lines.append(f"| {name} | {most} | {worst:.2f} | {where} | {'holds' if worst <= most else 'MISSED'} |")
        else:
            lines.append(f"| {name} | {most} | | not measured | |")
    return "\n".join(lines)


def plot(records: list[Record], path: str) -> None:
    import matplotlib.pyplot as plt

    vocabularies = sorted({record["vocabulary"] for record in records})
    largest = max(record["items"] for record in records)
    figure, axes = plt.subplots(1, len(vocabularies), figsize=(5 * len(vocabularies), 4), squeeze=False)
    for axis, vocabulary in zip(axes[0], vocabularies, strict=True):
        here = [record for record in records if record["vocabulary"] == vocabulary]
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in here:
            name = f"ours, {record['items']:,} {record['set']}"
            lines.setdefault(name, []).append((record["rows"], record["ours"]))
            if record["set"] == "uniform" and record["items"] == largest:
                for peer in PEERS_A:
                    if peer in record:
                        lines.setdefault(peer, []).append((record["rows"], record[peer]))
        for name, points in lines.items():
            axis.loglog(*zip(*points, strict=True), marker="o", ls="-" if name.startswith("ours") else "--", label=name)
        axis.set(xlabel="rows", ylabel="µs a step", title=f"{vocabulary:,} tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def installed(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="check on the CPU, measure nothing")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU, check nothing")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--parts", nargs="+", choices=("check", "a", "b"), help="all, on the CPU table A")
    parser.add_argument("--longer", type=int, default=1, metavar="N", help="check N times as many steps")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which nothing has done yet
        checks("cpu", args.longer)
        print("all checks passed")
        return
    if not args.cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here: see --interpret and --cpu")
    bench = Bench("cpu" if args.cpu else "cuda", CPU if args.cpu else QUICK if args.quick else Plan())
    parts = args.parts or (["a"] if args.cpu else ["check", "a", "b"])
    report: Record = {
        "device": torch.cuda.get_device_name() if bench.cuda else "CPU",
        "bytes a second": bench.bandwidth(),
        "launch": bench.launch(),
        "versions": {package: installed(package) for package in ("torch", "triton", "xgrammar", "numba")},
        "A": [],
        "constants": [],
        "B": [],
    }
    print(", ".join([report["device"], *(f"{name} {number}" for name, number in report["versions"].items())]))
    print(f"copies: {report['bytes a second'] / 1e9:,.0f} GB/s; the smallest step: {report['launch']:.2f} µs")
    if not bench.cuda:
        print("Ours is the torch version here, the reference: it pads every row to the widest node of all sets.")
    if bench.xgrammar is None:
        print("xgrammar is not installed: its columns are left out, and the CPU trie's bitmasks are applied in torch")
    for part in parts:
        if part == "check":
            checks(bench.device, args.longer)
        if part == "a":
            table_a(bench, report["bytes a second"], report["A"], report["constants"])
            print("\nA. µs of a step\n", table(report["A"], PEERS_A), sep="\n")
            if bench.cuda:
                print("", bars(report["A"]), "\nOther constants, µs\n", table(report["constants"], ()), sep="\n")
            if args.plot:
                plot(report["A"], args.plot)
        if part == "b":
            table_b(bench, report["B"])
            print("\nB. µs of a step\n", table(report["B"], PEERS_B), sep="\n")
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
