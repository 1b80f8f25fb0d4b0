"""Version roll-outs in SGLang: what its front end sends to the schedulers, and what these do between their steps."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from itemset.errors import ItemSetError
from sglang_static import compat

if TYPE_CHECKING:
    from itemset.serving.front.version_watcher import Follower  # which imports the metrics: see there

logger = logging.getLogger(__name__)


def follower_of(manager: Any) -> "Follower | None":
    """Return what follows the sets of a TokenizerManager, which begins now; None if it has none. Call it on the event
    loop."""
    front = getattr(manager, "static_front_end", None)
    if front is not None and front.follower is None:
        manager.auto_create_handle_loop()
        front.follower = _follower(manager, front)
        front.follower.start()
    return front and front.follower


def refresh(engine: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Do `sglang_static.refresh`."""

    async def refreshed() -> list[dict[str, Any]]:
        follower = follower_of(engine.tokenizer_manager)
        if follower is None:
            raise ItemSetError("this engine has no item sets: start it with grammar_backend='static'")
        return await asyncio.to_thread(follower.refreshed, name)

    entries: list[dict[str, Any]] = engine.loop.run_until_complete(refreshed())
    return entries


def _follower(manager: Any, front: Any) -> "Follower":
    from itemset.serving.front.version_watcher import Follower

    loop = manager.event_loop

    async def send_to_all(message: Any) -> list[Any]:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        outputs = await manager.dumper_control(DumperControlReqInput(method=compat.METHOD, body=message))
        if failed := [output.error for output in outputs if not output.success]:
            raise ItemSetError(failed[0])
        return [output.response[0] for output in outputs]

    def send(message: Any) -> list[Any]:
        return asyncio.run_coroutine_threadsafe(send_to_all(message), loop).result()

    path = "host" if front.host_path else "device"
    return Follower(front.checks, front.config, send, path=path, logger=logger)
