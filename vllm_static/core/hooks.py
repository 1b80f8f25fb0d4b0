"""The hooks into vLLM's engine core: it gets our backend, and item sets are in its structured outputs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_static import compat
from vllm_static.compat import hook
from vllm_static.metrics import ENGINE_METHOD, ROLLOUT
from vllm_static.worker.narrow_hooks import sampled_steps

if TYPE_CHECKING:
    from vllm_static.core.backend import StaticBackend


def make_backend(vllm_config: Any) -> "StaticBackend":
    """Make the backend of an engine core, for whoever keeps it: at start-up, so that no request waits for files."""
    from vllm.tokenizers import cached_tokenizer_from_config

    from vllm_static.core.backend import StaticBackend

    model = vllm_config.model_config
    backend = StaticBackend(vllm_config, cached_tokenizer_from_config(model), model.get_vocab_size())
    compat.backends[id(vllm_config)] = backend
    return backend


@hook("vllm.v1.engine.core:EngineCore._initialize_kv_caches", order=-1, always=True)
def _initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """The engine core gets our backend, before requests come."""
    if not compat.is_ours(vllm_config):
        return original()
    self.static_backend = backend = make_backend(vllm_config)

    def figures() -> Any:
        steps = self.model_executor.collective_rpc(sampled_steps) if compat.on_device_path(vllm_config) else [{}]
        return backend.figures() | {"sampled_steps": max(steps, key=len)}

    setattr(self, ENGINE_METHOD, figures)  # for /metrics
    setattr(self, ROLLOUT, lambda message: backend.preparer.answer(message, self.model_executor))
    return original()


@hook("vllm.v1.structured_output:StructuredOutputManager.grammar_init")
def _grammar_init(original: Callable[..., Any], self: Any, request: Any) -> None:
    """Inline sets reach the engine with their request; an item set's grammar is made at once."""
    if (backend := compat.backend_of(self)) is None:
        original()
        return
    self.backend = backend  # one that vLLM need not make
    if backend.admit(self, request):
        return
    params = request.structured_output_request.params
    threads = backend.grammars.threads(params.grammar)
    if params.choice is not None:
        compat.without_thread_pool(original, self)
    elif threads is not None and self._use_async_grammar_compilation:
        compat.compile_on(threads, self, request)
    else:
        original()


@hook("vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask")
def _grammar_bitmask(
    original: Callable[..., Any], self: Any, requests: Any, structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: Any,
) -> Any:  # fmt: skip
    """The rows of all item sets are filled at once."""
    if (backend := compat.backend_of(self)) is None or not structured_output_request_ids:
        return original()
    return backend.fill(original, self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)


@hook("vllm.v1.core.sched.scheduler:Scheduler._free_request")
def _free_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """An ended request's set may leave the device."""
    if (backend := compat.backend_of(self.structured_output_manager)) is not None:
        backend.forget(request)
    return original()
