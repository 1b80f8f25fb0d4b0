"""Every row of the tables in docs/ about requests and answers is tried: by a request of `cells`, or by another test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import CELLS, ELSEWHERE

from itemset.serving.config import StaticConfig

TESTS = Path(__file__).resolve().parent


def rows(section: str) -> Iterator[str]:
    """The first cells of a section's tables, but for their heads."""
    page, _, title = section.partition(": ")
    text = (TESTS.parent / "docs" / f"{page}.md").read_text()
    _, *parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    texts = dict(zip(parts[::2], parts[1::2], strict=True)) | {"": parts[1]}  # what comes before the first section
    lines = texts[title].splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not after.startswith("|--"):
            yield line.split("|")[1].strip()


@pytest.mark.parametrize("section", ELSEWHERE)
def test_every_row_is_tried_and_every_request_is_of_a_row(section):
    cells = {cell.row.removeprefix(f"{section}: ") for cell in CELLS if cell.row.startswith(f"{section}: ")}
    tried, found = cells | {row for row, _ in ELSEWHERE[section]}, [*rows(section)]
    assert found
    assert not [row for row in found if not any(row.startswith(one) for one in tried)]
    assert not [one for one in tried if not any(row.startswith(one) for row in found)]


def test_every_request_is_of_a_section():
    assert not [cell.row for cell in CELLS if not any(cell.row.startswith(f"{section}: ") for section in ELSEWHERE)]


def test_the_tests_that_are_named_are_there():
    for module, _, name in (test.partition("::") for of in ELSEWHERE.values() for _, test in of):
        (path,) = TESTS.rglob(f"{module}.py")
        assert re.search(rf"^(def )?{name}\w*( =|\()", path.read_text(), re.MULTILINE), f"{module}::{name}"


def test_the_options_are_those_of_the_configuration():
    options = {row.strip("`") for row in rows("serving: Configuration") if re.fullmatch(r"`\w+`", row)}
    assert options == set(StaticConfig.__struct_fields__)
