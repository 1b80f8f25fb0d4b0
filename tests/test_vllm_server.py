"""The real OpenAI server with our flags: what a client asks for by HTTP, what it gets, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import changes
import pytest
from servers import start_expecting_failure

import itemset

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "ab"}, {"type": "regex", "pattern": "[0-9]{2}"}],
    },
}
COLOURS = ["red", "green", "blue"]


@pytest.fixture
def server(runner, servers, tiny_model, static, named_sets):
    flags = ["--item-set", *(f"{name}={named.path}" for name, named in named_sets.items())]
    word = {"v1": "--structured-outputs-config.backend", "v2": "--guided-decoding-backend"}[runner]
    return servers(runner, tiny_model, arguments=(word, "static", *flags))


def complete(server, **body) -> dict:
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", "max_tokens": 200, **body})
    assert status == 200, answer
    return answer["choices"][0]


def chat(server, **body) -> dict:
    messages = [{"role": "user", "content": "a colour"}]
    status, answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **body})
    assert status == 200, answer
    return answer["choices"][0]


def item_of(choice: dict) -> tuple[int, ...]:
    return tuple(token for token in choice["token_ids"] if token != 1)


def test_one_batch_of_sets_and_grammars(server, named_sets):
    requests = [
        *({"item_set": name, "return_token_ids": True} for name in named_sets),
        {"structured_outputs": {"choice": COLOURS}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"regex": "[a-c]{4}"}},
        {"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {},
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: complete(server, **body), requests * 2))
    for body, choice in zip(requests * 2, answers, strict=True):
        text = choice["text"]
        if "item_set" in body:
            assert item_of(choice) in named_sets[body["item_set"]].items
        elif "response_format" in body or "json" in body.get("structured_outputs", {}):
            assert json.loads(text)["n"] in (1, 2)
        elif body:
            ((kind, _),) = body["structured_outputs"].items()
            assert {
                "choice": text in COLOURS,
                "regex": len(text) == 4 and set(text) <= set("abc"),
                "grammar": text[:1] == "x" and text[-1:] == "y",
                "structural_tag": text[:2] == "ab" and text[2:].isdigit(),
            }[kind], body


def test_chat_streaming_and_the_other_endpoints(server, named_sets):
    body = {"item_set": "ragged", "return_token_ids": True}
    assert item_of(chat(server, **body)) in named_sets["ragged"].items
    assert chat(server, structured_outputs={"choice": COLOURS})["message"]["content"] in COLOURS
    pieces = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "p"}],
        stream=True,
        extra_body={"structured_outputs": {"choice": COLOURS}},
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) in COLOURS
    pieces = server.client.completions.create(model="tiny", prompt="p", stream=True, max_tokens=40, extra_body=body)
    tokens = [token for piece in pieces for token in piece.choices[0].token_ids or ()]
    assert tuple(tokens[:-1]) in named_sets["ragged"].items
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "n": 2, **body})
    assert status == 200
    assert {item_of(choice) for choice in answer["choices"]} <= named_sets["ragged"].items
    assert len(answer["choices"]) == 4
    # vLLM's own field for extra arguments means the same.
    assert item_of(complete(server, vllm_xargs={"item_set": "one"}, return_token_ids=True)) in named_sets["one"].items
    status, answer = server.post(
        "/v1/responses", {"model": "tiny", "input": "p", "structured_outputs": {"choice": COLOURS}}
    )
    assert status == 200
    assert answer["output"][-1]["content"][0]["text"] in COLOURS
    status, answer = server.post("/v1/responses", {"model": "tiny", "input": "p", "item_set": "labels"})
    assert status == 200, answer
    assert answer["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"item_set": "films"}, "no item set is called 'films'"),
        ({"item_set": "ragged", "vllm_xargs": {"item_set": "one"}}, "name different item sets"),
        ({"item_set": ["ragged"]}, "item_set must be the name of an item set"),
        ({"item_set": "ragged", "structured_outputs": {"choice": ["a"]}}, "exclude each other"),
        ({"item_set": "ragged", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"item_set": "ragged", "use_beam_search": True, "n": 2, "max_tokens": 3}, "is less than the longest"),
        (
            {"structured_outputs": {"choice": ["a b c d"]}, "use_beam_search": True, "max_tokens": 1},
            "is less than the longest",
        ),
        ({"structured_outputs": {"choice": []}}, "at least one text"),
        ({"structured_outputs": {"choice": [""]}}, "is empty"),
        ({"structured_outputs": {"choice": "red"}}, "valid list"),
        ({"structured_outputs": {"choice": [1, 2]}}, "valid string"),
    ],
)
def test_a_bad_request_is_http_400_and_the_server_goes_on(server, named_sets, body, message):
    for path, prompt in (
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
    ):
        status, answer = server.post(path, {"model": "tiny", **prompt, **body})
        assert status == 400, answer
        assert message in answer["error"]["message"]
    assert item_of(complete(server, item_set="one", return_token_ids=True)) in named_sets["one"].items


def test_an_endpoint_that_would_ignore_the_field_refuses_it(server):
    messages = [{"role": "user", "content": "p"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    for path in ("/v1/messages", "/tokenize", "/inference/v1/generate"):
        status, answer = server.post(path, {**body, "item_set": "one"})
        assert status == 400
        assert f"{path} takes no item_set: send it to one of /v1/chat/completions" in answer["error"]["message"]
    assert server.post("/v1/messages", body)[0] == 200


def test_a_second_request_with_an_inline_set_builds_nothing(server):
    texts = [f"label {i}" for i in range(5_000)]
    for _ in range(2):
        assert complete(server, structured_outputs={"choice": texts})["text"] in texts


@pytest.mark.parametrize("runner", ["v1"], scope="module")
def test_a_server_with_a_bad_set_does_not_start(tiny_model, runner):
    log = start_expecting_failure(
        runner, tiny_model, arguments=("--guided-decoding-backend", "static", "--item-set", "films=missing.itemset")
    )
    last = "static-backend: the item set 'films' cannot be opened: missing.itemset: no such file: build it with"
    assert log.splitlines()[-1].startswith(last)
    assert "Traceback" not in log


@pytest.mark.parametrize("runner", ["v1"], scope="module")
def test_a_set_that_does_not_fit_the_model_is_the_last_line_too(tiny_model, runner, tmp_path):
    itemset.build([[5, 2112]]).save(tmp_path / "films.itemset")
    named = f"films={tmp_path / 'films.itemset'}"
    log = start_expecting_failure(
        runner, tiny_model, arguments=("--guided-decoding-backend", "static", "--item-set", named)
    )
    assert "static-backend: the item set 'films'" in log.splitlines()[-1]
    assert "Traceback" not in log


@pytest.mark.parametrize("change", changes.IN_PLACE.values(), ids=changes.IN_PLACE.keys())
def test_a_file_that_is_changed_in_place_changes_nothing_that_is_served(server, named_sets, change):
    # "large": a map whose pages most requests would read anew, and "one", whose single page all of them would.
    bodies = [{"item_set": name, "return_token_ids": True, "seed": i} for i in range(10) for name in ("large", "one")]
    paths = [Path(named_sets[name].path) for name in ("large", "one")]
    with changes.undone(paths[0]), changes.undone(paths[1]), ThreadPoolExecutor(8) as pool:
        for path in paths:
            change(path)
        for body, choice in zip(bodies, pool.map(lambda body: complete(server, **body), bodies), strict=True):
            assert choice["finish_reason"] == "stop"
            assert item_of(choice) in named_sets[body["item_set"]].items


def test_metrics(server, runner):
    complete(server, item_set="labels")
    complete(server, structured_outputs={"choice": COLOURS})
    before = figures(server)
    complete(server, item_set="labels")
    complete(server, structured_outputs={"choice": COLOURS})
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "lable"})[0] == 400
    after = figures(server)
    gained = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    path = "device" if runner == "v2" else "host"
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
    assert (after["item_set:arena_bytes"] > after["item_set:arena_used_bytes"] > 0) == (path == "device")


def test_a_misspelled_field_is_refused(server):
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "p", "item_sets": "labels"})
    assert (status, answer["error"]["param"]) == (400, "item_sets")
    assert "there is no field item_sets: name the item set in item_set" in answer["error"]["message"]


def figures(server) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in server.get("/metrics")[1].splitlines() if line.startswith("item_set:")]
    return {name: float(value) for name, value in lines if "_created" not in name}
