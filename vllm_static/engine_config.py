"""The engine's configuration: the flags of its command line, our backend's name, the path, and the sets' versions."""

import argparse
import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from itemset.errors import ItemSetError
from itemset.serving.catalogue import with_versions
from itemset.serving.config import BACKEND, FLAGS, StaticConfig, add_flags, from_environment, start_up, with_named
from itemset.text import loading
from vllm_static import compat
from vllm_static.compat import hook

VARIABLE = "VLLM_STATIC"
MIDDLEWARE = "vllm_static.front.http.ItemSetWords"


@hook("vllm.config.structured_outputs:StructuredOutputsConfig", extends=True)
def _add_backend_name(structured: Any) -> None:
    """The backend's name, in a Literal; its validator judges the other fields as xgrammar's."""
    from pydantic.dataclasses import rebuild_dataclass

    known = get_args(structured.__annotations__["backend"])
    if BACKEND in known:
        return
    names = Literal[(*known, BACKEND)]  # type: ignore[valid-type]
    structured.__annotations__["backend"] = names
    structured.__dataclass_fields__["backend"].type = names
    for validator in structured.__pydantic_decorators__.model_validators.values():
        validator.func = partial(_validate, validator.func)
    rebuild_dataclass(structured, force=True)


def _validate(validate: Callable[[Any], Any], structured: Any) -> Any:
    if structured.backend == BACKEND:
        hook.ask()
        dataclasses.replace(structured, backend="xgrammar")  # which judges the other fields
        return structured
    return validate(structured)


def add_backend_name(module: Any) -> None:
    """Do the same as soon as the module of that class is imported. Imports nothing: vLLM itself is being imported."""
    with contextlib.suppress(AttributeError, KeyError):  # another version: `compat.install` says so
        _add_backend_name(module.StructuredOutputsConfig)


@hook("vllm.engine.arg_utils:EngineArgs.add_cli_args", always=True)
def _add_cli_args(original: Callable[..., Any]) -> Any:
    """The flags --item-set and --guided-decoding-backend."""
    parser = original()
    add_flags(parser, device_where="where vLLM uses model runner V2", alias_of="--structured-outputs-config.backend")
    return parser


@hook("vllm.engine.arg_utils:EngineArgs.from_cli_args", why="what these flags mean", always=True)
def _from_cli_args(original: Callable[..., Any], args: Any) -> Any:
    with start_up(from_flags=True):
        apply_flags(args)
        if _backend(args) == BACKEND:
            _add_indexes(args)
            _add_versions(args)
    return original()


def apply_flags(args: argparse.Namespace) -> None:
    """Put what the flags say where vLLM's own configuration has its place for it."""
    if MIDDLEWARE not in getattr(args, "middleware", [MIDDLEWARE]):
        args.middleware = [MIDDLEWARE, *args.middleware]  # innermost: others may compress answers
    if getattr(args, "guided_decoding_backend", None):
        _choose_backend(args)
    for option in FLAGS:
        if given := getattr(args, option, None):
            args.additional_config = {**(args.additional_config or {}), option: given}
    if named := getattr(args, "item_set", None):
        if _backend(args) != BACKEND:
            raise ItemSetError("--item-set needs the static backend: add --structured-outputs-config.backend static")
        args.additional_config = with_named(getattr(args, "additional_config", None) or {}, named)
        args.item_set = None  # with several API servers, each reads the same flags again


def apply_environment(args: Any) -> None:
    """Let VLLM_STATIC, options as JSON, choose our backend where no other is: for trainers that build their engine."""
    if os.environ.get(VARIABLE) and _backend(args) in (None, "auto", BACKEND):
        args.additional_config = {**from_environment(VARIABLE), **(args.additional_config or {})}
        _choose_backend(args)


def _backend(args: Any) -> str | None:
    """Return the backend that is configured, in a dict or in vLLM's class."""
    configured = getattr(args, "structured_outputs_config", None)
    return configured.get("backend") if isinstance(configured, dict) else getattr(configured, "backend", None)


def _choose_backend(args: Any) -> None:
    from vllm.config import StructuredOutputsConfig

    current = getattr(args, "structured_outputs_config", None) or StructuredOutputsConfig()
    if isinstance(current, dict):
        args.structured_outputs_config = {**current, "backend": BACKEND}
    else:
        args.structured_outputs_config = dataclasses.replace(current, backend=BACKEND)


def _add_indexes(args: Any) -> None:
    """Put an index in place of each source in `additional_config`, built with the tokenizer of these arguments."""
    if isinstance(getattr(args, "additional_config", None), dict):
        from itemset.source_sets import with_indexes

        args.additional_config = with_indexes(args.additional_config, partial(_tokenizer_of, args))


def _tokenizer_of(args: Any) -> Any:
    """Return the tokenizer as vLLM loads it for these engine arguments."""
    from vllm.tokenizers import get_tokenizer

    given = {name: getattr(args, name, None) for name in ("tokenizer_mode", "trust_remote_code", "download_dir")}
    revision = getattr(args, "tokenizer_revision", None) or getattr(args, "revision", None)
    named = {name: value for name, value in given.items() if value is not None}
    with loading(path := args.tokenizer or args.model):
        return get_tokenizer(path, revision=revision, **named)


def _add_versions(config: Any) -> None:
    """Put the sets' versions into the `additional_config` of vLLM's flags or configuration, for all processes."""
    if isinstance(getattr(config, "additional_config", None), dict):
        config.additional_config = with_versions(config.additional_config)


@hook("vllm.engine.arg_utils:EngineArgs.create_engine_config", always=True)
def _create_engine_config(original: Callable[..., Any], self: Any) -> Any:
    """Sources become indexes; the device path's processor and the sets' versions are put where every process reads
    them."""
    apply_environment(self)
    if _backend(self) == BACKEND:
        with start_up():
            _add_indexes(self)
    config = original()
    if not compat.is_ours(config):
        return config

    with start_up():
        reason = StaticConfig.of(config.additional_config).why_on_host(compat.why_host_path(config))
        if int(os.environ.get("VLLM_USE_RUST_FRONTEND", "0")):
            raise ItemSetError("VLLM_USE_RUST_FRONTEND=1 serves without our front end: unset it, or no set can hold")
        _refuse_speculation(config)
        _add_versions(config)
    if reason is None and not compat.on_device_path(config):
        config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), compat.PROCESSOR]
    return config


@hook("vllm.config.vllm:VllmConfig.compute_hash", always=True)
def _compute_hash(original: Callable[..., Any], self: Any) -> Any:
    """Another item set must not compile the model anew: vLLM's cache of graphs goes by this name."""
    options, ours = self.additional_config, StaticConfig.__struct_fields__
    if not isinstance(options, dict) or options.keys().isdisjoint(ours):
        return original()
    plain = copy.copy(self)
    plain.additional_config = {key: value for key, value in options.items() if key not in ours}
    return original(self=plain)


def _refuse_speculation(vllm_config: Any) -> None:
    """Raises ItemSetError if vLLM accepts drafts by a fixed rate, whatever the mask says, or could not start."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    on_v1_cpu = not vllm_config.use_v2_model_runner and compat.platforms.current_platform.is_cpu()
    if speculative.method == "ngram_gpu" and on_v1_cpu:  # V1 wants pinned memory for it, which a CPU has not
        raise ItemSetError(
            "the speculative method ngram_gpu needs model runner V2 or a GPU, and this is V1 on a CPU: choose ngram"
        )
    if speculative.rejection_sample_method == "synthetic":
        raise ItemSetError(
            "rejection_sample_method=synthetic accepts drafts without looking at them, so no item set can hold: "
            "leave it out"
        )
