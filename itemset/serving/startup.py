"""How a bad configuration ends the start: on a server's command line with one line, elsewhere with its exception. How
long the start takes for the item sets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_from_flags: list[bool] = []
_opening: list[float] = []


def on_command_line() -> None:
    """Say that this process was started with an engine's flags."""
    _from_flags[:] = [True]


@contextmanager
def start_up() -> Iterator[None]:
    """A part of the start in which only the plugin's own code runs. On a command line, a ValueError of it (ItemSetError
    is one) ends the process with its sentence and nothing else: a traceback would bury it."""
    try:
        yield
    except ValueError as error:
        if not _from_flags:
            raise
        raise SystemExit(f"static-backend: {error}") from None


@contextmanager
def opening() -> Iterator[None]:
    """A part of the start in which item sets are copied, checked or opened."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _opening.append(time.perf_counter() - start)


def seconds() -> float:
    """How long these parts have taken in this process."""
    return sum(_opening)
