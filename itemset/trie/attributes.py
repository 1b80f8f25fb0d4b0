"""Attributes: typed columns beside the keys, a row for each key, in the index file as one Arrow stream, which is read
without a copy. Texts with few distinct values are numbers into a dictionary: a filter compares only its texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.errors import AGAIN, ItemSetError

BATCH_ROWS = 1 << 20  # of the stream
MAX_DICTIONARY = 1 << 15  # distinct texts that are stored as numbers
KINDS = "bools, integers, floats, strings, dates, timestamps or lists of strings"
_TEXT = pa.large_string()


def kind_of(kind: Any) -> str:
    """Return what people call a column of this Arrow type."""
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if is_list(kind):
        return f"list of {kind_of(kind.value_type)}s"
    return next((name for name, holds in _CALLED if holds(kind)), str(kind))


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def as_values(array: Any) -> Any:
    """Return an array of values, in place of one of their numbers in a dictionary."""
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array


def number_of(kind: Any) -> Any:
    """Return the type of a decimal's numbers, of any other type that type: databases write integers so, too."""
    return (pa.float64() if kind.scale > 0 else pa.int64()) if pa.types.is_decimal(kind) else kind


def cast(values: Any, kind: Any) -> Any:
    """Return an array, or a column, of another type. A decimal's number is the float nearest to how it is written."""
    if pa.types.is_decimal(values.type) and pa.types.is_floating(kind):
        values = values.cast(pa.string())
    return values.cast(kind)


_CALLED = (
    ("bool", pa.types.is_boolean),
    ("integer", pa.types.is_integer),
    ("float", pa.types.is_floating),
    ("date", pa.types.is_date),
    ("timestamp", pa.types.is_timestamp),
    ("string", is_text),
)


def as_attributes(given: Any, rows: int) -> pa.Table:
    """Return a table of the types that are stored, before texts become numbers. given: a table, or columns by name.

    Raises ItemSetError: no table, one with another number of rows, a name that is empty, double or begins with $, an
    unknown type.
    """
    table = _table(given)
    if len(table) != rows:
        raise ItemSetError(f"{len(table):,} rows of attributes for {rows:,} items: give one row for each item")
    return pa.table([_plain(name, table.column(i)) for i, name in enumerate(table.column_names)], _names(table))


def _table(given: Any) -> pa.Table:
    try:
        return given if isinstance(given, pa.Table) else pa.table(dict(given))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ItemSetError(f"attributes must be a pyarrow Table, or columns by name: {error}") from error


def appended(before: pa.Table, given: Any, rows: int) -> pa.Table:
    """Return a set's attributes, followed by those of `rows` new items. given: as for `as_attributes`, or None.

    Raises ItemSetError as `as_attributes`, and unless the new ones have the names and the types of those before.
    """
    if not before.column_names:
        if given is not None:
            raise ItemSetError("the set has no attributes: omit those of the new items")
        return before
    there = f"the set has the attributes {', '.join(before.column_names)}"
    if given is None and rows:
        raise ItemSetError(f"{there}: give those of the new items")
    before = as_attributes(before, len(before))
    if given is None:
        return before
    table = _table(given)
    for i, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if name in before.column_names and column.null_count == len(column):  # of any type
            table = table.set_column(i, name, pa.nulls(len(column), before.schema.field(name).type))
    table = as_attributes(table, rows)
    if sorted(table.column_names) != sorted(before.column_names):
        raise ItemSetError(f"{there}, not {', '.join(table.column_names)}: give the new items the same")
    columns = []
    for field in before.schema:
        column = table.column(field.name)
        ours, theirs = kind_of(field.type), kind_of(column.type)
        try:
            if ours != theirs and (ours, theirs) != ("float", "integer"):
                raise ValueError
            columns.append(column.cast(field.type))
        except (pa.ArrowException, ValueError):
            split = " (texts become lists by --split)" if is_list(field.type) and is_text(column.type) else ""
            raise ItemSetError(
                f"attribute {field.name!r} is {ours} in the set, which the new items' {theirs} does not fit: give "
                f"values of that type{split}, or build the set again"
            ) from None
    return pa.concat_tables([before, pa.table(columns, schema=before.schema)])


def _names(table: pa.Table) -> list[str]:
    names: list[str] = table.column_names
    for name in names:
        if not name or name.startswith("$"):
            raise ItemSetError(f"{name!r} cannot be an attribute's name: rename the column")
        if names.count(name) > 1:
            raise ItemSetError(f"there is more than one attribute {name!r}: rename one")
    return names


def _plain(name: str, column: Any) -> Any:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain(name, column.cast(kind.value_type))
    if (plain := _plain_type(kind)) is None:
        raise ItemSetError(f"attribute {name!r} holds {kind}: attributes are {KINDS}")
    try:
        column = column if kind == plain else cast(column, plain)
    except pa.ArrowException as error:  # an older pyarrow that cannot
        raise ItemSetError(f"attribute {name!r} holds {kind}, which this pyarrow cannot cast: cast it") from error
    if is_list(plain) and any(chunk.flatten().null_count for chunk in column.chunks):
        raise ItemSetError(f"a list of attribute {name!r} holds a missing value: give every text")
    return column


def _plain_type(kind: Any) -> Any:
    """Return the type that is stored for this one, before texts become numbers; None if there is none."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if is_text(kind):
        return _TEXT
    if is_list(kind):
        return pa.large_list(_TEXT) if _plain_type(kind.value_type) == _TEXT else None
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_date(kind):
        return pa.date32()
    kind = number_of(kind)
    return kind if any(holds(kind) for _, holds in _CALLED) else None


@dataclass(frozen=True)
class Column:
    """How one attribute is stored."""

    name: str
    plain: Any  # its type as `as_attributes` gives it
    texts: pa.Array | None = None  # its distinct ones, ascending, if they are stored as numbers

    @property
    def type(self) -> Any:
        """Its Arrow type in the file."""
        if self.texts is None:
            return self.plain
        stored = pa.dictionary(self._numbers, _TEXT)
        return pa.large_list(stored) if is_list(self.plain) else stored

    @property
    def _numbers(self) -> Any:
        return pa.int8() if self.texts is not None and len(self.texts) <= 1 << 7 else pa.int16()

    @property
    def packed(self) -> Any:
        """Return the type of what `pack` returns."""
        return self.pack(pa.array([], self.plain)).type

    def pack(self, array: pa.Array) -> pa.Array:
        """Return a chunk as what sorts and gathers fast anywhere: bools, numbers, texts, or lists of these."""
        if is_list(self.plain):
            return _listed(array, self._inner.pack(array.flatten()))
        if self.texts is not None:
            return pc.index_in(array, value_set=self.texts).cast(self._numbers)
        if pa.types.is_temporal(self.plain):
            return array.view(pa.int32() if pa.types.is_date32(self.plain) else pa.int64())
        return array

    def unpack(self, array: pa.Array) -> pa.Array:
        """Return packed values as the file has them: equal values are equal bytes."""
        if is_list(self.plain):
            return _listed(array, self._inner.unpack(array.flatten()))
        if is_text(array.type):
            return array.cast(_TEXT)
        if array.null_count:  # what lies at missing values is anything
            missing = pc.is_null(array).to_numpy(zero_copy_only=False)
            filled = pc.fill_null(array, pa.scalar(0, pa.int8()).cast(array.type))
            array = pa.array(filled.to_numpy(zero_copy_only=False), array.type, mask=missing)
        if self.texts is not None:
            return pa.DictionaryArray.from_arrays(array, self.texts)
        return array.view(self.plain)

    @property
    def _inner(self) -> "Column":
        return Column(self.name, self.plain.value_type, self.texts)


def _listed(lists: pa.Array, values: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = pa.array(np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64))))
    mask = pc.is_null(lists) if lists.null_count else None
    return pa.LargeListArray.from_arrays(offsets, values, mask=mask)


class Survey:
    """Decides, batch by batch, how to store the columns of a table."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        texts = [field.name for field in schema if field.type == _TEXT or is_list(field.type)]
        self._texts: dict[str, pa.Array] = dict.fromkeys(texts, pa.array([], _TEXT))

    def add(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=1 << 18):
            for name, seen in list(self._texts.items()):
                column = batch.column(name)
                column = column.flatten() if is_list(column.type) else column
                self._texts[name] = pc.unique(pa.concat_arrays([seen, pc.unique(column).drop_null()]))
                if len(self._texts[name]) > MAX_DICTIONARY:
                    del self._texts[name]

    def columns(self) -> list[Column]:
        texts = {name: seen.take(pc.sort_indices(seen)) for name, seen in self._texts.items()}
        return [Column(field.name, field.type, texts.get(field.name)) for field in self._schema]


class Writer:
    """Writes packed columns to `sink`, in batches of the same rows whatever batches they come in."""

    def __init__(self, sink: Any, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._schema = pa.schema([(column.name, column.type) for column in columns])
        self._stream = pa.ipc.new_stream(sink, self._schema)
        self._waiting: list[pa.Table] = []

    def append(self, packed: pa.Table) -> None:
        self._waiting.append(packed)
        while sum(map(len, self._waiting)) >= BATCH_ROWS:
            self._write(BATCH_ROWS)

    def close(self) -> None:
        self._write(sum(map(len, self._waiting)))
        self._stream.close()

    def _write(self, rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        self._waiting = [table.slice(rows)]
        if rows:
            parts = [table.column(i).slice(0, rows).combine_chunks() for i in range(len(self._columns))]
            arrays = [column.unpack(part) for column, part in zip(self._columns, parts, strict=True)]
            self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))


def _is_stored(kind: Any) -> bool:
    """Return whether a column in a file may have this type: a plain one, or numbers in place of its texts."""
    inner = kind.value_type if pa.types.is_large_list(kind) else kind
    if pa.types.is_dictionary(inner):
        return inner.value_type == _TEXT and inner.index_type in (pa.int8(), pa.int16())
    return bool(_plain_type(kind) == kind)


def rows_at(table: pa.Table, places: NDArray[Any]) -> list[dict[str, Any]]:
    """Return these rows' attributes by name, as JSON has them: ISO dates and times, None if missing or not finite."""
    if not table.column_names:
        return [{} for _ in places]
    batches = table.to_batches()
    starts = np.cumsum([0, *map(len, batches)])
    rows, within = dict[int, dict[str, Any]](), np.searchsorted(starts, places, side="right") - 1
    for i in np.unique(within).tolist():  # a take from the whole column would copy all of it first
        at = places[within == i].astype(np.int64)
        taken = batches[i].take(pa.array(at - starts[i]))
        values = zip(*(_as_json(column).to_pylist() for column in taken.columns), strict=True)
        rows.update(zip(at.tolist(), (dict(zip(table.column_names, row, strict=True)) for row in values), strict=True))
    return [rows[place] for place in places.tolist()]


def _as_json(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column, None)
    if pa.types.is_timestamp(kind):
        texts = column.view(pa.timestamp(kind.unit)).cast(pa.string())
        return pc.binary_join_element_wise(pc.replace_substring(texts, " ", "T"), "Z" if kind.tz else "", "")
    return column.cast(_TEXT) if pa.types.is_date(kind) else column


def packed(table: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Return the columns of what `as_attributes` returned, each as `Column.pack` does."""
    return pa.table({column.name: column.pack(table.column(column.name).combine_chunks()) for column in columns})


def to_section(table: pa.Table, order: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return the stream of these rows of what `as_attributes` returned, in this order; None without columns."""
    if not table.column_names:
        return None
    if len(order) < len(table):  # texts of the others are not stored
        table, order = table.take(pa.array(order)), np.arange(len(order))
    survey = Survey(table.schema)
    survey.add(table)
    columns = survey.columns()
    sink = pa.BufferOutputStream()
    writer = Writer(sink, columns)
    writer.append(packed(table, columns).take(pa.array(order)))
    writer.close()
    return np.frombuffer(sink.getvalue(), np.uint8)


def from_section(section: NDArray[np.uint8] | None, rows: int) -> pa.Table:
    """Return the table over the section's own memory, all of it checked. Raises ItemSetError if it is damaged."""
    if section is None:
        return pa.table({"none": pa.nulls(rows)}).select([])
    try:
        with pa.ipc.open_stream(pa.py_buffer(section)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        if len(table) != rows or not all(map(_is_stored, table.schema.types)):
            raise ValueError(f"{len(table)} rows of {table.schema.types} for {rows} keys")
        _names(table)
    except (pa.ArrowException, ValueError, TypeError, KeyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ItemSetError(f"the index is corrupted, its attributes cannot be read ({reason:.200}): {AGAIN}") from error
    return table
