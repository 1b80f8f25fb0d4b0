"""The entry points, and the hooks into vLLM that belong to no other module."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

from itemset.errors import ItemSetError
from itemset.serving import flags, metrics, startup
from itemset.serving.config import BACKEND, StaticConfig
from itemset.serving.hooks import IMPORTED, START
from itemset.serving.words import REFERENCE, SLATE, STRUCTURED
from vllm_static import (
    answers,
    chosen,  # noqa: F401 - its hooks
    compat,
    drafting,  # noqa: F401
    drafts,  # noqa: F401
    lists,  # noqa: F401
    logits,  # noqa: F401
    weights,  # noqa: F401
)
from vllm_static.compat import hook
from vllm_static.metrics import ENGINE_METHOD, QUESTION


def register_early() -> None:
    """Entry point `vllm.platform_plugins`: runs while vLLM is being imported, and names no platform."""
    compat.add_backend_name_at_import()


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in every process of vLLM, more than once.

    Raises RuntimeError for a vLLM version that is not supported, or that lacks one of the hooks.
    """
    compat.install(START, IMPORTED)


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine takes our backend: then the hooks of this process run."""
    return hook.choose(vllm_config.structured_outputs_config.backend == BACKEND)


@hook(
    "vllm.v1.worker.worker_base:WorkerBase.__init__",
    why="a worker learns which backend is chosen",
    when=IMPORTED,
    always=True,
)
def _worker_init(original: Callable[..., Any], vllm_config: Any) -> None:
    is_ours(vllm_config)
    original()


@hook(
    "vllm.engine.arg_utils:EngineArgs.add_cli_args",
    why="the flags --item-set and --guided-decoding-backend",
    always=True,
)
def _add_cli_args(original: Callable[..., Any]) -> Any:
    parser = original()
    flags.add_flags(
        parser, device_where="where vLLM uses model runner V2", alias_of="--structured-outputs-config.backend"
    )
    return parser


@hook("vllm.engine.arg_utils:EngineArgs.from_cli_args", why="what these flags mean", always=True)
def _from_cli_args(original: Callable[..., Any], args: Any) -> Any:
    startup.on_command_line()
    with startup.start_up():
        compat.apply_flags(args)
        if compat.chosen_backend(args) == BACKEND:
            compat.add_versions(args)
    return original()


@hook(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    why="the device path's processor and the sets' versions are put where every process reads them",
    always=True,
)
def _create_engine_config(original: Callable[..., Any]) -> Any:
    """Choose the path and the sets' versions, once, where every process will read them."""
    config = original()
    if not is_ours(config):
        return config
    from vllm_static.device import refuse_speculation

    with startup.start_up():
        options = StaticConfig.of(config.additional_config)
        wanted, reason = options.item_set_path, compat.why_host_path(config)
        refuse_speculation(config)
        if wanted == "device" and reason is not None:
            raise ValueError(f"item_set_path is device, but {reason}: leave item_set_path out for the host path")
        if options.item_set_shared_prefix == "on":
            compat.refuse_backends(compat.configured_backends(config))
        compat.add_versions(config)
    if wanted != "host" and reason is None and not compat.on_device_path(config):
        config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), compat.PROCESSOR]
    return config


@hook("vllm.config.vllm:VllmConfig.compute_hash", why="another item set must not compile the model anew", always=True)
def _compute_hash(original: Callable[..., Any], self: Any) -> Any:
    """The name of vLLM's cache of compiled graphs: none of them depends on an item set."""
    return original(self=compat.without_options(self))


@hook(
    "vllm.v1.engine.input_processor:InputProcessor.__init__",
    why="item sets are opened and checked once a front end, before the engine starts",
    always=True,
)
def _input_processor_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    """Bad item sets end the start-up here, before a model is loaded."""
    original()
    self.static_front_end = None
    if is_ours(vllm_config):
        from vllm_static.front import FrontEnd

        with startup.start_up():
            if self.tokenizer is None:
                raise ValueError("the static backend needs the model's tokenizer: leave out skip_tokenizer_init")
            self.static_front_end = FrontEnd(vllm_config, self.tokenizer)


@contextlib.contextmanager
def _refusals(params: Any = None) -> Iterator[None]:
    """What is wrong with an item set becomes vLLM's own error for one bad request, HTTP 400, counted.

    params: the request's, or the request; its slate or its structured outputs are at fault if no other field is.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ItemSetError as error:
        from vllm_static.inside import asks_slate

        own = REFERENCE if getattr(params, STRUCTURED, None) is None else STRUCTURED
        own = SLATE if asks_slate(params) else own
        metrics.REFUSED.labels(getattr(error, "reason", "bad items")).inc()
        raise VLLMValidationError(str(error), parameter=getattr(error, "param", None) or own) from error


def _checked(function: Callable[..., Any], *args: Any) -> Any:
    with _refusals(args[0]):
        return function(*args)


@hook(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    why="the item set is attached to its request: every request passes here, with its prompt's length known",
    always=True,
)
def _process_inputs(original: Callable[..., Any], self: Any, params: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    from vllm_static.request import asked, names_sets

    front_end, wanted = self.static_front_end, None
    if isinstance(params, SamplingParams):
        with _refusals(params):
            if not front_end and names_sets(params):  # it would be ignored
                raise ItemSetError(
                    "this engine has no item sets: start it with --structured-outputs-config.backend static and "
                    "--item-set"
                )
            if front_end and (wanted := asked(params)) is not None:
                wanted = front_end.checks.reference(wanted)
            elif front_end and (wanted := front_end.constraint(params)) is not None:
                from vllm_static.inside import with_constraint

                params = with_constraint(params, wanted)
    request = original(params=params)
    if wanted is not None:
        prompt_tokens = len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)
        with _refusals(params):
            expecting = front_end.attach(wanted, request.sampling_params, prompt_tokens)
            setattr(request.sampling_params, answers.EXPECTED, expecting)
    return request


@hook(
    "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
    why="vLLM's parsers of bodies refuse a structural tag with an item set, before its place is marked",
    when=IMPORTED,
    always=True,
)
def _validate_xgrammar_grammar(original: Callable[..., Any], sampling_params: Any) -> None:
    from itemset.serving.inside import TAG, holds_sets
    from vllm_static.inside import constraint_of

    given = constraint_of(sampling_params)
    if given is None or given[0] != TAG or not holds_sets(*given):
        original()


@hook("vllm.v1.engine.async_llm:AsyncLLM.__init__", why="published sets are followed while the engine runs")
def _async_llm_init(original: Callable[..., Any], self: Any) -> None:
    original()
    if self.input_processor.static_front_end:
        from vllm_static.following import follow

        follow(self)


@hook(
    "vllm.plugins:load_endpoint_plugins",
    why="/v1/item_sets: vLLM adds a plugin's routes if VLLM_PLUGINS names it; here the flags have chosen it",
    optional=True,
)
def _load_endpoint_plugins(original: Callable[..., Any]) -> Any:
    from vllm_static.following import Routes

    return [*original(), Routes()]


@hook(
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    why="inline sets are encoded, and filters applied, beside the event loop",
)
async def _add_request(original: Callable[..., Any], self: Any, params: Any) -> Any:
    front_end = self.input_processor.static_front_end
    if front_end and (getattr(params, "structured_outputs", None) or getattr(params, "extra_args", None)) is not None:
        from vllm_static.following import follow
        from vllm_static.inside import constraint_of, with_constraint
        from vllm_static.request import asked, with_set

        follow(self)  # where there was no event loop before
        # Encoding a large inline set takes seconds, and process_inputs runs on the event loop.
        with _refusals(params):
            wanted = asked(params)
            if wanted is not None and (wanted.chooses or wanted.choice is not None):
                params = with_set(params, await front_end.checks.prepare(wanted))
            given = constraint_of(params) if wanted is None else None
            if given is not None and (constraint := await front_end.constraints.prepare(*given)) is not None:
                params = with_constraint(params, constraint)
    return await original(params=params)


@hook(
    "vllm.sampling_params:SamplingParams._validate_structured_outputs",
    why="knows the built-in backends only: other constraints are validated as xgrammar's",
)
def _validate_structured_outputs(
    original: Callable[..., Any], self: Any, model_config: Any, structured_outputs_config: Any
) -> None:
    config, structured = structured_outputs_config, self.structured_outputs
    if config is None or structured is None or config.backend != BACKEND:
        original()
    elif structured.choice is None and isinstance(structured.grammar, str | None):
        original(structured_outputs_config=compat.xgrammar_config(config))
    elif model_config.is_diffusion:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError("Item sets are not supported for diffusion language models.")


@hook(
    "vllm.v1.structured_output:StructuredOutputManager.__init__",
    why="the backend object, made at start-up: no request waits for files",
    always=True,
)
def _manager_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    original()
    if is_ours(vllm_config):
        from vllm_static.backend import StaticBackend

        self.backend = StaticBackend(vllm_config, self.tokenizer, vllm_config.model_config.get_vocab_size())


@hook(
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    why="ranked lists have blocks of the KV cache that the scheduler does not know",
    always=True,
)
def _initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    if not is_ours(vllm_config):
        return original()
    from vllm_static.scratch import initialize_kv_caches

    return initialize_kv_caches(original, self, vllm_config)


@hook(
    "vllm.v1.structured_output:StructuredOutputManager.grammar_init",
    why="inline sets reach the engine with their request; an item set's grammar is made at once",
)
def _grammar_init(original: Callable[..., Any], self: Any, request: Any) -> None:
    from vllm_static.backend import StaticBackend

    if isinstance(self.backend, StaticBackend):
        if self.backend.admit(self, request):
            return
        if request.structured_output_request.params.choice is not None:
            compat.without_thread_pool(original, self)
            return
        threads = self.backend.threads(request.structured_output_request.params.grammar)
        if threads is not None and self._use_async_grammar_compilation:
            compat.compile_on(threads, self, request)
            return
    original()


@hook(
    "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask",
    why="the rows of all item sets are filled at once",
)
def _grammar_bitmask(
    original: Callable[..., Any],
    self: Any,
    requests: Any,
    structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: Any,
) -> Any:
    from vllm_static.backend import StaticBackend

    if isinstance(self.backend, StaticBackend) and structured_output_request_ids:
        return self.backend.fill(original, self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)
    return original()


@hook(
    "vllm.v1.engine.core:EngineCore",
    why="two methods more: for /metrics the engine's figures, and for followed sets their new versions",
    extends=True,
)
def _add_figures(engine_core: type) -> None:
    """vLLM's front ends can call any method of its engine core (v1/engine/core_client.py, call_utility_async)."""
    setattr(engine_core, ENGINE_METHOD, lambda self: self.structured_output_manager.backend.figures())

    def answer(self: Any, question: Any) -> Any:
        return self.structured_output_manager.backend.preparer.answer(self.model_executor, question)

    setattr(engine_core, QUESTION, answer)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._free_request",
    why="an ended request's set may leave the device, and its answer is counted",
)
def _free_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
    from vllm_static.backend import StaticBackend

    backend = self.structured_output_manager.backend
    if isinstance(backend, StaticBackend):
        backend.forget(request)
    return original()


@hook("vllm.v1.core.sched.output:NewRequestData.from_request", why="an inline set's index goes to the workers once")
def _new_request_data(original: Callable[..., Any], request: Any) -> Any:
    from vllm_static.device import send_index_once

    data = original()
    send_index_once(request, data)
    return data


@hook(
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest.to_sampling_params",
    why="the field item_set; an inline list that vLLM has replaced by a tool's schema",
    always=True,
)
def _to_sampling_params(original: Callable[..., Any], self: Any) -> Any:
    from vllm_static.http import add_item_set

    return _checked(add_item_set, self, original())


@hook(
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_beam_search_params",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_beam_search_params",
    why="drops constraints, which vLLM's beam search must be told of",
    always=True,
)
def _to_beam_search_params(original: Callable[..., Any], self: Any) -> Any:
    from vllm_static.http import rank_item_set

    return _checked(rank_item_set, self, original())


@hook(
    "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
    why="ranked lists: vLLM's own loop loses legal candidates, and knows the built-in backends only",
    when=IMPORTED,
)
def _beam_search(
    original: Callable[..., Any], self: Any, prompts: Any, params: Any, lora_request: Any, priority: Any = None
) -> Any:
    """Offline. Prompts are scored in rounds together, whatever concurrency vLLM's own loop is told.

    priority: since vLLM 0.33.
    """
    from vllm_static import ranking
    from vllm_static.request import asked

    if self.llm_engine.input_processor.static_front_end is None:
        return original()
    wanted = _checked(asked, params)
    if wanted is None:
        return original(params=compat.beams_by_xgrammar(params))
    inputs = self._preprocess_cmpl(prompts)
    loras = self._lora_request_to_seq(lora_request, len(inputs))
    priorities = None if priority is None else self._priority_to_seq(priority, len(inputs))
    with _refusals(params):
        return ranking.offline(self, inputs, wanted, params, loras, priorities)


@hook(
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
    why="ranked lists over HTTP",
    when=IMPORTED,
)
async def _beam_search_online(
    original: Callable[..., Any],
    self: Any,
    prompt: Any,
    request_id: str,
    params: Any,
    lora_request: Any,
    trace_headers: Any,
    session_id: Any = None,
    priority: int = 0,
) -> AsyncGenerator[Any, None]:
    """session_id: since vLLM 0.32. priority: since 0.33."""
    from vllm_static import ranking
    from vllm_static.request import asked

    way: Any = original
    with _refusals(params):
        if self.engine_client.input_processor.static_front_end and (wanted := asked(params)) is not None:
            options = {"trace_headers": trace_headers, "session_id": session_id, "priority": priority}
            way = partial(ranking.online, wanted, self, prompt, request_id, params, lora_request, **options)
        async for output in way():
            yield output


@hook(
    "starlette.requests:Request.json",
    why="an HTTP body is judged as soon as it is parsed, before anything is dropped, where our middleware asks for it",
    when=IMPORTED,
    always=True,
)
def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    from itemset.serving import asgi

    return asgi.judged(original, self)
