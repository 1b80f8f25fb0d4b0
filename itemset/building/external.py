"""Building an item set from files larger than memory: sorted by DuckDB, streamed through files without names.

DuckDB sorted 20 million items of 8 tokens within 400 MB in 5 s, Polars 2.1 in 23 s (two cores). Integers of 64 bits
with as many tokens as fit sort 2 to 4 times as fast as one BLOB an item, and spill a fifth.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.building import sources
from itemset.building.dialects import Dialect
from itemset.building.items import Encoding, Items
from itemset.building.scratch import ROW, ArraySpool, Batch, Spool, Stored, Zeros, nameless_file, scratch_folder
from itemset.building.streams import format_of
from itemset.errors import Faults, ItemSetError
from itemset.item_set import ItemSet, Origin
from itemset.storage import PathLike, files_at
from itemset.text import Escape, Lossy, identify
from itemset.trie.attributes import Survey, Writer
from itemset.trie.keys import Keys, are_row_numbers, in_item_order
from itemset.trie.pointers import compiled
from itemset.trie.rows import Distinct, Rows, joined, pack_keys, sort_unique, token_dtype
from itemset.trie.tables import build_trie

MIN_MEMORY = 1 << 28  # bytes that the sort gets at least
_OVERHEAD = 1 << 29  # bytes that Python, its libraries and the batches in flight take beside the sort
_BATCH_TOKENS = 1 << 21
_BATCH_KEYS = 1 << 20
_MAX_WORDS = 64  # columns of an item; longer items are sorted as bytes

Progress = Callable[[str, float], None]


class Source(TypedDict, total=False):
    """What a file's items are, and how they are encoded: as for `sources.read`, `build` and `build_text`."""

    column: str | None
    key: str | None
    attributes: Sequence[str]
    dialect: Dialect
    tokenizer: Any
    prefix: str
    escape: Escape | None
    vocab_size: int | None
    keep_text: bool


def build_external(
    path: PathLike, *, before: ItemSet | None = None, memory: int | None = None, folder: PathLike | None = None,
    progress: Progress = lambda stage, share: None, **source: Unpack[Source],
) -> ItemSet:  # fmt: skip
    """Build the set of a file's items, byte for byte the one that `sources.read` and `build` or `build_text` make.

    source: column, key, attributes, dialect, tokenizer, prefix, escape, vocab_size, as these take them; keep_text: take
    the texts for keys, as they are given.
    before: the set of an earlier file, whose attributes, prefix, escape and vocab_size are taken if none are given.
    memory: bytes that sorting may take (at least 750 MB are used), and then as much of the tables and of one integer an
    item; by default half of what is available. What is more, of about 16 bytes an item, is in files.
    folder: for temporary files, with room for some three times the tokens, keys and attributes; by default a new one.
    progress: called with a stage ("reading" or, for texts, "encoding"; "sorting", "merging", "building") and the share
    of it that is done.
    Raises ItemSetError as those functions do, if the disk is full, and if the set before had another tokenizer, or keys
    and no column is named for them now (key="": the row numbers).
    """
    given = {name: value for name, value in source.items() if value is not None}
    how: dict[str, Any] = {name: value for name, value in given.items() if value != "" or name == "prefix"}
    if before is not None:
        how = _as_before(before, path, source) | how
    named = {name: how.pop(name) for name in ("column", "key", "attributes", "dialect") if name in how}
    encoding = Encoding(**how)
    memory = available_memory() // 2 if memory is None else memory
    temporary = scratch_folder(Path(tempfile.gettempdir(), "itemset")) if folder is None else nullcontext(Path(folder))
    try:
        with temporary as scratch:
            stored = _store(path, partial(sources.batches, path, **named), encoding, scratch, progress)
            distinct, values = _sorted(stored, memory, scratch, progress)
            stored.check_unchanged()
            progress("building", 0.0)
            trie, members = build_trie(distinct.rows, distinct.lcp, Zeros(scratch, memory))
            starts = distinct.starts
            del distinct  # the files of its rows are as large as the index
            keys, section = _gather(stored, values, starts, members, scratch, progress)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        mend = ": give more disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ItemSetError(f"{path} cannot be sorted in {where}: {error.strerror or error}{mend}") from error
    made_with = None if encoding.tokenizer is None else identify(encoding.tokenizer)
    origin = Origin(encoding.limit, made_with, encoding.prefix, encoding.escape)
    return ItemSet(trie, keys, origin, duplicates=stored.items - trie.items, attributes=section)


def _as_before(before: ItemSet, path: object, how: Source) -> dict[str, Any]:
    tokenizer, limit = how.get("tokenizer"), before.vocab_size
    if tokenizer is not None:
        before.check_tokenizer(tokenizer)
    elif before.tokenizer is not None:
        raise ItemSetError(f"the set was built with the tokenizer {before.tokenizer.name}: give it (--tokenizer DIR)")
    if how.get("key") is None and not (how.get("keep_text") or are_row_numbers(before.keys)):
        raise ItemSetError(
            f"the set has keys, and which column of {path} has them is not known: name it with --key (in Python key=), "
            "or take the row numbers, with --key ''"
        )
    limit = None if tokenizer is not None and limit == len(tokenizer) else limit
    taken = {"attributes": before.attributes.column_names, "prefix": before.prefix, "escape": before.escape}
    return {**taken, "vocab_size": limit}


_Sorted = tuple[Distinct, list[pa.Array]]  # the distinct rows, without their order, and the values of all; in files


def _store(
    path: PathLike, read: Callable[[], Generator[Items]], encoding: Encoding, folder: Path, progress: Progress
) -> Stored:
    files = files_at(path)
    stored = Stored(nameless_file(folder), encoding.limit, path, files)
    fast = all(file.system is None and format_of(file) in (".npy", ".parquet") for file in files)  # as to store ids
    survey, faults, lossy = None, Faults(), Lossy()
    with closing(read()) as batches:
        for batch in batches:
            if not stored.items:
                encoding.check(path, texts=batch.texts is not None)
                stored.again = read if batch.texts is None and fast else None
            rows = encoding.rows(batch, stored.items, faults, lossy)
            if rows is None:
                continue
            batch = encoding.keyed(batch)
            stored.key_type = None if batch.keys is None else batch.keys.type
            stored.add(batch, rows)
            if batch.attributes is not None:
                survey = survey or Survey(batch.attributes.schema)
                survey.add(batch.attributes)
            progress("reading" if batch.texts is None else "encoding", batch.done)
    faults.check()
    lossy.warn()
    stored.columns = () if survey is None else survey.columns()
    return stored


def _sorted(stored: Stored, memory: int, folder: Path, progress: Progress) -> _Sorted:
    """Sort in a thread of its own: Ctrl-C, which reaches the main thread alone, would look like a failure to DuckDB."""
    try:
        with database(stored.path, memory, folder) as connection, ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()  # Ctrl-C while a thread starts leaves it out of those that the pool waits for
            future = pool.submit(lambda: _merge(stored, _sort(stored, connection, progress), folder))
            try:
                return future.result()
            except KeyboardInterrupt:
                while not future.done():
                    with suppress(Exception):  # the connection may be busy; then try again
                        connection.interrupt()
                    wait([future], 0.1)
                raise
    except ItemSetError:
        stored.check_unchanged()
        raise


@contextmanager
def database(what: object, memory: int | None, folder: PathLike | None) -> Iterator[Any]:
    """Open DuckDB, with the memory of a build and the rest in files in a folder, by default that for temporary files.

    Raises ItemSetError if both are too little for `what`.
    """
    import duckdb  # which other commands need not wait for

    limit = max((available_memory() // 2 if memory is None else memory) - _OVERHEAD, MIN_MEMORY)
    config = {"memory_limit": f"{limit >> 20}MiB", "temp_directory": os.fspath(folder or tempfile.gettempdir())}
    try:
        with duckdb.connect(config=config) as connection:
            yield connection
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise ItemSetError(f"{what} cannot be sorted ({reason}): give more memory or disk") from error


def _sort(stored: Stored, connection: Any, progress: Progress) -> Iterator[Batch]:
    """Yield the items in ascending order, equal ones in the order of the source."""
    words, keyless = _Words(stored.highest, stored.longest, stored.width), stored.key_type is None
    codec: _Words | _Bytes = words if len(words.fields) <= _MAX_WORDS else _Bytes(stored.highest)
    values = [(f"value{i}", kind) for i, kind in enumerate(stored.types)]
    schema = pa.schema([*codec.fields, ("row", ROW), *values[keyless:]])  # by default the rows are the keys

    def feed() -> Iterator[pa.RecordBatch]:
        done = 0
        for rows, values in stored.take():
            yield pa.record_batch([*codec.encode(rows), *values], schema=schema)
            done += len(rows)
            progress("sorting", done / stored.items)

    reader = pa.RecordBatchReader.from_batches(schema, feed())
    relation = connection.from_arrow(reader).order(", ".join([*(name for name, _ in codec.fields), "row"]))
    stream = relation.to_arrow_reader if hasattr(relation, "to_arrow_reader") else relation.fetch_arrow_reader
    done = 0
    for batch in stream(max(1, _BATCH_TOKENS // stored.longest)):
        if len(batch):
            arrays = batch.columns[len(codec.fields) + (not keyless) :]
            yield codec.decode(batch), [array.cast(kind) for array, kind in zip(arrays, stored.types, strict=True)]
            done += len(batch)
            progress("merging", done / stored.items)


def _merge(stored: Stored, batches: Iterator[Batch], folder: Path) -> _Sorted:
    tokens, lcps = Spool(folder, token_dtype(stored.highest)), Spool(folder, np.uint16)
    offsets = None if stored.width else Spool(folder, np.int64)
    values = [ArraySpool(folder, kind, missing=i > 0) for i, kind in enumerate(stored.types)]
    starts = Spool(folder, np.uint32)
    items = keys_so_far = tokens_so_far = 0
    last: Rows | None = None  # the last row so far: the next batch goes on from it
    for ordered, columns in batches:
        both, known = (ordered, 0) if last is None else (joined([last, ordered]), 1)
        rows, _, begins_of_keys, lcp = sort_unique(both)
        if begins_of_keys is None:
            begins_of_keys = np.arange(len(rows) + 1, dtype=np.uint32)
        begins = rows.offsets
        last = Rows(rows.tokens[begins[-2] :], width=int(begins[-1] - begins[-2]))
        tokens.append(rows.tokens[begins[known] :])
        if offsets is not None:
            offsets.append(begins[known:-1] - begins[known] + tokens_so_far)
            tokens_so_far += int(begins[-1] - begins[known])
        lcps.append(lcp[known:-1])
        for spool, column in zip(values, columns, strict=True):
            spool.append(column)
        starts.append(begins_of_keys[known:-1].astype(np.int64) - known + keys_so_far)
        items, keys_so_far = items + len(rows) - known, keys_so_far + len(ordered)
    lcps.append(np.zeros(1, np.uint16))
    starts.append(np.array([keys_so_far]))
    if offsets is not None:
        offsets.append(np.array([tokens_so_far]))
    rows = Rows(tokens.map(), None if offsets is None else offsets.map(), width=stored.width)
    distinct = Distinct(rows, None, None if items == keys_so_far else starts.map(), lcps.map())
    return distinct, [spool.map() for spool in values]


def _gather(
    stored: Stored, of_rows: list[pa.Array], row_starts: NDArray[np.uint32] | None, members: NDArray[np.uint32],
    folder: Path, progress: Progress,
) -> tuple[Keys, NDArray[np.uint8] | None]:  # fmt: skip
    """Return the keys of these rows and the section of their attributes, in files; both are read in order."""
    kind = stored.key_type or pa.int64()
    keys, starts, total = ArraySpool(folder, kind), Spool(folder, np.uint32), 0
    stream = nameless_file(folder)
    writer = Writer(pa.PythonFile(stream, "w"), stored.columns)
    for start in range(0, len(members), _BATCH_KEYS):
        places, begins = in_item_order(members[start : start + _BATCH_KEYS], row_starts)
        values = [array.take(pa.array(places)) for array in of_rows]
        keys.append(values[0].cast(kind))
        writer.append(pa.table(values[1:], [column.name for column in stored.columns]))
        if begins is not None:
            starts.append(begins[:-1] + np.uint32(total))
            total += len(places)
        progress("building", 0.5 + 0.5 * start / len(members))
    if row_starts is not None:
        starts.append(np.array([total]))
    with stream:
        writer.close()
        stream.flush()
        section = np.asarray(np.memmap(stream, np.uint8, "r")) if stored.columns else None
    return Keys(keys.map(), None if row_starts is None else starts.map()), section


class _Words:
    """Integers of 64 bits. A token is stored as its id plus one, the first highest; 0 follows the last."""

    def __init__(self, highest: int, longest: int, width: int) -> None:
        self._bits = (highest + 1).bit_length()
        self._tokens = 64 // self._bits  # in a word
        self._dtype, self._longest, self._width = token_dtype(highest), longest, width
        self.fields = [(f"word{i}", pa.uint64()) for i in range(-(-longest // self._tokens))]

    def encode(self, rows: Rows) -> list[pa.Array]:
        members, starts = np.arange(len(rows), dtype=np.uint32), range(0, self._longest, self._tokens)
        pack = partial(pack_keys, *rows.cells, members)
        return [pa.array(pack(start, self._tokens, self._bits, 0)) for start in starts]

    def decode(self, batch: pa.RecordBatch) -> Rows:
        words = np.stack([batch.column(name).to_numpy() for name, _ in self.fields])
        tokens = np.empty(len(batch) * self._longest, self._dtype)
        offsets = np.zeros(len(batch) + 1, np.int64)
        _unpack(words, self._tokens, self._bits, tokens, offsets)
        return Rows(tokens, width=self._width) if self._width else Rows(tokens[: offsets[-1]], offsets)


class _Bytes:
    """A string of bytes: the token ids in big-endian order."""

    def __init__(self, highest: int) -> None:
        self.fields = [("bytes", pa.large_binary())]
        self._dtype = np.dtype(token_dtype(highest))

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


@compiled
def _unpack(words, count, bits, tokens, offsets):  # type: ignore[no-untyped-def]
    """Fill tokens and offsets (from 1 on) with what `pack_keys` has packed: words [words, rows]."""
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


def available_memory(system: Path = Path("/")) -> int:
    """Return the bytes that this process can take without swapping: the system's, or its control group's (v2)."""
    try:
        free = 1024 * _counter(system / "proc/meminfo", "MemAvailable:")
    except (OSError, LookupError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = system / "sys/fs/cgroup"
    with suppress(OSError, LookupError, ValueError):  # no such group, or no limit ("max")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = _counter(group / "memory.stat", "inactive_file")  # files' pages, which can be taken back
        free = min(free, max(0, limit - used + cached))
    return free


def _counter(file: Path, name: str) -> int:
    """Return the number after `name` in a file of one counter a line."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines()) if len(words) > 1}[name]
