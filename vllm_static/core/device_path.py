"""The device path as the engine core sees it: which requests take it, and where their sets lie in the workers' arenas.

Here one decision holds for every worker, and a request can still take the host path. Workers refuse nothing.
"""

import copy
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

from itemset import ItemSet
from itemset.masking.arena import ArenaFullError, Place, Plan
from itemset.masking.arena_plan import Holdings
from itemset.masking.slots import MAX_STOP_TOKENS
from itemset.serving.catalogue import Catalogue, Opened
from itemset.serving.engine.version_rollout import Devices, hold
from itemset.serving.wire import WIRE, EngineRequest, Prepare, SetRef, Stage, read
from vllm_static import compat
from vllm_static.compat import hook, logger
from vllm_static.worker.versions import close_in_worker, prepare_in_worker

_warn_once = lru_cache(64)(logger.warning)
RESIDENT = "item_set_resident"  # attribute of a request in the engine core: the Resident that it holds, until it ends


class DevicePath(Devices):
    """Admits requests, and brings versions of sets to the workers. `engine`: their executor. For two threads of vLLM's:
    its input and its engine loop."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.plan = Plan(catalogue.arena_bytes())
        self.holdings = Holdings(self.plan, catalogue.registered)

    def claim(self, manager: Any, request: Any, item_set: ItemSet, carried: EngineRequest) -> bool:
        """Claim a place for the request's set, and make the request an ordinary one for vLLM's scheduler.

        carried: what the workers get of it, beside the place. False, and nothing done, if it must take the host path:
        a full arena, too many stop tokens, or an end of its reasoning of more than one token.
        """
        params, thinks = request.sampling_params, carried.after is not None  # its list's prompt has the reasoning
        start = -1 if thinks else compat.reasoning_end_token(manager, request)
        if start is None or len(params.all_stop_token_ids) > MAX_STOP_TOKENS:
            return False
        try:
            resident = self.plan.acquire(item_set)
        except ArenaFullError as error:
            _warn_once("An item set takes the host path: %s (inline_set_memory in --additional-config)", str(error))
            return False
        setattr(request, RESIDENT, resident)
        place = Place(resident.number, resident.start, resident.digest, start, resident.below)
        compat.make_ordinary(request, {**params.extra_args, WIRE: carried.but(place=place)})
        return True

    def advance(self, engine: Any, message: Prepare, opened: Opened | str | None) -> list[Stage | str]:
        if isinstance(opened, str):
            return [opened]
        piece = None if opened is None else hold(self.holdings, opened, "in --additional-config", logger)
        if opened is not None and piece is None:
            return [Stage.HOST]
        return engine.collective_rpc(prepare_in_worker, args=(message, piece))

    def close(self, engine: Any, name: str, version: str | None, open_sets: Collection[str]) -> None:
        """Have the workers let go of what this core has closed, at the same step: `Plan.send_again`."""
        self.holdings.settle(name, version)
        self.plan.send_again(open_sets)
        engine.collective_rpc(close_in_worker, args=(name, version, list(open_sets)))


@hook("vllm.v1.core.sched.output:NewRequestData.from_request", why="an inline set's index goes to the workers once")
def _new_request_data(original: Callable[..., Any], request: Any) -> Any:
    """Take out of a request's NewRequestData what the workers have: an inline set's index, a filter's bits.

    All workers get all of them in order, and keep a set until the plan has forgotten it and puts another in its place.
    """
    data, resident = original(), getattr(request, RESIDENT, None)
    if resident is None or (carried := read(extra := data.sampling_params.extra_args)) is None:
        return data  # without a set, or a thought, whose list is still to come
    assert carried.item_set is not None
    ref = carried.item_set
    if resident.sent:
        ref = SetRef(ref.reference)
    elif resident.base is not None and resident.base.base is not None and resident.base.sent and ref.index is not None:
        ref = SetRef(ref.reference, ref.index)  # a view, which the arena keeps: see `Arena.view`
    if resident.base is not None:
        resident.base.sent = True
    resident.sent = True
    if ref != carried.item_set:
        data.sampling_params = copy.copy(data.sampling_params)
        data.sampling_params.extra_args = {**extra, WIRE: carried.but(item_set=ref)}
    return data
