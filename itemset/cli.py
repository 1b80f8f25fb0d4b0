"""The `itemset` command: build an index file, and ask one."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import itemset
from itemset import published, report
from itemset.building import sources
from itemset.building.external import build_external
from itemset.building.memory import available_memory, needed_memory
from itemset.building.options import Encoding
from itemset.building.progress import build_bar, reading_bar
from itemset.building.scratch import outcome, scratch_folder, state_of
from itemset.commands import output_file, publish, publish_usage, update, write_report
from itemset.errors import ItemSetError, ItemSetWarning
from itemset.item_set import ItemSet
from itemset.storage import file_at
from itemset.text import encode, load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, 1 on bad input (one line on stderr) or 130 on Ctrl-C; bad usage exits with 2."""
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    if more:
        parts = args.run in (_build, update) and not any(word.startswith("-") for word in more)
        advice = "; for all files of a pattern put it in quotes, as in 'parts/*.parquet'" if parts else ""
        parser.error(f"unrecognized arguments: {' '.join(more)}{advice}")
    if args.run is _lookup and not (args.tokens or args.key or args.text or args.children):
        parser.error("lookup needs at least one of --tokens, --key, --text, --children")
    if args.run is _build and args.shards and not args.engine:
        parser.error("--shards is for what a cluster sorts: it needs --engine")
    if args.run is update and not (args.add or args.remove):
        parser.error("update needs --add, --remove or both")
    if args.run is publish and (usage := publish_usage(args)):
        parser.error(usage)
    writes = args.run in (_build, update)
    before = state_of(args.output) if writes else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ItemSetWarning)
            warnings.showwarning = _show_warning(warnings.showwarning)
            args.run(args)
        sys.stdout.flush()
    except ItemSetError as error:
        print(f"itemset: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        end = f", {outcome(args.output, before)}" if writes else ""
        print(f"itemset: interrupted{end}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough; Python must not flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_warning(original: Any) -> Any:
    """Return a `warnings.showwarning` that shows our own as one line, like errors."""

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, ItemSetWarning):
            print(f"itemset: {message}", file=sys.stderr)
        else:
            original(message, category, *args, **kwargs)

    return show


def _build(args: argparse.Namespace) -> None:
    output = output_file(args.output)
    if output.exists() and os.path.exists(args.source) and output.samefile(args.source):
        raise ItemSetError(f"{output} is the source itself: give the index file another name")
    start = time.perf_counter()
    allowed = available_memory() // 2 if args.memory is None else args.memory
    on_disk, how = True, "in order already (--sorted)" if args.sorted else "on a Ray cluster (--engine ray)"
    if not args.sorted and args.engine is None:
        needed = needed_memory(args.source, args.column, args.key, args.attribute)
        reason = f"about {_gigabytes(needed)} needed in memory, {_gigabytes(allowed)} allowed"
        on_disk = needed > allowed
        how = f"{'on disk' if on_disk else 'in memory'}: {reason}"
        if on_disk:
            print(f"itemset: sorting on disk, beside {output}: {reason} (--memory)", file=sys.stderr)
    s = _build_on_disk(args, output, allowed) if on_disk else _build_in_memory(args, output)
    report.print_table(
        [
            *report.facts(s),
            ("file", f"{output} ({output.stat().st_size:,} bytes)"),
            ("sorted", how),
            ("time", f"{time.perf_counter() - start:.1f} s"),
        ]
    )


def _build_on_disk(args: argparse.Namespace, output: Path, memory: int) -> ItemSet:
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    try:
        with scratch_folder(output) as folder, build_bar() as progress:
            s = build_external(
                args.source,
                column=args.column,
                key=args.key,
                attributes=args.attribute,
                tokenizer=tokenizer,
                prefix=args.prefix,
                escape=args.escape,
                vocab_size=args.vocab_size,
                in_order=args.sorted,
                engine=args.engine,
                shards=args.shards,
                memory=memory,
                folder=folder,
                progress=progress,
            )
            progress("writing", 0.0)
            s.save(output)
            progress("writing", 1.0)
    except OSError as error:
        raise ItemSetError(f"cannot write {output}: {error.strerror}: choose a folder you can write to") from error
    return s


def _build_in_memory(args: argparse.Namespace, output: Path) -> ItemSet:
    source = sources.read(args.source, column=args.column, key=args.key, attributes=args.attribute)
    encoding = Encoding(args.tokenizer, args.prefix, args.escape, args.vocab_size)
    encoding.check(args.source, texts=source.texts is not None)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    given: dict[str, Any] = {"keys": source.keys, "attributes": source.attributes, "tokenizer": tokenizer}
    if source.texts is None:
        s = itemset.build(source.tokens, vocab_size=args.vocab_size, **given)
        source.check_unchanged()
    else:
        s = itemset.build_text(source.texts, prefix=args.prefix, escape=args.escape, progress=True, **given)
    s.save(output)
    return s


def _info(args: argparse.Namespace) -> None:
    s = itemset.load(args.file, check=False)
    size = file_at(args.file).size
    tokenizer = f"{s.tokenizer.name} ({s.tokenizer.fingerprint})" if s.tokenizer else "none recorded"
    report.print_table(
        [
            *report.facts(s),
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
    print("", *report.describe(s), sep="\n")


def _verify(args: argparse.Namespace) -> None:
    with reading_bar() as progress:
        s = itemset.verify(args.file, progress=progress)
    print(
        f"{args.file} is sound: header, checksums of {len(s.sections)} sections, digest, "
        f"and the tables to the end of each of {len(s):,} items"
    )


def _lookup(args: argparse.Namespace) -> None:
    s = itemset.load(args.file)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    if tokenizer is not None:
        s.check_tokenizer(tokenizer)
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
        wanted = _integer_key(key) if integers else key
        _print_item([wanted], s.tokens([wanted])[0], tokenizer)
    for prefix in args.children:
        labels, terminal = s.children(prefix)
        print(f"{_joined(prefix)}\t{'an item ends here' if terminal else 'no item ends here'}", end="\t")
        print(f"{len(labels):,} next: {_joined(labels.tolist())}" if len(labels) else "nothing next")


def _print_item(keys: Sequence[int | str], tokens: list[int], tokenizer: Any) -> None:
    for key in keys:
        print(key, _joined(tokens), *([] if tokenizer is None else [repr(tokenizer.decode(tokens))]), sep="\t")


def _integer_key(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ItemSetError(f"the keys of this set are integers, not {key!r}: give an integer") from None


def _joined(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens))


def _token_list(text: str) -> list[int]:
    tokens = text.replace(",", " ").split()
    if not all(token.isdecimal() and int(token) < 2**31 for token in tokens):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3")
    return [int(token) for token in tokens]


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4GB, 500MB or 2GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(unit or " ")))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="itemset", description="Finite sets of items (token sequences) as index files: build, look into, check."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    sub = command(
        "build",
        _build,
        "build an index file from the items of a file, a folder of files, or a URI",
        "itemset build films.csv --column title --key movie_id --tokenizer DIR -o films.itemset",
    )
    sub.add_argument(
        "source",
        metavar="SOURCE",
        help=".txt, .csv, .tsv, .jsonl, .ndjson, .parquet, or .npy [N, L]: a file, a folder of "
        "such files, a glob in quotes ('parts/*.parquet'), or one of them under a URI (s3://, gs://, hf://, https://)",
    )
    sub.add_argument("--column", metavar="C", help="column of the items: texts or lists of token ids")
    sub.add_argument("--key", metavar="K", help="column of the keys: integers or strings (default: row numbers)")
    sub.add_argument(
        "--attribute",
        metavar="A",
        action="append",
        default=[],
        help="column to keep in the index, for filters: bools, numbers, strings, dates, times or lists of strings; "
        "may be repeated",
    )
    sub.add_argument("--tokenizer", metavar="DIR", help="the model's tokenizer: a folder or a Hugging Face name")
    sub.add_argument("--prefix", metavar="S", default="", help="text before every item, for instance a space")
    sub.add_argument(
        "--escape",
        choices=["json", "text"],
        help="for items that stand inside longer answers: in JSON strings (escaped as such), or in other text",
    )
    sub.add_argument("--vocab-size", metavar="N", type=_positive, help="refuse token ids of N and above")
    sub.add_argument(
        "--memory",
        metavar="SIZE",
        type=_size,
        help="memory to sort in, for instance 4GB (default: half of what is available); "
        "an input that needs more is sorted on disk, beside FILE",
    )
    sub.add_argument(
        "--sorted",
        action="store_true",
        help="the items ascend already by their token ids, an item before those that it begins: nothing is sorted",
    )
    sub.add_argument(
        "--engine",
        choices=["ray"],
        help="read, encode and sort on a Ray cluster: that of RAY_ADDRESS, one that runs here, or a new one",
    )
    sub.add_argument(
        "--shards",
        metavar="FOLDER",
        help="with --engine: a new folder or URI for what the cluster sorts, which all its machines share "
        "(default: beside FILE, for the time of the build)",
    )
    sub.add_argument("-o", "--output", metavar="FILE", required=True, help="the index file to write")

    sub = command("info", _info, "say what an index file holds", "itemset info films.itemset")
    sub.add_argument("file", metavar="FILE")

    sub = command(
        "report",
        write_report,
        "write a page about an index file: sizes, levels, what a model chooses, attributes, some items",
        "itemset report films.itemset --tokenizer DIR -o films.html",
    )
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--compare", metavar="FILE", help="an earlier index file: which items came and went")
    sub.add_argument("--tokenizer", metavar="DIR", help="the tokenizer that the set was built with, to show texts")
    sub.add_argument("-o", "--output", metavar="FILE", required=True, help="the HTML file to write")

    sub = command("verify", _verify, "check an index file from end to end", "itemset verify films.itemset")
    sub.add_argument("file", metavar="FILE")

    sub = command(
        "update",
        update,
        "write an index with items removed and added, the one that building it all again would give",
        "itemset update films.itemset --add new.csv --column title --key movie_id --tokenizer DIR --remove gone.txt "
        "-o films2.itemset",
    )
    sub.add_argument("file", metavar="FILE", help="the index file to begin with; -o may name it, too")
    sub.add_argument("--add", metavar="SOURCE", help="items to add, in any format that build reads")
    sub.add_argument("--column", metavar="C", help="column of the items to add: texts or lists of token ids")
    sub.add_argument("--key", metavar="K", help="column of the keys (default: numbers after the highest key)")
    sub.add_argument("--tokenizer", metavar="DIR", help="the tokenizer that the set was built with")
    sub.add_argument("--remove", metavar="KEYS", help="keys to remove: lines of a .txt file, or the column --key")
    sub.add_argument("--missing-ok", action="store_true", help="keys to remove need not be in the set")
    sub.add_argument("-o", "--output", metavar="FILE", required=True, help="the index file to write")

    sub = command(
        "publish",
        publish,
        "make an index file the current version of a published set, a folder that servers follow; list its versions, "
        "or go back to an earlier one",
        "itemset publish films.itemset sets/films\n  itemset publish sets/films --rollback",
    )
    sub.add_argument("file", metavar="FILE", nargs="?", help="the index file to publish; it is copied")
    sub.add_argument("folder", metavar="FOLDER", nargs="?", help="the published set, made if it is missing")
    instead = sub.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print the versions, the current one first")
    instead.add_argument(
        "--rollback", metavar="VERSION", nargs="?", const="", help="go back to this version, or to the one before"
    )
    instead.add_argument("--keep", metavar="N", type=_positive, help=f"versions to keep (default: {published.KEEP})")

    sub = command(
        "lookup",
        _lookup,
        "print items as lines of key, tokens and (with --tokenizer) text, a line for each key; options may be repeated",
        'itemset lookup films.itemset --key 50 --text "Star Wars (1977)" --tokenizer DIR',
    )
    sub.add_argument("file", metavar="FILE")
    many: dict[str, Any] = {"action": "append", "default": []}
    sub.add_argument("--tokens", metavar="1,2,3", type=_token_list, help="the item of these tokens", **many)
    sub.add_argument("--key", metavar="K", help="the item with this key", **many)
    sub.add_argument("--text", metavar="T", help="the item of this text", **many)
    sub.add_argument("--children", metavar="1,2", type=_token_list, help="tokens that may come next", **many)
    sub.add_argument("--tokenizer", metavar="DIR", help="the tokenizer that the set was built with")
    return parser
