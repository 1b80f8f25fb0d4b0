"""What the subcommands `publish`, `update` and `report` do: for catalogues that change, and to look at one."""

from __future__ import annotations

import argparse
import os
import time
from datetime import UTC
from pathlib import Path
from typing import Any

import pyarrow as pa

import itemset
from itemset import page, published, report
from itemset.building import sources
from itemset.building.options import Encoding
from itemset.building.progress import reading_bar, steps_bar
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.storage import is_uri
from itemset.text import load_tokenizer


def output_file(given: str) -> Path:
    """Return the file to be written. Raises ItemSetError if it cannot be one."""
    output = Path(given)
    if is_uri(given):
        raise ItemSetError(f"cannot write {given}: name a file of this machine, and copy it there when it is whole")
    if output.is_dir() or not output.parent.is_dir():
        raise ItemSetError(f"cannot write {output}: name a file in a folder that exists")
    return output


def publish_usage(args: argparse.Namespace) -> str:
    """Put a folder given alone in its place. Return what is wrong with the arguments, "" if nothing is."""
    if args.rollback and not args.file:
        args.file, args.rollback = args.rollback, ""  # --rollback FOLDER, which argparse took for a version
    if args.list or args.rollback is not None:
        if args.folder or not args.file:
            return "publish --list and --rollback take one folder, and no file"
        args.file, args.folder = None, args.file
    elif not args.folder:
        return "publish needs an index file and a folder"
    return ""


def publish(args: argparse.Namespace) -> None:
    """Publish a file, go back to an earlier version, or list the versions."""
    if args.list:
        _list(args.folder)
        return
    start = time.perf_counter()
    if args.rollback is None:
        with reading_bar() as progress:
            version = published.publish(args.file, args.folder, keep=args.keep or published.KEEP, progress=progress)
    else:
        version = published.rollback(args.folder, args.rollback or None)
    report.print_table(
        [
            ("current", version.name),
            ("sequence", f"{version.sequence}"),
            ("published", _time(version)),
            ("items", f"{version.items:,}"),
            ("file", f"{version.path} ({version.bytes:,} bytes)"),
            ("kept", f"{len(published.versions(args.folder))} versions"),
            ("time", f"{time.perf_counter() - start:.1f} s"),
        ]
    )


def _list(folder: str) -> None:
    versions = published.versions(folder)
    print(f"{'version':<32} {'sequence':>8}  {'published':<20} {'items':>13} {'bytes':>15}")
    for number, one in enumerate(versions):
        line = f"{one.name:<32} {one.sequence:>8}  {_time(one)} {one.items:>13,} {one.bytes:>15,}"
        print(line if number else f"{line}  current")


def _time(version: published.Version) -> str:
    return f"{version.published.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def write_report(args: argparse.Namespace) -> None:
    """Write a page about an index."""
    output = output_file(args.output)
    for given in filter(None, (args.file, args.compare)):
        if output.exists() and os.path.exists(given) and output.samefile(given):
            raise ItemSetError(f"{output} is the index itself: give the page another name")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    s = itemset.load(args.file)
    before = itemset.load(args.compare) if args.compare else None
    for one in (s, before):
        if tokenizer is not None and one is not None:
            one.check_tokenizer(tokenizer)
    with steps_bar("report", page.PARTS) as done:
        text = page.page_of(
            s, str(args.file), before=before, name_before=str(args.compare), tokenizer=tokenizer, on_part=done
        )
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ItemSetError(f"cannot write {output}: {error.strerror}: choose a folder you can write to") from error
    report.print_table([("file", f"{output} ({len(text.encode()):,} bytes)")])


def update(args: argparse.Namespace) -> None:
    """Write the index of a set with items removed and added."""
    output = output_file(args.output)
    start = time.perf_counter()
    before = itemset.load(args.file)
    removed: Any = () if args.remove is None else sources.read_keys(args.remove, args.key)
    names = before.attributes.column_names
    source = sources.read(args.add, column=args.column, key=args.key, attributes=names) if args.add else sources.Items()
    new = _new_items(args, before, source) if args.add else {}
    after = before.updated(remove=_keys_as_in(before, removed, args.remove), missing_ok=args.missing_ok, **new)
    source.check_unchanged()
    after.save(output)
    # Of the keys, for an item may have several: one that is removed and added is both.
    added = 0 if new.get("add") is None else len(new["add"])
    report.print_table(
        [
            *report.facts(after),
            ("changes", f"{len(before.keys) + added - len(after.keys):,} keys removed, {added:,} added"),
            ("file", f"{output} ({output.stat().st_size:,} bytes)"),
            ("time", f"{time.perf_counter() - start:.1f} s"),
        ]
    )


def _new_items(args: argparse.Namespace, before: ItemSet, source: sources.Items) -> dict[str, Any]:
    """Return what `updated` takes of the items to add."""
    Encoding(args.tokenizer).check(args.add, texts=source.texts is not None)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    if tokenizer is not None:
        before.check_tokenizer(tokenizer)
    return {
        "add": source.tokens if source.texts is None else source.texts,
        "tokenizer": None if source.texts is None else tokenizer,
        "keys": None if source.keys is None else _keys_as_in(before, source.keys, args.add),
        "attributes": source.attributes if before.attributes.column_names else None,
    }


def _keys_as_in(before: ItemSet, keys: Any, path: str) -> Any:
    """Return keys as the set has them: a file does not say whether what is written as integers are strings."""
    if not len(keys) or keys.type == before.keys.type:
        return keys
    try:
        return keys.cast(before.keys.type)
    except pa.ArrowException as error:
        raise ItemSetError(f"{path}: the keys of the set are integers: {error}") from error
