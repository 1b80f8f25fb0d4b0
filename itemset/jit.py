"""The decorator of all compiled loops: Numba, with its results kept on disk for as long as they are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def _stamp() -> tuple[int, int]:
    sources = [path.stat() for path in Path(__file__).parent.glob("*.py")]
    return max(source.st_mtime_ns for source in sources), sum(source.st_size for source in sources)


_STAMP = _stamp()


def compiled(function: Callable[..., Any]) -> Any:
    """`numba.njit(cache=True)`, but compiled anew when any file of this package changes.

    Numba looks at the function's own file only (numba/core/caching.py), and compiles functions of other files into it.
    """
    dispatcher = numba.njit(cache=True)(function)
    cache_file = getattr(dispatcher._cache, "_cache_file", None)
    if cache_file is not None:  # there is none where no folder for it can be written
        cache_file._source_stamp = _STAMP
    return dispatcher
