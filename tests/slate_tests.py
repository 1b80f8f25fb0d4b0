"""What holds of slates on the device path of either engine. Test modules import these, and have the fixtures `start`
(`start(path, **arguments)` is an engine with `sets_of_slates`), `others` and `host_path_taken`."""

from __future__ import annotations

from typing import Any

import pytest
from engine_words import Answer
from inside_cases import KEYS, TITLES, sets
from models import tiny_tokenizer


@pytest.fixture(scope="module")
def sets_of_slates(tmp_path_factory, named_sets):
    files = sets(tmp_path_factory.mktemp("slates"), tiny_tokenizer())
    return files | {"fixed": named_sets["fixed"].path, "tagged": named_sets["tagged"].path}


def slate(
    item_set: Any = "titles", n: int = 4, *, sampled: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 120, **(sampled or {}), "slate": {"item_set": item_set, "n": n, **more}}


SLATES = {
    "four": slate(),
    "one": slate(n=1),
    "all": slate(n=len(TITLES), sampled={"max_tokens": 230}),
    "some": slate(n=3, exclude_keys=KEYS[:14]),
    "inline": slate(["red", "green", "blue", "grün"], 3),
    "inside one another": slate(TITLES[:3], 3),
    "filtered": slate("tagged", 4, item_filter={"tag": {"$lt": 1}}),
    "filtered, and others left out": slate("tagged", 4, item_filter={"tag": 1}, exclude_keys=["item 1", "item 4"]),
    "semantic ids": slate("fixed", 6, separator=""),
    "other separator": slate(n=3, separator="\t"),
}


def check_distinct(answer: Answer, n: int) -> None:
    keys = [item["key"] for item in answer.said["items"]]
    assert len(set(keys)) == len(keys) == n


def told(answers: list[Answer]) -> list[Any]:
    return [(answer.tokens, answer.said.get("items")) for answer in answers]


def test_the_same_answers_as_on_the_host_path(start, others, host_path_taken):
    """In one batch with items and `others`. host_path_taken: how often it was, by an engine."""
    greedy = {"temperature": 0, "max_tokens": 20}
    words = [*SLATES.values(), greedy | {"item_set": "titles"}, greedy, *others]
    prompts, found = [f"prompt {i}" for i in range(len(words))], []
    for path in ("device", "host"):
        engine = start(path)
        before = host_path_taken(engine)
        found.append(engine.ask(prompts, words))
        assert (host_path_taken(engine) > before) == (path == "host")
    for name, ours, theirs in zip(SLATES, *map(told, found), strict=False):
        assert ours == theirs, name
    assert told(found[0]) == told(found[1])
    for one, answer in zip(SLATES.values(), found[0], strict=False):
        check_distinct(answer, one["slate"]["n"])
