"""Every name of SGLang's that is no official interface, but for the functions that hooks run around."""

import asyncio
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from xgrammar import TokenizerInfo

from itemset.embedded.placement import JSON
from itemset.errors import ItemSetError
from itemset.serving import hooks
from itemset.serving.config import BACKEND, from_environment
from itemset.serving.hooks import IMPORTED, Later

logger = logging.getLogger("sglang_static")

SUPPORTED = ((0, 5, 23), (0, 5, 23))  # first and last version: those that `tests/contract.py` has passed
BROKEN: tuple[str, ...] = ()  # among them and later
VARIABLE = "SGLANG_STATIC"  # options as JSON in the environment: SGLang's configuration has no place for a plugin's

METHOD = "item_sets/versions"
"""Of a DumperControlReqInput of ours: the one request that brings plain values to all schedulers. A debugging server's
clients send such, too, by the route `/dumper/{method}` (entrypoints/http_server.py), but none with a slash."""


def _put(target: str, around: Callable[..., Any]) -> None:
    """Put a hook in place by SGLang's registry, which looks through all modules for what has imported the function by
    name, in 40 ms."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(BACKEND, "static-backend")
    HookRegistry.register(target.replace(":", "."), around, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()


hook = hooks.Hooks(IMPORTED, _put)  # declares a hook into SGLang
grammars = Later("sglang.srt.constrained.base_grammar_backend")
messages = Later("sglang.srt.managers.io_struct")
runtime, environ = Later("sglang.srt.runtime_context"), Later("sglang.srt.environ")


def sglang_version() -> str:
    """Return the version of SGLang, as it says itself."""
    return str(importlib.import_module("sglang.version").__version__)


def install() -> None:
    """Put each hook in place as soon as its module is imported, which raises RuntimeError for a missing one. Raises
    RuntimeError for a version that is not supported."""
    installed = sglang_version()
    hooks.check_version("SGLang", installed, SUPPORTED, BROKEN)
    hook.install(f"SGLang {installed}", IMPORTED)


def options() -> dict[str, Any]:
    """Return the plugin's options in this process. Raises ItemSetError as `from_environment` does."""
    return from_environment(VARIABLE)


def set_options(given: Mapping[str, Any]) -> None:
    """For this process and all it starts."""
    os.environ[VARIABLE] = json.dumps({**options(), **given})


def resolved(server_args: Any) -> Any:
    """Return the arguments of the server as SGLang has resolved them, a read-only view."""
    return importlib.import_module("sglang.srt.arg_groups.model_override_base").resolved_view(server_args)


def is_ours(server_args: Any) -> bool:
    """Return whether an engine takes our backend: then the hooks of this process run."""
    return hook.choose(resolved(server_args).grammar_backend == BACKEND)


def server_manager() -> Any:
    """Return the TokenizerManager of this process's server, None where there is none (entrypoints/http_server.py)."""
    state = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "_global_state", None)
    return getattr(state, "tokenizer_manager", None)


def follower_of(manager: Any) -> Any:
    """Return a TokenizerManager's `Follower`, begun if need be; None without item sets. Call it on the event loop."""
    front = getattr(manager, "static_front_end", None)
    if front is not None and front.follower is None:
        manager.auto_create_handle_loop()
        loop = manager.event_loop

        async def send_to_all(message: Any) -> list[Any]:
            outputs = await manager.dumper_control(messages.DumperControlReqInput(method=METHOD, body=message))
            if failed := [output.error for output in outputs if not output.success]:
                raise ItemSetError(failed[0])
            return [output.response[0] for output in outputs]

        front.follow(lambda message: asyncio.run_coroutine_threadsafe(send_to_all(message), loop).result()).start()
    return front and front.follower


def of_all_ranks(scheduler: Any, value: Any) -> list[Any]:
    """Return what each tensor-parallel rank gives, all of which call this in the same step."""
    if scheduler.dp_tp_group.world_size == 1:
        return [value]
    import torch.distributed as distributed

    group = scheduler.dp_tp_cpu_group  # whose ranks get the same messages in the same step
    values = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def counts_requests() -> bool:
    """Return whether this scheduler is the one of its ranks whose requests are counted (managers/scheduler.py)."""
    ranks = runtime.get_parallel()
    return bool(ranks.pp_rank == 0 and ranks.attn_tp_rank == 0 and ranks.attn_cp_rank == 0)


def why_host_path(server_args: Any) -> str | None:
    """Return what keeps this configuration from the device path; None where nothing does."""
    given, platform = resolved(server_args), importlib.import_module("sglang.srt.platforms").current_platform
    mlx, algorithm = os.environ.get("SGLANG_USE_MLX") == "1", given.speculative_algorithm
    own_sampler = platform.is_out_of_tree() or given.device in ("npu", "tpu", "mps") or mlx
    in_eagle_sample = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP", "NGRAM")
    reasons = {
        f"{algorithm} verifies drafts in a way of its own": algorithm not in in_eagle_sample,
        "a decode server of PD disaggregation takes requests over in the middle": given.disaggregation_mode == "decode",
        "with --enable-pdmux two batches sample at the same time": given.enable_pdmux,
        "the model does not sample token by token": given.dllm_algorithm is not None,
        f"the device {given.device} has a sampler of its own": own_sampler,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def refuse_unmasked(server_args: Any) -> None:
    """Raises ValueError for a configuration in which nothing that SGLang offers can hold a grammar."""
    given = resolved(server_args)
    algorithm = given.speculative_algorithm
    thresholds = given.speculative_accept_threshold_single, given.speculative_accept_threshold_acc
    reasons = {
        "UNO speculation takes no grammar, so no item set can hold: choose another algorithm": algorithm == "UNO",
        "--tokenizer-worker-num above 1 takes requests in processes in which item sets would be lost: leave it out": (
            given.tokenizer_worker_num > 1
        ),
        "SGLANG_RUST_SERVER=1 serves without the processes that know item sets, which would be lost: unset it": (
            environ.envs.SGLANG_RUST_SERVER.get()
        ),
        "over gRPC (--grpc-port, --smg-grpc-mode, SGLANG_GRPC_PORT) item sets would be lost: leave it out": (
            given.grpc_port is not None or given.smg_grpc_mode
        ),
        "SGLANG_SIMULATE_ACC_LEN accepts drafts without looking at them, so no item set can hold: unset it": (
            float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or 0) > 0
        ),
        "a speculative acceptance threshold of zero accepts drafts outside the item set: choose one above zero": (
            algorithm is not None and min(thresholds) <= 0
        ),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(reason)


def everything_else(tokenizer: Any, vocab_size: int, end_tokens: Any) -> Any:
    """Return xgrammar's backend as SGLang makes it, for other grammars (base_grammar_backend.py)."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import TokenizerNotSupportedError, XGrammarGrammarBackend

    ends, (parser, mark) = list(end_tokens or ()) or None, reasoning(tokenizer)
    try:
        backend = XGrammarGrammarBackend(tokenizer, vocab_size=vocab_size, model_eos_token_ids=ends, **json_options())
    except TokenizerNotSupportedError as error:
        logger.warning("Item sets are served, other grammars are not: %s", error)
        return grammars.BaseGrammarBackend()
    strict = runtime.get_serving().enable_strict_thinking
    return ReasonerGrammarBackend(backend, parser, tokenizer, enable_strict_thinking=strict) if mark else backend


def reasoning(tokenizer: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the parser of the model's reasoning, None without one, and the tokens that end it: none if the tokenizer
    has none for them, of which SGLang has warned."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    if not (name := runtime.get_serving().reasoning_parser):
        return None, ()
    parser = ReasoningParser(model_type=name, stream_reasoning=False, tokenizer=tokenizer)
    return parser, tuple(parser.detector.get_think_end_token_ids(tokenizer) or ())


def token_info(tokenizer: Any, vocab_size: int, end_tokens: Any) -> Any:
    """Return what SGLang tells xgrammar of the tokenizer (constrained/xgrammar_backend.py, XGrammarGrammarBackend)."""
    if hasattr(tokenizer, "init_xgrammar"):
        return tokenizer.init_xgrammar()[0]
    ends = list(end_tokens or ()) or None
    return TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends)


def json_options() -> dict[str, Any]:
    """Return how SGLang has xgrammar read schemas (constrained/xgrammar_backend.py, dispatch_json)."""
    serving = runtime.get_serving()
    return {
        "any_whitespace": not serving.constrained_json_disable_any_whitespace,
        "max_whitespace_cnt": serving.constrained_json_max_whitespace_cnt,
    }


def validate(kind: str, spec: str) -> None:
    """Raises ValueError for what SGLang refuses with xgrammar (constrained/xgrammar_backend.py, dispatch_json)."""
    from sglang.srt.constrained.json_schema_validation import validate_xgrammar_json_schema

    if kind == JSON:
        validate_xgrammar_json_schema(json.loads(spec))


def refuses(kind: str, spec: str) -> bool:
    """Return whether SGLang itself refuses a constraint, before xgrammar sees it (base_grammar_backend.py)."""
    try:
        validate(kind, spec)
    except ValueError:
        return True
    return bool(grammars._grammar_key_contains_nul(kind, spec))


def compile_later(manager: Any, request: Any, name: str, compiled: Callable[[], Any], threads: Executor | None) -> None:
    """Have the request wait until its grammar has been compiled, on another thread (constrained/grammar_manager.py).
    threads: ours, or None for SGLang's own. Of SGLang's copies of grammars, those under this name are forgotten."""
    backend = manager.grammar_backend
    for key in [key for key in backend.cache if key[0] == name]:
        del backend.cache[key]
    request.grammar = (threads or backend.executor).submit(compiled)
    request.grammar_key = (name, request.rid)
    manager.grammar_queue.append(request)


def reasoning_end_token(manager: Any, request: Any) -> int | None:
    """Return the token after which a request's constraint begins, -1 if at once, None if its reasoning ends by more
    than one token or rules of its own (constrained/reasoner_grammar_backend.py)."""
    ends = getattr(manager.grammar_backend, "think_end_ids", None)
    if ends is None or not request.require_reasoning:
        return -1
    if len(ends) != 1 or manager.grammar_backend.enable_strict_thinking:
        return None
    custom = request.sampling_params.custom_params or {}
    own_rules = any(key.startswith("__sglang_reasoning") for key in custom) or "thinking_budget" in custom
    return None if own_rules else int(ends[0])


def after_reasoning(manager: Any, request: Any, grammar: Any) -> Any:
    """Return the grammar, in force after the request's reasoning where it has any."""
    backend = manager.grammar_backend
    if not hasattr(backend, "think_end_ids"):
        return grammar
    return backend._make_grammar_object(grammar, request.require_reasoning)


def in_force(grammar: Any) -> Any:
    """Return the grammar that limits a request's next token: after a reasoning that has ended, that in SGLang's own."""
    if not hasattr(grammar, "_grammar_active"):
        return grammar
    return grammar.grammar if grammar._grammar_active() else None


def decode_alone(request: Any) -> None:
    """Decode the answer without the prompt's end (managers/schedule_batch.py, init_incremental_detokenize)."""
    request.surr_offset = request.read_offset = len(request.origin_input_ids_unpadded)
    request.surr_and_decode_ids, request.cur_decode_ids_len = [], 0


def stop_tokens(request: Any) -> set[int]:
    """Return the tokens at which SGLang ends this request (managers/schedule_batch.py, _check_token_based_finish)."""
    stops = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    if request.tokenizer is not None:
        stops |= {request.tokenizer.eos_token_id} | set(request.tokenizer.additional_stop_token_ids or ())
    return stops - {None}
