"""A folder for a build's temporary files. A killed build leaves it; the next build of the same output removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"


@contextmanager
def scratch_folder(output: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder beside the file `output`, for what is needed until that file is written.

    A file in it is locked as long as this process lives. A folder beside it without such a lock is of a build that was
    killed, and is removed. Raises OSError if no folder can be made there.
    """
    output = Path(output).absolute()
    prefix, suffix = f".{output.name}.", ".building"
    for left in output.parent.iterdir():
        if left.name.startswith(prefix) and left.name.endswith(suffix):
            with suppress(OSError), open(left / _LOCK, "rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(suffix, prefix, output.parent))
    try:
        with open(folder / _LOCK, "wb") as lock:
            with suppress(OSError):  # a file system without locks: nobody removes the folder of a killed build
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
