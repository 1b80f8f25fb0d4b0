"""Private copies of the registered index files, from which sets are served: nothing that happens to a file changes one.

A folder holds the copies, each named by its version, and a file `lock`. Whoever makes or deletes copies locks that file
for itself, whoever opens one shares it. Each process locks the copies that it has open; unlocked ones may be deleted.
All of these locks end with their process, however it ends.
"""

import fcntl
import os
import re
import stat
import tempfile
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.opening import from_index
from itemset.storage import PathLike, incomplete, is_uri, locked
from itemset.trie import file as index_file

KEPT_SECONDS = 3600  # that an unused copy stays after it was last opened: a restart finds it
_OPTION = "name another folder with the option item_set_cache"
_VERSION = re.compile("[0-9a-f]{32}")
_BUILT = "built"
_INCOMPLETE = "incomplete"  # the copy being made; there is one at a time


def open_copy(path: PathLike | None, folder: str | None = None, version: str | None = None) -> tuple[ItemSet, str]:
    """Return the set of the index file at `path`, mapped from a private copy, and its version (`index_file.version`).

    path: of the file, or its URI; None if there is a copy already. folder: of the copies; None for the user's cache
    folder, or one for temporary files. version: to open; None for that of the file. Its copy is taken, whatever stands
    at `path`, else the file there must be of it. Raises ItemSetError: a bad file (as `itemset.load`), one of another
    version, a folder that cannot be used, or a disk that is full.
    """
    copies, name = folder_of(folder), version
    if name is None:  # a file under a URI is checked when it has been fetched, and that only if there is no copy
        name = index_file.version(path or "", checked=not is_uri(path or ""))
    try:
        with locked(copies / "lock", fcntl.LOCK_SH, 0o600):
            item_set = _open(copies / name)
        if item_set is None:
            with locked(copies / "lock", fcntl.LOCK_EX, 0o600):
                item_set = _open(copies / name)  # another process may have been faster
                if item_set is None and path is None:
                    raise ItemSetError(f"{copies} has no copy of version {name}")
                if item_set is None:
                    return _copy(str(path), copies, version)
    except OSError as error:
        raise ItemSetError(f"{copies} cannot be used: {error.strerror}: {_OPTION}") from error
    return item_set, name


def delete_unused(folder: str | None = None, superseded: Collection[str] = ()) -> set[str]:
    """Delete the copies that no process has open and none has opened for KEPT_SECONDS, and what a kill has left.

    superseded: versions to delete as soon as no process has them open. Returns those of them that are gone.
    """
    copies, gone = folder_of(folder), set()
    with suppress(BlockingIOError), locked(copies / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB, 0o600):
        (copies / _INCOMPLETE).unlink(missing_ok=True)
        for copy in copies.iterdir():
            with suppress(OSError):
                old = _VERSION.fullmatch(copy.name) and time.time() - copy.stat().st_mtime > KEPT_SECONDS
                if old or copy.name in superseded:
                    with open(copy, "rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        copy.unlink()
        gone = {version for version in superseded if not (copies / version).exists()}
        for form in (copies / _BUILT).glob("*-*.itemset"):
            version, _, _ = form.name.partition("-")
            if _VERSION.fullmatch(version) and not (copies / version).exists():
                form.unlink(missing_ok=True)
    return gone


def folder_of_indexes(given: str | None) -> Path:
    """Return the folder of what servers build: of sources `itemset.source_sets`, of forms VERSION-PLACE.itemset. Made
    if there is none. Raises as `folder_of`."""
    folder = folder_of(given) / _BUILT
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _open(copy: Path) -> ItemSet | None:
    """Open, lock and check a copy. Return None if there is none, or it is damaged."""
    try:
        descriptor = os.open(copy, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ItemSetError(f"cannot read {copy}: {error.strerror}: delete it, or {_OPTION}") from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        if index_file.version(copy) != copy.name:
            raise ItemSetError(f"{copy} is another file")
        item_set = from_index(*index_file.read(copy), name=str(copy), check=False)
    except ItemSetError:
        os.close(descriptor)
        return None
    with suppress(OSError):  # of another owner's copy
        os.utime(descriptor)
    weakref.finalize(item_set, os.close, descriptor)
    return item_set


def _copy(path: str, copies: Path, version: str | None) -> tuple[ItemSet, str]:
    """Make the copy: under another name, until it has been checked. The folder is locked."""
    unchecked = copies / _INCOMPLETE
    try:
        with incomplete(unchecked, 0o400) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            index_file.copy_into(path, descriptor)
            name = index_file.version(unchecked, path)
            if version not in (None, name):
                raise ItemSetError(
                    f"{path} is not the file that the server was started with (version {name}, not {version}): give "
                    "every machine the same file, and start the server again"
                )
            item_set = from_index(*index_file.read(unchecked, path), name=path, check=False)
            unchecked.rename(copies / name)
    except OSError as error:
        raise ItemSetError(
            f"{path} cannot be copied to {copies}: {error.strerror}: make room there, or {_OPTION}"
        ) from error
    weakref.finalize(item_set, os.close, descriptor)
    return item_set, name


def folder_of(given: str | None) -> Path:
    """Return the folder of the copies, made if there is none. Raises ItemSetError if it cannot be written."""
    user, why = os.geteuid(), ""
    default = [user_cache_path("static-backend"), Path(tempfile.gettempdir(), f"static-backend-{user}")]
    folders = [Path(given).expanduser()] if given else default
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.lstat()
            if not given and (state.st_uid != user or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
                why = "others can write to it"  # and could have made it: all may guess its name
                continue
            with suppress(BlockingIOError), locked(folder / "lock", fcntl.LOCK_SH | fcntl.LOCK_NB, 0o600):
                pass  # only to see that files can be made and locked there
            return folder
        except OSError as error:
            why = error.strerror or str(error)
    raise ItemSetError(f"item sets cannot be copied to {folders[-1]}: {why}: {_OPTION}")
