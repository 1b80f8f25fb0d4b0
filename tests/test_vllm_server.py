"""The real OpenAI server with our flags: what a client asks for by HTTP, what it gets, and what is refused."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import changes
import hostile
import lost_words
import playground_checks
import pytest
from request_fields import BAD_SELECTIONS
from servers import start_expecting_failure, wait_for
from sets import named_flags
from stores import web_server

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
LONG = "a label of many words, whose encoding takes its time"


@pytest.fixture(scope="module")
def flags(named_sets):
    """Of them, one is an index under a URI."""
    with web_server(Path(named_sets["one"].path).parent) as (address, _):
        yield named_flags(named_sets | {"one": replace(named_sets["one"], path=f"{address}/one.itemset")})


@pytest.fixture
def server(runner, servers, tiny_model, static, flags):
    compact = ("--structured-outputs-config.disable_any_whitespace", "true")  # which is xgrammar's
    words = {
        "v1": (*compact, "--enable-scale-out", "--structured-outputs-config.backend"),
        "v2": ("--guided-decoding-backend",),
    }[runner]
    return servers(runner, tiny_model, arguments=(*words, "static", *flags))


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


def test_one_batch_of_sets_and_grammars(runner, server, named_sets):
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
    json_texts: list[str] = []
    for body, choice in zip(requests * 2, answers, strict=True):
        text = choice["text"]
        if "item_set" in body:
            assert item_of(choice) in named_sets[body["item_set"]].items
        elif "response_format" in body or "json" in body.get("structured_outputs", {}):
            assert json.loads(text)["n"] in (1, 2)
            json_texts.append(text)
        elif body:
            ((kind, _),) = body["structured_outputs"].items()
            assert {
                "choice": text in COLOURS,
                "regex": len(text) == 4 and set(text) <= set("abc"),
                "grammar": text[:1] == "x" and text[-1:] == "y",
                "structural_tag": text[:2] == "ab" and text[2:].isdigit(),
            }[kind], body
    assert (set(json_texts) <= {'{"n":1}', '{"n":2}'}) == (runner == "v1")  # where the server allows no whitespace


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_weights(server, path):
    """What they must be: test_vllm_weights.py."""
    prompt = {"messages": [{"role": "user", "content": "p"}]} if "chat" in path else {"prompt": "p"}
    body = {"model": "tiny", "max_tokens": 40, "item_set": "ragged", "return_set_weight": True, **prompt}
    status, answer = server.post(path, body | {"n": 2})
    assert status == 200, answer
    assert len(answer["choices"]) == 2
    *_, last = (event for event in server.events(path, body | {"stream": True}) if event["choices"])
    for choice in (*answer["choices"], *last["choices"]):
        assert choice["item"].keys() == {"key", "set_weight"}
        assert choice["item"]["set_weight"] < 0
        assert choice.get("logprobs") is None
    for wrong, message in (
        ({"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}, "in the place of logprobs"),
        ({"item_set": None}, "return_set_weight is of one sampled answer with item_set"),
        ({"use_beam_search": True, "n": 2}, "return_set_weight is of one sampled answer with item_set"),
        ({"draws": 2}, "return_set_weight is of one sampled answer with item_set"),
        ({"return_set_weight": 1}, "return_set_weight must be true or false, not 1"),
        ({"return_set_weight": None, "return_set_weights": True}, "there is no field return_set_weights"),
        ({"return_set_weight": None, "vllm_xargs": {"return_set_weight": 1}}, "there is no field return_set_weight"),
    ):
        status, answer = server.post(path, body | wrong)
        assert status == 400, (wrong, answer)
        assert message in str(answer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *BAD_SELECTIONS,
        ({"item_set": "tagged", "only_keys": ["\ud800"]}, "only_keys: keys must be all integers or all strings"),
        ({"item_set": "tagged", "item_filter": {"\ud800": 1}}, 'there is no attribute "\\ud800": the set has'),
        ({"item_set": "films"}, "no item set is called 'films'"),
        ({"item_set": "ragged", "vllm_xargs": {"item_set": "one"}}, "name different item sets"),
        ({"item_set": ["ragged"]}, "item_set must be the name of an item set"),
        ({"item_set": "ragged", "structured_outputs": {"choice": ["a"]}}, "exclude each other"),
        ({"item_set": "ragged", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"item_set": "ragged", "use_beam_search": True, "n": 2, "max_tokens": 3}, "is less than the longest"),
        *(
            (
                {"item_set": "ragged", "beam_width": 4, **beams},
                "no field beam_width: a ranked list takes use_beam_search",
            )
            for beams in ({}, {"use_beam_search": True, "n": 2})
        ),
        (
            {"structured_outputs": {"choice": ["a b c d"]}, "use_beam_search": True, "max_tokens": 1},
            "is less than the longest",
        ),
        ({"structured_outputs": {"choice": []}}, "at least one text"),
        ({"structured_outputs": {"choice": [""]}}, "choice[0] ('') is empty"),
        ({"structured_outputs": {"choice": ["ab" * 5_000_000]}}, "has 10,000,000 characters"),
        ({"structured_outputs": {"choice": "red"}}, "valid list"),
        ({"structured_outputs": {"choice": [1, 2]}}, "valid string"),
        ({"item_sets": "labels"}, "there is no field item_sets: name the item set in item_set"),
        *(
            ({word: "labels"}, f"there is no field {word}: name")
            for word in ("items_set", "ITEM_SET", "itemSet", "item_sett")
        ),
        ({"vllm_xargs": {"item_sets": "one"}}, "there is no field item_sets in vllm_xargs: name the item set"),
        ({"extra_body": {"item_set": "one"}}, "there is no field item_set in extra_body"),
        ({"sampling_params": {"item_set": "one"}}, "there is no field item_set in sampling_params"),
        ({"structured_outputs": {"item_set": "one", "regex": "a"}}, "there is no field item_set in structured_outputs"),
        (
            {"structured_outputs": {"choices": ["a"], "regex": "a"}},
            "there is no field choices in structured_outputs: send",
        ),
        ({"structured_output": {"choice": ["a"]}}, "there is no field structured_output: send the texts as"),
        ({"choice": ["a"]}, "there is no field choice: send the texts as structured_outputs"),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, "an older word for structured_outputs"),
        ({"guided_choice": ["a"], "item_set": "one"}, "exclude each other"),
        ({"guided_choice": "abc"}, "guided_choice must be a list of texts, not 'abc'"),
        ({"vllm_xargs": {"item_set": "one", "exact": True}}, "exact is for ranked lists: add use_beam_search and n"),
        ({"item_set": "one", "guided_regex": "a"}, "an item set and guided_regex exclude each other"),
        ({"item_set": "x" * 1_000_000}, f"no item set is called '{'x' * 60}'...: it has fixed"),
        ({"item_set": {"a": "x" * 1_000}}, "a string, not an object"),
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
        if "use_beam_search" not in body:  # which is not streamed at all
            assert server.post(path, {"model": "tiny", **prompt, **body, "stream": True}) == (status, answer)
        judged = "valid" in message or message.startswith("there is no field")  # before vLLM knows parameters
        if set(body) == {"structured_outputs"} and not judged:
            assert answer["error"]["param"] == "structured_outputs"
    assert item_of(complete(server, item_set="one", return_token_ids=True)) in named_sets["one"].items


def test_an_endpoint_that_would_ignore_the_field_refuses_it(server):
    messages = [{"role": "user", "content": "p"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    named = json.dumps({**body, "item_set": "one"})
    before = server.figures().get('item_set:refused_requests_total{reason="wrong endpoint"}', 0)
    for path in ("/v1/messages", "/tokenize", "/invocations"):
        for data, *content_types in (
            (named.encode(),),
            (named.encode(), "Application/JSON; charset=utf-8"),
            (named.encode(), "application/json", "text/plain"),
            (named.encode("utf-16"),),
            (named.replace("item_set", "item\\u005fset").encode(),),
        ):
            status, answer = server.send(path, data, *content_types)
            assert status == 400, answer
            assert f"{path} takes no item_set: send it to one of /v1/chat/completions" in answer["error"]["message"]
    assert server.figures()['item_set:refused_requests_total{reason="wrong endpoint"}'] == before + 15
    assert server.post("/v1/messages", {**body, "guided_choice": ["a"]})[0] == 400
    assert server.post("/v1/messages", {**body, "vllm_xargs": {"item_sets": "one"}})[0] == 400
    assert server.post("/v1/messages", body)[0] == 200
    # The server's own field for extras is read there.
    status, answer = server.post("/v1/messages", {**body, "max_tokens": 20, "vllm_xargs": {"item_set": "one"}})
    assert (status, answer["usage"]["output_tokens"]) == (200, 6)


@pytest.mark.parametrize("runner", ["v1"], scope="module")
def test_no_body_loses_its_set(server, runner):
    assert not lost_words.lost(server.post, lost_words.VLLMS)
    assert not lost_words.unread(server.post, lost_words.VLLMS, lost_words.VLLM_APPLIES)


def test_a_forced_tool_is_no_item(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "p"}], "tools": [tool]}
    for word in ({"structured_outputs": {"choice": COLOURS}}, {"guided_choice": COLOURS}, {"item_set": "one"}):
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            status, answer = server.post("/v1/chat/completions", {**body, **word, "tool_choice": choice})
            assert status == 400, answer
            assert "a tool_choice that forces a tool exclude each other" in answer["error"]["message"]
        assert chat(server, tools=[tool], tool_choice="none", **word)["item"] is not None


def test_every_answer_names_its_items_key(server, named_sets):
    ragged, item = itemset.load(named_sets["ragged"].path), {"item_set": "ragged", "return_token_ids": True}
    inline = {"structured_outputs": {"choice": COLOURS}}
    prompts = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 40}
    messages = [{"role": "user", "content": "p"}]

    def expected(tokens) -> dict:
        return {"key": ragged.lookup([tokens])[0]}

    for choice in server.post("/v1/completions", {**prompts, **item})[1]["choices"]:
        assert choice["item"] == expected(item_of(choice))
    for choice in server.post("/v1/completions", {**prompts, **inline})[1]["choices"]:
        assert choice["item"] == {"key": COLOURS.index(choice["text"])}
    for choice in server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, "n": 2, **item})[1][
        "choices"
    ]:
        assert choice["item"] == expected(item_of(choice))
    batch = {"model": "tiny", "messages": [messages, messages], **item}
    choices = server.post("/v1/chat/completions/batch", batch)[1]["choices"]
    assert [choice["item"] for choice in choices] == [expected(item_of(choice)) for choice in choices]
    for stream in (False, True):
        body = {"model": "tiny", "input": "p", "stream": stream, **inline}
        answer = (
            server.events("/v1/responses", body)[-1]["response"] if stream else server.post("/v1/responses", body)[1]
        )
        assert answer["item"]["key"] in range(3)
    for path, more in (("/v1/completions", prompts), ("/v1/chat/completions", {"messages": messages, "n": 3})):
        tokens: dict[int, list[int]] = {}
        items = {}
        for event in server.events(path, {"model": "tiny", "stream": True, **more, **item}):
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
                assert ("item" in choice) == (choice["finish_reason"] is not None)
                if "item" in choice:
                    items[choice["index"]] = choice["item"]
        assert len(items) >= 3
        assert items == {index: expected(ids[:-1]) for index, ids in tokens.items()}
    assert "item" not in complete(server)


def test_a_slow_reader_of_a_stream_loses_no_item(monkeypatch):
    from vllm import CompletionOutput, RequestOutput

    from vllm_static.compat import hook
    from vllm_static.plugin import register

    def output(index: int, **item: object) -> RequestOutput:
        completion = CompletionOutput(index, "a", [5], 0.0, None, finish_reason="stop" if item else None)
        vars(completion).update(item)
        return RequestOutput("r", None, [1], None, [completion], bool(item))

    register()
    monkeypatch.setattr(hook, "_chosen", True)  # as in the process of an engine with sets
    merged = output(0)
    merged.add(output(1), aggregate=True)
    merged.add(output(0, item={"key": 7}), aggregate=True)
    assert [getattr(one, "item", "none yet") for one in merged.outputs] == [{"key": 7}, "none yet"]


def test_an_answer_that_is_no_item_names_none(server):
    words = {"structured_outputs": {"choice": ["red and green", "red and blue"]}, "n": 2}
    assert complete(server, **words, max_tokens=2)["item"] is None
    assert complete(server, **words, stop="and")["item"] is None
    assert complete(server, **words, ignore_eos=True, max_tokens=60)["item"]["key"] in (0, 1)
    # An item that a limit ends is one, unless it might have become a longer one.
    assert complete(server, item_set="labels", max_tokens=1)["item"] is not None
    one = complete(server, item_set="prefixes", max_tokens=1, return_token_ids=True)
    assert (one["item"] is None) == (one["token_ids"] == [100])


@pytest.mark.parametrize("runner", ["v1"], scope="module")
def test_hostile_bodies_end_in_an_error_of_their_own(server, runner):
    messages = [{"role": "user", "content": "p"}]
    few, wrong = {"model": "tiny", "max_tokens": 2}, []
    for path, base in {
        "/v1/completions": {**few, "prompt": "p"},
        "/v1/chat/completions": {**few, "messages": messages},
        "/v1/chat/completions/batch": {**few, "messages": [messages]},
        "/v1/responses": {"model": "tiny", "input": "p", "max_output_tokens": 16},
        "/v1/messages": {**few, "messages": messages},
        "/tokenize": {"model": "tiny", "prompt": "p"},
        "/invocations": {**few, "messages": messages},
        "/v1/nothing": {},
    }.items():
        for meant, body in hostile.bodies(base):
            status, answer = server.send(path, body)
            if status >= 500 or (meant and status < 400 and path != "/tokenize"):
                wrong.append((path, body[:100], status, str(answer)[:200]))
    assert not wrong
    assert complete(server, item_set="one")["item"] == {"key": 0}


def test_equal_lists_are_encoded_once_and_hold_up_no_short_one(server):
    texts = [f"{LONG} {i}" for i in range(40_000)]
    before = encoded(server)
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(complete, server, structured_outputs={"choice": texts}) for _ in range(3)]
        wait_for(lambda: encoded(server) > before)
        assert complete(server, structured_outputs={"choice": ["one of", "two"]})["text"] in ("one of", "two")
        assert not any(one.done() for one in long)
        assert all(one.result()["text"] in texts for one in long)
    assert complete(server, structured_outputs={"choice": texts})["text"] in texts
    assert encoded(server) - before == len(texts) + 2


def test_encoding_stops_when_the_client_leaves(server):
    texts = [f"{LONG}, then {i}" for i in range(100_000)]
    before = encoded(server)
    connection = HTTPConnection(server.url.removeprefix("http://"))
    body = json.dumps({"model": "tiny", "prompt": "p", "structured_outputs": {"choice": texts}})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: encoded(server) > before)
    connection.close()
    others = [f"other label {i}" for i in range(5_000)]
    assert complete(server, structured_outputs={"choice": others})["text"] in others
    counts = [encoded(server)]

    def stands() -> bool:
        time.sleep(0.5)  # in which it would go on
        counts.append(encoded(server))
        return counts[-1] == counts[-2]

    wait_for(stands)
    assert counts[-1] - before < len(texts)


def encoded(server) -> float:
    """Texts of inline sets that it has encoded so far."""
    return server.figures().get("item_set:encoded_texts_total", 0)


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


def test_the_playground_shows_what_the_server_says(server, named_sets):
    playground_checks.check(server.url, named_sets)


def test_metrics(server, runner):
    complete(server, item_set="labels")
    complete(server, structured_outputs={"choice": COLOURS})
    before = server.figures()
    complete(server, item_set="labels")
    complete(server, structured_outputs={"choice": COLOURS})
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "p", "item_set": "lable"})[0] == 400
    after = server.figures()
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
    assert after["item_set:illegal_answers_total"] == 0  # of all the requests of this module
    assert (after["item_set:arena_bytes"] > after["item_set:arena_used_bytes"] > 0) == (path == "device")
