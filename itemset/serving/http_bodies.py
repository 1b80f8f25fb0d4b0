"""The HTTP surface of both engines: a body is checked once the server itself has parsed it; answers get their items.

Content types, encodings, escapes and depth are the server's own parser's, and nothing is parsed twice. Of an answer
with items, the server's JSON is read again on its way out: no function of an engine makes the choices of all endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from itemset.errors import ItemSetError

_MIDDLEWARE = "item_set_middleware"
"""Where a scope has the middleware that checks its body: a process may run other apps as well."""
WITH_CHOICES = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch")
"""Endpoints whose answers have choices, each with its item."""
PATIENCE = 0.2  # seconds between two looks for the client

Result = TypeVar("Result")


@dataclass
class Body:
    """What is known of the body of the HTTP request that is being served.

    stated: its constraints in which sets may stand, kinds and texts. fields: those of ours that the engine's parser
    would drop. brings_choice: whether it has an inline list. made: of it before its answer begins, held meanwhile.
    request: the engine's object of it. judged: what it asks of item sets. prompts: that were handed to the engine.
    items: what answers say of items, by prompt and answer. each: answers that a streamed prompt has.
    """

    path: str = ""
    stated: Sequence[tuple[str, Any]] = ()
    fields: dict[str, Any] | None = None
    brings_choice: bool = False
    made: Any = None
    request: Any = None
    judged: Any = None
    prompts: int = 0
    items: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    each: int = 1 << 30


_body: ContextVar[Body | None] = ContextVar("item_set_body", default=None)


def body() -> Body:
    """The body of the HTTP request that is being served; an empty one outside of one."""
    return _body.get() or Body()


def body_of(request: Any) -> Body:
    """The same, with the engine's object of the request. It may come without HTTP, from a file of requests."""
    if (given := _body.get()) is None:
        _body.set(given := Body())
    given.request = request
    return given


@contextlib.contextmanager
def no_body() -> Iterator[None]:
    """For the requests that are made on behalf of one: theirs are no fields of its body."""
    token = _body.set(None)
    try:
        yield
    finally:
        _body.reset(token)


class BodyMiddleware:
    """ASGI middleware: has every body checked that the engine parses, and puts items into answers."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, root = scope.get("path", ""), scope.get("root_path") or ""
        if root and path.startswith(f"{root}/"):  # a proxy's prefix, which the server's routes do not know
            path = path[len(root) :]
        token = _body.set(given := Body(str(path)))
        scope[_MIDDLEWARE] = self
        try:
            await self.begin(scope)
            if given.path in WITH_CHOICES:
                send = _Answer(send, given)
            await self._app(scope, receive, send)
        finally:
            _body.reset(token)

    async def begin(self, scope: Any) -> None:
        """Do what an engine needs before a request, or when the server starts: the type of the scope says which."""

    def check(self, scope: Any, given: Any) -> None:
        """Check a parsed body, and note what is in it. Raises RefusedError for what would be lost."""
        raise NotImplementedError

    async def make(self, request: Any, given: Any) -> None:
        """Make the set that a body brings or selects: once a stream has begun, it is too late to refuse it."""
        raise NotImplementedError


async def while_connected(work: Awaitable[Result], request: Any) -> Result:
    """Await it, but cancel it and raise ValueError when the client has left. request: Starlette's, None without one."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=PATIENCE))[0]:
            if request is not None and await request.is_disconnected():
                raise ValueError("the client has left")
        return task.result()
    finally:
        task.cancel()


async def judged(parse: Callable[[], Awaitable[Any]], request: Any) -> Any:
    """Around `Request.json`, which parses a body, once a request. Raises HTTPException 400 for what is refused: the one
    error that FastAPI lets through here. Counts it."""
    middleware: BodyMiddleware | None = request.scope.get(_MIDDLEWARE)
    if middleware is None or hasattr(request, "_json"):
        return await parse()
    from fastapi import HTTPException

    from itemset.serving.metrics import refusals

    try:
        given = await parse()
        with refusals():
            middleware.check(request.scope, given)
            await middleware.make(request, given)
    except RecursionError as error:  # not every endpoint expects it of its parser
        raise HTTPException(400, "the body is nested too deep") from error
    except ItemSetError as error:
        raise HTTPException(400, str(error)) from error
    return given


class _Answer:
    """Sends the answer to a request, with what each choice says of items."""

    def __init__(self, send: Callable[[Any], Awaitable[None]], given: Body) -> None:
        self._send, self._body = send, given
        self._held: Any = None  # the beginning of an answer as a whole: its length will change
        self._so_far = b""

    async def __call__(self, message: Any) -> None:
        begins = message["type"] == "http.response.start"
        if begins and self._body.items and _is_json(message):
            self._held = message
            return
        if not begins and self._held is not None:
            self._so_far += message.get("body", b"")
            if message.get("more_body"):
                return
            whole = _with_items(self._so_far, self._body)
            others = [one for one in self._held["headers"] if one[0].lower() != b"content-length"]
            await self._send(self._held | {"headers": [*others, (b"content-length", str(len(whole)).encode())]})
            message = message | {"body": whole}
        elif not begins and self._body.items:
            message = message | {"body": event_with_items(message.get("body", b""), self._body)}
        await self._send(message)


def _is_json(message: Any) -> bool:
    return any(name.lower() == b"content-type" and b"json" in value for name, value in message["headers"])


def _with_items(answer: bytes, given: Body) -> bytes:
    """An answer as JSON, with its items. Of lists that are shorter than was asked for, choices are counted."""
    read = json.loads(answer)
    items = [fields for _, fields in sorted(given.items.items(), key=lambda pair: pair[0])]
    for choice in (read.get("choices") or ()) if isinstance(read, dict) else ():
        choice.update(items[choice["index"]] if choice["index"] < len(items) else {})
    return _encoded(read)


def event_with_items(event: bytes, given: Body) -> bytes:
    """A server-sent event of an OpenAI stream, with what each choice that ends here says of items."""
    head, _, data = event.partition(b"data: ")
    if b'"finish_reason":' not in data:
        return event
    chunk = json.loads(data)
    ended = [choice for choice in chunk.get("choices") or () if choice.get("finish_reason") is not None]
    for choice in ended:
        choice.update(given.items.get(divmod(choice["index"], given.each), {}))
    return head + b"data: " + _encoded(chunk) + b"\n\n" if ended else event


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
