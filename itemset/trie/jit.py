"""The decorator of all compiled loops: Numba, with its results kept on disk until a source file changes."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numba

_SOURCES = [path.stat() for path in Path(__file__).parents[1].rglob("*.py")]
_STAMP = max(source.st_mtime_ns for source in _SOURCES), sum(source.st_size for source in _SOURCES)


def compiled(function: Callable[..., Any] | None = None, *, fastmath: Collection[str] = ()) -> Any:
    """Compile as `numba.njit(cache=True, nogil=True)` does, but again when any file of this package changes.

    Numba looks at the function's own file only (numba/core/caching.py), and compiles functions of other files into it.
    fastmath: LLVM's names for what its floats may do.
    """
    if function is None:
        return partial(compiled, fastmath=fastmath)
    dispatcher = numba.njit(cache=True, nogil=True, fastmath=set(fastmath))(function)
    cache_file = getattr(dispatcher._cache, "_cache_file", None)
    if cache_file is not None:  # there is none if no folder for it can be written
        cache_file._source_stamp = _STAMP
    return dispatcher
