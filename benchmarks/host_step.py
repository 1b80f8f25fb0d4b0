"""A step of masking on the host: filling a batch's bitmask and taking a token a row, beside xgrammar's batched calls.

python benchmarks/host_step.py --sizes 1000 10000 --json docs/benchmarks/host_step.json

Microseconds a row, medians over steps. No engine runs: these are the calls that an engine's scheduler makes. Rows stand
at random places in texts, in SmolLM2's vocabulary of 49,152. xgrammar has its own BatchGrammarMatcher.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from runner import Report, Row, checkouts, isolated, make_texts, parser

STEPS, WARM = 200, 20
LARGEST = {"static": 10**7, "xgrammar": 10_000}
Calls = tuple[Callable[[], Any], Callable[[list[int]], Any], Callable[[int, list[int]], None]]


def static(texts: list[str], tokenizer: Any, vocabulary: int, size: int) -> Calls:
    """What fills the bitmask, takes a token a row, and puts a row after these tokens."""
    import itemset
    from itemset.masking.host import HostState, fill_bitmasks

    item_set = itemset.build_text(texts, tokenizer)
    rows = [HostState(item_set, [tokenizer.eos_token_id]) for _ in range(size)]
    bitmask, order = np.zeros((size, -(-vocabulary // 32)), np.int32), list(range(size))

    def place(row: int, tokens: list[int]) -> None:
        rows[row].reset()
        assert rows[row].accept(tokens)

    def accept(tokens: list[int]) -> bool:
        return all(row.accept([token]) for row, token in zip(rows, tokens, strict=True))

    return lambda: fill_bitmasks(rows, [row.state for row in rows], order, bitmask), accept, place


def xgrammar(texts: list[str], tokenizer: Any, vocabulary: int, size: int) -> Calls:
    import xgrammar as xgr

    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    grammar = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    compiled = xgr.GrammarCompiler(info, max_threads=2).compile_grammar(f"root ::= {grammar}")
    rows, batch = [xgr.GrammarMatcher(compiled) for _ in range(size)], xgr.BatchGrammarMatcher()
    bitmask = xgr.allocate_token_bitmask(size, vocabulary)

    def place(row: int, tokens: list[int]) -> None:
        rows[row].reset()
        assert all(rows[row].accept_token(token) for token in tokens)

    return (
        lambda: batch.batch_fill_next_token_bitmask(rows, bitmask),
        lambda tokens: all(batch.batch_accept_token(rows, tokens)),
        place,
    )


WAYS = {"static": static, "xgrammar": xgrammar}


def step(backend: str, count: int, sizes: list[int]) -> list[Row]:
    """A row for each size of a batch."""
    from films_data import model_dir
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    texts, found = make_texts(count), []
    sample = random.Random(1).sample(texts, min(200, count))
    items = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in sample]
    for size in sizes:
        rng = random.Random(size)
        fill, accept, place = WAYS[backend](texts, tokenizer, len(tokenizer), size)
        rest, fills, accepts = [list[int]() for _ in range(size)], list[float](), list[float]()
        for _ in range(STEPS + WARM):
            for row, tokens in enumerate(rest):
                if not tokens:
                    item = rng.choice(items)
                    start = rng.randrange(len(item))
                    place(row, item[:start])
                    tokens[:] = item[start:]
            taken = [tokens.pop(0) for tokens in rest]
            begun = time.perf_counter_ns()
            fill()
            middle = time.perf_counter_ns()
            assert accept(taken), "an item of its own set was refused"
            fills.append((middle - begun) / 1e3 / size)
            accepts.append((time.perf_counter_ns() - middle) / 1e3 / size)
        row = {"fill, µs": median(fills[WARM:]), "accept, µs": median(accepts[WARM:])}
        row["fill, 99 %"] = float(np.percentile(fills[WARM:], 99))
        found.append({"batch": size} | row)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    arguments = options.parse_args()
    rows: dict[tuple[int, int], Row] = {}
    for count in arguments.sizes:
        ways = [("static", *one) for one in checkouts(arguments)]
        ways += [] if arguments.before else [("xgrammar", *one) for one in checkouts(arguments)]
        for backend, code, checkout in ways:
            name = code.get("code", backend)
            if count > LARGEST[backend]:
                continue
            for found in isolated(step, backend, count, arguments.batches, checkout=checkout):
                row = rows.setdefault((count, found["batch"]), {"items": count, "batch": found.pop("batch")})
                row |= {f"{what}, {name}": value for what, value in found.items()}
    Report(arguments).add("step", list(rows.values()))


if __name__ == "__main__":
    main()
