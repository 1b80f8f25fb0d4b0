"""Work that takes its time: on threads beside an event loop, or at once where nobody else is held up."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")


async def on(threads: Executor | None, work: Callable[..., Result], *args: Any) -> Result:
    """Return what `work` returns, on one of these threads; without threads it is done here, and nothing is awaited."""
    return work(*args) if threads is None else await asyncio.get_running_loop().run_in_executor(threads, work, *args)


def at_once(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that was told to do its work here, so that it awaits nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("work that was to be done here has awaited something")
