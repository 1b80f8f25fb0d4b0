"""The part of `lists.py` that measures lists inside a step of vLLM's model runner V2, without a GPU through Triton's
interpreter, beside other ways to the same lists.

10^6 random semantic IDs of 4 tokens, a tiny random Llama in float32, prompts that the prefix cache has not seen.
"Ordinary" is a request for one token with as long a prompt, asked in turns with the lists, and "beyond" a list's time
without it. "Model" is what the passes of the same lists spend in the model itself, its forward and its logits. Peers:
rounds of requests and vLLM's own beam search, which knows no set, both on model runner V1, without an interpreter, and
Hugging Face's `generate()` with our processor. Every time is the shortest of some: other work only ever adds to it.

"Together" is what eight lists at a time take, on a CPU in two forms by turns: as they run, without the rows that lead
to nothing better, and with the fixed shapes that accelerators have. "All rows" is the model's part of the latter.

"Recall" is of the ten best of 20,000 items by `generate()`'s model, all of them scored. A trained model's is another.
"KV" is what the beams take beside their prompt, and what they would take with a copy of it each.
"Wait" is the longest step of three requests that decode, without lists and with a list in every fourth step.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm_paths import CUDA, in_process, model_path, semantic_ids

END = 1
CODES = 4  # tokens of an ID
PROMPTS = (62, 480)
WIDTHS = (64, 256, 512, 1_000)
TOGETHER = 8  # lists
MOST = 2_048  # beams at a time
FEW, BEST = 20_000, 10  # items, and the best of them, for the recall
REPEATS = 9
Row = dict[str, Any]


def engine(file: str, few: str, *, v2: bool) -> Any:
    from vllm import LLM

    return LLM(
        model=model_path(),
        dtype="float32",
        structured_outputs_config={"backend": "static"},
        additional_config={"item_sets": {"set": file, "few": few}, "ranked_list_beams": MOST},
        max_model_len=1_000,
        max_num_seqs=256,
        max_logprobs=-1,
        block_size=32 if v2 else 128,
        enforce_eager=not CUDA,
    )


class Clock:
    """The time spent in some methods, while it counts."""

    def __init__(self) -> None:
        self.seconds, self.counting = 0.0, False

    def watch(self, owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.counting:
                return own(*args, **kwargs)
            wait()
            started = time.perf_counter()
            result = own(*args, **kwargs)
            wait()
            self.seconds += time.perf_counter() - started
            return result

        setattr(owner, name, timed)

    def during(self, owner: Any, name: str) -> None:
        """Count while this method runs."""
        own = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counting = True
            try:
                return own(*args, **kwargs)
            finally:
                self.counting = False

        setattr(owner, name, counted)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def ms_of(function: Callable[[], Any]) -> float:
    wait()
    started = time.perf_counter()
    function()
    wait()
    return 1e3 * (time.perf_counter() - started)


def best_of(function: Callable[[], Any], repeats: int) -> float:
    function()
    return min(ms_of(function) for _ in range(repeats))


def prompts(rng: np.random.Generator, tokens: int, count: int = 1) -> list[Any]:
    return [{"prompt_token_ids": one} for one in rng.integers(100, 2_000, (count, tokens)).tolist()]


def asked(width: int, k: int | None = None, name: str = "set", **more: Any) -> Any:
    from vllm_static.ranking import RankingParams

    options = {"item_set": name, "width": width, **more}
    return RankingParams(beam_width=k or width, max_tokens=CODES + 1, extra_args=options)


def legal(item_set: Any, found: Any, prompt: int) -> float:
    items = [one.tokens[prompt : prompt + CODES] for one in found.sequences]
    return float(np.mean([len(item) == CODES and item_set.find(item) is not None for item in items]))


def model_clock(runner: Any) -> Clock:
    """The time that the passes of lists spend in the model."""
    from vllm_static.wide_lists import WideLists

    clock = Clock()
    clock.watch(runner.model, "forward")
    clock.watch(runner.model, "compute_logits")
    clock.during(WideLists, "_make")
    return clock


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def inside(file: str, few: str) -> list[Row]:
    """Lists in a step, one and several."""
    from vllm import SamplingParams

    import itemset
    from vllm_static.branches import own_blocks

    llm, item_set, rng = engine(file, few, v2=True), itemset.load(file), np.random.default_rng(3)
    runner, rows = runner_of(llm), list[Row]()
    clock = model_clock(runner)
    plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    block_bytes = sum(cache.nbytes for cache in runner.kv_caches) // runner.kv_cache_config.num_blocks
    best = {tokens: prompts(np.random.default_rng(7), tokens) for tokens in PROMPTS}
    for tokens in PROMPTS:
        for width in WIDTHS:
            for count in (1, TOGETHER) if TOGETHER * width <= MOST else (1,):
                times = []
                for _ in range(REPEATS):
                    clock.seconds = 0.0
                    ordinary = ms_of(lambda: llm.generate(prompts(rng, tokens, count), plain, use_tqdm=False))  # noqa: B023
                    ms = ms_of(lambda: llm.beam_search(prompts(rng, tokens, count), asked(width)))  # noqa: B023
                    times.append((ordinary, ms, 1e3 * clock.seconds))
                ordinary, ms, model = (min(column) for column in zip(*times[1:], strict=True))
                row = {"prompt": tokens, "width": width, "lists": count, "ms": ms, "ordinary_ms": ordinary}
                row["model_ms"] = model
                (found,) = llm.beam_search(prompts(rng, tokens), asked(width))
                row["legal"] = legal(item_set, found, tokens)
                row["kv_mib"] = count * width * 2 * own_blocks(tokens, CODES, 32) * block_bytes / 2**20
                row["copies_mib"] = count * width * -(-(tokens + CODES) // 32) * block_bytes / 2**20
                (found,) = llm.beam_search(best[tokens], asked(width, BEST, "few"))
                row["best"] = [one.tokens[tokens:-1] for one in found.sequences]
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    for width in (0, 64, 256):
        rows.append({"wait_width": width, **waits(llm, width)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def together(file: str, few: str, repeats: int = 12) -> list[Row]:
    """Eight lists at a time, in both forms by turns, each beside as many ordinary requests."""
    from vllm import SamplingParams

    llm, rng, rows = engine(file, few, v2=True), np.random.default_rng(3), list[Row]()
    clock, lists = model_clock(runner_of(llm)), runner_of(llm).prompt_logprobs_worker.static_lists
    plain, as_they_run = SamplingParams(max_tokens=1, temperature=0, detokenize=False), lists.narrow

    def form(narrow: bool, tokens: int, width: int) -> tuple[float, float]:
        clock.seconds, lists.narrow = 0.0, narrow
        return ms_of(lambda: llm.beam_search(prompts(rng, tokens, TOGETHER), asked(width))), 1e3 * clock.seconds

    for tokens in PROMPTS:
        for width in (64, 256):
            times = []
            for _ in range(repeats + 1):
                given = prompts(rng, tokens, TOGETHER)
                ordinary = ms_of(lambda: llm.generate(given, plain, use_tqdm=False))  # noqa: B023
                times.append((ordinary, *form(False, tokens, width), *form(as_they_run, tokens, width)))
            names = ("ordinary_ms", "fixed_ms", "all_rows_ms", "ms", "model_ms")
            best = (min(column) for column in zip(*times[1:], strict=True))
            rows.append({"prompt": tokens, "width": width, **dict(zip(names, best, strict=True))})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def together_table(rows: list[Row]) -> str:
    lines = _table(
        "prompt tokens | width | ordinary requests, ms | fixed shapes, ms | all rows, ms | beyond / all rows | "
        "as they run, ms | their rows, ms | beyond / all rows | beyond / their rows"
    )
    for row in rows:
        fixed, run = (row[key] - row["ordinary_ms"] for key in ("fixed_ms", "ms"))
        cells = [f"{row['prompt']}", f"{row['width']}"]
        cells += [f"{row[key]:,.0f}" for key in ("ordinary_ms", "fixed_ms", "all_rows_ms")]
        cells += [f"{fixed / row['all_rows_ms']:.2f}", f"{row['ms']:,.0f}", f"{row['model_ms']:,.0f}"]
        cells += [f"{run / row['all_rows_ms']:.2f}", f"{run / row['model_ms']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def waits(llm: Any, width: int) -> Row:
    """The steps of three requests that decode, in ms, with lists of this width in every fourth one, or without."""
    from vllm import SamplingParams

    from itemset.serving.words import REFERENCE
    from vllm_static.one_request import list_params

    rng, llm_engine, steps = np.random.default_rng(5), llm.llm_engine, list[float]()
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts(rng, 62, 3)):
        llm_engine.add_request(f"plain-{width}-{i}", prompt, params)
    while llm_engine.has_unfinished_requests():
        if width and 8 <= len(steps) < 48 and len(steps) % 4 == 0:
            one = list_params({REFERENCE: "set"}, k=10, width=width, end_token=END, renormalised=False)
            llm_engine.add_request(f"list-{width}-{len(steps)}", prompts(rng, 62)[0], one)
        steps.append(ms_of(llm_engine.step))
    steps = steps[8:48]
    return {"median_ms": float(np.median(steps)), "ninth_ms": float(np.quantile(steps, 0.9)), "longest_ms": max(steps)}


def rounds(file: str, few: str) -> list[Row]:
    """The same lists by rounds of requests, and vLLM's own beam search, on model runner V1, with one thread as V2."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    torch.set_num_threads(1)
    from vllm.sampling_params import BeamSearchParams

    import itemset

    llm, item_set, rng, rows = engine(file, few, v2=False), itemset.load(file), np.random.default_rng(3), list[Row]()
    for tokens in PROMPTS:
        for width in (64, 256):
            row = {"prompt": tokens, "width": width}
            row["rounds_ms"] = best_of(lambda: llm.beam_search(prompts(rng, tokens), asked(width)), 3)  # noqa: B023
            own = BeamSearchParams(beam_width=width, max_tokens=CODES, ignore_eos=True)
            row["own_ms"] = best_of(lambda: llm.beam_search(prompts(rng, tokens), own), 1)  # noqa: B023
            (found,) = llm.beam_search(prompts(rng, tokens), own)
            row["own_legal"] = legal(item_set, found, tokens)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def with_generate(file: str, few: str) -> list[Row]:
    """The same lists by Hugging Face's `generate()`, whose beams our processor holds in the set; and the best items."""
    from transformers import AutoModelForCausalLM

    import itemset
    from itemset.adapters.huggingface import ItemSetLogitsProcessor

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path()).eval().to("cuda" if CUDA else "cpu")
    item_set, rng, rows = itemset.load(file), np.random.default_rng(3), list[Row]()
    for tokens in PROMPTS:
        for width in (64, 256):
            processor = ItemSetLogitsProcessor(item_set, prompt_length=tokens, stop_tokens=END)

            def ask() -> Any:
                ids = torch.from_numpy(rng.integers(100, 2_000, (1, tokens))).to(model.device)  # noqa: B023
                return model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    logits_processor=[processor],  # noqa: B023
                    num_beams=width,  # noqa: B023
                    num_return_sequences=width,  # noqa: B023
                    max_new_tokens=CODES + 1,
                )

            rows.append({"prompt": tokens, "width": width, "ms": best_of(ask, 2)})
            print(rows[-1], file=sys.stderr, flush=True)
    items = torch.tensor(itemset.load(few).items(), device=model.device)
    for tokens in PROMPTS:
        (prompt,) = prompts(np.random.default_rng(7), tokens)
        rows.append({"prompt": tokens, "best": _best(model, prompt["prompt_token_ids"], items)})
    return rows


@torch.inference_mode()
def _best(model: Any, prompt: list[int], items: torch.Tensor) -> list[list[int]]:
    """The best of these items [n, CODES], by their tokens' log-probabilities after the prompt and their end's."""
    tokens, scores = torch.tensor([prompt], device=items.device), []
    cached = model(tokens[:, :-1], use_cache=True).past_key_values
    for part in items.split(100):
        past = copy.deepcopy(cached)
        past.batch_repeat_interleave(len(part))
        ids = torch.cat((tokens[:, -1:].expand(len(part), -1), part), 1)
        logits = model(ids, past_key_values=past).logits.log_softmax(-1)
        wanted = torch.nn.functional.pad(part, (0, 1), value=END)
        scores.append(logits.gather(2, wanted[:, :, None])[:, :, 0].sum(1))
    found: list[list[int]] = items[torch.cat(scores).topk(BEST)[1]].tolist()
    return found


PARTS: dict[str, Callable[..., list[Row]]] = {"inside": inside, "rounds": rounds, "generate": with_generate}


def measure(script: str, items: int, directory: Path) -> dict[str, list[Row]]:
    """All parts, each in a process of its own."""
    file, few = _files(items, directory)
    results: dict[str, list[Row]] = {}
    for name in PARTS:
        results[name] = in_process(script, name, file, few, v2=CUDA or name == "inside")  # type: ignore[assignment]
    return results


def together_of(script: str, items: int, directory: Path) -> list[Row]:
    rows: list[Row] = in_process(script, "together", *_files(items, directory))  # type: ignore[assignment]
    return rows


def _files(items: int, directory: Path) -> tuple[str, str]:
    return (
        semantic_ids(items, directory / "codes.itemset", CODES),
        semantic_ids(FEW, directory / "few.itemset", CODES),
    )


def tables(results: dict[str, list[Row]]) -> str:
    best = {row["prompt"]: row["best"] for row in results["generate"] if "best" in row}
    lines = _table(
        "prompt tokens | width | lists | ms | ordinary request, ms | model, ms | beyond / model | lists a second | "
        "legal | recall of 10 | KV, MiB | with copies, MiB"
    )
    for row in results["inside"]:
        if "lists" not in row:
            continue
        beyond = row["ms"] - row["ordinary_ms"]
        recall = np.mean([item in best[row["prompt"]] for item in row["best"]])
        cells = [f"{row[key]:,}" for key in ("prompt", "width", "lists")]
        cells += [f"{row['ms']:,.0f}", f"{row['ordinary_ms']:,.0f}", f"{row['model_ms']:,.1f}"]
        cells += [f"{beyond / row['model_ms']:.2f}", f"{1e3 * row['lists'] / row['ms']:,.0f}", f"{row['legal']:.0%}"]
        cells += [f"{recall:.1f}", f"{row['kv_mib']:,.0f}", f"{row['copies_mib']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *_table("prompt tokens | width | inside, ms | rounds | times | vLLM's own | legal | `generate()` | times"),
    ]
    mine = {(row["prompt"], row["width"]): row["ms"] for row in results["inside"] if row.get("lists") == 1}
    others = {(row["prompt"], row["width"]): row["ms"] for row in results["generate"] if "ms" in row}
    for row in results["rounds"]:
        ms, generate = (of[row["prompt"], row["width"]] for of in (mine, others))
        cells = [f"{row['prompt']}", f"{row['width']}", f"{ms:,.0f}", f"{row['rounds_ms']:,.0f}"]
        cells += [f"{row['rounds_ms'] / ms:.1f}", f"{row['own_ms']:,.0f}", f"{row['own_legal']:.0%}"]
        lines.append(f"| {' | '.join([*cells, f'{generate:,.0f}', f'{generate / ms:.1f}'])} |")
    lines += ["", *_table("lists in flight | step, ms | nine of ten take at most | longest, ms")]
    for row in results["inside"]:
        if "wait_width" in row:
            what = f"of width {row['wait_width']}" if row["wait_width"] else "none"
            times = (row["median_ms"], row["ninth_ms"], row["longest_ms"])
            lines.append(f"| {what} | {' | '.join(f'{ms:.0f}' for ms in times)} |")
    return "\n".join(lines)


def _table(heads: str) -> list[str]:
    return [f"| {heads} |", "|" + "--:|" * (heads.count(" | ") + 1)]
