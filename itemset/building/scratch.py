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


def state_of(output: str | os.PathLike[str]) -> os.stat_result | None:
    """Return what file is at `output`, for `outcome`; None if there is none."""
    try:
        return os.stat(output)
    except OSError:
        return None


def outcome(output: str | os.PathLike[str], before: os.stat_result | None) -> str:
    """Say whether an interrupted build put its file at `output`, or else how to go on.

    before: what `state_of` returned at its start. Files are put in place at once: one that is there is whole.
    """
    now = state_of(output)
    if now is not None and (before is None or not os.path.samestat(now, before)):
        return f"{output} was written whole"
    return "nothing was written: run the same command again"
