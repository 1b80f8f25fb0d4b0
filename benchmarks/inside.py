"""Item sets inside JSON answers beside xgrammar's own enum, and beside xgrammar with any string in their place.

python benchmarks/inside.py --sizes 10000 1000000 --json docs/benchmarks/inside.json

Every row comes from a process with one way and one size. All ways get the same answers in the same tokens. No engine
runs: a step is one bitmask and one accepted token, as an engine's scheduler calls them. A step's time is the least of
several runs, because other processes disturb some.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
from runner import Report, Row, isolated, make_texts, parser, resident

ENUM_LIMIT, RUNS = 10_000, 5  # items: beyond, xgrammar was not run; runs of the same answers
SET = {"type": "string", "item_set": "films"}
REASONS = ["It is quiet, and it ends well.", "Everyone I know liked it.", "A good one for a rainy day."]
SHAPES: dict[str, Row] = {
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
    names = make_texts(min(count, 50_000))
    return [f"{name} ({1950 + year})" for year in range(-(-count // len(names))) for name in names][:count]


def replaced(node: Any, value: Row) -> Any:
    """The schema with another one for the set's."""
    if node == SET:
        return value
    if isinstance(node, dict):
        return {key: replaced(one, value) for key, one in node.items() if key != "uniqueItems"}
    return [replaced(one, value) for one in node] if isinstance(node, list) else node


class Static:
    """Our grammars. A registered set is open before requests come."""

    def __init__(self, vocabulary: Any, tokenizer: Any, items: list[str]) -> None:
        """vocabulary: a process has one."""
        import itemset
        from itemset.embedded.holes import Items

        self.vocabulary, start = vocabulary, time.perf_counter()
        self.films = itemset.build_text(items, tokenizer, escape="json")
        self.build_ms = (time.perf_counter() - start) * 1e3
        self.items = Items(self.films)

    def compile(self, shape: str) -> Callable[[], Any]:
        from itemset.embedded.composite_grammar import Composite
        from itemset.embedded.holes import Hole
        from itemset.embedded.rewrite import Marker

        marked = Marker(lambda _: len(self.films)).mark("json", SHAPES[shape], {"any_whitespace": False})
        assert marked is not None
        grammar = self.vocabulary.compile(marked.ebnf(self.vocabulary.first))
        holes = [
            Hole(self.items, self.vocabulary.bridges(closers), place.group, place.begins)
            for place, closers in zip(marked.holes, marked.closers(), strict=True)
        ]
        return lambda: Composite(self.vocabulary, grammar, holes)

    @staticmethod
    def step(grammar: Any, token: int, row: Any, _: Any) -> bool:
        grammar.fill_bitmask(row)
        return bool(grammar.accept(token))


class Plain:
    """xgrammar's, with an enum of all items or with any string."""

    def __init__(self, info: Any, value: Row) -> None:
        import xgrammar

        self.compiler, self.value = xgrammar.GrammarCompiler(info, max_threads=2), value

    def compile(self, shape: str) -> Callable[[], Any]:
        import xgrammar

        schema = json.dumps(replaced(SHAPES[shape], self.value))
        grammar = self.compiler.compile_json_schema(schema, any_whitespace=False)
        return lambda: xgrammar.GrammarMatcher(grammar)

    @staticmethod
    def step(grammar: Any, token: int, _: Any, mask: Any) -> bool:
        grammar.fill_next_token_bitmask(mask)
        return bool(grammar.accept_token(token))


def answers(shape: str, count: int, items: list[str], tokenizer: Any) -> list[list[int]]:
    """Answers in the tokens that a model would most likely take, but for those over an opening or closing quote."""
    from itemset.text import escaped

    rng, found = random.Random(count), []
    for _ in range(count):
        if shape == "a field":
            reason = f'", "reason": "{rng.choice(REASONS)}"}}'
            parts = ['{"film": "', escaped(rng.choice(items), "json"), reason]
        else:
            five = [escaped(text, "json") for text in rng.sample(items, 5)]
            parts = ['["', *(part for text in five for part in (text, '", "'))]
            parts[-1] = '"]'
        found.append([token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)])
    return found


def measure(way: str, count: int, shape: str, samples: int) -> Row:
    """All figures of one way at one size."""
    import torch
    import xgrammar
    from films_data import model_dir

    from itemset.embedded.holes import Vocabulary
    from itemset.embedded.holes import warm_up as warm_up_holes
    from itemset.masking.host import warm_up
    from itemset.text import load_tokenizer

    torch.set_num_threads(1)
    warm_up()
    warm_up_holes()
    tokenizer, items = load_tokenizer(str(model_dir())), titles(count)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    row, mask = np.zeros(-(-info.vocab_size // 32), np.int32), xgrammar.allocate_token_bitmask(1, info.vocab_size)
    vocabulary, texts = Vocabulary(info), answers(shape, samples, items, tokenizer)

    def first_mask(of: list[str]) -> tuple[float, Any, Callable[[], Any]]:
        """Milliseconds to the first masks, without those of building the set; the way, and what makes a grammar."""
        made: Any = Static(vocabulary, tokenizer, of) if way == "static" else None
        made = made or Plain(info, {"enum": of} if way == "enum" else {"type": "string"})
        start = time.perf_counter()
        grammar = (make := made.compile(shape))()
        for token in texts[0][:6] if len(of) == count else []:
            made.step(grammar, token, row, mask)
        return (time.perf_counter() - start) * 1e3, made, make

    first_mask(titles(20))  # what is loaded once a process
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    ms, made, make = first_mask(items)
    result: Row = {"first masks, ms": ms, "peak, MiB": (resident("VmHWM") - before) / 2**20}
    result["building the set before, ms"] = getattr(made, "build_ms", None)
    gc.collect()
    gc.disable()
    runs = list[list[float]]()
    for _ in range(1 + RUNS):
        times = []
        for tokens in texts:
            grammar = make()
            for token in tokens:
                start = time.perf_counter_ns()
                taken = made.step(grammar, token, row, mask)
                times.append((time.perf_counter_ns() - start) / 1e3)
                if not taken:
                    sys.exit(f"{way} refused a token of {tokenizer.decode(tokens)}")
        runs.append(times)
    least = [min(one) for one in zip(*runs[1:], strict=True)]
    steps = {"mean": mean(least), "99th percentile": quantiles(least, n=100)[98], "worst": max(least)}
    return result | {f"step, µs: {name}": value for name, value in steps.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    options.add_argument("--samples", type=int, default=200, help="answers")
    options.add_argument("--repeats", type=int, default=3, help="processes for each row, which has their medians")
    arguments = options.parse_args()
    rows = []
    for shape in arguments.shapes:
        for count in arguments.sizes:
            for way in ("static", "enum", "string"):
                if way != "enum" or count <= ENUM_LIMIT:
                    task = (way, count, shape, arguments.samples)
                    runs = [isolated(measure, *task) for _ in range(arguments.repeats)]
                    middle = {name: median(run[name] for run in runs) for name in runs[0] if runs[0][name] is not None}
                    rows.append({"shape": shape, "items": count, "way": way} | middle)
    Report(arguments).add("inside", rows, x="items", y="step, µs: mean", by="way")


if __name__ == "__main__":
    main()
