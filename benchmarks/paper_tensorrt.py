"""Table 1 of guided speculative decoding in TensorRT-LLM: accepted drafts of trained drafters, masked and not.

python benchmarks/papers.py tensorrt --json docs/benchmarks/papers.json

The target is the retrieval example's model, the drafter a smaller one that has learnt the same histories, or an EAGLE-3
head that has learnt the target (eagle3.py); each user asks for one film. "Not masked" is the host path of vLLM's model
runner V2, where verification alone knows the set. With a quarter of the films in stock no drafter knows which. Tokens a
step: what a verification yields, of four. "Held": in how many of a hundred steps of a JSON answer with titles in it a
device could do without the host's grammar.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import eagle3
import inside
import torch
from paths import counters
from runner import Report, Row, environment_of, isolated

DRAFTED, SIZE, LAYERS = 3, 32, 1
ANSWERS, SAMPLED = 300, (0.0, 1.0)
NAMES = {"draft_model": "a small model", "eagle3": "EAGLE-3"}
AHEAD, HELD_SIZES = (0, 1, 3), (10**3, 10**5)  # drafts, and titles
PATHS = {"masked": "device", "not masked": "host"}


def drafters(folder: Path, target: Path, index: Path, steps: int) -> dict[str, str]:
    """Teach a model of a sixteenth of the target's width squared the same histories, and a head the target. Returns
    their folders by vLLM's methods."""
    import retrieval_data
    import retrieval_model
    from films_data import titles_by_key
    from transformers import AutoTokenizer

    import itemset

    torch.set_num_threads(1)  # of models this small, more wait for each other
    keys, memory = list(titles_by_key()), retrieval_model.MEMORY
    encoded = dict(zip(keys, itemset.load(index).tokens(keys), strict=True))
    seen = [watched[:-1] for watched in retrieval_data.histories()]
    tokenizer = AutoTokenizer.from_pretrained(target)
    retrieval_model.train(seen, encoded, tokenizer, folder / "draft", size=SIZE, layers=LAYERS)
    windows = [one[i : i + memory] for one in seen for i in range(0, len(one) - memory + 1, memory // 2)]
    tokens = [retrieval_model.tokens_of(window, encoded, tokenizer.eos_token_id) for window in windows]
    head = eagle3.train(target, tokens, folder / "eagle3", DRAFTED, steps)
    return {"draft_model": str(folder / "draft"), "eagle3": head}


def measure(path: str, target: str, index: str, method: str, draft: str, answers: int) -> list[Row]:
    import retrieval_data
    import retrieval_model
    from films_data import titles_by_key
    from vllm import LLM, SamplingParams

    import itemset

    films, keys = itemset.load(Path(index)), list(titles_by_key())
    encoded = dict(zip(keys, films.tokens(keys), strict=True))
    options: Row = {"item_sets": {"films": index}, "item_set_path": path}
    speculative: Row = {"method": method, "model": draft, "num_speculative_tokens": DRAFTED}
    given: Row = {"structured_outputs_config": {"backend": "static"}, "additional_config": options}
    given |= {"speculative_config": speculative, "disable_log_stats": False, "dtype": "float32", "max_num_seqs": 16}
    llm = LLM(target, max_model_len=256, enforce_eager=True, **given)
    end = llm.get_tokenizer().eos_token_id
    prompts = []
    for watched in retrieval_data.histories()[:answers]:
        seen = watched[-retrieval_model.MEMORY - 1 : -1]
        prompts.append({"prompt_token_ids": retrieval_model.tokens_of(seen, encoded, end)})
    quarter = {"only_keys": sorted(random.Random(0).sample(keys, len(keys) // 4))}
    legal = {"all": list(encoded.values()), "a quarter": [encoded[key] for key in quarter["only_keys"]]}
    rows = []
    for name, filtered in (("all", {}), ("a quarter", quarter)):
        for temperature in SAMPLED:
            words = {"item_set": "films", **filtered}
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=films.longest + 1, extra_args=words)
            before = counters(llm)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            steps, drafted, accepted = (now - then for now, then in zip(counters(llm), before, strict=True))
            assert all(list(output.outputs[0].token_ids[:-1]) in legal[name] for output in outputs)
            row: Row = {"drafter": NAMES[method], "films in stock": name, "temperature": temperature}
            rows.append(row | {"tokens a step": 1 + accepted / steps, "accepted": accepted / drafted})
    return rows


def prepared(folder: str, steps: int) -> list[Any]:
    import retrieval
    from films_data import CACHE

    target, index = retrieval.prepare(CACHE / "retrieval", None)
    return [str(target), str(index), drafters(Path(folder), target, index, steps)]


def held(count: int, samples: int) -> list[Row]:
    """How often a device could mask an answer's next step without its grammar, which xgrammar has on the host: where
    every token that it may sample, after those of the step before that nobody has read, stands inside one item."""
    import xgrammar
    from films_data import model_dir

    from itemset.embedded.holes import Vocabulary
    from itemset.text import load_tokenizer

    tokenizer, titles = load_tokenizer(str(model_dir())), inside.titles(count)
    static = inside.Static(Vocabulary(xgrammar.TokenizerInfo.from_huggingface(tokenizer)), tokenizer, titles)
    left: dict[tuple[int, ...], int] = {}  # tokens after a prefix, at least
    for item in map(tuple, static.films.tokens(range(count))):
        for at in range(len(item) + 1):
            left[item[:at]] = min(left.get(item[:at], len(item)), len(item) - at)
    rows = []
    for shape in inside.SHAPES:
        row, tokens, begin = {"titles": count, "shape": shape}, 0, static.compile(shape)
        reach = dict.fromkeys(AHEAD, 0)
        for answer in inside.answers(shape, samples, titles, tokenizer):
            grammar = begin()
            for token in answer:
                tokens += 1
                certain = min(left[tuple(one.path)] if one.hole >= 0 else 0 for one in grammar._history[-1])
                for drafts in AHEAD:
                    # The last one may be a token that closes the item, too, for the grammar to judge.
                    reach[drafts] += certain > 2 * (drafts + 1)
                grammar.accept(token)
        rows.append(row | {f"{drafts} drafts": 100 * reach[drafts] / tokens for drafts in AHEAD})
    return rows


def main(arguments: argparse.Namespace, report: Report) -> None:
    few, env, rows = arguments.quick, environment_of("vllm-v2"), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        target, index, made = isolated(prepared, folder, 20 if few else eagle3.STEPS)
        for method, draft in made.items():
            given = target, index, method, draft, 8 if few else ANSWERS
            with ThreadPoolExecutor(2) as pool:
                jobs = {name: pool.submit(isolated, measure, path, *given, env=env) for name, path in PATHS.items()}
            ways = {name: job.result() for name, job in jobs.items()}
            for masked, not_masked in zip(*ways.values(), strict=True):
                common = {name: masked[name] for name in ("drafter", "films in stock", "temperature")}
                for name, row in zip(ways, (masked, not_masked), strict=True):
                    common |= {f"{name}: {column}": row[column] for column in ("tokens a step", "accepted")}
                rows.append(common)
    report.add("tensorrt", rows)
    report.add("tensorrt held", [row for size in HELD_SIZES for row in isolated(held, size, 10 if few else ANSWERS)])
