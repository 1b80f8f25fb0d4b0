"""Measures what a ranked list takes: the search's own work by length, whole lists by prompt, width and block size, and
lists that are made inside a step, beside rounds of requests and Hugging Face's `generate()`.

python benchmarks/lists.py --json docs/benchmarks/lists.json
python benchmarks/lists.py --parts inside
python benchmarks/lists.py --parts together
python benchmarks/lists.py --parts shared

10^6 random semantic IDs of 8 tokens; lists in the real vLLM engine (V1 without a GPU) with a tiny random Llama, one at
a time, each of a prompt that the prefix cache has not seen. Every block size has a fresh process. A figure is the
median of three lists.

What is measured of lists inside a step is said in `lists_inside`; of item_set_shared_prefix in `lists_shared`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lists_inside
import lists_shared
import numpy as np
from vllm_paths import CUDA, LENGTH, in_process, model_path, semantic_ids

LENGTHS = (10, 100, 1_000)
PROMPTS = (16, 120, 480, 900)
WIDTHS = (10, 64, 256)
VOCABULARY = 2_112
END = 1
PARTS = ("lists", "inside", "together", "shared")
Row = dict[str, Any]


def search_times(file: str) -> list[Row]:
    """The longest `take` of a list, its rounds answered by random log-probabilities."""
    import itemset
    from itemset.ranking.search import Search

    item_set = itemset.load(file)
    table = np.log(np.random.default_rng(1).dirichlet(np.ones(VOCABULARY), 64))
    rows = []
    for k in LENGTHS:
        for exact in (False, True):
            search = Search(item_set, k, end_token=END, exact=exact, max_passes=5 * k)
            times = []
            while search.passes:
                scores = [table[sum(one.tokens) % 64] for one in search.passes]
                answers = [
                    (of[list(one.tokens[one.known :])], of[one.after])
                    for of, one in zip(scores, search.passes, strict=True)
                ]
                started = time.perf_counter()
                search.take(answers)
                times.append(time.perf_counter() - started)
            best = search.result
            rows.append({"k": k, "exact": exact, "ms": 1e3 * max(times), "passes": best.passes, "rounds": best.rounds})
    return rows


def whole_lists(file: str, block: int) -> list[Row]:
    from vllm import LLM

    from vllm_static.ranking import RankingParams

    llm = LLM(
        model=model_path(),
        structured_outputs_config={"backend": "static"},
        additional_config={"item_sets": {"set": file}},
        max_model_len=1_000,
        block_size=block,
        enforce_eager=not CUDA,
    )
    rng, rows = np.random.default_rng(2), []

    def one(tokens: int, width: int, **options: Any) -> tuple[float, int]:
        prompt = {"prompt_token_ids": rng.integers(100, 2_000, tokens).tolist()}
        params = RankingParams(beam_width=width, max_tokens=LENGTH + 1, extra_args={"item_set": "set", **options})
        started = time.perf_counter()
        (found,) = llm.beam_search([prompt], params)
        return time.perf_counter() - started, found.passes

    one(16, 10)  # compiles what is to be compiled
    for tokens in PROMPTS:
        for width in WIDTHS:
            for options in ({}, {"renormalised": True}):
                times, passes = zip(*(one(tokens, width, **options) for _ in range(3)), strict=True)
                rows.append({"block": block, "prompt": tokens, "width": width, "ms": 1e3 * median(times)})
                rows[-1] |= {"passes": median(passes), "renormalised": bool(options)}
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def search_table(rows: list[Row]) -> str:
    lines = ["| list of | passes | rounds | longest round of the search, ms |", "|---|--:|--:|--:|"]
    for row in rows:
        what = f"{row['k']:,}{', exact' if row['exact'] else ''}"
        lines.append(f"| {what} | {row['passes']:,} | {row['rounds']} | {row['ms']:.1f} |")
    return "\n".join(lines)


def lists_table(rows: list[Row], blocks: list[int]) -> str:
    heads = [f"ms, blocks of {block}{more}" for block in blocks for more in ("", ", renormalised")]
    lines = [f"| prompt tokens | width | {' | '.join(heads)} |", "|--:|--:|" + "--:|" * len(heads)]
    for prompt in PROMPTS:
        for width in WIDTHS:
            mine = {
                (row["block"], row["renormalised"]): row
                for row in rows
                if (row["prompt"], row["width"]) == (prompt, width)
            }
            cells = [f"{mine[block, shares]['ms']:,.0f}" for block in blocks for shares in (False, True)]
            lines.append(f"| {prompt} | {width} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10**6)
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 32, 16], help="--block-size")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2])
    parser.add_argument("--model", help="of the part shared")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        name, *rest = json.loads(arguments.task)
        parts: dict[str, Callable[..., list[Row]]] = {
            "lists": whole_lists,
            "together": lists_inside.together,
            **lists_inside.PARTS,
            **lists_shared.PARTS,
        }
        print(json.dumps(parts[name](*rest)))
        return
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as directory:
        if "lists" in arguments.parts:
            file = semantic_ids(arguments.items, Path(directory) / "ids.itemset")
            results["search"], results["lists"] = search_times(file), []
            print(f"{search_table(results['search'])}\n")
            for block in arguments.blocks:
                results["lists"] += in_process(__file__, "lists", file, block, v2=CUDA)
            print(lists_table(results["lists"], arguments.blocks))
        if "inside" in arguments.parts:
            results |= lists_inside.measure(__file__, arguments.items, Path(directory))
            print(lists_inside.tables(results))
        if "together" in arguments.parts:
            results["together"] = lists_inside.together_of(__file__, arguments.items, Path(directory))
            print(lists_inside.together_table(results["together"]))
        if "shared" in arguments.parts:
            results |= lists_shared.measure(__file__, arguments.items, Path(directory), arguments.model)
            print(lists_shared.tables(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
