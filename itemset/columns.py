"""The named columns of a CSV, TSV, JSON-lines or Parquet file, as Arrow reads them."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pa_parquet

from itemset.errors import ItemSetError

_BLOCK_BYTES = 1 << 24  # no CSV row or JSON line may be longer; the readers' own 1 MiB is short for long items
_PARQUET_ROWS = 1 << 16


@dataclass(frozen=True)
class Columns:
    """Arrow columns of one length: the items', and the keys' where a key was asked for.

    done: share of the file that these and the rows before them take, where they are one batch of many.
    """

    items: Any
    column: str
    keys: Any = None
    key: str | None = None
    done: float = 1.0


def read_csv(path: Path, column: str | None, key: str | None) -> Columns:
    """Both columns as strings (a comma between fields, a tab in .tsv); keys as int64 where each is written as one."""
    column, key = _choose(path, _csv_names(path), column, key)
    table = pa_csv.read_csv(path, **_csv_options(path, column, key))
    if key is None:
        return Columns(table.column(column), column)
    keys = table.column(key)
    integers = _written_as_integers(path, key, [keys])
    return Columns(table.column(column), column, keys.cast(pa.int64()) if integers else keys, key)


def csv_batches(path: Path, column: str | None, key: str | None) -> Iterator[Columns]:
    """As `read_csv`, some megabytes at a time. Where there is a key, its column is read once before."""
    column, key = _choose(path, _csv_names(path), column, key)
    integers = False
    if key is not None:
        with pa_csv.open_csv(path, **_csv_options(path, key)) as reader:
            integers = _written_as_integers(path, key, (batch.column(0) for batch in reader))
    size = os.path.getsize(path)
    with pa.OSFile(str(path)) as file, pa_csv.open_csv(file, **_csv_options(path, column, key)) as reader:
        for batch in reader:
            table = pa.Table.from_batches([batch])
            keys: Any = None if key is None else table.column(key)
            if integers:
                keys = keys.cast(pa.int64())
            yield Columns(table.column(column), column, keys, key, file.tell() / size)


def _csv_names(path: Path) -> list[str]:
    with pa_csv.open_csv(path, **_csv_options(path)) as head:
        names: list[str] = head.schema.names
    return names


def _csv_options(path: Path, *names: str | None) -> dict[str, Any]:
    """How Arrow reads these columns (all where none is named) as strings."""
    columns = [name for name in dict.fromkeys(names) if name is not None]
    return {
        "read_options": pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
        "parse_options": pa_csv.ParseOptions(
            delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True
        ),
        # As strings: type inference would turn the title "1984" into a number and the key "007" into 7.
        "convert_options": pa_csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    }


def _written_as_integers(path: Path, key: str, chunks: Iterable[Any]) -> bool:
    """Whether every key is written as an integer of at most 64 bits. Raises ItemSetError where all are floats."""
    integers = floats = True
    first = None
    for chunk in chunks:
        first = chunk[0] if first is None and len(chunk) else first
        floats = floats and _all_match(chunk, r"^-?[0-9]+\.0+$")
        integers = integers and _all_match(chunk, r"^(0|-?[1-9][0-9]*)$") and _fits_int64(chunk)
        if not (integers or floats):
            return False
    if floats and first is not None:
        raise ItemSetError(f"{path}: keys in column {key!r} are floats ({first}, ...), write them as integers")
    return integers


def _fits_int64(texts: Any) -> bool:
    try:
        texts.cast(pa.int64())
    except pa.ArrowInvalid:  # more digits than int64 has
        return False
    return True


def _all_match(texts: Any, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def read_jsonl(path: Path, column: str | None, key: str | None) -> Columns:
    """Columns of strings, int64 or lists of int64, as the first row has them. Other fields are not looked at."""
    column, key, schema = _json_schema(path, column, key)
    table = _parse_json(path, path, schema)
    return Columns(table.column(column), column, None if key is None else table.column(key), key)


def jsonl_batches(path: Path, column: str | None, key: str | None) -> Iterator[Columns]:
    """As `read_jsonl`, some megabytes at a time."""
    column, key, schema = _json_schema(path, column, key)
    for lines, done in line_blocks(path):
        if not lines.isspace():
            table = _parse_json(path, pa.BufferReader(lines), schema)
            yield Columns(table.column(column), column, None if key is None else table.column(key), key, done)


def line_blocks(path: Path) -> Iterator[tuple[bytes, float]]:
    """A file in blocks of whole lines, without a byte order mark, and the share of the file up to their end."""
    size, block = os.path.getsize(path), 2 * _BLOCK_BYTES
    with path.open("rb") as file:
        while lines := file.read(block) + file.readline():
            yield lines if file.tell() > len(lines) else lines.removeprefix(codecs.BOM_UTF8), file.tell() / size


def _json_schema(path: Path, column: str | None, key: str | None) -> tuple[str, str | None, dict[str, Any]]:
    """The columns' names, and their types by name."""
    with path.open("rb") as file:
        start = next((line for line in file if line.strip()), b"")
    first = _json_object(path, start.removeprefix(codecs.BOM_UTF8), 1)
    column, key = _choose(path, list(first), column, key)
    # The first row decides the types: inference would turn texts that look like dates into timestamps.
    schema = {name: _json_type(path, name, first[name]) for name in (column, key) if name is not None}
    if key is not None and pa.types.is_list(schema[key]):
        raise ItemSetError(f"{path}: column {key!r} holds lists, keys must be integers or strings")
    return column, key, schema


def _parse_json(path: Path, source: Any, schema: dict[str, Any]) -> Any:
    try:
        return pa_json.read_json(
            source,
            read_options=pa_json.ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=pa_json.ParseOptions(
                explicit_schema=pa.schema(list(schema.items())), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        _blame_json(path, schema)
        raise


def _json_object(path: Path, line: bytes, row: int) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ItemSetError(f"{path}, row {row} is no JSON object on one line: {error}") from error


def _json_type(path: Path, name: str, value: object) -> Any:
    """The Arrow type of a column whose first value this is."""
    if value is None:
        raise ItemSetError(f"{path}, row 1 has no value in column {name!r}: fill it in or remove the row")
    if (kind := _kind(value)) is None:
        raise ItemSetError(
            f"{path}: column {name!r} holds {value!r:.60}, use texts or lists of token ids (keys: integers)"
        )
    return kind


def _kind(value: object) -> Any:
    if isinstance(value, str):
        return pa.string()
    if _is_int64(value):
        return pa.int64()
    if isinstance(value, list) and all(token is None or _is_int64(token) for token in value):
        return pa.list_(pa.int64())
    return None


def _is_int64(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _blame_json(path: Path, schema: dict[str, Any]) -> None:
    """Raise the ItemSetError of the first bad row: Arrow counts rows from the start of its own blocks."""
    with path.open("rb") as file:
        rows = (line for line in file if line.strip())
        for row, line in enumerate(rows, 1):
            record = _json_object(path, line.removeprefix(codecs.BOM_UTF8) if row == 1 else line, row)
            for name, wanted in schema.items():
                value = record.get(name)
                if value is not None and _kind(value) != wanted:
                    raise ItemSetError(f"{path}, row {row}: column {name!r} holds {value!r:.60}, not {wanted}")


def read_parquet(path: Path, column: str | None, key: str | None) -> Columns:
    """The columns with the types that the file gives them."""
    # Not read_table(): that would read columns out of folder names such as year=2024, too.
    with pa_parquet.ParquetFile(path) as file:
        column, key = _choose(path, file.schema_arrow.names, column, key)
        table = file.read(columns=list({column, column if key is None else key}))
    return Columns(table.column(column), column, None if key is None else table.column(key), key)


def parquet_batches(path: Path, column: str | None, key: str | None) -> Iterator[Columns]:
    """As `read_parquet`, some ten thousand rows at a time, without holding a row group in memory."""
    with pa_parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        column, key = _choose(path, file.schema_arrow.names, column, key)
        rows, read = file.metadata.num_rows, 0
        for batch in file.iter_batches(_PARQUET_ROWS, columns=list({column, column if key is None else key})):
            table = pa.Table.from_batches([batch])
            read += len(table)
            keys = None if key is None else table.column(key)
            yield Columns(table.column(column), column, keys, key, read / rows)


def _choose(path: Path, names: list[str], column: str | None, key: str | None) -> tuple[str, str | None]:
    there = ", ".join(map(repr, names))
    for name in (column, key):
        if name is not None and name not in names:
            raise ItemSetError(f"{path} has no column {name!r}, it has {there}")
        if names.count(name) > 1:  # type: ignore[arg-type]
            raise ItemSetError(f"{path} has more than one column {name!r}: rename one")
    if column is None:
        rest = [name for name in names if name != key]
        if len(rest) != 1:
            raise ItemSetError(f"{path} has the columns {there}: say which one holds the items")
        column = rest[0]
    return column, key
