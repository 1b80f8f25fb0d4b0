"""The engine's configuration: the flags of its command line, our backend's name, the path, and the sets' versions."""

import argparse
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from itemset.errors import ItemSetError
from itemset.serving.catalogue import with_versions
from itemset.serving.config import BACKEND, FLAGS, StaticConfig, add_flags, start_up, with_named
from itemset.serving.hooks import Later
from itemset.text import loading
from sglang_static import compat
from sglang_static.compat import hook

source_sets = Later("itemset.source_sets")  # which imports all that builds sets


def add_backend_name() -> None:
    """Let the flag take our name."""
    from sglang.srt.arg_groups.choices import GRAMMAR_BACKEND_CHOICES, add_grammar_backend_choices

    if BACKEND not in GRAMMAR_BACKEND_CHOICES:
        add_grammar_backend_choices([BACKEND])


@hook("sglang.srt.entrypoints.engine:Engine", extends=True)
def _add_engine_arguments(engine: Any) -> None:
    """Takes the plugin's options beside SGLang's own arguments."""
    make = engine.server_args_class  # SGLang's place for another class; a function of the same arguments serves as well

    def server_args(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in StaticConfig.__struct_fields__ if name in arguments}
        if given and arguments.get("grammar_backend") != BACKEND:
            raise ValueError(f"{', '.join(given)} need the static backend: add grammar_backend={BACKEND!r}")
        if given:
            tokenizer = partial(_tokenizer_of, SimpleNamespace(**arguments))
            compat.set_options(source_sets.with_indexes(given, tokenizer))
        return make(**arguments)

    engine.server_args_class = staticmethod(server_args)


def _tokenizer_of(arguments: Any) -> Any:
    """Return the tokenizer as SGLang loads it."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    names = ("tokenizer_mode", "trust_remote_code", "revision", "tokenizer_backend")
    named = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    path = getattr(arguments, "tokenizer_path", None) or arguments.model_path
    with loading(path):
        return get_tokenizer(path, **named)


@hook("sglang.srt.server_args:ServerArgs.add_cli_args", always=True)
def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """The flags --item-set, --item-set-path and --guided-decoding-backend."""
    original()
    add_flags(parser, device_where="wherever SGLang's sampler can be reached", alias_of="--grammar-backend")


@hook("sglang.srt.server_args:ServerArgs.from_cli_args", why="what these flags mean", always=True)
def _from_cli_args(original: Callable[..., Any], args: Any) -> Any:
    with start_up(from_flags=True):
        apply_flags(args)
    return original()


def apply_flags(args: argparse.Namespace) -> None:
    """Put what the flags say where every process finds it."""
    if getattr(args, "guided_decoding_backend", None):
        args.grammar_backend = BACKEND
    given = {option: value for option in FLAGS if (value := getattr(args, option, None))}
    if named := getattr(args, "item_set", None):
        given = with_named(compat.options(), named) | given
    if given and args.grammar_backend != BACKEND:
        raise ItemSetError(f"--item-set and --item-set-path need the static backend: add --grammar-backend {BACKEND}")
    if given:
        compat.set_options(given)


@hook("sglang.srt.server_args:ServerArgs.check_server_args", always=True)
def _check_server_args(original: Callable[..., Any], self: Any) -> Any:
    """Item sets and configuration are checked before a process starts; the sets' versions are chosen."""
    if compat.is_ours(self):
        with start_up():
            given = {**compat.options(), "item_set_versions": None}  # those of an engine before this one are no more
            config = StaticConfig.of(given)
            config.why_on_host(compat.why_host_path(self))  # raises if the options insist on the device
            compat.refuse_unmasked(self)
            if config.item_set_draft_head is not None:
                raise ValueError("item_set_draft_head works in vLLM only, on its model runner V2: leave it out")
            tokenizer = partial(_tokenizer_of, compat.resolved(self))
            compat.set_options(with_versions(source_sets.with_indexes(given, tokenizer)))
    return original()
