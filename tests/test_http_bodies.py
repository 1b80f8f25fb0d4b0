"""Answers on their way out of a server, with what they say of items."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from itemset.errors import ItemSetError
from itemset.serving.front import http_bodies
from itemset.serving.front.answer_fields import json_paths
from itemset.serving.front.model_names import take_set
from itemset.serving.hooks import Hooks

JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]
EVENTS = [(b"content-type", b"text/event-stream")]
RED, BLUE = {"item": {"key": 0}}, {"item": {"key": 2}}


class Made:
    """A set that a body brings."""


def served(path: str, headers: Any, *bodies: bytes, items: Any = None, each: int = 1) -> tuple[list[Any], list[Any]]:
    """What an app sends, and what leaves the server. items: what is told of items before the answer begins."""
    given, left, made = [], [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = http_bodies.body()
        body.items |= items or {}
        body.each, body.made = each, Made()
        made.append(weakref.ref(body.made))
        scope["kept"] = send  # as a server's objects of a request do, which refer to each other
        scope["context"] = contextvars.copy_context()  # as the tasks of an engine do that its first request begins
        given.append({"type": "http.response.start", "status": 200, "headers": headers})
        more = [
            {"type": "http.response.body", "body": one, "more_body": i + 1 < len(bodies)}
            for i, one in enumerate(bodies)
        ]
        given.extend(more)
        for message in given:
            await send(message)

    async def receive_nothing() -> Any:
        raise AssertionError

    async def sent(message: Any) -> None:
        left.append(message)

    scope = {"type": "http", "path": path}
    asyncio.run(http_bodies.BodyMiddleware(app)(scope, receive_nothing, sent))
    gc.collect()
    assert made[0]() is None  # though `scope` is still there
    return given, left


def test_a_model_s_name_may_ask_for_a_thought_before_the_list():
    body = {"model": "qwen3:films?list=10&list_after=</think>"}
    take_set(body, ["films"])
    assert body == {"model": "qwen3", "item_set": "films", "list": 10, "list_after": "</think>"}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (b'{"a": ["x", {"b c": 1}], "d": "', {8: "$.a[0]", 20: '$.a[1]["b c"]', 31: "$.d"}),
        (rb'{"\ud800": "x", "k\"', {12: '$["\\ud800"]'}),  # half of a pair, and a key that is cut
        (b'{"a": "' + rb"\"" * 100_000, {7: "$.a"}),  # in linear time
        (b'"', {1: "$"}),
        (rb'{"m": {"\q": 1}, "film": "A"}', {13: '$.m["\\\\q"]', 26: "$.film"}),  # no JSON, which a pattern may let in
        (b'{"p": "x"{}} "k" ", "film": "A"}', {7: "$.p"}),
    ],
)
def test_where_values_stand_in_json(text, paths):
    assert json_paths(text, range(len(text) + 1)) == paths
    assert json_paths(text, [*paths][-1:]) == dict([[*paths.items()][-1]])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/health"])
@pytest.mark.parametrize("headers", [JSON, EVENTS])
def test_an_answer_without_items_is_sent_as_it_is(path, headers):
    given, left = served(path, headers, b'{"choices": []', b"}")
    assert all(one is other for one, other in zip(given, left, strict=True))


def test_another_endpoints_answer_is_sent_as_it_is():
    given, left = served("/v1/messages", JSON, b"{}", items={(0, 0): RED})
    assert left == given


def test_an_answer_as_a_whole_gets_its_items_and_its_length():
    """In pieces; all but the choices stays the text that it was; lists may be shorter than was asked for."""
    whole = b'{"id": 1.50, "choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": "stop"}]}'
    _, left = served("/v1/completions", JSON, whole[:30], whole[30:], items={(1, 0): BLUE, (0, 0): RED}, each=7)
    start, body = left
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert [choice["item"] for choice in json.loads(body["body"])["choices"]] == [RED["item"], BLUE["item"]]
    assert b"1.50" in body["body"]


def test_an_error_after_items_is_sent_whole():
    _, (start, body) = served("/v1/completions", JSON, b'{"error": {"code": 500}}', items={(0, 0): RED})
    assert json.loads(body["body"]) == {"error": {"code": 500}}
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])


def test_events_get_their_items_where_a_choice_ends():
    choice = b'data: {"choices":[{"index":3,"text":"a","finish_reason":%s}]}\n\n'
    events = choice % b"null" + choice % b'"stop"'
    _, left = served("/v1/completions", EVENTS, events, b"data: [DONE]\n\n", items={(1, 1): BLUE}, each=2)
    first, last = (json.loads(line[6:])["choices"][0] for line in left[1]["body"].split(b"\n\n")[:2])
    assert ("item" in first, last["item"], left[2]["body"]) == (False, BLUE["item"], b"data: [DONE]\n\n")


def test_a_response_has_its_item_beside_its_output():
    said = b'{"object":"response","output":[]}'
    for headers, answer in ((JSON, said), (EVENTS, b'event: a\ndata: {"type":"a","response":' + said + b"}\n\n")):
        _, left = served("/v1/responses", headers, answer, items={(0, 0): RED})
        assert b'"output":[],"item":{"key":0}}' in left[1]["body"]


def test_a_fault_of_ours_costs_the_server_of_another_backend_nothing():
    """The body is the one that was parsed. A refusal is HTTP 400, whichever backend is chosen."""
    refusal = pytest.importorskip("fastapi", reason="either engine installs FastAPI").HTTPException
    hook, happens, parsed = Hooks("now"), [TypeError("a fault of ours")], list[Any]()

    class Checking(http_bodies.BodyMiddleware):
        def check(self, scope: Any, given: Any) -> None:
            raise happens[0]

    async def parse() -> Any:
        return {"prompt": "p"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parsed.append(await http_bodies.judged(hook, parse, SimpleNamespace(scope=scope)))

    def serve() -> None:
        asyncio.run(Checking(app)({"type": "http", "path": "/v1/completions"}, None, None))

    serve()
    assert parsed == [{"prompt": "p"}]
    happens[0] = ItemSetError("a refusal")
    with pytest.raises(refusal, match="a refusal"):
        serve()
    hook.choose(True)
    happens[0] = TypeError("a fault of ours")
    with pytest.raises(TypeError, match="a fault of ours"):
        serve()
