"""The part of `lists.py` that measures `item_set_shared_prefix`: lists whose passes read a prompt once for all beams,
beside the same lists without it, by width and prompt.

First the attention itself is checked, against a softmax in float64. Then each attention backend runs both ways, each in
a process of its own. On a GPU the model has Qwen3-1.7B's shape and random weights, unless `--model` names another. On a
CPU it is the tiny one, in Triton's interpreter, whose times say nothing: there only the lists are worth comparing.

"ms" is a list's time beyond that of an ordinary request for one token with as long a prompt, the shortest of some.
"in common" is the share of items that both ways find, and "apart" the largest difference of their scores.
"read" is the KV that the rows of a pass address.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lists_inside import CODES, ms_of, prompts
from vllm_paths import CUDA, in_process, model_path, semantic_ids

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN") if CUDA else ("TRITON_ATTN",)
WIDTHS = (16, 64, 256, 512) if CUDA else (8,)
PROMPTS = (64, 256, 1_024, 4_096, 8_192) if CUDA else (40, 200)
REPEATS = 5 if CUDA else 1
WINS = 0.97  # of the time without: less is no accident
Row = dict[str, Any]


def large_model(directory: Path) -> str:
    """A folder with the configuration of a Llama of Qwen3-1.7B's shape, and a tokenizer. Its weights are made up."""
    from transformers import AutoTokenizer, LlamaConfig

    AutoTokenizer.from_pretrained(model_path()).save_pretrained(directory)
    shape = {"hidden_size": 2_048, "intermediate_size": 6_144, "num_hidden_layers": 28, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    tokens = {"vocab_size": 151_936, "max_position_embeddings": 16_384, "bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(**shape, **heads, **tokens, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    return str(directory)


def check(backend: str) -> list[Row]:
    """How far the attention in two parts is from a softmax in float64."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from shared_rows import largest_difference

    dtypes = (torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
    return [
        {"backend": backend, "dtype": str(dtype), "cap": cap, "apart": largest_difference(backend, dtype, cap=cap)}
        for dtype in dtypes
        for cap in (0.0, 2.0)
    ]


def lists(backend: str, way: str, model: str, file: str, dummy: bool) -> list[Row]:
    """Of each prompt and width the time of a list, and the list. way: of item_set_shared_prefix."""
    from vllm import LLM, SamplingParams

    from itemset.serving.one_request import best_of
    from itemset.serving.wire import EngineRequest, ListResult, ListSpec, SetRef
    from vllm_static.one_request import list_params

    if not CUDA:
        from engines import take_triton_attention

        take_triton_attention()
    options = {"item_sets": {"set": file}, "item_set_shared_prefix": way, "ranked_list_beams": max(WIDTHS)}
    llm = LLM(
        model=model,
        dtype="auto" if CUDA else "float32",
        load_format="dummy" if dummy else "auto",
        structured_outputs_config={"backend": "static"},
        additional_config=options,
        attention_config={"backend": backend},
        max_model_len=max(PROMPTS) + 64,
        max_num_seqs=max(WIDTHS),
        block_size=16,
        enforce_eager=not CUDA,
    )
    engine = llm.llm_engine.engine_core.engine_core
    runner = engine.model_executor.driver_worker.worker.model_runner
    token_bytes = sum(cache.nbytes for cache in runner.kv_caches) // runner.kv_cache_config.num_blocks // 16
    plain, rng, rows = SamplingParams(max_tokens=1, temperature=0, detokenize=False), np.random.default_rng(3), []
    for tokens in PROMPTS:
        for width in WIDTHS:
            asked = list_params(EngineRequest(SetRef("set"), ListSpec(width, width, 1)))
            one = prompts(np.random.default_rng(tokens), tokens)
            (answer,) = llm.generate(one, asked, use_tqdm=False)  # compiles what is to be compiled
            table = answer.prompt_token_id_logprobs
            assert table.shape[1] > 1, "the list has no room inside a step"
            times = []
            for _ in range(REPEATS):
                ordinary = ms_of(lambda: llm.generate(prompts(rng, tokens), plain, use_tqdm=False))  # noqa: B023
                ms = ms_of(lambda: llm.generate(prompts(rng, tokens), asked, use_tqdm=False))  # noqa: B023
                times.append((ordinary, ms))
            ordinary, ms = (min(column) for column in zip(*times, strict=True))
            keys = tokens + width * CODES if way == "on" else width * (tokens + CODES)
            row = {"backend": backend, "way": way, "prompt": tokens, "width": width, "ms": ms - ordinary}
            row |= {"ordinary_ms": ordinary, "read_mib": keys * token_bytes / 2**20}
            row["items"] = [[list(item), score] for item, score in best_of(ListResult.of_table(table)).items]
            rows.append(row)
            print({key: value for key, value in row.items() if key != "items"}, file=sys.stderr, flush=True)
    return rows


PARTS = {"shared check": check, "shared lists": lists}


def measure(script: str, items: int, directory: Path, model: str | None) -> dict[str, list[Row]]:
    """All backends, both ways, each in a process of its own."""
    file = semantic_ids(items, directory / "shared.itemset", CODES)
    dummy = CUDA and model is None
    path = model or (large_model(directory / "model") if dummy else model_path())
    results: dict[str, list[Row]] = {"check": [], "shared": []}
    for backend in BACKENDS:
        results["check"] += in_process(script, "shared check", backend)
        for way in ("off", "on"):
            results["shared"] += in_process(script, "shared lists", backend, way, path, file, dummy)
    return results


def tables(results: dict[str, list[Row]]) -> str:
    lines = ["| backend | dtype | soft cap | apart from float64 |", "|---|---|--:|--:|"]
    for row in results["check"]:
        lines.append(f"| {row['backend']} | {row['dtype']} | {row['cap']} | {row['apart']:.1e} |")
    heads = "backend | prompt | width | off, ms | on, ms | on / off | read off, MiB | on, MiB | in common | apart"
    lines += ["", f"| {heads} |", "|---|" + "--:|" * heads.count(" | ")]
    both = {(row["backend"], row["prompt"], row["width"], row["way"]): row for row in results["shared"]}
    won: dict[tuple[str, int], int | None] = {}  # by backend and width, the shortest prompt from which on it wins
    for backend, prompt, width, way in both:
        if way == "on":
            continue
        off, on = both[backend, prompt, width, "off"], both[backend, prompt, width, "on"]
        scores, others = ({tuple(item): score for item, score in row["items"]} for row in (off, on))
        common = scores.keys() & others.keys()
        apart = max((abs(scores[item] - others[item]) for item in common), default=float("nan"))
        cells = [backend, f"{prompt:,}", f"{width:,}", f"{off['ms']:,.1f}", f"{on['ms']:,.1f}"]
        cells += [f"{on['ms'] / off['ms']:.2f}", f"{off['read_mib']:,.1f}", f"{on['read_mib']:,.1f}"]
        lines.append(f"| {' | '.join([*cells, f'{len(common) / max(1, len(scores)):.0%}', f'{apart:.1e}'])} |")
        first = won.get((backend, width))
        won[backend, width] = (first or prompt) if on["ms"] < WINS * off["ms"] else None
    lines += ["", "| backend | width | wins from a prompt of |", "|---|--:|--:|"]
    for (backend, width), prompt in won.items():
        lines.append(f"| {backend} | {width:,} | {'none' if prompt is None else f'{prompt:,}'} |")
    return "\n".join(lines)
