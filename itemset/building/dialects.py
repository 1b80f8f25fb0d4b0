"""How a table in a text file is written: its delimiter, its quotes, its encoding, and whether it has a header."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, Literal

from itemset.building.names import is_known
from itemset.building.streams import encoding_of, format_of, text_of
from itemset.errors import ItemSetError
from itemset.storage import SourceFile

DELIMITED = (".csv", ".tsv", ".item", ".dat")
JSON = (".jsonl", ".ndjson", ".json")
_TOKENS = re.compile(r"(<[^<>\s]+>)+")
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", "::": "double colons"}
_SAMPLE = 1 << 18  # characters that a delimiter and a header are judged by, at least a line
_VALUE = re.compile(r"[-+]?[\d.,]*\d([eE][-+]?\d+)?%?|\d{4}-\d\d-\d\d.*|true|false|null|none|nan|", re.IGNORECASE)
_INSIDE = "\x1f"  # stands for a delimiter of two characters: Python's csv has one
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
csv.field_size_limit(1 << 24)

WORDS = ("delimiter", "quotes", "header", "encoding", "split")  # of options that say how a table is written


@dataclass(frozen=True)
class Dialect:
    """How a table is written; what is None is judged by the file."""

    delimiter: str | None = None
    quotes: Literal["csv", "text"] | None = None  # fields may stand in quotes, or a quote is a character like others
    header: bool | None = None  # whether the first line has the columns' names
    encoding: str | None = None
    split: str | None = None  # between the strings of a list that an attribute holds as one text
    names: tuple[str, ...] = ()  # of the columns
    skipped: int = 0  # lines before the table (`sep=;`)
    spaced: bool = False  # a space after a delimiter is no part of a field, because one stands after each

    @staticmethod
    def of(words: Mapping[str, str | None]) -> "Dialect":
        """Return what options say. Raises ItemSetError for a value that is none of theirs."""
        given = {name: words[name] for name in WORDS if words.get(name) is not None}
        for name, known in {"quotes": ("csv", "text"), "header": ("yes", "no")}.items():
            if given.get(name, known[0]) not in known:
                raise ItemSetError(f"{name} must be {known[0]} or {known[1]}, not {given[name]}")
        for name, between, such in (("delimiter", "fields", "';' or tab"), ("split", "strings of a list", "'|'")):
            if given.get(name) == "":
                raise ItemSetError(f"{name} must be the text between two {between}, such as {such}, not empty")
        values: dict[str, Any] = {**given, **({"header": given["header"] == "yes"} if "header" in given else {})}
        if "delimiter" in given:
            values["delimiter"] = {"tab": "\t", "\\t": "\t"}.get(str(given["delimiter"]), given["delimiter"])
        return Dialect(**values)

    def __str__(self) -> str:
        delimiter, header = _DELIMITERS.get(self.delimiter or "", self.delimiter), "a" if self.header else "no"
        delimiter = f"{delimiter} and spaces" if self.spaced else delimiter
        return f"separated by {delimiter}, {header} header, quotes as {self.quotes}, {self.encoding}"

    def rows(self, text: Any) -> Iterator[list[str] | str]:
        """Yield a text's rows with the header; for a row that breaks the rules of quotes, a message that says so."""
        lines = iter(text)
        for _ in range(self.skipped):
            next(lines, None)
        delimiter = self.delimiter or ","
        if len(delimiter) > 1:
            lines, delimiter = map(methodcaller("replace", delimiter, _INSIDE), lines), _INSIDE
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self.quotes == "text" else csv.QUOTE_MINIMAL
        rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, skipinitialspace=self.spaced, strict=True)
        while True:
            try:
                yield next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                unclosed = "unexpected end" in str(error)
                what = "opens a quote that is never closed" if unclosed else "has text after a closing quote"
                inside = 'write a quote inside quotes twice (not \\"), or say that quotes are text'
                yield f"{what} ({error}): {inside} (--quotes text, in a source ?quotes=text)"


JUDGED = Dialect()  # of which nothing is given: all is judged


def is_table(source: SourceFile, given: Dialect = JUDGED) -> bool:
    """Return whether a file is delimited text: by its suffix, or a .txt of which every first line has as many tabs."""
    if format_of(source) != ".txt":
        return format_of(source) in DELIMITED
    with text_of(source, encoding_of(source, given.encoding)) as (text, _):
        lines = text.read(_SAMPLE).splitlines()
    tabs = {line.rstrip("\r").count("\t") for line in lines[: -1 if len(lines) > 1 else None] if line.strip()}
    return given.delimiter is not None or (len(tabs) == 1 and tabs != {0})


def dialect_of(source: SourceFile, given: Dialect, wanted: Sequence[str] = ()) -> Dialect:
    """Return how a file is written, as it is given, else as its first lines say; of JSON, only its encoding.

    wanted: columns that a person named. Raises ItemSetError if two readings are as good: two delimiters, or a first
    line that may be a header or a row.
    """
    if not is_table(source, given):
        return replace(given, encoding=encoding_of(source, given.encoding)) if format_of(source) in JSON else given
    encoding = encoding_of(source, given.encoding)
    with text_of(source, encoding) as (text, _):
        sample = text.read(_SAMPLE)
        whole = len(sample) < _SAMPLE
    lines = sample.splitlines(keepends=True)
    lines = lines if whole or len(lines) < 2 else lines[:-1]
    dialect, kind = replace(given, encoding=encoding), format_of(source)
    if (first := re.fullmatch(r'"?sep=(.)"?[\r\n]*', lines[0] if lines else "")) is not None:
        dialect, lines = replace(dialect, skipped=1, delimiter=given.delimiter or first[1]), lines[1:]
    if kind == ".csv" and len(lines) > 1:
        usual = dialect.delimiter or ","
        spaced = all(usual in line and line.count(usual) == line.count(f"{usual} ") for line in lines if line.strip())
        dialect = replace(dialect, spaced=spaced)
    if dialect.delimiter is None:
        dialect = replace(dialect, delimiter=_delimiter(source, lines, kind, dialect))
    if dialect.quotes is None:
        fields = (lines[0] if lines else "").rstrip("\r\n").split(str(dialect.delimiter))
        quoted = kind == ".csv" or all(_QUOTED.fullmatch(field) for field in fields)
        dialect = replace(dialect, quotes="csv" if quoted else "text")
    rows = _rows(replace(dialect, skipped=0), lines)
    if kind != ".csv" and given.quotes is None and dialect.quotes == "text":
        begun = [field for row in rows for field in row if field[:1] == '"']
        if all(map(_QUOTED.fullmatch, begun)) and any('""' in field[1:-1] for field in begun):
            raise ItemSetError(
                f"{source}: {begun[0]:.60} may be quoted, or a text with quotes: say which, with --quotes csv or "
                "--quotes text, in a source ?quotes=csv or ?quotes=text"
            )
    if dialect.header is None:
        dialect = replace(dialect, header=_has_header(source, rows, wanted))
    return replace(dialect, names=tuple(_names(rows, dialect)))


def _rows(dialect: Dialect, lines: Sequence[str]) -> list[list[str]]:
    rows = dialect.rows(io.StringIO("".join(lines), newline=""))
    return [row for row in rows if row and not isinstance(row, str)]  # a bad one is named when the file is read


def _delimiter(source: SourceFile, lines: Sequence[str], kind: str, dialect: Dialect) -> str:
    """Return the delimiter that gives all first lines the same number of fields, more than one."""
    fit, begin = [], []
    for delimiter in list(_DELIMITERS)[: 5 if kind == ".dat" else 4]:
        quotes = dialect.quotes or ("csv" if kind == ".csv" else "text")
        rows = _rows(replace(dialect, delimiter=delimiter, quotes=quotes), lines)
        if rows and len(rows[0]) > 1:
            begin.append(delimiter)
            fit += [delimiter] * all(len(row) == len(rows[0]) for row in rows)
    usual = "," if kind in (".csv", ".dat") else "\t"
    if usual in begin and (fit in ([], [usual]) or usual == "\t"):  # beside tabs, commas and bars are parts of texts
        return usual
    best = fit or (begin if usual == "," else [])
    if len(best) == 1 and kind != ".tsv" and usual not in begin:
        return best[0]
    if not best:
        return usual  # one column
    said = " or ".join(f"{_DELIMITERS[one]} ({one!r})" for one in dict.fromkeys([usual, *best]))
    raise ItemSetError(
        f"{source}: its fields may be separated by {said}: say by which, with --delimiter, in a source ?delimiter="
    )


def _has_header(source: SourceFile, rows: list[list[str]], wanted: Sequence[str]) -> bool:
    """Return whether the first row has names: known ones, or such as differ in kind from what stands below them."""
    if not rows:
        return True
    first, below = rows[0], rows[1:]
    if any(name in first for name in wanted) or any(map(is_known, first)):
        return True
    columns = [[row[i] for row in below if len(row) == len(first)] for i in range(len(first))]
    if any(name and (_VALUE.fullmatch(name) or name in column) for name, column in zip(first, columns, strict=True)):
        return False
    if len(first) > 1 or not below or all(map(_VALUE.fullmatch, columns[0])):
        return True
    raise ItemSetError(
        f"{source}: its first line, {', '.join(first)!r:.80}, may be a header or an item: say which, with --header yes "
        "or --header no, in a source ?header=yes or ?header=no"
    )


def _names(rows: list[list[str]], dialect: Dialect) -> list[str]:
    if not rows:
        return []
    if dialect.header:
        return rows[0]
    tokens = [i for i, column in enumerate(zip(*rows, strict=False)) if all(map(_TOKENS.fullmatch, column))]
    if tokens:
        return ["semantic_id" if [i] == tokens else f"column{i + 1}" for i in range(len(rows[0]))]
    if dialect.delimiter == "::" and len(rows[0]) == 3 and all(row[0].isdecimal() for row in rows):
        return ["id", "title", "genres"]  # MovieLens' movies.dat
    return [f"column{i}" for i in range(1, len(rows[0]) + 1)]
