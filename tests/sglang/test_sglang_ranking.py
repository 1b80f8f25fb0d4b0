"""Ranked lists in the real SGLang: the oracle's ranking, in the form of its own beam search."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection

import numpy as np
import pytest
from asking import CITIES, inline, named
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
from ranking import EOS, PROMPT, oracle_of
from servers import wait_for
from sets import named_flags
from sglang_engines import FAST

PREFILL = "Prefill batch"
SCHEMA = {"name": "answer", "schema": {"type": "object"}}


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return oracle_of(tiny_model)


@pytest.fixture
def server(servers, tiny_model, named_sets):
    sets = named_flags(named_sets)
    return servers(tiny_model, arguments=("--grammar-backend", "static", *sets))


def check(output: dict, expected: list[tuple[float, tuple[int, ...]]]) -> None:
    found = output["meta_info"]["beam_results"]
    assert [tuple(one["output_ids"]) for one in found] == [(*item, EOS) for _, item in expected]
    scores = [one["meta_info"]["sequence_score"] for one in found]
    np.testing.assert_allclose(scores, [score for score, _ in expected], atol=2e-3)
    assert [one["meta_info"]["rank"] for one in found] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize(
    ("name", "width"), [("prefixes", 9), ("one", 3), ("labels", 150), ("ragged", 200), ("seen", 150)]
)
def test_a_beam_as_wide_as_the_set_ranks_all_of_it(engine, oracle, named_sets, name, width):
    output = engine.generate(input_ids=PROMPT, sampling_params=named(name, beam_width=width, max_new_tokens=40))
    check(output, oracle(named_sets[name].items))
    assert output["meta_info"]["proven"]


def lists_of(engine) -> list[list[tuple[list[int], float]]]:
    """Ranked lists by a beam, proven, and of what the request brings."""
    asked = [named("prefixes", beam_width=7), named("ragged", beam_width=3, exact=True), inline(CITIES, beam_width=9)]
    lists = []
    for params in asked:
        found = engine.generate(input_ids=PROMPT, sampling_params=params)["meta_info"]["beam_results"]
        lists.append([(one["output_ids"], one["meta_info"]["sequence_score"]) for one in found])
    return lists


def check_lists(found: list, expected: list) -> None:
    assert [[ids for ids, _ in one] for one in found] == [[ids for ids, _ in one] for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose([score for _, score in one], [score for _, score in other], atol=2e-3)


def test_the_proven_best_of_several_prompts(static, oracle, named_sets):
    asked = named("ragged", beam_width=4, exact=True)
    outputs = static("device").generate(input_ids=[PROMPT, [11, 12], PROMPT], sampling_params=asked)
    check(outputs[0], oracle(named_sets["ragged"].items)[:4])
    assert outputs[0]["output_ids"] == outputs[2]["output_ids"] != []
    assert all(output["meta_info"]["proven"] for output in outputs)


def test_a_list_is_refused_where_its_items_could_not_be_scored(static):
    """Not one token too early: the longest prompt that leaves room for an item of five tokens gets its list."""
    engine, asked = static("device"), named("one", beam_width=2, max_new_tokens=6)
    fits = FAST["context_length"] - 5 - 7  # SGLang takes no longer prompts
    output = engine.generate(input_ids=[7] * fits, sampling_params=asked)
    assert len(output["meta_info"]["beam_results"]) == 1
    with pytest.raises(ValueError, match=f"leaves 4 after a prompt of {fits + 1}"):
        engine.generate(input_ids=[7] * (fits + 1), sampling_params=asked)
    with pytest.raises(ValueError, match=r"list of 1,001 is longer than .* 1,000: .*ranked_list_limit"):
        engine.generate(input_ids=[7], sampling_params=named("one", beam_width=1_001, max_new_tokens=6))


def test_n_of_the_beam_and_an_inline_set(static):
    engine = static("device")
    output = engine.generate("p", inline(CITIES, beam_width=9))
    assert sorted(one["text"] for one in output["meta_info"]["beam_results"]) == sorted(CITIES)  # no filler
    output = engine.generate("p", inline(CITIES, beam_width=9, n=2))
    assert len(output["meta_info"]["beam_results"]) == 2
    with pytest.raises(ValueError, match="beam_width is the width of a list here: leave width out"):
        engine.generate("p", inline(CITIES, beam_width=9, width=9))


def test_a_batch_of_which_only_some_prompts_have_a_set_is_refused(static):
    asked = [named("ragged", beam_width=4), {"beam_width": 4, "max_new_tokens": 8}]
    with pytest.raises(ValueError, match=r"sampling_params\[1\] has no item set, and others of this batch have one"):
        static("device").generate(["p", "q"], asked)


def test_over_http(server, named_sets, oracle):
    params = {"item_set": "prefixes", "beam_width": 9, "exact": True, "max_new_tokens": 20}
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 200, answer
    check(answer, oracle(named_sets["prefixes"].items))
    body = {"input_ids": PROMPT, "item_set": "prefixes", "sampling_params": {"beam_width": 9, "max_new_tokens": 20}}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    check(answer, oracle(named_sets["prefixes"].items))
    status, answer = server.post("/generate", body | {"item_set": "prefixed"})
    assert status == 400
    assert "did you mean 'prefixes'" in str(answer)
    for bad, message in (
        ({"stream": True}, "not streamed: leave"),
        ({"return_logprob": True}, "no logprobs of single"),
    ):
        for asked in (body, {"input_ids": PROMPT, "sampling_params": params}):
            status, answer = server.post("/generate", asked | bad)
            assert status == 400, answer
            assert message in str(answer)
    openai = {"model": "tiny", "max_tokens": 20, "use_beam_search": True, "n": 9}
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a film"}]}),
    ):
        status, answer = server.post(path, {**openai, **prompt, "item_set": "prefixes", "exact": True})
        assert status == 200, answer
        items = [choice["item"] for choice in answer["choices"]]
        assert [item["rank"] for item in items] == list(range(1, 8))
        assert len({item["key"] for item in items}) == 7
        assert all(item["proven"] and item["passes"] >= 3 for item in items)
        assert all(item["keys"][0] == item["key"] for item in items)
        assert sorted(item["keys"] for item in items) == [[0], [1], [2], [3], [4], [5], [6, 7]]
        status, answer = server.post(path, {**openai, **prompt, "item_set": "prefixes", "n": 2, "width": 9})
        assert status == 200, answer
        assert [choice["item"]["score"] for choice in answer["choices"]] == pytest.approx(
            [item["score"] for item in items[:2]], abs=2e-3
        )
        if path == "/v1/completions":
            expected = [score for score, _ in oracle(named_sets["prefixes"].items)]
            np.testing.assert_allclose([item["score"] for item in items], expected, atol=2e-3)
        status, answer = server.post(path, {**openai, **prompt, "structured_outputs": {"choice": CITIES}})
        texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
        assert sorted(texts) == sorted(CITIES)
        for bad, message in (
            ({"stream": True}, "a ranked list is not streamed"),
            ({"max_tokens": 2}, "max_new_tokens=2 is less than the longest item has"),
            ({"n": 1_001}, "a ranked list of 1,001 is longer than this engine's limit of 1,000"),
            ({"exact": "yes"}, "exact must be true or false, not 'yes'"),
            ({"exact": True, "max_passes": 1}, "no item was found before the limit: raise max_passes"),
            ({"exact": True, "use_beam_search": False}, "exact is for ranked lists: add use_beam_search and n"),
            ({"logprobs": 1 if path == "/v1/completions" else True}, "no logprobs of single tokens"),
            ({"width": 8}, "width=8 finds no 9 items: set it to at least 9"),
            ({"widht": 64}, "there is no field 'widht': did you mean width?"),
            ({"renormalized": True}, "there is no field 'renormalized': did you mean renormalised?"),
            ({"max_passes": 10_001}, "max_passes=10,001 is more than this engine's limit of 10,000"),
            ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "exclude each other"),
        ):
            status, answer = server.post(path, {**openai, **prompt, "item_set": "prefixes", **bad})
            assert status == 400, answer
            assert message in str(answer).replace("\\'", "'"), answer


def test_a_ranked_list_elsewhere_is_http_400(server):
    asked = {"model": "tiny", "input": "p", "use_beam_search": True, "item_set": "ragged"}
    status, answer = server.post("/v1/responses", asked)
    assert (status, "/v1/responses has no ranked lists" in str(answer)) == (400, True)


def test_the_requests_of_a_client_that_went_are_aborted(server):
    """A proven list of so many takes minutes; the client leaves when it has begun."""
    params = {"item_set": "large", "beam_width": 200, "exact": True, "max_new_tokens": 20}
    counts = [server.log().count(PREFILL)]
    connection = HTTPConnection(server.url.removeprefix("http://"))
    body = json.dumps({"input_ids": PROMPT, "sampling_params": params})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    wait_for(lambda: server.log().count(PREFILL) > counts[0])
    connection.close()

    def still() -> bool:
        time.sleep(0.5)
        counts.append(server.log().count(PREFILL))
        return counts[-1] == counts[-2]

    wait_for(still)


def draws(engine, **options) -> list[tuple[tuple[int, ...], float]]:
    params = {"max_new_tokens": 20, "sampling_seed": options.pop("seed", None), **options}
    results = engine.generate(input_ids=PROMPT, sampling_params=params)["meta_info"]["beam_results"]
    return [(tuple(one["output_ids"][:-1]), one["meta_info"]["sequence_score"]) for one in results]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_models_distribution(static, oracle, temperature):
    engine = static("device")
    check_fit(lambda **options: draws(engine, **options), oracle, temperature)


def test_draws_offline(static):
    engine = static("device")
    found = draws(engine, **LEFT, draws=400, replace=False, seed=3)
    assert {item for item, _ in found} == left()
    wide = draws(engine, **LEFT, draws=5, replace=False, seed=3, width=9)
    assert [item for item, _ in wide] == [item for item, _ in found[:5]]
    with pytest.raises(ValueError, match=r"more than 3 passes.* raise max_passes, or add approximate"):
        draws(engine, **CUT_OFF)
    with pytest.raises(ValueError, match="top_p would bend the model's distribution"):
        draws(engine, item_set="ragged", draws=2, top_p=0.5)
    with pytest.raises(ValueError, match="leave beam_width or draws out"):
        draws(engine, item_set="ragged", draws=2, beam_width=5)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_draws_over_http(server, path):
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a film"}]}
    asked = {"model": "tiny", "max_tokens": 20, **prompt}
    status, answer = server.post(path, {**asked, **LEFT, "draws": 400, "replace": False, "seed": 5})
    assert status == 200, answer
    check_choices(answer["choices"], len(left()))
    status, answer = server.post(path, {**asked, "choice": CITIES, "draws": 9, "seed": 5, "temperature": 0.9})
    assert status == 200, answer
    check_choices(answer["choices"], 9)
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [CITIES[choice["item"]["key"]] for choice in answer["choices"]]
    status, answer = server.post(path, {**asked, **BY_IMPORTANCE, "item_set": "prefixes"})
    assert status == 200, answer
    check_importance(answer["choices"], 6)
    status, answer = server.post(path, {**asked, **CUT_OFF, "approximate": True})
    assert status == 200, answer
    check_cut_off(answer["choices"])


def test_draws_of_generate(server):
    params = {**LEFT, "draws": 3, "temperature": 0.8, "sampling_seed": 4, "max_new_tokens": 20}
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 200, answer
    infos = [one["meta_info"] for one in answer["meta_info"]["beam_results"]]
    assert [(info["draw"], info["exact"]) for info in infos] == [(1, True), (2, True), (3, True)]
    beside = {key: value for key, value in params.items() if key not in (*LEFT, "draws")}
    status, again = server.post("/generate", {"input_ids": PROMPT, **LEFT, "draws": 3, "sampling_params": beside})
    assert status == 200, again
    assert [one["meta_info"]["key"] for one in again["meta_info"]["beam_results"]] == [info["key"] for info in infos]
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": {**params, "top_p": 0.5}})
    assert (status, "top_p would bend" in str(answer)) == (400, True)


@pytest.mark.parametrize(("body", "message"), BAD + LOST)
def test_bad_draws_are_http_400(server, body, message):
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", **GOOD, **body})
    assert status == 400, answer
    assert message in str(answer).replace("\\'", "'")
