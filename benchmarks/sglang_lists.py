"""Measures ranked lists in the real SGLang engine: as one request, in rounds of requests, and beside SGLang's own beam
search of the same width, which knows no set.

python benchmarks/sglang_lists.py --json docs/benchmarks/sglang_lists.json

Run it in SGLang's virtual environment. 10^6 random semantic IDs with a tiny random Llama; lists one at a time, each of
a prompt that the prefix cache has not seen. A figure is the median of several. SGLang's own search takes as many steps
as an item has tokens with its end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
WIDTHS = (64, 256, 512)
PROMPTS = (62, 480)
END = 1
Row = dict[str, Any]


def environment() -> dict[str, str]:
    import torch

    added = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        added["SGLANG_USE_CPU_ENGINE"] = "1"
        paths = [str(ROOT), str(ROOT / "tests" / "sglang" / "cpu"), os.environ.get("PYTHONPATH", "")]
        added["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return os.environ | added


def semantic_ids(items: int, codes: int, length: int, path: Path) -> str:
    import itemset

    rows = np.random.default_rng(0).integers(100, 100 + codes, (items, length), dtype=np.uint16)
    itemset.build(rows).save(path)
    return str(path)


def from_child(script: str, *given: str) -> list[Row]:
    """What a script prints last, started again with its own arguments and `--child` with those given."""
    command = [sys.executable, script, *sys.argv[1:], "--child", *given]
    child = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    rows: list[Row] = json.loads(child.stdout.rpartition("result ")[2])
    return rows


def engine(file: str, widest: int, model: str | None = None) -> Any:
    import sglang
    import torch
    from models import cached_tiny_llama

    arguments: Row = {"max_running_requests": 4 * widest, "max_total_tokens": 64 * widest + 8192}
    arguments["sleep_on_idle"] = True  # an idle scheduler would else take a core from the processes before and after it
    if not torch.cuda.is_available():
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
        arguments |= {"dtype": "float32", "mem_fraction_static": 0.2}
    return sglang.Engine(
        model_path=model or str(cached_tiny_llama()),
        context_length=1024,
        skip_server_warmup=True,
        log_level="error",
        grammar_backend="static",
        item_sets={"ids": file},
        **arguments,
    )


def measure(file: str, length: int, prompts: list[int], widths: list[int], repeats: int) -> list[Row]:
    import itemset

    running, item_set = engine(file, max(widths)), itemset.load(file)
    refusals = running.tokenizer_manager.static_front_end.one_request.refusals
    rng, rows = np.random.default_rng(2), []

    def timed(params: Row, prompt: int) -> tuple[float, Row]:
        tokens = rng.integers(100, 2_000, prompt).tolist()
        started = time.perf_counter()
        output = running.generate(input_ids=tokens, sampling_params=params)
        return time.perf_counter() - started, output

    def list_of(width: int) -> Row:
        return {"item_set": "ids", "beam_width": width, "max_new_tokens": length + 1}

    def own(width: int) -> Row:
        return {"beam_width": width, "max_new_tokens": length + 1, "n": width, "ignore_eos": True}

    def in_rounds(params: Row, prompt: int) -> tuple[float, Row]:
        refusals.always = "rounds are measured"
        try:
            return timed(params, prompt)
        finally:
            refusals.always = None

    ways: dict[str, tuple[Callable[[int], Row], Callable[[Row, int], tuple[float, Row]]]] = {
        "own": (own, timed),
        "one": (list_of, timed),
        "rounds": (list_of, in_rounds),
    }
    for prompt in prompts:
        single = median(timed({"max_new_tokens": 1}, prompt)[0] for _ in range(repeats))
        for width in widths:
            row: Row = {"prompt": prompt, "width": width, "one_token_ms": 1e3 * single}
            for params, ask in ways.values():
                ask(params(width), prompt)  # compiles what is to be compiled
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(repeats):  # in turn: a machine's other work slows all of them
                for name, (params, ask) in ways.items():
                    seconds, output = ask(params(width), prompt)
                    times[name].append(seconds)
                    results = output["meta_info"]["beam_results"]
                    legal = [item_set.find(one["output_ids"][:length]) is not None for one in results]
                    row[f"{name}_legal"] = sum(legal) / len(legal)
            row |= {f"{name}_ms": 1e3 * median(one) for name, one in times.items()}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    assert not refusals._logged, refusals._logged
    running.shutdown()
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| prompt | width | own, ms | legal beams | one request, ms | of own | rounds, ms | of one request |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        own, one, rounds = row["own_ms"], row["one_ms"], row["rounds_ms"]
        cells = [f"{row['prompt']} | {row['width']} | {own:,.0f} | {row['own_legal']:.0%} | {one:,.0f}"]
        cells += [f"{one / own:.2f} | {rounds:,.0f} | {rounds / one:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10**6)
    parser.add_argument("--codes", type=int, default=256, help="of each level")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measured = measure(
            arguments.child, arguments.length, list(arguments.prompts), list(arguments.widths), arguments.repeats
        )
        print(f"\nresult {json.dumps(measured)}")
        return
    with tempfile.TemporaryDirectory() as directory:
        file = semantic_ids(arguments.items, arguments.codes, arguments.length, Path(directory) / "ids.itemset")
        rows = from_child(__file__, file)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
