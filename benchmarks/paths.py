"""Real engines without a set, with ours on the device and on the host, and with the peers: tokens a second and times to
the first token; with `--drafts` how far speculation carries.

python benchmarks/paths.py --json docs/benchmarks/paths.json
python benchmarks/paths.py --drafts none forced "draft model" --items 1000000 --batches 8

In SGLang's virtual environment it measures SGLang (0.5.23), else vLLM's model runner V2. Every row comes from a process
of its own. Sets of up to 10,000 items are texts in the request: a `choice` for us and in vLLM, one regular expression
for SGLang's peers. Larger ones are semantic IDs of 8 tokens in a file, which peers cannot take. Without a GPU the
device path runs in Triton's interpreter or a stand-in, so that its times mean nothing: counts do. "tokens a step" is
the mean number of tokens that a verification yields; the draft model is random, and owes what it gets right to the set.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import runner
from runner import GPU, Report, Row, checkouts, engine_here, environment_of, isolated, make_texts, ms_of, parser, saved

KINDS = ("unconstrained", "device", "host", "xgrammar", "llguidance")
DRAFTS = ("none", "ngram", "forced", "draft model")
TEXTS, LENGTH, LIMIT = 10_000, 8, 600
Ask = Any  # of a batch's size, with tokens at most: returns the tokens that came


def vllm(kind: str, model: str, batch: int, file: str, texts: list[str], drafts: str) -> tuple[Ask, Any]:
    """What asks the engine, and the engine."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    ours = kind in ("device", "host")
    given: Row = {"max_num_seqs": batch, "dtype": "auto" if GPU else "float32", "disable_log_stats": False}
    given["structured_outputs_config"] = {"backend": "static" if ours else kind if kind in KINDS[3:] else "auto"}
    if ours:
        options: Row = {"item_set_path": kind} | ({"item_sets": {"ids": file}} if file else {})
        given["additional_config"] = options | ({"forced_drafts": True} if drafts == "forced" else {})
    if drafts in ("ngram", "forced"):
        speculative: Row = {"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
        given["speculative_config"] = speculative
    elif drafts == "draft model":
        from models import cached_tiny_llama

        draft = str(cached_tiny_llama(seed=1))
        given["speculative_config"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    llm = LLM(model, enforce_eager=not GPU, max_model_len=256, **given)

    def ask(size: int, tokens: int) -> int:
        chosen: Row = {"ignore_eos": True}
        if kind != "unconstrained":
            chosen = {"structured_outputs": StructuredOutputsParams(choice=texts)}
            chosen = {"extra_args": {"item_set": "ids"}} if file else chosen
        params = SamplingParams(temperature=1, seed=1, max_tokens=min(tokens, LENGTH + 1 if file else 64), **chosen)
        outputs = llm.generate([f"Item {i}:" for i in range(size)], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return ask, llm


def sglang(kind: str, model: str, batch: int, file: str, texts: list[str], drafts: str) -> tuple[Ask, Any]:
    import sglang as engines

    ours = kind in ("device", "host")
    given: Row = {"grammar_backend": "static" if ours else kind if kind == "llguidance" else "xgrammar"}
    given |= {"item_set_path": kind} if ours else {}
    given |= {"item_sets": {"ids": file}} if ours and file else {}
    if not GPU:
        given |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "dtype": "float32"}
        given |= {"max_total_tokens": 8_192, "mem_fraction_static": 0.2}
    if drafts == "ngram":
        given["speculative_algorithm"] = "NGRAM"
    common: Row = {"context_length": 256, "max_running_requests": batch, "log_level": "error", "sleep_on_idle": True}
    running = engines.Engine(model_path=model, skip_server_warmup=True, **common | given)

    def ask(size: int, tokens: int) -> int:
        params: Row = {"temperature": 1.0, "max_new_tokens": min(tokens, LENGTH + 1 if file else 64)}
        if kind == "unconstrained":
            params["ignore_eos"] = True
        elif file:
            params["item_set"] = "ids"
        else:
            params |= {"choice": texts} if ours else {"regex": "(" + "|".join(map(re.escape, texts)) + ")"}
        outputs = running.generate(prompt=[f"Item {i}:" for i in range(size)], sampling_params=params)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    return ask, None


def measure(engine: str, kind: str, batch: int, items: int, file: str, drafts: str, rounds: int) -> Row:
    texts, tiny = ([], []) if file else (make_texts(items), make_texts(items + 20)[items:])
    given = list(tiny or texts)
    ask, llm = (sglang if engine == "sglang" else vllm)(kind, runner.tiny_model(), batch, file, given, drafts)
    ask(1, 1)
    ask(batch, 64)  # compiles what is to be compiled
    given[:] = texts
    row: Row = {"first request, ms": ms_of(lambda: ask(1, 1))}
    row["later request, ms"] = median(ms_of(lambda: ask(1, 1)) for _ in range(5))
    ask(batch, 64)
    before, began = counters(llm), time.perf_counter()
    tokens = sum(ask(batch, 64) for _ in range(rounds))
    row["tokens a second"] = tokens / (time.perf_counter() - began)
    verified, drafted, accepted = (now - then for now, then in zip(counters(llm), before, strict=True))
    if verified:
        row |= {"tokens a step": 1 + accepted / verified, "accepted of drafted": accepted / drafted}
    return row


def counters(llm: Any) -> tuple[float, ...]:
    """vLLM's verification steps of a request, tokens drafted, tokens accepted."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()} if llm else {}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return tuple(values.get(f"vllm:spec_decode_{name}", 0) for name in names)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:4]))
    options.add_argument("--drafts", nargs="+", choices=DRAFTS, default=["none"])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--items", type=runner.whole, nargs="+", default=[100, 10_000, 10**6])
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    engine, rows = engine_here(), []
    env = environment_of(engine) | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory() as folder:
        for items in arguments.items:
            file = saved(runner.random_ids(items), Path(folder, f"{items}.itemset")) if items > TEXTS else ""
            for batch in arguments.batches:
                cases = [(drafts, kind) for drafts in arguments.drafts for kind in arguments.kinds]
                for drafts, kind in cases:
                    if file and kind in KINDS[3:]:
                        continue
                    for code, checkout in checkouts(arguments) if kind in ("device", "host") else [({}, Path())]:
                        row = {"items": items, "batch": batch, "kind": kind, "drafts": drafts, **code}
                        given = (engine, kind, batch, items, file, drafts, arguments.rounds)
                        own = {"env": env, "timeout": LIMIT, **({"checkout": checkout} if code else {})}
                        rows.append(row | (isolated(measure, *given, **own) or {"first request, ms": "not done"}))
    Report(arguments).add(engine, rows, x="items", y="tokens a second", by="kind")


if __name__ == "__main__":
    main()
