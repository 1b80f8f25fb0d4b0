"""SGLang's real HTTP server with our flags: what a client asks for, what it gets, and what is refused."""

from __future__ import annotations

import http.client
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import changes
import pytest
import zstandard
from sglang_servers import start_expecting_failure

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
COLOURS = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def server(servers, tiny_model, files):
    sets = ["--item-set", *(f"{name}={file}" for name, file in files.items())]
    return servers(
        tiny_model,
        arguments=("--grammar-backend", "static", *sets),
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
            assert json.loads(text)["n"] in (1, 2)
        elif body:
            kind = next(iter(body))
            assert {
                "choice": text in COLOURS,
                "structured_outputs": text in COLOURS,
                "regex": len(text) == 4 and set(text) <= set("abc"),
                "ebnf": text[:1] == "x" and text[-1:] == "y",
            }[kind], body


def test_every_endpoint_and_every_way_to_say_it(server, named_sets):
    ragged = named_sets["ragged"].items
    assert item_of(chat(server, item_set="ragged")) in ragged
    assert chat(server, choice=COLOURS)["message"]["content"] in COLOURS
    assert item_of(generate(server, item_set="ragged")) in ragged
    assert item_of(generate(server, sampling_params={"item_set": "ragged"})) in ragged
    assert item_of(generate(server, sampling_params={"custom_params": {"item_set": "ragged"}})) in ragged
    assert generate(server, choice=COLOURS)["text"] in COLOURS
    assert item_of(complete(server, custom_params={"item_set": "ragged"})) in ragged
    status, answers = server.post("/generate", {"text": ["p", "q"], "sampling_params": {"n": 2}, "item_set": "ragged"})
    assert status == 200
    assert {item_of(answer) for answer in answers} <= ragged
    assert len(answers) == 4
    status, answer = server.post("/v1/responses", {"model": "tiny", "input": "p", "item_set": "labels"})
    assert status == 200, answer
    assert answer["usage"]["output_tokens"] == 2


def test_streaming(server):
    pieces = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "p"}], stream=True, extra_body={"choice": COLOURS}
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) in COLOURS
    pieces = server.client.completions.create(
        model="tiny", prompt="p", stream=True, max_tokens=40, extra_body={"choice": COLOURS}
    )
    assert "".join(piece.choices[0].text for piece in pieces) in COLOURS


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
        ({"item_set": "films"}, "no item set is called 'films'"),
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"item_set": "ragged", "custom_params": {"item_set": "one"}}, "exclude each other"),
        ({"item_set": ["ragged"]}, "item_set must be the name of an item set"),
        ({"item_set": "ragged", "choice": ["a"]}, "exclude each other"),
        ({"item_set": "ragged", "regex": "a"}, "exclude each other"),
        ({"item_set": "ragged", "item_sets": "one"}, "there is no field item_sets: name the item set in item_set"),
        ({"choices": ["a"]}, "there is no field choices: send the texts as choice"),
        ({"guided_choice": ["a"]}, "there is no field guided_choice: send the texts as choice"),
        ({"structured_outputs": {"item_set": "one"}}, "of structured_outputs SGLang knows choice alone: send item_set"),
        ({"structured_outputs": {"regex": "[0-9]"}}, "of structured_outputs SGLang knows choice alone: send item_set"),
        ({"item_set": "ragged", "beam_width": 5}, "beam_width belongs into the sampling_params of /generate"),
        ({"choice": []}, "at least one text"),
        ({"choice": [""]}, "is empty"),
        ({"choice": "red"}, "choice must be a list"),
        ({"choice": [1, 2]}, "item 0"),
        ({"custom_params": {"item_set_index": "AAAA"}}, "item_set_index is not for requests"),
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
        status, answer = server.post(path, {"model": "tiny", **prompt, **body})
        assert status == 400, answer
        assert message in json.dumps(answer, ensure_ascii=False).replace("\\'", "'"), answer
    assert item_of(complete(server, item_set="one")) in named_sets["one"].items


@pytest.mark.parametrize("change", changes.IN_PLACE.values(), ids=changes.IN_PLACE.keys())
def test_a_file_that_is_changed_in_place_changes_nothing_that_is_served(server, named_sets, change):
    path = Path(named_sets["large"].path)
    with changes.undone(path), ThreadPoolExecutor(8) as pool:
        change(path)
        for choice in pool.map(lambda _: complete(server, item_set="large"), range(10)):
            assert choice["finish_reason"] == "stop"
            assert item_of(choice) in named_sets["large"].items


def test_an_endpoint_that_would_ignore_the_field_refuses_it(server):
    for path in ("/v1/messages", "/v1/embeddings", "/v1/score", "/classify", "/api/generate"):
        status, answer = server.post(path, {"model": "tiny", "input": "p", "item_set": "one"})
        assert status == 400
        assert f"{path} takes no item_set: send it to one of /generate" in answer["error"]["message"]


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
    ):
        status, answer = server.post(path, body)
        assert status == 400, answer
        assert "this engine has no item sets: start it with --grammar-backend static" in json.dumps(answer)
