"""`item_set_narrow_head` in vLLM on model runner V2: logits of a set's own tokens only, beside those of all tokens.

python benchmarks/narrow_head.py --json docs/benchmarks/narrow_head.json

The model has the shape of Qwen3-0.6B (hidden size 1,024, a vocabulary of 151,936) and random weights. Items have four
tokens, each level its own; the smallest alphabet is one range of tokens, the others lie scattered. "on" and "off" take
turns in one engine, with the same prompts, which are not cached; ms are the least of several. "same" says whether the
items or tokens are equal, "apart" is the largest difference of scores.

lists: two layers; ms of one list of renormalised scores. memory: how far the process's memory rises while a second list
is made. raw: lists of raw scores, whose logits are of all tokens, all rows' at once and a tenth at a time.
answers: 28 layers; ms of five greedy steps of all rows, forward pass and head: the sampler, which Triton's
interpreter runs on a CPU, is not counted. "no set" are the same requests without a set. On a GPU: ms of 64 steps after
512 tokens, all of them and sampled; items are repeated.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from runner import GPU, Engine, Memory, Report, Row, environment_of, in_turns, isolated, parser

VOCABULARY, END, CODES, PROMPT = 151_936, 1, 4, 64
ALPHABETS = (1_024, 8_192, 50_000)
BRANCHES = (16, 4, 2)  # children of a node of each level but the first, which has a quarter of the alphabet
WIDTHS, WIDEST, REPEATS = (64, 256), 1_000, 3
ROWS, STEPS, CONTEXT = ((64, 256, 512), 64, 512) if GPU else ((1, 16, 64), 5, 2)


def items_of(alphabet: int) -> Any:
    """Items with this many distinct tokens, and no tails: [items, CODES] uint32."""
    rng, each = np.random.default_rng(alphabet), alphabet // CODES
    tokens = np.arange(100_000, 100_000 + CODES * each)
    if alphabet > min(ALPHABETS):
        tokens = np.sort(rng.choice(np.arange(2_000, VOCABULARY), CODES * each, replace=False))
    levels = tokens.reshape(CODES, each)
    rows = levels[0][:, None]
    for level, branches in zip(levels[1:], BRANCHES, strict=True):
        first = rng.integers(0, each, len(rows))[:, None] + np.arange(branches) * (each // branches)
        rows = np.concatenate((rows.repeat(branches, 0), level[first.reshape(-1) % each][:, None]), 1)
    return rows.astype(np.uint32)


def model_of(folder: Path, layers: int, kv_heads: int) -> str:
    """A folder with a model's configuration and a tokenizer. vLLM draws the weights."""
    from models import tiny_tokenizer

    shape = {"hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": layers, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": kv_heads, "hidden_act": "silu"}
    more = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    more |= {"vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 8_192}
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape | heads | more | {"eos_token_id": END}))
    return str(folder)


class Switched:
    """An engine whose narrow head can be turned off between two requests."""

    def __init__(self, folder: str, layers: int, kv_heads: int, repeated: int = 1, **given: Any) -> None:
        from vllm.model_executor.model_loader import dummy_loader

        import itemset

        dummy_loader.initialize_single_dummy_weight = random_weight  # vLLM's are so small that all logits are equal
        sets = {}
        for alphabet in ALPHABETS:
            items = np.tile(items_of(alphabet), (1, repeated))
            itemset.build(items).save(sets.setdefault(f"of {alphabet}", f"{folder}/{alphabet}.itemset"))
        options = {"item_sets": sets, "ranked_list_beams": WIDEST, "item_set_narrow_head": "on"}
        common: Row = {
            "load_format": "dummy",
            "max_model_len": 1_024,
            "dtype": "bfloat16" if GPU else "float32",
            "block_size": 32,
        }
        common |= {"max_num_batched_tokens": 2_048, "enable_prefix_caching": False}
        model = model_of(Path(folder), layers, kv_heads)
        self.llm = Engine("vllm-v2", "", model=model, options=options, **common | given).llm
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        (self._head,) = (one.narrow for one in self.runner.sampler.logits_processors if hasattr(one, "narrow"))
        assert self._head.why_not is None, self._head.why_not

    def turn(self, on: bool) -> None:
        self._head.why_not = None if on else "turned off"

    def list(self, alphabet: int, width: int, seed: int = 0, *, renormalised: bool = True) -> Any:
        from vllm_static.front.list_requests import RankingParams

        options = {"item_set": f"of {alphabet}", "width": width, "renormalised": renormalised}
        params = RankingParams(beam_width=20, max_tokens=CODES + 1, extra_args=options)
        (found,) = self.llm.beam_search(_prompts(seed, 1, PROMPT), params)
        assert found.rounds <= CODES + 1, "the list took rounds of requests"
        return [one.tokens for one in found.sequences], [one.cum_logprob for one in found.sequences]

    def answers(self, name: str | None, rows: int, **more: Any) -> Any:
        from vllm import SamplingParams

        words = {"temperature": 0, "max_tokens": STEPS, "detokenize": False} | more
        words |= {"ignore_eos": True} if name is None else {"extra_args": {"item_set": name}}
        outputs = self.llm.generate(_prompts(0, rows, CONTEXT), SamplingParams(**words), use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]


def random_weight(tensor: Any, *_: Any) -> None:
    if tensor.is_floating_point():
        tensor.data.normal_(0, 0.05) if tensor.dim() > 1 else tensor.data.fill_(1)


def _prompts(seed: int, count: int, length: int) -> Any:
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": row} for row in rng.integers(100, 90_000, (count, length)).tolist()]


def _ways(engine: Switched, work: Callable[[], Any]) -> tuple[Row, list[Any]]:
    """Milliseconds of work, on and off in turns, and what each gave."""
    found: dict[str, Any] = {}

    def way(name: str) -> Callable[[], None]:
        def run() -> None:
            engine.turn(name == "on")
            found[name] = work()

        return run

    ms = in_turns({name: way(name) for name in ("off", "on")}, REPEATS, min)
    return {f"ms {name}": took for name, took in ms.items()} | {"off / on": ms["off"] / ms["on"]}, list(found.values())


def lists(folder: str, timed: bool, widest: bool) -> dict[str, list[Row]]:
    engine = Switched(folder, 2, 1, max_num_seqs=256, kv_cache_memory_bytes=3 << 30)
    rows, memory = list[Row](), list[Row]()
    for alphabet in ALPHABETS:
        for width in WIDTHS if timed else ():
            made, ((tokens, scores), (others, other_scores)) = _ways(engine, partial(engine.list, alphabet, width))
            apart = float(np.abs(np.subtract(scores, other_scores)).max())
            same = {"same": tokens == others, "apart": apart}
            rows.append({"alphabet": alphabet, "width": width} | made | same)
            print(rows[-1], file=sys.stderr, flush=True)
        peaks = {}
        for name in ("off", "on") if widest else ():
            engine.turn(name == "on")
            engine.list(alphabet, WIDEST)  # what a first one makes stays
            with Memory() as peak:
                engine.list(alphabet, WIDEST)
            peaks[f"MiB {name}"] = peak.peak / 2**20
        whole = {"logits, MiB": WIDEST * VOCABULARY * 4 / 2**20}
        memory.append({"alphabet": alphabet, "width": WIDEST} | peaks | whole)
    return ({"lists": rows} if timed else {}) | ({"memory": memory} if widest else {})


def raw(folder: str) -> list[Row]:
    from vllm_static.worker import lists

    engine, made = Switched(folder, 2, 1, max_num_seqs=256, kv_cache_memory_bytes=3 << 30), list[Row]()
    rows = {"whole": 4 * WIDEST, "in parts": lists.PARTS * WIDEST // 10}  # that go into one product, or into PARTS

    for alphabet in ALPHABETS:
        row: Row = {"alphabet": alphabet, "width": WIDEST}
        found: dict[str, Any] = {}
        for way in [*rows, *rows]:
            lists.WideLists._most_logits = property(lambda _, most=rows[way]: most)
            with Memory() as peak:
                started = time.perf_counter()
                found[way] = engine.list(alphabet, WIDEST, renormalised=False)
                row[f"ms {way}"] = 1e3 * (time.perf_counter() - started)
            row[f"MiB {way}"] = peak.peak / 2**20
        (tokens, scores), (others, other_scores) = found.values()
        made.append(row | {"same": tokens == others, "apart": float(np.abs(np.subtract(scores, other_scores)).max())})
        print(made[-1], file=sys.stderr, flush=True)
    return made


def answers(folder: str) -> list[Row]:
    length = 1_024 if GPU else 64
    more: Row = {"max_num_seqs": max(ROWS), "max_model_len": length, "kv_cache_memory_bytes": (40 if GPU else 1) << 30}
    engine = Switched(folder, 28, 8, -(-STEPS // CODES) if GPU else 1, **more)
    spent, timed_ones = [0.0], (engine, "answers") if GPU else (engine.runner.model, "forward", "compute_logits")

    def timed(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = own(*args, **kwargs)
        spent[0] += 1e3 * (time.perf_counter() - started)
        return result

    for method in timed_ones[1:]:
        setattr(timed_ones[0], method, partial(timed, getattr(timed_ones[0], method)))
    made = list[Row]()
    for alphabet in ALPHABETS:
        for count in ROWS:
            best, found = dict[str, float](), dict[str, Any]()
            ways = {"no set": (None, False), "off": (f"of {alphabet}", False), "on": (f"of {alphabet}", True)}
            for _ in range(REPEATS):
                for way, (name, on) in ways.items():
                    engine.turn(on)
                    spent[0] = 0.0
                    found[way] = engine.answers(name, count)
                    best[way] = min(best.get(way, spent[0]), spent[0])
            row: Row = {"alphabet": alphabet, "rows": count} | {f"ms {way}": ms for way, ms in best.items()}
            row |= {"no set / on": best["no set"] / best["on"], "off / on": best["off"] / best["on"]}
            made.append(row | {"same": found["off"] == found["on"]})
            print(made[-1], file=sys.stderr, flush=True)
        seeded = []
        for on in (False, True):
            engine.turn(on)
            seeded.append(engine.answers(f"of {alphabet}", 16, temperature=1.0, seed=3))
        made[-1]["same seeded"] = made[-2]["same seeded"] = made[-3]["same seeded"] = seeded[0] == seeded[1]
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=["lists", "memory", "raw", "answers"])
    arguments = options.parse_args()
    report, env = Report(arguments), environment_of("vllm-v2") | {"OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only in (None, "lists", "memory"):
            timed, widest = (arguments.only in (None, name) for name in ("lists", "memory"))
            for name, rows in isolated(lists, folder, timed, widest, env=env).items():
                report.add(name, rows)
        if arguments.only in (None, "raw") and not GPU:
            report.add("raw", isolated(raw, folder, env=env))
        if arguments.only in (None, "answers"):
            report.add("answers", isolated(answers, folder, env=env))


if __name__ == "__main__":
    main()
