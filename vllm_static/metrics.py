"""Metrics of vLLM's engine core, which its front end adds to vLLM's own /metrics."""

import asyncio
import contextlib
from typing import Any

from prometheus_client import Gauge

from itemset.serving.metrics import EngineFigures

PATH = "/metrics"
PATIENCE = 2.0  # seconds that a scrape waits for the engine core; it may be in a long step

SHOWN = EngineFigures("max", used="mostrecent")
STEPS = Gauge(
    "item_set:sampled_steps",
    "Steps with answers of sets: sampled from the logits of a set's own tokens (narrow), or why from those of all.",
    ["logits"],
    multiprocess_mode="max",
)

ENGINE_METHOD, ROLLOUT = "item_set_figures", "item_set_rollout"  # added to EngineCore: `refresh`, `Preparer.answer`


async def refresh(app: Any) -> None:
    """Ask the engine core, the first of several, and set the gauges. Keeps the old values where it does not answer."""
    with contextlib.suppress(Exception):
        ask = app.state.engine_client.engine_core.call_utility_async(ENGINE_METHOD)
        figures = await asyncio.wait_for(ask, PATIENCE)
        for name, gauge in (("by_path", SHOWN.by_path), ("sampled_steps", STEPS)):
            for label, count in figures[name].items():
                gauge.labels(label).set(count)
        for gauge, nbytes in zip((SHOWN.arena, SHOWN.arena_used), figures["arena"], strict=True):
            gauge.set(nbytes)
