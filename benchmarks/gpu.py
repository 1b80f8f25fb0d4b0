"""Fifteen minutes on a GPU: what is not measured yet, the most valuable first.

python benchmarks/gpu_pack.py                                   here: makes .gpu/, which travels to the machine
bash benchmarks/gpu.sh --seconds 330 --json OUT/gpu_h100.json   there: facts, smoke, the engine, mask cells
bash benchmarks/gpu.sh --seconds 240 --json OUT/gpu_h100_2.json what is left: `--done FILE` names earlier results
bash benchmarks/gpu.sh --again engine --seconds 240             one step, whether or not it has been measured
python benchmarks/gpu_pack_sglang.py                            here: makes .gpu-sglang/, for step `sglang` alone
bash benchmarks/gpu.sh --only facts sglang_unpack sglang        there: SGLang, in some four minutes

A machine needs Python, torch, Triton, transformers, NumPy, Numba and PyArrow, and no network; steps `engine`, `fp8`,
`windows`, `states` and the peers of `cells` also need .gpu/, `sglang` needs .gpu-sglang/. A step is done if a file of
docs/benchmarks/gpu*.json, or of --done, has rows of it by the same kernels. Each step is a process group with its own
limit, and is ended as one. Each row is written, and synced, at once: into FILE, and as a line into FILE with the ending
.jsonl; what steps say goes into .log. A number that differs, or an error, is a row. The exit status is 1 if a step
failed or found a difference, 2 without a GPU.

--interpret runs smoke, cells and rounds at tiny sizes on a CPU, in Triton's interpreter, to try the program itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu_engine import CACHE, HOME, ROOT, TRITON_CACHE, environment, extract

Row = dict[str, Any]
BENCHMARKS = Path(__file__).resolve().parent
PACK, SGLANG_PACK = ROOT / ".gpu", ROOT / ".gpu-sglang"
SGLANG_HOME = f"{HOME}_sglang"
LIMITS = {  # seconds of each step, the most valuable first: together less than fourteen minutes
    "facts": 20, "smoke": 45, "unpack": 80, "engine": 175, "fp8": 120, "cells": 50, "rounds": 40, "large": 40,
    "sampled": 25, "checks": 120, "memcheck": 50, "initcheck": 40, "ncu": 30,
}  # fmt: skip
LATER = {"windows": 120, "states": 150}  # of another call: all together take longer than a machine is there
SGLANG = {"sglang_unpack": 80, "sglang": 200}  # of a call of their own, that carries the other pack
LIMITS |= LATER | SGLANG
ENGINES = {"engine": "measure", "fp8": "measure_fp8", "windows": "measure_windows", "states": "measure_states"}
NEEDS_PACK = ("smoke", "unpack", *ENGINES, "memcheck", "initcheck")
INTERPRETED = ("smoke", "cells", "rounds")
STARTED = 5  # seconds that a step is given beyond what is left
NCU = "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,launch__registers_per_thread"
OURS = "regex:^(_walk|_mask|log_sums|ended|candidates|select|follow|merge)_kernel"


def command_of(step: str) -> list[str]:
    """Return what runs a step."""
    python, golden = sys.executable, str(PACK / "golden.pt")
    if step == "unpack":
        return [python, str(BENCHMARKS / "gpu_engine.py"), "unpack", str(PACK)]
    if step in ENGINES:
        return [python, str(BENCHMARKS / "gpu_engine.py"), ENGINES[step]]
    if step in SGLANG:
        what = ["measure"] if step == "sglang" else ["unpack", str(SGLANG_PACK)]
        return [python, str(BENCHMARKS / "gpu_sglang.py"), *what]
    steps = [python, str(BENCHMARKS / "gpu_tasks.py")]
    if step in ("memcheck", "initcheck"):
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        return [tool, "--tool", step, "--error-exitcode", "9", *steps, "golden", golden]
    if step == "ncu":
        tool = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
        kept = ["--clock-control", "none", "--metrics", NCU, "--kernel-name", OURS]
        return [tool, "--csv", *kept, *steps, "launches"]
    return [*steps, step, golden]


@dataclass
class Results:
    """Rows as they come, in a file that is whole at any time."""

    path: Path
    about: Row
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: IO[str] = self.path.with_suffix(".jsonl").open("a")
        self.log: IO[str] = self.path.with_suffix(".log").open("a")

    def add(self, step: str, row: Row) -> None:
        self.rows.append({"step": step, **row})
        line = json.dumps(self.rows[-1])
        print(line, flush=True)
        print(line, file=self._lines, flush=True)
        os.fsync(self._lines.fileno())
        if step == "facts":
            self.about |= {name: row[name] for name in ("machine", "versions") if name in row}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"gpu": self.about | {"rows": self.rows}}, indent=1) + "\n")
        new.replace(self.path)


def kernels_digest() -> str:
    """Return a digest of all that runs on a device: results of other kernels are others."""
    found = hashlib.sha256()
    for folder in ("itemset/masking", "itemset/ranking", "vllm_static/worker"):
        for path in sorted((ROOT / folder).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def steps_done(files: Sequence[Path], kernels: str) -> set[str]:
    """Return the steps that these results have whole, by the same kernels."""
    done = set[str]()
    for path in files:
        with contextlib.suppress(OSError, ValueError, KeyError):
            results = json.loads(path.read_text())["gpu"]
            if results["kernels"] == kernels:
                failed = {row["step"] for row in results["rows"] if "failed" in row}
                done |= {row["step"] for row in results["rows"] if row.get("seconds of step") is not None} - failed
    return done


class Step:
    """A process group, and the rows that it prints."""

    def __init__(self, name: str, results: Results, given: dict[str, str]) -> None:
        self.name, self._results, self.began = name, results, time.monotonic()
        if name in SGLANG:  # in a folder of its own, without vLLM's packages
            given = os.environ | {"STATIC_GPU_HOME": SGLANG_HOME}
        self._process = subprocess.Popen(
            command_of(name), stdout=subprocess.PIPE, stderr=results.log, text=True, start_new_session=True, env=given
        )

    def finish(self, seconds: float) -> Iterator[Row]:
        """Yield its rows until it ends, or this many seconds after its beginning, and end all that it has started."""
        ends = self.began + seconds
        timer = subprocess.Popen([sys.executable, "-c", _ENDS, str(self._process.pid), str(ends - time.monotonic())])
        table: list[str] = []
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                elif line.startswith('"'):
                    table.append(line)
                else:
                    print(line, end="", file=self._results.log, flush=True)
            code = self._process.wait()
        finally:
            timer.kill()
            timer.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        yield from _of_csv(table)
        took = time.monotonic() - self.began
        if took >= seconds:
            yield {"failed": f"not done in {seconds:.0f} s, and ended"}
        elif code:
            yield {"failed": f"ended with status {code}: {self._said()}"}
        yield {"seconds of step": round(took, 1)}

    def _said(self) -> str:
        self._results.log.flush()
        lines = Path(self._results.log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "nothing was said"


_ENDS = """
import os, signal, sys, time
time.sleep(max(0.0, float(sys.argv[2])))
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


def _of_csv(lines: list[str]) -> Iterator[Row]:
    """The rows of a profiler's table."""
    import csv

    by_launch: dict[str, Row] = {}
    for one in csv.DictReader(lines):
        row = by_launch.setdefault(one["ID"], {"kernel": one["Kernel Name"], "grid": one["Grid Size"]})
        row[f"{one['Metric Name']}, {one['Metric Unit']}"] = one["Metric Value"]
    yield from by_launch.values()


def run(names: Sequence[str], results: Results, seconds: float, given: dict[str, str]) -> bool:
    """Run steps one after the other, as far as the time reaches; only unpacking runs beside others."""
    ends, ok = time.monotonic() + seconds, True
    beside = Step("unpack", results, given) if "unpack" in names else None
    for name in [name for name in names if name != "unpack"]:
        if beside is not None and name in ENGINES:
            ok &= _collect(beside, results, LIMITS["unpack"])
            beside = None
        left = ends - time.monotonic()
        if left < LIMITS[name] - STARTED:
            results.add(name, {"skipped": f"{left:.0f} s are left, and it may take {LIMITS[name]}"})
            continue
        ok &= _collect(Step(name, results, given), results, LIMITS[name])
    if beside is not None:
        ok &= _collect(beside, results, LIMITS["unpack"])
    return ok


def _collect(step: Step, results: Results, limit: float) -> bool:
    ok = True
    for row in step.finish(limit):
        ok &= "failed" not in row and row.get("ok", True)
        results.add(step.name, row)
    return ok


def commit() -> str:
    """Return the pack's commit, or this checkout's if there is no pack: where both are, git's may be an older one."""
    for pack in (PACK, SGLANG_PACK):
        if (packed := pack / "commit").exists():
            return packed.read_text().strip()
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=690.0, help="begin no step that could end later")
    parser.add_argument("--only", nargs="+", choices=LIMITS, metavar="STEP", help=" ".join(LIMITS))
    parser.add_argument("--again", nargs="+", choices=LIMITS, metavar="STEP", help="these, also if they are done")
    parser.add_argument("--done", nargs="+", type=Path, default=[], metavar="FILE", help="earlier results")
    parser.add_argument("--interpret", action="store_true", help="try the program on a CPU")
    where = Path(os.environ.get("OUT", ROOT / "docs" / "benchmarks")) / "gpu.json"
    parser.add_argument("--json", type=Path, default=where, metavar="FILE", help="default: in $OUT or docs/benchmarks")
    return parser.parse_args()


def chosen(args: argparse.Namespace, kernels: str) -> list[str]:
    """Return the steps to run, in their order."""
    every = args.only or (INTERPRETED if args.interpret else tuple(LIMITS))
    done = steps_done([*sorted((ROOT / "docs" / "benchmarks").glob("gpu*.json")), *args.done], kernels)
    wanted = set(args.again or (name for name in every if name not in done))
    wanted |= set() if args.interpret else {"facts"}
    if wanted & ENGINES.keys() and not (Path(environment()["TRITON_CACHE_DIR"]).parent / "site").exists():
        wanted.add("unpack")
    if "sglang" in wanted and not Path(SGLANG_HOME, "site").exists():
        wanted.add("sglang_unpack")
    lacking = set() if PACK.exists() or args.interpret else set(NEEDS_PACK)
    lacking |= set() if SGLANG_PACK.exists() else set(SGLANG)
    return [name for name in LIMITS if name in wanted - lacking]


def main() -> None:
    args, kernels = parsed(), kernels_digest()
    given = environment()
    if args.interpret:
        given |= {"TRITON_INTERPRET": "1"}
    elif not Path("/dev/nvidiactl").exists() and "PRETENDED_LIBCUDA" not in os.environ:
        print("there is no NVIDIA GPU here (no /dev/nvidiactl): see --interpret", file=sys.stderr)
        sys.exit(2)
    if not args.interpret and not PACK.exists():
        print("no .gpu/ here: smoke and engine are omitted. python benchmarks/gpu_pack.py makes it", file=sys.stderr)
    elif not args.interpret and not TRITON_CACHE.exists():
        extract(PACK / CACHE, HOME)
    about = {"command": " ".join(["bash benchmarks/gpu.sh", *sys.argv[1:]]), "commit": commit(), "kernels": kernels}
    about |= {"date": time.strftime("%Y-%m-%d"), "machine": "unknown", "versions": {}}
    results = Results(args.json, about)
    ok = run(chosen(args, kernels), results, args.seconds, given)
    print("nothing failed" if ok else "something failed, or differs: see the rows", file=sys.stderr)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
