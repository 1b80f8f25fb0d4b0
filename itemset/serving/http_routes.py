"""`GET /v1/item_sets` and `POST /v1/item_sets/NAME/refresh`, the same in every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from itemset.serving.catalogue import RefusedError

if TYPE_CHECKING:  # it imports metrics, which have to wait until the engine has started
    from itemset.serving.version_watcher import Follower

PATH = "/v1/item_sets"


def add_routes(app: Any, follower_of: Callable[[Any], Follower | None]) -> None:
    """Add them to a FastAPI application. follower_of: its state's follower, None if its engine has no item sets."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

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
    app.add_api_route(PATH, listed, methods=["GET"])
    app.add_api_route(PATH + "/{name:path}/refresh", refresh, methods=["POST"])
