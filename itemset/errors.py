"""The exception and the warning of `itemset`, and how messages repeat a client's values."""

from typing import Any

AGAIN = "build it again with `itemset build`"  # the mend of every damaged index


class ItemSetError(ValueError):
    """A bad item, set, key or file. The message names it and says what to do about it."""


class ItemSetWarning(UserWarning):
    """What was built may not be what was meant. The message says what, and what to do about it."""


class Faults:
    """What is wrong with items or rows: counted, and told at once."""

    def __init__(self, what: str = "rows") -> None:
        self.count, self._what = 0, what
        self._first: list[str] = []

    def add(self, fault: str) -> None:
        """Count one; the first ten are told."""
        self.count += 1
        if self.count <= 10:
            self._first.append(fault)

    def check(self) -> None:
        """Raise an ItemSetError if there are any."""
        if self.count:
            before = f"{self.count:,} {self._what} are bad, such as " if self.count > 1 else ""
            raise ItemSetError(before + "; ".join(self._first))


def shown(value: Any) -> str:
    """Return what a message repeats of a value, in constant time: a string's or number's beginning, else its kind."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}..."
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**60):
        return repr(value)
    return {list: "a list", dict: "an object", int: "a number of many digits"}.get(type(value), type(value).__name__)
