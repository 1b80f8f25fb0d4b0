"""The hooks into vLLM's engine core: item sets in its structured outputs and its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_static import compat
from vllm_static.compat import hook
from vllm_static.metrics import ENGINE_METHOD, ROLLOUT
from vllm_static.narrow_hooks import sampled_steps

_BACKEND = "static_backend"
"""Attribute of a StructuredOutputManager that has our backend: whoever looks for it need not import the class."""


@hook("vllm.v1.structured_output:StructuredOutputManager.__init__", always=True)
def _manager_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """The backend object, made at start-up: no request waits for files."""
    original()
    if compat.is_ours(vllm_config):
        from vllm_static.backend import StaticBackend

        self.backend = StaticBackend(vllm_config, self.tokenizer, vllm_config.model_config.get_vocab_size())
        setattr(self, _BACKEND, self.backend)


def add_methods(core: Any) -> None:
    """Give an EngineCore two methods more: for /metrics its figures, and for followed sets their new versions."""

    def figures() -> Any:
        steps: list[dict[str, int]] = [{}]
        if compat.on_device_path(core.vllm_config):
            steps = core.model_executor.collective_rpc(sampled_steps)
        return core.structured_output_manager.backend.figures() | {"sampled_steps": max(steps, key=len)}

    def answer(message: Any) -> Any:
        return core.structured_output_manager.backend.preparer.answer(message, core.model_executor)

    setattr(core, ENGINE_METHOD, figures)
    setattr(core, ROLLOUT, answer)


@hook("vllm.v1.structured_output:StructuredOutputManager.grammar_init")
def _grammar_init(original: Callable[..., Any], self: Any, request: Any) -> None:
    """Inline sets reach the engine with their request; an item set's grammar is made at once."""
    if (backend := getattr(self, _BACKEND, None)) is None:
        original()
        return
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
    original: Callable[..., Any],
    self: Any,
    requests: Any,
    structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: Any,
) -> Any:
    """The rows of all item sets are filled at once."""
    if (backend := getattr(self, _BACKEND, None)) is None or not structured_output_request_ids:
        return original()
    return backend.fill(original, self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)


@hook("vllm.v1.core.sched.scheduler:Scheduler._free_request")
def _free_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """An ended request's set may leave the device, and its answer is counted."""
    if (backend := getattr(self.structured_output_manager, _BACKEND, None)) is not None:
        backend.forget(request)
    return original()


@hook("vllm.v1.core.sched.output:NewRequestData.from_request", why="an inline set's index goes to the workers once")
def _new_request_data(original: Callable[..., Any], request: Any) -> Any:
    from vllm_static.device_path import send_index_once

    data = original()
    send_index_once(request, data)
    return data
