"""The subcommand `publish`: for sets that servers follow."""

import argparse
import json
import os
import time
import warnings
from datetime import UTC
from pathlib import Path
from typing import Any

import msgspec

from itemset import load, published
from itemset.building import sources
from itemset.building.dialects import WORDS
from itemset.building.progress import build_bar, reading_bar
from itemset.building.streams import format_of
from itemset.cli.build import add_encoding, choose_columns, how_of
from itemset.cli.options import Command, facts, positive, print_table
from itemset.errors import ItemSetError
from itemset.publishing import current_set, publish_source
from itemset.storage import SourceFile

SOURCE = "source.json"  # in a published set's folder: how its last file of items was read, but for leave to run code
_KEPT = ("column", "key", "keep_text", "tokenizer", "revision", "prefix", "escape", "attribute", *WORDS)


def add_to(command: Command) -> None:
    sub = command(
        "publish",
        publish,
        "itemset publish films.itemset sets/films\n  itemset publish films.csv sets/films --tokenizer DIR\n"
        "  itemset publish sets/films --rollback",
    )
    what = "the index file to publish, which is copied; or a file of items, as build reads, of which one is built"
    sub.add_argument("file", metavar="FILE", nargs="?", help=what)
    sub.add_argument("folder", metavar="FOLDER", nargs="?", help="the published set, made if it is missing")
    instead = sub.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print the versions, the current one first")
    instead.add_argument(
        "--rollback", metavar="VERSION", nargs="?", const="", help="go back to this version, or to the one before"
    )
    sub.add_argument("--force", action="store_true", help="publish a file that looks broken, too")
    instead.add_argument("--keep", metavar="N", type=positive, help=f"versions to keep (default: {published.KEEP})")
    named = "; of a file of items (default: as last time, else by its name)"
    sub.add_argument("--column", metavar="C", help=f"column of the items{named}")
    sub.add_argument("--key", metavar="K", help=f"column of the keys{named}; '' for the row numbers")
    add_encoding(sub)


def publish(args: argparse.Namespace) -> None:
    if args.rollback and not args.file:
        args.file, args.rollback = args.rollback, ""  # --rollback FOLDER, which argparse took for a version
    if args.list or args.rollback is not None:
        if args.folder or not args.file:
            args.error("publish --list and --rollback take one folder, and no file")
        args.file, args.folder = None, args.file
    elif not args.folder:
        args.error("publish needs an index file and a folder")
    if args.folder and os.path.isfile(args.folder):
        raise ItemSetError(f"{args.folder} is a file: give the file first, and then the folder of the published set")
    source = bool(args.file) and _is_source(args.file)
    if not source and any(getattr(args, name) for name in (*_KEPT, "keys_repeat", "vocab_size", "memory", "force")):
        args.error("publish takes the options of build with a file of items alone")
    if args.list:
        _list(args.folder)
        return
    start, more = time.perf_counter(), list[tuple[str, str]]()
    if source:
        version, more = _publish_source(args)
    elif args.rollback is None:
        with reading_bar() as progress:
            version = published.publish(args.file, args.folder, keep=args.keep or published.KEEP, progress=progress)
    else:
        version = published.rollback(args.folder, args.rollback or None)
    print_table(
        [
            ("current", version.name),
            ("sequence", f"{version.sequence}"),
            ("published", _time(version)),
            ("items", f"{version.items:,}"),
            ("file", f"{version.path} ({version.bytes:,} bytes)"),
            ("kept", f"{len(published.versions(args.folder))} versions"),
            *more,
            ("time", f"{time.perf_counter() - start:.1f} s"),
        ]
    )


def _is_source(file: str) -> bool:
    """Return whether a file holds items, by its suffix: a folder or a glob does, all else is an index."""
    kind = format_of(SourceFile(file, file, 0, None, None))
    return os.path.isdir(file) or file.endswith("/") or "*" in file or kind in sources.SUFFIXES


def _publish_source(args: argparse.Namespace) -> tuple[published.Version, list[tuple[str, str]]]:
    args.source, path = args.file, Path(args.folder, SOURCE)
    _fill_in(args, path)
    with warnings.catch_warnings(action="ignore"):  # `publish_source` gives them again
        before = current_set(args.folder)
    taken = choose_columns(args, Path(args.folder).name, before)
    kept: dict[str, Any] = {name: getattr(args, name) for name in ("keys_repeat", "force")}
    kept["keep"] = args.keep or published.KEEP
    with build_bar() as progress:
        version, changed = publish_source(args.source, args.folder, progress=progress, **kept, **how_of(args))
    if args.tokenizer and os.path.isdir(args.tokenizer):
        args.tokenizer = os.path.abspath(args.tokenizer)
    path.write_text(json.dumps({name: getattr(args, name) for name in _KEPT if getattr(args, name) is not None}))
    rows = [("read", taken), *facts(load(version.path))[1:]]
    return version, rows if changed is None else [*rows, ("changes", str(changed))]


def _fill_in(args: argparse.Namespace, path: Path) -> None:
    """Take what is not given as it was when a file was last published here."""
    try:
        last = msgspec.json.decode(path.read_bytes(), type=dict[str, str | bool | list[str]])
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise ItemSetError(f"{path} cannot be read ({error}): delete it, and say again how the file is read") from error
    if args.key is not None:
        last.pop("keep_text", None)
    if args.keep_text:
        last.pop("key", None)
    for name in _KEPT:
        if getattr(args, name) in (None, False, []) and name in last:
            setattr(args, name, last[name])


def _list(folder: str) -> None:
    versions = published.versions(folder)
    print(f"{'version':<32} {'sequence':>8}  {'published':<20} {'items':>13} {'bytes':>15}")
    for number, one in enumerate(versions):
        line = f"{one.name:<32} {one.sequence:>8}  {_time(one)} {one.items:>13,} {one.bytes:>15,}"
        print(line if number else f"{line}  current")


def _time(version: published.Version) -> str:
    return f"{version.published.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
