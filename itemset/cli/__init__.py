"""The `itemset` command. One file a group of subcommands, which is imported when one of them is run."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from itemset.errors import ItemSetError, ItemSetWarning

_COMMANDS = {  # by its name: the file, and what it does
    "build": ("build", "build an index file from the items of a file, a folder of files, or a URI"),
    "update": ("build", "write an index with items removed and added, or with those of a whole new file, as a build "
               "would give it"),
    "info": ("inspect", "say what an index file holds"),
    "verify": ("inspect", "check an index file from end to end"),
    "lookup": ("inspect", "print items as lines of key, tokens and (with --tokenizer) text, a line for each key; "
               "options may be repeated"),
    "publish": ("publish", "make an index file, or a whole file of items, the current version of a published set, a "
                "folder that servers follow; list its versions, or go back to an earlier one"),
    "serve": ("serve", "start vLLM or SGLang with a file of items, and show what to ask it"),
    "bench": ("bench", "ask a server for lists: how many of its answers are in the set, how good and how fast they "
              "are"),
    "train-head": ("train", "teach a model and a draft head which item follows, so that a list takes one pass of the "
                   "model"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, 1 on bad input (one line on stderr) or 130 on Ctrl-C; bad usage exits with 2."""
    alone, argv = argv is None, sys.argv[1:] if argv is None else argv
    parser = _parser(argv)
    args, more = parser.parse_known_args(argv)
    args.more, args.alone = more, alone  # alone: nobody else uses this process
    if more and args.command != "serve":
        parts = args.command in ("build", "update") and not any(word.startswith("-") for word in more)
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
    except OSError as error:  # of a disk that is full, a folder that cannot be written
        print(f"itemset: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what a command's words say, for who runs it in this process. Bad usage exits with 2."""
    return _parser(argv).parse_args(argv)


def _show_warning(original: Any, message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
    """Show our own warnings as one line, like errors."""
    if issubclass(category, ItemSetWarning):
        print(f"itemset: {message}", file=sys.stderr)
    else:
        original(message, category, *args, **kwargs)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="itemset", description="Finite sets of items (token sequences) as index files: build, look into, check."
    )
    parser.set_defaults(alone=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, example: str) -> argparse.ArgumentParser:
        _, summary = _COMMANDS[name]
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, command=name, error=parser.error)
        return sub

    chosen = next((_COMMANDS[word][0] for word in argv if word in _COMMANDS), "")
    for name, (group, summary) in _COMMANDS.items():
        if group != chosen:
            commands.add_parser(name, help=summary)
        elif name not in commands.choices:
            import_module(f"itemset.cli.{group}").add_to(command)
    return parser
