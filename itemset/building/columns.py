"""The columns of one or more tables: chosen by name, of one type over all files, and turned into items."""

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from itemset.building.dialects import DELIMITED, JSON, Dialect, dialect_of, is_table
from itemset.building.items import Items
from itemset.building.judged import ALL, DATES, KEYS, Judged, attribute_kind, converted, value_kind
from itemset.building.readers import Batch, columns_of, read_delimited, read_json, read_npz, read_parquet
from itemset.building.streams import format_of, guarded
from itemset.errors import Faults, ItemSetError
from itemset.storage import SourceFile
from itemset.trie.attributes import as_attributes, as_values, is_list, is_text
from itemset.trie.rows import Rows

READERS: dict[str, Callable[[SourceFile, Dialect, Sequence[str], Faults], Iterator[Batch]]] = {
    **dict.fromkeys(DELIMITED, read_delimited), **dict.fromkeys(JSON, read_json),
    ".parquet": read_parquet, ".npz": read_npz,
}  # fmt: skip


def is_tabular(file: SourceFile, dialect: Dialect) -> bool:
    """Return whether a file has columns, else items alone."""
    with guarded(file):
        return format_of(file) in READERS or is_table(file, dialect)


def names_in(file: SourceFile, dialect: Dialect, wanted: Sequence[str] = ()) -> tuple[list[str], Dialect]:
    """Return the names of a file's columns, none if it has items alone, and its dialect. Raises as `read` does."""
    with guarded(file):
        dialect = dialect_of(file, dialect, wanted)
        if not dialect.names and format_of(file) not in READERS:
            return [], dialect
        return list(dialect.names) or list(columns_of(file, dialect)), dialect


@dataclass
class Table:
    """The columns that are read of one or more files of a table, and the types that they have over all of these."""

    column: Any  # its name; if none is given, `judge` takes the only one that is free
    key: str | None
    attributes: Sequence[str]
    keys_only: bool
    types: dict[str, Any] = field(default_factory=dict)  # of the attributes
    key_type: Any = None
    dialects: dict[str, Dialect] = field(default_factory=dict)  # by file
    as_lists: bool | None = None  # whether texts are lists that are written as text
    kind: Any = None  # of the first items that are JSON values

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.column, self.key, *self.attributes) if name is not None))

    def judge(self, path: object, files: Sequence[SourceFile], given: Dialect) -> None:
        """Choose the column, and read the files once for the types of what is text or JSON.

        Raises ItemSetError: a column that is not there or not named, types that do not go together, all bad rows.
        """
        faults, there, wanted = Faults(), dict[str, dict[str, Any]](), self.names
        for file in files:
            with guarded(file):
                self.dialects[file.name] = dialect = dialect_of(file, given, wanted)
                there[file.name] = columns_of(file, dialect)
                names = list(dialect.names) or list(there[file.name])
                for name in (self.column, self.key):
                    _check_column(file, name, names)
                rest = [name for name in names if name != self.key and name not in self.attributes]
                if not self.column and len(rest) != 1:
                    said = "say which one holds the items with --column (in Python: column=)"
                    raise ItemSetError(f"{file} has the columns {', '.join(map(repr, names))}: {said}")
                self.column = self.column or rest[0]
        text = bool(self.dialects[files[0].name].names)
        if text or format_of(files[0]) in (".parquet", ".npz"):  # else every row may lack an attribute
            named = list(dict.fromkeys(name for one in there.values() for name in one))
            for name in self.attributes:
                _check_column(files[0], name, named)
        declared = format_of(files[0]) == ".parquet"
        patterns = ALL if text else () if declared else DATES
        judges = [Judged(name, patterns, attribute_kind, given.split) for name in self.attributes]
        key_judges = [] if self.key is None else [Judged(self.key, KEYS if text else (), value_kind)]
        for file in files:
            with guarded(file):
                if declared and given.split is None:
                    for judge in (*judges, *key_judges):
                        if judge.name in there[file.name]:
                            judge.declare(there[file.name][judge.name], file)
                    continue
                for values, _ in self.read(file, faults):
                    for judge in (*judges, *key_judges):
                        judge.add(values[judge.name], file)
        faults.check()
        self.types = {judge.name: judge.attribute_type(path) for judge in judges}
        self.key_type = key_judges[0].key_type(path) if key_judges else None

    def read(self, file: SourceFile, faults: Faults) -> Iterator[Batch]:
        dialect = self.dialects[file.name]
        return (read_delimited if dialect.names else READERS[format_of(file)])(file, dialect, self.names, faults)

    def items(self, file: SourceFile, faults: Faults) -> Iterator[Items]:
        before = 0
        for values, done in self.read(file, faults):
            given, bad = values[self.column], faults.count
            rows = len(given)
            place = f"{file}, row {{}}, column {self.column!r}"
            items = None if self.keys_only else self._items(file, given, before, faults)
            keys = None if self.key is None else self._keys(file, values[self.key], before, faults)
            before += rows
            if faults.count > bad or not rows:
                continue
            known = None
            if self.attributes:
                split = self.dialects[file.name].split
                named = dict[str, Any]()
                for name in self.attributes:
                    with _told_of(file, name):
                        named[name] = converted(values[name], self.types[name], rows, split)
                known = as_attributes(pa.table(named), rows)
            texts = isinstance(items, list)
            yield Items(items if texts else None, None if texts else items, keys, known, done, place, before - rows + 1)

    def _keys(self, file: SourceFile, given: Any, before: int, faults: Faults) -> pa.Array:
        with _told_of(file, self.key):
            keys = converted(given, self.key_type, len(given))
        _check_present(file, self.key, keys, before, faults)
        return keys.cast(pa.large_string() if is_text(keys.type) else pa.int64())

    def _items(self, file: SourceFile, given: Any, before: int, faults: Faults) -> Any:
        """Return a list of texts or of lists of tokens, or token ids; bad ones are faults."""
        if isinstance(given, list):
            example = next((value for value in given if value is not None), "")
            self.kind = kind = value_kind(example) if self.kind is None else self.kind
            if kind in (None, pa.int64()):
                use = "use texts or lists of token ids or tokens (keys: integers)"
                raise ItemSetError(f"{file}: column {self.column!r} holds {example!r:.60}, {use}")
            bad = faults.count
            for row, value in enumerate(given, before + 1):
                if value is not None and value_kind(value) != kind:
                    faults.add(f"{file}, row {row}: column {self.column!r} holds {value!r:.60}, not {kind}")
            if faults.count > bad:
                return None
            given = pa.array(given, kind)
        given = as_values(given)
        if not _check_present(file, self.column, given, before, faults):
            return None
        if is_text(given.type):
            return self._listed(file, given.to_pylist(), before, faults)
        if is_list(given.type) and is_text(given.type.value_type):
            return given.to_pylist()
        if is_list(given.type) and pa.types.is_integer(given.type.value_type):
            return _tokens(file, self.column, given, before, faults)
        raise ItemSetError(f"{file}: column {self.column!r} holds {given.type}, neither texts nor lists of token ids")

    def _listed(self, file: SourceFile, texts: list[str], before: int, faults: Faults) -> Any:
        """Return texts as they are, or as the lists that all of them are written as."""
        lists = [as_list(text) if text[:1] in ("[", "(", " ") else None for text in texts]
        if self.as_lists is None and 2 * lists.count(None) >= len(lists):
            return texts
        self.as_lists = True
        kinds = [None if one is None else value_kind(one) for one in lists]
        for row, (text, kind) in enumerate(zip(texts, kinds, strict=True), before + 1):
            if kind is None or kind != next(one for one in kinds if one is not None):
                faults.add(f"{file}, row {row}: column {self.column!r} holds {text!r:.60}, others lists as text")
        if len(set(kinds)) > 1:
            return None
        if kinds[0] == pa.list_(pa.string()):
            return lists
        return _tokens(file, self.column, pa.array(lists, kinds[0]), before, faults)


@contextmanager
def _told_of(file: SourceFile, name: str | None) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        mend = "numbers have 64 bits, cast larger ones to strings"
        raise ItemSetError(f"{file}: column {name!r} cannot be read ({error}): {mend}") from error


def as_list(text: str) -> list[int] | list[str] | None:
    """Return the list of token ids or of tokens that a text is written as, None if it is none."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "()"):
        return None
    try:
        given: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        try:
            given = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            words = text[1:-1].split()  # as NumPy writes it
            given = [int(word) for word in words] if all(word.isdecimal() for word in words) else None
    given = list(given) if isinstance(given, list | tuple) else None
    return given if given and value_kind(given) is not None and None not in given else None


def _check_column(file: SourceFile, name: str | None, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        there = ", ".join(map(repr, names))
        mend = "name another (--column, --key, --attribute)"
        raise ItemSetError(f"{file} has no column {name!r}, it has {there}: {mend}")
    if name is not None and names.count(name) > 1:
        raise ItemSetError(f"{file} has more than one column {name!r}: rename one")


def _check_present(file: SourceFile, name: str | None, column: Any, before: int, faults: Faults) -> bool:
    """Return whether no value is missing; those that are become faults."""
    if column.null_count:
        for i in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
            faults.add(f"{file}, row {before + i + 1} has no value in column {name!r}: fill it in or remove the row")
    return not column.null_count


def _tokens(file: SourceFile, name: str, column: Any, before: int, faults: Faults) -> Rows | None:
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    flat = column.flatten()
    if flat.null_count:
        for i in np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False)):
            row = before + int(np.searchsorted(np.cumsum(lengths), i, side="right")) + 1
            faults.add(f"{file}, row {row}: a list in column {name!r} holds a missing value, give every token id")
        return None
    width = int(lengths[0]) if (lengths == lengths[0]).all() else 0
    return Rows(flat.to_numpy(), None if width else np.append(0, np.cumsum(lengths)), width=width)
