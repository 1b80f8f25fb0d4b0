"""Ranked lists in SGLang's beam search, beside other requests: which wait to be admitted, and which steps they sit out.

A step with a list, of hundreds of rows, may take many times as long as one without. Lists together have at most half of
the rows and KV slots, and `max_list_rows_per_step` rows, or one list has more alone: others wait outside the queue.
After a step with lists the other requests have steps of their own, until these have had as many rows. All ranks decide
alike: by rows, never by time. A list's group is known by its `num_candidates`.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from sglang_static.compat import hook
from sglang_static.scheduler import masks

_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
WHOLE = 0  # `num_candidates` of a list's group: it takes whole logits, and not the best tokens of each row


def is_list(group: Any) -> bool:
    return group is not None and group.num_candidates == WHOLE


_admitted: WeakSet[Any] = WeakSet()  # groups, of lists or others, whose prompts are in the engine or about to be


@hook("sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req")
def add_one_req(original: Callable[..., Any], self: Any, req: Any) -> Any:
    """A list waits for rows and KV slots that others need: SGLang promises rows twice, and ends for want of one."""
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
    return [group for group in _admitted if is_list(group) and not group.retired]


def promised_rows() -> int:
    """Rows that groups will take once their prompts are complete."""
    waiting = [group for group in _admitted if group.member_rows is None and not group.retired]
    return sum(int(group.beam_width) - 1 for group in waiting)


@hook("sglang.srt.beam_search.coordinator:_rows_topk_logprobs", why="a list's beams read whole logits")
def rows_topk_logprobs(original: Callable[..., Any], pieces: Any, num_candidates: int) -> Any:
    return (pieces, None) if num_candidates == WHOLE else original()


@hook("sglang.srt.beam_search.fork:free_member_rows")
def free_member_rows(original: Callable[..., Any], group: Any, req_to_token_pool: Any) -> None:
    """A list's rows take part in some steps and not in others."""
    if is_list(group):
        group.release(req_to_token_pool.req_to_token)
    original()


SHARE = 2  # lists have this part of the rows and KV slots: one half


class Turns:
    """One of each scheduler, its `static_turns`."""

    def __init__(self, device: str) -> None:
        self.apart: Any = None  # the batch of the step that is under way, if it is one that lists sit out
        # Rows of a step that takes no longer with fewer, because it waits for the weights.
        self._small = 64 if device == "cpu" else 256
        self._owed = 0  # rows that the other requests have had less than lists

    def others(self, batch: Any) -> list[int] | None:
        """Whose turn the next decoding step is: which requests of the batch it has, None for all of them."""
        lists = [request.beam_group for request in batch.reqs if is_list(request.beam_group)]
        others = [i for i, request in enumerate(batch.reqs) if not is_list(request.beam_group)]
        rows = sum(1 + group.num_member_rows for group in lists if not group.retired)
        long = rows > self._small
        # Penalties count in tensors of the whole batch, and short memory is for SGLang to deal with.
        whole = batch.sampling_info.penalizer_orchestrator.is_required
        if long and others and self._owed > 0 and not whole and batch.check_decode_mem():
            self._owed -= max(self._small, len(others))
            return others
        self._owed = rows if long else max(0, self._owed - max(self._small, len(others)))
        return None

    def rejoin(self, running: Any) -> Any:
        """Bring the requests of the last step back to those that sat it out. Returns the batch of both."""
        apart, self.apart = self.apart, None
        if apart is None:
            return running
        full = running.batch_is_full and apart.batch_is_full  # not if a request of either has ended
        if running.is_empty():
            running = apart
        else:
            running.merge_batch(apart)
        running.batch_is_full = full
        return running


def _parted(batch: Any, which: Sequence[int]) -> Any:
    """Take these requests out of a batch, into one of their own."""
    part = copy.copy(batch)
    part.sampling_info = copy.copy(batch.sampling_info)
    counts = batch.sampling_info.penalizer_orchestrator
    part.sampling_info.penalizer_orchestrator = type(counts)(counts.vocab_size, part, set(counts.penalizers))
    part.filter_batch(keep_indices=list(which))
    batch.filter_batch(keep_indices=sorted(set(range(len(batch.reqs))) - set(which)))
    return part


def waiting(queue: Sequence[Any], rows: int, slots: int) -> list[Any]:
    """Return the queue's lists that wait for others to end. rows, slots of KV: what all lists may have together."""
    queued = [request for request in queue if is_list(request.beam_group)]
    away = {id(request.beam_group) for request in queued}  # one that gave way to others was admitted before
    admitted, late = [group for group in admitted_lists() if id(group) not in away], list[Any]()
    for request in queued:
        admitted.append(request.beam_group)
        over = sum(one.beam_width for one in admitted) > rows or sum(one.slots for one in admitted) > slots
        if late or (over and len(admitted) > 1):
            late.append(request)
    return late


@hook(f"{_SCHEDULER}.get_next_batch_to_run")
def get_next_batch_to_run(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    """Lists that wait for other lists do not stop the queue; requests come back from a step that lists sat out."""
    running_batch = self.static_turns.rejoin(running_batch)
    if not self.beam_coordinator._num_live_groups:
        return original(running_batch=running_batch)
    rows = min(self.req_to_token_pool.size // SHARE, getattr(masks.current(), "rows_a_step", 0))
    late = waiting(self.waiting_queue, rows, self.token_to_kv_pool_allocator.size // SHARE)
    if not late:
        return original(running_batch=running_batch)
    away = set(map(id, late))
    self.waiting_queue = [request for request in self.waiting_queue if id(request) not in away]
    try:
        return original(running_batch=running_batch)
    finally:
        self.waiting_queue = [*late, *self.waiting_queue]


@hook(f"{_SCHEDULER}.update_running_batch")
def update_running_batch(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """Lists sit out some steps of their neighbours."""
    which = self.static_turns.others(batch) if self.beam_coordinator._num_live_groups else None
    if which is None:
        return original()
    part = _parted(batch, which)
    step = original(batch=part)
    if step is not None and not step.is_empty():
        self.static_turns.apart = part
        return step
    if not part.is_empty():  # its requests are about to end
        batch.merge_batch(part)
        return None
    return original()


@hook(f"{_SCHEDULER}.process_pending_chunked_abort")
def process_pending_chunked_abort(original: Callable[..., Any], self: Any) -> None:
    """A beam search that is aborted between chunks of its prompt waits for no rows any more."""
    request = self._pending_chunked_abort_req
    original()
    if request is not None and request.finished():
        self.beam_coordinator.retire_group(request)


@hook(f"{_SCHEDULER}.pause_generation", why="a pause knows of one batch that decodes")
def pause_generation(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    self.running_batch = self.static_turns.rejoin(self.running_batch)
    if recv_req.mode == "retract":
        from sglang.srt.beam_search.batch_tail import strip_beam_tail

        strip_beam_tail(self.running_batch)  # SGLang empties the batch, and then finds rows of beams in it
    return original()


@hook("sglang.srt.managers.schedule_batch:retract_all")
def retract_all(
    original: Callable[..., Any], reqs: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any
) -> None:
    """A beam search, a list's or SGLang's own, begins again after a pause that takes its KV: its rows have none of
    their own."""
    for req in reqs:
        if (group := req.beam_group) is not None and not group.retired:
            from sglang.srt.beam_search.fork import free_member_rows

            free_member_rows(group, req_to_token_pool, token_to_kv_pool_allocator)
            group.retired, req.beam_group = True, _again(group)
            del req.output_ids[:]  # placeholders
    original()


def _again(group: Any) -> Any:
    """Return a group for the same search from its beginning. The coordinator counts it in the place of this one."""
    if is_list(group):
        return group.again()
    stops, names = group.stop_token_ids, ("beam_width", "length_penalty", "max_new_tokens", "num_return")
    options = {name: getattr(group, name) for name in names}
    again = type(group)(stop_token_ids=stops.tolist(), device=stops.device, **options)
    again.leader, again.prompt_len = group.leader, group.prompt_len
    return again
