"""The device path as the engine core sees it: which requests take it, and where their sets lie in the workers' arenas.

The engine core decides, because only here one decision holds for every worker, and a request that cannot go this way
can still take the host path. Workers do what they are told and refuse nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from itemset import ItemSet, ItemSetError
from itemset.arena import ArenaFullError, Plan, room_for
from vllm_static import compat
from vllm_static.config import PLACE, StaticConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

MAX_STOP_TOKENS = 128  # of a request; vLLM's own limit for min_tokens (v1/worker/gpu/sample/logit_bias.py)


def arena_bytes(config: StaticConfig, registered: Iterable[ItemSet]) -> int:
    """The size of every worker's arena: the registered sets, and room for inline ones.

    Engine core and workers have the same configuration and acquire the registered sets in its order, so that these
    have the same places everywhere.
    """
    return sum(room_for(item_set) for item_set in registered) + config.inline_set_memory


class DevicePath:
    """Admits requests to the device path. Called by vLLM's input thread and by its engine loop."""

    def __init__(self, config: StaticConfig, registered: Collection[ItemSet]) -> None:
        self.plan = Plan(arena_bytes(config, registered))
        for item_set in registered:
            self.plan.acquire(item_set)
        self._numbers: dict[str, int] = {}  # of the sets that requests have acquired, by request id

    def admit(self, manager: Any, request: Request, item_set: ItemSet) -> bool:
        """Make the request an ordinary one for vLLM's scheduler, with its set named to the workers.

        False, and nothing done, where it must take the host path: the arena is full, it has too many stop tokens, or
        the end of its reasoning is more than one token.
        """
        params = request.sampling_params
        start = compat.reasoning_end_token(manager, request)
        if start is None or len(params.all_stop_token_ids) > MAX_STOP_TOKENS:
            return False
        try:
            resident = self.plan.acquire(item_set)
        except ArenaFullError as error:
            logger.warning_once("An item set takes the host path: %s (inline_set_memory in --additional-config)", error)
            return False
        self._numbers[request.request_id] = resident.number
        place = [resident.number, resident.start, resident.digest, start]
        compat.make_ordinary(request, {**params.extra_args, PLACE: place})
        return True

    def release(self, request: Request) -> None:
        """The request has ended; its set may go when another needs the room."""
        number = self._numbers.pop(request.request_id, None)
        if number is not None:
            self.plan.release(number)


def refuse_synthetic_verification(vllm_config: Any) -> None:
    """Raises ItemSetError where vLLM accepts drafts by a fixed rate, whatever the mask says."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.rejection_sample_method == "synthetic":
        raise ItemSetError(
            "rejection_sample_method=synthetic accepts drafts without looking at them, so no item set can hold: "
            "leave it out"
        )
