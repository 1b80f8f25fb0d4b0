"""The steps of `gpu.py` that need no engine, each in a process of its own: python benchmarks/gpu_tasks.py STEP GOLDEN

A row is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CUDA = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if CUDA else "cpu"
CALLS_SECONDS = 35  # of the golden calls: what is left then is skipped
CHECKS_SECONDS = 30  # of each kind of random checks: what has begun is ended
SAMPLED, ROWS = 10_000_000, 512  # tokens, and rows of a step


def emit(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def facts(golden: Path) -> None:
    """Card, versions, how fast it copies and launches."""
    from gpu_steps import STEPS, Bench

    emit({"machine": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__, **_versions()}})
    bench = Bench(DEVICE)
    source, target = bench.logits.chunk(2)
    seconds = bench.step([lambda: target.copy_(source)]) / 1e6
    number = bench.logits[:1]
    launch = bench.step([lambda: number.add_(1)] * STEPS)
    emit({"copied, GB/s": 2 * source.nbytes / seconds / 1e9, "smallest step of a graph, us": launch})


def _versions() -> dict[str, str]:
    import numba
    import triton

    return {"triton": triton.__version__, "numba": numba.__version__, "cuda": str(torch.version.cuda)}


def smoke(golden: Path) -> None:
    """Every kernel against what Numba gives: eager, and as a replayed graph."""
    from gpu_golden import replay

    ends = time.monotonic() + CALLS_SECONDS
    replay(golden, DEVICE, emit, graph=CUDA, late=lambda: time.monotonic() > ends)


def golden(golden: Path) -> None:
    """The same once, under a tool that watches each access: a tenth of the calls."""
    from gpu_golden import replay

    replay(golden, DEVICE, emit, graph=False, every=10)


def cells(golden: Path) -> None:
    from gpu_steps import CELLS, SMALL, Bench, table

    table(Bench(DEVICE), CELLS if CUDA else SMALL, emit, peers=True)


def large(golden: Path) -> None:
    from gpu_steps import LARGE, Bench, table

    table(Bench(DEVICE), LARGE, emit, peers=False)


def rounds(golden: Path) -> None:
    import gpu_micro
    from gpu_steps import Bench

    if not CUDA:  # interpreted, a row of a model's vocabulary takes a second
        gpu_micro.VOCABULARY, gpu_micro.ITEMS = 4_000, 2_000
    gpu_micro.micro(Bench(DEVICE), emit)


def sampled(golden: Path) -> None:
    """Decode items with random logits, and look all of them up: how many are in no set."""
    from gpu_peers import LENGTH, STOP, loaded, slots_of, uniform

    import itemset
    from itemset.masking.batch import Batch

    item_set = itemset.build(uniform(1_000_000, 2_048))
    arena, number = loaded(item_set, DEVICE)
    slots, ids = slots_of(arena, ROWS), torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    marks = torch.full_like(slots.marks[:ROWS], -1)
    marks[:, 1] = STOP
    history = torch.zeros(ROWS, LENGTH, dtype=torch.int32, device=DEVICE)
    logits, found = torch.empty(ROWS, 2_048, dtype=torch.bfloat16, device=DEVICE), list[Any]()
    for _ in range(SAMPLED // (ROWS * LENGTH) + 1):
        slots.assign(ids, torch.full_like(ids, number), marks)
        for taken in range(LENGTH):
            logits.normal_()
            begin, end = torch.zeros_like(ids), torch.full_like(ids, taken)
            slots.step(Batch(ids, history, begin=begin, end=end), logits)
            history[:, taken] = logits.argmax(1).int()
        found.append(history.clone())
    items = torch.cat(found).cpu().numpy()
    illegal = int((item_set.lookup(items) < 0).sum())
    emit({"tokens": int(items.size), "items": len(items), "illegal": illegal, "ok": illegal == 0})


def checks(golden: Path) -> None:
    """Random schedules of requests against a dict trie, sets copied beside running steps, and rounds of lists."""
    import gpu_checks

    def until(seconds: float) -> Callable[[], bool]:
        ends = time.monotonic() + seconds
        return lambda: time.monotonic() > ends

    works: dict[str, Any] = {
        "log-sum-exp, less float64's": lambda: gpu_checks.check_sums(DEVICE),
        "copies beside steps": lambda: gpu_checks.copies(DEVICE),
        "schedules": lambda: gpu_checks.checks(DEVICE, 0.05, until(CHECKS_SECONDS)),
        "rounds of lists": lambda: gpu_checks.check_lists(DEVICE, 0.1, until(CHECKS_SECONDS)),
    }
    for what, work in works.items():
        began = time.monotonic()
        try:
            emit({"checked": what, "ok": True, **(work() or {}), "seconds": round(time.monotonic() - began, 1)})
        except Exception as error:  # a row: what comes after it is checked all the same
            emit({"checked": what, "ok": False, "failed": f"{type(error).__name__}: {error}"[:300]})


def launches(golden: Path) -> None:
    """A few launches of each kernel at an engine's sizes, for a profiler."""
    from gpu_micro import codes, rounds
    from gpu_peers import loaded, slots_of

    import itemset
    from itemset.masking.batch import Batch
    from itemset.ranking.beams import Beams

    item_set = itemset.build(codes(2_048))
    arena, number = loaded(item_set, DEVICE)
    slots, ids = slots_of(arena, ROWS), torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    slots.assign(ids, torch.full_like(ids, number), torch.full_like(slots.marks[:ROWS], -1))
    history = torch.zeros(ROWS, 8, dtype=torch.int32, device=DEVICE)
    batch = Batch(ids, history, begin=torch.zeros_like(ids), end=torch.zeros_like(ids))
    for vocabulary in (2_048, 151_936):
        logits = torch.randn(ROWS, vocabulary, device=DEVICE).bfloat16()
        for _ in range(2):
            slots.step(batch, logits)
    logits = torch.randn(1, 256, 151_936, device=DEVICE).bfloat16()
    options: dict[str, Any] = {"width": 256, "k": 256, "stepwise": True, "kernels": "triton", "end_token": None}
    rounds(lambda: Beams(arena, [number], item_set.level_plan, **options), logits)()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    globals()[sys.argv[1]](Path(sys.argv[2]) if len(sys.argv) > 2 else Path())
