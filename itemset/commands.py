"""What the subcommand `publish` does."""

from __future__ import annotations

import argparse
import time
from datetime import UTC

from itemset import published, report


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
        version = published.publish(args.file, args.folder, keep=args.keep or published.KEEP)
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
