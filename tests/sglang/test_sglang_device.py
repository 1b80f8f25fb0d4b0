"""The device path inside the real SGLang engine: what it leaves out, and what it composes with."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging

import pytest
from asking import CITIES, EOS, answer, inline, named, prompts

import itemset

DELAYED = "a sampling was delayed"  # cpu/sitecustomize.py
COMPILES = "a GPU would compile"  # cpu/interpreted_triton.py


def test_no_sampling_waits_for_the_host(static, named_sets):
    """SGLang delays the sampling of batches with grammars until the last step's tokens have reached the host."""
    names = list(named_sets) * 2
    delays = {}
    for path in ("device", "host"):
        engine = static(path)
        before = engine.log().count(DELAYED)
        engine.generate(input_ids=prompts(len(names)), sampling_params=list(map(named, names)))
        delays[path] = engine.log().count(DELAYED) - before
    assert delays["device"] == 0
    assert delays["host"] > 5


def test_the_log_names_the_path_and_its_reason(static):
    assert "static, host path: as configured. Item sets: " in static("host").log()
    device = "static, device path, masks inside the sampler. Item sets: fixed (300 items)"
    assert device in static("auto", inline_set_memory=0).log()


def test_a_set_without_room_takes_the_host_path(static, named_sets):
    engine = static("auto", inline_set_memory=0)
    params = [*map(named, named_sets), inline(CITIES)] * 3
    outputs = engine.generate(input_ids=prompts(len(params)), sampling_params=params)
    check_items(named_sets, [*named_sets, None] * 3, outputs)
    assert "An item set takes the host path: the arena is full" in engine.log()


def check_items(named_sets, names, outputs):
    """Each answer is of its set, or without a name one of the cities."""
    for name, output in zip(names, outputs, strict=True):
        if name is None:
            assert output["text"] in CITIES
        else:
            assert answer(output) in named_sets[name].items


def test_a_neighbour_with_a_grammar_delays_and_changes_nothing(static, named_sets):
    engine = static("device")
    params = [named(name, temperature=0) for name in named_sets]
    asked = prompts(len(params) + 1)
    alone = [output["output_ids"] for output in engine.generate(input_ids=asked[:-1], sampling_params=params)]
    mixed = [*params, {"regex": "[0-9]{12}", "max_new_tokens": 40}]
    before = engine.log().count(DELAYED)
    outputs = engine.generate(input_ids=asked, sampling_params=mixed)
    assert engine.log().count(DELAYED) > before
    assert [output["output_ids"] for output in outputs[:-1]] == alone
    assert len(outputs[-1]["text"]) == 12


def test_an_aborted_request_leaves_the_others_alone(static, named_sets, tmp_path):
    engine, long = static("device"), [named("large", ignore_eos=True, max_new_tokens=200)] * 3
    outputs = engine.call(_abort_some, long, named("fixed"), str(tmp_path))
    assert [output["meta_info"]["finish_reason"]["type"] for output in outputs[:3]] == ["abort"] * 3
    assert {answer(output) for output in outputs[3:]} <= named_sets["fixed"].items
    (log,) = tmp_path.iterdir()
    assert [len(json.loads(line)["items"]) for line in log.read_bytes().splitlines()] == [1, 1, 1]


def _abort_some(engine, long, short, folder: str) -> list[dict]:
    """Three long requests are ended, once each has said something, while three short ones come and go. folder: of a log
    of their answers."""
    from itemset.serving.front import audit

    async def begun(params: dict) -> dict:
        async for part in await engine.async_generate(input_ids=[5, 6, 7], sampling_params=params, stream=True):
            engine.tokenizer_manager.abort_request(rid=part["meta_info"]["id"])
        return part

    async def whole(params: dict) -> dict:
        return await engine.async_generate(input_ids=[5, 6, 7], sampling_params=params)

    async def each() -> list[dict]:
        return await asyncio.gather(*map(begun, long), *map(whole, [short] * 3))

    audit.begin(folder, "tiny", logging.getLogger(__name__))
    outputs = engine.loop.run_until_complete(each())
    assert audit.log is not None
    audit.log.queue.join()
    audit.log = None
    return outputs


def test_inline_sets_take_turns_in_the_room_there_is(engines, tiny_model):
    """The room holds three of the twenty sets: those that nobody uses make room for others."""
    choices = [[f"{i} {j}" for j in range(200)] for i in range(20)]
    engine = engines(tiny_model, grammar_backend="static", inline_set_memory=3 << 12)
    for choice in choices * 2:
        assert engine.generate("p", inline(choice))["text"] in choice
    log = engine.log()
    assert "takes the host path" not in log
    assert log.count("sets were read named") > 40  # cpu/sitecustomize.py
    assert "sets were read UNNAMED" not in log


@pytest.mark.parametrize("path", ["device", "host"])
@pytest.mark.parametrize("parser", ["tiny", "qwen3"])
def test_the_set_begins_behind_the_reasoning(static, named_sets, path, parser):
    """The end of reasoning is one token of the tiny model, or several: these take the host path."""
    mark, fixed = {"tiny": "station", "qwen3": "</think>"}[parser], itemset.load(named_sets["fixed"].path)
    engine = static(path, reasoning_parser=parser)
    ends = engine.call(lambda engine, mark: engine.tokenizer_manager.tokenizer.encode(mark), mark)[-1:]
    if parser == "tiny":
        bias = {"logit_bias": {str(ends[0]): 6.0}}
        asked = [named("fixed", max_new_tokens=150, **bias)] * 12
        outputs = engine.generate(input_ids=prompts(12), sampling_params=asked, require_reasoning=True)
        thoughts = 0
        for output in outputs:
            tokens = output["output_ids"]
            if ends[0] in tokens:
                begin = tokens.index(ends[0]) + 1
                thoughts += begin > 1
                assert output["meta_info"]["item"] == {"key": fixed.lookup([tokens[begin:-1]])[0]}
            else:
                assert output["meta_info"]["item"] is None
        assert thoughts >= 3
    else:
        # A random model never says all of it: nothing holds before.
        output = engine.generate("p", named("fixed", max_new_tokens=30), require_reasoning=True)
        assert tuple(output["output_ids"][:4]) not in named_sets["fixed"].items
    # Without reasoning the set holds from the first token on.
    outputs = engine.generate(input_ids=prompts(3), sampling_params=named("fixed"))
    assert {answer(output) for output in outputs} <= named_sets["fixed"].items


def test_slots_are_used_again_by_requests_with_and_without_sets(static, named_sets):
    engine = static("device", max_running_requests=4, item_set_kernels="triton")
    kinds = list(itertools.islice(itertools.cycle([*named_sets, None, None]), 60))
    params = [{"max_new_tokens": 5} if name is None else named(name) for name in kinds]
    free = 0
    for name, output in zip(kinds, engine.generate(input_ids=prompts(60), sampling_params=params), strict=True):
        if name is None:
            free += any(token < 100 or token >= 1000 for token in output["output_ids"] if token != EOS)
        else:
            assert answer(output) in named_sets[name].items
    assert free > 5


def test_nothing_is_compiled_for_a_list(static):
    engine = static("device", max_running_requests=4, item_set_kernels="triton")
    asked = [named("prefixes", beam_width=3), named("ragged", beam_width=2)]
    asked += [named("ragged", beam_width=2, custom_params={"renormalised": True}), inline(CITIES, beam_width=2)]
    compiled = engine.log().count(COMPILES)
    for params in asked:
        (wanted, found) = (one.generate(input_ids=[7, 8], sampling_params=params) for one in (static("device"), engine))
        assert [one["output_ids"] for one in found["meta_info"]["beam_results"]] == [
            one["output_ids"] for one in wanted["meta_info"]["beam_results"]
        ]
    assert engine.log().count(COMPILES) == compiled > 0
    assert "rounds of requests" not in engine.log()


def test_free_requests_go_on_when_the_last_set_has_ended(static, named_sets):
    """Without the overlap scheduler, SGLang keeps what it knows of a batch from step to step."""
    engine = static("device", disable_overlap_schedule=True, item_set_kernels="triton")
    free = [{"temperature": 0, "max_new_tokens": 25, "ignore_eos": True}] * 3
    alone = engine.generate(input_ids=prompts(5)[2:], sampling_params=free)
    mixed = engine.generate(input_ids=prompts(5), sampling_params=[named("labels"), named("one"), *free])
    assert [output["output_ids"] for output in mixed[2:]] == [output["output_ids"] for output in alone]
    assert answer(mixed[0]) in named_sets["labels"].items
    assert answer(mixed[1]) in named_sets["one"].items
