"""Measures the logits processor for Hugging Face's `generate()` against `prefix_allowed_tokens_fn` over dicts.

python benchmarks/huggingface.py --json docs/benchmarks/huggingface.json --plot docs/benchmarks/huggingface.png

Both beam-search the same prompts with the same model and must give the same tokens: the 1,682 film titles with
SmolLM2-135M, and semantic IDs with a small random model of their vocabulary. The time of the constraint itself is what
`generate()` spends in the logits processors, the rest is the model's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import itemset
from itemset.adapters.huggingface import ItemSetLogitsProcessor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
LENGTH = 8  # tokens of a semantic ID
ROWS = {"build_s": "building the trie, s", "constraint_ms": "constraint, ms a step", "generate_s": "generate(), s"}


def children_of(items: list[list[int]], begin: int, end: int) -> Callable[[int, torch.Tensor], list[int]]:
    """The function that users write today."""
    trie: dict[int, Any] = {}
    for item in items:
        node = trie
        for token in [*item, end]:
            node = node.setdefault(token, {})

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        node = trie
        for token in tokens[begin:].tolist():
            node = node.get(token, {})
        return list(node) or [end]

    return allowed


def films() -> tuple[Any, torch.Tensor, list[list[int]], int]:
    from films_data import model_dir, titles_by_key
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    items = [tokenizer.encode(text, add_special_tokens=False) for text in titles_by_key().values()]
    prompt = tokenizer("Short Circuit (1986)\nPlatoon (1986)\n", return_tensors="pt").input_ids
    return AutoModelForCausalLM.from_pretrained(model_dir()), prompt, items, tokenizer.eos_token_id


def semantic_ids(count: int) -> tuple[Any, torch.Tensor, list[list[int]], int]:
    from models import cached_tiny_llama
    from transformers import AutoModelForCausalLM

    codes = np.random.default_rng(0).integers(64, 2_112, (count, LENGTH))
    model = AutoModelForCausalLM.from_pretrained(cached_tiny_llama())
    return model, torch.tensor([[7, 8, 9]]), codes.tolist(), 1


def measure(name: str, case: tuple[Any, torch.Tensor, list[list[int]], int], beams: int, repeats: int) -> dict:
    model, prompt, items, end = case
    begin = prompt.shape[1]
    longest = max(map(len, items)) + 1
    started = time.perf_counter()
    allowed = children_of(items, begin, end)
    theirs_build = time.perf_counter() - started
    started = time.perf_counter()
    processor = ItemSetLogitsProcessor(itemset.build(items), prompt_length=begin, stop_tokens=end)
    ours_build = time.perf_counter() - started
    spent: list[float] = []
    ways = {
        "prefix_allowed_tokens_fn": Prefixes(allowed, beams),
        "static": processor,
    }
    result: dict[str, Any] = {"case": name, "items": len(items), "beams": beams}
    answers = {}
    for way, inner in ways.items():
        seconds, steps = [], []
        for _ in range(repeats + 1):  # the first warms up
            spent.clear()
            torch.manual_seed(0)
            started = time.perf_counter()
            answers[way] = model.generate(
                prompt,
                logits_processor=[Timed(inner, spent)],
                num_beams=beams,
                num_return_sequences=beams,
                max_new_tokens=longest,
                pad_token_id=end,
            )
            seconds.append(time.perf_counter() - started)
            steps.append(1e3 * sum(spent) / len(spent))
        build = ours_build if way == "static" else theirs_build
        result[way] = {
            "build_s": build,
            "constraint_ms": median(steps[1:]),
            "generate_s": median(seconds[1:]),
        }
    result["same"] = answers["static"].tolist() == answers["prefix_allowed_tokens_fn"].tolist()
    print(result, file=sys.stderr, flush=True)
    return result


class Prefixes:
    """What `generate()` itself makes of a `prefix_allowed_tokens_fn`."""

    def __init__(self, function: Callable[[int, torch.Tensor], list[int]], beams: int) -> None:
        from transformers import PrefixConstrainedLogitsProcessor

        self._processor = PrefixConstrainedLogitsProcessor(function, beams)

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._processor(tokens, scores)
        return result


class Timed:
    """A logits processor that notes its seconds."""

    def __init__(self, inner: Any, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        result: torch.Tensor = self._inner(tokens, scores)
        self._spent.append(time.perf_counter() - started)
        return result


def table(runs: list[dict]) -> str:
    lines = ["| | items | beams | prefix_allowed_tokens_fn | static | ratio |", "|---|--:|--:|--:|--:|--:|"]
    for field, what in ROWS.items():
        for run in runs:
            theirs, ours = run["prefix_allowed_tokens_fn"][field], run["static"][field]
            cells = f"{theirs:,.3f} | {ours:,.3f} | {theirs / ours:,.1f}"
            lines.append(f"| {what}: {run['case']} | {run['items']:,} | {run['beams']} | {cells} |")
    return "\n".join(lines)


def plot(runs: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(run["case"] for run in runs))
    figure, axes = plt.subplots(1, len(cases), figsize=(4.5 * len(cases), 3.5), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        mine = [run for run in runs if run["case"] == case]
        for way in ("prefix_allowed_tokens_fn", "static"):
            axis.plot([run["beams"] for run in mine], [run[way]["constraint_ms"] for run in mine], "o-", label=way)
        axis.set(xscale="log", yscale="log", xlabel="beams", ylabel="constraint, ms a step", title=case)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 10, 64])
    parser.add_argument("--items", type=int, default=1_000_000, help="semantic IDs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--plot", metavar="FILE", type=Path)
    args = parser.parse_args()
    itemset.build([[0, 1], [0, 2], [3]])  # loads what is compiled
    runs = []
    for name, case in (("film titles", films()), ("semantic IDs", semantic_ids(args.items))):
        runs += [measure(name, case, beams, args.repeats) for beams in args.beams]
    print(table(runs))
    if not all(run["same"] for run in runs):
        sys.exit("the answers differ")
    if args.json:
        Path(args.json).write_text(json.dumps(runs, indent=1) + "\n")
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
