"""Items and keys out of a file: one text a line, CSV, TSV, JSON lines, Parquet, or a NumPy matrix of token ids."""

from __future__ import annotations

import codecs
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.columns import (
    Columns,
    csv_batches,
    jsonl_batches,
    line_blocks,
    parquet_batches,
    read_csv,
    read_jsonl,
    read_parquet,
)
from itemset.errors import ItemSetError
from itemset.rows import Rows

_NPY_BATCH_BYTES = 1 << 24


@dataclass(frozen=True)
class Source:
    """The N items of a file: either `texts` or `tokens`, the other is None.

    texts: N strings. tokens: integer matrix [N, L] (memory-mapped from .npy), or Rows where lengths differ.
    keys: [N] int64, N strings, or None where no key was asked for.
    """

    texts: list[str] | None = None
    tokens: NDArray[Any] | Rows | None = None
    keys: NDArray[np.int64] | list[str] | None = None


@dataclass(frozen=True)
class Batch:
    """Consecutive items of a file: either `texts` or `tokens`, the other is None.

    keys: int64 or string array of one key an item, None where no key was asked for.
    done: share of the file that these items and those before them take.
    """

    texts: list[str] | None
    tokens: NDArray[Any] | Rows | None
    keys: pa.Array | None
    done: float


def read(path: str | os.PathLike[str], *, column: str | None = None, key: str | None = None) -> Source:
    """Read the items of a file; its suffix says the format.

    .txt: one text a line. .csv, .tsv (with a header): texts. .jsonl, .ndjson, .parquet: texts or lists of token ids.
    .npy: matrix of token ids [N, L].
    column: the items' column, needed where there is more than one besides `key`. key: the column of the items' keys,
    integers or strings. In CSV and TSV, where everything is text, keys are integers if each is written as one
    (no leading zero).
    Raises ItemSetError: no such file, unknown suffix or column, wrong type, a missing value (rows count from 1, header
    and blank lines not counted), bad syntax, no item.
    """
    with _opened(path, column, key) as (path, suffix):
        if suffix in _PLAIN:
            return _PLAIN[suffix](path)
        columns = _TABLES[suffix](path, column, key)
        keys = None
        if columns.key is not None:
            found = _keys(path, columns.key, columns.keys, 0)
            keys = found.to_pylist() if _is_text(found.type) else found.to_numpy()
        return Source(*_items(path, columns, 0), keys=keys)


def batches(path: str | os.PathLike[str], *, column: str | None = None, key: str | None = None) -> Generator[Batch]:
    """The items, keys and errors of `read`, some megabytes at a time: for files larger than memory."""
    with _opened(path, column, key) as (path, suffix):
        if suffix in _PLAIN_BATCHES:
            yield from _PLAIN_BATCHES[suffix](path)
            return
        rows = 0
        for columns in _TABLE_BATCHES[suffix](path, column, key):
            if len(columns.items):
                keys = None if columns.key is None else _keys(path, columns.key, columns.keys, rows).combine_chunks()
                yield Batch(*_items(path, columns, rows), keys, columns.done)
                rows += len(columns.items)
        if not rows:
            raise ItemSetError(f"{path} has no rows: it must hold at least one item")


@contextmanager
def _opened(path: str | os.PathLike[str], column: str | None, key: str | None) -> Iterator[tuple[Path, str]]:
    """The path and its suffix, checked; and what Arrow and the system say against the file as ItemSetErrors."""
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        raise ItemSetError(f"{path} is a folder: name a file in it")
    if not path.exists():
        raise ItemSetError(f"no file {path}: check the path")
    if suffix not in _PLAIN and suffix not in _TABLES:
        raise ItemSetError(f"{path}: unknown suffix {suffix!r}, use one of {', '.join([*_PLAIN, *_TABLES])}")
    try:
        if not path.stat().st_size:
            raise ItemSetError(f"{path} is empty: it must hold at least one item")
        if suffix in _PLAIN and (column is not None or key is not None):
            raise ItemSetError(f"{path}: a {suffix} file has no columns, leave column and key away")
        yield path, suffix
    except pa.ArrowException as error:
        raise ItemSetError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise ItemSetError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_txt(path: Path) -> Source:
    texts = _lines(path, path.read_bytes().removeprefix(codecs.BOM_UTF8), 0)
    if not texts:
        raise ItemSetError(f"{path} is empty: it must hold at least one item")
    return Source(texts=texts)


def _txt_batches(path: Path) -> Iterator[Batch]:
    lines = 0
    for data, done in line_blocks(path):
        if texts := _lines(path, data, lines):
            yield Batch(texts, None, None, done)
            lines += len(texts)
    if not lines:
        raise ItemSetError(f"{path} is empty: it must hold at least one item")


def _lines(path: Path, data: bytes, before: int) -> list[str]:
    """The texts of whole lines; `before` is the number of lines before them."""
    try:
        # Not splitlines(): that also splits at form feeds and Unicode separators, which may stand in an item.
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        line = before + data.count(b"\n", 0, error.start) + 1
        raise ItemSetError(f"{path}, line {line}: not UTF-8, save the file as UTF-8") from error
    if not lines[-1]:
        lines.pop()
    texts = [line.removesuffix("\r") for line in lines]
    for number, text in enumerate(texts, before + 1):
        if not text or text.isspace():
            raise ItemSetError(f"{path}, line {number} is blank: remove it, every line is an item")
    return texts


def _read_npy(path: Path) -> Source:
    return Source(tokens=_native(_map_npy(path)))


def _npy_batches(path: Path) -> Iterator[Batch]:
    matrix = _map_npy(path)
    items, rows = len(matrix), max(1, _NPY_BATCH_BYTES // matrix[0].nbytes)
    for start in range(0, items, rows):
        # Copied out of a mapping of its own: pages that were read stay in memory as long as their mapping.
        part = np.array(_map_npy(path)[start : start + rows], order="C")
        yield Batch(None, _native(part), None, min(1.0, (start + rows) / items))


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        matrix = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ItemSetError(f"{path} is no matrix of token ids: {error}") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.integer):
        what = f"{matrix.dtype} {list(matrix.shape)}" if isinstance(matrix, np.ndarray) else "an archive"
        raise ItemSetError(f"{path} holds {what}: save one integer matrix [items, tokens]")
    if not matrix.size:
        raise ItemSetError(f"{path} has shape {list(matrix.shape)}: it must hold at least one item of one token")
    return matrix


def _native(matrix: NDArray[Any]) -> NDArray[Any]:
    return matrix if matrix.dtype.isnative else matrix.astype(matrix.dtype.newbyteorder("="))


def _items(path: Path, columns: Columns, before: int) -> tuple[list[str] | None, NDArray[Any] | Rows | None]:
    """Texts or tokens, and None for the other; `before` is the number of rows before these."""
    items = _plain(path, columns.column, columns.items, before)
    if _is_text(items.type):
        return items.to_pylist(), None
    if _is_list(items.type) and pa.types.is_integer(items.type.value_type):
        return None, _tokens(path, columns.column, items, before)
    raise ItemSetError(f"{path}: column {columns.column!r} holds {items.type}, neither texts nor lists of token ids")


def _plain(path: Path, name: str, column: Any, before: int) -> Any:
    """The column without dictionary encoding, and certainly without missing values."""
    if not len(column):
        raise ItemSetError(f"{path} has no rows: it must hold at least one item")
    if column.null_count:
        row = before + pc.index(column.is_null(), True).as_py() + 1
        raise ItemSetError(f"{path}, row {row} has no value in column {name!r}: fill it in or remove the row")
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _keys(path: Path, name: str, column: Any, before: int) -> Any:
    """The column as strings or int64."""
    column = _plain(path, name, column, before)
    if _is_text(column.type):
        return column
    if not pa.types.is_integer(column.type):
        raise ItemSetError(f"{path}: key column {name!r} holds {column.type}, keys must be integers or strings")
    return column.cast(pa.int64())


def _tokens(path: Path, name: str, column: Any, before: int) -> NDArray[Any] | Rows:
    """A list column as the matrix [N, L] where all lists are of one length, else as Rows."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks])
    if flat.null_count:
        where = pc.index(flat.is_null(), True).as_py()
        row = before + int(np.searchsorted(offsets, where, side="right"))
        raise ItemSetError(f"{path}, row {row}: a list in column {name!r} holds a missing value, give every token id")
    tokens = flat.to_numpy()
    return tokens.reshape(len(lengths), lengths[0]) if (lengths == lengths[0]).all() else Rows(tokens, offsets)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


_PLAIN = {".txt": _read_txt, ".npy": _read_npy}
_PLAIN_BATCHES = {".txt": _txt_batches, ".npy": _npy_batches}
_TABLES = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
}
_TABLE_BATCHES = {
    ".csv": csv_batches,
    ".tsv": csv_batches,
    ".jsonl": jsonl_batches,
    ".ndjson": jsonl_batches,
    ".parquet": parquet_batches,
}
