"""Ranked lists in the real engines: made in a step, in rounds of requests, by the engine's own beam search, by a draft
head, and by Hugging Face's generate().

python benchmarks/lists.py --json docs/benchmarks/lists.json
python benchmarks/lists.py --counts 1 8 --widths 64 256 --ways "in a step" --before ../before
python benchmarks/lists.py --prompts 62 --widths 5000 --ways "in a step" --peak --layers 2 --kv-gib 3
python benchmarks/lists.py --recall 100

In SGLang's virtual environment it measures SGLang, else vLLM's model runner V2, without a GPU in Triton's interpreter.
10^6 random semantic IDs of 4 tokens, a tiny random Llama in float32 (`--layers` takes a random model of Qwen3-0.6B's
shape with that number of layers; vLLM only), prompts that no prefix cache has seen. All ways of
an engine take turns, beside an ordinary request for one token of each prompt ("one token"); the least time of several
counts, because other work only ever adds to it. The engine's own search knows no set; of its beams, "legal" are in it.
`--counts` are lists whose prompts end in one step. The draft head has random weights: its time says something, its
items do not. `--peak` is how far the process's memory rises, or a GPU's, while a list is made that is not the first.

`--recall`: what width buys. The retrieval example's model, after what so many of its users watched: the share of the
exact ten and hundred best that a beam finds, among its films and among 10^6 IDs of the same codes, and the passes of
a list of `width` items, at most a hundred.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import runner
from narrow_head import model_of, random_weight
from runner import (
    END,
    GPU,
    VOCABULARY,
    Engine,
    Memory,
    Report,
    Row,
    checkouts,
    in_turns,
    isolated,
    parser,
    random_prompts,
)

CODES, MOST = 4, 5_000  # tokens of an ID; beams at a time
PLACEHOLDERS = range(2_000, 2_000 + CODES)
WAYS = ("in a step", "rounds", "own", "draft head", "generate()")
DEEP = 100  # the most items whose recall is measured
WIDTHS: list[Any] = [10, 64, 256, 1_000, 5_000, [64, 512, 5_000], [64, 256, 1_000], [10, 64, 256]]


def measure(
    engine: str, file: str, head: str, ways: list[str], cells: list[list[int]], repeats: int, model: str, peak: bool,
    kv_gib: int,
) -> list[Row]:  # fmt: skip
    """A row for each cell: prompt tokens, width, lists."""
    import itemset

    options = {"ranked_list_beams": MOST, "ranked_list_limit": MOST} | ({"item_set_draft_head": head} if head else {})
    given: Row = {}
    if model:
        from vllm.model_executor.model_loader import dummy_loader

        dummy_loader.initialize_single_dummy_weight = random_weight
        given = {"load_format": "dummy", "max_model_len": max(tokens for tokens, _, _ in cells) + 64}
    if kv_gib:
        given["kv_cache_memory_bytes"] = kv_gib << 30
    running, item_set, rows = Engine(engine, file, model=model, options=options, **given), itemset.load(file), []
    for tokens, width, count in cells:
        prompts, found = random_prompts(tokens, count), {}

        def ask(way: str) -> None:
            words = {"in a step": {"item_set": "ids"}, "rounds": {"item_set": "ids", "max_passes": 10_000}}
            words["draft head"] = words["in a step"]
            found[way] = running.best(next(prompts), CODES, width, **words.get(way, {}))  # noqa: B023

        calls: dict[str, Callable[[], Any]] = {"one token": lambda: running.one_token(next(prompts))}  # noqa: B023
        calls |= {way: lambda way=way: ask(way) for way in ways}
        row: Row = {"prompt": tokens, "width": width, "lists": count}
        row |= {f"{name}, ms": ms for name, ms in in_turns(calls, repeats, min).items()}
        for way in ways if peak else ():
            with DeviceMemory() as memory:
                ask(way)
            row[f"{way}, MiB"] = memory.peak / 2**20
        legal = {way: [item_set.find(item) is not None for of in items for item in of] for way, items in found.items()}
        assert all(all(of) for way, of in legal.items() if way != "own")
        row |= {"own, legal": float(np.mean(legal["own"]))} if "own" in legal else {}
        rows.append(row)
    return rows


class DeviceMemory(Memory):
    """On a GPU how far its memory rises; else the process's."""

    def __enter__(self) -> Memory:
        if GPU:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if GPU:
            import torch

            self.peak = torch.cuda.max_memory_allocated() - self._held


def recall(engine: str, users: int, items: int, folder: str) -> list[Row]:
    """A row for each width: passes and time of a list, and the share of the exact ten and hundred best that it has.
    items: 0 for the films alone."""
    import films_data
    import retrieval
    import retrieval_data
    import retrieval_model

    import itemset
    from vllm_static.front.list_requests import RankingParams

    model, index = retrieval.prepare(films_data.CACHE / "retrieval", None)
    films = itemset.load(index)
    histories = [watched[-retrieval_model.MEMORY - 1 : -1] for watched in retrieval_data.histories()[:users]]
    prompts = [{"prompt_token_ids": [t for film in films.tokens(one) for t in (*film, 2)]} for one in histories]
    file = str(index)
    if items:
        codes = np.array(films.tokens(films.keys.to_pylist()))
        rng, (low, high) = np.random.default_rng(0), (codes.min(0), codes.max(0) + 1)
        places = rng.choice(int(np.prod(high - low)), items, replace=False)
        made = np.stack(np.unravel_index(places, high - low), 1) + low
        file = runner.saved(made.astype(np.uint32), Path(folder, "codes.itemset"))
    options = {"ranked_list_beams": MOST, "ranked_list_limit": MOST, "ranked_list_passes": 10**6}
    llm = Engine(engine, file, model=str(model), options=options).llm

    def best(width: Any, prompts: list[Any], **words: Any) -> tuple[list[Any], list[list[Any]]]:
        k = min(DEEP, np.atleast_1d(width)[-1].item())
        words |= {"item_set": "ids", "width": width}
        found = llm.beam_search(prompts, RankingParams(beam_width=k, max_tokens=CODES + 1, extra_args=words))
        return found, [[tuple(item.tokens) for item in one.sequences] for one in found]

    widths = [one for one in WIDTHS if items or max(np.atleast_1d(one)) <= len(films)]
    found, exact = best(max(one for one in widths if isinstance(one, int)), prompts)
    for i, one in enumerate(found):
        if not one.proven:  # the widest beam has not seen all that could be better
            exact[i] = best(DEEP, prompts[i : i + 1], exact=True)[1][0]
    rows = []
    for width in widths:
        best(width, prompts)
        started = time.perf_counter()
        found, lists = best(width, prompts)
        row: Row = {"items": items or len(films), "width": str(width).replace("000", ",000")}
        row["ms a list"] = 1e3 * (time.perf_counter() - started) / len(prompts)
        row["passes"] = float(np.mean([one.passes for one in found]))
        for k in (10, DEEP):
            shared = [len({*one[:k]} & {*own[:k]}) / k for one, own in zip(lists, exact, strict=True)]
            row[f"recall@{k}"] = float(np.mean(shared)) if len(lists[0]) >= k else None
        rows.append(row)
    return rows


def generate(file: str, cells: list[list[int]], repeats: int) -> list[float]:
    """Milliseconds of each cell by Hugging Face's `generate()`, whose beams our processor keeps in the set."""
    import torch
    from transformers import AutoModelForCausalLM

    import itemset
    from itemset.adapters.huggingface import ItemSetLogitsProcessor

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(runner.tiny_model()).eval().to("cuda" if GPU else "cpu")
    item_set, times = itemset.load(file), []
    for tokens, width, count in cells:
        processor, prompts = (
            ItemSetLogitsProcessor(item_set, prompt_length=tokens, stop_tokens=END),
            random_prompts(tokens),
        )

        def ask() -> Any:
            ids = torch.tensor(next(prompts), device=model.device)  # noqa: B023
            shape = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": CODES + 1}  # noqa: B023
            return model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[processor], **shape)  # noqa: B023

        times.append(count * in_turns({"generate": ask}, repeats, min)["generate"])
    return times


def random_head(path: Path) -> str:
    from itemset.draft_head.head import DraftHead

    DraftHead([range(100, 2_000)] * CODES, PLACEHOLDERS, hidden_size=128, vocab_size=VOCABULARY).save(path)
    return str(path)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=runner.whole, default=10**6)
    options.add_argument("--prompts", type=int, nargs="+", default=[62, 480], help="tokens")
    options.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    options.add_argument("--counts", type=int, nargs="+", default=[1], help="lists at a time")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--layers", type=int, default=0, help="of a model of Qwen3-0.6B's shape")
    options.add_argument("--peak", action="store_true", help="how far memory rises, too")
    options.add_argument("--kv-gib", type=int, default=0, help="of the KV cache")
    options.add_argument("--recall", type=int, default=0, help="measure what width buys, for so many users")
    arguments = options.parse_args()
    engine = runner.engine_here()
    if arguments.recall:
        with tempfile.TemporaryDirectory() as folder:
            ask, env = partial(isolated, recall, engine, arguments.recall), runner.environment_of(engine)
            found = [row for items in (0, arguments.items) for row in ask(items, folder, env=env)]
        Report(arguments).add("recall", found)
        return
    cells = [[p, w, n] for p in arguments.prompts for w in arguments.widths for n in arguments.counts if w * n <= MOST]
    by_engine = [way for way in WAYS[:3] if way in arguments.ways]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file = runner.saved(runner.random_ids(arguments.items, CODES), Path(folder, "ids.itemset"))
        (large := Path(folder, "model")).mkdir()
        model = model_of(large, arguments.layers, 8) if arguments.layers else ""
        for code, checkout in checkouts(arguments):
            given = {"env": runner.environment_of(engine), "checkout": checkout}
            more = (cells, arguments.repeats, model, arguments.peak, arguments.kv_gib)
            found = isolated(measure, engine, file, "", by_engine, *more, **given)
            if "draft head" in arguments.ways:
                head = random_head(Path(folder, "draft.head"))
                drafted = isolated(measure, engine, file, head, ["draft head"], *more, **given)
                found = [
                    row | {"draft head, ms": one["draft head, ms"]} for row, one in zip(found, drafted, strict=True)
                ]
            rows += [code | row for row in found]
        if "generate()" in arguments.ways:
            for row, ms in zip(rows, isolated(generate, file, cells, 2), strict=False):
                row["generate(), ms"] = ms
    for row in rows:
        times = {way: row[f"{way}, ms"] for way in WAYS if f"{way}, ms" in row}
        first = next(iter(times))
        row |= {f"{way} / {first}": ms / times[first] for way, ms in times.items() if way != first}
    Report(arguments).add(engine, rows, x="width", y="in a step, ms", by="prompt")


if __name__ == "__main__":
    main()
