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
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

LIMIT, PATIENCE = 300, 60  # seconds a process may take, and those of them it waits for other processes to rest
CALM, TRIES = 0.1, 4  # cores that others may use while a process measures; else up to so many, and the calmest counts
ENVIRONMENT = """HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR VLLM_ENABLE_V1_MULTIPROCESSING=0
VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"""

BATCHES, STEPS = (64, 256), 100
WAYS = {  # what a batch's fields begin with, and what to call it
    "vllm": "in vLLM",
    "batched": "BatchGrammarMatcher",
}
TTFT, STEP = "time to first token, ms", "one step of masking, µs"
ROWS = {  # where it stands in the results, and what to call it
    "first_ms": (TTFT, "first request with the set"),
    "later_ms": (TTFT, "later request with it"),
    "unconstrained_ms": (TTFT, "without a set"),
    "step_us": (STEP, "median"),
    "step_p99_us": (STEP, "99th percentile"),
    "peak_mib": ("memory that the set adds, MiB", "peak"),
}
PHASES = {
    "itemset.serving.inline:encode": "encoding the texts (tokenizer)",
    "itemset.serving.inline:build": "building the index",
    "itemset.item_set:ItemSet.to_bytes": "transport: index to bytes and back",
    "itemset.serving.catalogue:from_bytes": "transport: index to bytes and back",
    "vllm_static.front:FrontEnd.find": "digest of the texts, checks",
    "vllm_static.front:FrontEnd.attach": "digest of the texts, checks",
    "vllm.entrypoints.llm:LLM.generate": "the rest: vLLM and its forward pass",
}
KINDS = """amber antique bright classic compact copper cotton dark double elegant folding gentle golden granite green
heavy indoor large light linen little long marble metal modern mossy narrow natural oak old outdoor pale plain polished
portable quiet red rough round rustic short silver simple slim small smooth soft solid steel tall wide wooden"""
THINGS = """apron bag basket bell bench blanket boot bottle bowl box brush bucket button camera candle chair clock coat
cup curtain desk drum fan fork frame glove hammer hat jacket jar kettle key knife ladder lamp mirror mug notebook pan
pen pillow pipe plate radio ribbon ring rope rug scarf shelf shirt shoe spoon stool table tent towel toy"""
PLACES = "attic balcony bathroom bedroom boat cabin car cellar garage garden hall kitchen office porch school"
PATTERNS = ["{0} {2}", "{0} {1} {2}", "{0} {2} for the {3}", "{2} and {4}", "{0} {2} {5}", "{0} {1} {2} set"]


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


def batch_times(manager: Any, make: Callable[[], Any], items: list[list[int]], size: int) -> dict[str, float]:
    """Microseconds a row of filling a batch's bitmask and of accepting its tokens, medians over the steps.

    In vLLM: as its scheduler calls it for `size` requests, each at a place of its own in an item. Every other step of
    xgrammar's goes through its own batched calls instead.
    """
    import xgrammar
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

    rng, params = random.Random(size), SamplingParams(structured_outputs=StructuredOutputsParams(choice=["any"]))
    requests = {str(i): Request(str(i), [0], params, None) for i in range(size)}
    grammars, rest = [make() for _ in requests], [list[int]() for _ in requests]
    for request, grammar in zip(requests.values(), grammars, strict=True):
        request.structured_output_request.grammar = grammar
    for grammar, tokens in zip(grammars, rest, strict=True):
        tokens[:] = rng.choice(items)
        start = rng.randrange(len(tokens))
        grammar.accept_tokens("", tokens[:start])
        del tokens[:start]
    matchers = [grammar.matcher for grammar in grammars] if hasattr(grammars[0], "matcher") else []
    batched, bitmask = xgrammar.BatchGrammarMatcher(), manager.backend.allocate_token_bitmask(size)
    spent: dict[str, list[float]] = {f"{way}_{what}_{size}": [] for way in WAYS for what in ("fill", "accept")}
    for step in range(STEPS):
        tokens = [row.pop(0) for row in rest]
        start = time.perf_counter_ns()
        if step % 2 and matchers:
            way = "batched"
            batched.batch_fill_next_token_bitmask(matchers, bitmask)
            middle = time.perf_counter_ns()
            accepted = batched.batch_accept_token(matchers, tokens)
        else:
            way = "vllm"
            manager.grammar_bitmask(requests, list(requests), {})
            middle = time.perf_counter_ns()
            accepted = [
                manager.accept_tokens(request, [token])
                for request, token in zip(requests.values(), tokens, strict=True)
            ]
        end = time.perf_counter_ns()
        spent[f"{way}_fill_{size}"].append((middle - start) / 1e3 / size)
        spent[f"{way}_accept_{size}"].append((end - middle) / 1e3 / size)
        if not all(accepted):
            sys.exit("a grammar refused an item of its own set")
        for grammar, row in zip(grammars, rest, strict=True):
            if not row:
                grammar.reset()
                row[:] = rng.choice(items)
    return {field: median(times) for field, times in spent.items() if times}


def memory(field: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM, the highest it was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def others(since: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """Seconds of processor time that other processes have used, and seconds on the clock, since an earlier answer."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:2]) - since[0], time.perf_counter() - since[1]


def measure(backend: str, count: int, model: str) -> dict[str, Any]:
    """All figures of one backend at one size. To be called in a fresh process."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from itemset.serving import hooks

    items, tiny = make_items(count), make_items(count + 20)[count:]
    # The forward pass is common to both: two of the thirty layers hide less of the difference.
    engine: dict[str, Any] = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}, "dtype": "bfloat16"}
    engine |= {"enforce_eager": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": 32 << 20}
    engine |= {"max_model_len": 256, "max_num_seqs": max(BATCHES), "structured_outputs_config": {"backend": backend}}
    llm = LLM(model, **engine)

    def first_token(choice: list[str] | None) -> float:
        structured = None if choice is None else StructuredOutputsParams(choice=list(choice))
        params = SamplingParams(max_tokens=1, temperature=0.0, structured_outputs=structured)
        start = time.perf_counter()
        llm.generate(["Something that is sold in this shop:"], params, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    made: list[Callable[[], Any]] = []  # what makes a grammar as the engine's last one

    def compile_grammar(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
        made[:] = [partial(original, backend, *args, **kwargs)]
        return made[0]()

    for module in ("vllm_static.backend:Static", "vllm.v1.structured_output.backend_xgrammar:Xgrammar"):
        hooks.wrap(f"{module}Backend.compile_grammar", compile_grammar)
    spent: dict[str, float] = {}
    for hook, phase in PHASES.items():
        hooks.wrap(hook, partial(timed, spent, phase))
    for _ in range(PATIENCE):
        since = others()
        time.sleep(1)
        if others(since)[0] <= CALM:
            break
    for choice in (None, tiny, tiny, None):
        first_token(choice)
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
    manager = llm.llm_engine.engine_core.engine_core.structured_output_manager
    steps = step_times(made[0](), manager.backend.allocate_token_bitmask(1), tokens)
    result |= {"step_us": median(steps), "step_p99_us": quantiles(steps, n=100)[98], "steps": len(steps)}
    for size in BATCHES:
        result |= batch_times(manager, made[0], tokens, size)
    used, seconds = others(since)
    return {**result, "others": used / seconds}


def run(backend: str, count: int, model: str) -> dict[str, Any]:
    """`measure` in a fresh process, again while others disturb it."""
    results: list[dict[str, Any]] = []
    environment = os.environ | dict(pair.split("=") for pair in ENVIRONMENT.split())
    call = [sys.executable, __file__, "--child", backend, str(count), model]
    while len(results) < TRIES and not (results and results[-1]["others"] <= CALM):
        child = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=LIMIT)
        if child.returncode:
            sys.exit(f"{backend} with {count:,} items failed:\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}")
        results.append(json.loads(child.stdout.splitlines()[-1]))
        print("{backend} {items}: {first_ms:.0f} ms, others {others:.2f} cores".format(**results[-1]), file=sys.stderr)
    return min(results, key=lambda result: float(result["others"]))


def middles(report: dict[str, Any], backend: str, field: str) -> dict[int, float]:
    """The median of a figure over the runs, by the size of the set."""
    runs = [run | run["phases_ms"] for run in report["runs"] if run["backend"] == backend]
    sizes = sorted({run["items"] for run in runs})
    return {count: median(run.get(field, 0.0) for run in runs if run["items"] == count) for count in sizes}


def tables(report: dict[str, Any]) -> str:
    """What was measured, and where a first request with an inline set spends its time, in Markdown."""
    lines = ["| | items | static | xgrammar | xgrammar / static |", "|---|--:|--:|--:|--:|"]
    for field, (what, which) in ROWS.items():
        theirs = middles(report, "xgrammar", field)
        for count, ours in middles(report, "static", field).items():
            cells = f"{theirs[count]:,.1f} | {theirs[count] / ours:,.2f}" if count in theirs else "|"
            lines.append(f"| {what}: {which} | {count:,} | {ours:,.1f} | {cells} |")
    columns = [("static", "vllm"), ("xgrammar", "vllm"), ("xgrammar", "batched")]
    heads = [f"{backend} {WAYS[way]}, batch {size}" for backend, way in columns for size in BATCHES]
    lines += ["", f"| µs a row | items | {' | '.join(heads)} |", "|---|--:|" + "--:|" * len(heads)]
    for what, called in (("fill", "filling the bitmask"), ("accept", "accepting the tokens")):
        for count in middles(report, "static", "first_ms"):
            values = [middles(report, b, f"{way}_{what}_{size}").get(count) for b, way in columns for size in BATCHES]
            cells = " | ".join("" if value is None else f"{value:,.2f}" for value in values)
            lines.append(f"| {called} | {count:,} | {cells} |")
    sizes = middles(report, "static", "first_ms")
    lines += ["", f"| static, first request, ms | {' | '.join(f'{count:,} items' for count in sizes)} |"]
    lines.append("|---|" + "--:|" * len(sizes))
    for phase in dict.fromkeys(PHASES.values()):
        spent = middles(report, "static", phase).values()
        lines.append(f"| {phase} | {' | '.join(f'{value:,.1f}' for value in spent)} |")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: str) -> None:
    """Draw times and memory over the size of the set."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(what for what, _ in ROWS.values()))
    figure = Figure(figsize=(13, 4), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        fields = {field: which for field, (what, which) in ROWS.items() if what == panel}
        for backend, colour in (("static", "#0b6e99"), ("xgrammar", "#c8553d")):
            for (field, which), style in zip(fields.items(), ("o-", "o--", ":"), strict=False):
                points = middles(report, backend, field)
                axis.plot(list(points), list(points.values()), style, color=colour, label=f"{backend}, {which}")
        axis.set(title=panel, xlabel="items in the set", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10000, 100000], help="xgrammar to 10000")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each figure, which is their median")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them there")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], int(args.child[1]), args.child[2])))
        return
    model = str(runpy.run_path(str(Path(__file__).parents[1] / "examples/films_data.py"))["model_dir"]())
    backends = {count: ("static", "xgrammar") if count <= 10_000 else ("static",) for count in args.sizes}
    report = {
        "processors": re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()),
        "versions": {package: version(package) for package in ("vllm-cpu", "xgrammar", "torch", "tokenizers", "numba")},
        "runs": [run(b, n, model) for _ in range(args.repeats) for n, both in backends.items() for b in both],
    }
    print(tables(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()
