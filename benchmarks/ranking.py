"""Measures ranked lists in the real vLLM engine: how near a beam comes to the exact ranking, and at what price.

python benchmarks/ranking.py --json docs/benchmarks/ranking.json --plot docs/benchmarks/ranking.png

Film titles with SmolLM2-135M in float32: every title is scored by one request of its own, which gives the exact ranking
and the price of exhaustive scoring; against it stand a beam of single tokens (computed from these scores), our ranked
lists, plain and proven, and vLLM's own beam search with xgrammar's `choice`. Semantic IDs with a small random model:
the rounds of a list, and the KV blocks that its beams hold against those of separate requests. Every engine runs in a
fresh process: on a GPU model runner V2's, without one V1's, where nothing else is named. Passes are requests, each of
which is one forward pass.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from vllm_paths import CUDA, LENGTH, ROOT, in_process, semantic_ids

SHOTS = "a comedy with robots: Short Circuit (1986)\na film about the war in Vietnam: Platoon (1986)\n"
TASTES = ["a space adventure", "a scary film", "something for children", "a love story", "a detective story"]
K = 10
WIDTHS = (1, 4, 16, 64)
BEAMS = 15  # the width at which the paper on trie-based beam search counts memory
BLOCK = 32
Answer = dict[str, Any]


class Counted:
    """An engine's beam search, with the requests that it makes of each list."""

    def __init__(self, llm: Any, params: Any) -> None:
        self.llm, self.params, self.passes = llm, params, 0
        original = llm.llm_engine.add_request

        def add_request(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            return original(*args, **kwargs)

        llm.llm_engine.add_request = add_request

    def lists(self, prompts: list[list[int]], width: int, **options: Any) -> tuple[list[Any], float, float]:
        """Of each prompt its list; seconds a list, passes a list. One prompt at a time, as a lone user would ask."""
        before, started = self.passes, time.perf_counter()
        params = self.params(width, **options)
        found = [self.llm.beam_search([{"prompt_token_ids": prompt}], params)[0] for prompt in prompts]
        seconds = time.perf_counter() - started
        return found, seconds / len(prompts), (self.passes - before) / len(prompts)


def films() -> tuple[str, list[str]]:
    sys.path.append(str(ROOT / "examples"))
    from films_data import model_dir, titles_by_key

    return str(model_dir()), list(dict.fromkeys(titles_by_key().values()))


def engine(kind: str, model: str, file: Path | None = None, **more: Any) -> Any:
    from vllm import LLM

    options = {"item_sets": {"set": str(file)}} if file else {}
    return LLM(
        model=model,
        structured_outputs_config={"backend": kind},
        additional_config=options,
        max_num_seqs=64,
        max_logprobs=-1,
        enforce_eager=not CUDA,
        **more,
    )


def titles_static(directory: str, tastes: int) -> Answer:
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    import itemset
    from vllm_static.ranking import RankingParams

    model, texts = films()
    tokenizer = AutoTokenizer.from_pretrained(model)
    items = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    path = Path(directory) / "films.itemset"
    itemset.build_text(texts, tokenizer).save(path)
    llm = engine("static", model, path, max_model_len=256, dtype="float32", block_size=BLOCK)
    end = tokenizer.eos_token_id
    prompts = [tokenizer.encode(f"{SHOTS}{taste}: ") for taste in TASTES[:tastes]]

    def params(width: int, **options: Any) -> Any:
        return RankingParams(beam_width=width, max_tokens=100, extra_args={"item_set": "set", **options})

    counted = Counted(llm, params)
    counted.lists(prompts[:1], 4)  # compiles what is to be compiled
    all_of_it, seconds = [], 0.0
    for prompt in prompts:
        started = time.perf_counter()
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=False)
        asked = [{"prompt_token_ids": [*prompt, *item, end]} for item in items]
        outputs = llm.generate(asked, scoring, use_tqdm=False)
        seconds += time.perf_counter() - started
        if max(output.num_cached_tokens for output in outputs) >= len(prompt):
            raise SystemExit("a wanted row lies in a cached block, where vLLM leaves it out: make the prompt longer")
        all_of_it.append([runs(output, len(prompt)) for output in outputs])
        print(f"exhaustive: {seconds:.0f} s", file=sys.stderr, flush=True)
    scored = [dict(zip(items, scores, strict=True)) for scores in all_of_it]
    ranked = [[item for item, _ in heapq.nlargest(K, of.items(), key=lambda one: sum(one[1]))] for of in scored]
    rows: list[Answer] = []
    for width in WIDTHS:
        single = [beam_of_tokens(of, width) for of in scored]
        rows.append({"kind": "single tokens", "width": width, "items": width} | recall(single, ranked))
        found, spent, passes = counted.lists(prompts, width)
        own = items_of(found, prompts)
        row = {"kind": "static", "width": width, "items": mean(map(len, own)), "seconds": spent, "passes": passes}
        rows.append(row | {"rounds": mean(f.rounds for f in found)} | recall(own, ranked))
        print(rows[-1], file=sys.stderr, flush=True)
    found, spent, passes = counted.lists(prompts, K, exact=True)
    own, errors = items_of(found, prompts), []
    for answer, mine, of in zip(found, own, scored, strict=True):
        errors += [abs(one.cum_logprob - sum(of[item])) for one, item in zip(answer.sequences, mine, strict=True)]
    exact = {"kind": "static, exact", "width": K, "items": mean(map(len, own)), "seconds": spent, "passes": passes}
    exact |= {"rounds": mean(f.rounds for f in found), "proven": mean(f.proven for f in found)}
    exhaustive = {"kind": "one request an item", "width": len(items), "items": len(items)}
    exhaustive |= {"seconds": seconds / tastes, "passes": len(items), "recall_1": 1.0, "recall_10": 1.0}
    ranked_texts = [[tokenizer.decode(item) for item in of] for of in ranked]
    rows += [exact | recall(own, ranked) | {"error": max(errors)}, exhaustive]
    return {"rows": rows, "ranked": ranked_texts}


def items_of(found: list[Any], prompts: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """The items of each list, without their end token."""
    return [
        [tuple(one.tokens[len(prompt) : -1]) for one in answer.sequences]
        for answer, prompt in zip(found, prompts, strict=True)
    ]


def runs(output: Any, first: int) -> list[float]:
    """The log-probabilities of a prompt's own tokens from `first` on."""
    tokens = output.prompt_token_ids
    return [output.prompt_logprobs[i][tokens[i]].logprob for i in range(first, len(tokens))]


def beam_of_tokens(scored: dict[tuple[int, ...], list[float]], width: int) -> list[tuple[int, ...]]:
    """What a beam that adds one token a round finds: items by the scores of their tokens, the end token's the last."""
    children: dict[tuple[int, ...], dict[tuple[int, ...], float]] = {}
    for item, scores in scored.items():
        for i, score in enumerate(scores):
            children.setdefault(item[:i], {})[(*item, -1)[: i + 1]] = score
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    while beams:
        grown = [(total + score, longer) for total, so_far in beams for longer, score in children[so_far].items()]
        done += [one for one in grown if one[1][-1] == -1]
        beams = heapq.nlargest(width, [one for one in grown if one[1][-1] != -1])
    return [item[:-1] for _, item in heapq.nlargest(width, done)]


def recall(lists: list[list[Any]], ranked: list[list[Any]]) -> Answer:
    """Of the exact ranking's first one and first K, the share that is in the lists."""

    def share(k: int) -> float:
        return mean(len(set(found[:k]) & set(best[:k])) / k for found, best in zip(lists, ranked, strict=True))

    return {"recall_1": share(1), "recall_10": share(K)}


def titles_xgrammar(ranked: list[list[str]], widths: list[int]) -> Answer:
    from transformers import AutoTokenizer
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
    from vllm.v1.structured_output.utils import choice_as_grammar

    model, texts = films()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode(f"{SHOTS}{taste}: ") for taste in TASTES[: len(ranked)]]
    longest = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    llm = engine("xgrammar", model, max_model_len=256, dtype="float32", block_size=BLOCK)

    def params(width: int) -> Any:
        # With choice=texts it raises "grammar is not of valid supported types": this is what vLLM makes of a choice.
        structured = StructuredOutputsParams(grammar=choice_as_grammar(texts))
        return BeamSearchParams(beam_width=width, max_tokens=longest + 1, structured_outputs=structured)

    counted = Counted(llm, params)
    rows = []
    for width in widths:
        found, spent, passes = counted.lists(prompts, width)
        lists = []
        for f, p in zip(found, prompts, strict=True):
            answers = [tokenizer.decode(one.tokens[len(p) :], skip_special_tokens=True) for one in f.sequences]
            lists.append(list(dict.fromkeys(answer for answer in answers if answer in texts)))
        row = {"kind": "vLLM's own, xgrammar", "width": width, "items": mean(map(len, lists)), "seconds": spent}
        rows.append(row | {"passes": passes} | recall(lists, ranked))
        print(rows[-1], file=sys.stderr, flush=True)
    return {"rows": rows}


def semantic(kind: str, file: str, prompt_tokens: int) -> Answer:
    """Rounds and passes of a list, and the most KV blocks that were held at a time."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_static.ranking import RankingParams

    sys.path.append(str(ROOT / "tests"))
    from models import cached_tiny_llama

    separate = kind == "separate requests"
    model = str(cached_tiny_llama())
    llm = engine("static", model, Path(file), max_model_len=512, block_size=BLOCK, enable_prefix_caching=not separate)
    prompt = np.random.default_rng(1).integers(100, 2_000, prompt_tokens).tolist()
    blocks: list[int] = []
    original = Scheduler.schedule

    def schedule(scheduler: Any, *args: Any) -> Any:
        output = original(scheduler, *args)
        pool = scheduler.kv_cache_manager.block_pool
        blocks.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one is never given away
        return output

    Scheduler.schedule = schedule
    if separate:
        params = SamplingParams(temperature=1, max_tokens=LENGTH + 1, extra_args={"item_set": "set"})
        llm.generate([{"prompt_token_ids": prompt}] * BEAMS, params, use_tqdm=False)
        return {"blocks": max(blocks)}
    counted = Counted(llm, lambda width: RankingParams(width, LENGTH + 1, extra_args={"item_set": "set"}))
    (found,), _, passes = counted.lists([prompt], BEAMS)
    return {"blocks": max(blocks), "rounds": found.rounds, "passes": passes, "items": len(found.sequences)}


def titles_table(rows: list[Answer]) -> str:
    lines = [
        "| | width | items | recall@1 | recall@10 | passes | rounds | s a list | items a second |",
        "|---|" + "--:|" * 8,
    ]
    for row in rows:
        seconds = row.get("seconds")
        timed = [f"{seconds:,.2f}", f"{row['items'] / seconds:,.1f}"] if seconds else ["", ""]
        counts = [f"{row[key]:,.1f}" if key in row else "" for key in ("passes", "rounds")]
        cells = [f"{row['width']:,}", f"{row['items']:,.1f}", f"{row['recall_1']:.2f}", f"{row['recall_10']:.2f}"]
        lines.append(f"| {row['kind']} | {' | '.join([*cells, *counts, *timed])} |")
    return "\n".join(lines)


def blocks_table(rows: list[Answer]) -> str:
    lines = ["| | items | prompt tokens | rounds | passes | KV blocks at most |", "|---|" + "--:|" * 5]
    for row in rows:
        cells = [f"{row[key]:,.0f}" if key in row else "" for key in ("set", "prompt", "rounds", "passes", "blocks")]
        lines.append(f"| {row['kind']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[Answer], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for kind in ("single tokens", "static", "vLLM's own, xgrammar"):
        mine = [row for row in rows if row["kind"] == kind]
        axes[0].plot([row["width"] for row in mine], [row["recall_10"] for row in mine], marker="o", label=kind)
        timed = [row for row in mine if "seconds" in row]
        axes[1].plot([row["width"] for row in timed], [row["seconds"] for row in timed], marker="o", label=kind)
    axes[0].set(xscale="log", ylim=(0, 1), xlabel="width", ylabel="recall@10 against the exact ranking")
    axes[1].set(xscale="log", yscale="log", xlabel="width", ylabel="s a list")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tastes", type=int, default=len(TASTES), help="prompts, of five")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), help="of vLLM's own beam search")
    parser.add_argument("--items", type=int, default=10**6, help="semantic IDs")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        name, *rest = json.loads(arguments.task)
        print(json.dumps({"static": titles_static, "xgrammar": titles_xgrammar, "semantic": semantic}[name](*rest)))
        return
    with tempfile.TemporaryDirectory() as directory:
        ours = in_process(__file__, "static", directory, arguments.tastes, v2=CUDA)
        theirs = in_process(__file__, "xgrammar", ours["ranked"], arguments.widths, v2=CUDA)
        path = semantic_ids(arguments.items, Path(directory) / "ids.itemset")
        blocks = []
        for prompt in (100, 480):
            for kind in ("V1", "V2", "separate requests"):
                row = {"kind": kind, "set": arguments.items, "prompt": prompt}
                blocks.append(row | in_process(__file__, "semantic", kind, path, prompt, v2=kind == "V2"))
                print(blocks[-1], file=sys.stderr, flush=True)
    rows = ours["rows"] + theirs["rows"]
    print(f"{titles_table(rows)}\n\n{blocks_table(blocks)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"titles": rows, "semantic IDs": blocks}, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
