"""The real OpenAI server with our flags: what a client asks for by HTTP, what it gets, and what is refused."""

from __future__ import annotations

import contextvars
import json
from typing import Any

import lost_words
import pytest
from engine_tests import OTHERS
from server_tests import *  # noqa: F403 - its tests, with the server of this module
from server_tests import (
    COLOURS,
    SCHEMA,
    STATED,
    Dialect,
    audit_folder,
    audit_lines,
    check_refused,
    complete,
    flags_with_a_uri,
    item_of,
    lives,
)
from servers import start_expecting_failure, wait_for

import itemset

WORDS = {
    # Allowing no whitespace is xgrammar's.
    "v1": ("--structured-outputs-config.disable_any_whitespace", "true", "--enable-scale-out",
           "--structured-outputs-config.backend"),
    "v2": ("--guided-decoding-backend",),
}  # fmt: skip


@pytest.fixture(scope="module")
def flags(named_sets):
    options = json.dumps({"item_set_audit_log": str(audit_folder(named_sets))})
    with flags_with_a_uri(named_sets) as flags:
        yield [*flags, "--additional-config", options]


@pytest.fixture
def server(runner, servers, tiny_model, flags):
    return servers(runner, tiny_model, arguments=(*WORDS[runner], "static", *flags))


@pytest.fixture
def any_server(servers, tiny_model, flags):
    return servers("v1", tiny_model, arguments=(*WORDS["v1"], "static", *flags))


def is_stated(text):
    return json.loads(text)["n"] in (1, 2)


@pytest.fixture(scope="module")
def dialect():
    return Dialect(
        choice=lambda texts: {"structured_outputs": {"choice": texts}},
        others=[
            *(({"structured_outputs": words}, holds) for words, holds in OTHERS if words),
            *((body, is_stated) for body in ({"structured_outputs": {"json": SCHEMA}}, STATED)),
        ],
        endpoints={
            "/v1/chat/completions/batch": {"model": "tiny", "max_tokens": 2, "messages": [lost_words.MESSAGES]},
            "/tokenize": {"model": "tiny", "prompt": "p"},
        },
        deaf=(("/v1/messages", "/tokenize", "/invocations"), "/v1/chat/completions"),
        bases=lost_words.VLLMS,
        applies=lost_words.VLLM_APPLIES,
        tools=({"guided_choice": COLOURS},),
        start=lambda model, **options: start_expecting_failure("v1", model, **options),
    )


def test_json_without_whitespace_where_the_server_allows_none(runner, server):
    texts = {complete(server, **STATED)["text"] for _ in range(8)}
    assert (texts <= {'{"n":1}', '{"n":2}'}) == (runner == "v1")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"item_set": "tagged", "only_keys": ["\ud800"]}, "only_keys: keys must be all integers or all strings"),
        ({"item_set": "tagged", "item_filter": {"\ud800": 1}}, 'there is no attribute "\\ud800": the set has'),
        ({"item_set": "ragged", "vllm_xargs": {"item_set": "one"}}, "name different item sets"),
        ({"item_set": "ragged", "structured_outputs": {"choice": ["a"]}}, "exclude each other"),
        ({"item_set": "ragged", "response_format": {"type": "json_object"}}, "exclude each other"),
        *(
            (
                {"item_set": "ragged", "beam_width": 4, **beams},
                "no field beam_width: a ranked list takes use_beam_search",
            )
            for beams in ({}, {"use_beam_search": True, "n": 2})
        ),
        ({"vllm_xargs": {"item_sets": "one"}}, "there is no field item_sets in vllm_xargs: name the item set"),
        ({"structured_outputs": {"item_set": "one", "regex": "a"}}, "there is no field item_set in structured_outputs"),
        ({"structured_output": {"choice": ["a"]}}, "there is no field structured_output: send the texts as"),
        ({"choice": ["a"]}, "there is no field choice: send the texts as structured_outputs"),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, "an older word for structured_outputs"),
        ({"guided_choice": "abc"}, "guided_choice must be a list of texts, not 'abc'"),
        ({"vllm_xargs": {"item_set": "one", "exact": True}}, "exact is for ranked lists: add use_beam_search and n"),
    ],
)
def test_a_bad_request_in_vllms_words_is_http_400(server, named_sets, body, message):
    for path, prompt in OPENAI.items():  # noqa: F405
        status, answer = server.post(path, {"model": "tiny", **prompt, **body})
        assert status == 400, answer
        assert message in answer["error"]["message"]
        if "use_beam_search" not in body:  # which is not streamed at all
            assert server.post(path, {"model": "tiny", **prompt, **body, "stream": True}) == (status, answer)
    lives(server, named_sets)


def test_bad_texts_name_their_field(server):
    body = {"model": "tiny", "prompt": "p", "structured_outputs": {"choice": [""]}}
    status, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


def test_a_set_is_read_in_the_servers_own_field_for_extras(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "p"}], "max_tokens": 4}
    assert server.post("/v1/messages", {**body, "guided_choice": ["a"]})[0] == 400
    assert server.post("/v1/messages", {**body, "vllm_xargs": {"item_sets": "one"}})[0] == 400
    assert server.post("/v1/messages", body)[0] == 200
    assert server.send("/v1/messages", json.dumps({**body, "item_set": "one"}).encode("utf-16"))[0] == 400
    status, answer = server.post("/v1/messages", {**body, "max_tokens": 20, "vllm_xargs": {"item_set": "one"}})
    assert (status, answer["usage"]["output_tokens"]) == (200, 6)


def test_batches_and_responses_name_their_items_key(server, named_sets):
    ragged, messages = itemset.load(named_sets["ragged"].path), [{"role": "user", "content": "p"}]
    batch = {"model": "tiny", "messages": [messages, messages], "item_set": "ragged", "return_token_ids": True}
    for streamed in (True, 1, "yes"):
        check_refused(
            server, "/v1/chat/completions/batch", batch | {"stream": streamed}, "has no streams: leave stream out"
        )
    choices = server.post("/v1/chat/completions/batch", batch | {"stream": False})[1]["choices"]
    assert [choice["item"]["key"] for choice in choices] == list(ragged.lookup([item_of(choice) for choice in choices]))
    body = {"model": "tiny", "input": "p", "structured_outputs": {"choice": COLOURS}}
    streamed = server.events("/v1/responses", {**body, "stream": True})[-1]["response"]
    for answer in (streamed, server.post("/v1/responses", body)[1]):
        assert answer["item"]["key"] in range(3)


def test_a_slow_reader_of_a_stream_loses_no_item():
    """VLLM joins its outputs, and keeps of them what it knows."""
    from vllm import CompletionOutput, RequestOutput

    from itemset.serving.front import http_bodies
    from vllm_static.front import answers

    def result(index: int, reason: str | None = None) -> RequestOutput:
        return RequestOutput("r", None, [1], None, [CompletionOutput(index, "a", [5], 0.0, None, reason)], bool(reason))

    joined = result(0)
    joined.add(result(1), aggregate=True)
    joined.add(result(0, "stop"), aggregate=True)

    def noting() -> tuple[http_bodies.Body, Any]:
        body = http_bodies.body_of(None)
        body.prompts = 3
        return body, answers.noting()

    body, note = contextvars.copy_context().run(noting)  # of a request of its own
    assert note(joined, {0: {"item": {"key": 7}}}) is joined
    assert [getattr(one, "item", "none yet") for one in joined.outputs] == [{"key": 7}, "none yet"]
    assert body.items == {(3, 0): {"item": {"key": 7}}}


def test_each_prompt_of_a_body_has_a_line_of_its_own_in_the_audit_log(server, named_sets):
    def logged() -> set[str]:
        return {line["id"] for line in audit_lines(named_sets)}

    for words in ({}, {"draws": 2}, {"use_beam_search": True, "n": 2}):
        body = {"model": "tiny", "max_tokens": 200, "prompt": ["p", "q"], "item_set": "tagged", **words}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        wait_for(lambda ids={f"{answer['id']}-{i}" for i in range(2)}: ids <= logged())


def test_metrics(server, runner, named_sets):
    complete(server, item_set="labels")
    complete(server, structured_outputs={"choice": COLOURS})
    before = server.figures()
    complete(server, item_set="labels")
    complete(server, structured_outputs={"choice": COLOURS})
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "lable"})[0] == 400
    after = server.figures()
    gained = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    path = "device" if runner == "v2" else "host"
    steps = [gained.pop(name) for name in list(gained) if name.startswith("item_set:sampled_steps")]
    assert (sum(steps) > 2) == (path == "device")
    assert gained == {
        'item_set:requests_total{item_set="labels"}': 1,
        'item_set:requests_total{item_set="inline"}': 1,
        'item_set:refused_requests_total{reason="unknown set"}': 1,
        'item_set:answered_items{item_set="labels"}': 1,
        'item_set:answered_items{item_set="inline"}': 1,
        f'item_set:requests_by_path{{path="{path}"}}': 2,
        'item_set:forced_tokens{item_set="labels"}': 1,  # the stop token
        'item_set:forced_tokens{item_set="inline"}': gained['item_set:forced_tokens{item_set="inline"}'],
    }
    assert after["item_set:illegal_answers_total"] == 0  # of all the requests of this module
    assert (after["item_set:arena_bytes"] > after["item_set:arena_used_bytes"] > 0) == (path == "device")
    for name in ("answered_items", "forced_tokens"):  # from the start on
        assert {f'item_set:{name}{{item_set="{of}"}}' for of in named_sets} <= before.keys()
