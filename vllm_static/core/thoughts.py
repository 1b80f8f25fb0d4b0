"""Thoughts before lists, in the engine core: a request that thinks, and then is one for a list."""

from collections.abc import Callable
from typing import Any, NamedTuple

from itemset.serving.wire import WIRE, Tokens
from vllm_static import compat
from vllm_static.compat import hook


class Thinking(NamedTuple):
    marker: list[int]  # ends the thought; empty after it
    then: list[int]  # tokens between it and the list
    params: Any  # of the list; None if the front end asks for it


def begin(request: Any, constraint: Any, marker: Tokens, then: Tokens, *, ranked: bool) -> tuple[Thinking, bool]:
    """Make a thought a request of vLLM's own. Return it, and whether it is under no constraint. constraint: the
    StructuredOutputRequest that it came with. ranked: whether it goes on as one for a list, whose set has a place."""
    extra, params = request.sampling_params.extra_args, None
    if ranked:
        params = compat.list_params(extra[WIRE])
        params.structured_outputs = None
    is_free = constraint.params.choice is not None  # which the front end has put
    compat.make_ordinary(request, {**extra, WIRE: None}, None if is_free else constraint)
    return Thinking(list(marker), list(then), params), is_free


@hook("vllm.v1.core.sched.scheduler:Scheduler.update_from_output")
def _update_from_output(
    original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """A thought ends with its marker, and its request goes on as one for a list, over the KV that is there: vLLM keeps
    that of a request whose input is streamed. The front end sees one request, without the tokens of the list's."""
    backend = compat.backend_of(self.structured_output_manager)
    if backend is None or not backend.thinking:
        return original()
    from vllm.v1.engine import FinishReason
    from vllm.v1.request import StreamingUpdate

    scheduled = backend.thinking.keys() & scheduler_output.num_scheduled_tokens.keys()
    thinking = {name: backend.thinking[name] for name in scheduled}
    ended = [name for name, one in thinking.items() if _stop(self.requests.get(name), one, model_runner_output)]
    outputs = original()
    ended = [name for name in ended if name in self.requests]  # no grammar has refused its last token
    for one in (one for of_client in outputs.values() for one in of_client.outputs if one.request_id in thinking):
        if one.request_id in ended:
            one.finish_reason = one.stop_reason = None
        elif not thinking[one.request_id].marker:
            one.new_token_ids = []
            if one.finish_reason == FinishReason.LENGTH:
                one.finish_reason = FinishReason.STOP
    for name in ended:
        request, (marker, then, params) = self.requests[name], thinking[name]
        request.prompt_token_ids = list(request.prompt_token_ids)  # in one process others may share it
        # The prompt is what was said, but for its last token, and this.
        update = StreamingUpdate(None, [marker[-1], *then], params.max_tokens, request.arrival_time, params)
        self._update_request_as_session(request, update)
        request.resumable, request.structured_output_request = False, None
        request.events.clear()  # it was queued before
        backend.thinking[name] = Thinking([], then, params)
    return outputs


def _stop(request: Any, thinking: Thinking, output: Any) -> bool:
    """Stop a request at the end of its thought. Returns whether it goes on: one that was preempted has lost its KV."""
    marker, length = thinking.marker, len(thinking.marker)
    if request is None or not marker or not output.sampled_token_ids:
        return False
    if (stale := request.num_stale_output_tokens > 0) and request.drop_stale_output:
        return False
    sampled = output.sampled_token_ids[output.req_id_to_index[request.request_id]]
    said = [*request.output_token_ids[-length:], *sampled]
    ends = range(max(length, len(said) - len(sampled) + 1), len(said) + 1)
    if (end := next((end for end in ends if said[end - length : end] == marker), None)) is None:
        return False
    request.max_tokens = request.num_output_tokens + len(sampled) - len(said) + end
    request.resumable = thinking.params is not None and not stale
    return bool(request.resumable)


@hook("vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache")
def _reset_prefix_cache(original: Callable[..., Any], self: Any, reset_running_requests: bool) -> Any:
    """Between its thought and its list a request waits with its KV, which vLLM resets only of those that run."""
    backend = compat.backend_of(self.structured_output_manager)
    if backend is not None and reset_running_requests:
        for request in [one for one in self.kv_holding_waiting if one.request_id in backend.thinking]:
            self.kv_holding_waiting.remove_request(request)
            request.status = type(request.status).RUNNING
            self.running.append(request)
    return original()
