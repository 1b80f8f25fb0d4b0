"""The one exception of `itemset`: a bad item, set, key or file; its one warning; and what messages repeat of values."""

from __future__ import annotations

from typing import Any


class ItemSetError(ValueError):
    """Names the input that is wrong and what to do about it."""


class ItemSetWarning(UserWarning):
    """What was built may not be what was meant: says what, and what to do about it."""


def shown(value: Any, limit: int = 60) -> str:
    """What a message repeats of a client's value: of a string or a number the beginning, of all else the kind.

    Its work does not grow with the value, nor with how deep it is nested.
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}..."
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**limit):
        return repr(value)
    return {list: "a list", dict: "an object", int: "a number of many digits"}.get(type(value), type(value).__name__)
