"""What a build on disk has read and checked, to be taken once more: stored, or read again."""

import os
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa

from itemset.building import sources
from itemset.errors import ItemSetError
from itemset.storage import SourceFile, files_at
from itemset.trie.attributes import Column, packed
from itemset.trie.rows import MAX_ITEM_TOKENS, Rows, as_rows

ROW = pa.uint32()  # keys if none are given


Batch = tuple[Rows, list[pa.Array]]
"""Consecutive items, and their values: their keys, and each of their attributes as `Column.pack` returns it."""


def can_read_twice(files: Sequence[SourceFile]) -> bool:
    """Return whether to read token ids out of these files again is as fast as to store them."""
    return all(file.system is None and file.suffix in (".npy", ".parquet") for file in files)


@dataclass
class Stored:
    """All items of the source, checked, with keys and attributes: batch by batch in a file without a name.

    again: reads the source once more instead, if that is as fast. files: its files, as they were at first.
    columns: how the attributes are to be stored, known after the last batch.
    """

    file: IO[bytes]
    vocab_size: int | None
    path: str | os.PathLike[str]
    files: list[SourceFile]
    again: Callable[[], Generator[sources.Items]] | None = None
    key_type: Any = None
    items: int = 0
    highest: int = 0
    shortest: int = MAX_ITEM_TOKENS
    longest: int = 0
    columns: Sequence[Column] = ()

    @property
    def width(self) -> int:
        """Tokens of each item if all have the same number, else 0."""
        return self.longest if self.shortest == self.longest else 0

    @property
    def types(self) -> list[Any]:
        """The Arrow types of `Batch.values`."""
        return [self.key_type or ROW, *(column.packed for column in self.columns)]

    def add(self, items: sources.Items, rows: Rows) -> None:
        """Add a batch of the source. rows: its items, checked."""
        if self.again is None:
            pickle.dump(replace(items, texts=None, tokens=rows), self.file, pickle.HIGHEST_PROTOCOL)
        self.items += len(rows)
        self.highest = max(self.highest, int(rows.tokens.max()))
        self.shortest, self.longest = min(self.shortest, rows.shortest), max(self.longest, rows.longest)

    def take(self) -> Iterator[Batch]:
        """Yield the batches, once: their disk space is free after the last. Rows without keys have their numbers."""
        done = 0
        with closing(self._stored() if self.again is None else self.again()) as batches:
            for items in batches:
                rows = as_rows(items.tokens, self.vocab_size, before=done)
                keys = pa.array(np.arange(done, done + len(rows)), ROW) if items.keys is None else items.keys
                columns = [] if items.attributes is None else packed(items.attributes, self.columns).columns
                yield rows, [keys, *(column.chunk(0) for column in columns)]
                done += len(rows)

    def _stored(self) -> Generator[sources.Items]:
        end = self.file.tell()
        with self.file:
            self.file.seek(0)
            while self.file.tell() < end:
                yield pickle.load(self.file)

    def check_unchanged(self) -> None:
        """Raise ItemSetError if the source was read twice, and changed meanwhile."""
        if self.again is not None and files_at(self.path) != self.files:
            raise ItemSetError(f"{self.path} was changed while it was read: start again")
