"""The named columns of a CSV, TSV, JSON-lines or Parquet file, as Arrow reads them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pa_parquet

from itemset.building.written import Written, all_match, is_written_as
from itemset.errors import ItemSetError
from itemset.storage import SourceFile
from itemset.trie.attributes import as_attributes

_BLOCK_BYTES = 1 << 24  # no CSV row or JSON line may be longer; the readers' own 1 MiB is short for long items
_PARQUET_ROWS = 1 << 16


@dataclass(frozen=True)
class Columns:
    """Consecutive rows of a file: Arrow columns of one length.

    items, column: the items and their column's name. keys, key: the same for the keys, None without them.
    attributes: as `as_attributes` returns them, None if none were asked for.
    done: share of the file up to the last of these rows.
    """

    items: Any
    column: str
    keys: Any
    key: str | None
    attributes: pa.Table | None
    done: float

    @staticmethod
    def of(table: pa.Table, column: str, key: str | None, attributes: pa.Table, done: float) -> Columns:
        """Return them out of a table that has them all, but for the attributes."""
        keys = None if key is None else table.column(key)
        known = as_attributes(attributes, len(table)) if attributes.num_columns else None
        return Columns(table.column(column), column, keys, key, known, done)


def read_csv(
    source: SourceFile, column: str | None, key: str | None, attributes: Sequence[str] = ()
) -> Iterator[Columns]:
    """Read columns as strings, some megabytes at a time; fields are separated by commas, in .tsv by tabs.

    Keys are int64 if each is written as one, attributes of the type that all of them are written as (see `Written`). To
    know that, these columns are read once before.
    """
    column, key = _choose(source, _csv_names(source), column, key, attributes)
    types = _csv_types(source, attributes)
    if key is not None:
        with source.open() as file, pa_csv.open_csv(file, **_csv_options(source, key)) as reader:
            integers = _written_as_integers(source, key, (batch.column(0) for batch in reader))
    options = _csv_options(source, column, key, *attributes)
    with source.open() as file, pa_csv.open_csv(file, **options) as reader:
        for batch in reader:
            table = pa.Table.from_batches([batch])
            known = _cast(table, types)
            if key is not None and integers:
                table = table.set_column(table.column_names.index(key), key, table.column(key).cast(pa.int64()))
            yield Columns.of(table, column, key, known, file.tell() / source.size)


def _csv_types(source: SourceFile, attributes: Sequence[str]) -> dict[str, Any]:
    """Return the attributes' types."""
    written = {name: Written(numbers=True) for name in attributes}
    if written:
        with source.open() as file, pa_csv.open_csv(file, **_csv_options(source, *attributes)) as reader:
            for batch in reader:
                for name, seen in written.items():
                    seen.add(batch.column(name))
    return {name: seen.type for name, seen in written.items()}


def _cast(table: pa.Table, types: dict[str, Any]) -> pa.Table:
    """Return the columns of these types."""
    return table.select(list(types)).cast(pa.schema(list(types.items())))


def _csv_names(source: SourceFile) -> list[str]:
    with source.open() as file, pa_csv.open_csv(file, **_csv_options(source)) as head:
        names: list[str] = head.schema.names
    return names


def _csv_options(source: SourceFile, *names: str | None) -> dict[str, Any]:
    """Return how Arrow reads these columns, all if none is named, as strings."""
    columns = [name for name in dict.fromkeys(names) if name is not None]
    return {
        "read_options": pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
        "parse_options": pa_csv.ParseOptions(
            delimiter="\t" if source.suffix == ".tsv" else ",", newlines_in_values=True
        ),
        # As strings: type inference would turn the title "1984" into a number and the key "007" into 7.
        "convert_options": pa_csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    }


def _written_as_integers(source: SourceFile, key: str, chunks: Iterable[Any]) -> bool:
    """Return whether every key is written as an integer of at most 64 bits. Raises ItemSetError if all are floats."""
    integers = floats = True
    first = None
    for chunk in chunks:
        first = chunk[0] if first is None and len(chunk) else first
        floats = floats and all_match(chunk, r"^-?[0-9]+\.0+$")
        integers = integers and is_written_as(chunk, pa.int64(), r"^(0|-?[1-9][0-9]*)$")
        if not (integers or floats):
            return False
    if floats and first is not None:
        raise ItemSetError(f"{source}: keys in column {key!r} are floats ({first}, ...), write them as integers")
    return integers


def read_jsonl(
    source: SourceFile, column: str | None, key: str | None, attributes: Sequence[str] = ()
) -> Iterator[Columns]:
    """Read columns of strings, int64 or lists of int64, as the first row has them, some megabytes at a time.

    Attributes have the type that all their values have; strings that are all dates or times are these. To know that,
    the file is read once before. Other fields are not looked at.
    """
    column, key, schema = _json_schema(source, column, key, attributes)
    types = _json_types(source, attributes)
    read = {name: pa.string() if pa.types.is_temporal(kind) else kind for name, kind in types.items()} | schema
    for lines, done in line_blocks(source):
        if not lines.isspace():
            table = _parse_json(source, lines, read, schema)
            yield Columns.of(table, column, key, _cast(table, types), done)


def line_blocks(source: SourceFile) -> Iterator[tuple[bytes, float]]:
    """Yield a file in blocks of whole lines, without a byte order mark, and the share of the file up to their end."""
    block = 2 * _BLOCK_BYTES
    with source.open() as file:
        while lines := file.read(block) + file.readline():
            yield lines if file.tell() > len(lines) else lines.removeprefix(codecs.BOM_UTF8), file.tell() / source.size


def _json_types(source: SourceFile, attributes: Sequence[str]) -> dict[str, Any]:
    """Return the attributes' types."""
    import msgspec

    if not attributes:
        return {}
    fields = {f"field{i}": name for i, name in enumerate(attributes)}
    row = msgspec.defstruct("Row", [(field, Any, None) for field in fields], rename=fields)
    kinds: dict[str, set[Any]] = {name: set() for name in attributes}
    written = {name: Written(numbers=False) for name in attributes}
    for lines, _ in line_blocks(source):
        try:
            rows = msgspec.json.Decoder(row).decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _blame_json(source, {})
            raise ItemSetError(f"{source} holds a line that is no JSON object: {error}") from error
        for field, name in fields.items():
            values = [value for row in rows if (value := getattr(row, field)) is not None]
            found = set(map(_attribute_kind, values))
            kinds[name] |= found
            if found == {pa.string()}:
                written[name].add(pa.array(values, pa.string()))
    types = {}
    for name, found in kinds.items():
        if found == {pa.int64(), pa.float64()}:
            found = {pa.float64()}
        if len(found) > 1 or None in found:
            raise ItemSetError(
                f"{source}: the values of attribute {name!r} must be of one kind: bools, numbers of at most 64 bits, "
                "strings or lists of strings"
            )
        kind = next(iter(found), pa.string())
        types[name] = written[name].type if kind == pa.string() else kind
    return types


def _attribute_kind(value: object) -> Any:
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, list):
        return pa.list_(pa.string()) if all(isinstance(one, str) for one in value) else None
    return _kind(value)


def _json_schema(
    source: SourceFile, column: str | None, key: str | None, attributes: Sequence[str]
) -> tuple[str, str | None, dict[str, Any]]:
    """Return the names of the items' and keys' columns, and their types by name."""
    with source.open() as file:
        start = next((line for line in file if line.strip()), b"")
    first = _json_object(source, start.removeprefix(codecs.BOM_UTF8), 1)
    # An attribute may be missing in some rows, the first among them.
    column, key = _choose(source, list(dict.fromkeys([*first, *attributes])), column, key, attributes)
    # The first row decides the types: inference would turn texts that look like dates into timestamps.
    schema = {name: _json_type(source, name, first[name]) for name in (column, key) if name is not None}
    if key is not None and pa.types.is_list(schema[key]):
        raise ItemSetError(f"{source}: column {key!r} holds lists, keys must be integers or strings")
    return column, key, schema


def _parse_json(source: SourceFile, lines: bytes, read: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Return the columns to be read. schema: those of them that are items and keys."""
    try:
        return pa_json.read_json(
            pa.BufferReader(lines),
            read_options=pa_json.ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=pa_json.ParseOptions(
                explicit_schema=pa.schema(list(read.items())), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        _blame_json(source, schema)
        raise


def _json_object(source: SourceFile, line: bytes, row: int) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ItemSetError(f"{source}, row {row} is no JSON object on one line: {error}") from error


def _json_type(source: SourceFile, name: str, value: object) -> Any:
    """Return the Arrow type of a column with this first value."""
    if value is None:
        raise ItemSetError(f"{source}, row 1 has no value in column {name!r}: fill it in or remove the row")
    if (kind := _kind(value)) is None:
        raise ItemSetError(
            f"{source}: column {name!r} holds {value!r:.60}, use texts or lists of token ids (keys: integers)"
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


def _blame_json(source: SourceFile, schema: dict[str, Any]) -> None:
    """Raise the ItemSetError of the first bad row: Arrow counts rows from the start of its own blocks."""
    with source.open() as file:
        rows = (line for line in file if line.strip())
        for row, line in enumerate(rows, 1):
            record = _json_object(source, line.removeprefix(codecs.BOM_UTF8) if row == 1 else line, row)
            for name, wanted in schema.items():
                value = record.get(name)
                if value is not None and _kind(value) != wanted:
                    raise ItemSetError(f"{source}, row {row}: column {name!r} holds {value!r:.60}, not {wanted}")


def read_parquet(
    source: SourceFile, column: str | None, key: str | None, attributes: Sequence[str] = ()
) -> Iterator[Columns]:
    """Read the columns with the file's own types, some ten thousand rows at a time, never a whole row group."""
    # Not read_table(): that would read columns out of folder names such as year=2024, too.
    with source.open() as file, pa_parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as parquet:
        column, key = _choose(source, parquet.schema_arrow.names, column, key, attributes)
        rows, read = parquet.metadata.num_rows, 0
        wanted = list({column, column if key is None else key, *attributes})
        for batch in parquet.iter_batches(_PARQUET_ROWS, columns=wanted):
            table = pa.Table.from_batches([batch])
            read += len(table)
            yield Columns.of(table, column, key, table.select(attributes), read / rows)


def _choose(
    source: SourceFile, names: list[str], column: str | None, key: str | None, attributes: Sequence[str]
) -> tuple[str, str | None]:
    there = ", ".join(map(repr, names))
    for name in (column, key, *attributes):
        if name is not None and name not in names:
            raise ItemSetError(f"{source} has no column {name!r}, it has {there}")
        if names.count(name) > 1:  # type: ignore[arg-type]
            raise ItemSetError(f"{source} has more than one column {name!r}: rename one")
    if column is None:
        rest = [name for name in names if name != key and name not in attributes]
        if len(rest) != 1:
            raise ItemSetError(
                f"{source} has the columns {there}: say which one holds the items with --column (in Python: column=)"
            )
        column = rest[0]
    return column, key
