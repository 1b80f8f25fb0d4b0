"""Delimited text as people write it: delimiters, quotes, headers and encodings are judged, said or asked for."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from itemset import ItemSetError
from itemset.building.columns import names_in
from itemset.building.dialects import JUDGED, Dialect
from itemset.building.sources import read
from itemset.storage import file_at


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(ItemSetError) as error:
        read(path, **options)  # type: ignore[arg-type]
    assert str(path) in str(error.value)
    return str(error.value)


def taken(path: Path, dialect: Dialect = JUDGED) -> str:
    """What is said of a file."""
    return str(names_in(file_at(path), dialect)[1])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "isbn;title;price\r\n3;Emma;3,50\r\n4;Ulysses;12,00\r\n", "semicolons"),
        ("b.csv", "isbn\ttitle\n3\tEmma, a novel\n4\tUlysses; or so\n", "tabs"),
        ("c.csv", "isbn|title|tags\n3|Emma|a;b\n4|Ulysses|c\n", "bars"),
        ("d.csv", 'sep=|\nisbn|title\n3|"Emma"\n4|Ulysses\n', "bars"),
        ("e.csv", '\ufeffisbn,title\n3,"Emma; a|b"\n4,"Ulysses; c|d"\n', "commas"),
        ("f.dat", "3::Emma::a|b\n4::Ulysses::c\n", "double colons"),
        ("g.item", "isbn:token\ttitle:token_seq\n3\tEmma, one\n4\tUlysses\n", "tabs"),
        ("h.item", "3|Emma|1\n4|Ulysses|0\n", "bars"),
    ],
)
def test_the_delimiter_is_the_one_that_gives_all_lines_as_many_fields(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = write(tmp_path / name, text)
    assert f"separated by {said}, " in taken(path)
    names, _ = names_in(file_at(path), JUDGED)
    source = read(path, column=names[1], key=names[0])
    assert [title.partition(",")[0].partition(";")[0] for title in source.texts or []] == ["Emma", "Ulysses"]
    assert source.keys.to_pylist() == [3, 4]


@pytest.mark.parametrize("text", ["id,name;x\n1,a;b\n2,c;d\n", "a;b|c\nd;e|f\n", "id\ttitle,x|y\n1\ta,b|c\n"])
def test_two_delimiters_that_fit_are_asked_for(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.csv", text)
    assert "may be separated by" in refusal(path, column="a")
    first = text.partition("\n")[0]
    delimiter = next(one for one in ",;\t|" if one in first)
    assert names_in(file_at(path), Dialect(delimiter=delimiter))[0] == first.split(delimiter)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("sku, name\nA1, Kite\nA2, Ball\n", ["Kite", "Ball"]),
        ('sku, name\nA1, "Kite, red"\nA2, "Ball"\n', ["Kite, red", "Ball"]),
        ("sep=;\nsku; name\nA1; Kite\nA2; Ball\n", ["Kite", "Ball"]),
        ("sku,name\nA1, Kite\nA2, Ball\n", [" Kite", " Ball"]),  # no header is written so: the spaces are the items'
    ],
)
def test_a_space_after_each_delimiter_is_no_part_of_a_field(tmp_path: Path, text: str, texts: list[str]) -> None:
    path = write(tmp_path / "a.csv", text)
    assert read(path, column="name", key="sku").texts == texts
    assert ("and spaces" in taken(path)) == (texts[0][0] != " ")


TEXTS = ['"A" is for "Alibi"', '"Unclosed', 'Say "hi"', '"Whole"', '5" disk']


def test_quotes_in_a_tsv_are_text(tmp_path: Path) -> None:
    rows = "".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS))
    for name in ("a.tsv", "a.item"):
        assert read(write(tmp_path / name, "id\ttitle\n" + rows), column="title", key="id").texts == TEXTS


def test_a_tsv_may_be_quoted_if_that_is_said_or_its_header_is(tmp_path: Path) -> None:
    doubled = '\t"say ""hi"""\n2\t"b"\n'
    path = write(tmp_path / "a.tsv", "id\ttitle\n1" + doubled)
    assert "may be quoted" in refusal(path, column="title")
    assert read(path, column="title", dialect=Dialect(quotes="csv")).texts == ['say "hi"', "b"]
    assert read(path, column="title", dialect=Dialect(quotes="text")).texts == ['"say ""hi"""', '"b"']
    assert read(write(path, '"id"\t"title"\n"1"' + doubled), column="title").texts == ['say "hi"', "b"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('"Say \\"no\\" twice"', "row 2 has text after a closing quote"),
        ('"Heroes" (album)', "row 2 has text after a closing quote"),
        ('"Never closed', "row 2 opens a quote that is never closed"),
        ("a, b", "row 2 has 3 fields, not 2"),
    ],
)
def test_a_csv_that_breaks_the_rules_of_quotes_is_refused(tmp_path: Path, row: str, words: str) -> None:
    path = write(tmp_path / "a.csv", f"id,title\n1,Fine\n2,{row}\n3,Last\n")
    assert words in refusal(path, column="title")


def test_all_bad_rows_are_told_at_once(tmp_path: Path) -> None:
    lines = [f"{i},a{',b' * (i % 2)}\n" for i in range(40)]
    message = refusal(write(tmp_path / "a.csv", "id,title\n1,x\n2,x\n3,x\n" + "".join(lines)), column="title")
    assert message.startswith("20 rows are bad, such as ")
    assert message.count("has 3 fields") == 10
    assert "row 5 has" in message


@pytest.mark.parametrize("text", ["spam\nham\neggs\n", "Photo ID\nPassport\n", "north\nsouth\n"])
def test_a_first_line_that_may_be_an_item_is_asked_for(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "labels.csv", text)
    assert "may be a header or an item" in refusal(path)
    lines = text.splitlines()
    assert read(path, dialect=Dialect(header=False)).texts == lines
    assert read(path, dialect=Dialect(header=True)).texts == lines[1:]
    assert read(path, column=lines[0]).texts == lines[1:]


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("label\nspam\nham\n", ["spam", "ham"]),
        ("film_title\nAlien\nHeat\n", ["Alien", "Heat"]),
        ("spam\nham\nspam\n", ["spam", "ham", "spam"]),
        ("1984\n2001\n", ["1984", "2001"]),
    ],
)
def test_a_header_is_known_by_its_name_or_by_what_stands_below(tmp_path: Path, text: str, texts: list[str]) -> None:
    assert read(write(tmp_path / "a.csv", text)).texts == texts


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8-sig", "utf-16-le"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.txt"])
def test_encodings_are_seen_or_asked_for(tmp_path: Path, name: str, encoding: str) -> None:
    text = {
        "a.csv": "id,title\n1,Kite\n2,Amélie\n",
        "a.tsv": "id\ttitle\n1\tKite\n2\tAmélie\n",
        "a.jsonl": '{"title": "Kite"}\n{"title": "Amélie"}\n',
        "a.json": '[{"title": "Kite"},\n{"title": "Amélie"}]',
        "a.txt": "Kite\nAmélie\n",
    }[name]
    path = write(tmp_path / name, text.encode(encoding))
    marked_too = write(tmp_path / f"too_{name}", f"\ufeff{text}".encode("utf-16-le"))
    column = None if name == "a.txt" else "title"
    if encoding in ("latin-1", "cp1252"):
        assert f"{'json' if name == 'a.json' else 2} is not UTF-8: save it as UTF-8, or give its encoding" in refusal(
            path, column=column
        )
    if encoding == "utf-16-le":
        assert "NUL bytes: save it as UTF-8, or give its encoding" in refusal(path, column=column)
    marked = encoding in ("utf-16", "utf-8-sig")
    given = JUDGED if marked else Dialect(encoding=encoding)
    assert read(path, column=column, dialect=given).texts == ["Kite", "Amélie"]
    assert read(marked_too, column=column, dialect=Dialect(encoding="utf-16-le")).texts == ["Kite", "Amélie"]
    for unknown in ("latin-99", "hex"):
        assert f"unknown encoding '{unknown}'" in refusal_of_encoding(path, column, unknown)


def refusal_of_encoding(path: Path, column: str | None, encoding: str) -> str:
    with pytest.raises(ItemSetError) as error:
        read(path, column=column, dialect=Dialect(encoding=encoding))
    return str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_compressed_text(tmp_path: Path, name: str, suffix: str) -> None:
    rows = [f"item {i}" for i in range(3000)]
    body = {"a.csv": "title\n" + "\n".join(rows), "a.txt": "\n".join(rows)}
    data = body.get(name, "".join(f'{{"title": "{row}"}}\n' for row in rows)).encode()
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
    path = write(tmp_path / f"{name}{suffix}", packed[suffix](data))
    assert read(path).texts == rows
    assert "cannot be read" in refusal(write(path, packed[suffix](data)[:-9]))


def test_options_that_are_none() -> None:
    for words, message in [
        ({"quotes": "maybe"}, "quotes must be csv or text"),
        ({"header": "1"}, "header must be yes or no"),
        ({"delimiter": ""}, "delimiter must be"),
        ({"split": ""}, "split must be the text between two strings of a list"),
    ]:
        with pytest.raises(ItemSetError, match=message):
            Dialect.of(words)
    assert Dialect.of({"delimiter": "tab", "header": "no"}) == Dialect(delimiter="\t", header=False)
