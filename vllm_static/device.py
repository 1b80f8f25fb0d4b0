"""The device path as the engine core sees it: which requests take it, and where their sets lie in the workers' arenas.

The engine core decides, because only here one decision holds for every worker, and a request that cannot go this way
can still take the host path. Workers do what they are told and refuse nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from itemset import ItemSet, ItemSetError
from itemset.arena import ArenaFullError, Plan, arena_bytes
from itemset.config import StaticConfig
from itemset.slots import MAX_STOP_TOKENS
from vllm_static import compat

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

PLACE = "item_set_place"
"""Key of `SamplingParams.extra_args` from the engine core to its workers: [the set's number in the arena, its first
byte there, its digest, the token behind which the constraint begins or -1]."""


class DevicePath:
    """Admits requests to the device path. Called by vLLM's input thread and by its engine loop."""

    def __init__(self, config: StaticConfig, registered: Collection[ItemSet]) -> None:
        self.plan = Plan(arena_bytes(registered, config.inline_set_memory))
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


def refuse_speculation(vllm_config: Any) -> None:
    """Raises ItemSetError if vLLM accepts drafts by a fixed rate, whatever the mask says, or could not start."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method == "ngram_gpu" and not compat.can_draft_on_device(vllm_config):
        raise ItemSetError(
            "the speculative method ngram_gpu needs model runner V2 or a GPU, and this is V1 on a CPU: choose ngram"
        )
    if speculative.rejection_sample_method == "synthetic":
        raise ItemSetError(
            "rejection_sample_method=synthetic accepts drafts without looking at them, so no item set can hold: "
            "leave it out"
        )
