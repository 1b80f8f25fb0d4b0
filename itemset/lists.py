"""Ranked lists in a front end: what a request may ask of one, and how all of them share the engine with the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from itemset.best import Answer, Best, Pass, Search
from itemset.catalogue import RefusedError
from itemset.config import StaticConfig
from itemset.errors import shown

if TYPE_CHECKING:
    from itemset.checks import Words

RANKING = ("width", "exact", "renormalised", "max_passes")
"""What a request for a ranked list may give beside its set: see `itemset.best.Search`."""

SHARE_BESIDE = 32  # of the engine's seats, the part that lists take beside other requests
OTHERS_STAY = 1.0  # seconds for which lists make room after they have met another request

Result = TypeVar("Result")


def options(given: Mapping[str, Any], k: int, config: StaticConfig, words: Words) -> dict[str, Any]:
    """Those of RANKING among what a request for a list of `k` gives, and the server's limits, as `Search` takes them.

    Raises RefusedError for a value of another type or outside its limits.
    """
    found = {name: given[name] for name in RANKING if given.get(name) is not None}
    for name in ("exact", "renormalised"):
        if not isinstance(found.get(name, False), bool):
            raise RefusedError("wrong type", f"{name} must be true or false, not {shown(found[name])}")
    for name, unit in (("width", "beams"), ("max_passes", "forward passes")):
        number = found.get(name, 1)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RefusedError("wrong type", f"{name} must be a number of {unit}, at least 1, not {shown(number)}")
    width, limit = found.get("width", k), config.ranked_list_limit
    if width < k:
        raise RefusedError("beam search", f"width={width:,} finds no {k:,} items: set it to at least {k:,}")
    if width > limit:
        what = f"a ranked list of {k:,}" if k > limit else f"a beam of width {width:,}"
        raise RefusedError(
            "beam search",
            f"{what} is longer than this engine's limit of {limit:,}: ask for fewer items, or raise "
            f"{words.option('ranked_list_limit')}",
        )
    most = config.ranked_list_passes
    if found.get("max_passes", 1) > most:
        raise RefusedError(
            "beam search",
            f"max_passes={found['max_passes']:,} is more than this engine's limit of {most:,}: lower it, or raise "
            f"{words.option('ranked_list_passes')}",
        )
    return found | {"proof_passes": max(1, most)}


def found_some(best: Best) -> Best:
    """The end of a search. Raises RefusedError if it has found nothing to answer with."""
    if not best.items:
        raise RefusedError("beam search", "no item was found before the limit: raise max_passes")
    return best


class Lists:
    """Runs the ranked lists of a front end, all on one event loop, so that other requests hardly notice.

    The searches' own work is done on one thread of their own. Engine requests are made one in a turn of the loop, list
    by list, and only so many are under way at a time: half of what the engine takes while the lists have it to
    themselves, and few beside other requests, whose steps they would make longer.
    """

    def __init__(self, seats: int, unfinished: Callable[[], int]) -> None:
        """seats: requests that the engine runs at a time. unfinished: how many it has now, those of lists included."""
        self._alone, self._beside = max(1, seats // 2), max(1, seats // SHARE_BESIDE)
        self._unfinished = unfinished
        self._under_way, self._others_at = 0, -OTHERS_STAY
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "ranked-lists")

    async def run(
        self, search: Search, ask: Callable[[Pass], Awaitable[Any]], read: Callable[[Pass, Any], Answer]
    ) -> Best:
        """Run a search to its end. Cancelled, it cancels what it has asked.

        ask: makes the engine's request for a pass. read: what its output says, called on the thread.
        Raises RefusedError if nothing was found, and what `ask` raises.
        """

        def take(outputs: list[Any]) -> None:
            search.take([read(one, output) for one, output in zip(search.passes, outputs, strict=True)])

        while search.passes:
            await self.on_thread(take, await self._round(search.passes, ask))
        return found_some(await self.on_thread(lambda: search.result))

    async def on_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _round(self, passes: Sequence[Pass], ask: Callable[[Pass], Awaitable[Any]]) -> list[Any]:
        tasks: list[asyncio.Future[Any]] = []
        try:
            for one in passes:
                async with self._turn:  # first come, first served: a list waits behind each other one
                    await self._seat()
                    tasks.append(asyncio.ensure_future(ask(one)))
                    self._under_way += 1
                    tasks[-1].add_done_callback(self._leave)
                    await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _seat(self) -> None:
        while self._under_way >= self._limit():
            self._freed.clear()
            await self._freed.wait()

    def _leave(self, _: asyncio.Future[Any]) -> None:
        self._under_way -= 1
        self._freed.set()

    def _limit(self) -> int:
        now = time.monotonic()
        if self._unfinished() > self._under_way:
            self._others_at = now
        return self._beside if now - self._others_at < OTHERS_STAY else self._alone
