"""The named columns of a CSV, TSV, JSON-lines or Parquet file, as Arrow reads them."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pa_parquet

from itemset.errors import ItemSetError
from itemset.storage import SourceFile

_BLOCK_BYTES = 1 << 24  # no CSV row or JSON line may be longer; the readers' own 1 MiB is short for long items
_PARQUET_ROWS = 1 << 16
_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_INTEGER = r"(0|-?[1-9][0-9]*)"
DATES = (
    (pa.date32(), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"),
    (pa.timestamp("us"), _TIME + "$"),
    (pa.timestamp("us", "UTC"), _TIME + r"(Z|[-+][0-9]{2}:?[0-9]{2})$"),
)
ALL = (
    (pa.int64(), f"^{_INTEGER}$"),
    (pa.float64(), f"^(-0|{_INTEGER})([.][0-9]+)?([eE][-+]?[0-9]+)?$"),
    (pa.bool_(), "^(true|false|True|False|TRUE|FALSE)$"),
    *DATES,
)
KEYS = ((pa.int64(), f"^{_INTEGER}$"), (pa.float64(), r"^-?[0-9]+\.0+$"))


Columns = tuple[Any, Any, pa.Table, float]
"""Consecutive rows of a file: the items and their keys, None without them, as Arrow columns; the attributes, a table
without columns if none were asked for; the share of the file up to the last of these rows."""


class Written:
    """The first of some types that all strings of a column are written as. first: the first that is not missing."""

    def __init__(self, types: tuple[tuple[Any, str], ...]) -> None:
        self.left = list(types)
        self.first: Any = None

    def add(self, strings: Any) -> None:
        """Take the next chunk of the column; missing values are of any type."""
        if self.first is None and strings.null_count < len(strings):
            self.first = strings.drop_null()[0]
        self.left = [(kind, pattern) for kind, pattern in self.left if _is_written_as(strings, kind, pattern)]

    @property
    def type(self) -> Any:
        """The type, a string if there is none or if every value is missing."""
        return self.left[0][0] if self.first is not None and self.left else pa.string()


def _is_written_as(strings: Any, kind: Any, pattern: str) -> bool:
    if not pc.all(pc.match_substring_regex(strings, pattern)).as_py():
        return False
    try:
        strings.cast(kind)
    except pa.ArrowInvalid:  # more digits than the type has, or a 31st of June
        return False
    return True


def read_csv(source: SourceFile, column: str, key: str | None, attributes: Sequence[str]) -> Iterator[Columns]:
    """Read columns as strings, some megabytes at a time; fields are separated by commas, in .tsv by tabs.

    Keys are int64 if each is written as one, attributes of the type that all of them are written as (see `Written`). To
    know that, these columns are read once before. Raises ItemSetError if all keys are written as floats.
    """
    written, of_key = {name: Written(ALL) for name in attributes}, Written(KEYS)
    guesses = [*written.items(), *([] if key is None else [(key, of_key)])]
    if guesses:
        with source.open() as file, pa_csv.open_csv(file, **_csv_options(source, key, *attributes)) as reader:
            for batch in reader:
                for name, guess in guesses:
                    guess.add(batch.column(name))
                if not any(guess.left for _, guess in guesses):
                    break
    if of_key.type == pa.float64():
        raise ItemSetError(f"{source}: keys in column {key!r} are floats ({of_key.first}, ...), write them as integers")
    with source.open() as file, pa_csv.open_csv(file, **_csv_options(source, column, key, *attributes)) as reader:
        for batch in reader:
            table = pa.Table.from_batches([batch])
            keys = None if key is None else table.column(key).cast(of_key.type)
            known = table.select(list(written)).cast(pa.schema({name: guess.type for name, guess in written.items()}))
            yield table.column(column), keys, known, file.tell() / source.size


def _csv_options(source: SourceFile, *names: str | None) -> dict[str, Any]:
    """Return how Arrow reads these columns, all if none is named, as strings."""
    columns = [name for name in dict.fromkeys(names) if name is not None]
    delimiter = "\t" if source.suffix == ".tsv" else ","
    return {
        "read_options": pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
        "parse_options": pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        # As strings: type inference would turn the title "1984" into a number and the key "007" into 7.
        "convert_options": pa_csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    }


def read_jsonl(source: SourceFile, column: str, key: str | None, attributes: Sequence[str]) -> Iterator[Columns]:
    """Read columns of strings, int64 or lists of int64, as the first row has them, some megabytes at a time.

    Attributes have the type that all their values have; strings that are all dates or times are these. To know that,
    the file is read once before. Other fields are ignored.
    """
    first = _json_object(source, _first_line(source), 1)
    # The first row decides the types: inference would turn texts that look like dates into timestamps.
    schema = {name: _json_type(source, name, first[name]) for name in (column, key) if name is not None}
    if key is not None and pa.types.is_list(schema[key]):
        raise ItemSetError(f"{source}: column {key!r} holds lists, keys must be integers or strings")
    types = _json_types(source, attributes) if attributes else {}
    read = {name: pa.string() if pa.types.is_temporal(kind) else kind for name, kind in types.items()} | schema
    options = pa_json.ParseOptions(explicit_schema=pa.schema(read), unexpected_field_behavior="ignore")
    for lines, done in line_blocks(source):
        if lines.isspace():
            continue
        try:
            table = pa_json.read_json(pa.BufferReader(lines), pa_json.ReadOptions(block_size=_BLOCK_BYTES), options)
        except pa.ArrowInvalid:
            _blame_json(source, schema)
            raise
        known = table.select(list(types)).cast(pa.schema(types))
        yield table.column(column), None if key is None else table.column(key), known, done


def _first_line(source: SourceFile) -> bytes:
    with source.open() as file:
        return next((line for line in file if line.strip()), b"").removeprefix(codecs.BOM_UTF8)


def line_blocks(source: SourceFile) -> Iterator[tuple[bytes, float]]:
    """Yield a file in blocks of whole lines, without a byte order mark, and the share of the file up to their end."""
    block = 2 * _BLOCK_BYTES
    with source.open() as file:
        while lines := file.read(block) + file.readline():
            yield lines if file.tell() > len(lines) else lines.removeprefix(codecs.BOM_UTF8), file.tell() / source.size


def _json_types(source: SourceFile, attributes: Sequence[str]) -> dict[str, Any]:
    """Return the attributes' types, for which the whole file is read."""
    fields = {f"field{i}": name for i, name in enumerate(attributes)}
    row = msgspec.defstruct("Row", [(field, Any, None) for field in fields], rename=fields)
    kinds: dict[str, set[Any]] = {name: set() for name in attributes}
    written = {name: Written(DATES) for name in attributes}
    for lines, _ in line_blocks(source):
        try:
            rows = msgspec.json.Decoder(row).decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _blame_json(source, {})
            raise ItemSetError(f"{source} holds a line that is no JSON object: {error}") from error
        for field, name in fields.items():
            values = [value for row in rows if (value := getattr(row, field)) is not None]
            here = set(map(_attribute_kind, values))
            kinds[name] |= here
            if here == {pa.string()}:
                written[name].add(pa.array(values, pa.string()))
    for name, seen in kinds.items():
        if seen == {pa.int64(), pa.float64()}:
            seen.remove(pa.int64())
        if len(seen) > 1 or None in seen:
            raise ItemSetError(
                f"{source}: the values of attribute {name!r} must be of one kind: bools, numbers of at most 64 bits, "
                "strings or lists of strings"
            )
    return {name: written[name].type if seen <= {pa.string()} else seen.pop() for name, seen in kinds.items()}


def _attribute_kind(value: object) -> Any:
    if isinstance(value, list):
        return pa.list_(pa.string()) if all(isinstance(one, str) for one in value) else None
    if isinstance(value, bool):
        return pa.bool_()
    return pa.float64() if isinstance(value, float) else _kind(value)


def _json_object(source: SourceFile, line: bytes, row: int) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ItemSetError(f"{source}, row {row} is no JSON object on one line: {error}") from error


def _json_type(source: SourceFile, name: str, value: object) -> Any:
    """Return the Arrow type of a column by its first value."""
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
    if type(value) is int:
        return pa.int64() if -(2**63) <= value < 2**63 else None
    if isinstance(value, list) and all(token is None or _kind(token) == pa.int64() for token in value):
        return pa.list_(pa.int64())
    return None


def _blame_json(source: SourceFile, schema: dict[str, Any]) -> None:
    """Raise the ItemSetError of the first bad row: Arrow counts rows from the start of its own blocks."""
    with source.open() as file:
        rows = (line for line in file if line.strip())
        for row, line in enumerate(rows, 1):
            record = _json_object(source, line.removeprefix(codecs.BOM_UTF8) if row == 1 else line, row)
            for name, kind in schema.items():
                value = record.get(name)
                if value is not None and _kind(value) != kind:
                    raise ItemSetError(f"{source}, row {row}: column {name!r} holds {value!r:.60}, not {kind}")


def read_parquet(source: SourceFile, column: str, key: str | None, attributes: Sequence[str]) -> Iterator[Columns]:
    """Read the columns with the file's own types, some ten thousand rows at a time, never a whole row group."""
    # Not read_table(): that would read columns out of folder names such as year=2024, too.
    with source.open() as file, pa_parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as parquet:
        rows, read = parquet.metadata.num_rows, 0
        for batch in parquet.iter_batches(_PARQUET_ROWS, columns=list({column, key, *attributes} - {None})):
            table = pa.Table.from_batches([batch])
            read += len(table)
            keys = None if key is None else table.column(key)
            yield table.column(column), keys, table.select(attributes), read / rows


def column_names(source: SourceFile) -> list[str]:
    """Return the columns of a file, none if it has items alone. Raises OSError or pa.ArrowException for a bad one."""
    with source.open() as file:
        if source.suffix == ".parquet":
            return list(pa_parquet.read_schema(file).names)
        if source.suffix in (".csv", ".tsv"):
            return list(pa_csv.open_csv(file, **_csv_options(source)).schema.names)
        if source.suffix not in (".jsonl", ".ndjson"):
            return []
        return list(_json_object(source, _first_line(source), 1))


def choose(
    source: SourceFile, column: str | None, key: str | None, attributes: Sequence[str]
) -> tuple[str, str | None]:
    """Return the columns of the items and of the keys. Raises ItemSetError if one is not there, or not named."""
    names = column_names(source)
    if source.suffix in (".jsonl", ".ndjson"):  # an attribute may be missing in some rows, the first among them
        names = list(dict.fromkeys([*names, *attributes]))
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
