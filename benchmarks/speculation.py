"""Measures how far speculation carries on the device path, by what proposes the drafts, in real vLLM engines (V2).

python benchmarks/speculation.py --json docs/benchmarks/speculation.json

Two sets: 10^6 random semantic IDs of 8 tokens under a tiny random model, and the 1,664 film titles under SmolLM2-135M.
The draft model is random: what it gets right it owes to the set. Each row comes from a fresh process with its own
engine. Acceptance length is the mean number of tokens that a verification step yields, as in TensorRT-LLM's tables.
Without a GPU the engine runs through Triton's interpreter: the counts are those of any machine, the times are not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_paths import CUDA, LENGTH, ROOT, in_process, semantic_ids

KINDS = ("none", "ngram", "forced", "draft model, unmasked", "draft model, masked")
DRAFTS = 3
TASTES = ["a space adventure", "a scary film", "something for children", "a love story", "a western", "a musical"]
SETS = ("semantic IDs", "film titles")
Answer = dict[str, Any]


def models(which: str) -> tuple[str, str]:
    """The target and a random draft model with the target's vocabulary."""
    sys.path += [str(ROOT / "tests"), str(ROOT / "examples")]
    from models import cached_tiny_llama

    if which == "semantic IDs":
        return str(cached_tiny_llama()), str(cached_tiny_llama(seed=1))
    from films_data import CACHE, model_dir

    target = model_dir()
    draft = CACHE / "models" / "tiny-draft-of-SmolLM2"
    if not draft.exists():
        make_draft(target, draft)
    return str(target), str(draft)


def make_draft(target: Path, draft: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(
        target, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    LlamaForCausalLM(config).to(config.dtype).save_pretrained(draft)
    AutoTokenizer.from_pretrained(target).save_pretrained(draft)


def film_titles(model: str, path: Path) -> str:
    from films_data import titles_by_key
    from transformers import AutoTokenizer

    import itemset

    texts = list(titles_by_key().values())
    itemset.build_text(texts, AutoTokenizer.from_pretrained(model), prefix=" ").save(path)
    return str(path)


def speculative(kind: str, draft: str) -> dict[str, Any]:
    if kind == "none":
        return {}
    if kind in ("ngram", "forced"):
        return {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 4}}
    return {"speculative_config": {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFTS}}


def measure(kind: str, which: str, items: int, temperature: float, directory: str) -> Answer:
    from vllm import LLM, SamplingParams

    from vllm_static import drafts

    target, draft = models(which)
    path = Path(directory) / "set.itemset"
    if not path.exists():
        semantic_ids(10**6, path) if which == "semantic IDs" else film_titles(target, path)
    llm = LLM(
        model=target,
        structured_outputs_config={"backend": "static"},
        additional_config={"item_sets": {"set": str(path)}, "forced_drafts": kind == "forced"},
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        **speculative(kind, draft),
    )
    if kind == "draft model, unmasked":
        drafts._processors.clear()
    params = SamplingParams(temperature=temperature, max_tokens=100, seed=1, extra_args={"item_set": "set"})
    prompts = [f"{i + 1}. The best film, if you want {TASTES[i % len(TASTES)]}, is" for i in range(items)]
    llm.generate(prompts[:1], params, use_tqdm=False)
    before = counters(llm)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    verified, drafted, accepted = (now - then for now, then in zip(counters(llm), before, strict=True))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = items + verified if verified else tokens
    return {
        "tokens": tokens / items,
        "steps": steps / items,
        "acceptance_length": 1 + accepted / verified if verified else 1.0,
        "accepted_of_drafted": accepted / drafted if drafted else None,
        "ms": seconds / items * 1e3,
    }


def counters(llm: Any) -> tuple[float, ...]:
    """Verification steps of a request, tokens drafted, tokens accepted."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return tuple(values.get(f"vllm:spec_decode_{name}", 0) for name in names)


def table(results: list[Answer]) -> str:
    columns = ["tokens an item", "steps an item", "acceptance length", "accepted of drafted", "ms an item"]
    lines = [f"| set | temperature | drafts | {' | '.join(columns)} |", "|---|--:|---|" + "--:|" * len(columns)]
    for r in results:
        share = "" if r["accepted_of_drafted"] is None else f"{r['accepted_of_drafted']:.2f}"
        lines.append(
            f"| {r['set']} | {r['temperature']:g} | {r['kind']} | {r['tokens']:.1f} | {r['steps']:.2f} | "
            f"{r['acceptance_length']:.2f} | {share} | {r['ms']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--items", type=int, default=24, help="items that each row generates")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps(measure(*json.loads(arguments.task))))
        return
    results = []
    for which in arguments.sets:
        with tempfile.TemporaryDirectory() as directory:
            for temperature in arguments.temperatures:
                for kind in KINDS:
                    answer = in_process(__file__, kind, which, arguments.items, temperature, directory)
                    results.append({"set": which, "temperature": temperature, "kind": kind} | answer)
                    print(results[-1], file=sys.stderr, flush=True)
    print(("GPU" if CUDA else "CPU, Triton's interpreter") + f", {LENGTH} tokens a semantic ID\n\n{table(results)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
