"""Attributes: kept in the keys' order, by type, over the file's own memory; what is refused."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from strategies import item_sets

import itemset
from itemset import ItemSetError
from itemset.trie import attributes as attribute_columns
from itemset.trie import file as index_file
from itemset.trie.attributes import kind_of

DAY = datetime.date(2026, 11, 14)
DICTIONARY = pa.dictionary(pa.int8(), pa.large_string())


def rows_of(s: itemset.ItemSet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = s.attributes.to_pylist()
    return rows


@given(item_sets())
@settings(max_examples=100, deadline=None)
def test_every_key_keeps_its_row(items: list[list[int]]) -> None:
    rows = [{"n": i, "name": f"name {i}", "even": None if i % 3 else i % 2 == 0} for i in range(len(items))]
    s = itemset.build(items, attributes=pa.Table.from_pylist(rows))
    again = itemset.from_bytes(s.to_bytes())
    assert rows_of(s) == rows_of(again) == [rows[key] for key in s.keys.to_pylist()]
    assert s.digest == itemset.build(items).digest


TOLD: dict[str, tuple[Any, list[Any]]] = {
    "int": ([3, None, -(1 << 60), 0], [3, None, -(1 << 60), 0]),
    "float": ([1.5, float("nan"), float("inf"), None], [1.5, None, None, None]),
    "text": (["é", None, "", "x"], ["é", None, "", "x"]),
    "many": (pa.array(["é", None, "", "x"], pa.string_view()), ["é", None, "", "x"]),
    "flag": ([True, None, False, True], [True, None, False, True]),
    "day": ([DAY, None, datetime.date(1969, 1, 1), DAY], ["2026-11-14", None, "1969-01-01", "2026-11-14"]),
    "time": (
        pa.array([0, None, -1_500, 86_400_000], pa.timestamp("ms")),
        ["1970-01-01T00:00:00.000", None, "1969-12-31T23:59:58.500", "1970-01-02T00:00:00.000"],
    ),
    "zone": (
        pa.array([0, None, 3_600, 1], pa.timestamp("s", "Europe/Vienna")),
        ["1970-01-01T00:00:00Z", None, "1970-01-01T01:00:00Z", "1970-01-01T00:00:01Z"],
    ),
    "lists": ([["a", "b"], None, [], ["a"]], [["a", "b"], None, [], ["a"]]),
}
"""Columns, and what answers say of their values."""


@pytest.mark.parametrize("dictionary", [4, 1])
@pytest.mark.parametrize("rows", [2, 1 << 20])
def test_what_answers_say(monkeypatch: pytest.MonkeyPatch, rows: int, dictionary: int) -> None:
    """As JSON has it, whatever batches the rows lie in, each key with its own; and in no other set's order."""
    monkeypatch.setattr(attribute_columns, "BATCH_ROWS", rows)
    monkeypatch.setattr(attribute_columns, "MAX_DICTIONARY", dictionary)
    items, keys = [[5, 6], [1], [5, 6], [2, 9]], ["d", "c", "b", "a"]
    s = itemset.build(items, keys=keys, attributes={name: column for name, (column, _) in TOLD.items()})
    each = [{name: said[i] for name, (_, said) in TOLD.items()} for i in range(4)]
    json.dumps(s.attributes_of([[2, 9], [5, 6], [1], [2, 9]], list(TOLD)), allow_nan=False)
    expected = [[each[3]], [each[0], each[2]], [each[1]], [each[3]]]
    assert s.attributes_of([[2, 9], [5, 6], [1], [2, 9]], list(TOLD)) == expected
    assert s.attributes_of([[1]], ["flag", "none", "int"]) == [[{"flag": None, "int": None}]]
    assert s.attributes_of([], ["flag"]) == []
    assert itemset.view(s, only_keys=["b", "c"]).attributes_of([[5, 6]], ["int"]) == [[{"int": -(1 << 60)}]]


@pytest.mark.parametrize(
    ("column", "stored", "kind"),
    [
        (pa.array([True, None, False]), pa.bool_(), "bool"),
        (pa.array([1, None, 3], pa.uint16()), pa.uint16(), "integer"),
        (pa.array([1, None, 3]), pa.int64(), "integer"),
        (pa.array(np.array([1, 2, 3], np.float16)), pa.float32(), "float"),
        (pa.array([1.5, None, 3]), pa.float64(), "float"),
        (pa.array(["b", None, "a"]), DICTIONARY, "string"),
        (pa.array(["b", None, "a"], pa.string_view()), DICTIONARY, "string"),
        (pa.array(["b", None, "b"]).dictionary_encode(), DICTIONARY, "string"),
        (pa.array([DAY, None, DAY]), pa.date32(), "date"),
        (pa.array([DAY, None, DAY], pa.date64()), pa.date32(), "date"),
        (
            pa.array([5000, None, 7000], pa.timestamp("ns", "Europe/Vienna")),
            pa.timestamp("ns", "Europe/Vienna"),
            "timestamp",
        ),
        (pa.array([["x", "y"], None, []]), pa.large_list(DICTIONARY), "list of strings"),
    ],
)
def test_types(tmp_path: Path, column: pa.Array, stored: Any, kind: str) -> None:
    itemset.build([[2], [1], [3]], attributes={"x": column}).save(tmp_path / "a.itemset")
    attributes = itemset.load(tmp_path / "a.itemset").attributes
    assert attributes.schema == pa.schema([("x", stored)])
    assert kind_of(stored) == kind
    values = column.to_pylist()
    assert attributes.column("x").to_pylist() == [values[1], values[0], values[2]]


def test_only_few_distinct_strings_become_numbers() -> None:
    def stored(distinct: int) -> Any:
        rows = 40_000
        column = pa.array([f"{i % distinct:05}" for i in range(rows)])
        s = itemset.build(np.arange(rows)[:, None], attributes={"x": column})
        assert s.attributes.column("x").to_pylist() == column.to_pylist()
        return s.attributes.schema.field("x").type

    assert [stored(n) for n in (128, 129, 32_768)] == [
        pa.dictionary(index, pa.large_string()) for index in (pa.int8(), pa.int16(), pa.int16())
    ]
    assert stored(32_769) == pa.large_string()


def test_nothing_is_copied_out_of_the_file(tmp_path: Path) -> None:
    rows = 300_000
    columns = {"n": np.arange(rows), "name": [f"region {i % 9}" for i in range(rows)]}
    itemset.build(np.arange(rows)[:, None], attributes=columns).save(tmp_path / "a.itemset")
    before = pa.total_allocated_bytes()
    attributes = itemset.load(tmp_path / "a.itemset").attributes
    assert attributes.nbytes > 2_000_000
    assert pa.total_allocated_bytes() - before < 100_000


def test_a_set_without_attributes_has_no_columns_and_no_section() -> None:
    s = itemset.build([[1], [2], [1]])
    assert (s.attributes.num_columns, s.attributes.num_rows) == (0, 3)
    assert "attributes" not in s.sections


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"x": [1]}, "1 rows of attributes for 2 items: give one row for each item"),
        ({"x": [1, "a"]}, "must be a pyarrow Table, or columns by name"),
        (5, "must be a pyarrow Table, or columns by name"),
        ({"": [1, 2]}, "'' cannot be an attribute's name"),
        ({"$and": [1, 2]}, r"'\$and' cannot be an attribute's name"),
        (pa.table([[1, 2], [3, 4]], ["x", "x"]), "more than one attribute 'x'"),
        ({"x": [None, None]}, "attribute 'x' holds null: attributes are bools, integers"),
        ({"x": [b"a", b"b"]}, "attribute 'x' holds binary"),
        ({"x": [[1], [2]]}, "attribute 'x' holds list<item: int64>"),
        ({"x": [["a", None], []]}, "a list of attribute 'x' holds a missing value"),
    ],
)
def test_bad_attributes_are_named(attributes: Any, message: str) -> None:
    with pytest.raises(ItemSetError, match=message):
        itemset.build([[1], [2]], attributes=attributes)


def test_damaged_attributes_are_refused_before_they_are_read() -> None:
    s = itemset.build([[1], [2]], attributes={"x": ["a", "b"]})
    other = itemset.build([[1]], attributes={"x": [3]})
    section = s._arrays()["attributes"]
    for damaged in (section[:-50], section[:7], np.zeros(64, np.uint8), other._arrays()["attributes"]):
        data = index_file.to_bytes(s._header(), s._arrays() | {"attributes": damaged})
        with pytest.raises(ItemSetError, match="the index is corrupted, its attributes cannot be read"):
            _ = itemset.from_bytes(data).attributes


def test_the_batches_of_the_stream_are_those_of_the_file() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attribute_columns, "BATCH_ROWS", 7)
        s = itemset.build([[i] for i in range(20)], attributes={"x": list(range(20))})
    assert [len(batch) for batch in s.attributes.to_batches()] == [7, 7, 6]
    assert s.attributes.column("x").to_pylist() == list(range(20))
