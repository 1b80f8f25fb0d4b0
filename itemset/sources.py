"""Items and keys out of a file: one text a line, CSV, TSV, JSON lines, Parquet, or a NumPy matrix of token ids."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.columns import Columns, read_csv, read_jsonl, read_parquet
from itemset.errors import ItemSetError
from itemset.rows import Rows


@dataclass(frozen=True)
class Source:
    """The N items of a file: either `texts` or `tokens`, the other is None.

    texts: N strings. tokens: integer matrix [N, L] (memory-mapped from .npy), or Rows where lengths differ.
    keys: [N] int64, N strings, or None where no key was asked for.
    """

    texts: list[str] | None = None
    tokens: NDArray[Any] | Rows | None = None
    keys: NDArray[np.int64] | list[str] | None = None


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
        if suffix in _PLAIN:
            if column is not None or key is not None:
                raise ItemSetError(f"{path}: a {suffix} file has no columns, leave column and key away")
            return _PLAIN[suffix](path)
        return _source(path, _TABLES[suffix](path, column, key))
    except pa.ArrowException as error:
        raise ItemSetError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise ItemSetError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_txt(path: Path) -> Source:
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        # Not splitlines(): that also splits at form feeds and Unicode separators, which may stand in an item.
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ItemSetError(f"{path}, line {line}: not UTF-8, save the file as UTF-8") from error
    if not lines[-1]:
        lines.pop()
    texts = [line.removesuffix("\r") for line in lines]
    for number, text in enumerate(texts, 1):
        if not text or text.isspace():
            raise ItemSetError(f"{path}, line {number} is blank: remove it, every line is an item")
    if not texts:
        raise ItemSetError(f"{path} is empty: it must hold at least one item")
    return Source(texts=texts)


def _read_npy(path: Path) -> Source:
    try:
        matrix = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ItemSetError(f"{path} is no matrix of token ids: {error}") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.integer):
        what = f"{matrix.dtype} {list(matrix.shape)}" if isinstance(matrix, np.ndarray) else "an archive"
        raise ItemSetError(f"{path} holds {what}: save one integer matrix [items, tokens]")
    if not matrix.size:
        raise ItemSetError(f"{path} has shape {list(matrix.shape)}: it must hold at least one item of one token")
    if not matrix.dtype.isnative:
        matrix = matrix.astype(matrix.dtype.newbyteorder("="))
    return Source(tokens=matrix)


def _source(path: Path, columns: Columns) -> Source:
    keys = None if columns.key is None else _keys(path, columns.key, columns.keys)
    items = _plain(path, columns.column, columns.items)
    if _is_text(items.type):
        return Source(texts=items.to_pylist(), keys=keys)
    if _is_list(items.type) and pa.types.is_integer(items.type.value_type):
        return Source(tokens=_tokens(path, columns.column, items), keys=keys)
    raise ItemSetError(f"{path}: column {columns.column!r} holds {items.type}, neither texts nor lists of token ids")


def _plain(path: Path, name: str, column: Any) -> Any:
    """The column without dictionary encoding, and certainly without missing values."""
    if not len(column):
        raise ItemSetError(f"{path} has no rows: it must hold at least one item")
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py() + 1
        raise ItemSetError(f"{path}, row {row} has no value in column {name!r}: fill it in or remove the row")
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _keys(path: Path, name: str, column: Any) -> NDArray[np.int64] | list[str]:
    column = _plain(path, name, column)
    if _is_text(column.type):
        texts: list[str] = column.to_pylist()
        return texts
    if not pa.types.is_integer(column.type):
        raise ItemSetError(f"{path}: key column {name!r} holds {column.type}, keys must be integers or strings")
    numbers: NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
    return numbers


def _tokens(path: Path, name: str, column: Any) -> NDArray[Any] | Rows:
    """A list column as the matrix [N, L] where all lists are of one length, else as Rows."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks])
    if flat.null_count:
        where = pc.index(flat.is_null(), True).as_py()
        row = int(np.searchsorted(offsets, where, side="right"))
        raise ItemSetError(f"{path}, row {row}: a list in column {name!r} holds a missing value, give every token id")
    tokens = flat.to_numpy()
    return tokens.reshape(len(lengths), -1) if (lengths == lengths[0]).all() else Rows(tokens, offsets)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


_PLAIN = {".txt": _read_txt, ".npy": _read_npy}
_TABLES = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
}
