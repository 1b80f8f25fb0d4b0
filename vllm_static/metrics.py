"""Figures in vLLM's own /metrics: what the front end counts itself, and what it asks the engine core for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter as Tally
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge

from itemset.serving.catalogue import INLINE, Catalogue, name_of

PATH = "/metrics"
PATIENCE = 2.0  # seconds that a scrape waits for the engine core; it may be in a long step

REQUESTS = Counter("item_set:requests", "Requests with an item set.", ["item_set"])
REFUSED = Counter("item_set:refused_requests", "Requests refused for their item set, HTTP 400.", ["reason"])
ENCODED = Counter("item_set:encoded_texts", "Texts of inline sets that were encoded.")
LISTS = Counter("item_set:ranked_lists", "Ranked lists: in one request, or why by rounds of requests.", ["way"])
DRAWS = Counter("item_set:draw_requests", "Requests for draws: in one request, or why rounds ended them.", ["way"])
INSIDE = Counter("item_set:items_inside", "Items in slates, JSON and other answers that hold items.", ["item_set"])
ANSWERED = Gauge("item_set:answered_items", "Answers that ended with an item.", ["item_set"], multiprocess_mode="max")
FORCED = Gauge("item_set:forced_tokens", "Their tokens that had no rival.", ["item_set"], multiprocess_mode="max")
BY_PATH = Gauge("item_set:requests_by_path", "Requests by where masks were made.", ["path"], multiprocess_mode="max")
ARENA = Gauge("item_set:arena_bytes", "Device memory kept for item sets.", multiprocess_mode="max")
ARENA_USED = Gauge("item_set:arena_used_bytes", "What sets in use take of it.", multiprocess_mode="mostrecent")

VERSIONS = Gauge(
    "item_set:version", "1 for the version that is served.", ["item_set", "version"], multiprocess_mode="livemax"
)
SINCE = Gauge(
    "item_set:version_since_seconds",
    "When the served version was taken up, Unix time.",
    ["item_set"],
    multiprocess_mode="max",
)
REFRESHES = Counter("item_set:refreshes", "New versions that were taken up.", ["item_set"])
REFUSED_VERSIONS = Counter("item_set:refused_versions", "Versions that could not be served.", ["item_set"])

ENGINE_METHOD, QUESTION = "item_set_figures", "item_set_question"
"""Methods that the plugin adds to vLLM's EngineCore: for `refresh`, and for `preparing.CorePreparer`."""


_versions: dict[str, str] = {}


def served(name: str, version: str) -> None:
    """Requests get this version of a set from now on."""
    if before := _versions.get(name):
        VERSIONS.labels(name, before).set(0)  # for those who read the files of several processes
        VERSIONS.remove(name, before)
        REFRESHES.labels(name).inc()
    _versions[name] = version
    VERSIONS.labels(name, version).set(1)
    SINCE.labels(name).set_to_current_time()


def refused_version(name: str) -> None:
    """A version of a set is not served."""
    REFUSED_VERSIONS.labels(name).inc()


def label(reference: str) -> str:
    """Inline sets are counted together: a label of its own for each would never end."""
    return "inline" if reference.startswith(INLINE) else name_of(reference)


def count_inside(told: Mapping[str, Any]) -> None:
    """Count the items of an answer that holds some. told: what it says."""
    for item in told.get("items", ()):
        INSIDE.labels(item.get("set", "inline")).inc()


class Figures:
    """What an engine core counts. Written by its input thread and by its loop, each its own entries."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.answered = Tally(dict.fromkeys(catalogue.registered, 0))
        self.forced = Tally(dict.fromkeys(catalogue.registered, 0))
        self.by_path = Tally({"device": 0, "host": 0})

    def as_dict(self, plan: Any) -> dict[str, Any]:
        arena = {"bytes": plan.nbytes, "used": plan.used} if plan is not None else {"bytes": 0, "used": 0}
        counts = {"answered": self.answered, "forced": self.forced, "by_path": self.by_path}
        return {"arena": arena} | {what: dict(tally) for what, tally in counts.items()}


async def refresh(app: Any) -> None:
    """Ask the engine core, the first of several, and set the gauges. Keeps the old values where it does not answer."""
    with contextlib.suppress(Exception):
        ask = app.state.engine_client.engine_core.call_utility_async(ENGINE_METHOD)
        figures = await asyncio.wait_for(ask, PATIENCE)
        for name, count in figures["answered"].items():
            ANSWERED.labels(name).set(count)
        for name, count in figures["forced"].items():
            FORCED.labels(name).set(count)
        for path, count in figures["by_path"].items():
            BY_PATH.labels(path).set(count)
        ARENA.set(figures["arena"]["bytes"])
        ARENA_USED.set(figures["arena"]["used"])
