"""Item sets in the real vLLM engine, on both model runners and both paths: what is generated, and how requests end."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
from draft_tests import check_same, greedy, repeating
from engine_tests import *  # noqa: F403 - its tests, with the engine of this module
from engine_words import CITIES, EOS
from test_vllm_ranking import check_scores_beside_others
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from itemset.serving.front import audit
from vllm_static.worker.narrow_hooks import sampled_steps

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
SAMPLES = {("v1", "host"): 2_000, ("v2", "host"): 100, ("v2", "device"): 100}


@pytest.fixture(scope="module")
def runner(way):
    return way[0]


@pytest.fixture(scope="module")
def static(way, static):
    return on_path(static, way[1])


def on_path(static: dict, path: str, kernels: str = "triton") -> dict:
    options = {"item_set_path": path, "item_set_kernels": kernels}
    return static | {"additional_config": static["additional_config"] | options}


@pytest.fixture
def engine(runner, engines, tiny_model, static):
    return engines(runner, tiny_model, **static)


@pytest.fixture
def many(way):
    return SAMPLES[way]


def named(name: str, **kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 1, "max_tokens": 20, "extra_args": {"item_set": name}} | kwargs)


def inline(choice: list[str], **kwargs) -> SamplingParams:
    structured = StructuredOutputsParams(choice=choice)
    return SamplingParams(**{"temperature": 1, "max_tokens": 40, "structured_outputs": structured} | kwargs)


def answer(output) -> tuple[int, ...]:
    """The tokens before the stop token."""
    tokens = tuple(output.outputs[0].token_ids)
    return tokens[:-1] if tokens[-1] == EOS else tokens


def test_a_step_is_filled_at_once_and_as_vllm_would(engine, way, named_sets):
    """The rows of item sets by one compiled call, whatever else is in the batch; bit for bit what vLLM fills."""
    if way[1] == "device":
        pytest.skip("no bitmask is made for item sets")
    params = [named(name) for name in named_sets] + [inline(CITIES), SamplingParams(max_tokens=8)]
    counted = engine.call(count_fills, ["p"] * len(params), params)
    assert counted["rows"] > counted["steps"]
    assert counted["mixed"]
    assert counted["calls"] == counted["steps"] > 0
    assert counted["different"] == 0


def count_fills(llm, prompts: list[Any], params: list[SamplingParams]) -> Counter[str]:
    """Generate beside a request with a regex, and fill each step's bitmask also as vLLM does, row by row.

    Returns steps with item sets, their rows, compiled calls, steps with other grammars beside them, and how many steps
    have a bitmask that differs.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    from itemset.masking import host
    from vllm_static.core.backend import StaticGrammar

    counted: Counter[str] = Counter()
    filled, fill_rows = StructuredOutputManager.grammar_bitmask, host._fill_rows

    def count(addresses, states, rows, bitmask):
        counted.update(calls=1, rows=len(rows))
        fill_rows(addresses, states, rows, bitmask)

    def compare(self, requests, request_ids, drafts):
        bitmask = filled(self, requests, request_ids, drafts).copy()
        kinds = {type(requests[name].structured_output_request.grammar) for name in request_ids}
        if StaticGrammar in kinds:
            counted.update(steps=1, mixed=len(kinds) > 1, drafts=sum(map(len, drafts.values())))
        by_vllm = filled.__wrapped__(self, requests, request_ids, drafts)
        counts = [1 + len(drafts.get(name, ())) for name in request_ids]
        rows = list(range(len(bitmask)))
        if len(bitmask) > sum(counts):  # since vLLM 0.33 all have as many, of which those after the drafts are not read
            block = len(bitmask) // len(counts)
            rows = [i * block + j for i, count in enumerate(counts) for j in range(count)]
        counted["different"] += not np.array_equal(bitmask[rows], by_vllm[rows])
        return bitmask

    regex = StructuredOutputsParams(regex="[0-9]{60}")
    llm.llm_engine.add_request("0", "p", SamplingParams(max_tokens=80, structured_outputs=regex))
    while not llm.llm_engine.step():  # its grammar is compiled beside the steps: the items could all be done before
        pass
    filling = mock.patch.object(StructuredOutputManager, "grammar_bitmask", compare)
    with mock.patch.object(host, "_fill_rows", count), filling:
        llm.generate(prompts, params, use_tqdm=False)
    return counted


def test_inline_sets_answer_as_xgrammar_does(runner, engines, tiny_model, engine):
    choices = [CITIES, ["yes", "no"], ["red", "green", "blue"], [str(n) for n in range(100)]]
    prompts = [f"Question {i}:" for i in range(12)]
    params = [inline(choices[i % 4], temperature=0) for i in range(12)]
    ours = [output.outputs[0].text for output in engine.generate(prompts, params)]
    xgrammar = engines(runner, tiny_model, structured_outputs_config={"backend": "xgrammar"})
    # xgrammar also allows other tokenisations of a choice; this model prefers the canonical one where they agree.
    theirs = [output.outputs[0] for output in xgrammar.generate(prompts, params)]
    canonical = engine.call(canonical_tokens, [text for choice in choices for text in choice])
    compared = 0
    for mine, their, i in zip(ours, theirs, itertools.count(), strict=False):
        assert mine in choices[i % 4]
        if tuple(their.token_ids[:-1]) == tuple(canonical[their.text]):
            compared += 1
            assert mine == their.text
    assert compared >= 1


def canonical_tokens(llm, texts: list[str]) -> dict[str, list[int]]:
    tokenizer = llm.get_tokenizer()
    return {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}


def streamed(llm: Any) -> None:
    params, prompt = SamplingParams(extra_args={"item_set": "fixed"}), {"prompt_token_ids": [5]}
    llm.llm_engine.input_processor.process_inputs("0", prompt, params, ("generate",), resumable=True)


def test_a_prompt_that_is_streamed_takes_no_set(engine):
    with pytest.raises(VLLMValidationError, match="a prompt that is streamed takes no item set: send the whole prompt"):
        engine.call(streamed)


def test_a_seed_repeats_its_answer(engine):
    first, second = (engine.generate(["p"] * 3, named("large", seed=11)) for _ in range(2))
    assert [answer(output) for output in first] == [answer(output) for output in second]


def test_logprobs_of_the_chosen_tokens(engine, way, named_sets):
    (output,) = engine.generate(["p"], named("large", logprobs=3, temperature=0))
    part = output.outputs[0]
    assert len(part.logprobs) == len(part.token_ids)
    for token, entries in zip(part.token_ids, part.logprobs, strict=True):
        assert np.isfinite(entries[token].logprob)
    part = engine.generate(["p"], named("one", logprobs=1))[0].outputs[0]
    forced = [entries[token].logprob for token, entries in zip(part.token_ids, part.logprobs, strict=True)]
    if way[1] == "host":
        assert forced == [0.0] * 6
    else:  # raw: the model's own, over the whole vocabulary
        assert max(forced) < -1


def test_a_reused_parameter_object_stays_as_it_is(engine):
    params = inline(CITIES)
    for _ in range(2):
        assert engine.generate(["p"], params)[0].outputs[0].text in CITIES
    assert params.structured_outputs.choice == CITIES
    assert params.extra_args is None


def test_ngram_speculation_changes_nothing_at_temperature_0(
    way, runner, engines, engine, tiny_model, static, named_sets
):
    asking, words = repeating(named_sets, 4)
    asking += ["Paris London Paris London Pa", "the quick the quick the"]
    speculating = engines(runner, tiny_model, speculative_config=NGRAM, disable_log_stats=False, **static)
    check_same(speculating, engine, asking, [*words, *greedy([])])
    counted = speculating.call(metrics)
    assert counted["vllm:spec_decode_num_draft_tokens"] >= counted["vllm:spec_decode_num_accepted_tokens"] > 0
    prompts = [{"prompt_token_ids": tokens} for tokens in asking[:12]]
    params = [*[named("large", temperature=0)] * 4, *[named("ragged", temperature=0)] * 2]
    filled = speculating.call(count_fills, prompts[:6], params)
    assert (filled["calls"], filled["different"]) == (filled["steps"], 0)
    assert (filled["drafts"] > 0) == (way[1] == "host")
    assert "no draft of ngram is forced" not in speculating.log()  # it would be under asynchronous scheduling
    if runner == "v1":
        check_scores_beside_others(speculating)
    sampled = speculating.generate(prompts[:12], named("ragged"))
    assert {answer(output) for output in sampled} <= named_sets["ragged"].items
    assert "leave the item set" not in speculating.log()


def metrics(llm) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def sampled(llm) -> dict[str, int]:
    """How many steps with answers of sets took logits of their tokens alone, and why others took all."""
    return llm.collective_rpc(sampled_steps)[0]


def test_prefix_caching_and_chunked_prefill(runner, engines, tiny_model, static, named_sets):
    engine = engines(
        runner, tiny_model, enable_prefix_caching=True, max_num_batched_tokens=64, enable_chunked_prefill=True, **static
    )
    prompt = {"prompt_token_ids": list(range(200, 350))}
    for _ in range(2):
        for output in engine.generate([prompt] * 4, named("ragged")):
            assert answer(output) in named_sets["ragged"].items
    assert output.num_cached_tokens > 0


PREEMPTING = {"num_gpu_blocks_override": 9, "max_model_len": 128, "enable_prefix_caching": False}


def test_preemption_and_resumption(runner, engines, engine, tiny_model, static, named_sets):
    prompts = [{"prompt_token_ids": [200 + i] * 58} for i in range(8)]
    params = [named("large", temperature=0, max_tokens=6, ignore_eos=True)] * 4
    params += [named("ragged", seed=i, ignore_eos=True, max_tokens=30) for i in range(4)]
    expected = [tuple(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]
    tight = engines(runner, tiny_model, disable_log_stats=False, **PREEMPTING, **static)
    assert [tuple(output.outputs[0].token_ids) for output in tight.generate(prompts, params)] == expected
    assert tight.call(metrics)["vllm:num_preemptions"] > 0


def test_an_aborted_request_leaves_the_others_alone(engine, named_sets, tmp_path):
    # Four tokens and a stop: none of them ends within the two steps before the abort.
    answers = engine.call(abort_some, [named("fixed") for _ in range(6)], str(tmp_path))
    assert len(answers) == 3
    assert set(answers) <= named_sets["fixed"].items
    (log,) = tmp_path.iterdir()
    assert [len(json.loads(line)["items"]) for line in log.read_bytes().splitlines()] == [1, 1, 1]


def abort_some(llm, params: list[SamplingParams], folder: str) -> list[tuple[int, ...]]:
    """Start all, abort every other one after two steps; the answers of the rest. folder: of a log of them."""
    audit.begin(folder, "tiny", logging.getLogger(__name__))
    names = [llm.llm_engine.add_request(f"abort-{i}", {"prompt_token_ids": [5, 6, 7]}, p) for i, p in enumerate(params)]
    llm.llm_engine.step()
    llm.llm_engine.step()
    gone = [f"abort-{i}" for i in range(0, len(names), 2)]
    for state in llm.llm_engine.output_processor.request_states.values():
        if state.external_req_id in gone:  # as in a server, whose aborted requests have a last output
            state.queue = RequestOutputCollector(state.output_kind, state.request_id)
    llm.llm_engine.abort_request(gone)
    answers = []
    while llm.llm_engine.has_unfinished_requests():
        answers += [tuple(output.outputs[0].token_ids[:-1]) for output in llm.llm_engine.step() if output.finished]
    assert audit.log is not None
    audit.log.queue.join()
    audit.log = None
    return answers
