"""The one type that a column has over all files: as text is written, as JSON values are, as Parquet declares it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from itemset.errors import ItemSetError, shown
from itemset.trie.attributes import as_values, cast, is_list, is_text, number_of

_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_INTEGER = r"(0|-?[1-9][0-9]*)"
DATES = (
    (pa.date32(), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"),
    (pa.timestamp("us"), _TIME + "$"),
    (pa.timestamp("us", "UTC"), _TIME + r"(Z|[-+][0-9]{2}:?[0-9]{2})$"),
)
ALL = (
    (pa.int64(), f"^{_INTEGER}$"),
    (pa.float64(), r"^-?(0|[1-9][0-9]{0,17})([.][0-9]+)?([eE][-+]?[0-9]+)?$"),  # more digits are of ids, and all count
    (pa.bool_(), "^(true|false|True|False|TRUE|FALSE)$"),
    *DATES,
)
KEYS = ((pa.int64(), f"^{_INTEGER}$"), (pa.float64(), r"^-?[0-9]+\.0+$"))


def _is_written_as(strings: Any, kind: Any, pattern: str) -> bool:
    if not pc.all(pc.match_substring_regex(strings, pattern)).as_py():
        return False
    try:
        strings.cast(kind)
    except pa.ArrowInvalid:  # more digits than the type has, or a 31st of June
        return False
    return True


class Judged:
    """The type of one column. patterns: of what its strings may be written as. kind_of: the type of a JSON value."""

    def __init__(
        self, name: str, patterns: Sequence[tuple[Any, str]], kind_of: Callable[[object], Any], split: str | None = None
    ) -> None:
        """split: what stands between the strings of a list in one text, if any does."""
        self.name, self._kind_of, self._split, self._is_split = name, kind_of, split, False
        self._kinds: dict[Any, str] = {}  # and an example of each
        self._patterns = patterns  # those that all strings so far match
        self._first: Any = None  # the first string that is not missing

    def declare(self, kind: Any, where: object) -> None:
        """Take the type that a file declares."""
        kind = number_of(kind.value_type if pa.types.is_dictionary(kind) else kind)
        if not pa.types.is_null(kind):
            self._kinds.setdefault(pa.string() if is_text(kind) else kind, str(where))

    def add(self, values: Any, where: object) -> None:
        """Take the column's next values: an Arrow array, JSON values, or None if a file lacks the column."""
        values = as_values(values) if isinstance(values, pa.Array) else values
        if isinstance(values, pa.Array) and not is_text(values.type):
            self.declare(values.type, where)
            return
        if isinstance(values, list):
            present = [value for value in values if value is not None]
            for value in present:
                self._kinds.setdefault(self._kind_of(value), shown(value))
            if not self._kinds.keys() <= {pa.string()}:
                return
            values = pa.array(present, pa.string())
        if values is not None and len(values):
            self._kinds.setdefault(pa.string(), "")
            if self._first is None and values.null_count < len(values):
                self._first = values.drop_null()[0]
            self._patterns = [one for one in self._patterns if _is_written_as(values, *one)]
            if self._split is not None:
                self._is_split |= bool(pc.any(pc.match_substring(values, self._split)).as_py())

    @property
    def _written(self) -> Any:
        """Return the first type that all strings are written as, a string if there is none or all are missing."""
        return self._patterns[0][0] if self._first is not None and self._patterns else pa.string()

    def key_type(self, path: object) -> Any:
        """Return the type of keys: integers if all are, else strings. Raises ItemSetError if some are neither."""
        kind = self._written if self._kinds.keys() <= {pa.string()} else pa.int64()
        if kind == pa.float64():
            raise ItemSetError(
                f"{path}: keys in column {self.name!r} are floats ({self._first}, ...), write them as integers"
            )
        for other, example in self._kinds.items():
            if other is None or not (is_text(other) or pa.types.is_integer(other)):
                raise ItemSetError(
                    f"{path}: key column {self.name!r} holds {other or example}, keys must be integers of at most 64 "
                    "bits or strings"
                )
        return pa.string() if pa.string() in self._kinds and len(self._kinds) > 1 else kind

    def attribute_type(self, path: object) -> Any:
        """Return the type of an attribute. Raises ItemSetError if its values are of several kinds."""
        kinds = self._kinds.keys()
        if kinds <= {pa.string()}:
            return pa.list_(pa.string()) if self._is_split else self._written
        if all(kind is not None and (pa.types.is_integer(kind) or pa.types.is_floating(kind)) for kind in kinds):
            wide = pa.float64() if any(map(pa.types.is_floating, kinds)) else pa.int64()
            return wide if len(kinds) > 1 else next(iter(kinds))
        if len(kinds) > 1 or None in kinds:
            raise ItemSetError(
                f"{path}: the values of attribute {self.name!r} must be of one kind: bools, numbers of at most 64 "
                f"bits, strings or lists of strings, not such as {', '.join(self._kinds.values())}"
            )
        return next(iter(kinds))


def value_kind(value: object) -> Any:
    """Return the type of a JSON value as an item or a key, None if it can be neither."""
    if isinstance(value, str):
        return pa.string()
    if type(value) is int:
        return pa.int64() if -(2**63) <= value < 2**63 else None
    if isinstance(value, list):
        if value and all(isinstance(token, str) for token in value):
            return pa.list_(pa.string())
        if all(token is None or value_kind(token) == pa.int64() for token in value):
            return pa.list_(pa.int64())
    return None


def attribute_kind(value: object) -> Any:
    """Return the type of a JSON value as an attribute, None if it can be none."""
    if isinstance(value, list):
        return pa.list_(pa.string()) if all(isinstance(one, str) for one in value) else None
    if isinstance(value, bool):
        return pa.bool_()
    return pa.float64() if isinstance(value, float) else value_kind(value)


def converted(values: Any, kind: Any, rows: int, split: str | None = None) -> Any:
    """Return a column's values as Arrow has them, in its type. values: None for a column that a file lacks."""
    if values is None:
        return pa.nulls(rows, kind)
    if split is not None and is_list(kind) and isinstance(values, list) and str in map(type, values):
        values = pa.array(values, pa.string())
    if not isinstance(values, list):
        values = as_values(values)
        if split is not None and is_list(kind) and is_text(values.type):
            values = pc.split_pattern_regex(values, rf"\s*{re.escape(split)}\s*")
        return values if values.type == kind else cast(values, kind)
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.string()).cast(kind)
    if kind == pa.string() and any(type(value) is int for value in values):
        values = [None if value is None else str(value) for value in values]
    return pa.array(values, kind)
