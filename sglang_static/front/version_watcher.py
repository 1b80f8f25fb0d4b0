"""What makes a front end of SGLang follow published sets, and what it sends to the schedulers for that."""

import asyncio
from typing import Any

from itemset.errors import ItemSetError
from sglang_static import compat


def follower_of(manager: Any) -> Any:
    """Return a TokenizerManager's `Follower`, begun if need be; None without item sets. Call it on the event loop."""
    front = getattr(manager, "static_front_end", None)
    if front is not None and front.follower is None:
        manager.auto_create_handle_loop()
        loop = manager.event_loop

        async def send_to_all(message: Any) -> list[Any]:
            from sglang.srt.managers.io_struct import DumperControlReqInput

            outputs = await manager.dumper_control(DumperControlReqInput(method=compat.METHOD, body=message))
            if failed := [output.error for output in outputs if not output.success]:
                raise ItemSetError(failed[0])
            return [output.response[0] for output in outputs]

        front.follow(lambda message: asyncio.run_coroutine_threadsafe(send_to_all(message), loop).result()).start()
    return front and front.follower
