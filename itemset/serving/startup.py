"""Errors of the start: one line on a server's command line, elsewhere exceptions. How long sets take to open."""

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
    """Run the plugin's own code at the start. On a command line, a ValueError of it (ItemSetError is one) ends the
    process with its sentence and nothing else: a traceback would bury it."""
    try:
        yield
    except ValueError as error:
        if not _from_flags:
            raise
        raise SystemExit(f"static-backend: {error}") from None


@contextmanager
def opening() -> Iterator[None]:
    """Time a part of the start that copies, checks or opens item sets."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _opening.append(time.perf_counter() - start)


def seconds() -> float:
    """Return how long these parts have taken in this process."""
    return sum(_opening)
