"""`item_set_shared_prefix`: ranked lists in vLLM whose passes read a prompt once for all beams, beside the same lists
without, by width and prompt.

python benchmarks/shared_prefix.py --json docs/benchmarks/shared_prefix.json

First the attention itself is compared with a softmax in float64. Then each attention backend makes the lists both ways,
each in a process of its own. On a GPU the model has Qwen3-1.7B's shape and random weights, unless `--model` names
another. On a CPU it is the tiny one, in Triton's interpreter: there only the lists are worth comparing.

"ms" is a list's time beyond that of an ordinary request for one token with as long a prompt, the least of several. "in
common" is the share of items that both ways find, "apart" the largest difference of their scores, "read" the KV that
the rows of a pass address, "wins" whether the list takes less than 0.97 of the time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import runner
from runner import GPU, Engine, Report, Row, environment_of, in_turns, isolated, parser, random_prompts, tiny_model

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN") if GPU else ("TRITON_ATTN",)
WIDTHS, PROMPTS = ((16, 64, 256, 512), (64, 256, 1_024, 4_096, 8_192)) if GPU else ((8,), (40, 200))
CODES, BLOCK, REPEATS = 4, 16, 5 if GPU else 1


def large_model(folder: Path) -> str:
    """A folder with the configuration of a Llama of Qwen3-1.7B's shape and a tokenizer. vLLM draws its weights."""
    from transformers import AutoTokenizer, LlamaConfig

    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder)
    shape = {"hidden_size": 2_048, "intermediate_size": 6_144, "num_hidden_layers": 28, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    tokens = {"vocab_size": 151_936, "max_position_embeddings": 16_384, "bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(**shape, **heads, **tokens, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    return str(folder)


def check(backend: str) -> list[Row]:
    """How far the attention in two parts is from a softmax in float64."""
    import torch
    from shared_rows import largest_difference

    return [
        {"backend": backend, "dtype": str(dtype), "soft cap": cap, "apart": largest_difference(backend, dtype, cap=cap)}
        for dtype in ((torch.float16, torch.bfloat16) if GPU else (torch.float32,))
        for cap in (0.0, 2.0)
    ]


def lists(backend: str, way: str, model: str, file: str, dummy: bool) -> list[Row]:
    """Of each prompt and width a list's time, and the list. way: of item_set_shared_prefix."""
    from vllm_static.list_requests import RankingParams

    if not GPU:
        from engines import take_triton_attention

        take_triton_attention()
    given: Row = {"load_format": "dummy" if dummy else "auto", "attention_config": {"backend": backend}}
    given |= {"dtype": "auto" if GPU else "float32", "max_model_len": max(PROMPTS) + 64, "max_num_seqs": max(WIDTHS)}
    options = {"item_set_shared_prefix": way, "ranked_list_beams": max(WIDTHS)}
    running = Engine("vllm-v2", file, model=model, options=options, block_size=BLOCK, **given)
    worker = running.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    caches, blocks = worker.model_runner.kv_caches, worker.model_runner.kv_cache_config.num_blocks
    token_bytes = sum(cache.nbytes for cache in caches) // blocks // BLOCK
    rows = []
    for tokens in PROMPTS:
        for width in WIDTHS:
            params = RankingParams(beam_width=width, max_tokens=CODES + 1, extra_args={"item_set": "ids"})
            (one,) = next(random_prompts(tokens, seed=tokens))
            (found,) = running.llm.beam_search([{"prompt_token_ids": one}], params)
            prompts = random_prompts(tokens)
            ways: dict[str, Any] = {
                "one token": lambda: running.one_token(next(prompts)),  # noqa: B023
                "list": lambda: running.best(next(prompts), CODES, width, item_set="ids"),  # noqa: B023
            }
            ms, keys = in_turns(ways, REPEATS, min), tokens + width * CODES if way == "on" else width * (tokens + CODES)
            row = {"backend": backend, "prompt": tokens, "width": width, "ms": ms["list"] - ms["one token"]}
            row["items"] = [[one.tokens[tokens:], one.cum_logprob] for one in found.sequences]
            rows.append(row | {"read, MiB": keys * token_bytes / 2**20})
    return rows


def beside(off: Row, on: Row) -> Row:
    scores, others = ({tuple(item): score for item, score in row.pop("items")} for row in (off, on))
    common = scores.keys() & others.keys()
    row = {name: off[name] for name in ("backend", "prompt", "width")}
    row |= {f"{name} {way}": of[name] for name in ("ms", "read, MiB") for way, of in (("off", off), ("on", on))}
    row |= {"on / off": on["ms"] / off["ms"], "wins": on["ms"] < 0.97 * off["ms"]}
    apart = max((abs(scores[item] - others[item]) for item in common), default=float("nan"))
    return row | {"in common": len(common) / max(1, len(scores)), "apart": apart}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=runner.whole, default=10**6)
    options.add_argument("--model")
    arguments = options.parse_args()
    report, env, rows = Report(arguments), environment_of("vllm-v2"), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        file, dummy = runner.saved(runner.random_ids(arguments.items, CODES), Path(folder, "ids.itemset")), False
        if (model := arguments.model) is None:
            model, dummy = large_model(Path(folder, "model")) if GPU else tiny_model(), GPU
        report.add("attention", [row for backend in BACKENDS for row in isolated(check, backend, env=env)])
        for backend in BACKENDS:
            found = [isolated(lists, backend, way, model, file, dummy, env=env) for way in ("off", "on")]
            rows += [beside(off, on) for off, on in zip(*found, strict=True)]
    report.add("lists", rows, x="prompt", y="on / off", by="width")


if __name__ == "__main__":
    main()
