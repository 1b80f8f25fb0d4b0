"""Every file format gives the same items and keys, and every bad file is refused with its name, row and mend."""

import datetime
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from itemset import ItemSetError
from itemset.building.sources import read

TEXTS = [
    "1984",
    "2001: A Space Odyssey",
    'He said "no", twice',
    "two\nlines",
    "NA",
    "null",
    " Amélie ",
    "千と千尋の神隠し",
]
KEYS = [7, -1, 0, 2**62, 12, 13, 14, 15]
MATRIX = [[1, 2, 3], [4, 5, 6], [0, 0, 70_000]]
RAGGED = [[1], [2, 3, 4], [5, 2**31 - 2]]


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_table(path, columns):
    """The table in the format that the suffix says."""
    suffix, names = path.suffix, list(columns)
    rows = list(zip(*columns.values(), strict=True))
    if suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=2)
        return path
    if suffix in (".jsonl", ".ndjson"):
        return write(path, "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    quoted = [['"' + str(field).replace('"', '""') + '"' for field in row] for row in [names, *rows]]
    return write(path, "\n".join(("\t" if suffix == ".tsv" else ",").join(row) for row in quoted) + "\n")


def refusal(path, **options):
    with pytest.raises(ItemSetError) as error:
        read(path, **options)
    assert str(path) in str(error.value)
    return str(error.value)


def as_lists(rows):
    return [rows.tokens[a:b].tolist() for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]


TABLES = ["csv", "tsv", "jsonl", "ndjson", "parquet"]


@pytest.mark.parametrize("suffix", TABLES)
def test_texts_and_integer_keys(tmp_path, suffix):
    path = write_table(tmp_path / f"a.{suffix}", {"id": KEYS, "title": TEXTS, "year": [1.5] * 8})
    source = read(path, column="title", key="id")
    assert source.texts == TEXTS
    assert source.tokens is None
    assert source.keys.type == pa.int64()
    assert source.keys.to_pylist() == KEYS
    assert read(str(path), column="title").keys is None


@pytest.mark.parametrize("suffix", TABLES)
def test_string_keys(tmp_path, suffix):
    keys = ["007", "8", "tt0111161", "", "1.0", "x", "y", "z"] if suffix not in ("csv", "tsv") else ["007", *"2345678"]
    path = write_table(tmp_path / f"a.{suffix}", {"id": keys, "title": TEXTS})
    # Leading zeros would be lost in an integer. The items' column needs no name: there is only one left.
    assert read(path, key="id").keys.to_pylist() == keys
    assert read(path, column="title", key="title").keys.to_pylist() == TEXTS


def test_csv_keys_longer_than_64_bits_stay_strings(tmp_path):
    assert read(write(tmp_path / "a.csv", f"t,k\na,1\nb,{2**63}\n"), key="k").keys.to_pylist() == ["1", str(2**63)]


def test_csv_byte_order_mark_and_line_ends(tmp_path):
    source = read(write(tmp_path / "a.csv", b'\xef\xbb\xbftitle,id\r\n"a\r\nb",1\r\nc,2\r\n'), column="title", key="id")
    assert source.texts == ["a\r\nb", "c"]
    assert source.keys.to_pylist() == [1, 2]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1), min_size=1, max_size=5))
def test_any_text_survives(tmp_path, texts):
    for suffix in TABLES:
        assert read(write_table(tmp_path / f"a.{suffix}", {"t": texts}), column="t").texts == texts


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("rows", [MATRIX, RAGGED])
def test_token_lists(tmp_path, suffix, rows):
    path = write_table(tmp_path / f"a.{suffix}", {"sid": rows, "id": ["a", "b", "c"]})
    source = read(path, column="sid", key="id")
    assert as_lists(source.tokens) == rows
    assert source.tokens.layout[1] == (len(MATRIX[0]) if rows is MATRIX else 0)
    assert source.texts is None
    assert source.keys.to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize("value", [pa.uint8(), pa.int16(), pa.uint32(), pa.uint64()])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda value: pa.list_(value, 2)])
def test_parquet_list_types(tmp_path, value, kind):
    rows = [[1, 2], [3, 4], [5, 6]]
    pq.write_table(pa.table({"sid": pa.array(rows, kind(value))}), tmp_path / "a.parquet")
    assert as_lists(read(tmp_path / "a.parquet").tokens) == rows


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_parquet_text_types(tmp_path, kind):
    table = pa.table({"t": pa.array(["a", "b", "a"]).cast(kind), "k": pa.array([1, 2, 3], pa.uint8())})
    pq.write_table(table, tmp_path / "a.parquet")
    source = read(tmp_path / "a.parquet", column="t", key="k")
    assert source.texts == ["a", "b", "a"]
    assert source.keys.to_pylist() == [1, 2, 3]
    assert read(tmp_path / "a.parquet", column="t", key="t").keys.to_pylist() == ["a", "b", "a"]


def test_parquet_folder_names_are_no_columns(tmp_path):
    (tmp_path / "year=2020").mkdir()
    path = write_table(tmp_path / "year=2020" / "a.parquet", {"t": ["a"]})
    assert read(path).texts == ["a"]


def test_txt_strips_the_newline_only(tmp_path):
    data = b"\xef\xbb\xbf  a b \r\nc\x0bd\xe2\x80\xa8e\nlast\n\n \r\n"
    assert read(write(tmp_path / "a.TXT", data)).texts == ["  a b ", "c\x0bd\u2028e", "last"]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64", ">i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(tmp_path, dtype, order):
    matrix = np.arange(12).reshape(4, 3).astype(dtype, order=order)
    np.save(tmp_path / "a.npy", matrix)
    source = read(tmp_path / "a.npy")
    assert as_lists(source.tokens) == matrix.tolist()
    assert source.tokens.tokens.dtype.isnative


@pytest.mark.parametrize("suffix", ["txt", "npy", *TABLES])
def test_empty_file(tmp_path, suffix):
    assert "is empty" in refusal(write(tmp_path / f"a.{suffix}", b""))
    assert "is empty" in refusal(write(tmp_path / f"a.{suffix}.gz", gzip.compress(b"")))


@pytest.mark.parametrize("suffix", TABLES)
def test_columns_that_are_not_there_or_not_said(tmp_path, suffix):
    path = write_table(tmp_path / f"a.{suffix}", {"id": [1], "title": ["a"], "year": [1999]})
    assert refusal(path, column="tilte").endswith(
        "no column 'tilte', it has 'id', 'title', 'year': name another (--column, --key, --attribute)"
    )
    assert "no column 'movie'" in refusal(path, column="title", key="movie")
    assert "say which" in refusal(path)
    assert "say which" in refusal(path, key="id")


@pytest.mark.parametrize("suffix", TABLES)
@pytest.mark.parametrize(("column", "row"), [("title", 3), ("id", 2)])
def test_missing_values(tmp_path, suffix, column, row):
    columns = {"title": ["a", "b", "c", "d"], "id": [1, 2, 3, 4]}
    columns[column][row - 1] = "" if suffix in ("csv", "tsv") else None
    message = refusal(write_table(tmp_path / f"a.{suffix}", columns), column="title", key="id")
    assert f"row {row} has no value in column {column!r}" in message


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("values", [[1, 2], [1.5, 2.5], [True, False], [[0.5], [1.5]], [{"x": 1}] * 2])
def test_columns_of_a_wrong_type(tmp_path, suffix, values):
    path = write_table(tmp_path / f"a.{suffix}", {"t": values, "ok": ["a", "b"]})
    message = refusal(path, column="t")
    assert "'t'" in message
    assert "lists of token ids" in message
    if values != [1, 2]:
        assert "keys" in refusal(path, column="ok", key="t")


TITLED: dict[str, str] = {"column": "t"}
BAD: list[tuple[str, str | bytes, dict[str, str], str]] = [  # a file, what it holds, how it is read, what is said
    ("a.xlsx", "x", {}, "unknown suffix '.xlsx', use one of .txt, .npy"),
    ("a.xlsx", "x", {}, ".json, .parquet"),
    ("noname", "x", {}, "unknown suffix ''"),
    ("a.csv", "t,k\na,1\nb,2,3\n", TITLED, "row 2 has 3 fields, not 2"),
    ("a.csv", b"t,k\n\xff,1\n", TITLED, "row 1 is not UTF-8: save it as UTF-8, or give its encoding"),
    ("a.csv", "t,t\na,1\n", TITLED, "more than one column 't'"),
    ("a.csv", "t,k\n", TITLED, "no rows"),
    ("a.csv", "\n\n", {}, "a.csv has no rows: it must hold at least one item"),
    ("a.jsonl", b"\xff\xfe", {}, "row 1 is no JSON object"),
    ("a.jsonl", '{"t": [1, 2]}\n{"t": [1.5]}\n', {}, "row 2: column 't' holds [1.5]"),
    ("a.jsonl", '{"t": [1, 2]}\n{"t": ["a"]}\n', {}, "row 2: column 't' holds ['a']"),
    ("a.jsonl", f'{{"t": [1, 2]}}\n{{"t": [{2**64}]}}\n', {}, f"row 2: column 't' holds [{2**64}]"),
    ("a.jsonl", '[\n{"t": "a"}\n]\n', {}, "row 1 is no JSON object"),
    ("a.jsonl", '{"a\\"": "x"}', {}, """one of the names 'a"' has a quote or a backslash: rename it"""),
    ("a.jsonl", "\n\n", {}, "row 1 is no JSON object"),
    ("a.txt", "[1, 2]\n[3]\n", {}, "are lists written as text: save them as a column"),
    ("a.txt", '["<a_1>", "<b_2>"]\n["<a_1>"]\nx\n', {}, "are lists written as text"),
    ("a.txt", "(5, 6)\n(7, 8)\n", {}, "are lists written as text"),
    ("a.txt", "[5 6]\n", {}, "are lists written as text"),
    ("a.txt", "a\nb\n\nc\n", {}, "line 3 is blank"),
    ("a.txt", b"a\rb\rc", {}, "line 1 holds a carriage return: end each line with a line feed"),
    ("a.txt", "a\n \t\r\nc\n", {}, "line 2 is blank"),
    ("a.txt", b"\xef\xbb\xbfa\n\xff\n", {}, "line 2 is not UTF-8"),
    ("a.txt", "a\n", TITLED, "no columns"),
    ("a.txt", "a\n", {"key": "t"}, "no columns"),
    ("a.parquet", b"PAR1 but not really, no", {}, "cannot be read"),
    ("a.parquet.gz", b"abc", {}, "cannot be read"),
    ("a.pkl", b"abc", {}, "a pickle can run any code"),
    ("a.pt", b"abc", {}, "a pickle can run any code"),
]


@pytest.mark.parametrize(("name", "data", "options", "words"), BAD)
def test_a_bad_file_is_refused(tmp_path, name, data, options, words):
    assert words in refusal(write(tmp_path / name, data), **options)


KEYED = {"column": "t", "key": "k"}
BAD_TABLES = [
    (TABLES, {"t": ["a", "b"], "k": [1.0, 2.0]}, KEYED, "integers"),
    (["jsonl", "parquet"], {"t": ["a"], "k": [[1]]}, KEYED, "keys must be integers of at most 64 bits or strings"),
    (["jsonl", "parquet"], {"t": [[1, 2], [3], [4, None]]}, {}, "row 3: a list in column 't' holds a missing value"),
    (["parquet"], {"t": pa.array([], pa.string())}, {}, "no rows"),
]


@pytest.mark.parametrize(("suffixes", "columns", "options", "words"), BAD_TABLES)
def test_a_bad_table_is_refused(tmp_path, suffixes, columns, options, words):
    for suffix in suffixes:
        assert words in refusal(write_table(tmp_path / f"a.{suffix}", columns), **options)


def test_paths_that_are_no_files(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    assert "no file" in refusal(tmp_path / "a.csv")
    assert "folder" in refusal(tmp_path / "folder.csv")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"t": 5}', "holds 5, not string"),
        ('{"t": "a"', "no JSON object"),
        ('["a"]', "no JSON object"),
        ('{"t": "\\ud800"}', "no JSON object"),
    ],
)
def test_bad_json_row(tmp_path, line, words):
    # Further than one of Arrow's blocks into the file, behind a blank line.
    good = 20_000
    lines = [json.dumps({"t": "a" * 1000})] * good
    lines.insert(5, "")
    message = refusal(write(tmp_path / "a.jsonl", "\n".join([*lines, line, '{"t": "b"}'])))
    assert f"row {good + 1}" in message
    assert words in message


def test_json_texts_that_look_like_dates(tmp_path):
    assert read(write_table(tmp_path / "a.jsonl", {"t": ["2012-01-01", "2012-01-02"]})).texts[0] == "2012-01-01"


def test_titles_in_brackets_are_texts(tmp_path):
    titles = ["[REC]", "(500) Days", "[untitled]", "(1)x"]
    assert read(write(tmp_path / "a.txt", "".join(f"{one}\n" for one in titles))).texts == titles


def test_nan_in_json_is_a_missing_value(tmp_path):
    rows = '{"t": "a", "p": NaN}\n{"t": "b", "p": 2.5}\n{"t": "c", "p": -Infinity}\n'
    for name, text in (("a.jsonl", rows), ("a.json", f"[{','.join(rows.splitlines())}]")):
        found = read(write(tmp_path / name, text), column="t", attributes=["p"])
        assert found.texts == ["a", "b", "c"]
        assert found.attributes["p"].to_pylist() == [None, 2.5, None]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.arange(3), "int64 [3]"),
        (np.zeros((2, 2, 2), int), "[2, 2, 2]"),
        (np.zeros((2, 2)), "float64"),
        (np.zeros((2, 2), bool), "bool"),
        (np.zeros((0, 2), int), "at least one item"),
        (np.zeros((2, 0), int), "at least one item"),
        (np.array([[1], "x"], object), "objects"),
    ],
)
def test_bad_npy(tmp_path, array, words):
    np.save(tmp_path / "a.npy", array)
    assert words in refusal(tmp_path / "a.npy")


def test_damaged_npy(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((100, 4), np.int32))
    whole = (tmp_path / "a.npy").read_bytes()
    for data in (whole[:-4], whole[:20], b"nonsense"):
        assert "no matrix" in refusal(write(tmp_path / "b.npy", data))
    with (tmp_path / "b.npy").open("wb") as file:
        np.savez(file, a=np.zeros((2, 2), int))
    assert "archive" in refusal(tmp_path / "b.npy")


COLUMNS = {
    "year": ["1977", "", "-5"],
    "price": ["1", "2.50", "-1e3"],
    "code": ["007", "12", "13"],
    "in_stock": ["true", "False", ""],
    "released": ["2026-11-14", "1977-05-25", ""],
    "seen": ["2026-11-14T12:00", "2026-11-14 12:00:01.5", ""],
    "updated": ["2026-11-14T12:00:00Z", "2026-11-14T12:00:00+01:00", ""],
    "no_date": ["2026-11-14", "2026-02-30", "2026-11-16"],
    "large": ["1", "99999999999999999999", "2"],
    "nothing": ["", "", ""],
}
NOON = datetime.datetime(2026, 11, 14, 12)
WRITTEN = {
    "year": (pa.int64(), [1977, None, -5]),
    "price": (pa.float64(), [1.0, 2.5, -1000.0]),
    "code": (pa.large_string(), COLUMNS["code"]),
    "in_stock": (pa.bool_(), [True, False, None]),
    "released": (pa.date32(), [datetime.date(2026, 11, 14), datetime.date(1977, 5, 25), None]),
    "seen": (pa.timestamp("us"), [NOON, NOON + datetime.timedelta(seconds=1.5), None]),
    "updated": (
        pa.timestamp("us", "UTC"),
        [NOON.replace(tzinfo=datetime.UTC), NOON.replace(hour=11, tzinfo=datetime.UTC), None],
    ),
    "no_date": (pa.large_string(), COLUMNS["no_date"]),
    "large": (pa.large_string(), COLUMNS["large"]),
    "nothing": (pa.large_string(), [None] * 3),
}


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_attributes_of_text_files_have_the_type_that_they_are_written_as(tmp_path, suffix):
    path = write_table(tmp_path / f"a.{suffix}", {"t": TEXTS[:3], **COLUMNS})
    items = read(path, column="t", key="code", attributes=[*COLUMNS, "year"])
    for name, (kind, values) in WRITTEN.items():
        column = items.attributes.column(name)
        assert (name, column.type, column.to_pylist()) == (name, kind, values)
    assert items.attributes.column_names == list(COLUMNS)
    assert items.keys.to_pylist() == COLUMNS["code"]


def test_attributes_of_json_lines(tmp_path):
    rows = [
        {"t": [1], "n": 1, "f": 1, "b": None, "s": "2026-02-30", "d": None, "l": [], "x": {"a": 1}},
        {"t": [2], "f": 1.5, "b": True, "s": "b", "d": "2026-11-14", "l": ["a", "b"]},
        {"t": [3], "n": None, "f": 2, "b": False, "s": "c", "d": "1977-05-25", "l": None, "late": 5},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    items = read(path, column="t", attributes=["n", "f", "b", "s", "d", "l", "late", "never"])
    assert items.attributes.to_pydict() == {
        "n": [1, None, None],
        "f": [1.0, 1.5, 2.0],
        "b": [None, True, False],
        "s": ["2026-02-30", "b", "c"],
        "d": [None, datetime.date(2026, 11, 14), datetime.date(1977, 5, 25)],
        "l": [[], ["a", "b"], None],
        "late": [None, None, 5],
        "never": [None, None, None],
    }


def test_refused_attributes(tmp_path):
    for values in ([1, "a"], [True, 1], [{}, {}], [[1], [2]], [2**64, 1]):
        path = write_table(tmp_path / "a.jsonl", {"t": [[1], [2]], "x": values})
        assert "the values of attribute 'x' must be of one kind" in refusal(path, column="t", attributes=["x"])
    path = write(tmp_path / "b.jsonl", '{"t": [1], "x": 1}\n{"t": [1], "x": }\n')
    assert "row 2 is no JSON object" in refusal(path, column="t", attributes=["x"])
    for suffix in ("csv", "parquet"):
        path = write_table(tmp_path / f"a.{suffix}", {"t": ["a"], "x": ["b"]})
        assert "has no column 'y', it has 't', 'x'" in refusal(path, column="t", attributes=["x", "y"])
    assert read(path, attributes=["x"]).texts == ["a"]
    assert "omit column, key and attributes" in refusal(write(tmp_path / "a.txt", "a"), attributes=["x"])
