"""Items and keys out of files: one text a line, tables, JSON, or NumPy matrices of token ids.

A file is on this machine or under a URI (`storage`), and may be one of the parts of a folder or a glob.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.building.columns import READERS, Table, as_list, is_tabular
from itemset.building.dialects import JUDGED, Dialect
from itemset.building.items import Items, joined_items
from itemset.building.readers import BLOCK_BYTES
from itemset.building.streams import COMPRESSIONS, encoding_of, format_of, guarded, is_empty, line_blocks, not_decoded
from itemset.errors import Faults, ItemSetError
from itemset.storage import PathLike, SourceFile, files_at
from itemset.trie.rows import Rows

_NPY_BATCH_BYTES = 1 << 24
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")


def read(
    path: PathLike, *, column: str | None = None, key: str | None = None, attributes: Sequence[str] = (),
    dialect: Dialect = JUDGED,
) -> Items:  # fmt: skip
    """Read the items of a file, or of all files of a folder or glob; their suffix says the format.

    .txt: one text a line. .csv, .tsv, .item, .dat: delimited text. .jsonl, .ndjson, .json: objects, or an array of
    them. .parquet. .npy: matrix of token ids [N, L]; one on this machine is mapped, not read. .npz: arrays. Text and
    JSON may be compressed: .gz, .bz2, .zst.
    column: the items' column, needed if there is more than one besides `key`: texts, or lists of token ids or of
    tokens, also written as text. key: the column of the keys, integers if all are, else strings. attributes: columns
    that are kept as they are; in delimited text they are integers, floats, bools, dates or times if each is written as
    one (no leading zero), in JSON dates or times, else what they are there. dialect: how delimited text is
    written, which is judged if it is not given. Columns and types are judged over all files.
    Raises ItemSetError: no such file, one that cannot be reached or changes, unknown suffix or column, wrong type,
    missing values (rows count from 1, header and blank lines not counted), bad syntax, parts that differ in kind, no
    item. All bad rows are told at once.
    """
    return joined_items(list(batches(path, column=column, key=key, attributes=attributes, dialect=dialect)))


def read_keys(path: PathLike, key: str | None = None, dialect: Dialect = JUDGED) -> pa.Array:
    """Read keys alone: a .txt file has one a line, always as a string; other files have them in the column `key`.

    Returns an int64 or large_string array. Raises ItemSetError as `read` does.
    """
    file = files_of(path)[0]
    key = key if (tabular := is_tabular(file, dialect)) else None
    if format_of(file) == ".npy" or (tabular and key is None):
        raise ItemSetError(f"{file}: keys are lines of a .txt file, or a column (--key) of a table")
    given = batches(path, column=key, key=key, dialect=dialect, keys_only=True)
    parts = [pa.array(items.texts, pa.large_string()) if items.keys is None else items.keys for items in given]
    return pa.concat_arrays(parts) if parts else pa.array([], pa.large_string())


def batches(
    path: PathLike, *, column: str | None = None, key: str | None = None, attributes: Sequence[str] = (),
    dialect: Dialect = JUDGED, keys_only: bool = False,
) -> Generator[Items]:  # fmt: skip
    """Read files as `read` does, some megabytes at a time: for more than fits in memory."""
    files, rows, before, first, faults = files_of(path), 0, 0, None, Faults()
    total, attributes = sum(file.size for file in files) or 1, list(dict.fromkeys(attributes))
    table = Table(column, key, attributes, keys_only) if is_tabular(files[0], dialect) else None
    if table is not None:
        table.judge(path, files, dialect)
    elif column is not None or key is not None or attributes:
        raise ItemSetError(f"{files[0]}: a {format_of(files[0])} file has no columns, omit column, key and attributes")
    for file in files:
        with guarded(file):
            for items in table.items(file, faults) if table else _PLAIN[format_of(file)](file, dialect, faults):
                first = first or items
                if items.kind != first.kind:
                    raise ItemSetError(f"{file} holds {items.kind}, files before it {first.kind}: keep them apart")
                rows += len(items)
                yield replace(items, done=(before + items.done * file.size) / total)
        before += file.size
    faults.check()
    if not rows:
        raise ItemSetError(f"{path} has no rows: it must hold at least one item")


def files_of(path: PathLike) -> list[SourceFile]:
    """Return the files that are one input, in its order. Raises ItemSetError for several kinds or an unknown one."""
    files = files_at(path)
    if len(files) > 1:
        files = [file for file in files if not is_empty(file)] or files[:1]
    for file in files:
        if format_of(file) != format_of(files[0]):
            raise ItemSetError(f"{path} holds files of several kinds, {files[0]} and {file}: keep one kind there")
    if (kind := format_of(files[0])) in _PICKLES:
        raise ItemSetError(
            f"{files[0]}: a pickle can run any code when it is opened: save it as Parquet, JSON lines or .npy"
        )
    if kind not in SUFFIXES:
        also = f", text and JSON also with {', '.join(COMPRESSIONS)}"
        raise ItemSetError(f"{files[0]}: unknown suffix {kind!r}, use one of {', '.join(SUFFIXES)}{also}")
    if is_empty(files[0]):
        raise ItemSetError(f"{files[0]} is empty: it must hold at least one item")
    return files


def _read_txt(file: SourceFile, dialect: Dialect, faults: Faults) -> Iterator[Items]:
    before = blank = 0  # blank: the first line of those that are, as long as no other follows
    for data, done in line_blocks(file, encoding_of(file, dialect.encoding), BLOCK_BYTES):
        # Not splitlines(): that also splits at form feeds and Unicode separators, which may be part of an item.
        lines = data.removesuffix(b"\n").split(b"\n")
        texts, first = [], before + 1
        for number, line in enumerate(lines, first):
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                faults.add(f"{file}, line {blank} is blank: remove it, every line is an item")
                blank = 0
            if b"\t" in line.strip(b"\r"):
                faults.add(f"{file}, line {number} holds a tab: name a table .tsv, or remove the tab")
            if b"\r" in line.removesuffix(b"\r"):
                faults.add(f"{file}, line {number} holds a carriage return: end each line with a line feed")
            try:
                texts.append(line.removesuffix(b"\r").decode())
            except UnicodeDecodeError:
                faults.add(f"{file}, line {number} {not_decoded('utf-8')}")
        before += len(lines)
        if first == 1 and 2 * sum(text[0] in "[(" and as_list(text) is not None for text in texts) > len(texts):
            raise ItemSetError(
                f"{file}: its lines, such as {texts[0]:.60}, are lists written as text: save them as a column of a "
                "table (.csv, .jsonl, .parquet), where they are read as lists"
            )
        if texts:
            yield Items(texts=texts, done=done, place=f"{file}, line {{}}", first=first)


def _read_npy(file: SourceFile, dialect: Dialect, faults: Faults) -> Iterator[Items]:
    matrix = _map_npy(file)
    items, rows = len(matrix), max(1, _NPY_BATCH_BYTES // matrix[0].nbytes)
    for start in range(0, items, rows):
        # Copied out of a mapping of its own: pages that were read stay in memory as long as their mapping.
        # One that is elsewhere is in memory as a whole, and read once.
        part = np.array((_map_npy(file) if file.system is None else matrix)[start : start + rows], order="C")
        tokens = Rows(part.astype(part.dtype.newbyteorder("="), copy=False).reshape(-1), width=part.shape[1])
        yield Items(tokens=tokens, done=min(1.0, (start + rows) / items), place=f"{file}, row {{}}", first=start + 1)


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


_PLAIN: dict[str, Callable[[SourceFile, Dialect, Faults], Iterator[Items]]] = {".txt": _read_txt, ".npy": _read_npy}
SUFFIXES = (*_PLAIN, *READERS)  # of the files that are read
