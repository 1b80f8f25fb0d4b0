"""Sorting on a Ray cluster: Ray Data reads, sorts and writes, its workers encode. What comes back is sorted shards.

A shard is a Parquet file of token ids, keys and attributes, named by its place in the order. Ray sorts by the integers
of `codecs`, then by the row's number in the input: equal items keep their order. When a node dies, Ray runs again what
is lost: a shard that is written twice has the same name and the same rows.
"""

import os
import re
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pa_parquet
import ray
from numpy.typing import NDArray
from ray.data import DataContext, Datasink
from ray.data.context import ShuffleStrategy
from ray.exceptions import RayError

from itemset import storage
from itemset.building import sources
from itemset.building.item_codecs import Codec, codec_of
from itemset.errors import ItemSetError
from itemset.trie.rows import MAX_ITEMS, Rows, as_rows

_PART, _ROW, _TEXT, _TOKENS, _KEY = "$part", "$row", "$text", "$tokens", "$key"  # no attribute's name begins with $
_BLOCK = 1 << 20, 1 << 27  # bytes of what a task takes at a time, at least and at most
_WAVES = 2  # tasks for each core, within these bounds
_MEMORY = 1 << 28  # bytes that a task takes to encode a block
_PATIENCE = 10  # seconds until a cluster must answer
_SHARED = " (all machines of the cluster must see it: give a folder that they share, or a URI)"


@dataclass(frozen=True)
class _Source:
    """What workers read, and how they encode it. first: no items, but of the kind and types that all must have."""

    files: Sequence[storage.SourceFile]
    named: dict[str, Any]  # column, key, attributes
    first: sources.Items
    encoding: sources.Encoding

    def read(self, numbers: dict[str, NDArray[np.int64]]) -> Iterator[pa.Table]:
        """Read the files of these numbers: items, each with its file and its row there."""
        for number in numbers["id"]:
            file, row = _on_this_machine(self.files[number]), 0
            for items in sources.batches_of(file, **self.named):
                sources.check_same(file, self.first, items)
                rows = np.arange(row, row + len(items), dtype=np.uint32)
                columns = {_PART: np.full_like(rows, number), _ROW: rows}
                if items.texts is None:
                    with _extended(f"{file}: "):
                        columns[_TOKENS] = _lists(as_rows(items.tokens, self.encoding.limit, before=row))
                else:
                    columns[_TEXT] = pa.array(items.texts, pa.large_string())
                if items.keys is not None:
                    columns[_KEY] = items.keys
                if items.attributes is not None:
                    columns |= {name: items.attributes[name] for name in items.attributes.column_names}
                yield pa.table(columns)
                row += len(items)

    def encode(self, table: pa.Table) -> pa.Table:
        """Put token ids in the place of texts."""
        if _TEXT not in table.column_names:
            return table
        before = table[_ROW][0].as_py()
        with _extended(f"{self.files[table[_PART][0].as_py()]}: "):
            rows = self.encoding.encode(table[_TEXT].to_pylist(), before)
            rows = as_rows(rows, self.encoding.limit, before=before)
        return table.drop_columns(_TEXT).append_column(_TOKENS, _lists(rows))


@dataclass(frozen=True)
class _Order:
    """How items become columns that sort as they do.

    starts: the number of each file's first row in the whole input. items: how many there are.
    """

    codec: Codec
    starts: NDArray[np.int64]
    items: int

    @property
    def columns(self) -> list[str]:
        return [*(f"${name}" for name, _ in self.codec.fields), _ROW]

    def encode(self, table: pa.Table) -> pa.Table:
        if not len(table):
            return table
        numbers = self.starts[table[_PART].to_numpy()] + table[_ROW].to_numpy()
        of_items = dict(zip(self.columns, [*self.codec.encode(_rows(table)), pa.array(numbers)], strict=True))
        return pa.table(
            of_items | {name: table[name] for name in table.column_names if name not in (_PART, _ROW, _TOKENS)}
        )

    def decode(self, table: pa.Table) -> pa.Table:
        """Return a shard: token ids, keys, by default the rows' numbers, and attributes."""
        words = {name: table[f"${name}"].combine_chunks() for name, _ in self.codec.fields}
        columns = {_TOKENS: _lists(self.codec.decode(pa.record_batch(words))), _KEY: table[_ROW]}
        rest = [name for name in table.column_names if name not in self.columns]
        return pa.table(columns | {name: table[name] for name in rest})


class _Shards(Datasink[str]):
    """Writes a shard of each block. written: the shards' names, once all are there."""

    def __init__(self, folder: str, order: _Order) -> None:
        self._folder, self._order = folder, order
        self.written: list[str] = []

    def write(self, blocks: Iterable[Any], ctx: Any) -> str:
        tables = [table for table in map(pa.table, blocks) if len(table)]  # one of an empty range has no columns
        if not tables:
            return ""
        shard = pa.BufferOutputStream()
        pa_parquet.write_table(self._order.decode(pa.concat_tables(tables)), shard)
        name = f"{ctx.task_idx:08}.parquet"
        with _extended(after=_SHARED):
            storage.put(self._folder, name, shard.getvalue())
        return name

    def on_write_complete(self, write_result: Any) -> None:
        self.written = [name for name in write_result.write_returns if name]


def write_shards(
    path: str | os.PathLike[str], folder: str, named: dict[str, Any], encoding: sources.Encoding
) -> Callable[[], Generator[sources.Items]]:
    """Sort an input on a cluster, into shards in a new folder. Return what reads these in batches, as ascending items.

    named: the column, the key and the attributes, as `sources.batches` takes them.
    The cluster is that of the environment variable RAY_ADDRESS, or one that runs on this machine; else Ray starts here.
    Raises ItemSetError as `build_external` does (errors of items name the file), if Ray fails, or a shard is not there.
    """
    with closing(sources.batches(path, **named)) as batches:
        first = next(batches)
    encoding.check(path, texts=first.texts is not None)
    keys, table = (None if values is None else values[:0] for values in (first.keys, first.attributes))
    first = replace(first, texts=None if first.texts is None else [], tokens=None, keys=keys, attributes=table)
    given = sources.files_of(path)
    files = list(map(_absolute, given))
    folder = folder if storage.is_uri(folder) else os.path.abspath(folder)
    source = _Source(files, named, first, encoding)
    if _names(folder):
        raise ItemSetError(f"{folder} is not empty: give the shards a new folder")
    if not storage.is_uri(folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ItemSetError(f"{folder} cannot be made: {error.strerror}: choose another folder") from error
    with _cluster(), DataContext.current(_context(files)):
        encoded = (
            ray.data.range(len(files), override_num_blocks=len(files))
            .map_batches(source.read, batch_size=1)
            # With memory of its own, and so not in the tasks that read: the whole cluster encodes one large file.
            .map_batches(source.encode, batch_size=None, batch_format="pyarrow", memory=_MEMORY)
            .materialize()
        )
        order = _order(encoded, len(files))
        shards = _Shards(folder, order)
        sortable = encoded.map_batches(order.encode, batch_size=None, batch_format="pyarrow", zero_copy_batch=True)
        sortable.sort(order.columns).write_datasink(shards)
    for file in given:
        file.check_unchanged()
    if missing := set(shards.written) - _names(folder):
        raise ItemSetError(f"{len(missing)} of {len(shards.written)} shards are not in {folder}{_SHARED}")

    def read() -> Generator[sources.Items]:
        names, rows = [] if table is None else table.column_names, 0
        for items in sources.batches(folder, column=_TOKENS, key=_KEY, attributes=names):
            if table is not None and items.attributes is not None:  # Parquet has no timestamps in seconds
                items = replace(items, attributes=items.attributes.cast(table.schema))
            rows += len(items)
            yield items
        if rows != order.items:  # something else was written there, too
            raise ItemSetError(f"{folder} holds {rows:,} of {order.items:,} items: give the shards a new folder")

    return read


def _order(encoded: Any, files: int) -> _Order:
    """Return the order of all items, once all are encoded."""
    seen = encoded.map_batches(_survey, batch_size=None, batch_format="pyarrow", zero_copy_batch=True).to_pandas()
    rows = np.bincount(seen["part"], seen["rows"], files).astype(np.int64)
    if (items := int(rows.sum())) > MAX_ITEMS:
        raise ItemSetError(f"{items:,} items are too many, the limit is {MAX_ITEMS:,}: split the set")
    longest = int(seen["longest"].max())
    width = longest if seen["shortest"].min() == longest else 0
    return _Order(codec_of(int(seen["highest"].max()), longest, width), np.cumsum(rows) - rows, items)


def _survey(table: pa.Table) -> pa.Table:
    if not len(table):
        return table
    rows, parts = _rows(table), pc.value_counts(table[_PART])
    extent = {"highest": int(rows.tokens.max()), "longest": rows.longest, "shortest": rows.shortest}
    return pa.Table.from_pylist([{"part": n["values"], "rows": n["counts"], **extent} for n in parts.to_pylist()])


def _lists(rows: Rows) -> pa.Array:
    return pa.LargeListArray.from_arrays(rows.offsets, rows.tokens.astype(np.uint32))


def _rows(table: pa.Table) -> Rows:
    lists = table[_TOKENS].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy()
    return Rows(lists.flatten().to_numpy(), np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))))


def _names(folder: str) -> set[str]:
    with suppress(ItemSetError):  # there is none yet
        return {PurePath(file.path).name for file in storage.files_at(folder)}
    return set()


def _absolute(file: storage.SourceFile) -> storage.SourceFile:
    """Return the file with an absolute path, as a worker has another working directory.

    Its time of change is omitted: other machines may mount it with coarser times.
    """
    return replace(file, path=os.path.abspath(file.path), changed=None) if file.system is None else file


def _on_this_machine(file: storage.SourceFile) -> storage.SourceFile:
    """Return the file as this machine sees it. Raises ItemSetError if it does not, or if it is another file."""
    with _extended(after=_SHARED):
        return replace(file.check_unchanged(), name=file.name)


@contextmanager
def _extended(before: str = "", after: str = "") -> Iterator[None]:
    """Put more words around the message of an ItemSetError."""
    try:
        yield
    except ItemSetError as error:
        raise ItemSetError(f"{before}{error}{after}") from error


def _context(files: Sequence[storage.SourceFile]) -> DataContext:
    """Return Ray Data's settings: enough blocks for all cores, but no more of them than need be."""
    context = DataContext.get_current().copy()
    cores = ray.cluster_resources().get("CPU", 1)
    fair = sum(file.size for file in files) / (_WAVES * cores)
    context.target_max_block_size = int(np.clip(fair, *_BLOCK))
    context.raise_original_map_exception = True
    # Ray Data's newer sort waits inside tasks for what others have made. After a death such tasks can keep all cores,
    # and what must be made again gets none.
    context.shuffle_strategy = ShuffleStrategy.SORT_SHUFFLE_PULL_BASED
    return context


@contextmanager
def _cluster() -> Iterator[None]:
    """Be connected to a cluster, and turn what Ray raises into ItemSetErrors."""
    if ours := not ray.is_initialized():
        _connect(os.environ.get("RAY_ADDRESS", ""))
    try:
        yield
    except RayError as error:
        cause = getattr(error, "cause", None)
        reason = str(cause or error).strip().partition("\n")[0]  # Ray Data adds lines
        raise ItemSetError(reason if isinstance(cause, ItemSetError) else f"Ray failed: {reason}") from error
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str) -> None:
    try:
        if match := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray would try for a quarter of an hour
            socket.create_connection((match[1], int(match[2])), _PATIENCE).close()
        ray.init(log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ItemSetError(f"no Ray cluster at {address or 'this machine'}: {error} (RAY_ADDRESS)") from error
