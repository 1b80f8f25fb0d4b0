"""Checks the kernels and measures a step on a GPU beside xgrammar's bitmask and STATIC.

bash benchmarks/gpu.sh --json docs/benchmarks/gpu.json --plot docs/benchmarks/gpu.png
bash benchmarks/gpu.sh --minutes 10     what fits in ten minutes: the most important parts come first
bash benchmarks/gpu.sh --interpret      the checks alone, on the CPU, through Triton's interpreter
bash benchmarks/gpu.sh --compile        every kernel to machine code for three GPUs, without one; registers and spills
bash benchmarks/gpu.sh --interpret --parts goals micro grid     the measurements at tiny sizes, to try the scripts
bash benchmarks/gpu.sh --first 1        the first half hour with a GPU, in three commands of ten minutes: 1, 2 and 3

The parts, in their order:
goals    the rows for which goals stand, each held against the host path first
quick    a tenth of the checks
copies   sets copied beside running steps, against the host path
lists    rounds of ranked lists; `itemset.adapters.decode_loop` beside masking the vocabulary (`beam.py`)
check    every step of random schedules of requests, compared with a dict trie
a        table A, beside other methods
sanitize some of the checks under compute-sanitizer: memory, races, barriers
micro    wide rows, odd strides, the mask and the sampling together, rounds of lists and draws (`gpu_micro.py`)
grid     ranked lists with Qwen3's shapes (`gpu_grid.py`), which needs transformers
engine   vLLM from carried files (`gpu_engine.py`)
--first 1 is quick, sanitize, goals and micro; 2 is grid; 3 is engine.

Each part runs in a process of its own: one that fails, or hangs, ends no other. The JSON is written after every row.
The exit status is 1 if a part failed or a check did, 2 if something is missing, else 0.

A step is `Slots.step`: each row's last committed token is walked, and its logits are masked. Rows stand at random
items, spread over all levels. On the GPU a CUDA graph holds 24 steps, each with other rows and, up to 4 GiB, other
logits; before each replay all logits are written anew, which evicts what was cached, as a model's forward pass does.
Times are medians over replays, divided by the steps. Needs torch, Triton, NumPy, Numba and PyArrow, no engine and no
installation of this project; xgrammar is optional.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_needs import lacking
from gpu_report import Record, goals
from runner import machine, plot, table, versions

NEEDED = ["torch", "triton", "numpy", "numba", "pyarrow"]
# Minutes that a part may take. None needs half of it: a kernel that hangs must not take the others' time.
PARTS = {"goals": 6.0, "quick": 4.0, "copies": 3.0, "lists": 6.0, "check": 15.0, "a": 40.0}
FIRST: dict[str, dict[str, float]] = {
    "1": {"quick": 1.5, "sanitize": 2.0, "goals": 3.0, "micro": 2.5},
    "2": {"grid": 9.0},
    "3": {"engine": 5.0},
}
PARTS |= {part: minutes for parts in FIRST.values() for part, minutes in parts.items() if part not in PARTS}

Emit = Callable[[str, Any], None]  # what a part has found: the name of a table or of a value, and a row or the value


@dataclass(frozen=True)
class Options:
    """What a part is told. deadline: the second (`time.time`) from which it begins no further row."""

    device: str = "cuda"
    longer: int = 1
    deadline: float = float("inf")
    carried: str = ""


def work(part: str, options: Options, emit: Emit) -> None:
    """One part, in its own process: here torch and Triton are imported."""
    if part == "compile":
        from kernel_costs import kernels_of

        for architecture in (80, 90, 100):
            for name, form in kernels_of(architecture).items():
                emit("kernels", {"sm": architecture, "kernel": name, **form._asdict()})
        return
    if part == "engine":
        import gpu_engine

        gpu_engine.engine(options.carried, emit)
        return
    if part == "sanitize":
        sanitize(emit)
        return
    if part in ("quick", "check"):
        from gpu_checks import checks

        checks(options.device, 0.1 if part == "quick" else options.longer)
        return
    if part == "lists":
        import beam
        from gpu_checks import check_lists

        check_lists(options.device, options.longer)
        if os.environ.get("TRITON_INTERPRET") != "1":
            beam.table(options.device, 21, emit)
        return
    if part == "copies":
        from gpu_checks import copies

        emit("copies", copies(options.device))
        return
    from gpu_steps import Bench, table_a

    bench = Bench(options.device, deadline=options.deadline)
    emit("machine", bench.machine())
    if part == "micro":
        from gpu_micro import micro

        micro(bench, emit)
    elif part == "grid":
        from gpu_grid import grid

        grid(bench, emit)
    else:
        table_a(bench, emit, only_goals=part == "goals")


def sanitize(emit: Emit) -> None:
    """A hundredth of the checks under each tool. Emits its last line, and whether it found nothing."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    checks = "import gpu_checks; gpu_checks.checks('cuda', 0.01)"
    for what in ("memcheck", "racecheck", "synccheck"):
        run = subprocess.run(
            [tool, "--tool", what, "--error-exitcode", "9", sys.executable, "-c", checks],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        last = (run.stdout + run.stderr).strip().splitlines()[-1:]
        emit("sanitize", {"tool": what, "found nothing": run.returncode == 0, "last line": "".join(last)})


def _child(part: str, task: Callable[[str, Options, Emit], None], options: Options, connection: Connection) -> None:
    try:
        task(part, options, lambda name, value: connection.send((name, value)))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}".partition("\n")[0]))
        sys.exit(1)


def run_part(
    part: str, task: Callable[[str, Options, Emit], None], options: Options, minutes: float, found: Emit
) -> str | None:
    """Run a part in a process of its own, and hand on what it finds. Returns why it failed, or None."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(part, task, options, sender))
    process.start()
    sender.close()
    end, failure = time.monotonic() + minutes * 60, None
    try:
        while receiver.poll(max(end - time.monotonic(), 0)):
            name, value = receiver.recv()
            if name == "failed":
                failure = value
            else:
                found(name, value)
        process.kill()
        failure = f"took more than {minutes:.1f} minutes, and was ended"
    except EOFError:
        process.join()
        if process.exitcode and failure is None:
            failure = f"its process ended with status {process.exitcode}"
    process.join()
    return failure


def run_parts(
    parts: Mapping[str, float], task: Callable[[str, Options, Emit], None], options: Options, save: Callable[..., None]
) -> Record:
    """Run the parts one after the other. Returns the report, which `save` is given after every row.

    parts: minutes that each may take. A part whose turn comes after the deadline is noted under `skipped`.
    """
    tables = ("goals", "A", "beam", "kernels", "sanitize", "micro", "grid", "engine", "skipped")
    report: Record = {"machine": {}, "failed": {}, **{name: [] for name in tables}}

    def found(name: str, value: Any) -> None:
        if isinstance(report.get(name), list):
            report[name].append(value)
            print(json.dumps({"table": name} | value), flush=True)
        else:
            report[name] = value
        save(report)

    for part, minutes in parts.items():
        left = (options.deadline - time.time()) / 60
        if left <= 0:
            report["skipped"].append({"part": part})
            continue
        started = time.monotonic()
        print(f"\n== {part}", flush=True)
        if failure := run_part(part, task, options, min(minutes, left + 0.5), found):
            report["failed"][part] = failure
        print(f"== {part}: {failure or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
        if rows := report["goals" if part == "goals" else "A"] if part in ("goals", "a") else []:
            print(f"\nµs of a step\n\n{table(rows)}", flush=True)
        save(report)
    return report


def has_gpu() -> bool:
    if Path("/dev/nvidiactl").exists():  # known in no time
        return True
    import torch

    return bool(torch.cuda.is_available())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="check on the CPU, measure nothing")
    parser.add_argument("--compile", action="store_true", help="compile the kernels, run nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all; with --interpret lists and check")
    parser.add_argument("--first", choices=FIRST, help="one of three commands for a bare machine, ten minutes each")
    parser.add_argument("--carried", metavar="DIRECTORY", default="", help="what `gpu_engine.py` has packed")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin nothing after so many minutes")
    parser.add_argument("--longer", type=int, default=1, metavar="N", help="check N times as many steps")
    parser.add_argument("--json", metavar="FILE", help="written after every row")
    parser.add_argument("--plot", metavar="FILE")
    return parser.parse_args()


def saver(path: str | None) -> Callable[[Record], None]:
    """What writes a report, as `runner.Report` does."""
    command = " ".join(["bash benchmarks/gpu.sh", *sys.argv[1:]])
    about = {"command": command, "machine": machine(), "versions": versions()}

    def save(report: Record) -> None:
        if path:
            kept = {name: about | {"rows": rows} for name, rows in report.items() if rows and isinstance(rows, list)}
            kept["run"] = about | {"rows": [{name: of for name, of in report.items() if not isinstance(of, list)}]}
            temporary = Path(path + ".tmp")
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept, indent=1) + "\n")
            temporary.replace(path)

    return save


def main() -> None:
    args = parsed()
    if missing := lacking(NEEDED):
        print(*missing, sep="\n", file=sys.stderr)
        sys.exit(2)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which only the parts' processes do
    chosen = args.parts or (["lists", "check"] if args.interpret else list(PARTS))
    everything = [part for part in PARTS if part in chosen and (args.parts or part not in ("grid", "engine"))]
    parts = {part: 600.0 if args.interpret else PARTS[part] for part in everything}
    if args.first:
        parts, args.minutes = FIRST[args.first], args.minutes or 9.0
        args.json = args.json or f"gpu_first_{args.first}.json"
    if args.carried and (kernel := Path(args.carried, "xgrammar_kernel.py")).exists():
        os.environ["XGRAMMAR_KERNEL"] = str(kernel.resolve())
    if args.compile:
        parts = {"compile": 60.0}
    elif not args.interpret and not has_gpu():
        print("there is no CUDA GPU here: see --interpret and --compile", file=sys.stderr)
        sys.exit(2)
    options = Options(
        device="cpu" if args.interpret else "cuda",
        longer=args.longer,
        carried=args.carried,
        deadline=time.time() + args.minutes * 60 if args.minutes else float("inf"),
    )
    report = run_parts(parts, work, options, saver(args.json))
    if not args.interpret and not args.compile:
        print(goals(report))
    if args.plot and report["A"]:
        plot(report["A"], Path(args.plot), "rows", "ours", "set")
    for skipped in report["skipped"]:
        print("not run, the time was up:", ", from ".join(skipped.values()))
    for part, why in report["failed"].items():
        print(f"FAILED: {part}: {why}")
    if not report["failed"]:
        print("nothing failed")
    sys.exit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()
