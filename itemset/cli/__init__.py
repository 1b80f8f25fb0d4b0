"""The `itemset` command: builds index files, looks into them and publishes them. One file a group of subcommands."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from itemset.cli import bench, build, inspect, publish, serve, train
from itemset.errors import ItemSetError, ItemSetWarning


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, 1 on bad input (one line on stderr) or 130 on Ctrl-C; bad usage exits with 2."""
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    writes = args.run in (build.build, build.update)
    args.more, args.alone = more, argv is None  # alone: nobody else uses this process
    if more and args.run is not serve.serve:
        parts = writes and not any(word.startswith("-") for word in more)
        advice = "; for all files of a pattern put it in quotes, as in 'parts/*.parquet'" if parts else ""
        parser.error(f"unrecognized arguments: {' '.join(more)}{advice}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ItemSetWarning)
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            args.run(args)
        sys.stdout.flush()
    except ItemSetError as error:
        print(f"itemset: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("itemset: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough; Python must not flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what a command's words say, for who runs it in this process. Bad usage exits with 2."""
    return _parser().parse_args(argv)


def _show_warning(original: Any, message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
    """Show our own warnings as one line, like errors."""
    if issubclass(category, ItemSetWarning):
        print(f"itemset: {message}", file=sys.stderr)
    else:
        original(message, category, *args, **kwargs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="itemset", description="Finite sets of items (token sequences) as index files: build, look into, check."
    )
    parser.set_defaults(alone=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, error=parser.error)
        return sub

    for group in (build, inspect, publish, serve, bench, train):
        group.add_to(command)
    return parser
