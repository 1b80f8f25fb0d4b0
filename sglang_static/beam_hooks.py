"""The hooks into SGLang's beam search, by which a ranked list is one request: they call its group, see `lists`.

SGLang's other beam searches go their way. A group of beams that belongs to a list is known by its `num_candidates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sglang_static.compat import hook

WHOLE = 0
"""`num_candidates` of a list's group: it takes whole logits, and not the best tokens of each row."""


def is_list(group: Any) -> bool:
    """Whether a beam group, or None, belongs to a list."""
    return group is not None and group.num_candidates == WHOLE


_admitted: WeakSet[Any] = WeakSet()
"""Groups, of lists or others, whose prompts are in the engine or about to be."""


@hook(
    "sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req",
    why="a list waits for rows and KV slots that others need: SGLang promises rows twice, and ends for want of one",
)
def add_one_req(original: Callable[..., Any], self: Any, req: Any) -> Any:
    group = req.beam_group
    if is_list(group):
        waiting = sum(not one.kv.holds_kv for one in self.can_run_list)
        others = [one for one in admitted_lists() if one is not group]
        if not group.fits(self, waiting + promised_rows(), others):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.NO_TOKEN
    result = original()
    if group is not None and self.can_run_list and self.can_run_list[-1] is req:
        _admitted.add(group)
    return result


def admitted_lists() -> list[Any]:
    """The groups of the lists that have begun."""
    return [group for group in _admitted if is_list(group) and not group.retired]


def promised_rows() -> int:
    """Rows that groups will take once their prompts are complete."""
    waiting = [group for group in _admitted if group.member_rows is None and not group.retired]
    return sum(int(group.beam_width) - 1 for group in waiting)


@hook(
    "sglang.srt.beam_search.coordinator:BeamCoordinator.pending_member_rows",
    why="the rows of groups that are admitted in the same step, or whose prompts are in pieces",
)
def pending_member_rows(original: Callable[..., Any]) -> int:
    pending: int = original()
    return max(pending, promised_rows())


@hook("sglang.srt.beam_search.coordinator:_rows_topk_logprobs", why="a list's beams read whole logits")
def rows_topk_logprobs(original: Callable[..., Any], pieces: Any, num_candidates: int) -> Any:
    return (pieces, None) if num_candidates == WHOLE else original()


@hook(
    "sglang.srt.beam_search.coordinator:BeamCoordinator._select_group", why="the next beams of a list come from its set"
)
def select_group(original: Callable[..., Any], self: Any, group: Any, top_logprobs: Any, tick: int) -> Any:
    """top_logprobs: of a list, the pieces of its logits."""
    if is_list(group):
        return group.select(top_logprobs, tick, self.req_to_token_pool.req_to_token)
    return original()


@hook(
    "sglang.srt.beam_search.coordinator:BeamCoordinator._reclaim_orphans",
    why="what is reclaimed of an aborted list was written on another stream, and perhaps not yet",
)
def reclaim_orphans(original: Callable[..., Any], group: Any, up_to_tick: int | None) -> None:
    if up_to_tick is None and is_list(group):
        group.await_selections()
    original()


@hook(
    "sglang.srt.beam_search.coordinator:free_member_rows",
    "sglang.srt.managers.schedule_batch:free_member_rows",
    why="a list's rows take part in some steps and not in others",
)
def free_member_rows(original: Callable[..., Any], group: Any, req_to_token_pool: Any) -> None:
    if is_list(group):
        group.release(req_to_token_pool.req_to_token)
    original()


@hook(
    "sglang.srt.managers.scheduler_components.output_streamer:pack_beam_search_output",
    why="what a list took, and whether it is proven",
)
def pack_beam_search_output(original: Callable[..., Any], req: Any) -> Any:
    """It travels with the reason why the first item ended."""
    output = original()
    if output is not None and is_list(req.beam_group):
        output.sequences[0].finish_reason |= req.beam_group.said
    return output
