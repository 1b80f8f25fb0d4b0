"""Building an item set from a file larger than memory: sorted by DuckDB, streamed through files without names.

DuckDB, because it sorted 20 million items of 8 tokens within 400 MB in 5 s where Polars 2.1 took 23 s (two cores; 10 s
without a limit), and because memory and spill folder are given to a connection, not to the process's environment.
The sort keys are 64-bit integers that hold as many tokens as fit. Against one BLOB an item, which compares the same,
they sort 2 to 4 times as fast (8 to 50 tokens an item) and spill a fifth (8 tokens); one 16-bit column a token lies in
between.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset import notices, sources
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.jit import compiled
from itemset.keys import from_sections, to_sections
from itemset.memory import available_memory
from itemset.rows import MAX_ITEM_TOKENS, Rows, as_rows, bounds, sort_unique, token_dtype
from itemset.scratch import scratch_folder
from itemset.text import encode, identify
from itemset.trie import build_trie

MIN_MEMORY = 1 << 28  # bytes that the sort gets at least
_OVERHEAD = 1 << 29  # bytes that Python, its libraries and the batches in flight take beside the sort
_MAX_WORDS = 64  # sort keys of an item; longer items are sorted as bytes
_BATCH_TOKENS = 1 << 21
_BATCH_KEYS = 1 << 20

Result = TypeVar("Result")


def build_external(
    path: str | os.PathLike[str],
    *,
    column: str | None = None,
    key: str | None = None,
    tokenizer: Any = None,
    prefix: str = "",
    vocab_size: int | None = None,
    memory: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> ItemSet:
    """The set of a file's items, byte for byte the one that `sources.read` and `build` or `build_text` make of them.

    path, column, key: as for `sources.read`. tokenizer, prefix, vocab_size: as for `build` (token ids) and `build_text`
    (texts).
    memory: bytes that sorting may take (at least 750 MB are used), half of what is available where None. The tables
    and one integer an item, about 20 bytes an item, stand in memory whatever it says.
    folder: where temporary files go, on a disk with room for some three times the tokens and keys. They have no names,
    but for DuckDB's. Where None, a folder in the system's one for temporary files, which is removed also when this
    process is killed.
    progress: called with the name of a stage ("reading" or, for texts, "encoding"; "sorting", "merging", "building")
    and the share of it that is done.
    Raises ItemSetError as those functions do, where DuckDB is not installed, and where the disk is full.
    """
    duckdb = _duckdb()
    memory = available_memory() // 2 if memory is None else memory
    temporary = scratch_folder(Path(tempfile.gettempdir(), "itemset")) if folder is None else nullcontext(Path(folder))
    try:
        with temporary as scratch:
            stored = _store(path, column, key, tokenizer, prefix, vocab_size, scratch, progress)
            config = {"memory_limit": f"{max(memory - _OVERHEAD, MIN_MEMORY) >> 20}MiB", "temp_directory": str(scratch)}
            with duckdb.connect(config=config) as connection:
                rows, lcp, keys = _interruptible(
                    lambda: _merge(stored, _sort(stored, connection, progress), scratch), connection
                )
            progress("building", 0.0)
            trie, members = build_trie(rows, lcp)
            item_set = ItemSet(
                trie,
                _gather(keys, members, scratch, progress),
                duplicates=stored.items - trie.items,
                vocab_size=stored.vocab_size,
                tokenizer=identify(tokenizer) if tokenizer is not None else None,
                prefix=prefix,
            )
            notices.of_build(item_set, tokenizer, keys_given=key is not None)
            return item_set
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise ItemSetError(f"{path} cannot be sorted ({reason}): give more memory or disk") from error
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise ItemSetError(f"{path} cannot be sorted in {where}: {error.strerror}: give more disk") from error


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ItemSetError("sorting on disk needs DuckDB: pip install 'static-backend[big]'") from error
    return duckdb


def _interruptible(work: Callable[[], Result], connection: Any) -> Result:
    """The result of `work`, done in a thread of its own: Ctrl-C reaches only the main thread, where code that DuckDB
    calls and DuckDB itself would take it for their own failure."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.done():
                connection.interrupt()
                wait([future], 0.1)
            raise


@dataclass
class _Stored:
    """All items of the source as `Rows` and their keys, checked, batch by batch in a file without a name."""

    file: IO[bytes]
    vocab_size: int | None
    key_type: Any = None
    items: int = 0
    highest: int = 0
    shortest: int = MAX_ITEM_TOKENS
    longest: int = 0

    @property
    def width(self) -> int:
        """Tokens of each item where all have the same number, else 0."""
        return self.longest if self.shortest == self.longest else 0

    def add(self, rows: Rows, keys: pa.Array | None) -> None:
        pickle.dump((rows, keys), self.file, pickle.HIGHEST_PROTOCOL)
        self.items += len(rows)
        self.highest = max(self.highest, int(rows.tokens.max()))
        self.shortest, self.longest = min(self.shortest, rows.shortest), max(self.longest, rows.longest)

    def take(self) -> Iterator[tuple[Rows, pa.Array | None]]:
        """The batches, once: their room on the disk is free after the last."""
        with self.file:
            self.file.seek(0)
            left = self.items
            while left:
                rows, keys = pickle.load(self.file)
                yield rows, keys
                left -= len(rows)


def _store(
    path: str | os.PathLike[str],
    column: str | None,
    key: str | None,
    tokenizer: Any,
    prefix: str,
    vocab_size: int | None,
    folder: Path,
    progress: Callable[[str, float], None],
) -> _Stored:
    """Read and check the source, and encode texts."""
    limit = len(tokenizer) if vocab_size is None and tokenizer is not None else vocab_size
    stored = _Stored(_nameless_file(folder), limit)
    with closing(sources.batches(path, column=column, key=key)) as batches:
        for batch in batches:
            if not stored.items:
                _check_options(path, batch.texts is not None, tokenizer, prefix, vocab_size)
                if batch.keys is not None:
                    stored.key_type = pa.int64() if pa.types.is_integer(batch.keys.type) else pa.large_string()
            items: Any = batch.tokens
            if batch.texts is not None:
                items = Rows(*encode(batch.texts, tokenizer, prefix=prefix, before=stored.items))
            rows = as_rows(items, limit, before=stored.items)
            stored.add(rows, None if batch.keys is None else batch.keys.cast(stored.key_type))
            progress("reading" if batch.texts is None else "encoding", batch.done)
    return stored


def _check_options(
    path: str | os.PathLike[str], texts: bool, tokenizer: Any, prefix: str, vocab_size: int | None
) -> None:
    if not texts and prefix:
        raise ItemSetError(f"{path} holds token ids: the prefix is for texts, leave it away")
    if texts and tokenizer is None:
        raise ItemSetError(f"{path} holds texts: give the model's tokenizer")
    if texts and vocab_size is not None:
        raise ItemSetError(f"{path} holds texts: leave the vocabulary size away, the tokenizer knows it")


def _sort(stored: _Stored, connection: Any, progress: Callable[[str, float], None]) -> Iterator[tuple[Rows, pa.Array]]:
    """Batches of the items in ascending order, equal ones in the order of the source, and their keys."""
    codec: _Codec = _Words(stored)
    if len(codec.fields) > _MAX_WORDS:
        codec = _Bytes(stored)
    schema = pa.schema([*codec.fields, ("row", pa.uint32())])
    if stored.key_type is not None:
        schema = schema.append(pa.field("key", stored.key_type))

    def feed() -> Iterator[pa.RecordBatch]:
        first = 0
        for rows, keys in stored.take():
            numbers = pa.array(np.arange(first, first + len(rows), dtype=np.uint32))
            columns = [*codec.encode(rows), numbers, *([] if keys is None else [keys])]
            yield pa.record_batch(columns, schema=schema)
            first += len(rows)
            progress("sorting", first / stored.items)

    reader = pa.RecordBatchReader.from_batches(schema, feed())
    relation = connection.from_arrow(reader).order(", ".join([*(name for name, _ in codec.fields), "row"]))
    stream = relation.to_arrow_reader if hasattr(relation, "to_arrow_reader") else relation.fetch_arrow_reader
    done = 0
    for batch in stream(max(1, _BATCH_TOKENS // stored.longest)):
        if len(batch):
            keys = batch.column("row" if stored.key_type is None else "key")
            yield codec.decode(batch), keys.cast(stored.key_type or pa.int64())
            done += len(batch)
            progress("merging", done / stored.items)


class _Codec(Protocol):
    """Items as columns that sort as the items do."""

    fields: list[tuple[str, Any]]

    def encode(self, rows: Rows) -> list[pa.Array]: ...

    def decode(self, batch: pa.RecordBatch) -> Rows: ...


class _Words:
    """Integers of 64 bits. A token is stored as its id plus one, the first highest; 0 follows the last."""

    def __init__(self, stored: _Stored) -> None:
        self._bits = (stored.highest + 1).bit_length()
        self._tokens = 64 // self._bits  # in a word
        self._dtype = token_dtype(stored.highest)
        self._longest = stored.longest
        self._width = stored.width
        self.fields = [(f"word{i}", pa.uint64()) for i in range(-(-stored.longest // self._tokens))]

    def encode(self, rows: Rows) -> list[pa.Array]:
        words = np.empty((len(self.fields), len(rows)), np.uint64)
        _pack(rows.tokens, *rows.layout, self._tokens, self._bits, words)
        return [pa.array(word) for word in words]

    def decode(self, batch: pa.RecordBatch) -> Rows:
        words = np.stack([batch.column(name).to_numpy() for name, _ in self.fields])
        tokens = np.empty(len(batch) * self._longest, self._dtype)
        offsets = np.zeros(len(batch) + 1, np.int64)
        _unpack(words, self._tokens, self._bits, tokens, offsets)
        return Rows(tokens, width=self._width) if self._width else Rows(tokens[: offsets[-1]], offsets)


class _Bytes:
    """A string of bytes: the token ids in big-endian order."""

    def __init__(self, stored: _Stored) -> None:
        self.fields = [("bytes", pa.large_binary())]
        self._dtype = np.dtype(token_dtype(stored.highest))

    def encode(self, rows: Rows) -> list[pa.Array]:
        text = pa.py_buffer(rows.tokens.astype(self._dtype.newbyteorder(">")))
        offsets = pa.py_buffer(rows.offsets * self._dtype.itemsize)
        return [pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), [None, offsets, text])]

    def decode(self, batch: pa.RecordBatch) -> Rows:
        strings = batch.column("bytes").cast(pa.large_binary())
        _, offsets, text = strings.buffers()
        offsets = np.frombuffer(offsets, np.int64, len(strings) + 1, strings.offset * 8)
        tokens = np.frombuffer(text, np.uint8)[offsets[0] : offsets[-1]].view(self._dtype.newbyteorder(">"))
        return Rows(tokens.astype(self._dtype), (offsets - offsets[0]) // self._dtype.itemsize)


def _merge(
    stored: _Stored, batches: Iterator[tuple[Rows, pa.Array]], folder: Path
) -> tuple[Rows, NDArray[np.uint16], pa.Array]:
    """The distinct rows of sorted batches, lcp as `rows.sort_unique` gives it, and the rows' keys; all in files."""
    tokens, lcps = _Spool(folder, token_dtype(stored.highest)), _Spool(folder, np.uint16)
    starts = None if stored.width else _Spool(folder, np.int64)
    keys = _KeySpool(folder, stored.key_type)
    total = 0  # tokens of all rows so far
    last: Rows | None = None  # the last row so far: the next batch goes on behind it
    for batch, batch_keys in batches:
        rows, kept, lcp = sort_unique(batch if last is None else _behind(last, batch))
        known = 0 if last is None else 1
        if kept is not None:
            batch_keys = batch_keys.take(pa.array(kept[known:] - known))
        offsets = rows.offsets
        last = Rows(rows.tokens[offsets[-2] :], width=int(offsets[-1] - offsets[-2]))
        tokens.append(rows.tokens[offsets[known] :])
        if starts is not None:
            starts.append(offsets[known:-1] - offsets[known] + total)
            total += int(offsets[-1] - offsets[known])
        lcps.append(lcp[known:-1])
        keys.append(batch_keys)
    lcps.append(np.zeros(1, np.uint16))
    if starts is None:
        return Rows(tokens.map(), width=stored.width), lcps.map(), keys.map()
    starts.append(np.array([total]))
    return Rows(tokens.map(), starts.map()), lcps.map(), keys.map()


def _behind(last: Rows, rows: Rows) -> Rows:
    tokens, (offsets, width) = np.concatenate((last.tokens, rows.tokens)), rows.layout
    if width:
        return Rows(tokens, width=width)
    return Rows(tokens, np.concatenate((np.zeros(1, np.int64), offsets + len(last.tokens))))


def _gather(
    keys: pa.Array, members: NDArray[np.uint32], folder: Path, progress: Callable[[str, float], None]
) -> pa.Array:
    """The keys of these rows, in a file. Members ascend level by level, so `keys` are read in order."""
    taken = _KeySpool(folder, keys.type)
    for start in range(0, len(members), _BATCH_KEYS):
        taken.append(keys.take(pa.array(members[start : start + _BATCH_KEYS])))
        progress("building", 0.5 + 0.5 * start / len(members))
    return taken.map()


def _nameless_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


class _Spool:
    """Numbers of one type, appended to a file without a name and mapped into memory when all are there."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        self._file = _nameless_file(folder)
        self._dtype = dtype

    def append(self, numbers: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(numbers, self._dtype).data)

    def map(self) -> NDArray[Any]:
        with self._file as file:
            # Writable as arrays in memory are: compiled code knows the two kinds apart.
            return np.asarray(np.memmap(file, self._dtype, "r+")) if file.tell() else np.zeros(0, self._dtype)


class _KeySpool:
    """Keys, appended to files without names: integers to one, the bytes of strings and where they start to two."""

    def __init__(self, folder: Path, key_type: Any) -> None:
        strings = key_type is not None and pa.types.is_large_string(key_type)
        dtypes: dict[str, Any] = {"key_offsets": np.int64, "key_text": np.uint8} if strings else {"keys": np.int64}
        self._spools = {name: _Spool(folder, dtype) for name, dtype in dtypes.items()}
        self._end = 0
        if strings:
            self._spools["key_offsets"].append(np.zeros(1, np.int64))

    def append(self, keys: pa.Array) -> None:
        sections = to_sections(keys)
        if "key_offsets" in sections:
            offsets = sections["key_offsets"]
            sections["key_offsets"] = offsets[1:] + self._end
            self._end += int(offsets[-1])
        for name, numbers in sections.items():
            self._spools[name].append(numbers)

    def map(self) -> pa.Array:
        return from_sections({name: spool.map() for name, spool in self._spools.items()})


@compiled
def _pack(tokens, offsets, width, count, bits, words):  # type: ignore[no-untyped-def]
    """Fill words [words, rows] with `count` tokens each, see `_Words`."""
    for i in range(words.shape[1]):
        at, end = bounds(offsets, width, i)
        for word in range(words.shape[0]):
            packed = np.uint64(0)
            for _ in range(count):
                packed <<= np.uint64(bits)
                if at < end:
                    packed |= np.uint64(tokens[at]) + np.uint64(1)
                    at += 1
            words[word, i] = packed


@compiled
def _unpack(words, count, bits, tokens, offsets):  # type: ignore[no-untyped-def]
    """Fill tokens and offsets (from 1 on) with what `_pack` has packed."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    at = 0
    for i in range(words.shape[1]):
        for word in range(words.shape[0]):
            for k in range(count - 1, -1, -1):
                token = (words[word, i] >> np.uint64(bits * k)) & mask
                if token:
                    tokens[at] = token - np.uint64(1)
                    at += 1
        offsets[i + 1] = at
