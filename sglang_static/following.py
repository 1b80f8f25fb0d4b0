"""Following published sets: what the front end asks the schedulers, and what these do beside their steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from itemset.errors import ItemSetError
from itemset.masking.arena import ArenaFullError, check_tables
from itemset.serving.catalogue import Catalogue
from itemset.serving.following import Follower
from itemset.serving.preparing import Preparer, begun, no_room, or_why_not
from itemset.serving.versions import Opened
from sglang_static import compat
from sglang_static.compat import hook

logger = logging.getLogger(__name__)

FULL = "the arena is full"
METHOD = "item_sets"
"""Of a DumperControlReqInput that is a question of ours: the one request of SGLang's that brings plain values to every
scheduler, and others back."""


@hook(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop",
    why="published sets are followed once the event loop is known",
)
def _auto_create_handle_loop(original: Callable[..., Any], self: Any) -> None:
    original()
    front = getattr(self, "static_front_end", None)
    if front is not None and front.follower is None:
        front.follower = _follower(self, front)
        front.follower.start()


def follower_of(manager: Any) -> Follower | None:
    """Return what follows the sets of a TokenizerManager; None if it has none. Call it on the event loop."""
    if getattr(manager, "static_front_end", None) is None:
        return None
    manager.auto_create_handle_loop()
    follower: Follower = manager.static_front_end.follower
    return follower


def refresh(engine: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Take up what is current of the published sets of an `sglang.Engine`, or of one of them, before the next request.

    Returns, for each, what `GET /v1/item_sets` tells. Raises ItemSetError: no such set, or a version that cannot be
    served.
    """

    async def refreshed() -> list[dict[str, Any]]:
        follower = follower_of(engine.tokenizer_manager)
        if follower is None:
            raise ItemSetError("this engine has no item sets: start it with grammar_backend='static'")
        return await asyncio.to_thread(follower.refreshed, name)

    found: list[dict[str, Any]] = engine.loop.run_until_complete(refreshed())
    return found


def _follower(manager: Any, front: Any) -> Follower:
    loop = manager.event_loop

    async def ask_all(question: dict[str, Any]) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        outputs = await manager.dumper_control(DumperControlReqInput(method=METHOD, body=question))
        if failed := [output.error for output in outputs if not output.success]:
            raise ItemSetError(failed[0])
        return [output.response[0] for output in outputs]

    def ask(question: dict[str, Any]) -> list[dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(ask_all(question), loop).result()

    from itemset.serving import metrics

    path = "host" if front.host_path else "device"
    return Follower(
        front.checks,
        front.config,
        ask,
        path=path,
        logger=logger,
        on_served=metrics.served,
        on_refused=metrics.refused_version,
    )


@hook("sglang.srt.managers.scheduler:Scheduler.handle_dumper_control", why="new versions of followed sets are taken up")
def _handle_dumper_control(original: Callable[..., Any], self: Any, recv_req: Any) -> None:
    if recv_req.method != METHOD:
        original()
        return
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    answer = self.grammar_manager.grammar_backend.static_backend.preparer.answer(self, recv_req.body)
    output = DumperControlReqOutput(success=True, response=[answer])
    self.ipc_channels.send_to_tokenizer.send_output(output, recv_req)


class SchedulerPreparer:
    """Answers the front end (`itemset.serving.preparing`) in a scheduler. Called by its loop, between steps.

    Tensor-parallel ranks are asked the same in the same step, and do the same: each step of it is agreed on.
    """

    def __init__(self, catalogue: Catalogue, sampler: Any) -> None:
        """sampler: the ItemSetSampler; None on the host path."""
        self._versions, self._sampler = catalogue.versions, sampler
        self._preparer = Preparer(catalogue, logger)
        if sampler is not None:
            self._preparer = Preparer(catalogue, logger, on_served=self._served, on_dropped=self._dropped)

    def answer(self, scheduler: Any, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer for all ranks."""
        if "prepare" not in question:
            return self._preparer.answer(question)
        opened: Any = or_why_not(lambda: self._begun(question), logger)
        if question.get("ahead"):
            return {"ready": False}
        each = compat.of_all_ranks(scheduler, opened if isinstance(opened, str) else opened is not None)
        path, copying = "host", self._sampler is not None and all(one is True for one in each)
        if copying:
            there = or_why_not(lambda: self._advance(scheduler, opened), logger)
            each = compat.of_all_ranks(scheduler, there)
            path = "device"
            if FULL in each:
                self._sampler.holdings.give_up(question["prepare"])
                each, path = [True], "host"
        if refused := [one for one in each if isinstance(one, str)]:
            return {"ready": False, "refused": refused[0]}
        if ready := all(each):
            self._preparer.serve(opened)
        return {"ready": ready, "path": path, "copying": copying}

    def _begun(self, question: Mapping[str, Any]) -> Opened | None:
        return begun(self._versions, question, *([check_tables] if self._sampler is not None else []))

    def _advance(self, scheduler: Any, opened: Opened) -> bool | str:
        """Copy a piece of a version; whether all of it is there, or FULL."""
        try:
            pieces = self._sampler.holdings.hold(opened.name, opened.sets)
        except ArenaFullError as error:
            logger.warning(no_room(opened, error, "of the plugin's options"))
            return FULL
        with compat.forward_stream(scheduler):  # whose steps may read what is overwritten
            return bool(self._sampler.arrivals.advance(opened.name, opened.sets, pieces))

    def _served(self, opened: Opened, open_sets: Collection[str]) -> None:
        self._sampler.holdings.settle(opened.name)
        self._sampler.arena.forget_views(open_sets)

    def _dropped(self, name: str, open_sets: Collection[str]) -> None:
        self._sampler.holdings.drop(name)
        self._sampler.arena.forget_views(open_sets)
