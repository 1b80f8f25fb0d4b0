"""Building an item set from files larger than memory: sorted by DuckDB, streamed through files without names.

DuckDB, because it sorted 20 million items of 8 tokens within 400 MB in 5 s where Polars 2.1 took 23 s (two cores; 10 s
without a limit), and because memory and spill folder are given to a connection, not to the process's environment.
The sort keys are 64-bit integers that hold as many tokens as fit. Against one BLOB an item, which compares the same,
they sort 2 to 4 times as fast (8 to 50 tokens an item) and spill a fifth (8 tokens). One 16-bit column a token is
between the two.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.building import sources
from itemset.building.codecs import codec_of
from itemset.building.memory import available_memory
from itemset.building.scratch import scratch_folder
from itemset.building.spools import ArraySpool, Spool, Zeros, nameless_file
from itemset.building.stored import Stored, can_read_twice
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.storage import files_at
from itemset.text import Escape, encode, identify, warn_of_special
from itemset.trie.attributes import Column, Survey, Writer, packed
from itemset.trie.keys import Keys, in_item_order
from itemset.trie.rows import Rows, as_rows, out_of_order, sort_unique, token_dtype
from itemset.trie.tables import build_trie

MIN_MEMORY = 1 << 28  # bytes that the sort gets at least
_OVERHEAD = 1 << 29  # bytes that Python, its libraries and the batches in flight take beside the sort
_BATCH_TOKENS = 1 << 21
_BATCH_KEYS = 1 << 20
_ROW = pa.uint32()  # keys if none are given

Result = TypeVar("Result")


def build_external(
    path: str | os.PathLike[str],
    *,
    column: str | None = None,
    key: str | None = None,
    attributes: Sequence[str] = (),
    tokenizer: Any = None,
    prefix: str = "",
    escape: Escape | None = None,
    vocab_size: int | None = None,
    in_order: bool = False,
    engine: Literal["ray"] | None = None,
    shards: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> ItemSet:
    """Build the set of a file's items, byte for byte the one that `sources.read` and `build` or `build_text` make.

    path, column, key, attributes: as for `sources.read`. tokenizer, prefix, escape, vocab_size: as for `build` (token
    ids) and `build_text` (texts).
    in_order: the items ascend already, compared token by token, an item before those that it begins; nothing is sorted.
    engine: "ray" reads, encodes and sorts on a Ray cluster (needs the package `ray`), this process does the rest.
    shards: a new folder or URI, for what the cluster has sorted, which stays there; all its machines must share it. By
    default it is a new one in `folder`, removed at the end.
    memory: bytes that sorting may take (at least 750 MB are used), and then as much of the tables and of one integer an
    item; by default half of what is available. What is more, of about 16 bytes an item, is in files.
    folder: for temporary files, on a disk with room for some three times the tokens, keys and attributes. They have no
    names, but for DuckDB's. By default a new folder in the system's temporary one, removed even if this process is
    killed.
    progress: called with the name of a stage ("reading" or, for texts, "encoding"; "sorting", "merging", "building")
    and the share of it that is done.
    Raises ItemSetError as those functions do, if DuckDB is needed and not installed, if the disk is full, and for the
    first item that is out of the order that was promised.
    """
    if engine not in (None, "ray"):
        raise ItemSetError(f"no engine {engine!r}: give ray, or omit it")
    if in_order and engine is not None:
        raise ItemSetError("the items are in order already, there is nothing to sort: omit --sorted or --engine")
    if shards is not None and engine is None:
        raise ItemSetError("shards are for what a cluster sorts: give an engine, or omit them")
    if engine is not None:
        _ray_shards()
    elif not in_order:
        _duckdb()  # raises before the work
    memory = available_memory() // 2 if memory is None else memory
    temporary = scratch_folder(Path(tempfile.gettempdir(), "itemset")) if folder is None else nullcontext(Path(folder))
    try:
        with temporary as scratch, ExitStack() as until_built:
            named: dict[str, Any] = {"column": column, "key": key, "attributes": attributes}
            read = partial(sources.batches, path, **named)
            encoding = (tokenizer, prefix, escape, vocab_size)
            if engine is not None:
                sorted_shards = str(shards or until_built.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
                read = _ray_shards().write_shards(path, sorted_shards, named, *encoding)
                path, encoding, in_order = sorted_shards, (None, "", None, token_limit(tokenizer, vocab_size)), True
            stored = _store(path, read, *encoding, scratch, progress)
            if in_order:
                rows, lcp, of_keys = _merge(stored, _in_order(path, stored, progress), scratch)
            else:
                rows, lcp, of_keys = _sorted(path, stored, memory, scratch, progress)
            stored.check_unchanged()
            progress("building", 0.0)
            trie, members = build_trie(rows, lcp, Zeros(scratch, memory))
            del rows, lcp  # their files are as large as the index
            keys, section = _gather(of_keys, members, scratch, progress)
            item_set = ItemSet(
                trie,
                keys,
                duplicates=stored.items - trie.items,
                vocab_size=stored.vocab_size,
                tokenizer=identify(tokenizer) if tokenizer is not None else None,
                prefix=prefix,
                escape=escape,
                attributes=section,
            )
            warn_of_special(item_set.occurring, tokenizer)
            return item_set
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise ItemSetError(f"{path} cannot be sorted in {where}: {error.strerror or error}: give more disk") from error


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ItemSetError("sorting on disk needs DuckDB: pip install 'static-backend[big]'") from error
    return duckdb


def _ray_shards() -> Any:
    try:
        from itemset.building import ray_shards
    except ImportError as error:
        raise ItemSetError("sorting on a cluster needs Ray: pip install 'static-backend[ray]'") from error
    return ray_shards


def _interruptible(work: Callable[[], Result], connection: Any) -> Result:
    """Return the result of `work`, done in a thread of its own.

    Ctrl-C reaches only the main thread. DuckDB, and code that DuckDB calls, would take it for a failure of their own.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.done():
                with suppress(_duckdb().Error):  # the connection may be busy; then it is asked again
                    connection.interrupt()
                wait([future], 0.1)
            raise


def _store(
    path: str | os.PathLike[str],
    read: Callable[[], Generator[sources.Items]],
    tokenizer: Any,
    prefix: str,
    escape: Escape | None,
    vocab_size: int | None,
    folder: Path,
    progress: Callable[[str, float], None],
) -> Stored:
    """Read and check the source, and encode texts."""
    limit, files = token_limit(tokenizer, vocab_size), files_at(path)
    stored = Stored(nameless_file(folder), limit, path, files)
    survey: Survey | None = None
    with closing(read()) as batches:
        for batch in batches:
            if not stored.items:
                check_options(path, batch.texts is not None, tokenizer, prefix, escape, vocab_size)
                stored.again = read if batch.texts is None and can_read_twice(files) else None
                stored.key_type = None if batch.keys is None else batch.keys.type
            items: Any = batch.tokens
            if batch.texts is not None:
                items = Rows(*encode(batch.texts, tokenizer, prefix=prefix, escape=escape, before=stored.items))
            rows = as_rows(items, limit, before=stored.items)
            stored.add(rows, batch.keys, batch.attributes)
            if batch.attributes is not None:
                survey = survey or Survey(batch.attributes.schema)
                survey.add(batch.attributes)
            progress("reading" if batch.texts is None else "encoding", batch.done)
    stored.columns = () if survey is None else survey.columns()
    return stored


def token_limit(tokenizer: Any, vocab_size: int | None) -> int | None:
    """Return the number that token ids stay below: the tokenizer's if none is given, None if there is neither."""
    return len(tokenizer) if vocab_size is None and tokenizer is not None else vocab_size


def check_options(
    path: str | os.PathLike[str],
    texts: bool,
    tokenizer: Any,
    prefix: str,
    escape: Escape | None,
    vocab_size: int | None,
) -> None:
    """Raise ItemSetError for an option that does not go with what the file holds, texts or token ids."""
    if not texts and prefix:
        raise ItemSetError(f"{path} holds token ids: the prefix is for texts, omit it (--prefix)")
    if not texts and escape:
        raise ItemSetError(f"{path} holds token ids: to escape is for texts, omit it (--escape)")
    if texts and tokenizer is None:
        raise ItemSetError(f"{path} holds texts: give the model's tokenizer (--tokenizer DIR)")
    if texts and vocab_size is not None:
        raise ItemSetError(f"{path} holds texts: omit the vocabulary size (--vocab-size), the tokenizer knows it")


class _Batch(NamedTuple):
    """Consecutive items of the sorted source, their keys, and their attributes as `Column.pack` returns them."""

    rows: Rows
    keys: pa.Array
    attributes: list[pa.Array]


class _OfKeys(NamedTuple):
    """What goes with the sorted rows, a value for each key: the keys themselves, and the attributes, packed."""

    keys: Keys
    columns: Sequence[Column]
    attributes: list[pa.Array]


_Merged = tuple[Rows, NDArray[np.uint16], _OfKeys]


def _in_order(path: str | os.PathLike[str], stored: Stored, progress: Callable[[str, float], None]) -> Iterator[_Batch]:
    """Yield the items as they are stored. Raises ItemSetError for the first that is out of order."""
    last: Rows | None = None
    done = 0
    for rows, keys, attributes in stored.take():
        tokens = rows.tokens.astype(token_dtype(stored.highest), copy=False)
        rows = Rows(tokens, width=stored.width) if stored.width else Rows(tokens, rows.offsets)
        known = 0 if last is None else 1
        seen = rows if last is None else _after(last, rows)
        if (row := out_of_order(seen)) is not None:
            raise ItemSetError(
                f"{path}: row {done + row - known + 1:,} is lower than the one before it: sort the items by their "
                "token ids, an item before those that it begins, over all files in the order of their names; or let "
                "the build sort them"
            )
        last = seen.take(np.array([len(seen) - 1]))
        if keys is None:
            keys = pa.array(np.arange(done, done + len(rows)), _ROW)
        columns = [] if attributes is None else packed(attributes, stored.columns).columns
        yield _Batch(rows, keys, [column.chunk(0) for column in columns])
        done += len(rows)
        progress("merging", done / stored.items)


def _sorted(
    path: str | os.PathLike[str],
    stored: Stored,
    memory: int,
    folder: Path,
    progress: Callable[[str, float], None],
) -> _Merged:
    """Sort the items with DuckDB, and merge them."""
    duckdb = _duckdb()
    config = {"memory_limit": f"{max(memory - _OVERHEAD, MIN_MEMORY) >> 20}MiB", "temp_directory": str(folder)}
    try:
        with duckdb.connect(config=config) as connection:
            return _interruptible(lambda: _merge(stored, _sort(stored, connection, progress), folder), connection)
    except duckdb.Error as error:
        stored.check_unchanged()
        reason = str(error).partition("\n")[0]
        raise ItemSetError(f"{path} cannot be sorted ({reason}): give more memory or disk") from error


def _sort(stored: Stored, connection: Any, progress: Callable[[str, float], None]) -> Iterator[_Batch]:
    """Yield the items in ascending order, equal ones in the order of the source."""
    codec = codec_of(stored.highest, stored.longest, stored.width)
    schema = pa.schema([*codec.fields, ("row", _ROW)])
    if stored.key_type is not None:
        schema = schema.append(pa.field("key", stored.key_type))
    for i, column in enumerate(stored.columns):
        schema = schema.append(pa.field(f"attribute{i}", column.packed))

    def feed() -> Iterator[pa.RecordBatch]:
        first = 0
        for rows, keys, attributes in stored.take():
            numbers = pa.array(np.arange(first, first + len(rows), dtype=np.uint32))
            columns = [*codec.encode(rows), numbers, *([] if keys is None else [keys])]
            if attributes is not None:
                columns += [column.chunk(0) for column in packed(attributes, stored.columns).columns]
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
            attributes = [batch.column(f"attribute{i}").cast(column.packed) for i, column in enumerate(stored.columns)]
            yield _Batch(codec.decode(batch), keys.cast(stored.key_type or _ROW), attributes)
            done += len(batch)
            progress("merging", done / stored.items)


def _merge(stored: Stored, batches: Iterator[_Batch], folder: Path) -> _Merged:
    """Return the distinct rows of sorted batches, their lcp as in `rows.sort_unique`, and their keys; all in files."""
    tokens, lcps = Spool(folder, token_dtype(stored.highest)), Spool(folder, np.uint16)
    offsets = None if stored.width else Spool(folder, np.int64)
    keys, key_starts = ArraySpool(folder, stored.key_type or _ROW), None
    attributes = [ArraySpool(folder, column.packed, missing=True) for column in stored.columns]
    items = keys_so_far = tokens_so_far = 0
    last: Rows | None = None  # the last row so far: the next batch goes on from it
    for batch in batches:
        rows, _, starts, lcp = sort_unique(batch.rows if last is None else _after(last, batch.rows))
        known = 0 if last is None else 1
        if starts is not None and key_starts is None:  # the first equal items
            key_starts = Spool(folder, np.uint32)
            for first in range(0, items, _BATCH_KEYS):
                key_starts.append(np.arange(first, min(first + _BATCH_KEYS, items)))
        if starts is None:
            starts = np.arange(len(rows) + 1, dtype=np.uint32)
        begins = rows.offsets
        last = Rows(rows.tokens[begins[-2] :], width=int(begins[-1] - begins[-2]))
        tokens.append(rows.tokens[begins[known] :])
        if offsets is not None:
            offsets.append(begins[known:-1] - begins[known] + tokens_so_far)
            tokens_so_far += int(begins[-1] - begins[known])
        lcps.append(lcp[known:-1])
        for spool, values in zip((keys, *attributes), (batch.keys, *batch.attributes), strict=True):
            spool.append(values)
        if key_starts is not None:
            key_starts.append(starts[known:-1].astype(np.int64) - known + keys_so_far)
        items, keys_so_far = items + len(rows) - known, keys_so_far + len(batch.keys)
    lcps.append(np.zeros(1, np.uint16))
    if key_starts is not None:
        key_starts.append(np.array([keys_so_far]))
    every = Keys(keys.map(), None if key_starts is None else key_starts.map())
    of_keys = _OfKeys(every, stored.columns, [spool.map() for spool in attributes])
    if offsets is None:
        return Rows(tokens.map(), width=stored.width), lcps.map(), of_keys
    offsets.append(np.array([tokens_so_far]))
    return Rows(tokens.map(), offsets.map()), lcps.map(), of_keys


def _after(last: Rows, rows: Rows) -> Rows:
    tokens, (offsets, width) = np.concatenate((last.tokens, rows.tokens)), rows.layout
    if width:
        return Rows(tokens, width=width)
    return Rows(tokens, np.concatenate((np.zeros(1, np.int64), offsets + len(last.tokens))))


def _gather(
    sorted_keys: _OfKeys, members: NDArray[np.uint32], folder: Path, progress: Callable[[str, float], None]
) -> tuple[Keys, NDArray[np.uint8] | None]:
    """Return the keys of these rows and the section of their attributes, in files.

    Members ascend level by level, so what goes with them is read in order.
    """
    keys, columns, attributes = sorted_keys
    kind = pa.int64() if keys.values.type == _ROW else keys.values.type
    taken, starts = ArraySpool(folder, kind), Spool(folder, np.uint32)
    stream = nameless_file(folder)
    writer = Writer(pa.PythonFile(stream, "w"), columns) if columns else None
    total = 0
    for start in range(0, len(members), _BATCH_KEYS):
        places, begins = in_item_order(members[start : start + _BATCH_KEYS], keys.starts)
        wanted = pa.array(places)
        taken.append(keys.values.take(wanted).cast(kind))
        if writer is not None:
            writer.append(pa.table([column.take(wanted) for column in attributes], [one.name for one in columns]))
        if begins is not None:
            starts.append(begins[:-1] + np.uint32(total))
            total += len(places)
        progress("building", 0.5 + 0.5 * start / len(members))
    if begins is not None:
        starts.append(np.array([total]))
    section = None
    with stream:
        if writer is not None:
            writer.close()
            stream.flush()
            section = np.asarray(np.memmap(stream, np.uint8, "r"))
    return Keys(taken.map(), None if begins is None else starts.map()), section
