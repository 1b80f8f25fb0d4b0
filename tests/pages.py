"""Pages of docs/ as a reader follows them: blocks run in order, beside a server that follows the folder `sets`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import wait_for

from itemset import cli, published
from itemset.cli.serve import named
from itemset.source_sets import with_indexes

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(page: str, folder: Path, model: Path, server: Any = None) -> list[str]:
    """Run a page's Python and bash blocks in the folder; return what each of them printed. A block that fails raises.

    What `itemset serve` would serve is published instead. server: which is asked; None for a page without one.
    """
    blocks = BLOCK.findall((DOCS / page).read_text())
    names: dict[str, Any] = {"__name__": "page"}
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
                published.publish(with_indexes(options, str(model))["item_sets"][name], folder / "sets" / name)
            if "--item-set-dir sets" in code or code.startswith("itemset serve"):
                there = published.sets_in(folder / "sets")
                wait_for(lambda: there <= {one["name"] for one in server.get("/v1/item_sets")[1]["data"]})  # noqa: B023
    assert printed, f"{page} has no block to run"
    return printed
