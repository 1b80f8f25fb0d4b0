"""Slates on SGLang's device path: the answers of the host path, told alike, also after they were retracted."""

from __future__ import annotations

from typing import Any

import pytest
from inside_cases import KEYS, TITLES, sets
from models import tiny_tokenizer

DELAYED = "a sampling was delayed"  # cpu/sitecustomize.py


@pytest.fixture(scope="module")
def options(tmp_path_factory, named_sets):
    files = sets(tmp_path_factory.mktemp("slates"), tiny_tokenizer())
    files |= {"fixed": named_sets["fixed"].path, "tagged": named_sets["tagged"].path}
    return {"grammar_backend": "static", "item_sets": files}


def slate(item_set: Any = "titles", n: int = 4, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 120, "slate": {"item_set": item_set, "n": n, **more}}


SLATES = {
    "four": slate(),
    "all": slate(n=len(TITLES)) | {"max_new_tokens": 230},
    "some": slate(n=3, exclude_keys=KEYS[:14]),
    "inline": slate(["red", "green", "blue", "grün"], 3),
    "filtered": slate("tagged", 4, item_filter={"tag": {"$lt": 1}}),
    "filtered, and others left out": slate("tagged", 4, item_filter={"tag": 1}, exclude_keys=["item 1", "item 4"]),
    "semantic ids": slate("fixed", 6, separator=""),
}


def answers_of(outputs: list[Any]) -> list[Any]:
    return [(one["output_ids"], one["meta_info"].get("items")) for one in outputs]


def test_the_same_answers_as_on_the_host_path(engines, tiny_model, options):
    """In one batch with items and free text; no sampling waits for the host."""
    others = [{"temperature": 0, "max_new_tokens": 20, "item_set": "titles"}, {"temperature": 0, "max_new_tokens": 9}]
    params = [*SLATES.values(), *others]
    prompts = [f"prompt {i}" for i in range(len(params))]
    found = {}
    for path in ("device", "host"):
        engine = engines(tiny_model, item_set_path=path, **options)
        before = engine.log().count(DELAYED)
        found[path] = answers_of(engine.generate(prompts, params))
        assert (engine.log().count(DELAYED) > before) == (path == "host")
    for name, ours, theirs in zip(SLATES, *found.values(), strict=False):
        assert ours == theirs, name
        keys = [item["key"] for item in ours[1]]
        assert len(set(keys)) == len(keys) == SLATES[name]["slate"]["n"], name
    assert found["device"] == found["host"]


def test_retracted_slates_begin_anew(engines, tiny_model, options):
    """They walk their output again, into an empty list; the kernels are Triton's."""
    params, prompts = slate("fixed", 20, separator=""), [f"slate {i}" for i in range(16)]
    roomy = engines(tiny_model, item_set_path="device", **options)
    short = {"max_total_tokens": 450, "schedule_conservativeness": 0.01, "item_set_kernels": "triton"}
    tight = engines(tiny_model, item_set_path="device", **options, **short)
    expected, found = (answers_of(engine.generate(prompts, params)) for engine in (roomy, tight))
    assert "Retract requests" in tight.log()
    assert found == expected
    for _, items in expected:
        assert len({item["key"] for item in items}) == 20
