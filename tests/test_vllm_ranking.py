"""Ranked lists in the real vLLM: the oracle's ranking, by the calls that vLLM's users know."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from draw_requests import CUT_OFF
from engine_words import CITIES, PROMPT
from engines import FAST
from ranking import oracle_of
from ranking_tests import *  # noqa: F403 - its tests, with the engine and the server of this module
from ranking_tests import LIST, check
from sets import named_flags
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from itemset import ItemSetError
from vllm_static.front.list_requests import DrawParams, RankingParams, ScoringParams


@pytest.fixture
def engine(runner, engines, tiny_model, static):
    return engines(runner, tiny_model, **static)


@pytest.fixture
def longest_prompt(runner):
    return FAST["max_model_len"] - 5 - (2 if runner == "v2" else 1)


def texts(llm: Any, name: str) -> list[tuple[str, str]]:
    """Of the items of several prompts: their texts, and what the tokenizer makes of prompt and item by themselves."""
    tokenizer = llm.get_tokenizer()
    prompts, params = (
        [PROMPT, [*range(300, 340)]],
        RankingParams(beam_width=6, max_tokens=40, extra_args={"item_set": name}),
    )
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [(one.text, tokenizer.decode(one.tokens, skip_special_tokens=True)) for o in outputs for one in o.sequences]


@pytest.mark.parametrize("name", ["fixed", "ragged"])
def test_texts_are_those_of_each_item(engine, name):
    """Those of all lists are decoded at once, of one length or of several."""
    made = engine.call(texts, name)
    assert len(made) == 12
    assert [text for text, _ in made] == [alone for _, alone in made]


def of_fields(llm: Any) -> list[tuple[Any, Any]]:
    """Lists by RankingParams' fields, and by the same words in its extra_args."""
    each = ({"width": 30}, {"exact": True}, {"width": [20, 40], "without_end": True}, {"renormalised": True}, {})
    prompts, lists = [{"prompt_token_ids": PROMPT}], []
    for words in each:
        named = RankingParams(beam_width=6, max_tokens=40, item_set="ragged", **words)
        extra = RankingParams(beam_width=6, max_tokens=40, extra_args={"item_set": "ragged", **words})
        both = [llm.beam_search(prompts, params)[0] for params in (named, extra)]
        lists.append(tuple([(one.keys, one.cum_logprob) for one in output.sequences] for output in both))
    tokenizer, (output,) = llm.get_tokenizer(), llm.beam_search(prompts, extra)
    assert [one.item_text for one in output.sequences] == [
        tokenizer.decode(one.tokens[len(PROMPT) : -1]) for one in output.sequences
    ]
    assert all(one.text.endswith(one.item_text) and one.text != one.item_text for one in output.sequences)
    return lists


def test_options_of_a_list_are_fields_too(engine):
    made = engine.call(of_fields)
    for named, extra in made:
        assert [keys for keys, _ in named] == [keys for keys, _ in extra]
        assert [score for _, score in named] == pytest.approx([score for _, score in extra], abs=1e-4)
        assert len(named) == 6
    assert len({str(named) for named, _ in made}) > 2
    given = RankingParams(beam_width=6, max_tokens=40, item_set="ragged", width=30, exact=True)
    assert msgspec.structs.replace(given, width=40, exact=False).merged() == {"item_set": "ragged", "width": 40}
    assert given.extra_args is None
    assert RankingParams(beam_width=6, max_tokens=40, width=0).merged() == {"width": 0}  # which is refused, not dropped
    with pytest.raises(ItemSetError, match="width is 30, and in extra_args 20: give one"):
        RankingParams(beam_width=6, max_tokens=40, width=30, extra_args={"width": 20})


def check_scores_beside_others(engine: Any) -> None:
    """A request that scores chosen tokens, as a list does, and others that want their most likely ones."""
    chosen, prompt = range(100, 110), {"prompt_token_ids": [5, 6, 7, 8] * 6}
    most_likely = SamplingParams(logprobs=3, max_tokens=4, temperature=0)
    scoring = SamplingParams(logprob_token_ids=list(chosen), max_tokens=4, temperature=0)
    whole = ScoringParams(logprobs=-1, max_tokens=4, temperature=0)
    alone, every = (engine.generate([prompt], params)[0].outputs[0].logprobs for params in (most_likely, whole))
    together = engine.generate([prompt] * 3, [most_likely, scoring, most_likely])
    for output in (together[0], together[2]):
        assert list(map(set, output.outputs[0].logprobs)) == list(map(set, alone))
    for found, expected in zip(together[1].outputs[0].logprobs, every, strict=True):
        assert set(found) >= set(chosen)
        for token, entry in found.items():
            assert abs(entry.logprob - expected[token].logprob) < 1e-3


def test_a_list_takes_nothing_from_other_requests(engines, tiny_model, static):
    """On model runner V1: on V2 a list asks for the scores of its prompts alone."""
    check_scores_beside_others(engines("v1", tiny_model, **static))


def test_beams_without_a_set_are_held_by_xgrammar(engine):
    """vLLM's own beam search knows no other backend than the built-in ones."""
    params = BeamSearchParams(beam_width=2, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    found = engine.call(beam_texts, params)
    assert found
    assert all(len(text) == 3 and text.isdigit() for text in found)


def beam_texts(llm: Any, params: BeamSearchParams) -> list[str]:
    (output,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    prompt = len(PROMPT)
    return [llm.get_tokenizer().decode(one.tokens[prompt:], skip_special_tokens=True) for one in output.sequences]


@pytest.mark.parametrize("length", range(26, 34))
def test_blocks_of_the_prefix_cache_change_nothing(engine, tiny_model, named_sets, length):
    """Where a block of 32 ends with the prompt or in an item, vLLM may skip the row of a wanted token."""
    prompt = list(range(100, 100 + length))
    expected = oracle_of(tiny_model, prompt)(sorted(named_sets["prefixes"].items))
    for _ in range(2):
        for found in engine.rank(7, [prompt] * 2, item_set="prefixes"):
            check(found, expected)


@pytest.fixture
def server(runner, servers, tiny_model, named_sets):
    flags = named_flags(named_sets)
    return servers(runner, tiny_model, arguments=("--guided-decoding-backend", "static", *flags))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream": True}, "Streaming is not"),
        ({"logprobs": 0}, "a ranked list has no logprobs of single tokens"),
        ({"response_format": {"type": "json_object"}}, "a ranked list and response_format exclude each other"),
        ({"structured_outputs": {"regex": "a"}}, "item_set and structured_outputs .* exclude each other"),
    ],
)
def test_a_bad_list_in_vllms_words_is_http_400(server, body, message):
    status, answer = server.post("/v1/completions", LIST | {"prompt": "p"} | body)
    assert status == 400, answer
    assert re.search(message, answer["error"]["message"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"widht": 64}, "widht"),
        ({"width": 1}, "width"),
        ({"n": 1_001}, "n"),
        ({"use_beam_search": False, "draws": 2, "n": 1, "max_passes": 2}, "max_passes"),
        ({"exact": "yes"}, "exact"),
        ({"item_set": "raged"}, "item_set"),
        ({"item_set": None, "structured_outputs": {"choice": [""]}}, "structured_outputs"),
        ({"item_set": None, "structured_outputs": {"choice": CITIES}, "max_passes": 0}, "max_passes"),
    ],
)
def test_a_bad_request_names_the_field_at_fault(server, body, param):
    status, answer = server.post("/v1/completions", LIST | {"prompt": "p"} | body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_a_ranked_list_elsewhere_is_http_400(server):
    asked = {"model": "tiny", "use_beam_search": True, "item_set": "ragged"}
    chat = {"messages": [{"role": "user", "content": "p"}], "n": 2, "max_tokens": 20, "stream": True}
    status, answer = server.post("/v1/chat/completions", asked | chat)
    assert (status, "a ranked list is not streamed: leave stream out" in answer["error"]["message"]) == (400, True)
    status, answer = server.post("/v1/responses", asked | {"input": "p"})
    assert (status, "there are ranked lists on" in answer["error"]["message"]) == (400, True)


def test_the_requests_of_a_client_that_went_are_aborted(server):
    """A proven list of so many takes seconds; the client leaves after a fraction of one."""
    asked = {"model": "tiny", "prompt": "p", "use_beam_search": True, "max_tokens": 20, "exact": True}
    with pytest.raises(OSError, match="timed out"):
        server.post("/v1/completions", asked | {"n": 200, "item_set": "large"}, timeout=0.4)
    for _ in range(60):
        running = [line for line in server.get("/metrics")[1].splitlines() if line.startswith("vllm:num_requests_")]
        if running and all(float(line.rsplit(" ", 1)[1]) == 0 for line in running if "by_reason" not in line):
            break
        time.sleep(0.5)
    else:
        pytest.fail("requests are still there")
    status, answer = server.post("/v1/completions", asked | {"n": 1, "item_set": "one"})
    assert status == 200, answer


def draws(llm: Any, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """In the engine's process: the draws of two equal prompts, the passes, and what was open at their end."""
    outputs = llm.beam_search([{"prompt_token_ids": PROMPT}] * 2, DrawParams(max_tokens=20, extra_args=options))
    return [
        ([(one.tokens, one.key, one.exact) for one in output.sequences], output.passes, getattr(output, "open", None))
        for output in outputs
    ]


def test_draws_of_several_prompts(engine):
    """With the same seed equal prompts get the same draws."""
    first, second = engine.call(draws, {"item_set": "tagged", "draws": 30, "replace": False, "seed": 3})
    assert first == second
    drawn, passes, left_open = engine.call(draws, CUT_OFF | {"approximate": True})[0]
    assert (passes, all(exact for *_, exact in drawn), 0 < left_open < 1) == (3, False, True)
    with pytest.raises(VLLMValidationError, match=r"draws would be ignored here: .*DrawParams"):
        engine.generate(["p"], SamplingParams(extra_args={"item_set": "ragged", "draws": 2}))


def test_draws_elsewhere_are_http_400(server):
    asked = {"model": "tiny", "item_set": "ragged", "draws": 2, "input": "p"}
    status, answer = server.post("/v1/responses", asked)
    assert (status, "send draws beside item_set to /v1/completions" in answer["error"]["message"]) == (400, True)
