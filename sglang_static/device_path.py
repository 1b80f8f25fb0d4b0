"""The device path as the scheduler sees it: which requests take it, and for how long their sets stay in the arena."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from itemset import ItemSet
from itemset.masking.arena import ArenaFullError, Place, Plan
from itemset.masking.slots import MAX_STOP_TOKENS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admitted:
    """What the sampler must know of a request."""

    item_set: ItemSet
    place: Place
    stop_tokens: tuple[int, ...]


def claim(
    plan: Plan,
    release: Callable[[int], None],
    request: Any,
    item_set: ItemSet,
    begins_after: int | None,
    stop_tokens: set[int],
) -> bool:
    """Claim a place for the request's set, held for as long as the request exists: it takes the device path.

    release: does `Plan.release` then.

    False, and nothing done, if it must take the host path: the arena is full, it has too many stop tokens, or the end
    of its reasoning is more than one token (`begins_after` is None).
    """
    if begins_after is None or len(stop_tokens) > MAX_STOP_TOKENS:
        return False
    try:
        resident = plan.acquire(item_set)
    except ArenaFullError as error:
        logger.warning("An item set takes the host path: %s (inline_set_memory of the plugin's options)", error)
        return False
    # A request ends in many places of SGLang; that nothing holds on to it any more is the one sign of them all.
    weakref.finalize(request, release, resident.number)
    place = Place(resident.number, resident.start, resident.digest, begins_after, resident.below)
    request.item_set = Admitted(item_set, place, tuple(sorted(stop_tokens)))
    return True
