"""The device path as the scheduler sees it: which requests take it, and for how long their sets stay in the arena."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from itemset import ItemSet
from itemset.arena import ArenaFullError, Resident
from itemset.slots import MAX_STOP_TOKENS

if TYPE_CHECKING:
    from sglang_static.processor import ItemSetSampler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admitted:
    """What the sampler must know of a request.

    resident: where its set lies in the arena. begins_behind: the token behind which the constraint begins, or -1.
    """

    item_set: ItemSet
    resident: Resident
    begins_behind: int
    stop_tokens: tuple[int, ...]


def admit(
    sampler: ItemSetSampler, request: Any, item_set: ItemSet, begins_behind: int | None, stop_tokens: set[int]
) -> bool:
    """Let the request take the device path, with its set held in the arena for as long as the request exists.

    False, and nothing done, where it must take the host path: the arena is full, it has too many stop tokens, or the
    end of its reasoning is more than one token (`begins_behind` is None).
    """
    if begins_behind is None or len(stop_tokens) > MAX_STOP_TOKENS:
        return False
    plan = sampler.arena.plan
    try:
        resident = plan.acquire(item_set)
    except ArenaFullError as error:
        logger.warning("An item set takes the host path: %s (inline_set_memory of the plugin's options)", error)
        return False
    # A request ends in many places of SGLang; that nothing holds on to it any more is the one sign of them all.
    weakref.finalize(request, plan.release, resident.number)
    request.item_set = Admitted(item_set, resident, begins_behind, tuple(sorted(stop_tokens)))
    return True
