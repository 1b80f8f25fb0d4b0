"""Draws in the real engines: in a step, beside a ranked list as wide, and by rounds of requests.

python benchmarks/draws.py --json docs/benchmarks/draws_inside.json

In SGLang's virtual environment it measures SGLang, else vLLM's model runner V2 and, for the rounds alone, V1; without a
GPU V2's kernels run in Triton's interpreter, which makes its rounds too slow, and V1 has none. All 32^4 semantic IDs of
4 codes, and a tiny Llama whose weights are set so that it gives nearly all of its probability to them, unevenly, as a
model does that was trained on its catalogue. "one token" is an ordinary request. All ways of an engine take turns, with
prompts that no prefix cache has seen; times are medians. A list is as wide as all draws of the request together.
"""

from __future__ import annotations

import json
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import runner
from runner import END, Engine, Report, Row, checkouts, engine_here, environment_of, in_turns, isolated, parser, saved

FIRST, CODES, LEVELS, WIDTH = 100, 32, 4, 16


def item_set(path: Path) -> str:
    """All sequences of a code of each level."""
    codes = np.stack(np.meshgrid(*[np.arange(CODES)] * LEVELS, indexing="ij"), -1).reshape(-1, LEVELS)
    return saved((codes + FIRST + CODES * np.arange(LEVELS)).astype(np.uint16), path)


def trained_model(folder: Path) -> str:
    """The tiny Llama, whose last layer knows what kind of token follows which, and is unsure about the code alone."""
    import torch
    from safetensors.torch import load_file, save_file

    source = Path(runner.tiny_model())
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


def measure(engine: str, model: str, file: str, cells: list[list[int]], repeats: int, rounds_alone: bool) -> list[Row]:
    """A row for each cell: prompt tokens, draws."""
    running, rows = Engine(engine, file, model=model), []
    seed_name = "sampling_seed" if engine == "sglang" else "seed"
    for tokens, draws in cells:
        prompts, seeds = runner.random_prompts(tokens), count()

        def drawn(**more: Any) -> None:
            words = {"item_set": "ids", "draws": draws, seed_name: next(seeds), **more}  # noqa: B023
            found = running.best(next(prompts), LEVELS, WIDTH, **words)  # noqa: B023
            assert all(len(item) == LEVELS for of in found for item in of)

        ways = {
            "one token": lambda: running.one_token(next(prompts)),  # noqa: B023
            "draws in a step": drawn,
            "list as wide": lambda: running.best(next(prompts), LEVELS, draws * WIDTH, item_set="ids"),  # noqa: B023
            "rounds": lambda: drawn(max_passes=10_000),
        }
        ways = {"rounds": ways["rounds"]} if rounds_alone else ways
        row = {"prompt": tokens, "draws": draws}
        rows.append(row | {f"{name}, ms": ms for name, ms in in_turns(ways, repeats).items()})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, nargs="+", default=[62, 480], help="tokens")
    options.add_argument("--draws", type=int, nargs="+", default=[1, 10])
    options.add_argument("--repeats", type=int, default=15)
    arguments = options.parse_args()
    engine, rows = engine_here(), list[Row]()
    cells = [[tokens, draws] for tokens in arguments.prompts for draws in arguments.draws]
    with tempfile.TemporaryDirectory() as folder:
        given = trained_model(Path(folder, "model")), item_set(Path(folder, "ids.itemset"))
        for code, checkout in checkouts(arguments):

            def found(engine: str, alone: bool, checkout: Path = checkout) -> list[Row]:
                task = (engine, *given, cells, arguments.repeats, alone)
                return isolated(measure, *task, env=environment_of(engine), checkout=checkout)

            others = found("vllm-v1", True) if engine == "vllm-v2" else [{} for _ in cells]
            for row, other in zip(found(engine, False), others, strict=True):
                ms = row["draws in a step, ms"]
                more = {"draws / list": ms / row["list as wide, ms"], "rounds / draws": row["rounds, ms"] / ms}
                more |= {"rounds on V1, ms": other["rounds, ms"]} if other else {}
                rows.append(code | row | more)
    Report(arguments).add(engine, rows, x="draws", y="draws in a step, ms", by="prompt")


if __name__ == "__main__":
    main()
