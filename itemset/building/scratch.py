"""A build's temporary files: a folder beside its output, and in files without names numbers, columns and the source."""

import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.building.items import Items
from itemset.errors import ItemSetError
from itemset.storage import PathLike, SourceFile, files_at
from itemset.trie.attributes import Column, packed
from itemset.trie.keys import values_to_sections
from itemset.trie.rows import MAX_ITEM_TOKENS, Rows, as_rows

_LOCK = "lock"


@contextmanager
def scratch_folder(output: PathLike) -> Iterator[Path]:
    """Make a folder beside the file `output`, for what is needed until that file is written.

    A file in it is locked while this process lives. Folders of killed builds are removed. Raises OSError if it fails.
    """
    output = Path(output).absolute()
    prefix, suffix = f".{output.name}.", ".building"
    for left in output.parent.iterdir():
        if left.name.startswith(prefix) and left.name.endswith(suffix):
            with suppress(OSError), open(left / _LOCK, "rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(suffix, prefix, output.parent))
    try:
        with open(folder / _LOCK, "wb") as lock:
            with suppress(OSError):  # a file system without locks: nobody removes the folder of a killed build
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def nameless_file(folder: Path) -> IO[bytes]:
    """Open a file for reading and writing that goes away with its descriptor."""
    return tempfile.TemporaryFile(dir=folder)


class Zeros:
    """Makes arrays of zeros: in memory as long as there is room for them, then in files without names."""

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder, self._left = folder, memory

    def __call__(self, count: int, dtype: Any) -> NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        if size <= self._left:
            self._left -= size
            return np.zeros(count, dtype)
        with nameless_file(self._folder) as file:
            # A disk that is full is an error here; when a page is written it would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            return np.asarray(np.memmap(file, dtype, "r+", shape=(count,)))


class Spool:
    """Numbers of one type, appended to a file without a name, and mapped into memory once all are there."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        self._file, self._dtype = nameless_file(folder), dtype

    def append(self, numbers: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(numbers, self._dtype).data)

    def map(self) -> NDArray[Any]:
        with self._file as file:
            # Writable as arrays in memory are: compiled code knows the two kinds apart.
            return np.asarray(np.memmap(file, self._dtype, "r+")) if file.tell() else np.zeros(0, self._dtype)


class ArraySpool:
    """An Arrow array of bools, numbers, large strings or large lists of these, in such files. missing: of nulls too."""

    def __init__(self, folder: Path, kind: Any, *, missing: bool = False) -> None:
        self._kind = kind
        self._there = Spool(folder, np.uint8) if missing else None
        self._rows = self._end = 0
        self._offsets: Spool | None = None
        text, lists = pa.types.is_large_string(kind), pa.types.is_large_list(kind)
        if text or lists:
            self._offsets = Spool(folder, np.int64)
            self._offsets.append(np.zeros(1))
        flat = np.uint8 if text or lists or pa.types.is_boolean(kind) else pa.array([], kind).to_numpy().dtype
        self._values: Spool | ArraySpool = ArraySpool(folder, kind.value_type) if lists else Spool(folder, flat)

    def append(self, array: pa.Array) -> None:
        self._rows += len(array)
        if self._there is not None:
            self._there.append(pc.is_valid(array).to_numpy(zero_copy_only=False))
        if self._offsets is None:
            filled = pc.fill_null(array, pa.scalar(0, pa.int8()).cast(array.type)) if array.null_count else array
            self._values.append(filled.to_numpy(zero_copy_only=False))
            return
        if pa.types.is_large_list(self._kind):
            lengths, values = pc.fill_null(pc.list_value_length(array), 0).to_numpy(), array.flatten()
        else:
            sections = values_to_sections(pc.fill_null(array, "") if array.null_count else array)
            lengths, values = np.diff(sections["key_offsets"]), sections["key_text"]
        self._offsets.append(np.cumsum(lengths, dtype=np.int64) + self._end)
        self._end += int(lengths.sum())
        self._values.append(values)

    def map(self) -> pa.Array:
        buffers = [None if self._there is None else _bits(self._there.map())]
        if self._offsets is not None:
            buffers.append(pa.py_buffer(self._offsets.map()))
        values = self._values.map()
        if isinstance(self._values, ArraySpool):
            return pa.Array.from_buffers(self._kind, self._rows, buffers, children=[values])
        buffers.append(_bits(values) if pa.types.is_boolean(self._kind) else pa.py_buffer(values))
        return pa.Array.from_buffers(self._kind, self._rows, buffers)


def _bits(values: NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


ROW = pa.uint32()  # keys if none are given
Batch = tuple[Rows, list[pa.Array]]  # consecutive items, their keys, and each attribute as `Column.pack` returns it


@dataclass
class Stored:
    """All items of the source, checked, with keys and attributes: batch by batch in a file without a name."""

    file: IO[bytes]
    vocab_size: int | None
    path: PathLike
    files: list[SourceFile]  # as they were at first
    again: Callable[[], Generator[Items]] | None = None  # reads the source once more instead, if that is as fast
    key_type: Any = None
    items: int = 0
    highest: int = 0
    shortest: int = MAX_ITEM_TOKENS
    longest: int = 0
    columns: Sequence[Column] = ()  # how the attributes are to be stored, known after the last batch

    @property
    def width(self) -> int:
        """Return tokens of each item if all have the same number, else 0."""
        return self.longest if self.shortest == self.longest else 0

    @property
    def types(self) -> list[Any]:
        """Return the Arrow types of a `Batch`'s keys and attributes."""
        return [self.key_type or ROW, *(column.packed for column in self.columns)]

    def add(self, items: Items, rows: Rows) -> None:
        """Add a batch of the source. rows: its items, checked."""
        if self.again is None:
            pickle.dump(replace(items, texts=None, tokens=rows), self.file, pickle.HIGHEST_PROTOCOL)
        self.items += len(rows)
        self.highest = max(self.highest, int(rows.tokens.max()))
        self.shortest, self.longest = min(self.shortest, rows.shortest), max(self.longest, rows.longest)

    def take(self) -> Iterator[Batch]:
        """Yield the batches, once, each row's number before its values. The disk space is free after the last."""
        done = 0
        with closing(self._stored() if self.again is None else self.again()) as batches:
            for items in batches:
                rows = as_rows(items.tokens, self.vocab_size, before=done)
                keys = [] if items.keys is None else [items.keys]
                columns = [] if items.attributes is None else packed(items.attributes, self.columns).columns
                numbers = pa.array(np.arange(done, done + len(rows)), ROW)
                yield rows, [numbers, *keys, *(column.chunk(0) for column in columns)]
                done += len(rows)

    def _stored(self) -> Generator[Items]:
        end = self.file.tell()
        with self.file:
            self.file.seek(0)
            while self.file.tell() < end:
                yield pickle.load(self.file)

    def check_unchanged(self) -> None:
        """Raise ItemSetError if the source was read twice, and changed meanwhile."""
        if self.again is not None and files_at(self.path) != self.files:
            raise ItemSetError(f"{self.path} was changed while it was read: start again")
