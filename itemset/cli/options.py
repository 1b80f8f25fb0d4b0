"""What subcommands share: option values, the tokenizer, tables of names and values."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from itemset.item_set import ItemSet
from itemset.text import load_tokenizer
from itemset.trie.attributes import kind_of

Command = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
"""Adds a subcommand, by its name, function and example. `args.error` of its arguments is for bad usage."""


def tokenizer_of(args: argparse.Namespace, item_set: ItemSet | None = None) -> Any:
    """Return the tokenizer of --tokenizer, None without. Raises ItemSetError if it is not that of the set."""
    if not args.tokenizer:
        return None
    tokenizer: Any = args.tokenizer  # a server gives its own
    if isinstance(tokenizer, str):
        alone = args.alone and not args.trust_remote_code  # such code may want torch
        with _without_torch() if alone else nullcontext():
            tokenizer = load_tokenizer(tokenizer, trust_remote_code=args.trust_remote_code, revision=args.revision)
    if item_set is not None:
        item_set.check_tokenizer(tokenizer)
    return tokenizer


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let transformers, if it is first imported here, find no torch, beside which it imports all of its models.

    Tokenizers are the same, some six seconds earlier. Models cannot be loaded in this process afterwards.
    """
    if sys.modules.keys() & {"torch", "transformers"}:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def add_tokenizer(command: argparse.ArgumentParser, what: str, **options: Any) -> None:
    """Add the option of a tokenizer, and those of how it is loaded."""
    command.add_argument("--tokenizer", metavar="DIR", help=what, **options)
    command.add_argument("--trust-remote-code", action="store_true", help="run the code that a tokenizer brings")
    command.add_argument("--revision", metavar="R", help="of a tokenizer by its Hugging Face name")


def token_list(text: str) -> list[int]:
    """Read token ids such as 1,2,3."""
    tokens = text.replace(",", " ").split()
    if not all(token.isdecimal() and int(token) < 2**31 for token in tokens):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3")
    return [int(token) for token in tokens]


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def size(text: str) -> int:
    """Read a size such as 4GB, 500MB or 2GiB; return its bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4GB, 500MB or 2GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(unit or " ")))


def facts(s: ItemSet) -> list[tuple[str, str]]:
    """Return what an item set holds, as names and values for people."""
    return [
        ("items", f"{len(s):,}"),
        ("duplicates", f"{s.duplicates:,} folded"),
        ("keys", f"{len(s.keys):,}; items with several: {s.shared:,}"),
        ("attributes", ", ".join(f"{field.name} ({kind_of(field.type)})" for field in s.attributes.schema) or "none"),
        ("tokens", f"{s.shortest} (shortest item) to {s.longest} (longest)"),
        ("size", f"{s.nbytes:,} bytes, {s.nbytes / len(s):.2f} an item, keys not counted"),
    ]


def print_table(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name:<12} {value}")
