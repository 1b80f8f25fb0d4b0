"""The entry point, and the hooks into SGLang that belong to no other module."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from itemset.serving import flags, startup
from itemset.serving.catalogue import with_versions
from itemset.serving.config import BACKEND, StaticConfig
from itemset.serving.request import ItemRequest
from itemset.serving.words import HOLES, REFERENCE, WEIGHT
from sglang_static import (
    answers,
    beams,  # noqa: F401 - its hooks
    compat,
    drafts,  # noqa: F401 - its hooks
    following,
    turns,  # noqa: F401 - its hooks
    weights,
)
from sglang_static.compat import hook
from sglang_static.request import places, without_words


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs in every process of SGLang.

    Raises RuntimeError for a SGLang version that is not supported, or lacks a hook: SGLang logs it, and goes on without
    the backend. An engine that has chosen it would answer freely then: its process ends by SystemExit.
    """
    try:
        compat.install()
        compat.add_backend_name()
    except RuntimeError as error:
        if compat.VARIABLE in os.environ:
            raise SystemExit(str(error)) from error
        raise


@hook(
    "sglang.srt.constrained.base_grammar_backend:register_grammar_backend",
    why="SGLang's official registry of backends",
    extends=True,
)
def _register_backend(register: Callable[..., None]) -> None:
    register(BACKEND, _make_backend)


def _make_backend(*args: Any) -> Any:
    from sglang_static.backend import make_backend

    return make_backend(*args)


@hook(
    "sglang.srt.entrypoints.http_server:app",
    why="the middleware that brings a body's fields to its request; the routes of /v1/item_sets",
    extends=True,
)
def _add_middleware(app: Any) -> None:
    """Innermost, where bodies are no longer compressed."""
    from starlette.middleware import Middleware

    from itemset.serving.http_routes import add_routes
    from sglang_static.http import ItemSetFields

    if not any(one.cls is ItemSetFields for one in app.user_middleware):
        app.user_middleware.append(Middleware(ItemSetFields))
        add_routes(app, lambda state: following.follower_of(_manager()))


def _manager() -> Any:
    state = getattr(sys.modules["sglang.srt.entrypoints.http_server"], "_global_state", None)
    return getattr(state, "tokenizer_manager", None)


@hook(
    "sglang.srt.server_args:ServerArgs.add_cli_args",
    why="the flags --item-set, --item-set-path and --guided-decoding-backend",
    always=True,
)
def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    original()
    flags.add_flags(parser, device_where="wherever SGLang's sampler can be reached", alias_of="--grammar-backend")


@hook("sglang.srt.server_args:ServerArgs.from_cli_args", why="what these flags mean", always=True)
def _from_cli_args(original: Callable[..., Any], args: Any) -> Any:
    startup.on_command_line()
    with startup.start_up():
        compat.apply_flags(args)
    return original()


@hook(
    "sglang.srt.server_args:ServerArgs.check_server_args",
    why="item sets and configuration are checked before a process starts; the sets' versions are chosen",
    always=True,
)
def _check_server_args(original: Callable[..., Any], self: Any) -> Any:
    """Bad item sets end the start-up here, before a process is started or a model loaded. The sets' versions are chosen
    here, for all processes."""
    if compat.is_ours(self):
        with startup.start_up():
            given = {**compat.options(), "item_set_versions": None}  # those of an engine before this one are no more
            wanted, reason = StaticConfig.of(given).item_set_path, compat.why_host_path(self)
            compat.refuse_unmasked(self)
            if StaticConfig.of(given).item_set_draft_head is not None:
                raise ValueError("item_set_draft_head works in vLLM only, on its model runner V2: leave it out")
            if wanted == "device" and reason is not None:
                raise ValueError(f"item_set_path is device, but {reason}: leave item_set_path out for the host path")
            compat.set_options(with_versions(given))
    return original()


@hook(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.init_tokenizer_and_processor",
    why="the front end, made at start-up",
    always=True,
)
def _init_tokenizer(original: Callable[..., Any], self: Any) -> None:
    original()
    self.static_front_end = None
    if compat.is_ours(self.server_args):
        from sglang_static.front import FrontEnd

        with startup.start_up():
            self.static_front_end = FrontEnd(self)


@hook(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",
    why="requests are judged, and inline sets encoded beside the event loop; a ranked list in place of a beam search",
)
async def _generate_request(
    original: Callable[..., Any], self: Any, obj: Any, request: Any
) -> AsyncGenerator[Any, None]:
    """Inline sets are encoded here. Where a request with a set asks for a beam search, it gets a ranked list."""
    if self.static_front_end is not None and hasattr(obj, "custom_logit_processor"):
        from itemset.serving.metrics import refusals
        from sglang_static import ranking

        with refusals():
            # Encoding a large inline set takes seconds, and all below runs on the event loop.
            if await self.static_front_end.prepare(obj, request):
                yield await ranking.ranked(original, self, obj, request)
                return
            async for part in original():
                answers.note(obj, part)
                yield part
            return
    async for part in original():
        yield part


@hook(
    "sglang.srt.entrypoints.http_server:ORJSONRequest.json",
    why="a body is judged once parsed, before words are dropped",
    always=True,
)
def _parse_body(original: Callable[..., Any], self: Any) -> Any:
    from itemset.serving import asgi

    return asgi.judged(original, self)


@hook(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object",
    why="the item set is attached to its request",
    always=True,
)
def _create_tokenized_object(original: Callable[..., Any], self: Any, obj: Any, input_ids: Any) -> Any:
    front_end = self.static_front_end
    if front_end is None:
        from sglang_static import http, inside

        given = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
        named = any(place.get(REFERENCE) for place in places(given, http.fields()))
        if named or inside.names_sets(given):  # ignored, or an unknown parameter
            raise ValueError("this engine has no item sets: start it with --grammar-backend static and --item-set")
        return original()
    from sglang_static.one_request import WANTED

    if (wanted := getattr(obj, WANTED, None)) is not None:
        tokenized = original()
        front_end.attach_list(*wanted, tokenized.sampling_params)
        return tokenized
    given, obj.sampling_params = obj.sampling_params, without_words(obj.sampling_params)
    if weighed := getattr(given.get(REFERENCE), "weighed", False):
        weights.ask(obj)
    try:
        tokenized = original()
    finally:
        obj.sampling_params = given  # the same request may be tokenized again
    wanted = given.get(REFERENCE) or given.get(HOLES)
    if isinstance(wanted, ItemRequest):
        wanted = front_end.checks.reference(wanted)
    if wanted is not None:
        front_end.attach(wanted, tokenized.sampling_params, len(input_ids or ()))
        if weighed:
            tokenized.sampling_params.custom_params[WEIGHT] = True
        setattr(obj, answers.EXPECTED, front_end.expected(wanted, obj, tokenized.sampling_params))
        setattr(obj, answers.CALLED, wanted if isinstance(wanted, str) else None)
    return tokenized


@hook(
    "sglang.srt.constrained.grammar_manager:GrammarManager.process_req_with_grammar",
    why="a request is given its item set",
)
def _process_grammar(original: Callable[..., Any], self: Any, req: Any) -> bool:
    backend = getattr(self.grammar_backend, "static_backend", None)
    admitted = None if backend is None else backend.admit(self, req)
    waits: bool = original() if admitted is None else admitted
    return waits


@hook(
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched",
    why="the rows of all item sets are filled at once, whichever grammar is the first of its batch",
)
def _fill_rows(original: Callable[..., Any], entries: Any, vocab_mask: Any) -> None:
    backend = sys.modules.get("sglang_static.backend")  # imported where there are item sets
    if backend is None:
        original()
    else:
        backend.fill_rows(original, entries, vocab_mask)


@hook(
    "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
    why="device memory for item sets, before the KV cache is sized",
    always=True,
)
def _load_model(original: Callable[..., Any], self: Any) -> Any:
    result = original()
    if not compat.is_ours(self.server_args) or self.is_draft_worker:
        return result
    config = StaticConfig.of(compat.options())
    if config.item_set_path != "host" and compat.why_host_path(self.server_args) is None:
        from sglang_static.drafts import say_what_is_not_masked
        from sglang_static.processor import ItemSetSampler

        self.item_set_sampler = ItemSetSampler(config, self.device, self.model_config.vocab_size)
        self.item_set_sampler.runner = self
        say_what_is_not_masked(compat.resolved(self.server_args))
    return result


@hook("sglang.srt.model_executor.model_runner:ModelRunner.alloc_memory_pool", why="a state for each request slot")
def _alloc_memory_pool(original: Callable[..., Any], self: Any) -> Any:
    result = original()
    sampler = getattr(self, "item_set_sampler", None)
    if sampler is not None:
        sampler.allocate(self.req_to_token_pool.req_to_token.shape[0], compat.verified_rows(self.server_args))
    return result


@hook(
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_split_prefill",
    why="which rows of a step have an item set",
)
def _forward(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    sampler = getattr(self.model_runner, "item_set_sampler", None)
    if sampler is not None and batch is not None:
        sampler.stage(batch)
    if batch is not None:
        weights.note(batch)
    return original()


@hook("sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask", why="the mask of these rows")
def _update_mask(original: Callable[..., Any], self: Any) -> None:
    from sglang_static.processor import current

    original()
    sampler = current()
    if sampler is not None:
        sampler.mask(self)


class _Synchronised:
    grammars = True


@hook(
    "sglang.srt.layers.sampler:Sampler._sync_token_ids_across_tp",
    why="all ranks must sample the same token, as with grammars",
)
def _sync_tokens(original: Callable[..., Any], sampling_info: Any) -> None:
    """SGLang lets its ranks agree on the tokens where it has grammars: masked rows have more near ties."""
    has_sets = getattr(sampling_info, "item_sets", None) is not None
    original(sampling_info=_Synchronised if has_sets else sampling_info)
