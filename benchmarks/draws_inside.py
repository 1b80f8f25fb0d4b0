"""Times draws inside a step of vLLM's model runner V2, beside a ranked list as wide, and beside rounds of requests.

python benchmarks/draws_inside.py --json docs/benchmarks/draws_inside.json

Semantic IDs of 4 codes, all 32^4 of them, and a tiny Llama whose weights are set so that it gives nearly all of its
probability to them, unevenly, as a model does that was trained on its catalogue. Without a GPU, V2's kernels run in
Triton's interpreter; the rounds of model runner V1 do not. "Ordinary" is a request for one token with as long a prompt.
All ways of V2 take turns in one engine, with prompts that its prefix cache has not seen. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from lists_inside import asked, ms_of, prompts
from vllm_paths import CUDA, in_process, model_path

END, FIRST, CODES, LEVELS = 1, 100, 32, 4
PROMPTS, DRAWS, WIDTH = (62, 480), (1, 10), 16
REPEATS = 15
Row = dict[str, Any]


def item_set(path: Path) -> str:
    """All sequences of a code of each level."""
    import itemset

    codes = np.stack(np.meshgrid(*[np.arange(CODES)] * LEVELS, indexing="ij"), -1).reshape(-1, LEVELS)
    itemset.build((codes + FIRST + CODES * np.arange(LEVELS)).astype(np.uint16)).save(path)
    return str(path)


def model_of_ids(folder: Path) -> str:
    """The tiny Llama, whose last layer knows what kind of token follows which, and is unsure about the code alone."""
    from safetensors.torch import load_file, save_file

    source = Path(model_path())
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights, random = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    embeddings = weights["model.embed_tokens.weight"]
    vocabulary, size = embeddings.shape
    kinds = torch.zeros(vocabulary, dtype=torch.int64)  # of a code: its level and one more
    kinds[FIRST : FIRST + CODES * LEVELS] = torch.arange(CODES * LEVELS) // CODES + 1
    directions = torch.linalg.qr(torch.randn(size, LEVELS + 1, generator=random))[0].T
    embeddings.copy_(size**0.5 * directions[kinds] + 0.2 * torch.randn(vocabulary, size, generator=random))
    after = torch.where(kinds > 0, kinds - 1, -1)
    after[END] = LEVELS
    head = 0.15 * torch.randn(vocabulary, size, generator=random)
    head += torch.where(after[:, None] >= 0, 1.2 * directions[after.clamp(min=0)], 0)
    weights["lm_head.weight"] = head
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine(model: str, file: str, *, v2: bool) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        dtype="float32",
        structured_outputs_config={"backend": "static"},
        additional_config={"item_sets": {"set": file}, "ranked_list_beams": 512},
        max_model_len=1_000,
        max_num_seqs=256,
        max_logprobs=-1,
        block_size=32 if v2 else 128,
        enforce_eager=not CUDA,
    )


def draws(n: int, **more: Any) -> Any:
    from vllm_static.ranking import DrawParams

    return DrawParams(max_tokens=LEVELS + 1, extra_args={"item_set": "set", "draws": n, **more})


def inside(model: str, file: str) -> list[Row]:
    """Draws, a list of their width, and the same draws by rounds, in turns."""
    from vllm import SamplingParams

    llm, rng, rows = engine(model, file, v2=True), np.random.default_rng(3), list[Row]()
    plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for tokens in PROMPTS:
        for n in DRAWS:
            times, found, seed = list[tuple[float, ...]](), list[Any](), 0
            for seed in range(REPEATS + 1):
                by_step, by_rounds = (
                    draws(n, seed=seed, width=WIDTH),
                    draws(n, seed=seed, max_passes=10_000),
                )
                times.append(
                    (
                        ms_of(lambda: llm.generate(prompts(rng, tokens), plain, use_tqdm=False)),  # noqa: B023
                        ms_of(lambda: found.extend(llm.beam_search(prompts(rng, tokens), by_step))),  # noqa: B023
                        # A list with as many beams as all draws together.
                        ms_of(lambda: llm.beam_search(prompts(rng, tokens), asked(n * WIDTH, 1))),  # noqa: B023
                        ms_of(lambda: llm.beam_search(prompts(rng, tokens), by_rounds)),  # noqa: B023
                    )
                )
            names = ("ordinary_ms", "draw_ms", "list_ms", "rounds_ms")
            row = {"prompt": tokens, "draws": n}
            row |= dict(zip(names, map(median, zip(*times[1:], strict=True)), strict=True))
            # What a step decides takes a round for each level, and one for the end tokens.
            row["decided"] = mean(one.rounds == LEVELS + 1 for one in found)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def rounds(model: str, file: str) -> list[Row]:
    """The same draws by rounds of requests on model runner V1, with one thread as V2."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    torch.set_num_threads(1)
    llm, rng, rows = engine(model, file, v2=False), np.random.default_rng(3), list[Row]()
    for tokens in PROMPTS:
        for n in DRAWS:
            found = list[Any]()
            times = [
                ms_of(lambda: found.extend(llm.beam_search(prompts(rng, tokens), draws(n, seed=seed))))  # noqa: B023
                for seed in range(REPEATS + 1)
            ]
            row = {"prompt": tokens, "draws": n, "ms": median(times[1:]), "passes": mean(one.passes for one in found)}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


PARTS = {"inside": inside, "rounds": rounds}


def table(results: dict[str, list[Row]]) -> str:
    heads = (
        "prompt tokens | draws | ordinary request, ms | draws in a step, ms | decided there | list as wide, ms | "
        "draws / list | by rounds, ms | times | by rounds on V1, ms | passes | times"
    )
    lines = [f"| {heads} |", "|" + "--:|" * (heads.count(" | ") + 1)]
    others = {(row["prompt"], row["draws"]): row for row in results["rounds"]}
    for row in results["inside"]:
        other, ms = others[row["prompt"], row["draws"]], row["draw_ms"]
        cells = [f"{row['prompt']}", f"{row['draws']}", f"{row['ordinary_ms']:,.0f}", f"{ms:,.0f}"]
        cells += [f"{row['decided']:.0%}", f"{row['list_ms']:,.0f}", f"{ms / row['list_ms']:.2f}"]
        cells += [f"{row['rounds_ms']:,.0f}", f"{row['rounds_ms'] / ms:.1f}", f"{other['ms']:,.0f}"]
        cells += [f"{other['passes']:,.1f}", f"{other['ms'] / ms:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        name, *rest = json.loads(arguments.task)
        print(json.dumps(PARTS[name](*rest)))
        return
    with tempfile.TemporaryDirectory() as directory:
        given = model_of_ids(Path(directory) / "model"), item_set(Path(directory) / "ids.itemset")
        results = {name: in_process(__file__, name, *given, v2=CUDA or name == "inside") for name in PARTS}
    print(table(results))  # type: ignore[arg-type]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
