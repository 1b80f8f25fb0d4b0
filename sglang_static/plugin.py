"""The entry point: what SGLang calls in every process, and how its hooks lead to our code."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from itemset import hooks, startup
from itemset.catalogue import with_versions
from itemset.config import REFERENCE, StaticConfig
from sglang_static import answers, compat


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs in every process of SGLang.

    Raises RuntimeError for a SGLang version that is not supported; SGLang logs it, and does not know the backend.
    """
    compat.install(AROUND)
    compat.add_backend(_make_backend)
    compat.add_engine_arguments()
    hooks.after_import("sglang.srt.entrypoints.http_server", _add_middleware)


def _make_backend(*args: Any) -> Any:
    from sglang_static.backend import make_backend

    return make_backend(*args)


def _add_middleware() -> None:
    """Innermost, where bodies are no longer compressed."""
    from starlette.middleware import Middleware

    from sglang_static.http import ItemSetFields

    sys.modules["sglang.srt.entrypoints.http_server"].app.user_middleware.append(Middleware(ItemSetFields))


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    original(parser)
    compat.add_flags(parser)


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    startup.on_command_line()
    with startup.start_up():
        compat.apply_flags(args)
    return original(cls, args)


def _check_server_args(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bad item sets end the start-up here, before a process is started or a model loaded. The sets' versions are chosen
    here, for all processes."""
    if compat.is_ours(self):
        with startup.start_up():
            given = {**compat.options(), "item_set_versions": {}}  # those of an engine before this one are no more
            wanted, reason = StaticConfig.of(given).item_set_path, compat.why_host_path(self)
            compat.refuse_unmasked(self)
            if wanted == "device" and reason is not None:
                raise ValueError(f"item_set_path is device, but {reason}: leave item_set_path out for the host path")
            compat.set_options(with_versions(given))
    return original(self, *args, **kwargs)


def _init_tokenizer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.static_front_end = None
    if compat.is_ours(self.server_args):
        from sglang_static.front import FrontEnd

        with startup.start_up():
            self.static_front_end = FrontEnd(self)


async def _generate_request(
    original: Callable[..., Any], self: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Any, None]:
    """Inline sets are encoded here. Where a request with a set asks for a beam search, it gets a ranked list."""
    if self.static_front_end is not None and hasattr(obj, "custom_logit_processor"):
        from sglang_static import ranking

        # Encoding a large inline set takes seconds, and all below runs on the event loop.
        await self.static_front_end.prepare(obj, request)
        if ranking.wanted(obj) and ranking.has_set(self, obj):
            yield await ranking.ranked(original, self, obj, request)
            return
    async for part in original(self, obj, request):
        answers.note(obj, part)
        yield part


def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    from itemset import asgi

    return asgi.judged(original, self)


async def _tokenize_one_request(original: Callable[..., Any], self: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    front_end = self.static_front_end
    if front_end is not None:  # before SGLang's own checks, which may advise what cannot work with a set
        front_end.take(obj, self.preferred_sampling_params)
    return await original(self, obj, *args, **kw)


def _create_tokenized_object(
    original: Callable[..., Any], self: Any, obj: Any, input_text: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    front_end = self.static_front_end
    if front_end is None:
        _refuse_item_set(obj)
        return original(self, obj, input_text, input_ids, *args, **kwargs)
    given = obj.sampling_params
    reference, obj.sampling_params = front_end.take(obj, self.preferred_sampling_params)
    try:
        tokenized = original(self, obj, input_text, input_ids, *args, **kwargs)
    finally:
        obj.sampling_params = given  # the same request may be tokenized again
    if reference is not None:
        front_end.attach(reference, tokenized.sampling_params, len(input_ids or ()))
        setattr(obj, answers.EXPECTED, front_end.expected(reference, obj, tokenized.sampling_params))
    return tokenized


def _refuse_item_set(request: Any) -> None:
    """With another backend an item set would be ignored, or be an unknown parameter."""
    from sglang_static import http

    given = request.sampling_params if isinstance(request.sampling_params, dict) else {}
    custom = given.get("custom_params")
    if any(isinstance(place, dict) and place.get(REFERENCE) for place in (http.fields(), given, custom)):
        raise ValueError("this engine has no item sets: start it with --grammar-backend static and --item-set")


def _process_grammar(original: Callable[..., Any], self: Any, req: Any) -> bool:
    backend = getattr(self.grammar_backend, "static_backend", None)
    if backend is not None and backend.admit(self, req):
        return False  # nothing to wait for
    waits: bool = original(self, req)
    return waits


def _fill_rows(original: Callable[..., Any], entries: Any, vocab_mask: Any) -> None:
    backend = sys.modules.get("sglang_static.backend")  # imported where there are item sets
    if backend is None:
        original(entries, vocab_mask)
    else:
        backend.fill_rows(original, entries, vocab_mask)


def _load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    config = StaticConfig.of(compat.options())
    ours = compat.is_ours(self.server_args) and not self.is_draft_worker
    if ours and config.item_set_path != "host" and compat.why_host_path(self.server_args) is None:
        from sglang_static.drafts import say_what_is_not_masked
        from sglang_static.processor import ItemSetSampler

        self.item_set_sampler = ItemSetSampler(config, self.device, self.model_config.vocab_size)
        say_what_is_not_masked(compat.resolved(self.server_args))
    return result


def _alloc_memory_pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    sampler = getattr(self, "item_set_sampler", None)
    if sampler is not None:
        sampler.allocate(self.req_to_token_pool.req_to_token.shape[0], compat.verified_rows(self.server_args))
    return result


def _forward(original: Callable[..., Any], self: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    sampler = getattr(self.model_runner, "item_set_sampler", None)
    if sampler is not None and batch is not None:
        sampler.stage(batch)
    return original(self, batch, *args, **kwargs)


def _update_mask(original: Callable[..., Any], self: Any) -> None:
    from sglang_static.processor import current

    original(self)
    sampler = current()
    if sampler is not None:
        sampler.mask(self)


class _Synchronised:
    grammars = True


def _sync_tokens(original: Callable[..., Any], self: Any, batch_next_token_ids: Any, sampling_info: Any) -> None:
    """SGLang lets its ranks agree on the tokens where it has grammars: masked rows have more near ties."""
    has_sets = getattr(sampling_info, "item_sets", None) is not None
    original(self, batch_next_token_ids, _Synchronised if has_sets else sampling_info)


_OURS = "sglang_static.drafts"  # imports torch
_ARGUMENTS, _TOKENIZER, _RUNNER, _WORKER, _DRAFTS, _OPENAI = (
    "sglang.srt.server_args:ServerArgs",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager",
    "sglang.srt.model_executor.model_runner:ModelRunner",
    "sglang.srt.managers.tp_worker:TpModelWorker",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.entrypoints.openai",
)

AROUND: dict[str, Callable[..., Any]] = {
    f"{_ARGUMENTS}.add_cli_args": _add_cli_args,
    f"{_ARGUMENTS}.from_cli_args": _from_cli_args,
    f"{_ARGUMENTS}.check_server_args": _check_server_args,
    f"{_TOKENIZER}.init_tokenizer_and_processor": _init_tokenizer,
    f"{_TOKENIZER}.generate_request": _generate_request,
    "sglang.srt.entrypoints.http_server:ORJSONRequest.json": _parse_body,
    f"{_TOKENIZER}._stream_one_response": answers.stream_one_response,
    f"{_OPENAI}.serving_completions:OpenAIServingCompletion._build_completion_response": answers.openai_response,
    f"{_OPENAI}.serving_completions:OpenAIServingCompletion._generate_completion_stream": answers.openai_stream,
    f"{_OPENAI}.serving_chat:OpenAIServingChat._build_chat_response": answers.openai_response,
    f"{_OPENAI}.serving_chat:OpenAIServingChat._generate_chat_stream": answers.openai_stream,
    f"{_TOKENIZER}._tokenize_one_request": _tokenize_one_request,
    f"{_TOKENIZER}._create_tokenized_object": _create_tokenized_object,
    "sglang.srt.constrained.grammar_manager:GrammarManager.process_req_with_grammar": _process_grammar,
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched": _fill_rows,
    f"{_RUNNER}.load_model": _load_model,
    f"{_RUNNER}.alloc_memory_pool": _alloc_memory_pool,
    f"{_WORKER}.forward_batch_generation": _forward,
    f"{_WORKER}.forward_batch_split_prefill": _forward,
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask": _update_mask,
    "sglang.srt.layers.sampler:Sampler._sync_token_ids_across_tp": _sync_tokens,
    "sglang.srt.speculative.eagle_utils:eagle_sample": hooks.later(_OURS, "eagle_sample"),
    "sglang.srt.speculative.eagle_utils:_verify_coins": hooks.later(_OURS, "verify_coins"),
    f"{_DRAFTS}:EagleDraftWorker.draft_forward": hooks.later(_OURS, "draft_forward"),
    f"{_DRAFTS}:EagleDraftWorker._draft_extend_for_prefill": hooks.later(_OURS, "extend_after_prefill"),
    f"{_DRAFTS}:EagleDraftWorker._draft_extend_for_decode": hooks.later(_OURS, "extend_after_verification"),
    f"{_RUNNER}.forward": hooks.later(_OURS, "draft_model_forward"),
    compat.DRAFT_GRAPH: hooks.later(_OURS, "replayed_extend"),
}
"""What runs around each of SGLang's functions in `compat.HOOKS`."""
