"""Makes the tables of docs/{benchmarks,papers,lists,steering}.md from docs/benchmarks/*.json: python benchmarks/page.py

A table stands under a line `<!-- table FILE NAME -->`: what FILE.json has under NAME. `runner.Report` writes a file's
tables, with the command and the machine of each; those of scripts that are gone were written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from runner import table

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("benchmarks", "papers", "lists", "steering"))
TABLE = re.compile(r"(<!-- table (\w+) ([\w -]+) -->\n)(?:\|.*\n)*")


def made(text: str, folder: Path = DOCS / "benchmarks") -> str:
    """The page with its tables made anew. Raises KeyError where a file has no such table."""

    def replaced(found: re.Match[str]) -> str:
        begin, file, name = found.groups()
        return f"{begin}{table(json.loads((folder / f'{file}.json').read_text())[name]['rows'])}\n"

    return TABLE.sub(replaced, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(made(page.read_text()))
