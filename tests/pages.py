"""Pages of docs/ as a reader follows them: blocks run in order, beside a server that follows the folder `sets`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from servers import wait_for

from itemset import cli, published
from itemset.cli.serve import named
from itemset.source_sets import with_indexes
from itemset.text import load_tokenizer

DOCS = Path(__file__).resolve().parent.parent / "docs"
TUTORIALS = ("recommender", "json_field", "labels", "packages", "codes", "sql", "tools")  # that ask a server
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def site() -> dict[str, list[tuple[str, str]]]:
    """Each page's blocks of code, by its name: their language and their lines."""
    pages = sorted(DOCS.rglob("*.md"))
    return {str(page.relative_to(DOCS)): BLOCK.findall(page.read_text()) for page in pages}


def commands(block: str) -> list[list[str]]:
    """The words of each command of a shell block, without variables that stand before it."""
    found, open_lines = [], ""
    for line in block.splitlines():
        open_lines += line
        try:
            words = shlex.split(open_lines, comments=True)
        except ValueError:  # a quotation goes on, or the line ends in a backslash
            open_lines = open_lines.removesuffix("\\") + "\n"
            continue
        if open_lines.endswith("\\"):
            open_lines = open_lines.removesuffix("\\")
            continue
        open_lines = ""
        found.append(list(dropwhile(re.compile("[A-Z_]+=").match, words)))
    return [words for words in found if words]


def commands_of(*program: str) -> list[list[str]]:
    """What follows these words in all commands of the site's unmarked blocks."""
    every = (words for blocks in site().values() for kind, block in blocks if not kind for words in commands(block))
    return [words[len(program) :] for words in every if tuple(words[: len(program)]) == program]


def requests(port: int) -> list[tuple[str, str]]:
    """Path and body of each curl command of the site that asks a server on that port."""
    at = f"localhost:{port}"
    return [(words[0].partition(at)[2], words[-1]) for words in commands_of("curl") if at in words[0]]


def served_by(server: Any) -> set[str]:
    """The sets that requests get. A new one is listed without a version until it is open everywhere."""
    return {one["name"] for one in server.get("/v1/item_sets")[1]["data"] if one["version"]}


def follow(page: str, folder: Path, model: Path | str, server: Any = None, **given: Any) -> list[str]:
    """Run a page's Python and bash blocks in the folder; return what each of them printed. A block that fails raises.

    What `itemset serve` would serve is published instead. server: which is asked; None for a page without one. given:
    names that the page takes as there.
    """
    blocks = site()[page]
    names: dict[str, Any] = {"__name__": "page", **given}
    printed = []
    with contextlib.chdir(folder):
        for kind, code in blocks:
            code = code.replace("path/to/model", str(model))
            if server is not None:
                code = code.replace("http://localhost:8000", server.url)
            if kind == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(code, page, "exec", dont_inherit=True), names)
                printed.append(out.getvalue())
            elif kind == "bash":
                path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
                run = ["bash", "-euo", "pipefail", "-c", code]
                printed.append(subprocess.check_output(run, text=True, env=os.environ | {"PATH": path}))
            elif code.startswith("itemset serve"):
                name, source = named(cli.parse(shlex.split(code)[1:]).source)
                options = {"item_sets": {name: source}, "item_set_cache": str(folder / "cache")}
                indexes = with_indexes(options, partial(load_tokenizer, str(model)))["item_sets"]
                published.publish(indexes[name], folder / "sets" / name)
            if server is not None and ("--item-set-dir sets" in code or code.startswith("itemset serve")):
                there = published.sets_in(folder / "sets")
                wait_for(lambda: there <= served_by(server))  # noqa: B023
    assert printed, f"{page} has no block to run"
    return printed
