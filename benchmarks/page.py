"""Makes the tables of docs/{benchmarks,papers,lists,steering}.md from docs/benchmarks/*.json, and holds the numbers in
the prose of all pages to these files: python benchmarks/page.py

A table stands under a line `<!-- table FILE NAME -->`: what FILE.json has under NAME. `runner.Report` writes a file's
tables, with the command and the machine of each; those of scripts that are gone were written by hand.

Numbers of a paragraph, a list or a table by hand are named after it, one a line, in a comment that no reader sees:

    <!-- figures FILE NAME
    0.9: 100,000 | first request, static | / 1000
    1.29: least | serves, s
    -->

First the number as it stands above. Then the row: its first cells with a slash between them; or `least` or `most`, of
all rows or of those that begin with the cells after a slash. Then the column. For another unit, by what to multiply or
divide; for a ratio, `/ ROW` to divide by another row's number there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import floor, log10
from pathlib import Path
from typing import Any

from runner import shown, table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("benchmarks", "papers", "lists", "steering"))
PROSE = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
TABLE = re.compile(r"(<!-- table (\w+) ([\w -]+) -->\n)(?:\|.*\n)*")
FIGURES = re.compile(r"<!-- figures (\w+) ([\w -]+)\n((?:.+\n)*?)-->\n")
EXTREMES = {"least": min, "most": max}


def made(text: str, folder: Path = DOCS / "benchmarks") -> str:
    """The page with its tables made anew. Raises KeyError where a file has no such table."""

    def replaced(found: re.Match[str]) -> str:
        begin, file, name = found.groups()
        return f"{begin}{table(rows_of(folder, file, name))}\n"

    return TABLE.sub(replaced, text)


def faults(text: str, folder: Path = DOCS / "benchmarks") -> Iterator[str]:
    """What is wrong with the figures of a page: not in the block before, not in the file, or another number there."""
    for found in FIGURES.finditer(text):
        file, name, lines = found.groups()
        blocks = [one for one in FIGURES.sub("\n", text[: found.start()]).split("\n\n") if one.strip()]
        block = " ".join((blocks or [""])[-1].split())
        for line in lines.splitlines():
            number, _, said = line.partition(": ")
            if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", block):
                yield f"{number} ({file} {name}) is not in the block that ends with: {block[-60:]}"
            try:
                value = figure(rows_of(folder, file, name), *(part.strip() for part in said.split(" | ")))
            except LookupError as error:
                yield f"{number}: {file} {name}: {error}"
            else:
                if not rounds_to(value, number):
                    yield f"{number} is {value:.6g} in {file} {name}: {said}"


def figure(rows: list[dict[str, Any]], row: str, column: str, by: str = "", by_column: str = "") -> float:
    """What a line of a comment says. Raises LookupError where there is no such number."""
    value = value_of(rows, row, column)
    if not by:
        return value
    sign, by = by.split(" ", 1)
    factor = float(by) if re.fullmatch(r"-?[\d.]+", by) else value_of(rows, by, by_column or column)
    return value / factor if sign == "/" else value * factor


def rows_of(folder: Path, file: str, name: str) -> list[dict[str, Any]]:
    """The rows of a table. Raises LookupError where there is none."""
    if not (path := folder / f"{file}.json").exists():
        raise LookupError(f"there is no {path.name}")
    rows: list[dict[str, Any]] = json.loads(path.read_text())[name]["rows"]
    return rows


def value_of(rows: list[dict[str, Any]], row: str, column: str) -> float:
    """The number of a row and a column. Raises LookupError where that is no number, or of several rows."""
    first, *others = row.split("/")
    extreme, cells = EXTREMES.get(first), others if first in EXTREMES else [first, *others]
    begin = [one for one in rows if [shown(cell) for cell in one.values()][: len(cells)] == cells]
    values = [one[column] for one in begin if isinstance(one.get(column), int | float)]
    if not values or (extreme is None and len(values) > 1):
        raise LookupError(f"{len(values)} rows begin with {row} and have a number at {column}")
    return float(extreme(values) if extreme else values[0])


def rounds_to(value: float, number: str) -> bool:
    """Whether a number is what a value rounds to. An integer's last zeros may be rounded ones, but for two digits."""
    digits = number.replace(",", "")
    place = -len(digits.partition(".")[2])
    if not place and float(digits):
        zeros, size = len(digits) - len(digits.rstrip("0")), floor(log10(float(digits)))
        place = max(0, min(zeros, size - 1))
    return abs(value - float(digits)) <= 0.5 * 10.0**place * (1 + 1e-9)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(made(page.read_text()))
    wrong = [f"{page.relative_to(ROOT)}: {fault}" for page in PROSE for fault in faults(page.read_text())]
    raise SystemExit("\n".join(wrong) or None)
