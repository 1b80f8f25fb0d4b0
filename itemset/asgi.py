"""Reading an HTTP request's body before the server does, and refusing the request: for the plugins' middleware."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any

from itemset.config import REFERENCE

MISSPELLED = ("item_sets", "itemset", "item-set", "itemSet")  # servers would ignore them, and answer with anything

Receive = Callable[[], Awaitable[Any]]


def has_json(scope: Any) -> bool:
    """Whether an ASGI scope is an HTTP request whose body FastAPI takes for JSON: also one that does not say so."""
    kind = dict(scope.get("headers", ())).get(b"content-type", b"")
    return bool(scope["type"] == "http" and scope["method"] in ("POST", "PUT") and (not kind or b"json" in kind))


async def read(receive: Receive) -> bytes:
    """The whole body."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return b"".join(message.get("body", b"") for message in messages)


def replay(body: bytes, receive: Receive) -> Receive:
    """Lets the application receive this body, and then what else there is."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_again() -> Any:
        return next(messages, None) or await receive()

    return receive_again


def fields(body: bytes, words: Iterable[str]) -> dict[str, Any]:
    """The fields of a body that holds one of these words as a JSON string; none of others, which are not parsed.

    None either where it is no JSON object, which the endpoint itself will say.
    """
    if not any(f'"{word}"'.encode() in body for word in words):
        return {}
    try:
        given = json.loads(body)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


async def refuse(send: Any, message: str) -> None:
    """Answer with HTTP 400 and an error as OpenAI's API has it."""
    code = HTTPStatus.BAD_REQUEST
    error = {"message": message, "type": code.phrase, "param": REFERENCE, "code": code.value}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
