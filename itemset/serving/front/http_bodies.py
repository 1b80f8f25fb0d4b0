"""The HTTP surface of both engines: a body is checked once the server itself has parsed it, answers get their items,
and `/v1/item_sets` says what is served.

Content types, encodings, escapes and depth are the server's own parser's. Of an answer with items, the server's JSON is
read again on its way out: no function of an engine makes the choices of all endpoints.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from itemset.errors import ItemSetError
from itemset.serving.hooks import Hooks

if TYPE_CHECKING:  # it imports metrics, which have to wait until the engine has started
    from itemset.serving.front.version_watcher import Follower

_MIDDLEWARE = "item_set_middleware"
"""Where a scope has the middleware that checks its body: a process may run other apps as well."""
SETS, MODELS = "/v1/item_sets", "/v1/models"
ANSWERED = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses")
"""Endpoints whose answers say which items they are."""
PATIENCE = 0.2  # seconds between two looks for the client

Result = TypeVar("Result")


@dataclass
class Body:
    """What is known of the body of the HTTP request that is being served."""

    path: str = ""
    stated: Sequence[tuple[str, Any]] = ()  # its constraints in which sets may stand, kinds and texts
    fields: dict[str, Any] | None = None  # those of ours that the engine's parser would drop
    brings_choice: bool = False  # whether it has an inline list
    made: Any = None  # of it before its answer begins, held meanwhile
    request: Any = None  # the engine's object of it
    judged: Any = None  # what it asks of item sets
    prompts: int = 0  # that were handed to the engine
    unlimited: bool = False  # whether it gives no limit of tokens, so that an item's own end is that
    items: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # what answers say, by prompt and answer
    each: int = 1 << 30  # answers that a streamed prompt has
    whole: bool | None = None  # whether its answers are items from their first token on; None until that is known

    def begin(self, *, thinks: bool) -> None:
        """Note whether a prompt's answers begin with reasoning. The engine's parsers may take any answer for that."""
        self.whole = self.whole is not False and not thinks

    def streamed(self, number: int) -> dict[str, Any] | None:
        """Return what a choice of a stream says of items, by its number."""
        return self.items.get(divmod(number, self.each))

    def listed(self) -> Callable[[int], dict[str, Any] | None]:
        """Return the same for an answer as a whole, whose lists may be shorter than was asked for."""
        return dict(enumerate(self.items[key] for key in sorted(self.items))).get


_body: ContextVar[Body | None] = ContextVar("item_set_body", default=None)


def body() -> Body:
    """Return the body of the HTTP request that is being served; an empty one outside of one."""
    return _body.get() or Body()


def body_of(request: Any) -> Body:
    """Return the same, with the engine's object of the request. It may come without HTTP, from a file of requests."""
    if (given := _body.get()) is None:
        _body.set(given := Body())
    given.request = request
    return given


@contextlib.contextmanager
def no_body() -> Iterator[None]:
    """Hide the body from requests that are made on its behalf."""
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
            if given.path in ANSWERED:
                send = _Answer(send, given)
            elif given.path == MODELS and (sets := self.sets_by_model(scope)):
                from itemset.serving.front import model_names

                send = _Answer(send, given, lambda data: model_names.with_sets(data, sets))
            await self._app(scope, receive, send)
        finally:
            _body.reset(token)
            # A server's objects of a request hold the body, and an engine's tasks begin in a first request's context:
            # its sets do not live as long as these.
            given.made = None
            if not getattr(given.request, "background", False):
                given.request = given.judged = None

    async def begin(self, scope: Any) -> None:
        """Do what an engine needs before a request, or when the server starts: the type of the scope says which."""

    def sets_by_model(self, scope: Any) -> Collection[str]:
        """Return the names of the sets that a request may name after its model, see `model_names`."""
        raise NotImplementedError

    def check(self, scope: Any, given: Any) -> None:
        """Check a parsed body, and note what is in it. Raises RefusedError for what would be lost."""
        raise NotImplementedError

    async def make(self, request: Any, given: Any) -> None:
        """Make the sets of a body whose endpoint would begin to stream before it is judged."""


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


def judged(hook: Hooks, parse: Callable[[], Awaitable[Any]], request: Any) -> Awaitable[Any]:
    """Around `Request.json`, which parses a body, once a request."""
    middleware: BodyMiddleware | None = request.scope.get(_MIDDLEWARE)
    return parse() if middleware is None or hasattr(request, "_json") else _checked(hook, middleware, parse, request)


async def _checked(hook: Hooks, middleware: BodyMiddleware, parse: Callable[[], Awaitable[Any]], request: Any) -> Any:
    """Return the parsed body. Raises HTTPException 400, the one error that FastAPI lets through here, and counts it."""
    from fastapi import HTTPException

    from itemset.serving.metrics import refusals

    try:
        given = await parse()
        with hook.spared(f"{type(request).__module__}:{type(request).__name__}.json"), refusals():
            middleware.check(request.scope, given)
            await middleware.make(request, given)
    except RecursionError as error:  # not every endpoint expects it of its parser
        raise HTTPException(400, "the body is nested too deep") from error
    except ItemSetError as error:
        raise HTTPException(400, str(error)) from error
    return given


class _Answer:
    """Sends the answer to a request, with what each choice says of items. Without these it reads nothing of it."""

    def __init__(
        self, send: Callable[[Any], Awaitable[None]], given: Body, listing: Callable[[bytes], bytes] | None = None
    ) -> None:
        """listing: changes an answer that has no items."""
        self._send, self._body, self._listing = send, given, listing
        self._held: Any = None  # the beginning of an answer as a whole: its length will change
        self._so_far = b""

    async def __call__(self, message: Any) -> None:
        if not self._body.items and self._listing is None:
            await self._send(message)
        elif message["type"] == "http.response.start" and any(
            name.lower() == b"content-type" and b"json" in value for name, value in message["headers"]
        ):
            self._held = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._held is None:
            lines = message.get("body", b"").split(b"\n")
            for i, line in enumerate(lines):
                if line.startswith(b"data: {"):
                    lines[i] = b"data: " + _with_items(line[6:], self._body, self._body.streamed)
            await self._send(message | {"body": b"\n".join(lines)})
        else:
            self._so_far += message.get("body", b"")
            if not message.get("more_body"):
                given, so_far = self._body, self._so_far
                whole = _with_items(so_far, given, given.listed()) if self._listing is None else self._listing(so_far)
                others = [one for one in self._held["headers"] if one[0].lower() != b"content-length"]
                await self._send(self._held | {"headers": [*others, (b"content-length", b"%d" % len(whole))]})
                await self._send(message | {"body": whole})


def _with_items(data: bytes | msgspec.Raw, given: Body, told: Callable[[int], Any]) -> bytes:
    """Return a JSON object of an OpenAI endpoint with its items: in choices that have ended, or beside a response's
    output. All else stays the text that it is. told: of `given`, for choices."""
    said: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    if "choices" in said:
        said["choices"] = msgspec.json.decode(said["choices"], type=list[dict[str, Any]])
        for choice in said["choices"]:
            if choice.get("finish_reason") is not None:
                choice.update(told(choice["index"]) or {})
    elif "response" in said:  # the event of one
        said["response"] = msgspec.Raw(_with_items(said["response"], given, told))
    elif "output" in said:
        said |= given.items[max(given.items)]
    return msgspec.json.encode(said)


def add_routes(app: Any, follower_of: "Callable[[Any], Follower | None]") -> None:
    """Add `GET /v1/item_sets` and `POST /v1/item_sets/NAME/refresh` to a FastAPI application. follower_of: returns its
    state's follower, None if its engine has no item sets."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    from itemset.serving.catalogue import RefusedError

    # Of their own: a refresh waits for a version, and those of many clients must not take the threads of the engine.
    refreshes = ThreadPoolExecutor(4, "item-set-refresh")

    async def respond(request: Request, work: "Callable[[Follower], Any]", executor: Any = None) -> JSONResponse:
        message, status = "this server has no item sets: start it with --item-set NAME=FILE", 404
        if (follower := follower_of(request.app.state)) is not None:
            try:
                return JSONResponse(await asyncio.get_running_loop().run_in_executor(executor, work, follower))
            except RefusedError as error:
                message, status = str(error), 404 if error.reason == "unknown set" else 409
        kind = "NotFoundError" if status == 404 else "ConflictError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": "name", "code": status}}, status)

    async def listed(request: Request) -> JSONResponse:
        return await respond(request, lambda follower: follower.described())

    async def refresh(request: Request, name: str) -> JSONResponse:
        return await respond(request, lambda follower: follower.refresh(name), refreshes)

    app.add_api_route(SETS, listed, methods=["GET"])
    app.add_api_route(SETS + "/{name:path}/refresh", refresh, methods=["POST"])
