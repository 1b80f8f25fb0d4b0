"""Version roll-outs in vLLM's front ends."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.logger import init_logger

from itemset.errors import ItemSetError
from itemset.serving.version_watcher import Follower, Send
from vllm_static import compat
from vllm_static.metrics import ROLLOUT

PATIENCE = 1.0  # seconds after which a front end checks that the engine is still there

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def follow(client: Any) -> None:
    """Let the front end of an AsyncLLM follow published sets, if it has item sets and its event loop runs."""
    front = client.input_processor.static_front_end
    if front is None or front.follower is not None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return

    async def send_to_all(message: Any) -> list[Any]:
        return list(await asyncio.gather(*compat.asked_of_each(client.engine_core, ROLLOUT, message)))

    def send(message: Any) -> list[Any]:
        answers = asyncio.run_coroutine_threadsafe(send_to_all(message), loop)
        while True:
            try:
                return answers.result(PATIENCE)
            except TimeoutError:
                if client.errored:  # vLLM answers nothing of an engine that has ended
                    raise ItemSetError("the engine has ended") from None

    _follow_by(front, send).start()


def refresh(llm: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Do `vllm_static.refresh`."""
    front = llm.llm_engine.input_processor.static_front_end
    if front is None:
        raise ItemSetError("this engine has no item sets: start it with the structured-outputs backend static")
    core = llm.llm_engine.engine_core
    follower: Follower = front.follower or _follow_by(front, lambda message: [compat.ask(core, ROLLOUT, message)])
    return follower.refreshed(name)


def _follow_by(front: Any, send: Send) -> Follower:
    number, count = compat.front_of(front.vllm_config)
    path = "device" if compat.on_device_path(front.vllm_config) else "host"
    follower = Follower(front.checks, front.config, send, path=path, front=number, fronts=count, logger=logger)
    front.follower = follower
    return follower
