"""Measures item sets inside JSON answers against xgrammar's own enum, and against xgrammar with any string there.

Every figure comes from a fresh process with one way and one size. All ways get the same answers in the same tokens.
No engine runs: what is timed is what an engine's scheduler calls, a step being one bitmask and one accepted token.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
import torch
import xgrammar
from choice import make_items, memory

import itemset
from itemset.inside.composite import Composite
from itemset.inside.holes import Hole, Items
from itemset.inside.holes import warm_up as warm_up_holes
from itemset.inside.marks import Marker
from itemset.inside.vocabulary import Vocabulary
from itemset.masking.host import warm_up
from itemset.text import escaped, load_tokenizer

ENUM_LIMIT = 10_000  # items; with 100,000 xgrammar takes minutes
REPEATS = 5  # of the same answers; a step's time is the least of them, for other processes disturb some
WAYS = ("static", "enum", "string")
SET = {"type": "string", "item_set": "films"}
REASONS = ["It is quiet, and it ends well.", "Everyone I know liked it.", "A good one for a rainy day."]
SHAPES: dict[str, dict[str, Any]] = {
    "a field": {
        "type": "object",
        "properties": {"film": SET, "reason": {"type": "string"}},
        "required": ["film", "reason"],
        "additionalProperties": False,
    },
    "five": {"type": "array", "items": SET, "minItems": 5, "maxItems": 5},
    "five distinct": {"type": "array", "items": SET, "uniqueItems": True, "minItems": 5, "maxItems": 5},
}


def titles(count: int) -> list[str]:
    """Different titles with years, such as "Folding oak chair (1987)"."""
    names = make_items(min(count, 50_000))
    return [f"{name} ({1950 + year})" for year in range(-(-count // len(names))) for name in names][:count]


def replaced(node: Any, value: dict[str, Any]) -> Any:
    """The schema with another one for the set's."""
    if node == SET:
        return value
    if isinstance(node, dict):
        return {key: replaced(one, value) for key, one in node.items() if key != "uniqueItems"}
    return [replaced(one, value) for one in node] if isinstance(node, list) else node


class Static:
    """Our grammars. A registered set is open before requests come."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any, items: list[str]) -> None:
        """vocabulary: a process has one."""
        self.vocabulary, start = vocabulary, time.perf_counter()
        self.films = itemset.build_text(items, tokenizer, escape="json")
        self.build_ms = (time.perf_counter() - start) * 1e3
        self.items = Items(self.films)

    def compile(self, shape: str) -> Callable[[], Any]:
        marked = Marker(lambda _: len(self.films)).schema(SHAPES[shape], any_whitespace=False)
        assert marked is not None
        grammar = self.vocabulary.compile(marked.ebnf(self.vocabulary.first))
        holes = [
            Hole(self.items, self.vocabulary.bridges(closers), place.group, place.begins)
            for place, closers in zip(marked.holes, marked.closers(), strict=True)
        ]
        return lambda: Composite(self.vocabulary, grammar, holes)

    @staticmethod
    def step(grammar: Any, token: int, row: np.ndarray, _: torch.Tensor) -> bool:
        grammar.fill_bitmask(row)
        return bool(grammar.accept(token))


class Plain:
    """xgrammar's, with an enum of all items or with any string."""

    def __init__(self, info: Any, value: dict[str, Any]) -> None:
        self.compiler, self.value = xgrammar.GrammarCompiler(info, max_threads=2), value

    def compile(self, shape: str) -> Callable[[], Any]:
        schema = json.dumps(replaced(SHAPES[shape], self.value))
        grammar = self.compiler.compile_json_schema(schema, any_whitespace=False)
        return lambda: xgrammar.GrammarMatcher(grammar)

    @staticmethod
    def step(grammar: Any, token: int, _: np.ndarray, mask: torch.Tensor) -> bool:
        grammar.fill_next_token_bitmask(mask)
        return bool(grammar.accept_token(token))


def answers(shape: str, count: int, items: list[str], tokenizer: Any) -> list[list[int]]:
    """Answers in the tokens that a model would most likely take, but for those over an opening or closing quote."""
    rng, found = random.Random(count), []

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    for _ in range(count):
        if shape == "a field":
            reason = f'", "reason": "{rng.choice(REASONS)}"}}'
            parts = ['{"film": "', escaped(rng.choice(items), "json"), reason]
        else:
            five = [escaped(text, "json") for text in rng.sample(items, 5)]
            parts = ['["', *(part for text in five for part in (text, '", "'))]
            parts[-1] = '"]'
        found.append([token for part in parts for token in tokens(part)])
    return found


def measure(way: str, count: int, shape: str, samples: int, model: str) -> dict[str, Any]:
    """All figures of one way at one size. To be called in a fresh process."""
    torch.set_num_threads(1)
    warm_up()
    warm_up_holes()
    tokenizer, items = load_tokenizer(model), titles(count)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    row, mask = np.zeros(-(-info.vocab_size // 32), np.int32), xgrammar.allocate_token_bitmask(1, info.vocab_size)
    vocabulary = Vocabulary(info)
    texts = answers(shape, samples, items, tokenizer)

    def first_mask(ways: Any) -> tuple[float, Callable[[], Any]]:
        start = time.perf_counter()
        make = ways.compile(shape)
        grammar = make()
        for token in texts[0][:6]:
            ways.step(grammar, token, row, mask)
        return (time.perf_counter() - start) * 1e3, make

    def of(way: str, items: list[str]) -> Any:
        if way == "static":
            return Static(vocabulary, tokenizer, items)
        return Plain(info, {"enum": items} if way == "enum" else {"type": "string"})

    first_mask(of(way, titles(20)))  # what is loaded once a process
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    ways = of(way, items)
    first_ms, make = first_mask(ways)
    result = {"way": way, "items": count, "shape": shape, "first_ms": first_ms, "peak_mib": memory("VmHWM") - before}
    result["build_ms"] = getattr(ways, "build_ms", 0.0)
    if way == "static":
        result["index_mib"] = ways.films.nbytes / 2**20
    gc.collect()
    gc.disable()
    step, runs = ways.step, list[list[float]]()
    for _ in range(1 + REPEATS):
        times = []
        for tokens in texts:
            grammar = make()
            for token in tokens:
                start = time.perf_counter_ns()
                taken = step(grammar, token, row, mask)
                times.append((time.perf_counter_ns() - start) / 1e3)
                if not taken:
                    sys.exit(f"{way} refused a token of {tokenizer.decode(tokens)}")
        runs.append(times)
    least = [min(one) for one in zip(*runs[1:], strict=True)]
    return result | {
        "steps": len(least),
        "mean_us": mean(least),
        "p99_us": quantiles(least, n=100)[98],
        "worst_us": max(least),
        "once_p99_us": quantiles(runs[0], n=100)[98],
        "once_worst_us": max(runs[0]),
    }


def run(*arguments: str) -> dict[str, Any]:
    child = subprocess.run([sys.executable, __file__, "--child", *arguments], capture_output=True, text=True)
    if child.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    print("{way} {items} {shape}: {first_ms:.1f} ms, {mean_us:.1f} us".format(**result), file=sys.stderr)
    return result


def middle(report: dict[str, Any], way: str, count: int, shape: str, field: str) -> float | None:
    found = [r[field] for r in report["runs"] if (r["way"], r["items"], r["shape"]) == (way, count, shape)]
    return median(found) if found else None


FIELDS = {
    "first_ms": "from the schema to the first masks, ms",
    "build_ms": "building the set of texts before, ms",
    "peak_mib": "memory that it adds, MiB, at its peak",
    "mean_us": "a step, µs: mean",
    "p99_us": "a step, µs: 99th percentile",
    "worst_us": "a step, µs: worst",
    "once_p99_us": "the first time, µs: 99th percentile",
    "once_worst_us": "the first time, µs: worst",
}


def tables(report: dict[str, Any]) -> str:
    """What was measured, in Markdown. The first figures are those of all that xgrammar and we do to begin with."""
    lines = ["| | shape | items | static | enum | any string | enum / static | static / any string |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    for shape in dict.fromkeys(run["shape"] for run in report["runs"]):
        for field, called in FIELDS.items():
            for count in sorted({run["items"] for run in report["runs"]}):
                ours, theirs, plain = (middle(report, way, count, shape, field) for way in WAYS)
                if ours is None or (field == "build_ms" and shape != "a field"):
                    continue
                cells = [f"{value:,.1f}" if value else "" for value in (ours, theirs, plain)]
                cells.append(f"{theirs / ours:,.1f}" if theirs and ours else "")
                cells.append(f"{ours / plain:,.2f}" if plain else "")
                lines.append(f"| {called} | {shape} | {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--samples", type=int, default=200, help="answers")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure, which is their median")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, count, shape, samples, model = args.child
        print(json.dumps(measure(way, int(count), shape, int(samples), model)))
        return
    model = str(runpy.run_path(str(Path(__file__).parents[1] / "examples/films_data.py"))["model_dir"]())
    wanted = [
        (way, count, shape)
        for shape in args.shapes
        for count in args.sizes
        for way in WAYS
        if way != "enum" or count <= ENUM_LIMIT
    ]
    report = {
        "processors": re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()),
        "versions": {package: version(package) for package in ("xgrammar", "tokenizers", "numba", "numpy")},
        "runs": [
            run(way, str(count), shape, str(args.samples), model)
            for _ in range(args.repeats)
            for way, count, shape in wanted
        ],
    }
    print(tables(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
