"""docs/benchmarks.md and docs/papers.md: their tables are made of the JSON files, and links lead to what is there."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"


def test_the_tables_are_made_from_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("page")
    assert PAGE in page.PAGES
    for text in (one.read_text() for one in page.PAGES):
        assert page.made(text) == text, "run python benchmarks/page.py"


def test_every_table_says_how_it_was_measured() -> None:
    for file in (ROOT / "docs" / "benchmarks").glob("*.json"):
        for name, table in json.loads(file.read_text()).items():
            assert {"command", "machine", "versions", "rows"} <= table.keys(), f"{file.name}: {name}"


def test_links_lead_to_sections() -> None:
    heads = re.findall(r"^#+ (.+)$", PAGE.read_text(), re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    links = {link for page in pages for link in re.findall(r"benchmarks\.md#([\w-]+)", page.read_text())}
    assert links <= sections


def test_scripts_that_pages_name_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    named = {name for page in pages for name in re.findall(r"\bbenchmarks/([\w/]+\.(?:py|sh))", page.read_text())}
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / name).exists()] == []
