"""How much memory there is, and how much a build in memory would take."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from itemset.storage import SourceFile, files_at

_ROW_BYTES, _TOKEN_BYTES = 22, 3  # an item and a token of a matrix, beside the matrix itself
_FILE_FACTOR = 13  # other files: texts and lists are in memory as Arrow columns, Python strings and token ids


def available_memory(system: Path = Path("/")) -> int:
    """Return the bytes that this process can take without swapping: the system's, or its control group's (v2)."""
    try:
        free = 1024 * _counter(system / "proc/meminfo", "MemAvailable:")
    except (OSError, LookupError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = system / "sys/fs/cgroup"
    with suppress(OSError, LookupError, ValueError):  # no such group, or no limit ("max")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = _counter(group / "memory.stat", "inactive_file")  # files' pages, which can be taken back
        free = min(free, max(0, limit - used + cached))
    return free


def _counter(file: Path, name: str) -> int:
    """Return the number after `name` in a file of one counter a line."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines()) if len(words) > 1}[name]


def needed_memory(
    path: str | os.PathLike[str], column: str | None = None, key: str | None = None, attributes: Sequence[str] = ()
) -> int:
    """Estimate the peak memory of `build` or `build_text` for these items from the files' sizes; 0 if unreadable.

    It is high if a CSV or JSON file has other long columns.
    """
    names = {column, key, *attributes} if column else set()
    try:
        return sum(_needed(file, names) for file in files_at(path))
    except (OSError, ValueError, EOFError, AttributeError, pa.ArrowException):
        return 0  # `sources.read` says what is wrong with it


def _needed(file: SourceFile, names: set[str | None]) -> int:
    if file.suffix == ".npy" and file.system is None:
        matrix = np.load(file.path, mmap_mode="r")
        rows, width = matrix.shape
        return int(rows * (_ROW_BYTES + width * (matrix.itemsize + _TOKEN_BYTES)))
    if file.suffix != ".parquet":
        return _FILE_FACTOR * file.size
    with file.open() as stream:
        metadata = pa_parquet.read_metadata(stream)
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    chunks = (group.column(i) for group in groups for i in range(group.num_columns))
    read = (chunk for chunk in chunks if not names or chunk.path_in_schema.partition(".")[0] in names)
    return _FILE_FACTOR * sum(int(chunk.total_uncompressed_size) for chunk in read)
