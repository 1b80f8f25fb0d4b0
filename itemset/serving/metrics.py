"""Metrics of item sets for Prometheus, the same in every engine.

SGLang's processes share theirs through files, in a folder that must be known before `prometheus_client` is imported:
import this module where the engine has started.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from prometheus_client import Counter, Gauge

from itemset.errors import ItemSetError
from itemset.masking.host import forced_tokens
from itemset.serving.wire import INLINE, name_of

REQUESTS = Counter("item_set:requests", "Requests with an item set.", ["item_set"])
REFUSED = Counter("item_set:refused_requests", "Requests refused for their item set, HTTP 400.", ["reason"])
ENCODED = Counter("item_set:encoded_texts", "Texts of inline sets that were encoded.")
LISTS = Counter("item_set:ranked_lists", "Ranked lists: in one request, or why by rounds of requests.", ["way"])
_BY_ROUNDS = "1 with the reason why rounds of requests make all lists."
BY_ROUNDS = Gauge("item_set:lists_by_rounds", _BY_ROUNDS, ["reason"], multiprocess_mode="livemax")
DRAWS = Counter("item_set:draw_requests", "Requests for draws: in one request, or why rounds ended them.", ["way"])
ONE_REQUEST, UNDECIDED = "one request", "more might ring before than there are beams"
"""Ways of lists and draws: made whole, and draws that a step has not decided, which rounds then ended."""
INSIDE = Counter("item_set:items_inside", "Items in slates, JSON and other answers that hold items.", ["item_set"])
_ANSWERED = "Answers that ended with an item."
ANSWERED = Gauge("item_set:answered_items", _ANSWERED, ["item_set"], multiprocess_mode="sum")
FORCED = Gauge("item_set:forced_tokens", "Their tokens that had no rival.", ["item_set"], multiprocess_mode="sum")
ILLEGAL = Counter("item_set:illegal_answers", "Answers that ended, and are no item: a fault of the engine or plugin.")

_SINCE = "When the version that is served was taken up, Unix time."
VERSIONS = Gauge("item_set:version", _SINCE, ["item_set", "version"], multiprocess_mode="livemax")
REFRESHES = Counter("item_set:refreshes", "New versions that were taken up.", ["item_set"])
REFUSED_VERSIONS = Counter("item_set:refused_versions", "Versions that could not be served, or named.", ["item_set"])

_versions: dict[str, str] = {}


class EngineFigures:
    """Counts of engines, as gauges: vLLM's front end only receives their values."""

    def __init__(self, mode: Literal["max", "sum"], used: Literal["mostrecent", "sum"]) -> None:
        """mode: what several processes' values make together. used: the same for the memory in use."""
        gauge = partial(Gauge, multiprocess_mode=mode)
        self.by_path = gauge("item_set:requests_by_path", "Requests by where masks were made.", ["path"])
        self.arena = gauge("item_set:arena_bytes", "Device memory kept for item sets.")
        self.arena_used = Gauge("item_set:arena_used_bytes", "What sets in use take of it.", multiprocess_mode=used)


def served(name: str, version: str | None) -> None:
    """Requests get this version of a set from now on, or with None no version of it."""
    if before := _versions.pop(name, None):
        VERSIONS.labels(name, before).set(0)  # for those who read the files of several processes
        VERSIONS.remove(name, before)
        REFRESHES.labels(name).inc(version is not None)
    if version is not None:
        _versions[name] = version
        VERSIONS.labels(name, version).set_to_current_time()


def label(reference: str) -> str:
    """Return the label of a set. Inline sets share one: labels of their own would never end."""
    return "inline" if reference.startswith(INLINE) else name_of(reference)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except ItemSetError as error:
        REFUSED.labels(getattr(error, "reason", "bad items")).inc()
        raise


def count_answer(expected: Any, tokens: Sequence[int], fields: Mapping[str, Any], *, stopped: bool) -> str | None:
    """Count an answer that has ended, and its items. Return what to log if it is no item of its set.

    fields: its own, as sent. stopped: whether a stop token has ended it.
    """
    for item in fields.get("items") or ():
        INSIDE.labels(item.get("set", "inline")).inc()
    if not stopped or "item" not in fields or not expected.begun(tokens):
        return None
    if fields["item"] is not None:
        called, content = label(expected.reference), expected.content
        ANSWERED.labels(called).inc()
        FORCED.labels(called).inc(forced_tokens(expected.item_set, content(tokens) if content else tokens))
        return None
    ILLEGAL.inc()
    return f"An answer is no item of its set, which must not be: {list(tokens)[:200]}"
