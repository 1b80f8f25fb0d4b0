"""Times draws in the real SGLang engine: as one request, beside a ranked list as wide, and beside rounds of requests.

python benchmarks/sglang_draws.py --json docs/benchmarks/sglang_draws.json

Run it in SGLang's virtual environment. The set and the model of `draws_inside.py`. "One token" is a request for one
with as long a prompt. All ways take turns in one engine, with prompts that its prefix cache has not seen. Times are
medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from draws_inside import DRAWS, LEVELS, PROMPTS, WIDTH, item_set, model_of_ids
from sglang_lists import engine, from_child

Row = dict[str, Any]


def measure(model: str, file: str, repeats: int) -> list[Row]:
    running = engine(file, WIDTH * max(DRAWS), model)
    refusals = running.tokenizer_manager.static_front_end.one_request.refusals
    rng, rows = np.random.default_rng(3), list[Row]()

    def timed(**params: Any) -> tuple[float, Row]:
        tokens = rng.integers(100, 2_000, prompt).tolist()
        started = time.perf_counter()
        given = {"max_new_tokens": LEVELS + 1, "temperature": 1.0, **params}
        output = running.generate(input_ids=tokens, sampling_params=given)
        return 1e3 * (time.perf_counter() - started), output["meta_info"]

    for prompt in PROMPTS:
        for n in DRAWS:
            times, found = list[list[float]](), list[Row]()
            for seed in range(repeats + 1):
                drawn = {"item_set": "ids", "draws": n, "sampling_seed": seed}
                ways: list[Row] = [
                    {"max_new_tokens": 1},
                    {**drawn, "width": WIDTH},
                    {"item_set": "ids", "beam_width": n * WIDTH, "n": 1},  # as many beams as all draws together
                    {**drawn, "max_passes": 10_000},
                ]
                answers = [timed(**way) for way in ways]
                times.append([ms for ms, _ in answers])
                found.append(answers[1][1]["beam_results"][0]["meta_info"])
            names = ("one_token_ms", "draw_ms", "list_ms", "rounds_ms")
            row: Row = {"prompt": prompt, "draws": n}
            row |= dict(zip(names, map(median, zip(*times[1:], strict=True)), strict=True))
            # What the engine decides takes a round for each level, and one for the end tokens.
            row["decided"] = mean(one["rounds"] == LEVELS + 1 for one in found)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    assert not refusals._logged, refusals._logged
    running.shutdown()
    return rows


def table(rows: list[Row]) -> str:
    heads = (
        "prompt tokens | draws | one token, ms | draws in one request, ms | decided there | list as wide, ms | "
        "draws / list | by rounds, ms | times"
    )
    lines = [f"| {heads} |", "|" + "--:|" * (heads.count(" | ") + 1)]
    for row in rows:
        ms = row["draw_ms"]
        cells = [f"{row['prompt']}", f"{row['draws']}", f"{row['one_token_ms']:,.0f}", f"{ms:,.0f}"]
        cells += [f"{row['decided']:.0%}", f"{row['list_ms']:,.0f}", f"{ms / row['list_ms']:.2f}"]
        cells += [f"{row['rounds_ms']:,.0f}", f"{row['rounds_ms'] / ms:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(f"\nresult {json.dumps(measure(*arguments.child, arguments.repeats))}")
        return
    with tempfile.TemporaryDirectory() as directory:
        given = model_of_ids(Path(directory) / "model"), item_set(Path(directory) / "ids.itemset")
        rows = from_child(__file__, *given)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
