"""The hooks into vLLM's engine core: item sets in its structured outputs and its scheduler."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from vllm_static import compat
from vllm_static.compat import hook
from vllm_static.metrics import ENGINE_METHOD, ROLLOUT
from vllm_static.narrow_hooks import sampled_steps

if TYPE_CHECKING:
    from vllm_static.backend import StaticBackend


class Thinking(NamedTuple):
    """A request that thinks, and then is one for a list. marker: ends the thought; empty after it. then: tokens between
    it and the list. params: of the list; None if the front end asks for it."""

    marker: list[int]
    then: list[int]
    params: Any


_backends: "WeakValueDictionary[int, StaticBackend]" = WeakValueDictionary()  # by id of their engine's configuration


def make_backend(vllm_config: Any) -> "StaticBackend":
    """Make the backend of an engine core, for whoever keeps it: at start-up, so that no request waits for files."""
    from vllm.tokenizers import cached_tokenizer_from_config

    from vllm_static.backend import StaticBackend

    model = vllm_config.model_config
    backend = StaticBackend(vllm_config, cached_tokenizer_from_config(model), model.get_vocab_size())
    _backends[id(vllm_config)] = backend
    return backend


def extend(core: Any) -> None:
    """Give an EngineCore our backend, and two methods: for /metrics its figures, for followed sets new versions."""
    core.static_backend = backend = make_backend(core.vllm_config)

    def figures() -> Any:
        steps: list[dict[str, int]] = [{}]
        if compat.on_device_path(core.vllm_config):
            steps = core.model_executor.collective_rpc(sampled_steps)
        return backend.figures() | {"sampled_steps": max(steps, key=len)}

    setattr(core, ENGINE_METHOD, figures)
    setattr(core, ROLLOUT, lambda message: backend.preparer.answer(message, core.model_executor))


def _backend_of(manager: Any) -> "StaticBackend | None":
    return _backends.get(id(manager.vllm_config))


@hook("vllm.v1.structured_output:StructuredOutputManager.grammar_init")
def _grammar_init(original: Callable[..., Any], self: Any, request: Any) -> None:
    """Inline sets reach the engine with their request; an item set's grammar is made at once."""
    if (backend := _backend_of(self)) is None:
        original()
        return
    self.backend = backend  # one that vLLM need not make
    if backend.admit(self, request):
        return
    params = request.structured_output_request.params
    if params.choice is not None:
        compat.without_thread_pool(original, self)
        return
    threads = backend.threads(params.grammar)
    if threads is not None and self._use_async_grammar_compilation:
        compat.compile_on(threads, self, request)
    else:
        original()


@hook("vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask")
def _grammar_bitmask(
    original: Callable[..., Any], self: Any, requests: Any, structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: Any,
) -> Any:  # fmt: skip
    """The rows of all item sets are filled at once."""
    if (backend := _backend_of(self)) is None or not structured_output_request_ids:
        return original()
    return backend.fill(original, self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)


@hook("vllm.v1.core.sched.scheduler:Scheduler.update_from_output")
def _update_from_output(
    original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """A thought ends with its marker, and its request goes on as one for a list, over the KV that is there: vLLM keeps
    that of a request whose input is streamed. The front end sees one request, without the tokens of the list's. A list
    that is not complete takes another step."""
    backend = _backend_of(self.structured_output_manager)
    if backend is None:
        return original()
    _let_lists_go_on(self, model_runner_output)
    if not backend.thinking:
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
        update = StreamingUpdate(None, [marker[-1], *then], params.max_tokens, request.arrival_time, params)
        self._update_request_as_session(
            request, update
        )  # the prompt is what was said, but for its last token, and this
        request.resumable, request.structured_output_request = False, None
        request.events.clear()  # it was queued before
        backend.thinking[name] = Thinking([], then, params)
    return outputs


def _let_lists_go_on(scheduler: Any, output: Any) -> None:
    """A request whose table is empty takes another step, in which its list goes on; its token is read by nobody."""
    tables = output.prompt_token_id_logprobs_dict
    for name in [name for name, table in tables.items() if not table.numel()]:
        del tables[name]
        request = scheduler.requests.get(name)
        if request is not None and not (request.num_stale_output_tokens and request.drop_stale_output):
            request.max_tokens += 1


def _stop(request: Any, thinking: Thinking, output: Any) -> bool:
    """Stop a request at the end of its thought. Returns whether it goes on: if it has been preempted meanwhile, its KV
    is gone, and it only stops."""
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
    backend = _backend_of(self.structured_output_manager)
    if backend is not None and reset_running_requests:
        for request in [one for one in self.kv_holding_waiting if one.request_id in backend.thinking]:
            self.kv_holding_waiting.remove_request(request)
            request.status = type(request.status).RUNNING
            self.running.append(request)
    return original()


@hook("vllm.v1.core.sched.scheduler:Scheduler._free_request")
def _free_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """An ended request's set may leave the device, and its answer is counted."""
    if (backend := _backend_of(self.structured_output_manager)) is not None:
        backend.forget(request)
    return original()


@hook("vllm.v1.core.sched.output:NewRequestData.from_request", why="an inline set's index goes to the workers once")
def _new_request_data(original: Callable[..., Any], request: Any) -> Any:
    from vllm_static.device_path import send_index_once

    data = original()
    send_index_once(request, data)
    return data
