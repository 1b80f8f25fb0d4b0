"""Asks vLLM for thousands of answers that hold items, and checks every one: JSON of five shapes, tags, slates.

python benchmarks/answers.py --model tiny --answers 9000
python benchmarks/answers.py --model smollm2 --answers 1000

The items are the 1,664 film titles of the examples. JSON answers are judged by `jsonschema`, given the schema with an
enum of all titles in the set's place; texts by a regular expression. Every item must be a title, and what the answer
says of it must be what stands there. A dead end is a mask without any token before an answer's end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

import itemset
from itemset.inside.composite import Composite

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

FILM = {"type": "string", "item_set": "films"}
TEXT = {"type": "string", "pattern": "^[A-Za-z ,.!]{0,12}$"}  # with maxLength, xgrammar lets control characters in
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "a field": record(film=FILM, reason=TEXT),
    "five distinct": {"type": "array", "items": FILM, "uniqueItems": True, "minItems": 5, "maxItems": 5},
    "nested": record(
        user=record(liked={"type": "array", "items": FILM, "maxItems": 2}), next=record(film=FILM, n=COUNT)
    ),
    "a film or not": {
        "type": "array",
        "items": {"anyOf": [FILM, {"const": "none of these"}, {"type": "null"}]},
        "minItems": 3,
        "maxItems": 3,
    },
    "by reference": {"$defs": {"film": FILM}, **record(a={"$ref": "#/$defs/film"}, b={"$ref": "#/$defs/film"})},
}
TAG = {"type": "tag", "begin": "<film>", "content": {"type": "item_set", "item_set": "films"}, "end": "</film>"}
TAGGED = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [TAG, {"type": "regex", "pattern": "[a-z ]{0,12}"}, TAG, {"type": "const_string", "value": "!"}],
    },
}
SLATE = {"item_set": "films", "n": 4, "separator": "\n"}
SHAPES = (*SCHEMAS, "tags", "a slate")
PEOPLE = ("children", "people", "critics", "my friends", "nobody", "we all", "you", "sailors")
TEMPERATURES = (0.0, 0.5, 1.0, 2.0)


def params(shape: str, temperature: float, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given: dict[str, Any] = {"extra_args": {"slate": SLATE}}
    if shape in SCHEMAS:
        given = {"structured_outputs": StructuredOutputsParams(json=SCHEMAS[shape])}
    elif shape == "tags":
        given = {"structured_outputs": StructuredOutputsParams(structural_tag=json.dumps(TAGGED))}
    return SamplingParams(max_tokens=250, temperature=temperature, seed=seed, **given)


def written_out(node: Any, titles: list[str]) -> Any:
    if node == FILM:
        return {"enum": titles}
    if isinstance(node, dict):
        return {key: written_out(value, titles) for key, value in node.items()}
    return [written_out(one, titles) for one in node] if isinstance(node, list) else node


class Judge:
    """Says what is wrong with an answer."""

    def __init__(self, key_of: Mapping[str, int]) -> None:
        """key_of: the key of each title."""
        self._key_of = key_of
        self._validators = {
            shape: jsonschema.Draft202012Validator(written_out(schema, list(key_of)))
            for shape, schema in SCHEMAS.items()
        }

    def fault(self, shape: str, text: str, items: list[dict[str, Any]]) -> str | None:
        """Return what is wrong with a whole answer, None if nothing is."""
        if shape in SCHEMAS:
            try:
                answer = json.loads(text)
            except ValueError as error:
                return f"no JSON: {error}"
            if error := next(self._validators[shape].iter_errors(answer), None):
                return f"jsonschema: {error.message[:80]}"
            films = [one for one in strings(answer) if one in self._key_of]
            if shape == "a field":
                films = [answer["film"]]
        elif shape == "tags":
            match = re.fullmatch("<film>(.*?)</film>[a-z ]{0,12}<film>(.*?)</film>!", text)
            if match is None:
                return "not as the tags are"
            films = list(match.groups())
        else:
            films = text.split("\n")
            if len(films) != SLATE["n"]:
                return "not as many lines as items"
        if [one["text"] for one in items] != films:
            return f"its items are said to be {[one['text'] for one in items]}"
        if shape in ("five distinct", "a slate") and len(set(films)) != len(films):
            return "an item twice"
        return self.illegal(items)

    def illegal(self, items: list[dict[str, Any]]) -> str | None:
        """Return what is wrong with the items of an answer, whole or cut."""
        wrong = [one["text"] for one in items if self._key_of.get(one["text"]) not in one["keys"]]
        return f"no titles of the set: {wrong}" if wrong else None


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [one for inner in value.values() for one in strings(inner)]
    if isinstance(value, list):
        return [one for inner in value for one in strings(inner)]
    return [value] if isinstance(value, str) else []


def count_masks(counts: Counter[str]) -> None:
    """Count every mask that the engine asks for, and those without any token."""
    fill = Composite.fill_bitmask

    def counted(self: Composite, row: Any) -> None:
        fill(self, row)
        counts["masks"] += 1
        counts["dead ends"] += not self.is_terminated and not row.any()

    Composite.fill_bitmask = counted  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--answers", type=int, default=9_000)
    args = parser.parse_args()
    from films_data import model_dir, titles_by_key
    from transformers import AutoTokenizer
    from vllm import LLM

    if args.model == "tiny":
        from models import cached_tiny_llama

        model = cached_tiny_llama()
    else:
        model = model_dir()
    tokenizer = AutoTokenizer.from_pretrained(model)
    key_of: dict[str, int] = {}
    for key, title in titles_by_key().items():
        key_of.setdefault(title, key)
    counts: Counter[str] = Counter()
    count_masks(counts)
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "films.itemset")
        itemset.build_text(list(key_of), tokenizer, keys=list(key_of.values()), escape="json").save(index)
        engine = LLM(
            str(model),
            structured_outputs_config={"backend": "static", "disable_any_whitespace": True},
            additional_config={"item_sets": {"films": str(index)}},
            max_model_len=1024,
            max_num_seqs=64,
            enforce_eager=True,
            disable_log_stats=True,
        )
        asked = [
            (SHAPES[i % len(SHAPES)], TEMPERATURES[i // len(SHAPES) % len(TEMPERATURES)], i)
            for i in range(args.answers)
        ]
        prompts = [f"{i}: Three films that {PEOPLE[i % len(PEOPLE)]} like, as I see it: " for i in range(args.answers)]
        start = time.perf_counter()
        outputs = engine.generate(prompts, [params(*one) for one in asked], use_tqdm=False)
        seconds = time.perf_counter() - start
    judge, rows, faults = Judge(key_of), defaultdict[str, Counter[str]](Counter), list[str]()
    for (shape, temperature, _), output in zip(asked, outputs, strict=True):
        answer, row = output.outputs[0], rows[shape]
        whole = answer.finish_reason == "stop"
        fault = judge.fault(shape, answer.text, answer.items) if whole else judge.illegal(answer.items)
        row["answers"] += 1
        row["items"] += len(answer.items)
        row["cut by max_tokens"] += not whole
        row["faults"] += fault is not None
        if fault is not None:
            faults.append(f"{shape}, temperature {temperature}: {fault}: {answer.text!r}")
    columns = ("answers", "cut by max_tokens", "items", "faults")
    print(f"| {args.model} | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
    for name, row in (*rows.items(), ("all", sum(rows.values(), Counter()))):
        print(f"| {name} | {' | '.join(f'{row[column]:,}' for column in columns)} |")
    print(f"{counts['masks']:,} masks, {counts['dead ends']:,} dead ends, {seconds:,.0f} s")
    print(*faults[:20], sep="\n")
    return bool(faults or counts["dead ends"])


if __name__ == "__main__":
    raise SystemExit(main())
