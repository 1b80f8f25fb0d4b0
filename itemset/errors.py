"""The exception and the warning of `itemset`, and how messages repeat a client's values."""

from typing import Any

AGAIN = "build it again with `itemset build`"  # the mend of every damaged index


class ItemSetError(ValueError):
    """A bad item, set, key or file. The message names it and says what to do about it."""


class ItemSetWarning(UserWarning):
    """What was built may not be what was meant. The message says what, and what to do about it."""


def shown(value: Any, limit: int = 60) -> str:
    """Return what a message repeats of a client's value: the beginning of a string or number, the kind of all else.

    The work does not grow with the value's size or depth.
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}..."
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**limit):
        return repr(value)
    return {list: "a list", dict: "an object", int: "a number of many digits"}.get(type(value), type(value).__name__)
