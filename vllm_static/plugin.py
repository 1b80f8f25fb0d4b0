"""The entry points: what vLLM calls in every process, and how its hooks lead to our code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from vllm_static import compat
from vllm_static.config import BACKEND


def register_early() -> None:
    """Entry point `vllm.platform_plugins`: runs while vLLM is being imported, and names no platform."""
    compat.add_backend_name_at_import()


def register() -> None:
    """Entry point `vllm.general_plugins`: runs in every process of vLLM, more than once.

    Raises RuntimeError for a vLLM version that is not supported, or that lacks one of the hooks.
    """
    compat.check()
    compat.add_backend_name()
    if compat.exists(compat.KERNEL_SCAN):
        compat.wrap(compat.KERNEL_SCAN, compat.hide_llvmlite)
    arguments, requests = "vllm.engine.arg_utils:EngineArgs", "vllm.entrypoints.openai"
    compat.wrap(f"{arguments}.add_cli_args", _add_cli_args)
    compat.wrap(f"{arguments}.from_cli_args", _from_cli_args)
    compat.wrap(f"{arguments}.create_engine_config", _create_engine_config)
    compat.wrap("vllm.sampling_params:SamplingParams._validate_structured_outputs", _validate_structured_outputs)
    compat.wrap("vllm.v1.engine.input_processor:InputProcessor.process_inputs", _process_inputs)
    compat.wrap("vllm.v1.engine.async_llm:AsyncLLM.add_request", _add_request)
    compat.wrap("vllm.v1.structured_output:StructuredOutputManager.__init__", _manager_init)
    compat.wrap("vllm.v1.structured_output:StructuredOutputManager.grammar_init", _grammar_init)
    for request in (
        f"{requests}.completion.protocol:CompletionRequest",
        f"{requests}.chat_completion.protocol:ChatCompletionRequest",
    ):
        compat.wrap(f"{request}.to_sampling_params", _to_sampling_params)
        compat.wrap(f"{request}.to_beam_search_params", _to_beam_search_params)
    compat.wrap(f"{requests}.responses.protocol:ResponsesRequest.to_sampling_params", _to_sampling_params)


def is_ours(vllm_config: Any) -> bool:
    return bool(vllm_config.structured_outputs_config.backend == BACKEND)


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    compat.add_flags(parser)
    return parser


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    compat.apply_flags(args)
    return original(cls, args)


def _create_engine_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bad item sets end the start-up here, before a model is loaded."""
    vllm_config = original(*args, **kwargs)
    if is_ours(vllm_config):
        from vllm.tokenizers import cached_tokenizer_from_config

        from vllm_static.front import FrontEnd

        if vllm_config.model_config.skip_tokenizer_init:
            raise ValueError("the static backend needs the model's tokenizer: leave out skip_tokenizer_init")
        FrontEnd(vllm_config, cached_tokenizer_from_config(vllm_config.model_config))
    return vllm_config


_front_ends: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _front_end(input_processor: Any) -> Any:
    """The front end of this input processor, None where another backend is configured."""
    if not is_ours(input_processor.vllm_config):
        return None
    if input_processor not in _front_ends:
        from vllm_static.front import FrontEnd

        _front_ends[input_processor] = FrontEnd(input_processor.vllm_config, input_processor.tokenizer)
    return _front_ends[input_processor]


def _checked(function: Callable[..., Any], *args: Any) -> Any:
    """Call it; what is wrong with an item set becomes vLLM's own error for one bad request, HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    from itemset import ItemSetError

    try:
        return function(*args)
    except ItemSetError as error:
        raise VLLMValidationError(str(error)) from error


def _process_inputs(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm.sampling_params import SamplingParams

    front_end = _front_end(self)
    reference = _checked(front_end.find, params) if front_end and isinstance(params, SamplingParams) else None
    request = original(self, request_id, prompt, params, *args, **kwargs)
    if reference is not None:
        prompt_tokens = len(request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids)
        _checked(front_end.attach, reference, request.sampling_params, prompt_tokens)
    return request


async def _add_request(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    front_end = _front_end(self.input_processor)
    if front_end and getattr(params, "structured_outputs", None) is not None:
        # Encoding a large inline set takes seconds, and process_inputs runs on the event loop.
        await asyncio.to_thread(_checked, front_end.find, params)
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
        self.backend.admit(request)
    original(self, request)


def _to_sampling_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_static.http import add_item_set

    return add_item_set(self, original(self, *args, **kwargs))


def _to_beam_search_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_static.http import refuse_beam_search

    refuse_beam_search(self)
    return original(self, *args, **kwargs)
