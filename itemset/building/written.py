"""What type the values of a column are written as, in files that do not say."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_INTEGER = r"(0|-?[1-9][0-9]*)"
_DATES = (
    (pa.date32(), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"),
    (pa.timestamp("us"), _TIME + "$"),
    (pa.timestamp("us", "UTC"), _TIME + r"(Z|[-+][0-9]{2}:?[0-9]{2})$"),
)
_ALL = (
    (pa.int64(), f"^{_INTEGER}$"),
    (pa.float64(), f"^(-0|{_INTEGER})([.][0-9]+)?([eE][-+]?[0-9]+)?$"),
    (pa.bool_(), "^(true|false|True|False|TRUE|FALSE)$"),
    *_DATES,
)


class Written:
    """The first type that all of a column's strings are written as: dates and times, and with `numbers` also others.

    A number with a leading zero is a string.
    """

    def __init__(self, *, numbers: bool) -> None:
        self._left = list(_ALL if numbers else _DATES)
        self._seen = False

    def add(self, strings: Any) -> None:
        """Look at a chunk of the column; missing values are of any type."""
        self._seen = self._seen or strings.null_count < len(strings)
        self._left = [(kind, pattern) for kind, pattern in self._left if is_written_as(strings, kind, pattern)]

    @property
    def type(self) -> Any:
        """The type, a string if there is none or if every value is missing."""
        return self._left[0][0] if self._seen and self._left else pa.string()


def is_written_as(strings: Any, kind: Any, pattern: str) -> bool:
    """Return whether all strings match the pattern and are values of this type."""
    if not all_match(strings, pattern):
        return False
    try:
        strings.cast(kind)
    except pa.ArrowInvalid:  # more digits than the type has, or a 31st of June
        return False
    return True


def all_match(strings: Any, pattern: str) -> bool:
    """Return whether all strings match, missing ones apart."""
    return bool(pc.all(pc.match_substring_regex(strings, pattern)).as_py())
