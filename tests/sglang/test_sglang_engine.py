"""Item sets in the real SGLang engine, on both paths: what is generated, and how requests end."""

from __future__ import annotations

import json

import numpy as np
import pytest
from asking import answer, named, prompts
from draft_tests import check_same, greedy
from engine_tests import *  # noqa: F403 - its tests, with the engine of this module
from engine_tests import OTHERS, check_answers

import itemset

FILLED = "rows of item sets filled at once: "  # cpu/sitecustomize.py
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
JSON = ({"json": SCHEMA, "max_tokens": 60}, lambda text: json.loads(text)["n"] in (1, 2))


@pytest.fixture
def many():
    return 400


@pytest.mark.parametrize("turned", [False, True], ids=["sets-first", "grammars-first"])
def test_a_batch_mixes_sets_other_grammars_and_none(engine, named_sets, turned):
    """The first grammar of a batch acts for the whole batch in SGLang: either may be the first."""
    check_answers(engine, named_sets, 24, [JSON, *OTHERS], turned)


def test_a_step_of_the_host_path_fills_its_rows_at_once(engine, path, named_sets):
    params = [named(name) for name in named_sets] + [{"regex": "[0-9]{12}", "max_new_tokens": 40}]
    before = len(engine.log())
    outputs = engine.generate(input_ids=prompts(len(params)), sampling_params=params)
    tokens = sum(len(output["output_ids"]) for output in outputs[:-1])
    rows = [int(line.split()[0]) for line in engine.log()[before:].split(FILLED)[1:]]
    if path == "device":
        assert not rows
        return
    assert max(rows) == len(named_sets)
    assert len(rows) <= tokens / 2
    assert sum(rows) >= tokens  # no row went another way


def test_both_paths_give_the_same_answers_at_temperature_0(static, named_sets):
    words = greedy([*named_sets] * 3)
    check_same(static("device"), static("host"), prompts(len(words)), words)


def test_streaming(engine, named_sets):
    pieces = engine.generate("p", named("ragged"), stream=True)
    assert len(pieces) > 1
    assert answer(pieces[-1]) in named_sets["ragged"].items


def test_prefix_cache_and_chunked_prefill(static, path, named_sets):
    engine = static(path, chunked_prefill_size=32)
    for _ in range(2):
        outputs = engine.generate(input_ids=[list(range(200, 330))] * 4, sampling_params=named("ragged"))
        for output in outputs:
            assert answer(output) in named_sets["ragged"].items
    assert outputs[-1]["meta_info"]["cached_tokens"] > 100


def test_chunks_mixed_with_decoding(static, path, named_sets):
    engine = static(path, chunked_prefill_size=32, enable_mixed_chunk=True)
    names = [name for name in named_sets for _ in range(5)]
    long = [[200 + i] * (5 + 37 * (i % 4)) for i in range(len(names))]
    for name, output in zip(
        names, engine.generate(input_ids=long, sampling_params=list(map(named, names))), strict=True
    ):
        assert answer(output) in named_sets[name].items


def test_retraction_and_resumption(engines, tiny_model, path, tmp_path):
    """A request that SGLang retracts for want of memory begins again with what it has sampled so far."""
    items = np.random.default_rng(3).integers(100, 104, (3_000, 60))
    itemset.build(items).save(tmp_path / "long.itemset")
    options = {"grammar_backend": "static", "item_sets": {"long": str(tmp_path / "long.itemset")}}
    short = {"max_total_tokens": 700, "schedule_conservativeness": 0.01, "item_set_kernels": "triton"}
    answers = []
    for more in ({}, short):
        engine = engines(tiny_model, item_set_path=path, **options, **more)
        params = named("long", temperature=0, max_new_tokens=100)
        answers.append([answer(output) for output in engine.generate(input_ids=prompts(16), sampling_params=params)])
    assert answers[0] == answers[1]
    assert set(answers[0]) <= set(map(tuple, items.tolist()))
    assert "Retract requests" in engine.log()
