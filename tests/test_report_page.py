"""The page about an index: its figures by counting the items themselves, and its text in every case."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from strategies import item_sets

import itemset
from itemset import cli
from itemset.cli import report_page as page
from itemset.cli.report import count


class Balanced(HTMLParser):
    """Fails at a tag that ends another than was begun last."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.rectangles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rectangles += tag == "rect"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rectangles += tag == "rect"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.text.append(data.strip())


def read(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)  # it stands alone
    return parser


@given(item_sets())
@settings(max_examples=80, deadline=None)
def test_the_shape_is_that_of_the_items(items: list[list[int]]) -> None:
    distinct = {tuple(item) for item in items}
    counts = count(itemset.build(items), tails=False)
    for k, step in enumerate(zip(counts.shared, counts.chosen, counts.widest, strict=True)):
        passing = Counter(item[:k] for item in distinct if len(item) >= k)
        shared = {prefix for prefix, count in passing.items() if count > 1 or not k}
        after = {prefix: {item[k : k + 1] for item in distinct if item[:k] == prefix} for prefix in shared}
        wide = [prefix for prefix in shared if len(after[prefix]) > 1]
        assert step == (
            sum(passing[prefix] for prefix in shared),
            sum(passing[prefix] for prefix in wide),
            max(len(tokens - {()}) for tokens in after.values()),
        )
    begins = [item for item in distinct if any(other[: len(item)] == item for other in distinct - {item})]
    assert counts.ends == len(begins)
    assert sorted(counts.by_first) == sorted(Counter(item[0] for item in distinct).values())


@given(item_sets())
@settings(max_examples=30, deadline=None)
def test_every_set_has_a_page(items: list[list[int]]) -> None:
    found = read(page.page_of(itemset.build(items), "a <set> & more"))
    assert "a <set> & more" in found.text
    assert found.rectangles


def codes(first: int, last: int) -> itemset.ItemSet:
    matrix = np.random.default_rng(3).integers(0, 30, (3_000, 4))[first:last]
    columns = {
        "year": pa.array([None if i % 7 == 0 else 1990 + i % 30 for i in range(first, last)]),
        "tags": pa.array([["<b>", "x"][: i % 3] for i in range(first, last)]),
        "region": pa.array([["north", "south"][i % 2] for i in range(first, last)]),
        "released": pa.array(range(first, last), pa.date32()),
        "sold": pa.array([i % 2 == 0 for i in range(first, last)]),
    }
    return itemset.build(matrix, keys=np.arange(first, last), attributes=columns)


def test_attributes_samples_and_what_came_and_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes(0, 2_000).save(tmp_path / "old.itemset")
    codes(100, 3_000).save(tmp_path / "new.itemset")
    output = tmp_path / "a.html"
    command = ["report", f"{tmp_path}/new.itemset", "--compare", f"{tmp_path}/old.itemset", "-o", str(output)]
    assert cli.main(command) == 0
    assert f"{output} (" in capsys.readouterr().out
    text = read(output.read_text()).text
    assert {"year", "tags", "region", "released", "sold", "414"} <= set(text)  # 414 years are missing
    assert any(one.startswith("north (") for one in text)
    assert any("<b> (" in one for one in text)
    old, new = (
        {(key, tuple(item)) for item in one.items() for key in one.keys_of([item])[0]}
        for one in (codes(0, 2_000), codes(100, 3_000))
    )
    for word, keys in (("came", len(new - old)), ("went", len(old - new))):
        assert f"{keys:,} keys {word}." in text
    monkeypatch.setattr(page, "COMPARED", 500)
    monkeypatch.setattr(page, "COUNTED", 300)
    assert cli.main(command) == 0
    assert re.search(r"About \d+\.\d% of the keys came: of 500 drawn at random, \d+\.", output.read_text())
    text = read(output.read_text()).text
    assert {"414", "at least 30"} <= set(text)  # what is missing is counted in all rows
    assert any(
        re.fullmatch(r"Distinct and frequent values are those of 2\d\d rows drawn at random.", one) for one in text
    )
    same = ["report", f"{tmp_path}/new.itemset", "--compare", f"{tmp_path}/new.itemset", "-o", str(output)]
    assert cli.main(same) == 0
    assert "The same items." in output.read_text()


def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes(0, 10).save(tmp_path / "a.itemset")
    assert cli.main(["report", f"{tmp_path}/a.itemset", "-o", f"{tmp_path}/none/a.html"]) == 1
    assert "name a file in a folder that exists" in capsys.readouterr().err
    for extra in ([], ["--compare", f"{tmp_path}/a.itemset"]):
        assert cli.main(["report", f"{tmp_path}/a.itemset", *extra, "-o", f"{tmp_path}/a.itemset"]) == 1
        assert "is the index itself: give the page another name" in capsys.readouterr().err
    assert len(itemset.load(tmp_path / "a.itemset")) == 10
    assert cli.main(["report", f"{tmp_path}/b.itemset", "-o", f"{tmp_path}/a.html"]) == 1
    assert "no such file" in capsys.readouterr().err
