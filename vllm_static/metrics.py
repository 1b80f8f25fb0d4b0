"""Metrics of vLLM's engine core, which its front end adds to vLLM's own /metrics."""

import asyncio
import contextlib
from typing import Any

from prometheus_client import Gauge

from itemset.serving.metrics import EngineFigures

PATH = "/metrics"
PATIENCE = 2.0  # seconds that a scrape waits for the engine core; it may be in a long step
PAUSE = 1.0  # seconds between two questions, whoever scrapes: each calls all workers, between two steps

SHOWN = EngineFigures("max", used="mostrecent")
STEPS = Gauge(
    "item_set:sampled_steps",
    "Steps with answers of sets: sampled from the logits of a set's own tokens (narrow), or why from those of all.",
    ["logits"],
    multiprocess_mode="max",
)

ENGINE_METHOD, ROLLOUT = "item_set_figures", "item_set_rollout"  # added to EngineCore: `Figures`, `Preparer.answer`


class Figures:
    """What a server's gauges show of its engine core, the first of several."""

    _asking: "asyncio.Task[None] | None" = None
    _next = 0.0  # time at which it may be asked again

    async def refresh(self, app: Any) -> None:
        """Ask it and set the gauges, once for all scrapes that wait. Keeps the old values where it does not answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(app))
        await asyncio.wait([self._asking])

    async def _ask(self, app: Any) -> None:
        time = asyncio.get_running_loop().time
        await asyncio.sleep(self._next - time())
        self._next = time() + PAUSE
        with contextlib.suppress(Exception):
            ask = app.state.engine_client.engine_core.call_utility_async(ENGINE_METHOD)
            figures = await asyncio.wait_for(ask, PATIENCE)
            for name, gauge in (("by_path", SHOWN.by_path), ("sampled_steps", STEPS)):
                for label, count in figures[name].items():
                    gauge.labels(label).set(count)
            for gauge, nbytes in zip((SHOWN.arena, SHOWN.arena_used), figures["arena"], strict=True):
                gauge.set(nbytes)
