"""A ranked list, or draws, as one request of vLLM's engine, beside its other requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from itemset.serving.config import StaticConfig
from itemset.serving.front.list_runner import OneRequest, Pace
from itemset.serving.wire import EngineRequest, ListResult, ListSpec
from vllm_static import compat
from vllm_static.compat import logger

_BEAMS = 512  # until a worker has said how many have room
LOOK = 0.002  # seconds between two looks whether other requests have had their time


class EngineLists(OneRequest):
    """Has as many lists at a time `under_way` in the engine as `ranked_list_beams` says, or a worker has room for."""

    def __init__(self, vllm_config: Any) -> None:
        config = StaticConfig.of(vllm_config.additional_config)
        limit, self._by_rows = config.ranked_list_beams, config.max_list_rows_per_step is not None
        beams = _BEAMS if limit is None else limit
        too_many, always = "more draws than ranked_list_beams has room for", compat.why_rounds(vllm_config) or ""
        options: dict[str, Any] = {"too_many": too_many, "always": always, "with_mend": compat.with_mend}
        super().__init__(logger.warning, beams=beams, widest=beams, **options)
        self._engines: int = vllm_config.parallel_config.data_parallel_size
        self._taken, self.under_way = 0, 0  # beams; lists that have some
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._others_until = 0.0
        self._pace = Pace(beams * self._engines)
        self._asks_workers = limit is None

    def read(self, carried: EngineRequest, table: Any, search: Any) -> Any:
        """Do `OneRequest.outcome` for a request whose prompt_token_id_logprobs are its table."""
        assert carried.ranked is not None
        result = ListResult.of_table(table, len(carried.ranked.races))
        if not carried.ranked.placeholders and self._asks_workers and result.beams is not None:
            self.beams = self.widest = result.beams
            self._pace.most = result.beams * self._engines
            self._freed.set()
        return self.outcome(carried, result, search)

    @asynccontextmanager
    async def room(self, spec: ListSpec, unfinished: Callable[[], int]) -> AsyncIterator[None]:
        """Wait until there are beams for a list, first come, first served, and hold them. A draft head needs none.

        Only as many are under way as their `Pace` allows. Where lists go on by rows and not by time, other requests
        have as much time for themselves after one. unfinished: how many requests there are, of lists too.
        """
        width = 0 if spec.placeholders else spec.beams
        async with self._turn:
            while self._taken and self._taken + width > self._pace.limit:
                self._freed.clear()
                await self._freed.wait()
            while width and unfinished() > self.under_way and time.monotonic() < self._others_until:
                await asyncio.sleep(LOOK)
            self._taken += width
            self.under_way += 1
        began, among = time.monotonic(), self._taken
        try:
            yield
            if width:
                self._pace.took(among, time.monotonic() - began)
        finally:
            self._taken -= width
            self.under_way -= 1
            if width and self._by_rows:
                now = time.monotonic()
                self._others_until = now + (now - began)
            self._freed.set()
