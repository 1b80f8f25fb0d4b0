"""Ranked lists in the real vLLM: the oracle's ranking, by the calls that vLLM's users know."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw_requests import (
    BAD,
    BY_IMPORTANCE,
    CUT_OFF,
    GOOD,
    LEFT,
    LOST,
    check_choices,
    check_cut_off,
    check_fit,
    check_importance,
    left,
)
from engines import FAST
from ranking import EOS, PROMPT, oracle_of
from sets import named_flags, tagged_items, tagged_keys
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from vllm_static.list_requests import DrawParams, RankingParams, ScoringParams

CITIES = ["Paris", "London", "New York", "New York City"]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Any:
    return oracle_of(tiny_model)


def beams(width: int, max_tokens: int = 40, choice: list[str] | None = None, **extra: Any) -> RankingParams:
    structured = None if choice is None else StructuredOutputsParams(choice=choice)
    return RankingParams(beam_width=width, max_tokens=max_tokens, extra_args=extra, structured_outputs=structured)


def ranked(llm: Any, params: RankingParams, prompt: list[int] = PROMPT) -> list[dict[str, Any]]:
    """In the engine's process: what is needed of the answers to two equal prompts."""
    answers = []
    for output in llm.beam_search([{"prompt_token_ids": prompt}] * 2, params):
        items = [(one.cum_logprob, tuple(one.tokens[len(prompt) :]), one.text, one.key) for one in output.sequences]
        keys = [one.keys for one in output.sequences]
        answers.append(
            {"items": items, "keys": keys, "proven": output.proven, "passes": output.passes, "rounds": output.rounds}
        )
    return answers


def same_lists(one: Any, other: Any) -> None:
    """Two engines of the same model and sets rank alike: by a beam, beyond a beam, and what the request brings."""
    further = beams(3, item_set="ragged", exact=True, max_passes=40)  # a proof takes 185
    for params in (beams(7, item_set="prefixes"), further, beams(9, choice=CITIES)):
        (answer, _), (expected, _) = (engine.call(ranked, params) for engine in (one, other))
        check(answer, [(score, tokens[:-1]) for score, tokens, *_ in expected["items"]])
        assert len(answer["items"]) >= 3


@pytest.fixture
def engine(runner, engines, tiny_model, static):
    return engines(runner, tiny_model, **static)


def check(answer: dict[str, Any], expected: list[tuple[float, tuple[int, ...]]]) -> None:
    assert [tokens for _, tokens, *_ in answer["items"]] == [(*item, EOS) for _, item in expected]
    np.testing.assert_allclose([score for score, *_ in answer["items"]], [s for s, _ in expected], atol=2e-3)


@pytest.mark.parametrize(("name", "width"), [("prefixes", 7), ("one", 3), ("labels", 150), ("seen", 134)])
def test_a_beam_as_wide_as_the_set_ranks_all_of_it(engine, oracle, named_sets, name, width):
    """One of the sets has a node of 150 children: more than vLLM's --max-logprobs and its logprob_token_ids allow."""
    expected = oracle(sorted(named_sets[name].items))
    for answer in engine.call(ranked, beams(width, item_set=name)):
        check(answer, expected)
        assert answer["proven"]


def test_a_list_of_what_a_filter_leaves(engine, oracle):
    """Exact, without the items of some keys; equal items stay with the keys that pass."""
    words = {"item_filter": {"tag": {"$gte": 1}}, "exclude_keys": tagged_keys()[:40]}
    left = {tuple(item): [] for i, item in enumerate(tagged_items()) if i % 3 and i >= 40}
    for i, item in enumerate(tagged_items()):
        if i % 3 and i >= 40:
            left[tuple(item)].append(tagged_keys()[i])
    expected = oracle(sorted(left))[:9]
    for answer in engine.call(ranked, beams(9, item_set="tagged", exact=True, **words)):
        check(answer, expected)
        assert answer["proven"]
        assert answer["keys"] == [left[item] for _, item in expected]


def test_the_proven_best(engine, oracle, named_sets):
    expected = oracle(sorted(named_sets["ragged"].items))
    first, second = engine.call(ranked, beams(4, item_set="ragged", exact=True))
    check(first, expected[:4])
    assert first == second
    assert first["proven"]
    limited = engine.call(ranked, beams(4, item_set="ragged", exact=True, max_passes=3))[0]
    assert limited["passes"] <= 3
    assert not limited["proven"]


def texts(llm: Any, name: str) -> list[tuple[str, str]]:
    """Of the items of several prompts: their texts, and what the tokenizer makes of prompt and item by themselves."""
    tokenizer = llm.get_tokenizer()
    prompts = [PROMPT, [*range(300, 340)]]
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], beams(6, item_set=name))
    return [(one.text, tokenizer.decode(one.tokens, skip_special_tokens=True)) for o in outputs for one in o.sequences]


@pytest.mark.parametrize("name", ["fixed", "ragged"])
def test_texts_are_those_of_each_item(engine, name):
    """Those of all lists are decoded at once, of one length or of several."""
    made = engine.call(texts, name)
    assert len(made) == 12
    assert [text for text, _ in made] == [alone for _, alone in made]


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
        for answer in engine.call(ranked, beams(7, item_set="prefixes"), prompt):
            check(answer, expected)


def test_a_list_is_refused_where_its_items_could_not_be_scored(runner, engine, oracle, named_sets):
    """Not one token too early: the longest prompt that leaves room for an item of five tokens gets its list."""
    fits = FAST["max_model_len"] - 5 - (2 if runner == "v2" else 1)
    assert len(engine.call(ranked, beams(2, item_set="one"), [7] * fits)[0]["items"]) == 1
    with pytest.raises(VLLMValidationError, match=f"leaves 4 after a prompt of {fits + 1}"):
        engine.call(ranked, beams(2, item_set="one"), [7] * (fits + 1))
    with pytest.raises(VLLMValidationError, match=r"list of 1,001 is longer than .* 1,000: .*ranked_list_limit"):
        engine.call(ranked, beams(1_001, item_set="one"))


def test_an_inline_set(engine):
    (answer, _) = engine.call(ranked, beams(9, choice=CITIES))
    assert len(answer["items"]) == 4  # no filler
    texts = [text for _, _, text, _ in answer["items"]]
    assert sorted(next(city for city in sorted(CITIES, key=len, reverse=True) if city in text) for text in texts) == (
        sorted(CITIES)
    )


@pytest.fixture
def server(runner, servers, tiny_model, named_sets):
    flags = named_flags(named_sets)
    return servers(runner, tiny_model, arguments=("--guided-decoding-backend", "static", *flags))


ENDPOINTS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a film"}]},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_over_http(server, named_sets, oracle, endpoint):
    asked = {"model": "tiny", **ENDPOINTS[endpoint], "use_beam_search": True, "n": 9, "max_tokens": 20}
    status, answer = server.post(endpoint, {**asked, "item_set": "prefixes", "exact": True, "return_token_ids": True})
    assert status == 200, answer
    choices = answer["choices"]
    found = [tuple(token for token in choice["token_ids"] if token != EOS) for choice in choices]
    assert sorted(found) == sorted(named_sets["prefixes"].items)  # all seven, none twice, no filler
    assert [choice["index"] for choice in choices] == list(range(7))
    assert [choice["item"]["rank"] for choice in choices] == list(range(1, 8))
    scores = [choice["item"]["score"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice["item"]["key"] for choice in choices}) == 7
    assert all(choice["item"]["proven"] and choice["item"]["passes"] >= 3 for choice in choices)
    assert all(choice["item"]["keys"][0] == choice["item"]["key"] for choice in choices)
    assert sorted(choice["item"]["keys"] for choice in choices) == [[0], [1], [2], [3], [4], [5], [6, 7]]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    if endpoint == "/v1/completions":
        assert found == [item for _, item in oracle(sorted(named_sets["prefixes"].items))]
    status, answer = server.post(endpoint, {**asked, "structured_outputs": {"choice": CITIES}})
    assert status == 200, answer
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    assert sorted(texts) == sorted(CITIES)
    shares = {**asked, "structured_outputs": {"choice": CITIES}, "renormalised": True, "width": 9}
    status, answer = server.post(endpoint, shares)
    assert status == 200, answer
    assert sum(math.exp(choice["item"]["score"]) for choice in answer["choices"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream": True}, "Streaming is not"),
        ({"renormalized": True}, "there is no field 'renormalized': did you mean renormalised?"),
        ({"widht": 64}, "did you mean width?"),
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"max_tokens": 3}, "max_tokens=3 is less than the longest item has"),
        ({"logprobs": 1}, "a ranked list has no logprobs of single tokens"),
        ({"logprobs": 0}, "a ranked list has no logprobs of single tokens"),
        ({"response_format": {"type": "json_object"}}, "a ranked list and response_format exclude each other"),
        ({"structured_outputs": {"regex": "a"}}, "item_set and structured_outputs .* exclude each other"),
        ({"width": 1}, "width=1 finds no 2 items: set it to at least 2"),
        ({"width": 1_001}, "a beam of width 1,001 is longer than this engine's limit of 1,000"),
        ({"width": 4, "use_beam_search": False}, "width is for ranked lists: add use_beam_search and n"),
        ({"exact": True, "max_passes": 10_001}, "max_passes=10,001 is more than this engine's limit of 10,000"),
        ({"n": 1_001}, "a ranked list of 1,001 is longer than this engine's limit of 1,000: ask for fewer items"),
        ({"exact": "yes"}, "exact must be true or false, not 'yes'"),
        ({"exact": True, "max_passes": 1}, "no item was found before the limit: raise max_passes"),
        ({"exact": True, "use_beam_search": False}, "exact is for ranked lists: add use_beam_search and n"),
    ],
)
def test_a_bad_request_is_http_400(server, body, message):
    asked = {"model": "tiny", "prompt": "p", "use_beam_search": True, "n": 2, "max_tokens": 20, "item_set": "ragged"}
    status, answer = server.post("/v1/completions", asked | body)
    assert status == 400, answer
    assert re.search(message, answer["error"]["message"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"widht": 64}, "widht"),
        ({"width": 1}, "width"),
        ({"n": 1_001}, "n"),
        ({"exact": "yes"}, "exact"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"item_set": "raged"}, "item_set"),
        ({"item_set": None, "structured_outputs": {"choice": [""]}}, "structured_outputs"),
        ({"item_set": None, "structured_outputs": {"choice": CITIES}, "max_passes": 0}, "max_passes"),
    ],
)
def test_a_bad_request_names_the_field_at_fault(server, body, param):
    asked = {"model": "tiny", "prompt": "p", "use_beam_search": True, "n": 2, "max_tokens": 20, "item_set": "ragged"}
    status, answer = server.post("/v1/completions", asked | body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_a_wider_beam_over_http(server, named_sets, oracle):
    """As wide as the set it gives the best of the exact ranking, and no more of them than asked for."""
    asked = {"model": "tiny", "prompt": PROMPT, "use_beam_search": True, "n": 3, "max_tokens": 40, "item_set": "ragged"}
    status, answer = server.post("/v1/completions", asked | {"width": len(named_sets["ragged"].items)})
    assert status == 200, answer
    expected = [score for score, _ in oracle(sorted(named_sets["ragged"].items))[:3]]
    np.testing.assert_allclose([choice["item"]["score"] for choice in answer["choices"]], expected, atol=2e-3)


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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"item_set": "ragged", "max_tokens": 5}, "max_tokens=5 is less than the longest item has with its end token"),
        ({"item_set": "one", "max_tokens": 5}, "has with its end token: set it to at least 6 for a ranked list"),
        ({"item_set": "ragged", "exact": 1}, "exact must be true or false, not 1"),
        ({"item_set": "ragged", "max_passes": 0}, "max_passes must be a number of forward passes, at least 1, not 0"),
        ({"item_set": "ragged", "choice": ["a"]}, "exclude each other"),
    ],
)
def test_a_bad_request_is_refused(engine, params, message):
    with pytest.raises(VLLMValidationError, match=message):
        engine.call(ranked, beams(2, **params))


def draws(llm: Any, options: dict[str, Any], prompts: int = 1) -> list[dict[str, Any]]:
    """In the engine's process: what is needed of the draws of equal prompts."""
    outputs = llm.beam_search([{"prompt_token_ids": PROMPT}] * prompts, DrawParams(max_tokens=20, extra_args=options))
    return [
        {
            "items": [(tuple(one.tokens[len(PROMPT) : -1]), one.cum_logprob) for one in output.sequences],
            "keys": [one.key for one in output.sequences],
            "exact": all(one.exact for one in output.sequences),
            "passes": output.passes,
            "open": getattr(output, "open", None),
        }
        for output in outputs
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_models_distribution(engine, oracle, temperature):
    def draw(**options: Any) -> list[tuple[tuple[int, ...], float]]:
        return engine.call(draws, options)[0]["items"]

    check_fit(draw, oracle, temperature)


def test_draws_of_several_prompts_and_of_what_a_filter_leaves(engine):
    """With the same seed equal prompts get the same draws, and each width gives them."""
    first, second = engine.call(draws, LEFT | {"draws": 400, "replace": False, "seed": 3}, 2)
    assert first == second
    assert first["exact"]
    assert {item for item, _ in first["items"]} == left()
    assert len(first["items"]) == len(left())
    (wide,) = engine.call(draws, LEFT | {"draws": 5, "replace": False, "seed": 3, "width": 9})
    assert [item for item, _ in wide["items"]] == [item for item, _ in first["items"][:5]]
    (cut,) = engine.call(draws, CUT_OFF | {"approximate": True})
    assert (cut["passes"], cut["exact"], 0 < cut["open"] < 1) == (3, False, True)
    with pytest.raises(VLLMValidationError, match=r"more than 3 passes.* raise max_passes, or add approximate"):
        engine.call(draws, CUT_OFF)
    with pytest.raises(VLLMValidationError, match=r"draws would be ignored here: .*DrawParams"):
        engine.generate(["p"], SamplingParams(extra_args={"item_set": "ragged", "draws": 2}))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_draws_over_http(server, endpoint):
    asked = {"model": "tiny", **ENDPOINTS[endpoint], "max_tokens": 20}
    status, answer = server.post(endpoint, {**asked, **LEFT, "draws": 400, "replace": False, "seed": 5})
    assert status == 200, answer
    check_choices(answer["choices"], len(left()))
    status, answer = server.post(endpoint, {**asked, "structured_outputs": {"choice": CITIES}, "draws": 9, "seed": 5})
    assert status == 200, answer
    check_choices(answer["choices"], 9)
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [CITIES[choice["item"]["key"]] for choice in answer["choices"]]
    status, answer = server.post(endpoint, {**asked, **BY_IMPORTANCE, "item_set": "prefixes"})
    assert status == 200, answer
    check_importance(answer["choices"], 6)
    status, answer = server.post(endpoint, {**asked, **CUT_OFF, "approximate": True})
    assert status == 200, answer
    check_cut_off(answer["choices"])


@pytest.mark.parametrize(("body", "message"), BAD + LOST)
def test_bad_draws_are_http_400(server, body, message):
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", **GOOD, **body})
    assert status == 400, answer
    assert message in answer["error"]["message"]
    if body == {"max_passes": 2}:
        assert answer["error"]["param"] == "max_passes"


def test_draws_elsewhere_are_http_400(server):
    asked = {"model": "tiny", "item_set": "ragged", "draws": 2, "input": "p"}
    status, answer = server.post("/v1/responses", asked)
    assert (status, "send draws beside item_set to /v1/completions" in answer["error"]["message"]) == (400, True)
