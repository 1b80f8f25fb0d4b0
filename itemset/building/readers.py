"""The named columns of a table in a file, as they stand there: delimited text, JSON, Parquet, NumPy archives."""

import gc
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from itemset.building.dialects import JSON, Dialect
from itemset.building.names import is_known
from itemset.building.streams import format_of, line_blocks, not_decoded, text_of
from itemset.errors import Faults, ItemSetError
from itemset.storage import SourceFile

BLOCK_BYTES = 1 << 25  # of lines that are decoded at once
ROWS = 1 << 16  # of a batch
_HEAD = 1000  # rows of JSON lines whose fields are the columns
_FIELD = "item"

Batch = tuple[dict[str, Any], float]
"""Rows: their values by column, an Arrow array, a list of JSON values or None; and the share of the file up to them."""


def read_delimited(source: SourceFile, dialect: Dialect, names: Sequence[str], faults: Faults) -> Iterator[Batch]:
    """Read columns as strings, an empty field as a missing value. Rows that break the table's rules are faults."""
    at = [(name, dialect.names.index(name)) for name in names if name in dialect.names]
    width, header, rows, batch = len(dialect.names), dialect.header, 0, list[list[str]]()
    encoding = str(dialect.encoding)

    def columns() -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(names)
        for name, i in at:
            values = [row[i] or None for row in batch]
            try:
                found[name] = pa.array(values, pa.string())
            except UnicodeEncodeError:  # a lone surrogate: a byte that could not be decoded
                for number, value in enumerate(values, rows - len(batch) + 1):
                    if re.search("[\ud800-\udfff]", value or ""):
                        faults.add(f"{source}, row {number} {not_decoded(encoding)}")
                found[name] = pa.nulls(len(batch), pa.string())
        return found

    with text_of(source, encoding) as (text, share):
        for row in dialect.rows(text):
            if header and row:
                header = False
            elif row:
                rows += 1
                if isinstance(row, str):
                    faults.add(f"{source}, row {rows} {row}")
                elif len(row) != width:
                    faults.add(f"{source}, row {rows} has {len(row)} fields, not {width}: {_OTHER_WAYS}")
                else:
                    batch.append(row)
                    if len(batch) == ROWS:
                        yield columns(), share()
                        batch = []
        if batch:
            yield columns(), share()


_OTHER_WAYS = "correct it, or say how fields are separated and quoted (--delimiter, --quotes, in a source ?quotes=text)"


def read_json(source: SourceFile, dialect: Dialect, names: Sequence[str], faults: Faults) -> Iterator[Batch]:
    """Read fields of JSON objects, one a line or in one document. Other fields are ignored."""
    document = _document(source, str(dialect.encoding)) if format_of(source) == ".json" else None
    if document is not None:
        yield {name: [one.get(name) for one in document] for name in names}, 1.0
        return
    fields = {f"field{i}": name for i, name in enumerate(names)}
    try:
        row = msgspec.defstruct("Row", [(field, Any, None) for field in fields], rename=fields)
    except ValueError as error:
        which = ", ".join(map(repr, names))
        raise ItemSetError(f"{source}: one of the names {which} has a quote or a backslash: rename it") from error
    decoder, number = msgspec.json.Decoder(row), 0
    for lines, share in line_blocks(source, str(dialect.encoding), BLOCK_BYTES):
        try:
            rows = decoder.decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            rows = [_object(source, line, number + i, decoder.decode, faults) for i, line in _lines(lines)]
        number += len(rows)
        yield {name: [getattr(one, field, None) for one in rows] for field, name in fields.items()}, share


def _lines(lines: bytes) -> Iterator[tuple[int, bytes]]:
    return enumerate((line for line in lines.split(b"\n") if line.strip()), 1)


def _object(source: SourceFile, line: bytes, row: int, decode: Any, faults: Faults) -> Any:
    """Return a line's object, None if it is none, which is a fault."""
    try:
        return decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        with suppress(ValueError, msgspec.MsgspecError):
            return decode(_without_nan(line))
        try:
            line.decode()
            faults.add(f"{source}, row {row} is no JSON object on one line: {error}")
        except UnicodeDecodeError:
            faults.add(f"{source}, row {row} {not_decoded('utf-8')}")
        return None


def _without_nan(data: bytes) -> bytes:
    """Return JSON with null for the NaN and Infinity that Python and pandas write. Raises ValueError for no JSON."""
    return msgspec.json.encode(json.loads(data, parse_constant=lambda _: None))


def _document(source: SourceFile, encoding: str) -> list[dict[str, Any]] | None:
    """Return a JSON document's rows, of an array or of an object of them by key; None if it is JSON lines."""
    data = b"".join(lines for lines, _ in line_blocks(source, encoding, BLOCK_BYTES))
    collects = gc.isenabled()
    gc.disable()  # millions of objects are made that all stay: most of the time, it would look through them in vain
    try:
        try:
            given = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            if "trailing characters" in str(error):
                return None
            try:
                given = msgspec.json.decode(_without_nan(data))
            except ValueError as other:
                if str(other).startswith("Extra data"):  # JSON lines, the first of which has NaN
                    return None
                raise ItemSetError(f"{source} is no JSON: {error}") from error
        return as_rows(given, str(source))
    finally:
        if collects:
            gc.enable()


def as_rows(given: Any, source: str) -> list[dict[str, Any]]:
    """Return what is a list of items or rows, or an object of them by key, as rows. Raises ItemSetError for others.

    A single field with a list of objects names the table, as in {"films": [{"title": ...}, ...]}.
    """
    if isinstance(given, dict) and len(given) == 1:
        (only,) = given.values()
        given = only if isinstance(only, list) and only and all(isinstance(one, dict) for one in only) else given
    if isinstance(given, list):
        return [one if isinstance(one, dict) else {_FIELD: one} for one in given]
    if not isinstance(given, dict) or _has_columns(given):
        raise ItemSetError(
            f"{source} holds {'columns or one record' if isinstance(given, dict) else 'no list'}: save an array of "
            'rows, [{"id": 1, "title": "..."}, ...], or an object of items by key, {"1": "...", ...}'
        )
    numbers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", str(key)) for key in given)
    rows = {int(key) if numbers else str(key): one for key, one in given.items()}
    return [{"key": key, **(one if isinstance(one, dict) else {_FIELD: one})} for key, one in rows.items()]


def _has_columns(given: dict[Any, Any]) -> bool:
    """Return whether an object's fields are columns, or those of one record, and not the keys of rows.

    Keys may be called as columns are: ID is Indonesia. Then the rows themselves have such a field.
    """
    if len(given) > _HEAD or not any(map(is_known, map(str, given))):
        return False
    first = next(iter(given.values()))
    return not (all(isinstance(one, dict) for one in given.values()) and any(map(is_known, map(str, first))))


def read_parquet(source: SourceFile, dialect: Dialect, names: Sequence[str], faults: Faults) -> Iterator[Batch]:
    """Read the columns with the file's own types, some ten thousand rows at a time, never a whole row group."""
    # Not read_table(): that would read columns out of folder names such as year=2024, too.
    with source.open() as file, pa_parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as parquet:
        rows, read = parquet.metadata.num_rows, 0
        there = parquet.schema_arrow.names
        for batch in parquet.iter_batches(ROWS, columns=[name for name in names if name in there]):
            read += len(batch)
            yield {name: batch.column(name) if name in there else None for name in names}, read / rows


def read_npz(source: SourceFile, dialect: Dialect, names: Sequence[str], faults: Faults) -> Iterator[Batch]:
    """Read the arrays of a NumPy archive: matrices are lists of token ids."""
    with source.open() as file, _archive(source, file) as archive:
        arrays = {name: archive[name] for name in names if name in archive.files}
        if len({len(array) for array in arrays.values()}) > 1:
            raise ItemSetError(f"{source}: its arrays {', '.join(arrays)} differ in length: save one row for each item")
        yield {name: _column(source, name, arrays[name]) if name in arrays else None for name in names}, 1.0


def _archive(source: SourceFile, file: Any) -> Any:
    try:
        return np.load(file)
    except (ValueError, EOFError, OSError) as error:
        raise ItemSetError(f"{source} is no NumPy archive: {error}") from error


def _column(source: SourceFile, name: str, array: Any) -> Any:
    if array.ndim == 2 and array.size:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    if array.ndim != 1:
        raise ItemSetError(f"{source}: array {name!r} is {array.dtype} {list(array.shape)}: save a matrix or a column")
    return pa.array(array.tolist() if array.dtype.kind in "US" else array)


def columns_of(source: SourceFile, dialect: Dialect) -> dict[str, Any]:
    """Return a file's columns and their Arrow types, None where only the values say it."""
    kind = format_of(source)
    if dialect.names:
        return dict.fromkeys(dialect.names)
    if kind == ".npz":
        with source.open() as file, _archive(source, file) as archive:
            return dict.fromkeys(archive.files)
    if kind == ".parquet":
        with source.open() as file:
            schema = pa_parquet.read_schema(file)
        for name in schema.names:
            if schema.names.count(name) > 1:
                raise ItemSetError(f"{source} has more than one column {name!r}: rename one")
        return dict(zip(schema.names, schema.types, strict=True))
    if kind not in JSON:
        raise ItemSetError(f"{source} has no rows: it must hold at least one item")
    document = _document(source, str(dialect.encoding)) if kind == ".json" else None
    if document is None:
        faults = Faults()
        decode = partial(msgspec.json.decode, type=dict[str, Any])
        lines, _ = next(line_blocks(source, str(dialect.encoding), min(BLOCK_BYTES, 1 << 20)), (b"", 1.0))
        document = [_object(source, line, i, decode, faults) for i, line in _lines(lines) if i <= _HEAD]
        if not document:
            _object(source, lines, 1, decode, faults)
        if document[:1] == [None] or not document:
            faults.check()
    return cast(dict[str, Any], dict.fromkeys(name for one in document for name in one or ()))
