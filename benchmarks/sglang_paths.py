"""Measures the real SGLang engine without a set, on the device path, on the host path, and with regex alternations.

python benchmarks/sglang_paths.py --json docs/benchmarks/sglang_paths.json --plot docs/benchmarks/sglang_paths.png

Run it in SGLang's virtual environment. Every figure comes from an engine of its own: the time to the first token of a
request that brings its items along, first and later, what the scheduler spends on constraints in a step of decoding,
and how many of these steps sample late because they wait for the host. SGLang has no list of choices of its own: the
peers get the items as one regular expression, an alternation. Without a GPU the device path runs in plain torch, its
reference, whose step takes far longer than the kernels'.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
KINDS = ("unconstrained", "device", "host", "xgrammar", "llguidance")
LIMIT = 400  # seconds an engine may take for all its figures
BATCH = 8
ROWS = {
    "first_ms": "time to first token, ms: first request with the items",
    "later_ms": "time to first token, ms: later request with them",
    "step_us": "constraints in a decoding step of one request, µs",
    "batch_us": f"constraints in a decoding step of {BATCH} requests, µs",
    "delayed": "share of decoding steps whose sampling waits for the host",
}
Answer = dict[str, Any]


def environment() -> dict[str, str]:
    import torch

    added = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    paths = [ROOT / "benchmarks" / "sglang_watch"]
    if not torch.cuda.is_available():
        added["SGLANG_USE_CPU_ENGINE"] = "1"
        paths.append(ROOT / "tests" / "sglang" / "cpu")
    return os.environ | added | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def engine(kind: str) -> Any:
    import sglang
    import torch
    from films_data import model_dir

    # The forward pass is common to all: two of the thirty layers hide less of the difference.
    arguments: Answer = {
        "model_path": str(model_dir()),
        "load_format": "dummy",
        "json_model_override_args": '{"num_hidden_layers": 2}',
        "context_length": 256,
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if not torch.cuda.is_available():
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
        arguments |= {"dtype": "float32", "max_total_tokens": 4096, "max_running_requests": BATCH}
    if kind in ("device", "host"):
        arguments |= {"grammar_backend": "static", "item_set_path": kind}
    else:
        arguments["grammar_backend"] = "llguidance" if kind == "llguidance" else "xgrammar"
    return sglang.Engine(**arguments)


def measure(kind: str, count: int, log: Path) -> Answer:
    """All figures of one kind at one size. To be called in a fresh process, whose output goes to `log`."""
    from choice import make_items

    items, tiny = make_items(count), make_items(count + 20)[count:]
    running = engine(kind)

    def asked(texts: list[str], tokens: int) -> Answer:
        params: Answer = {"temperature": 1.0, "max_new_tokens": tokens}
        if kind in ("device", "host"):
            return params | {"choice": texts}
        if kind == "unconstrained":
            return params | {"max_new_tokens": min(tokens, 8), "ignore_eos": True}
        return params | {"regex": "(" + "|".join(map(re.escape, texts)) + ")"}

    def first_token(texts: list[str]) -> float:
        started = time.perf_counter()
        running.generate(prompt="Something that is sold in this shop:", sampling_params=asked(texts, 1))
        return (time.perf_counter() - started) * 1e3

    def steps(requests: int) -> tuple[float, float]:
        """Microseconds of a decoding step, and the share of those that were delayed."""
        begin = log.stat().st_size
        for _ in range(12):
            running.generate(prompt=["In this shop:"] * requests, sampling_params=asked(items, 64))
        time.sleep(0.2)
        lines = re.findall(r"watch decoding=1 delayed=(\d) us=([\d.]+)", log.read_bytes()[begin:].decode())
        return median(float(spent) for _, spent in lines), sum(int(late) for late, _ in lines) / len(lines)

    for texts in (tiny, tiny):
        first_token(texts)
    answer: Answer = {"kind": kind, "items": count, "first_ms": first_token(items)}
    answer["later_ms"] = median(first_token(items) for _ in range(5))
    answer["step_us"], _ = steps(1)
    answer["batch_us"], answer["delayed"] = steps(BATCH)
    running.shutdown()
    return answer


def run(kind: str, count: int) -> Answer | None:
    """`measure` in a fresh process; None where it does not end in time."""
    log = Path(f"/tmp/sglang_paths-{os.getpid()}.log")
    call = [sys.executable, __file__, "--child", kind, str(count), str(log)]
    with log.open("wb") as output:
        child = subprocess.Popen(call, env=environment(), stdout=output, stderr=output, start_new_session=True)
        try:
            child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{kind} with {count:,} items: not done within {LIMIT} s", file=sys.stderr)
            return None
        finally:
            subprocess.run(["pkill", "-9", "-s", str(child.pid)], check=False)
    text = log.read_text(errors="replace")
    log.unlink()
    answers = re.findall(r"^result (\{.*\})$", text, re.MULTILINE)
    if not answers:
        print(f"{kind} with {count:,} items failed:\n{text[-1500:]}", file=sys.stderr)
        return None
    answer: Answer = json.loads(answers[-1])
    print(answer, file=sys.stderr, flush=True)
    return answer


def table(runs: list[Answer]) -> str:
    sizes = sorted({run["items"] for run in runs})
    lines = [f"| | items | {' | '.join(KINDS)} |", "|---|--:|" + "--:|" * len(KINDS)]
    for field, what in ROWS.items():
        for count in sizes:
            found = {
                kind: [run[field] for run in runs if (run["kind"], run["items"]) == (kind, count)] for kind in KINDS
            }
            cells = [f"{median(values):,.2f}" if values else "" for values in found.values()]
            lines.append(f"| {what} | {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: list[Answer], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    fields = ("first_ms", "later_ms", "batch_us")
    for axis, field in zip(figure.subplots(1, len(fields)), fields, strict=True):
        for kind in KINDS:
            points = sorted((run["items"], run[field]) for run in runs if run["kind"] == kind)
            axis.plot([count for count, _ in points], [value for _, value in points], "o-", label=kind)
        axis.set(title=ROWS[field], xlabel="items in the set", xscale="log", yscale="log")
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3, help="engines for each figure, which is their median")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them there")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, count, log = args.child
        print("\nresult", json.dumps(measure(kind, int(count), Path(log))), flush=True)
        return
    runs, hopeless = [], set()
    for count in args.sizes:
        for kind in args.kinds:
            for _ in range(args.repeats if kind not in hopeless else 0):
                answer = run(kind, count)
                if answer is None:
                    hopeless.add(kind)  # and so with more items
                    break
                runs.append(answer)
    print(table(runs))
    if args.json:
        Path(args.json).write_text(json.dumps(runs, indent=1) + "\n")
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
