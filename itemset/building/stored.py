"""What a build on disk has read and checked, to be taken once more: stored, or read again."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from itemset.building import sources
from itemset.errors import ItemSetError
from itemset.storage import SourceFile, files_at
from itemset.trie.attributes import Column
from itemset.trie.rows import MAX_ITEM_TOKENS, Rows, as_rows


def can_read_twice(files: Sequence[SourceFile]) -> bool:
    """Return whether to read token ids out of these files again is as fast as to store them."""
    return all(file.system is None and file.suffix in (".npy", ".parquet") for file in files)


@dataclass
class Stored:
    """All items of the source as `Rows`, checked, their keys and attributes: batch by batch in a file without a name.

    columns: how the attributes are to be stored, known after the last batch.
    again: reads the source once more, if that is as fast as such a file. files: its files, as they were at first.
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

    def add(self, rows: Rows, keys: pa.Array | None, attributes: pa.Table | None) -> None:
        if self.again is None:
            pickle.dump((rows, keys, attributes), self.file, pickle.HIGHEST_PROTOCOL)
        self.items += len(rows)
        self.highest = max(self.highest, int(rows.tokens.max()))
        self.shortest, self.longest = min(self.shortest, rows.shortest), max(self.longest, rows.longest)

    def take(self) -> Iterator[tuple[Rows, pa.Array | None, pa.Table | None]]:
        """Yield the batches, once: their room on the disk is free after the last."""
        left = self.items
        if self.again is not None:
            with closing(self.again()) as batches:
                for batch in batches:
                    rows = as_rows(batch.tokens, self.vocab_size, before=self.items - left)
                    yield rows, batch.keys, batch.attributes
                    left -= len(rows)
            return
        with self.file:
            self.file.seek(0)
            while left:
                rows, keys, attributes = pickle.load(self.file)
                yield rows, keys, attributes
                left -= len(rows)

    def check_unchanged(self) -> None:
        """Raise ItemSetError if the source was read twice, and changed meanwhile."""
        if self.again is not None and files_at(self.path) != self.files:
            raise ItemSetError(f"{self.path} was changed while it was read: start again")
