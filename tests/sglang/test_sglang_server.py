"""SGLang's real HTTP server with our flags: what a client asks for, what it gets, and what is refused."""

from __future__ import annotations

import http.client
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import changes
import hostile
import lost_words
import playground_checks
import pytest
import zstandard
from request_fields import BAD_SELECTIONS
from servers import wait_for
from sets import named_flags
from sglang_servers import start_expecting_failure
from stores import web_server

import itemset

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
COLOURS = ["red", "green", "blue"]
IN_A_TAG = {"response_format": {"type": "structural_tag", "format": {"type": "item_set", "item_set": "films"}}}
ENCODING = "an inline set is encoded"  # cpu/sitecustomize.py


@pytest.fixture(scope="module")
def server(servers, tiny_model, named_sets):
    with web_server(Path(named_sets["one"].path).parent) as (address, _):  # one of them is an index under a URI
        sets = named_flags(named_sets | {"one": replace(named_sets["one"], path=f"{address}/one.itemset")})
        yield servers(
            tiny_model,
            arguments=(
                "--grammar-backend",
                "static",
                "--constrained-json-disable-any-whitespace",
                "--enable-metrics",
                *sets,
            ),
            env={"SGLANG_ENABLE_REQUEST_DECOMPRESSION": "1"},
        )


def complete(server, **body) -> dict:
    status, answer = server.post(
        "/v1/completions", {"model": "tiny", "prompt": "p", "max_tokens": 200, "return_token_ids": True, **body}
    )
    assert status == 200, answer
    return answer["choices"][0]


def chat(server, **body) -> dict:
    messages = [{"role": "user", "content": "a colour"}]
    status, answer = server.post(
        "/v1/chat/completions", {"model": "tiny", "messages": messages, "return_token_ids": True, **body}
    )
    assert status == 200, answer
    return answer["choices"][0]


def generate(server, **body) -> dict:
    status, answer = server.post("/generate", {"text": "p", **body})
    assert status == 200, answer
    return answer


def item_of(choice: dict) -> tuple[int, ...]:
    tokens = next(choice[key] for key in ("token_ids", "response_token_ids", "output_ids") if key in choice)
    return tuple(token for token in tokens if token != 1)


def test_one_batch_of_sets_and_grammars(server, named_sets):
    requests = [
        *({"item_set": name} for name in named_sets),
        {"choice": COLOURS},
        {"structured_outputs": {"choice": COLOURS}},
        {"regex": "[a-c]{4}"},
        {"ebnf": 'root ::= "x" [0-9] "y"'},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {},
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: complete(server, **body), requests * 2))
    for body, choice in zip(requests * 2, answers, strict=True):
        text = choice["text"]
        if "item_set" in body:
            assert item_of(choice) in named_sets[body["item_set"]].items
        elif "response_format" in body:
            assert text in ('{"n": 1}', '{"n": 2}')  # the one way to space it: xgrammar has the flag
        elif body:
            kind = next(iter(body))
            assert {
                "choice": text in COLOURS,
                "structured_outputs": text in COLOURS,
                "regex": len(text) == 4 and set(text) <= set("abc"),
                "ebnf": text[:1] == "x" and text[-1:] == "y",
            }[kind], body


def test_a_body_of_no_declared_type_loses_nothing(server, named_sets):
    body = json.dumps({"text": "p", "item_set": "one"})
    request = http.client.HTTPConnection(server.url.removeprefix("http://"))
    request.request("POST", "/generate", body)
    response = request.getresponse()
    answer = json.loads(response.read())
    assert response.status in (400, 422) or item_of(answer) in named_sets["one"].items


def test_a_compressed_body_loses_nothing(server, named_sets):
    body = zstandard.compress(json.dumps({"text": "p", "item_set": "one"}).encode())
    headers = {"Content-Type": "application/json", "x-body-compressed": "zstd"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/generate", body, headers)) as response:
        assert item_of(json.load(response)) in named_sets["one"].items


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *BAD_SELECTIONS,
        ({"item_set": "films"}, "no item set is called 'films'"),
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"item_set": "ragged", "custom_params": {"item_set": "one"}}, "exclude each other"),
        ({"item_set": ["ragged"]}, "item_set must be the name of an item set"),
        ({"item_set": "ragged", "choice": ["a"]}, "exclude each other"),
        ({"item_set": "ragged", "regex": "a"}, "exclude each other"),
        ({"item_set": "ragged", "item_sets": "one"}, "there is no field item_sets: name the item set in item_set"),
        *(
            ({word: "labels"}, f"there is no field {word}: name")
            for word in ("items_set", "ITEM_SET", "itemSet", "item_sett")
        ),
        ({"choices": ["a"]}, "there is no field choices: send the texts as choice"),
        ({"choise": ["a"]}, "there is no field choise: send the texts as choice"),
        ({"custom_params": {"item_sets": "one"}}, "there is no field item_sets in custom_params: name the item set"),
        ({"custom_params": {"choices": ["a"]}}, "there is no field choices in custom_params: send the texts as choice"),
        ({"vllm_xargs": {"item_set": "one"}}, "there is no field item_set in vllm_xargs"),
        ({"extra_body": {"choice": ["a"]}}, "there is no field choice in extra_body"),
        ({"sampling_params": {"item_set": "one"}}, "there is no field item_set in sampling_params"),
        ({"structured_outputs": {"item_set": "one"}}, "there is no field item_set in structured_outputs: name"),
        ({"structured_outputs": {"choices": ["a"]}}, "there is no field choices in structured_outputs: send"),
        ({"guided_choice": ["a"], "choice": ["a"]}, "guided_choice is the older word for choice: give one of them"),
        (
            {"structured_outputs": {"choice": ["a"]}, "choice": ["b"]},
            "choice is given twice, also in structured_outputs",
        ),
        ({"guided_choice": ["a"], "item_set": "one"}, "exclude each other"),
        ({"item_set": "one", "guided_regex": "a"}, "an item set and guided_regex exclude each other"),
        ({"item_set": "x" * 1_000_000}, f"no item set is called '{'x' * 60}'...: it has fixed"),
        ({"item_set": {"a": "x" * 1_000}}, "a string, not an object"),
        ({"structured_outputs": {"regex": "[0-9]"}}, "of structured_outputs SGLang knows choice alone: send item_set"),
        ({"item_set": "ragged", "beam_width": 5}, "beam_width belongs into the sampling_params of /generate"),
        ({"choice": []}, "at least one text"),
        ({"choice": [""]}, "is empty"),
        ({"choice": "red"}, "choice must be a list"),
        ({"choice": ["red", 2]}, "choice[1] is no text, but of the type int"),
        ({"choice": ["ab" * 5_000_000]}, "has 10,000,000 characters"),
        ({"custom_params": {"item_set_wire": "AAAA"}}, "item_set_wire is not for requests"),
        (
            {"item_set": "ragged", "min_tokens": 2},
            "min_new_tokens=2 forbids the shortest item of the item set 'ragged'",
        ),
    ],
)
def test_a_bad_request_is_http_400_and_the_server_goes_on(server, named_sets, body, message):
    for path, prompt in (
        ("/v1/completions", {"prompt": "p", "max_tokens": 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}], "max_tokens": 20}),
    ):
        for stream in ({}, {"stream": True}):
            status, answer = server.post(path, {"model": "tiny", **prompt, **body, **stream})
            assert status == 400, answer
            assert any(message in text.replace("\\'", "'") for text in texts_in(answer)), answer
    assert item_of(complete(server, item_set="one")) in named_sets["one"].items


def texts_in(answer: Any) -> list[str]:
    """All strings in an answer."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    return [text for one in answer for text in texts_in(one)] if isinstance(answer, list) else [str(answer)]


@pytest.mark.parametrize(("body", "message"), BAD_SELECTIONS)
def test_a_bad_selection_on_sglangs_own_endpoint(server, body, message):
    """In a stream too; beside the fields, in `sampling_params`, and in their `custom_params`."""
    for stream in ({}, {"stream": True}):
        for fields in (body, {"sampling_params": body}, {"sampling_params": {"custom_params": body}}):
            status, answer = server.post("/generate", {"text": "p", **fields, **stream})
            assert status == 400, answer
            assert any(message.partition(":")[0] in text.replace("\\'", "'") for text in texts_in(answer)), answer


def test_encoding_stops_when_the_client_leaves(server):
    texts = [f"a label of many words, whose encoding takes its time {i}" for i in range(100_000)]
    begun, stopped = (server.log().count(what) for what in (ENCODING, "its encoding stops"))
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    body = json.dumps({"text": "p", "choice": texts})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    wait_for(lambda: server.log().count(ENCODING) > begun)
    connection.close()
    assert generate(server, choice=["yes", "no"])["text"] in ("yes", "no")
    wait_for(lambda: server.log().count("its encoding stops") > stopped)


@pytest.mark.parametrize("change", changes.IN_PLACE.values(), ids=changes.IN_PLACE.keys())
def test_a_file_that_is_changed_in_place_changes_nothing_that_is_served(server, named_sets, change):
    path = Path(named_sets["large"].path)
    with changes.undone(path), ThreadPoolExecutor(8) as pool:
        change(path)
        for choice in pool.map(lambda _: complete(server, item_set="large"), range(10)):
            assert choice["finish_reason"] == "stop"
            assert item_of(choice) in named_sets["large"].items


def test_an_endpoint_that_would_ignore_the_field_refuses_it(server):
    named = json.dumps({"model": "tiny", "input": "p", "item_set": "one"})
    for path in ("/v1/messages", "/v1/embeddings", "/v1/score", "/classify", "/api/generate", "/invocations"):
        for data, *content_types in (
            (named.encode(),),
            (named.encode(), "Application/JSON; charset=utf-8"),
            (named.encode(), "application/json", "text/plain"),
            (named.replace("item_set", "item\\u005fset").encode(),),
        ):
            status, answer = server.send(path, data, *content_types)
            assert status == 400
            assert f"{path} takes no item_set: send it to one of /generate" in json.dumps(answer)
    # Where an endpoint reads no custom_params, a set in them would be lost as well.
    for path, body in (("/v1/responses", {"model": "tiny", "input": "p"}), ("/generate", {"text": "p"})):
        status, answer = server.post(path, {**body, "custom_params": {"item_set": "one"}})
        assert status == 400
        assert "there is no field item_set in custom_params" in json.dumps(answer)


def test_no_body_loses_its_set(server):
    assert not lost_words.lost(server.post, lost_words.SGLANGS)
    assert not lost_words.unread(server.post, lost_words.SGLANGS, lost_words.SGLANG_APPLIES)


def test_a_forced_tool_is_no_item(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "p"}], "tools": [tool]}
    for word in ({"choice": COLOURS}, {"custom_params": {"item_set": "one"}}, {"item_set": "one"}):
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            status, answer = server.post("/v1/chat/completions", {**body, **word, "tool_choice": choice})
            assert status == 400, answer
            assert "a tool_choice that forces a tool exclude each other" in answer["message"]
        assert chat(server, tools=[tool], tool_choice="none", **word)["item"] is not None


def test_every_answer_names_its_items_key(server, named_sets):
    ragged, item = itemset.load(named_sets["ragged"].path), {"item_set": "ragged", "return_token_ids": True}
    prompts = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 40}
    messages = {"model": "tiny", "messages": [{"role": "user", "content": "p"}], "n": 3}

    def expected(choice: dict) -> dict:
        return {"key": ragged.lookup([item_of(choice)])[0]}

    for path, body in (("/v1/completions", prompts), ("/v1/chat/completions", messages)):
        for choice in server.post(path, {**body, **item})[1]["choices"]:
            assert choice["item"] == expected(choice)
        for choice in server.post(path, {**body, "choice": COLOURS})[1]["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert choice["item"] == {"key": COLOURS.index(text)}
        texts: dict[int, str] = {}
        items = {}
        for event in server.events(path, {**body, "choice": COLOURS, "stream": True}):
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
                assert ("item" in choice) == (choice["finish_reason"] is not None)
                if "item" in choice:
                    items[choice["index"]] = choice["item"]
        assert len(items) >= 3
        assert items == {index: {"key": COLOURS.index(text)} for index, text in texts.items()}
    for answer in server.post("/generate", {"text": ["p", "q"], "sampling_params": {"n": 2}, "item_set": "ragged"})[1]:
        assert answer["meta_info"]["item"] == expected(answer)
    *_, last = server.events("/generate", {"text": "p", "item_set": "ragged", "stream": True})
    assert last["meta_info"]["item"] == expected(last)
    assert "item" not in complete(server)


def test_an_answer_that_is_no_item_names_none(server):
    words = {"choice": ["red and green", "red and blue"]}
    assert complete(server, **words, max_tokens=2)["item"] is None
    assert complete(server, **words, stop="and")["item"] is None
    assert complete(server, **words, ignore_eos=True, max_tokens=60)["item"]["key"] in (0, 1)
    assert complete(server, item_set="labels", max_tokens=1)["item"] is not None
    one = complete(server, item_set="prefixes", max_tokens=1)
    assert (one["item"] is None) == (one["token_ids"] == [100])


# Its chat request's validators expect an object, with any grammar backend.
SGLANGS_OWN_FAULTS = {
    (path, body)
    for path in ("/v1/chat/completions", "/invocations")
    for body in (b"null", b"[]", b"[[]]", b'"item_set"', b"7", b"[null, {}]")
}


def test_hostile_bodies_end_in_an_error_of_their_own(server):
    messages = [{"role": "user", "content": "p"}]
    few, wrong = {"model": "tiny", "max_tokens": 2}, []
    for path, base in {
        "/generate": {"text": "p"},
        "/v1/completions": {**few, "prompt": "p"},
        "/v1/chat/completions": {**few, "messages": messages},
        "/v1/responses": {"model": "tiny", "input": "p", "max_output_tokens": 16},
        "/v1/messages": {**few, "messages": messages},
        "/v1/score": {"model": "tiny", "query": "p"},
        "/invocations": {**few, "messages": messages},
        "/v1/nothing": {},
    }.items():
        for meant, body in hostile.bodies(base):
            status, answer = server.send(path, body)
            if (path, body) in SGLANGS_OWN_FAULTS and status == 500:
                continue
            if status >= 500 or (meant and status < 400):
                wrong.append((path, body[:100], status, str(answer)[:200]))
    assert not wrong
    assert complete(server, item_set="one")["item"] == {"key": 0}


def test_metrics(server):
    before = server.figures()
    complete(server, item_set="labels", n=2)
    complete(server, choice=COLOURS)
    tagged = {"properties": {"x": {"type": "string", "item_set": COLOURS}}, "required": ["x"], "type": "object"}
    complete(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": tagged}})
    body = {"model": "tiny", "prompt": "p", "max_tokens": 200}
    for options in ({}, {"max_passes": 50}):
        ranked = {"item_set": "tagged", "use_beam_search": True, "n": 2, **options}
        assert server.post("/v1/completions", body | ranked)[0] == 200
    assert server.post("/v1/completions", body | {"item_set": "tagged", "draws": 2})[0] == 200
    assert server.post("/v1/completions", body | {"item_set": "lable"})[0] == 400
    assert server.post("/v1/completions", body | {"item_sets": "labels"})[0] == 400
    after = server.figures()
    gained = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    gained.pop("item_set:arena_used_bytes", None)  # of requests before
    gained.pop("item_set:encoded_texts_total", None)  # of lists that were not known
    assert gained.pop('item_set:forced_tokens{item_set="inline"}') > 0
    ways = {name: gained.pop(name) for name in list(gained) if name.startswith("item_set:draw_requests")}
    assert sum(ways.values()) == 1, ways  # the races may leave draws to rounds
    assert gained == {
        'item_set:requests_total{item_set="labels"}': 1,
        'item_set:requests_total{item_set="inline"}': 2,
        'item_set:requests_total{item_set="tagged"}': 3,
        'item_set:refused_requests_total{reason="unknown set"}': 1,
        'item_set:refused_requests_total{reason="wrong type"}': 1,
        'item_set:ranked_lists_total{way="one request"}': 1,
        'item_set:ranked_lists_total{way="max_passes"}': 1,
        'item_set:items_inside_total{item_set="inline"}': 1,
        'item_set:answered_items{item_set="labels"}': 2,
        'item_set:answered_items{item_set="inline"}': 1,
        'item_set:forced_tokens{item_set="labels"}': 2,  # the stop tokens
        'item_set:requests_by_path{path="device"}': 3,
        'item_set:requests_by_path{path="host"}': 1,
    }
    assert after["item_set:illegal_answers_total"] == 0  # of all the requests of this module
    assert after["item_set:arena_bytes"] > after["item_set:arena_used_bytes"] > 0


def test_the_playground_shows_what_the_server_says(server, named_sets):
    playground_checks.check(server.url, named_sets)


def test_a_server_with_a_bad_set_does_not_start(tiny_model):
    log = start_expecting_failure(
        tiny_model, arguments=("--guided-decoding-backend", "static", "--item-set", "films=missing.itemset")
    )
    last = "static-backend: the item set 'films' cannot be opened: missing.itemset: no such file: build it with"
    assert log.splitlines()[-1].startswith(last)


def test_another_backend_refuses_item_sets(tiny_model, servers):
    server = servers(tiny_model, grammar_backend="xgrammar")
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "films"}),
        ("/generate", {"text": "p", "sampling_params": {"custom_params": {"item_set": "films"}}}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "p"}], **IN_A_TAG}),
    ):
        status, answer = server.post(path, body)
        assert status == 400, answer
        assert "this engine has no item sets: start it with --grammar-backend static" in json.dumps(answer)
