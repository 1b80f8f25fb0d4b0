"""Ranked lists in the real SGLang: the oracle's ranking, in the form of its own beam search."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest
from asking import CITIES, inline, named
from draw_requests import LEFT
from engine_words import PROMPT
from ranking_tests import *  # noqa: F403 - its tests, with the engine and the server of this module
from ranking_tests import ENDPOINTS, LIST, check
from server_tests import check_refused
from servers import wait_for
from sets import named_flags
from sglang_engines import FAST, found_in

PREFILL = "Prefill batch"
SCHEMA = {"name": "answer", "schema": {"type": "object"}}


@pytest.fixture
def server(servers, tiny_model, named_sets):
    sets = named_flags(named_sets)
    return servers(tiny_model, arguments=("--grammar-backend", "static", *sets))


@pytest.fixture
def longest_prompt():
    return FAST["context_length"] - 5 - 7  # SGLang takes no longer prompts


def test_n_of_the_beam(static):
    engine = static("device")
    output = engine.generate("p", inline(CITIES, beam_width=9, n=2))
    assert len(output["meta_info"]["beam_results"]) == 2
    with pytest.raises(ValueError, match="beam_width is the width of a list here: leave width out"):
        engine.generate("p", inline(CITIES, beam_width=9, width=9))


def test_a_batch_of_which_only_some_prompts_have_a_set_is_refused(static):
    asked = [named("ragged", beam_width=4), {"beam_width": 4, "max_new_tokens": 8}]
    with pytest.raises(ValueError, match=r"sampling_params\[1\] has no item set, and others of this batch have one"):
        static("device").generate(["p", "q"], asked)


def test_lists_of_generate(server, named_sets, oracle):
    params, sets = {"beam_width": 9, "max_new_tokens": 20}, {"item_set": "prefixes"}
    inside = {"input_ids": PROMPT, "sampling_params": params | sets | {"exact": True}}
    beside = {"input_ids": PROMPT, "sampling_params": params, **sets}
    for body in (inside, beside):
        status, answer = server.post("/generate", body)
        assert status == 200, answer
        check(found_in(answer), oracle(named_sets["prefixes"].items))
        check_refused(server, "/generate", body | {"stream": True}, "not streamed: leave")
        check_refused(server, "/generate", body | {"return_logprob": True}, "no logprobs of single")
    check_refused(server, "/generate", beside | {"item_set": "prefixed"}, "did you mean 'prefixes'")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream": True}, "a ranked list is not streamed"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "exclude each other"),
    ],
)
def test_a_bad_list_in_sglangs_words_is_http_400(server, body, message):
    for endpoint, prompt in ENDPOINTS.items():
        check_refused(server, endpoint, {**LIST, **prompt, **body}, message)
    check_refused(
        server,
        "/v1/chat/completions",
        LIST | ENDPOINTS["/v1/chat/completions"] | {"logprobs": True},
        "no logprobs of single",
    )


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


def test_an_aborted_list_has_no_items(server):
    """As SGLang answers what it has aborted, on its endpoints and OpenAI's, whose answers say more of a choice."""
    params = {"item_set": "large", "exact": True}
    openai = params | {"model": "tiny", "use_beam_search": True, "n": 200}
    bodies = {
        "/generate": {"input_ids": PROMPT, "sampling_params": params | {"beam_width": 200, "max_new_tokens": 20}},
        "/v1/completions": openai | {"prompt": PROMPT},
        "/v1/chat/completions": openai | {"messages": [{"role": "user", "content": "p"}]},
    }
    for path, body in bodies.items():
        count = server.log().count(PREFILL)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, path, body)
            wait_for(lambda count=count: server.log().count(PREFILL) > count)
            while not asked.done():  # a round may have ended as it came
                server.post("/abort_request", {"rid": "", "abort_all": True})
                time.sleep(0.05)
        status, answer = asked.result()
        assert status == 200, answer
        one = answer["meta_info"]["beam_results"][0]["meta_info"] if path == "/generate" else answer["choices"][0]
        assert one["item"] is None
        reason = one["finish_reason"]
        assert (reason["type"] if isinstance(reason, dict) else reason) == "abort"


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
    for wrong, message in (({"top_p": 0.5}, "top_p would bend"), ({"beam_width": 5}, "leave beam_width or draws out")):
        check_refused(server, "/generate", {"input_ids": PROMPT, "sampling_params": params | wrong}, message)
