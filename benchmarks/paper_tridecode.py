"""Trie-based beam search, table 1 and figure 3: peak memory of a list by its width, its prompt and its items' length.

python benchmarks/papers.py tridecode --json docs/benchmarks/papers.json

10^6 random IDs of 4 tokens, or for the lengths all binary items of that length; the tiny model, 1 KiB of KV a token
(float32, two layers of two heads of 32). Each way makes a list, and then the one that is measured, of a prompt that no
prefix cache has seen. KV are the blocks that the engine's scheduler has given away at most, and the entries of beams.
The rest is how far the process's memory rises, whose KV cache was written before; `generate()` has its KV there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import runner
from runner import END, Engine, Memory, Report, Row, isolated, random_prompts

MOST, CONTEXT = 1_000, 4_352
PROMPTS, WIDTHS = (62, 480, 4_096), (3, 64, 1_000)
LENGTHS = (4, 8, 12, 16)
COPIES_MOST = 300_000  # prompt tokens times beams: `generate()` copies a prompt's KV for each beam
OWN_MOST = 130_000  # the same for vLLM's own search, where each beam has a list of its prompt, and for SGLang
KV_BYTES = 1_024  # a token of the tiny model
Cell = list[int]  # prompt tokens, width


def model_with_context(folder: Path) -> str:
    shutil.copytree(runner.tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return str(folder)


def in_vllm(way: str, file: str, model: str, length: int, cells: list[Cell]) -> list[Row | None]:
    from vllm_static.worker.beam_kv import BeamKV

    options = {"ranked_list_beams": MOST, "ranked_list_limit": MOST}
    given = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 1 << 30}
    running = Engine("vllm-v2", file, model=model, options=options, **given)
    core = running.llm.llm_engine.engine_core.engine_core
    caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
    block_bytes = sum(cache.zero_().nbytes for cache in caches) // caches[0].shape[0]
    pool, schedule, grow = core.scheduler.kv_cache_manager.block_pool, core.scheduler.schedule, BeamKV.grow
    most = {"blocks": 0, "entries": 0}

    def scheduled(*args: Any, **words: Any) -> Any:
        result = schedule(*args, **words)
        most["blocks"] = max(most["blocks"], free - pool.get_num_free_blocks())
        return result

    def grown(self: BeamKV) -> None:
        grow(self)
        most["entries"] = max(most["entries"], self.used)

    core.scheduler.schedule, BeamKV.grow = scheduled, grown  # type: ignore[method-assign]
    words: Row = {"in a step": {"item_set": "ids"}, "rounds": {"item_set": "ids", "max_passes": 10_000}}.get(way, {})
    rows = list[Row | None]()
    for tokens, width in cells:
        if way == "own" and tokens * width > OWN_MOST:
            rows.append(None)
            continue
        prompts = random_prompts(tokens)
        for _ in range(2):
            free = pool.get_num_free_blocks()
            most |= {"blocks": 0, "entries": 0}
            with Memory() as memory:
                running.best(next(prompts), length, width, **words)
        rows.append({"KV": most["blocks"] * block_bytes + most["entries"] * KV_BYTES, "rest": memory.peak})
    return rows


def in_sglang(file: str, model: str, length: int, cells: list[Cell]) -> list[Row | None]:
    """The scheduler is another process: its memory rises by the KV, too, where no list was before."""
    import psutil

    given = {"context_length": CONTEXT, "max_total_tokens": 65_536}
    running = Engine("sglang", file, model=model, options={"ranked_list_limit": MOST}, **given)
    (scheduler,) = (one for one in psutil.Process().children(recursive=True) if "scheduler" in " ".join(one.cmdline()))
    rows = list[Row | None]()
    for tokens, width in cells:
        if tokens * width > OWN_MOST:
            rows.append(None)
            continue
        prompts = random_prompts(tokens)
        for _ in range(2):
            Path(f"/proc/{scheduler.pid}/clear_refs").write_text("5")
            before = runner.resident("VmRSS", scheduler.pid)
            running.best(next(prompts), length, width, item_set="ids")
            peak = runner.resident("VmHWM", scheduler.pid) - before
        rows.append({"KV": None, "rest": peak})
    return rows


def by_generate(file: str, model: str, length: int, cells: list[Cell]) -> list[Row | None]:
    """Hugging Face's `generate()`, whose beams our processor keeps in the set. None where its copies do not fit."""
    import torch
    from transformers import AutoModelForCausalLM

    import itemset
    from itemset.adapters.huggingface import ItemSetLogitsProcessor

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    item_set, rows = itemset.load(file), list[Row | None]()
    for tokens, width in cells:
        if tokens * width > COPIES_MOST:
            rows.append(None)
            continue
        processor = ItemSetLogitsProcessor(item_set, prompt_length=tokens, stop_tokens=END)
        shape = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": length + 1}
        for prompt in itertools.islice(random_prompts(tokens), 2):
            ids = torch.tensor(prompt)
            with Memory() as memory, torch.inference_mode():
                network.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[processor], **shape)
        rows.append({"KV": None, "rest": memory.peak})
    return rows


def table(rows: list[Row], file: str, model: str, length: int, ways: list[str]) -> None:
    """Add MiB of every way to rows that say a prompt and a width. Two ways at a time: no time is measured."""
    cells = [[row["prompt"], row["width"]] for row in rows]

    def measure(way: str) -> list[Row | None]:
        if way == "generate()":
            return isolated(by_generate, file, model, length, cells)
        if way == "SGLang":
            return isolated(in_sglang, file, model, length, cells, env=runner.environment_of("sglang"))
        return isolated(in_vllm, way, file, model, length, cells, env=runner.environment_of("vllm-v2"))

    with ThreadPoolExecutor(2) as pool:
        measured = list(pool.map(measure, ways))
    for way, found in zip(ways, measured, strict=True):
        for row, one in zip(rows, found, strict=True):
            for part, size in (one or {}).items():
                if size is not None:
                    row[f"{way}: {part}"] = size / 2**20


def main(arguments: argparse.Namespace, report: Report) -> None:
    few, engine = arguments.quick, runner.engine_here()
    ways = ["SGLang"] if engine == "sglang" else ["in a step", "rounds", "own", "generate()"]
    name = " sglang" if engine == "sglang" else ""
    with tempfile.TemporaryDirectory() as folder:
        model = model_with_context(Path(folder, "model"))
        ids = runner.saved(runner.random_ids(10**4 if few else 10**6, 4), Path(folder, "ids.itemset"))
        widths, prompts = (WIDTHS[:2], PROMPTS[:1]) if few else (WIDTHS, PROMPTS)
        rows: list[Row] = [{"prompt": tokens, "width": width} for tokens in prompts for width in widths]
        table(rows, ids, model, 4, ways)
        report.add(f"tridecode{name}", rows)
        lengths = list[Row]()
        for length in LENGTHS[:1] if few else LENGTHS:
            items = 100 + (np.arange(1 << length)[:, None] >> np.arange(length) & 1)
            file = runner.saved(items.astype(np.uint32), Path(folder, f"{length}.itemset"))
            row: Row = {"length": length, "prompt": 62, "width": min(64, 1 << length)}
            table([row], file, model, length, [way for way in ways if way != "own"])
            lengths.append(row)
        report.add(f"tridecode length{name}", lengths)
