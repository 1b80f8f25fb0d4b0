"""The HTTP surface of both engines: a body is checked once the server itself has parsed it, answers get their items,
and `/v1/item_sets` says what is served.

Content types, encodings, escapes and depth are the server's own parser's, and nothing is parsed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import HTTPException

from itemset.errors import ItemSetError

if TYPE_CHECKING:  # it imports metrics, which have to wait until the engine has started
    from itemset.serving.version_watcher import Follower

_MIDDLEWARE = "item_set_middleware"
"""Where a scope has the middleware that checks its body: a process may run other apps as well."""
SETS = "/v1/item_sets"
PATIENCE = 0.2  # seconds between two looks for the client

Result = TypeVar("Result")


@dataclass
class Body:
    """What is known of the body of the HTTP request that is being served.

    stated: its constraints in which sets may stand, kinds and texts. fields: those of ours that the engine's parser
    would drop. brings_choice: whether it has an inline list. made: of it before its answer begins, held meanwhile.
    """

    path: str = ""
    stated: Sequence[tuple[str, Any]] = ()
    fields: dict[str, Any] | None = None
    brings_choice: bool = False
    made: Any = None


_body: ContextVar[Body | None] = ContextVar("item_set_body", default=None)


def body() -> Body:
    """The body of the HTTP request that is being served; an empty one outside of one."""
    return _body.get() or Body()


@contextlib.contextmanager
def no_body() -> Iterator[None]:
    """For the requests that are made on behalf of one: theirs are no fields of its body."""
    token = _body.set(None)
    try:
        yield
    finally:
        _body.reset(token)


class BodyMiddleware:
    """ASGI middleware: has every body checked that the engine parses."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, root = scope.get("path", ""), scope.get("root_path") or ""
        if root and path.startswith(f"{root}/"):  # a proxy's prefix, which the server's routes do not know
            path = path[len(root) :]
        token = _body.set(Body(str(path)))
        scope[_MIDDLEWARE] = self
        try:
            if scope["type"] == "http":
                await self.begin(scope)
            await self._app(scope, receive, send)
        finally:
            _body.reset(token)

    async def begin(self, scope: Any) -> None:
        """Do what an engine needs before a request."""

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


def with_items(event: str, items: Mapping[int, Any]) -> str:
    """A server-sent event of an OpenAI stream, with what each choice that ends here says of items. items: by choice."""
    head, _, data = event.partition("data: ")
    if not items or '"finish_reason":' not in data:
        return event
    chunk = json.loads(data)
    ended = [choice for choice in chunk.get("choices") or () if choice.get("finish_reason") is not None]
    for choice in ended:
        if choice.get("index") in items:
            choice.update(items[choice["index"]])
    return f"{head}data: {json.dumps(chunk, ensure_ascii=False)}\n\n" if ended else event


def add_routes(app: Any, follower_of: Callable[[Any], Follower | None]) -> None:
    """Add `GET /v1/item_sets` and `POST /v1/item_sets/NAME/refresh` to a FastAPI application.

    follower_of: its state's follower, None if its engine has no item sets.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse

    from itemset.serving.catalogue import RefusedError

    # Of their own: a refresh waits for a version, and those of many clients must not take the threads of the engine.
    refreshes = ThreadPoolExecutor(4, "item-set-refresh")

    async def respond(
        request: Request, work: Callable[[Follower], Any], executor: ThreadPoolExecutor | None = None
    ) -> JSONResponse:
        message, status = "this server has no item sets: start it with --item-set NAME=FILE", 404
        if (follower := follower_of(request.app.state)) is not None:
            try:
                return JSONResponse(await asyncio.get_running_loop().run_in_executor(executor, work, follower))
            except RefusedError as error:
                message, status = str(error), 404 if error.reason == "unknown set" else 409
        kind = "NotFoundError" if status == 404 else "ConflictError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": "name", "code": status}}, status)

    async def listed(request: Request) -> JSONResponse:
        return await respond(request, lambda follower: {"object": "list", "data": follower.listed()})

    async def refresh(request: Request, name: str) -> JSONResponse:
        return await respond(request, lambda follower: follower.refresh(name), refreshes)

    # FastAPI reads annotations by name, and these names are local.
    listed.__annotations__ = {"request": Request}
    refresh.__annotations__ = {"request": Request, "name": str}
    app.add_api_route(SETS, listed, methods=["GET"])
    app.add_api_route(SETS + "/{name:path}/refresh", refresh, methods=["POST"])
