"""Columns over all parts of a table: one type, lists of tokens by name or as text, JSON documents, archives."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import itemset
from itemset import ItemSetError
from itemset.building.columns import as_list
from itemset.building.dialects import Dialect
from itemset.building.sources import read


def parts(folder: Path, suffix: str, *tables: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for i, rows in enumerate(tables):
        path = folder / f"{i}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            names = list(dict.fromkeys(name for row in rows for name in row))
            lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
            path.write_text("".join(",".join(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_types_are_those_of_all_parts(tmp_path: Path, suffix: str) -> None:
    path = parts(
        tmp_path / "p",
        suffix,
        [{"sku": 1001, "title": "Kite", "price": 3, "since": "2026-01-02"}],
        [{"sku": "A77", "title": "Ball", "price": 5.5}],
        [{"sku": 7, "title": "Boat", "price": 4, "since": "2026-03-04"}],
    )
    source = read(path, column="title", key="sku", attributes=["price", "since"])
    assert source.keys.to_pylist() == ["1001", "A77", "7"]
    assert source.attributes is not None
    assert source.attributes.column("price").to_pylist() == [3.0, 5.5, 4.0]
    since = [None if day is None else str(day) for day in source.attributes.column("since").to_pylist()]
    assert since == ["2026-01-02", None, "2026-03-04"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_lists_in_one_text(tmp_path: Path, suffix: str) -> None:
    """An attribute in which no text has what splits stays as it is; lists are what they were."""
    rows = (
        [{"title": "Kite", "genres": "Drama", "by": "Ann", "since": "2026-01-02"}],
        [
            {"title": "Ball", "genres": "Action | Comedy", "by": "Bo"},
            {"title": "Boat"},
        ],
    )
    path = parts(tmp_path / "p", suffix, *rows)
    names = ["genres", "by", "since"]
    attributes = read(path, column="title", attributes=names, dialect=Dialect.of({"split": "|"})).attributes
    assert attributes is not None
    assert attributes.column("genres").to_pylist() == [["Drama"], ["Action", "Comedy"], None]
    assert attributes.column("by").to_pylist() == ["Ann", "Bo", None]
    assert pa.types.is_date(attributes.column("since").type) == (suffix != "parquet")
    plain = read(path, column="title", attributes=names).attributes
    assert plain is not None
    assert plain.column("genres").to_pylist() == ["Drama", "Action | Comedy", None]


def test_lists_beside_lists_in_one_text(tmp_path: Path) -> None:
    path = parts(tmp_path / "p", "jsonl", [{"title": "Kite", "a": ["x|y"], "b": "x|y"}, {"title": "Boat", "a": []}])
    source = read(path, column="title", attributes=["a", "b"], dialect=Dialect(split="|"))
    assert source.attributes is not None
    assert source.attributes.to_pydict() == {"a": [["x|y"], []], "b": [["x", "y"], None]}


def test_decimals(tmp_path: Path) -> None:
    """Databases write integers as decimals, too: as keys and as attributes they are what they say."""
    whole = pa.array([Decimal(7), Decimal(8)], pa.decimal128(38, 0))
    price = pa.array([Decimal("63.23"), None], pa.decimal128(10, 2))
    table = pa.table({"title": ["Kite", "Boat"], "id": whole, "n": whole, "price": price})  # 63.23 is no sum of tenths
    pq.write_table(table, tmp_path / "d.parquet")
    source = read(tmp_path / "d.parquet", column="title", key="id", attributes=["n", "price"])
    assert source.keys.to_pylist() == [7, 8]
    assert source.attributes is not None
    assert source.attributes.to_pydict() == {"n": [7, 8], "price": [63.23, None]}
    assert source.attributes.schema.types == [pa.int64(), pa.float64()]
    made = itemset.build([[1], [2]], attributes=table.select(["n", "price"]))
    assert made.attributes.schema.types == [pa.int64(), pa.float64()]
    large = pa.array([Decimal(10**20)] * 2, pa.decimal128(38, 0))
    pq.write_table(table.set_column(1, "id", large), tmp_path / "e.parquet")
    with pytest.raises(
        ItemSetError,
        match=r"e\.parquet: column .id. cannot .*out of bounds.: numbers have 64",
    ):
        read(tmp_path / "e.parquet", column="title", key="id")
    with pytest.raises(ItemSetError, match="key column 'price' holds double, keys must be integers of at most"):
        read(tmp_path / "d.parquet", column="title", key="price")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("texts", [["", "Kite"], ["Kite", ""], ["", "[1] Kite", "(2)"]])
def test_an_empty_text_is_read_and_refused_where_it_is_encoded(tmp_path: Path, suffix: str, texts: list[str]) -> None:
    assert read(parts(tmp_path / "p", suffix, [{"title": text} for text in texts])).texts == texts


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_types_that_do_not_go_together_are_refused(tmp_path: Path, suffix: str) -> None:
    rows = [{"title": "Kite", "x": True}], [{"title": "Ball", "x": "maybe"}]
    path = parts(tmp_path / "p", suffix, *rows)
    if suffix == "csv":  # where all is text
        attributes = read(path, column="title", attributes=["x"]).attributes
        assert attributes is not None
        assert attributes.column("x").to_pylist() == ["True", "maybe"]
        return
    with pytest.raises(ItemSetError, match="the values of attribute 'x' must be of one kind"):
        read(path, column="title", attributes=["x"])


def test_a_field_that_the_first_row_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "Kite"}\n{"title": "Ball", "id": 3}\n{"id": 4}\n')
    for key, row in (("id", 1), (None, 3)):
        with pytest.raises(ItemSetError, match=f"row {row} has no value in column"):
            read(path, column="title", key=key)


PIECES = [["<a_1>", "<b_2>"], ["<a_1>", "<b_3>", "<c_1>"], ["<a_2>"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "index.json", "a.parquet", "a.csv"])
def test_lists_of_tokens_by_name(tmp_path: Path, name: str) -> None:
    rows = [{"id": i, "sid": pieces} for i, pieces in enumerate(PIECES)]
    column, key = "sid", "id"
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name == "a.csv":
        path.write_text("id,sid\n" + "".join(f'{row["id"]},"{row["sid"]}"\n' for row in rows))
    elif name == "index.json":
        path.write_text(json.dumps(dict(enumerate(PIECES))))
        column, key = "item", "key"
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if name == "a.json" else "\n".join(lines))
    source = read(path, column=column, key=key)
    assert source.texts == PIECES
    assert source.keys.to_pylist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("[100, 101]", [100, 101]),
        ("(7, 8, 9)", [7, 8, 9]),
        ("[ 5  6 7]", [5, 6, 7]),
        ("['<a_1>', '<b_2>']", ["<a_1>", "<b_2>"]),
        ('["<a_1>"]', ["<a_1>"]),
        ("[REC]", None),
        ("(500) Days of Summer", None),
        ("[]", None),
        ("[1, 'a']", None),
        ("[None]", None),
        ("[1.5]", None),
    ],
)
def test_a_list_that_is_written_as_text(text: str, given: list[Any] | None) -> None:
    assert as_list(text) == given


def test_lists_as_text_are_read_if_all_are_such(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,ids\n1,"[5, 6]"\n2,"[5, 7, 8]"\n3,"[9]"\n')
    rows = read(path, column="ids").tokens
    assert rows is not None
    assert [rows.tokens[a:b].tolist() for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)] == [
        [5, 6],
        [5, 7, 8],
        [9],
    ]
    path.write_text('id,ids\n1,"[5, 6]"\n2,Kite\n3,"[9]"\n')
    with pytest.raises(ItemSetError, match="row 2: column 'ids' holds 'Kite', others lists"):
        read(path, column="ids")
    path.write_text("id,title\n1,[REC]\n2,[1408]\n3,Kite\n")
    assert read(path, column="title").texts == ["[REC]", "[1408]", "Kite"]


@pytest.mark.parametrize(
    ("given", "texts", "keys"),
    [
        (["Kite", "Ball"], ["Kite", "Ball"], None),
        ({"7": "Kite", "3": "Ball"}, ["Kite", "Ball"], [7, 3]),
        ({"A": {"item": "Kite"}, "B": {"item": "Ball"}}, ["Kite", "Ball"], ["A", "B"]),
        ([{"item": "Kite", "key": 1}, {"item": "Ball", "key": 2}], ["Kite", "Ball"], [1, 2]),
        ({"items": [{"item": "Kite", "key": 1}, {"item": "Ball", "key": 2}]}, ["Kite", "Ball"], [1, 2]),
        ({"ID": {"item": "Indonesia"}, "IE": {"item": "Ireland"}}, ["Indonesia", "Ireland"], ["ID", "IE"]),
        (dict.fromkeys([*map(str, range(1001)), "title"], "Kite"), ["Kite"] * 1002, [*map(str, range(1001)), "title"]),
    ],
)
def test_json_documents(tmp_path: Path, given: Any, texts: list[str], keys: list[Any] | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(given, indent=1))
    source = read(path, column="item", key=None if keys is None else "key")
    assert source.texts == texts
    assert (None if source.keys is None else source.keys.to_pylist()) == keys


def test_json_that_is_none_of_these(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, message in [
        ('{"id": [1, 2], "title": ["a", "b"]}', "holds columns or one record"),
        ('{"id": {"0": 1, "1": 2}, "title": {"0": "a", "1": "b"}}', "holds columns or one record"),  # as pandas has it
        ("5", "holds no list"),
        ('[{"id": 1}', "is no JSON"),
        ("[[1.5]]", "use texts or lists of token ids or tokens"),
    ]:
        path.write_text(text)
        with pytest.raises(ItemSetError, match=message):
            read(path, column="item")
    for more in ("", ', "price": NaN'):  # lines in a .json, as Amazon's
        path.write_text(f'{{"title": "Kite"{more}}}\n{{"title": "Ball"}}\n')
        assert read(path, column="title").texts == ["Kite", "Ball"]


def test_archives_of_numpy(tmp_path: Path) -> None:
    codes = np.array([[5, 6], [5, 7], [8, 9]])
    np.savez(tmp_path / "a.npz", codes=codes, sku=np.array(["x", "y", "z"]), price=np.array([1.5, 2, 3]))
    source = read(tmp_path / "a.npz", column="codes", key="sku", attributes=["price"])
    assert source.tokens is not None
    assert source.tokens.tokens.reshape(codes.shape).tolist() == codes.tolist()
    assert source.keys.to_pylist() == ["x", "y", "z"]
    np.savez(tmp_path / "b.npz", codes=codes, sku=np.array([1, 2]))
    with pytest.raises(ItemSetError, match="differ in length"):
        read(tmp_path / "b.npz", column="codes", key="sku")


def test_tabs_in_a_txt(tmp_path: Path) -> None:
    path = tmp_path / "info.txt"
    path.write_text("<a_1><b_2>\tToy\t0\n<a_1><b_3>\tBoat\t1\n")
    assert read(path, column="semantic_id").texts == ["<a_1><b_2>", "<a_1><b_3>"]
    path.write_text("Kite\nBall\t3\nBoat\nTop\t4\n")
    with pytest.raises(ItemSetError, match=r"2 rows are bad, such as .*line 2 holds a tab"):
        read(path)
