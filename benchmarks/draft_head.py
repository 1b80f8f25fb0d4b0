"""Measures what a list takes in vLLM by a draft head, beside the beams of the same model inside a step.

python benchmarks/draft_head.py --json docs/benchmarks/draft_head.json

10^6 random semantic IDs of 4 tokens, a tiny random Llama in float32 and a head of random weights, model runner V2,
without a GPU through Triton's interpreter. One engine makes both lists, by turns, of prompts that the prefix cache has
not seen. "Ordinary" is a request for one token with as long a prompt, and "beyond" a list's time without it: with the
head that is the placeholders' part of the prefill, and its own small steps. Every time is the shortest of some: other
work only ever adds to it. Items and scores say nothing here, since nothing was trained: see examples/nezha.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lists_inside import CODES, END, ms_of, prompts
from vllm_paths import CUDA, in_process, model_path, semantic_ids

PROMPTS = (62, 480)
WIDTHS = (64, 256, 512)
PLACEHOLDERS = range(2_000, 2_000 + CODES)
REPEATS = 9
Row = dict[str, Any]


def measure(file: str, head: str) -> list[Row]:
    from vllm import LLM, SamplingParams

    from itemset.serving.wire import EngineRequest, ListResult, ListSpec, SetRef
    from vllm_static.one_request import list_params

    options = {"item_sets": {"set": file}, "ranked_list_beams": max(WIDTHS), "item_set_draft_head": head}
    llm = LLM(
        model=model_path(),
        dtype="float32",
        structured_outputs_config={"backend": "static"},
        additional_config=options,
        max_model_len=1_000,
        max_num_seqs=256,
        block_size=32,
        enforce_eager=not CUDA,
    )
    plain, rng, rows = SamplingParams(max_tokens=1, temperature=0, detokenize=False), np.random.default_rng(3), []
    for tokens in PROMPTS:
        for width in WIDTHS:
            beams = list_params(EngineRequest(SetRef("set"), ListSpec(10, width, END)))
            drafted = list_params(EngineRequest(SetRef("set"), ListSpec(10, width, END, placeholders=CODES)))

            def times() -> tuple[float, float, float]:
                asked = [prompts(rng, tokens) for _ in range(3)]  # noqa: B023
                asked[2] = [{"prompt_token_ids": [*asked[2][0]["prompt_token_ids"], *PLACEHOLDERS]}]
                found = []
                took = [
                    ms_of(lambda: found.extend(llm.generate(prompt, params, use_tqdm=False)))  # noqa: B023
                    for prompt, params in zip(asked, (plain, beams, drafted), strict=True)  # noqa: B023
                ]
                tables = [ListResult.of_table(one.prompt_token_id_logprobs) for one in found[1:]]
                assert all(len(table.items[0]) == 10 for table in tables)
                return took[0], took[1], took[2]

            ordinary, by_beams, by_head = (
                min(column) for column in zip(*(times() for _ in range(REPEATS)), strict=True)
            )
            row = {"prompt": tokens, "width": width, "ordinary_ms": ordinary, "beams_ms": by_beams, "head_ms": by_head}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row]) -> str:
    names = (
        "prompt tokens | width | ordinary request, ms | beams of the model, ms | draft head, ms | beyond, beams / head"
    )
    lines = [f"| {names} |", "|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        ordinary, beams, head = row["ordinary_ms"], row["beams_ms"], row["head_ms"]
        ratio = (beams - ordinary) / (head - ordinary)
        cells = f"{row['prompt']} | {row['width']} | {ordinary:.0f} | {beams:.0f} | {head:.0f} | {ratio:.1f}"
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def random_head(path: Path) -> str:
    from itemset.ranking.head import DraftHead

    head = DraftHead([range(100, 2_000)] * CODES, PLACEHOLDERS, hidden_size=128, vocab_size=2_112)
    head.save(path)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10**6)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps({"rows": measure(*json.loads(arguments.task))}))
        return
    with tempfile.TemporaryDirectory() as directory:
        file = semantic_ids(arguments.items, Path(directory, "set.itemset"), CODES)
        rows = in_process(__file__, file, random_head(Path(directory, "draft.head")))["rows"]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
