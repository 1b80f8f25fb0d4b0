"""The HTTP surface of both engines: a body is judged once the server itself has parsed it; an answer's item is added.

Judging what the server's own parser made leaves nothing to pass by: neither content types, encodings and escapes, nor
how deep a body is nested. Nothing is parsed twice, and what the server cannot parse it refuses as ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import HTTPException

from itemset.serving.catalogue import RefusedError

JUDGE = "item_set_judge"
"""Where a scope has what judges its body. Our middleware puts it there: a process may run other apps as well."""

MAKER = "item_set_maker"
"""Where a scope has what makes the set that its body brings or chooses. An engine itself would ask for it once a stream
has begun, too late to refuse the request."""
PATIENCE = 0.2  # seconds between two looks for the client

Judge = Callable[[Any, Any], None]
Maker = Callable[[Any, Any], Awaitable[None]]
Result = TypeVar("Result")


async def while_connected(work: Awaitable[Result], request: Any) -> Result:
    """Await it, but cancel it when the client has left. Raises ValueError then.

    request: Starlette's, or None if there is no client that may leave.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=PATIENCE))[0]:
            if request is not None and await request.is_disconnected():
                raise ValueError("the client has left")
        return task.result()
    finally:
        task.cancel()


async def judged(parse: Callable[[], Awaitable[Any]], request: Any) -> Any:
    """Around `Request.json`, by which FastAPI and the engines parse a body, once a request.

    Raises HTTPException 400 for what the judge or the maker refuses: the one error that FastAPI lets through here.
    """
    judge: Judge | None = request.scope.get(JUDGE)
    if judge is None or hasattr(request, "_json"):
        return await parse()
    try:
        body = await parse()
        judge(request.scope, body)
        make: Maker | None = request.scope.get(MAKER)
        if make is not None:
            await make(request, body)
    except RecursionError as error:  # not every endpoint expects it of its parser
        raise HTTPException(400, "the body is nested too deep") from error
    except RefusedError as error:
        raise HTTPException(400, str(error)) from error
    return body


def path_of(scope: Mapping[str, Any]) -> str:
    """The path as the server's routes know it, without a proxy's prefix."""
    path, root = scope["path"], scope.get("root_path") or ""
    return str(path[len(root) :] if root and path.startswith(f"{root}/") else path)


def with_items(event: str, items: Mapping[int, Any]) -> str:
    """A server-sent event of an OpenAI stream, with what each of its choices that ends here says of items.

    items: fields by choice index, of those that have ended. Events before the end are not parsed.
    """
    head, _, data = event.partition("data: ")
    if not items or '"finish_reason":' not in data:
        return event
    chunk = json.loads(data)
    ended = [choice for choice in chunk.get("choices") or () if choice.get("finish_reason") is not None]
    for choice in ended:
        if choice.get("index") in items:
            choice.update(items[choice["index"]])
    return f"{head}data: {json.dumps(chunk, ensure_ascii=False)}\n\n" if ended else event
