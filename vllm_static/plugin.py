"""The entry points: what vLLM calls in every process, and how its hooks lead to our code."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from itemset import hooks, startup
from itemset.config import BACKEND, REFERENCE, StaticConfig
from vllm_static import answers, compat, metrics


def register_early() -> None:
    """Entry point `vllm.platform_plugins`: runs while vLLM is being imported, and names no platform."""
    compat.add_backend_name_at_import()


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in every process of vLLM, more than once.

    Raises RuntimeError for a vLLM version that is not supported, or that lacks one of the hooks.
    """
    compat.check()
    compat.add_backend_name()
    for hook, around in AROUND.items():
        hooks.wrap(hook, around)
    for hook, around in AROUND_LATER.items():
        compat.wrap_later(hook, around)
    compat.add_engine_method(metrics.ENGINE_METHOD, _figures)


def is_ours(vllm_config: Any) -> bool:
    return bool(vllm_config.structured_outputs_config.backend == BACKEND)


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    compat.add_flags(parser)
    return parser


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    startup.on_command_line()
    with startup.start_up():
        compat.apply_flags(args)
        if compat.chosen_backend(args) == BACKEND:
            compat.add_versions(args)
    return original(cls, args)


def _create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose the path and the sets' versions, once, where every process will read them."""
    config = original(self, *args, **kwargs)
    if not is_ours(config):
        return config
    from vllm_static.device import refuse_speculation

    with startup.start_up():
        wanted, reason = StaticConfig.of(config.additional_config).item_set_path, compat.why_host_path(config)
        refuse_speculation(config)
        if wanted == "device" and reason is not None:
            raise ValueError(f"item_set_path is device, but {reason}: leave item_set_path out for the host path")
        compat.add_versions(config)
    if wanted != "host" and reason is None and not compat.on_device_path(config):
        config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), compat.PROCESSOR]
    return config


def _compute_hash(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The name of vLLM's cache of compiled graphs: none of them depends on an item set."""
    options = isinstance(self.additional_config, dict)
    return original(compat.without_options(self) if options else self, *args, **kwargs)


def _input_processor_init(original: Callable[..., Any], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Bad item sets end the start-up here, before a model is loaded."""
    original(self, vllm_config, *args, **kwargs)
    self.static_front_end = None
    if is_ours(vllm_config):
        from vllm_static.front import FrontEnd

        with startup.start_up():
            if self.tokenizer is None:
                raise ValueError("the static backend needs the model's tokenizer: leave out skip_tokenizer_init")
            self.static_front_end = FrontEnd(vllm_config, self.tokenizer)


@contextlib.contextmanager
def _refusals(params: Any = None) -> Iterator[None]:
    """What is wrong with an item set becomes vLLM's own error for one bad request, HTTP 400.

    params: the request's, if they say which parameter brought the set.
    """
    from itemset import ItemSetError

    try:
        yield
    except ItemSetError as error:
        named = (getattr(params, "extra_args", None) or {}).get(REFERENCE) is not None
        brought = not named and getattr(params, "structured_outputs", None) is not None
        parameter = "structured_outputs" if brought else REFERENCE
        raise metrics.refusal(getattr(error, "reason", "bad items"), str(error), parameter) from error


def _checked(function: Callable[..., Any], *args: Any) -> Any:
    with _refusals():
        return function(*args)


def _process_inputs(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm.sampling_params import SamplingParams

    front_end, reference = self.static_front_end, None
    if isinstance(params, SamplingParams):
        with _refusals(params):
            if front_end:
                reference = front_end.find(params)
            else:
                _refuse_item_set(params)
    request = original(self, request_id, prompt, params, *args, **kwargs)
    if reference is not None:
        prompt_tokens = len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)
        with _refusals(params):
            front_end.attach(reference, request.sampling_params, prompt_tokens)
            setattr(request.sampling_params, answers.EXPECTED, front_end.expecting(reference))
        metrics.REQUESTS.labels(metrics.label(reference)).inc()
    return request


def _refuse_item_set(params: Any) -> None:
    """With another backend an item set would be ignored."""
    from itemset import ItemSetError

    if (params.extra_args or {}).get(REFERENCE) is not None:
        raise ItemSetError(
            "this engine has no item sets: start it with --structured-outputs-config.backend static and --item-set"
        )


async def _add_request(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    front_end = self.input_processor.static_front_end
    if front_end:
        # Encoding a large inline set takes seconds, and process_inputs runs on the event loop.
        with _refusals(params):
            params = await front_end.prepare(params)
    return await original(self, request_id, prompt, params, *args, **kwargs)


def _validate_structured_outputs(
    original: Callable[..., Any], self: Any, model_config: Any, structured_outputs_config: Any, tokenizer: Any
) -> None:
    config, structured = structured_outputs_config, self.structured_outputs
    if config is None or structured is None or config.backend != BACKEND:
        original(self, model_config, config, tokenizer)
    elif structured.choice is None:
        original(self, model_config, compat.xgrammar_config(config), tokenizer)
    elif model_config.is_diffusion:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError("Item sets are not supported for diffusion language models.")


def _manager_init(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
    original(self, vllm_config)
    if is_ours(vllm_config):
        from vllm_static.backend import StaticBackend

        self.backend = StaticBackend(vllm_config, self.tokenizer, vllm_config.model_config.get_vocab_size())


def _grammar_init(original: Callable[..., Any], self: Any, request: Any) -> None:
    from vllm_static.backend import StaticBackend

    if isinstance(self.backend, StaticBackend):
        if self.backend.admit(self, request):
            return
        if request.structured_output_request.params.choice is not None:
            compat.without_thread_pool(original, self, request)
            return
    original(self, request)


def _grammar_bitmask(
    original: Callable[..., Any],
    self: Any,
    requests: Any,
    structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: Any,
) -> Any:
    from vllm_static.backend import StaticBackend

    step = (requests, structured_output_request_ids, scheduled_spec_decode_tokens)
    if isinstance(self.backend, StaticBackend) and structured_output_request_ids:
        return self.backend.fill(original, self, *step)
    return original(self, *step)


def _figures(engine_core: Any) -> dict[str, Any]:
    figures: dict[str, Any] = engine_core.structured_output_manager.backend.figures()
    return figures


def _free_request(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_static.backend import StaticBackend

    backend = self.structured_output_manager.backend
    if isinstance(backend, StaticBackend):
        backend.forget(request)
    return original(self, request, *args, **kwargs)


def _new_request_data(original: Callable[..., Any], cls: type, request: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_static.device import send_index_once

    data = original(cls, request, *args, **kwargs)
    send_index_once(request, data)
    return data


def _to_sampling_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_static.http import add_item_set

    return add_item_set(self, original(self, *args, **kwargs))


def _to_beam_search_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_static.http import rank_item_set

    return _checked(rank_item_set, self, original(self, *args, **kwargs))


def _beam_search(
    original: Callable[..., Any],
    self: Any,
    prompts: Any,
    params: Any,
    lora_request: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Offline. Prompts are scored in rounds together, whatever concurrency vLLM's own loop is told."""
    from vllm_static import ranking

    if self.llm_engine.input_processor.static_front_end is None:
        return original(self, prompts, params, lora_request, *args, **kwargs)
    if not ranking.has_set(params):
        return original(self, prompts, compat.beams_by_xgrammar(params), lora_request, *args, **kwargs)
    inputs = self._preprocess_cmpl(prompts)
    loras = self._lora_request_to_seq(lora_request, len(inputs))
    priority = kwargs.get("priority", args[2] if len(args) > 2 else None)  # since vLLM 0.33
    priorities = None if priority is None else self._priority_to_seq(priority, len(inputs))
    with _refusals(params):
        return ranking.offline(self, inputs, params, loras, priorities)


async def _beam_search_online(
    original: Callable[..., Any], self: Any, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, None]:
    from vllm_static import ranking

    way: Any = original
    if ranking.has_set(params) and self.engine_client.input_processor.static_front_end is not None:
        way = ranking.online
    with _refusals(params):
        async for output in way(self, prompt, request_id, params, *args, **kwargs):
            yield output


def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    from itemset import asgi

    return asgi.judged(original, self)


_ARGUMENTS, _REQUESTS, _MANAGER, _INPUT, _OUTPUTS = (
    "vllm.engine.arg_utils:EngineArgs",
    "vllm.entrypoints.openai",
    "vllm.v1.structured_output:StructuredOutputManager",
    "vllm.v1.engine.input_processor:InputProcessor",
    "vllm.v1.engine.output_processor",
)

AROUND: dict[str, Callable[..., Any]] = {
    compat.KERNEL_SCAN: compat.hide_llvmlite,
    f"{_ARGUMENTS}.add_cli_args": _add_cli_args,
    f"{_ARGUMENTS}.from_cli_args": _from_cli_args,
    f"{_ARGUMENTS}.create_engine_config": _create_engine_config,
    "vllm.config.vllm:VllmConfig.compute_hash": _compute_hash,
    "vllm.sampling_params:SamplingParams._validate_structured_outputs": _validate_structured_outputs,
    f"{_INPUT}.__init__": _input_processor_init,
    f"{_INPUT}.process_inputs": _process_inputs,
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": _add_request,
    f"{_OUTPUTS}:OutputProcessor.add_request": answers.add_request,
    f"{_OUTPUTS}:RequestState._new_completion_output": answers.new_completion_output,
    "vllm.outputs:RequestOutput.add": answers.merge,
    f"{_MANAGER}.__init__": _manager_init,
    f"{_MANAGER}.grammar_init": _grammar_init,
    f"{_MANAGER}.grammar_bitmask": _grammar_bitmask,
    "vllm.v1.core.sched.output:NewRequestData.from_request": _new_request_data,
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": _free_request,
    f"{_REQUESTS}.completion.protocol:CompletionRequest.to_sampling_params": _to_sampling_params,
    f"{_REQUESTS}.completion.protocol:CompletionRequest.to_beam_search_params": _to_beam_search_params,
    f"{_REQUESTS}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": _to_sampling_params,
    f"{_REQUESTS}.chat_completion.protocol:ChatCompletionRequest.to_beam_search_params": _to_beam_search_params,
    f"{_REQUESTS}.responses.protocol:ResponsesRequest.to_sampling_params": _to_sampling_params,
}
"""What runs around each of vLLM's functions in `compat.HOOKS`."""

_BEAMS = "vllm.entrypoints.generate.beam_search"
_COMPLETIONS, _CHAT = (
    f"{_REQUESTS}.completion.serving:OpenAIServingCompletion",
    f"{_REQUESTS}.chat_completion.serving:OpenAIServingChat",
)
AROUND_LATER: dict[str, Callable[..., Any]] = {
    f"{_BEAMS}.offline:BeamSearchOfflineMixin.beam_search": _beam_search,
    f"{_BEAMS}.online:BeamSearchOnlineMixin.beam_search": _beam_search_online,
    "starlette.requests:Request.json": _parse_body,
    f"{_COMPLETIONS}.request_output_to_completion_response": answers.completion_response,
    f"{_COMPLETIONS}.completion_stream_generator": answers.completion_stream,
    f"{_CHAT}.chat_completion_full_generator": answers.chat_response,
    f"{_CHAT}.chat_completion_stream_generator": answers.chat_stream,
    f"{_REQUESTS}.chat_completion.batch_serving:OpenAIServingChatBatch.chat_completion_full_generator_batch": (
        answers.chat_batch_response
    ),
    f"{_REQUESTS}.responses.serving:OpenAIServingResponses.responses_full_generator": answers.responses_response,
    "vllm.v1.sample.sampler:Sampler.forward": hooks.later("vllm_static.chosen", "sample"),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": hooks.later("vllm_static.chosen", "verify"),
}
"""What runs around each of vLLM's functions in `compat.LATER_HOOKS`."""
