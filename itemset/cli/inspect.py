"""The subcommands `info`, `verify` and `lookup`: what looks into index files."""

import argparse
from collections.abc import Sequence
from typing import Any

import itemset
from itemset.building.progress import reading_bar
from itemset.cli.options import Command, add_tokenizer, facts, print_table, token_list, tokenizer_of
from itemset.errors import ItemSetError
from itemset.storage import file_at
from itemset.text import encode


def add_to(command: Command) -> None:
    sub = command("info", _info, "itemset info films.itemset")
    sub.add_argument("file", metavar="FILE")

    sub = command("verify", _verify, "itemset verify films.itemset")
    sub.add_argument("file", metavar="FILE")

    sub = command("lookup", _lookup, 'itemset lookup films.itemset --key 50 --text "Star Wars (1977)" --tokenizer DIR')
    sub.add_argument("file", metavar="FILE")
    many: dict[str, Any] = {"action": "append", "default": []}
    sub.add_argument("--tokens", metavar="1,2,3", type=token_list, help="the item of these tokens", **many)
    sub.add_argument("--key", metavar="K", help="the item with this key", **many)
    sub.add_argument("--text", metavar="T", help="the item of this text", **many)
    add_tokenizer(sub, "the tokenizer that the set was built with")


def _info(args: argparse.Namespace) -> None:
    s = itemset.load(args.file, check=False)
    size = file_at(args.file).size
    tokenizer = f"{s.tokenizer.name} ({s.tokenizer.fingerprint})" if s.tokenizer else "none recorded"
    print_table(
        [
            *facts(s),
            ("vocabulary", "not recorded" if s.vocab_size is None else f"{s.vocab_size:,}"),
            ("tokenizer", tokenizer),
            ("prefix", repr(s.prefix) if s.prefix else "none"),
            ("escape", s.escape or "none"),
            ("digest", s.digest),
            ("file", f"{args.file} ({size:,} bytes)"),
        ]
    )
    print(f"\n{'section':<12} {'bytes':>16} {'bytes/item':>11} {'share':>7}")
    for name, nbytes in s.sections.items():
        print(f"{name:<12} {nbytes:>16,} {nbytes / len(s):>11.2f} {nbytes / size:>7.1%}")


def _verify(args: argparse.Namespace) -> None:
    with reading_bar() as progress:
        s = itemset.verify(args.file, progress=progress)
    print(
        f"{args.file} is sound: header, checksums of {len(s.sections)} sections, digest, "
        f"and the tables to the end of each of {len(s):,} items"
    )


def _lookup(args: argparse.Namespace) -> None:
    if not (args.tokens or args.key or args.text):
        args.error("lookup needs at least one of --tokens, --key, --text")
    s = itemset.load(args.file)
    tokenizer = tokenizer_of(args, s)
    if args.text and tokenizer is None:
        raise ItemSetError("--text needs the tokenizer of the set: give it with --tokenizer DIR")
    for item in args.tokens:
        _print_item(s.keys_of([item])[0], item, tokenizer)
    for text in args.text:
        item = encode([text], tokenizer, prefix=s.prefix, escape=s.escape, name="the text")[0].tolist()
        if s.find(item) is None:
            raise ItemSetError(f"the text {text!r} is no item of the set")
        _print_item(s.keys_of([item])[0], item, tokenizer)
    integers = "keys" in s.sections  # string keys have two sections, of other names
    for key in args.key:
        try:
            wanted = int(key) if integers else key
        except ValueError:
            raise ItemSetError(f"the keys of this set are integers, not {key!r}: give an integer") from None
        _print_item([wanted], s.tokens([wanted])[0], tokenizer)


def _print_item(keys: Sequence[int | str], tokens: list[int], tokenizer: Any) -> None:
    text = [] if tokenizer is None else [repr(tokenizer.decode(tokens))]
    for key in keys:
        print(key, ",".join(map(str, tokens)), *text, sep="\t")
