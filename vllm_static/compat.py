"""Every name of vLLM's that is no official interface, but for the functions that hooks run around."""

import asyncio
import contextlib
import copy
import importlib.util
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import wrapt

from itemset.embedded.holes import Vocabulary
from itemset.embedded.placement import EBNF, LARK
from itemset.serving import hooks
from itemset.serving.config import BACKEND, StaticConfig, Switch
from itemset.serving.constraint import after
from itemset.serving.hooks import START
from itemset.serving.wire import WIRE, EngineRequest

logger = logging.getLogger("vllm.vllm_static")  # vLLM shows what is logged below its own name

SUPPORTED = ((0, 32), (0, 33))  # first and last minor version: those that `tests/contract.py` has passed
BROKEN: tuple[str, ...] = ()  # among them and later

hook = hooks.Hooks(START)  # declares a hook into vLLM


def vllm_version() -> str:
    """Return the installed version of vLLM, whichever distribution brought it."""
    return str(importlib.import_module("vllm").__version__)


def install(*times: str) -> None:
    """Check and put in place the hooks of these times. Raises RuntimeError that names the version or a missing hook."""
    installed = vllm_version()
    hooks.check_version("vLLM", installed, SUPPORTED, BROKEN)
    hook.install(f"vLLM {installed}", *times)
    wrapt.register_post_import_hook(_name_no_kernels, "llvmlite.binding.ffi")


def is_ours(vllm_config: Any) -> bool:
    """Return whether an engine takes our backend: then the hooks of this process run."""
    return hook.choose(vllm_config.structured_outputs_config.backend == BACKEND)


def of_our_backend(structured: Any) -> Any:
    """Give StructuredOutputsParams that vLLM has not judged the backend's name, which the engine core wants since 0.33
    (v1/structured_output/__init__.py, grammar_init)."""
    structured._backend = BACKEND
    return structured


def added_tokens(vllm_config: Any) -> list[str]:
    """Return what vLLM adds to the model's tokenizer (renderers/hf.py)."""
    if not vllm_config.model_config.enable_prompt_embeds:
        return []
    return [importlib.import_module("vllm.renderers.chat_utils").PROMPT_EMBEDS_PLACEHOLDER_TOKEN]


def vocabulary_of(vllm_config: Any, tokenizer: Any) -> Any:
    """Return the model's vocabulary as vLLM's own backend has xgrammar see it."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    backend = XgrammarBackend(vllm_config, tokenizer, vllm_config.model_config.get_vocab_size())
    return Vocabulary(backend.compiler.compile_grammar('root ::= ""').tokenizer_info)  # which the compiler hides


def kind_of_grammar(text: str) -> str:
    """Return whether vLLM takes a grammar for EBNF or for Lark: a kind of `itemset.embedded.placement`."""
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    return LARK if grammar_is_likely_lark(text) else EBNF


def json_options(vllm_config: Any) -> dict[str, Any]:
    """Return how vLLM has xgrammar read schemas (v1/structured_output/backend_xgrammar.py, compile_grammar)."""
    tight = vllm_config.structured_outputs_config.disable_any_whitespace
    return {"any_whitespace": not tight, "separators": (",", ":") if tight else None}


def beams_by_xgrammar(params: Any) -> Any:
    """Return BeamSearchParams without a set for xgrammar: vLLM's own search knows no other (beam_search/offline.py)."""
    structured = params.structured_outputs
    if structured is None or structured._backend not in (None, BACKEND):
        return params
    params = copy.copy(params)
    params.structured_outputs = copy.copy(structured)
    params.structured_outputs._backend = "xgrammar"
    return params


def _name_no_kernels(ffi: Any) -> None:
    """On a CPU, vLLM asks every object of every module for its `__dict__` (triton_utils/dispatcher.py), which Numba's
    library takes for the name of one of its functions."""
    ffi.lib._fntab["__dict__"] = {}


def without_thread_pool(grammar_init: Callable[..., Any], manager: Any) -> None:
    """Make the request's grammar here: an item set has nothing to compile, and a pool's thread would wait 5 ms for the
    scheduler's busy one. vLLM calls `grammar_init` from one thread."""
    pooled, manager._use_async_grammar_compilation = manager._use_async_grammar_compilation, False
    try:
        grammar_init()
    finally:
        manager._use_async_grammar_compilation = pooled


def compile_on(threads: Executor, manager: Any, request: Any) -> None:
    """Have the request wait until a thread of ours has compiled its grammar, unless it has ended by then."""

    def created() -> Any:
        if request.is_finished():
            raise CancelledError
        return manager._create_grammar(request)

    request.structured_output_request.grammar = threads.submit(created)


def unfinished(client: Any) -> int:
    """Return requests that this front end has in the engine (v1/engine/output_processor.py)."""
    return int(client.output_processor.get_num_unfinished_requests())


def front_end_of(state: Any) -> Any:
    """Return a server's front end by its application's state, None if another backend is chosen."""
    client = getattr(state, "engine_client", None)
    return getattr(getattr(client, "input_processor", None), "static_front_end", None)


async def ask_each(core: Any, method: str, *args: Any) -> list[Any]:
    """Return what each engine core of an asynchronous client answers to an added method (v1/engine/core_client.py)."""
    asked = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
    return await asyncio.gather(*asked)


def ask(core: Any, method: str, *args: Any) -> Any:
    """Return the same of the synchronous client, or of the one with its engine core in this process."""
    if hasattr(core, "call_utility"):
        return core.call_utility(method, *args)
    return getattr(core.engine_core, method)(*args)


backends: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of each engine core here, by its configuration's id


def backend_of(manager: Any) -> Any:
    """Return the StaticBackend of a StructuredOutputManager's engine core; None if it has another one."""
    return backends.get(id(manager.vllm_config))


def runner_of(worker: Any) -> Any:
    """Return the model runner of a worker, or of what wraps it (v1/worker/worker_base.py)."""
    return getattr(worker, "worker", worker).model_runner


PROCESSOR = "vllm_static.worker.masks:ItemSetProcessor"
_V1 = "vLLM uses model runner V1 (on a GPU a warning of its own says why; VLLM_USE_V2_MODEL_RUNNER=1 insists)"
platforms = hooks.Later("vllm.platforms")


def item_sets(runner: Any) -> Any:
    """Return the ItemSetProcessor of a model runner on the device path, None if it does not sample, in a pipeline."""
    given = getattr(getattr(runner, "sampler", None), "logits_processors", ())
    return next((one for one in given if hasattr(one, "mask_rows")), None)


def is_on(switch: Switch, device: Any) -> bool:
    """Return whether such an option is on. `auto` is on a GPU, where a run of `benchmarks/gpu.sh` has shown a gain."""
    return switch == "on" or (switch == "auto" and device.type == "cuda")


def kept_through_sleep(vllm_config: Any) -> contextlib.AbstractContextManager[None]:
    """Within it, memory on the device is allocated that sleep mode restores before the next step, at both levels. A
    model is loaded into memory that level 2 discards."""
    model = vllm_config.model_config
    if not model.enable_sleep_mode or model.sleep_mode_backend != "cumem":  # others suspend the process as a whole
        return contextlib.nullcontext()
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance().use_memory_pool(tag="runtime")


def asleep(worker: Any) -> bool:
    """Return whether nothing may be copied to a worker's device now: its memory is not there."""
    worker = getattr(worker, "worker", worker)
    return worker.vllm_config.model_config.enable_sleep_mode and worker.sleep_mode_backend.state() == "SUSPENDED"


def why_host_path(vllm_config: Any) -> str | None:
    """Return what keeps this configuration from the device path; None where nothing does."""
    model, here = vllm_config.model_config, platforms.current_platform
    name = getattr(here, "device_name", "")
    reasons = {
        _V1: not vllm_config.use_v2_model_runner,
        "the model does not sample token by token": model.runner_type != "generate" or model.is_diffusion,
        "return_sampling_mask allows no logits processor": model.return_sampling_mask,
        "sleep mode discards what lies on an XPU": model.enable_sleep_mode and here.is_xpu(),
        f"the platform {name} has a sampler of its own": here.is_tpu() or here.is_out_of_tree(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_rounds(vllm_config: Any) -> str | None:
    """Return what keeps this engine from making ranked lists inside a step; None if nothing does."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    experts_apart = model.is_moe and parallel.data_parallel_size > 1
    reasons = {
        "model runner V1": not vllm_config.use_v2_model_runner,
        "the host path": not on_device_path(vllm_config),
        "ranked_list_beams is 0": StaticConfig.of(vllm_config.additional_config).ranked_list_beams == 0,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "experts under data parallelism": experts_apart or parallel.enable_eplb,
        "cross-attention to an encoder": model.is_encoder_decoder,
        "an auxiliary output": vllm_config.aux_output_config.enabled,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


_MENDS = {  # by what the reason says why lists take rounds, what makes them in a step
    "model runner V1": "on a GPU VLLM_USE_V2_MODEL_RUNNER=1 insists on V2",
    "the host path": "the line on the backend says why",
    "ranked_list_beams is 0": "leave it out",
    "pipeline parallelism": "--tensor-parallel-size in its place",
    "experts under data parallelism": "--tensor-parallel-size in its place",
    "the KV cache is too small": "raise --gpu-memory-utilization or --kv-cache-memory-bytes",
    "layers of ": "--attention-backend FLASH_ATTN or TRITON_ATTN, if the model allows it",
    "heads of 256": "--attention-backend TRITON_ATTN",
    "a KV cache of 8 bits": "ranked_list_beams, how many to keep room for, tries it; else --kv-cache-dtype auto",
    "FlashInfer": "--attention-backend FLASH_ATTN; or ranked_list_beams, how many to keep room for, tries it",
    "on no GPU yet": "ranked_list_beams, how many to keep room for, tries it",
    "a KV cache of ": "--kv-cache-dtype auto",
    "VLLM_BATCH_INVARIANT": "unset it",
    "no room is kept for beams": "the engine's log says why, and what mends it",
    "fast prefill": "leave --kv-sharing-fast-prefill out",
}


def with_mend(reason: str) -> str:
    """Return why lists take rounds, and what makes them in a step if anything does."""
    return next((f"{reason} ({mend})" for part, mend in _MENDS.items() if part in reason), reason)


def shorter_passes(vllm_config: Any) -> str:
    """Return what in a CPU's flags would shorten forward passes, as the end of a sentence; empty if nothing would."""
    if not platforms.current_platform.is_cpu():
        return ""
    flags = {
        "--dtype float32, if this CPU has no instructions for bfloat16": vllm_config.model_config.dtype.itemsize < 4,
        "--block-size 32, if prompts are longer than 32 tokens": vllm_config.cache_config.block_size > 32,
    }
    return "".join(f"; so does {flag}" for flag, holds in flags.items() if holds)


def why_no_weights(vllm_config: Any) -> str | None:
    """Return what keeps this engine from giving the weights of answers; None if nothing does."""
    speculative = vllm_config.speculative_config
    if importlib.util.find_spec("vllm_static.worker.weights") is None:
        return "its files were taken out"
    if vllm_config.use_v2_model_runner and not on_device_path(vllm_config):
        return "vLLM's model runner V2 needs the device path for it, and this server takes the host path"
    if getattr(speculative, "enable_adaptive_verification", False):
        return "adaptive verification of drafts moves its rows on the device"
    return None


def on_device_path(vllm_config: Any) -> bool:
    """Return whether `create_engine_config` has chosen the device path."""
    return PROCESSOR in (vllm_config.model_config.logits_processors or ())


def core_has_drafts(vllm_config: Any) -> bool:
    """Return whether the engine core knows a step's n-gram drafts before the step, and may add to them."""
    early = vllm_config.scheduler_config.async_scheduling or vllm_config.parallel_config.pipeline_parallel_size > 1
    method = getattr(vllm_config.speculative_config, "method", None)  # V1 cuts drafts of "ngram_gpu" itself
    return not early and (method == "ngram" or (method == "ngram_gpu" and vllm_config.use_v2_model_runner))


ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "skip_clone": True}
"""Parameters of a request of ours, for a list or for scores, whose token does not matter. No other has the same."""


def list_params(carried: EngineRequest) -> Any:
    """Return the parameters of a request for a list."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    structured = StructuredOutputsParams(choice=[carried.reference])
    return SamplingParams(**ONE_TOKEN, ignore_eos=True, structured_outputs=structured, extra_args={WIRE: carried})


def make_ordinary(request: Any, extra_args: dict[str, Any], constraint: Any = None) -> None:
    """Let vLLM's scheduler, which does not know it yet, see a request without structured output, or with this
    StructuredOutputRequest (v1/request.py).

    Its parameters become its own first: with n > 1, requests may share one object (v1/engine/parallel_sampling.py).
    """
    from vllm.v1.request import RequestStatus

    request.sampling_params = copy.copy(request.sampling_params)
    request.sampling_params.extra_args = extra_args
    request.sampling_params.structured_outputs = constraint and constraint.params
    request.structured_output_request = constraint
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR if constraint else RequestStatus.WAITING


def may_reason(manager: Any) -> bool:
    """Return whether a constraint may begin later than its request (structured_output, _get_constraint_bounds)."""
    return manager.reasoner_cls is not None and not manager.enable_in_reasoning


def reasoning_end_token(manager: Any, request: Any) -> int | None:
    """Return the token after which a request's constraint begins, -1 if it begins at once, None if its reasoning ends
    by more than one token or a rule of its own (v1/structured_output/__init__.py, _get_constraint_bounds)."""
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
    return reasoner.vocab.get(reasoner.reasoning_end_str)


def answers_here_at_once(vllm_config: Any) -> bool:
    """Return whether all of the engine's processes are on this machine, and its answers begin after their prompts."""
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size_local in (0, parallel.data_parallel_size)
    here = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray" and engines
    return here and not vllm_config.structured_outputs_config.reasoning_parser


def content_after_reasoning(
    vllm_config: Any, tokenizer: Any, request: Any
) -> Callable[[Sequence[int]], Sequence[int]] | None:
    """Return what takes the reasoning off a request's output, None where it has none: `reasoning_end_token` for the
    front end. request: an EngineCoreRequest. Where vLLM tells its parser nothing of it, as on /v1/completions and
    offline, its reasoning has ended unless its prompt opens one: parsers wait for an end that no such answer needs."""
    from vllm.reasoning import ReasoningParserManager

    config = vllm_config.structured_outputs_config
    if not config.reasoning_parser or config.enable_in_reasoning or request.reasoning_ended:
        return None
    if config.reasoning_parser not in ReasoningParserManager.list_registered():
        ReasoningParserManager.import_reasoning_parser(config.reasoning_parser_plugin)  # offline nobody else has
    parser = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
    reasoner = parser(tokenizer=tokenizer, **(request.reasoning_parser_kwargs or {}))
    if request.reasoning_ended is None:
        prompt = request.prompt_token_ids or []
        untold = request.reasoning_parser_kwargs is None and not _opens_thought(reasoner, tokenizer, prompt)
        if untold or reasoner.is_reasoning_end(prompt):
            request.reasoning_ended = True
            return None
    mark = reasoner.vocab.get(reasoner.reasoning_end_str)
    return reasoner.extract_content_ids if mark is None else partial(after, [mark])


def _opens_thought(reasoner: Any, tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Return whether the last mark of reasoning in a prompt begins one."""
    backwards = list(prompt)[::-1]

    def since(mark: str | None) -> int:
        """Return how many tokens stand after its last occurrence; more than the prompt has without one."""
        known = reasoner.vocab.get(mark) if mark else None
        tokens = [known] if known is not None else tokenizer.encode(mark, add_special_tokens=False) if mark else []
        tokens, place = tokens[::-1], -1
        with contextlib.suppress(ValueError):
            while tokens:
                place = backwards.index(tokens[0], place + 1)
                if backwards[place : place + len(tokens)] == tokens:
                    return place
        return len(backwards)

    return since(reasoner.reasoning_start_str) < since(reasoner.reasoning_end_str)


def content(text: str) -> Any:
    """Return a part of a streamed answer that is content (entrypoints/openai/chat_completion/serving.py)."""
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.serving")
    return protocol.DeltaMessage(content=text)


def to_device(values: Any, device: Any, dtype: Any = np.int64) -> Any:
    """Copy numbers of the host to a device without waiting for it: a tensor."""
    from vllm.utils import torch_utils

    return torch_utils.async_tensor_h2d(np.asarray(values, dtype), device=device)
