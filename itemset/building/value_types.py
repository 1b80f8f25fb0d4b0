"""The types that columns of strings are written as, in files that do not say."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_INTEGER = r"(0|-?[1-9][0-9]*)"
DATES = (
    (pa.date32(), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"),
    (pa.timestamp("us"), _TIME + "$"),
    (pa.timestamp("us", "UTC"), _TIME + r"(Z|[-+][0-9]{2}:?[0-9]{2})$"),
)
ALL = (
    (pa.int64(), f"^{_INTEGER}$"),
    (pa.float64(), f"^(-0|{_INTEGER})([.][0-9]+)?([eE][-+]?[0-9]+)?$"),
    (pa.bool_(), "^(true|false|True|False|TRUE|FALSE)$"),
    *DATES,
)
KEYS = ((pa.int64(), f"^{_INTEGER}$"), (pa.float64(), r"^-?[0-9]+\.0+$"))


class Written:
    """The first of some types that all strings of a column are written as; a number with a leading zero is a string.

    first: the column's first value that is not missing.
    """

    def __init__(self, types: tuple[tuple[Any, str], ...]) -> None:
        self._left = list(types)
        self.first: Any = None

    def add(self, strings: Any) -> None:
        """Take the next chunk of the column; missing values are of any type."""
        if self.first is None and strings.null_count < len(strings):
            self.first = strings.drop_null()[0]
        self._left = [(kind, pattern) for kind, pattern in self._left if _is_written_as(strings, kind, pattern)]

    @property
    def type(self) -> Any:
        """The type, a string if there is none or if every value is missing."""
        return self._left[0][0] if self.first is not None and self._left else pa.string()

    @property
    def decided(self) -> bool:
        """Whether no further chunk can change the type."""
        return not self._left


def _is_written_as(strings: Any, kind: Any, pattern: str) -> bool:
    if not pc.all(pc.match_substring_regex(strings, pattern)).as_py():
        return False
    try:
        strings.cast(kind)
    except pa.ArrowInvalid:  # more digits than the type has, or a 31st of June
        return False
    return True
