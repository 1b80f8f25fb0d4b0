"""Items and keys out of files: one text a line, CSV, TSV, JSON lines, Parquet, or a NumPy matrix of token ids.

A file is on this machine or under a URI (`storage`), and may be one of the parts of a folder or a glob.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.building.readers import Columns, choose, column_names, line_blocks, read_csv, read_jsonl, read_parquet
from itemset.errors import ItemSetError
from itemset.storage import SourceFile, files_at
from itemset.text import Escape, encode
from itemset.trie.attributes import as_attributes, is_list, is_text
from itemset.trie.rows import Rows

_NPY_BATCH_BYTES = 1 << 24


@dataclass(frozen=True)
class Items:
    """Consecutive items, N of them: either `texts` or `tokens`, the other is None.

    texts: N strings. tokens: integer matrix [N, L], or Rows if lengths differ. keys: int64 or large_string array [N],
    None if no key was asked for. attributes: a table of N rows, None if none were asked for. done: share of all files
    up to the last of these items.
    """

    texts: list[str] | None = None
    tokens: NDArray[Any] | Rows | None = None
    keys: pa.Array | None = None
    attributes: pa.Table | None = None
    done: float = 1.0

    def __len__(self) -> int:
        items = self.tokens if self.texts is None else self.texts
        return 0 if items is None else len(items)


@dataclass(frozen=True)
class Encoding:
    """How items become token ids: options of `build` (token ids) and `build_text` (texts)."""

    tokenizer: Any = None
    prefix: str = ""
    escape: Escape | None = None
    vocab_size: int | None = None

    @property
    def limit(self) -> int | None:
        """The number that token ids stay below: the tokenizer's if none is given, None if there is neither."""
        return len(self.tokenizer) if self.vocab_size is None and self.tokenizer is not None else self.vocab_size

    def check(self, path: str | os.PathLike[str], *, texts: bool) -> None:
        """Raise ItemSetError for an option that does not go with what the file holds, texts or token ids."""
        if not texts and self.prefix:
            raise ItemSetError(f"{path} holds token ids: the prefix is for texts, omit it (--prefix)")
        if not texts and self.escape:
            raise ItemSetError(f"{path} holds token ids: to escape is for texts, omit it (--escape)")
        if texts and self.tokenizer is None:
            raise ItemSetError(f"{path} holds texts: give the model's tokenizer (--tokenizer DIR)")
        if texts and self.vocab_size is not None:
            raise ItemSetError(f"{path} holds texts: omit the vocabulary size (--vocab-size), the tokenizer knows it")

    def encode(self, texts: list[str], before: int) -> Rows:
        """Return the tokens of texts. before: the number of items before them. Raises ItemSetError as `encode` does."""
        return Rows(*encode(texts, self.tokenizer, prefix=self.prefix, escape=self.escape, before=before))


def read(
    path: str | os.PathLike[str], *, column: str | None = None, key: str | None = None, attributes: Sequence[str] = ()
) -> Items:
    """Read the items of a file, or of all files of a folder or glob; their suffix says the format.

    .txt: one text a line. .csv, .tsv (with a header): texts. .jsonl, .ndjson, .parquet: texts or lists of token ids.
    .npy: matrix of token ids [N, L]; one on this machine is mapped, not read.
    column: the items' column, needed if there is more than one besides `key`. key: the column of the items' keys,
    integers or strings. In CSV and TSV, where everything is text, keys are integers if each is written as one
    (no leading zero). attributes: columns that are kept as they are; in CSV and TSV they are integers, floats, bools,
    dates or times if each is written as one, in JSON lines dates or times, else what they are there.
    Raises ItemSetError: no such file, unknown suffix or column, wrong type, a missing value (rows count from 1, header
    and blank lines not counted), bad syntax, parts that differ in kind, no item; for one that is elsewhere, also if it
    cannot be reached or changes meanwhile.
    """
    return _joined(list(batches(path, column=column, key=key, attributes=attributes)))


def read_keys(path: str | os.PathLike[str], key: str | None = None) -> pa.Array:
    """Read keys alone: a .txt file has one a line, always as a string; other files have them in the column `key`.

    Returns an int64 or large_string array. Raises ItemSetError as `read` does.
    """
    parts: list[pa.Array] = []
    for file in files_at(path):
        if file.suffix == ".npy" or (file.suffix in _TABLES and key is None):
            raise ItemSetError(f"{file}: keys are lines of a .txt file, or a column (--key) of a table")
        with _opened(file, None, None, ()):
            if file.suffix in _PLAIN:
                parts += [pa.array(part.texts, pa.large_string()) for part in _read_txt(file)]
            else:
                before = 0
                name, _ = choose(file, key, key, ())
                for _, keys, _, _ in _TABLES[file.suffix](file, name, name, ()):
                    parts.append(_keys(file, name, keys, before))
                    before += len(keys)
        for part in parts[-1:]:
            _check_alike(file, "keys", parts[0].type, part.type)
    return pa.concat_arrays(parts) if parts else pa.array([], pa.large_string())


def batches(
    path: str | os.PathLike[str], *, column: str | None = None, key: str | None = None, attributes: Sequence[str] = ()
) -> Generator[Items]:
    """Read files as `read` does, some megabytes at a time: for more than fits in memory."""
    files, rows, before, first = files_of(path), 0, 0, None
    total, attributes = sum(file.size for file in files) or 1, list(dict.fromkeys(attributes))
    for file in files:
        with _opened(file, column, key, attributes):
            plain = file.suffix in _PLAIN
            for items in _PLAIN[file.suffix](file) if plain else _table(file, column, key, attributes):
                first = first or items
                _check_same(file, first, items)
                rows += len(items)
                yield replace(items, done=(before + items.done * file.size) / total)
        before += file.size
    if not rows:
        raise ItemSetError(f"{path} has no rows: it must hold at least one item")


def files_of(path: str | os.PathLike[str]) -> list[SourceFile]:
    """Return the files that are one input, in its order. Raises ItemSetError if they are of several kinds."""
    files = files_at(path)
    if len(files) > 1:
        files = [file for file in files if file.size] or files[:1]
    for file in files:
        if file.suffix != files[0].suffix:
            raise ItemSetError(f"{path} holds files of several kinds, {files[0]} and {file}: keep one kind there")
    return files


def columns_of(file: SourceFile) -> list[str]:
    """Return the names of a file's columns, none if it has items alone. Raises ItemSetError as `read` does."""
    with _opened(file, None, None, ()):
        return column_names(file)


def _check_same(file: SourceFile, first: Items, items: Items) -> None:
    """Raise ItemSetError if a part's rows are of another kind than those of the first part."""
    if (items.texts is None) != (first.texts is None):
        here, there = ("token ids" if one.texts is None else "texts" for one in (items, first))
        raise ItemSetError(f"{file} holds {here}, files before it {there}: keep them apart")
    if items.keys is not None and first.keys is not None:
        _check_alike(file, "keys", first.keys.type, items.keys.type)
    if items.attributes is not None and first.attributes is not None:
        for mine, theirs in zip(items.attributes.schema, first.attributes.schema, strict=True):
            _check_alike(file, f"attribute {mine.name!r}", theirs.type, mine.type)


def _check_alike(file: SourceFile, what: str, first: Any, here: Any) -> None:
    if first != here:
        raise ItemSetError(f"{file}: {what} of type {here}, and {first} in files before it: give all parts one type")


@contextmanager
def _opened(file: SourceFile, column: str | None, key: str | None, attributes: Sequence[str]) -> Iterator[None]:
    """Check a file and the options, and turn errors of Arrow and of the system into ItemSetErrors."""
    if file.suffix not in _PLAIN and file.suffix not in _TABLES:
        raise ItemSetError(f"{file}: unknown suffix {file.suffix!r}, use one of {', '.join([*_PLAIN, *_TABLES])}")
    if not file.size:
        raise ItemSetError(f"{file} is empty: it must hold at least one item")
    if file.suffix in _PLAIN and (column is not None or key is not None or attributes):
        raise ItemSetError(f"{file}: a {file.suffix} file has no columns, omit column, key and attributes")
    try:
        yield
    except pa.ArrowException as error:
        raise ItemSetError(f"{file} cannot be read: {error}") from error
    except OSError as error:
        raise ItemSetError(f"{file} cannot be read: {error.strerror or error}") from error
    file.check_unchanged()


def _joined(parts: list[Items]) -> Items:
    keys = None if parts[0].keys is None else pa.concat_arrays([part.keys for part in parts])
    attributes = None if parts[0].attributes is None else pa.concat_tables([part.attributes for part in parts])
    if parts[0].texts is not None:
        return Items([text for part in parts for text in part.texts or ()], None, keys, attributes)
    flat, lengths = zip(*(_flat(part.tokens) for part in parts if part.tokens is not None), strict=True)
    return Items(None, _matrix_or_rows(np.concatenate(flat), np.concatenate(lengths)), keys, attributes)


def _read_txt(file: SourceFile) -> Iterator[Items]:
    before = 0
    for data, done in line_blocks(file):
        try:
            # Not splitlines(): that also splits at form feeds and Unicode separators, which may be part of an item.
            lines = data.decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            line = before + data.count(b"\n", 0, error.start) + 1
            raise ItemSetError(f"{file}, line {line}: not UTF-8, save the file as UTF-8") from error
        texts = [line.removesuffix("\r") for line in lines]
        for number, text in enumerate(texts, before + 1):
            if not text or text.isspace():
                raise ItemSetError(f"{file}, line {number} is blank: remove it, every line is an item")
        yield Items(texts=texts, done=done)
        before += len(texts)


def _read_npy(file: SourceFile) -> Iterator[Items]:
    matrix = _map_npy(file)
    items, rows = len(matrix), max(1, _NPY_BATCH_BYTES // matrix[0].nbytes)
    for start in range(0, items, rows):
        # Copied out of a mapping of its own: pages that were read stay in memory as long as their mapping.
        # One that is elsewhere is in memory as a whole, and read once.
        part = np.array((_map_npy(file) if file.system is None else matrix)[start : start + rows], order="C")
        yield Items(tokens=part.astype(part.dtype.newbyteorder("="), copy=False), done=min(1.0, (start + rows) / items))


def _map_npy(file: SourceFile) -> NDArray[Any]:
    try:
        if file.system is None:
            matrix = np.load(file.path, mmap_mode="r")
        else:
            with file.open() as stream:
                matrix = np.load(stream)
    except (ValueError, EOFError) as error:
        raise ItemSetError(f"{file} is no matrix of token ids: {error}") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.integer):
        what = f"{matrix.dtype} {list(matrix.shape)}" if isinstance(matrix, np.ndarray) else "an archive"
        raise ItemSetError(f"{file} holds {what}: save one integer matrix [items, tokens]")
    if not matrix.size:
        raise ItemSetError(f"{file} has shape {list(matrix.shape)}: it must hold at least one item of one token")
    return matrix


def _table(file: SourceFile, column: str | None, key: str | None, attributes: Sequence[str]) -> Iterator[Items]:
    """Turn Arrow columns into texts or tokens, and keys."""
    column, key = choose(file, column, key, attributes)
    before = 0
    for given, given_keys, table, done in _TABLES[file.suffix](file, column, key, attributes):
        if not len(given):
            continue
        items = _plain(file, column, given, before)
        keys = None if key is None else _keys(file, key, given_keys, before)
        known = as_attributes(table, len(items)) if attributes else None
        if is_text(items.type):
            yield Items(items.to_pylist(), None, keys, known, done)
        elif is_list(items.type) and pa.types.is_integer(items.type.value_type):
            yield Items(None, _tokens(file, column, items, before), keys, known, done)
        else:
            raise ItemSetError(f"{file}: column {column!r} holds {items.type}, neither texts nor lists of token ids")
        before += len(items)


def _plain(file: SourceFile, name: str, column: Any, before: int) -> Any:
    """Return the column without dictionary encoding. Raises ItemSetError if a value is missing."""
    if column.null_count:
        row = before + pc.index(column.is_null(), True).as_py() + 1
        raise ItemSetError(f"{file}, row {row} has no value in column {name!r}: fill it in or remove the row")
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _keys(file: SourceFile, name: str, column: Any, before: int) -> pa.Array:
    column = _plain(file, name, column, before)
    if not is_text(column.type) and not pa.types.is_integer(column.type):
        raise ItemSetError(f"{file}: key column {name!r} holds {column.type}, keys must be integers or strings")
    return column.cast(pa.large_string() if is_text(column.type) else pa.int64()).combine_chunks()


def _tokens(file: SourceFile, name: str, column: Any, before: int) -> NDArray[Any] | Rows:
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks])
    if flat.null_count:
        where = pc.index(flat.is_null(), True).as_py()
        row = before + int(np.searchsorted(np.cumsum(lengths), where, side="right")) + 1
        raise ItemSetError(f"{file}, row {row}: a list in column {name!r} holds a missing value, give every token id")
    return _matrix_or_rows(flat.to_numpy(), lengths)


def _flat(items: NDArray[Any] | Rows) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if isinstance(items, Rows):
        return items.tokens, np.diff(items.offsets)
    return items.reshape(-1), np.full(len(items), items.shape[1])


def _matrix_or_rows(tokens: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[Any] | Rows:
    """Return a matrix [N, L] if all items have one length, else Rows."""
    if (lengths == lengths[0]).all():
        return tokens.reshape(len(lengths), lengths[0])
    return Rows(tokens, np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))))


_PLAIN: dict[str, Callable[[SourceFile], Iterator[Items]]] = {".txt": _read_txt, ".npy": _read_npy}
_TABLES: dict[str, Callable[[SourceFile, str, str | None, Sequence[str]], Iterator[Columns]]] = {
    ".csv": read_csv, ".tsv": read_csv, ".jsonl": read_jsonl, ".ndjson": read_jsonl, ".parquet": read_parquet,
}  # fmt: skip
SUFFIXES = (*_PLAIN, *_TABLES)
"""Of the files that are read."""
