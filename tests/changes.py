"""What people do to an index file while a server runs: each changes the very file that was opened, in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import itemset


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(bytes(byte ^ 255 for byte in data))


def cut(path: Path) -> None:
    os.truncate(path, 100)


def copy_over(path: Path) -> None:
    """`cp another.itemset films.itemset`."""
    another = path.with_name("another")
    itemset.build([[1, 2], [3, 4, 4], [4]]).save(another)
    shutil.copyfile(another, path)
    another.unlink()


IN_PLACE = {"flip": flip, "cut": cut, "cp": copy_over}


@contextmanager
def undone(path: Path) -> Iterator[None]:
    """The file is put back as it was, in place."""
    before = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(before)
