"""Figures of the pages: tables and numbers in prose are those of the JSON files, and links lead to what is there."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("page")


def test_the_tables_are_made_from_the_files(page: ModuleType) -> None:
    assert PAGE in page.PAGES
    for text in (one.read_text() for one in page.PAGES):
        assert page.made(text) == text, "run python benchmarks/page.py"


def test_numbers_in_prose_are_those_of_the_files(page: ModuleType) -> None:
    assert {"README.md", "benchmarks.md", "papers.md"} <= {
        one.name for one in page.PROSE if page.FIGURES.search(one.read_text())
    }
    assert [f"{one.name}: {fault}" for one in page.PROSE for fault in page.faults(one.read_text())] == []


@pytest.mark.parametrize(
    ("prose", "line", "fault"),
    [
        ("It takes 106 ms.", "106: 10,000 | took, ms", ""),
        ("It takes 0.1 s.", "0.1: 10,000 | took, ms | / 1000", ""),
        ("From 13.9 ms to 106.", "13.9: least | took, ms", ""),
        ("Of both kinds 2 to 3.", "3: most/10,000 | rows", ""),
        ("It takes 7.64 times as long.", "7.64: 10,000 | took, ms | / 100/13.9", ""),
        ("It takes 7 times as long.", "7: 10,000 | took, ms | / 100/13.9", "7 is 7.64"),
        ("It takes 110 ms.", "110: 10,000 | took, ms", ""),
        ("It takes 107 ms.", "107: 10,000 | took, ms", "107 is 106.2"),
        ("It takes 0.2 s.", "0.2: 10,000 | took, ms | / 1000", "0.2 is 0.1062"),
        ("It takes 1,106 ms.", "106: 10,000 | took, ms", "not in the block"),
        ("It takes 106.2 ms.", "106: 10,000 | took, ms", "not in the block"),
        ("It takes 106 ms.", "106: 20,000 | took, ms", "0 rows"),
        ("It takes 106 ms.", "106: 10,000 | takes, ms", "0 rows"),
        ("It takes 3.", "3: 10,000 | rows", "2 rows"),
    ],
)
def test_a_number_that_is_not_the_files(page: ModuleType, tmp_path: Path, prose: str, line: str, fault: str) -> None:
    rows = [
        {"items": 100, "took, ms": 13.9},
        {"items": 10_000, "took, ms": 106.2, "rows": 2},
        {"items": 10_000, "rows": 3},
    ]
    (tmp_path / "waits.json").write_text(json.dumps({"first": {"rows": rows}}))
    found = list(page.faults(f"At 106 items.\n\n{prose}\n\n<!-- figures waits first\n{line}\n-->\n", tmp_path))
    assert len(found) == bool(fault)
    assert fault in "".join(found)


def test_every_claim_of_a_paper_has_its_place() -> None:
    cells = re.findall(r"^\| ([^|\n]*(?:\\\|[^|\n]*)*) \|", (ROOT / "docs" / "papers.md").read_text(), re.MULTILINE)
    claims = [one for one in cells if re.match(r"(Table|Figure|Algorithm|Theorem|Section|Appendi|\")", one)]
    assert len(claims) > 60
    assert [one for one in claims if not re.search(r"\(p\. \d|[Ss]ection|[Aa]ppendi|\"[A-Z]", one)] == []


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
