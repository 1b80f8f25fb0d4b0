"""The subcommand `publish`: for sets that servers follow."""

import argparse
import time
from datetime import UTC

from itemset import published
from itemset.building.progress import reading_bar
from itemset.cli.options import Command, positive, print_table


def add_to(command: Command) -> None:
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
    instead.add_argument("--keep", metavar="N", type=positive, help=f"versions to keep (default: {published.KEEP})")


def publish(args: argparse.Namespace) -> None:
    """Publish a file, go back to an earlier version, or list the versions."""
    if args.rollback and not args.file:
        args.file, args.rollback = args.rollback, ""  # --rollback FOLDER, which argparse took for a version
    if args.list or args.rollback is not None:
        if args.folder or not args.file:
            args.error("publish --list and --rollback take one folder, and no file")
        args.file, args.folder = None, args.file
    elif not args.folder:
        args.error("publish needs an index file and a folder")
    if args.list:
        _list(args.folder)
        return
    start = time.perf_counter()
    if args.rollback is None:
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
