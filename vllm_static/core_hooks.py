"""The hooks into vLLM's engine core: item sets in its structured outputs and its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_static import compat
from vllm_static.compat import hook
from vllm_static.metrics import ENGINE_METHOD, ROLLOUT

if TYPE_CHECKING:
    from vllm_static.backend import StaticBackend

_BACKEND = "static_backend"
"""Attribute of a StructuredOutputManager that has our backend: whoever looks for it need not import the class."""


@hook("vllm.v1.engine.core:EngineCore.__init__", always=True)
def _engine_core_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """The backend object, made at start-up: no request waits for files. Two methods more: for /metrics the engine's
    figures, and for followed sets their new versions."""
    original()
    if compat.is_ours(vllm_config):
        backend = give_backend(self.structured_output_manager, vllm_config)
        setattr(self, ENGINE_METHOD, backend.figures)
        setattr(self, ROLLOUT, lambda message: backend.preparer.answer(message, self.model_executor))


def give_backend(manager: Any, vllm_config: Any) -> StaticBackend:
    """Make our backend that of a StructuredOutputManager, and return it."""
    from vllm_static.backend import StaticBackend

    backend = StaticBackend(vllm_config, manager.tokenizer, vllm_config.model_config.get_vocab_size())
    manager.backend = backend
    setattr(manager, _BACKEND, backend)
    return backend


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
