"""What is served: a private copy of each registered index file, which nothing that happens to the file can change.

A folder holds the copies, each under the name of its version, and a file `lock`. Who makes or deletes copies locks that
file for itself, who opens one shares it. Each process locks the copies that it has open: those that nobody locks may
go. All of these locks end with their process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.opening import from_index
from itemset.storage import is_uri
from itemset.trie import file as index_file

KEPT_SECONDS = 3600  # that a copy stays which nobody maps, from when it was last opened: a restart finds it
_OPTION = "name another folder with the option item_set_cache"
_VERSION = re.compile("[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # which machine this is, and since when it runs
_INCOMPLETE = "incomplete"  # the copy being made; there is one at a time

Seal = list[str | int]
"""What `seal` returns."""


def open_copy(
    path: str | os.PathLike[str] | None,
    folder: str | None = None,
    version: str | None = None,
    sealed: Seal | None = None,
) -> tuple[ItemSet, str]:
    """The set of the index file at `path`, mapped from a private copy, and its version (`index_file.version`).

    path: of the file, or its URI; None if there is a copy already. folder: where copies are; None for the user's cache
    folder, or one in the folder for temporary files. version: the one that is wanted. Its copy is opened, whatever
    stands at `path`; if there is none, the file at `path` must be of this version. None for that of the file. sealed:
    what `seal` has told a process that checked the version's copy. If that is the copy here, as it was then, it is not
    read again.
    Raises ItemSetError: a bad file (as `itemset.load`), one of another version, a folder that cannot be used, or a disk
    that is full.
    """
    copies, found = _folder(folder), version or _version(path or "")
    try:
        with _locked(copies, fcntl.LOCK_SH):
            item_set = _open(copies / found, sealed)
        if item_set is None:
            with _locked(copies, fcntl.LOCK_EX):
                item_set = _open(copies / found, sealed)  # another process may have been faster
                if item_set is None:
                    if path is None:
                        raise ItemSetError(f"{copies} has no copy of version {found}")
                    item_set, found = _copy(str(path), copies, version)
    except OSError as error:
        raise ItemSetError(f"{copies} cannot be used: {error.strerror}: {_OPTION}") from error
    return item_set, found


def _version(path: str | os.PathLike[str]) -> str:
    """The version of a file. One under a URI is checked when it has been fetched, and that only if there is no copy."""
    return index_file.named(path) if is_uri(path) else index_file.version(path)


def delete_unused(folder: str | None = None, superseded: Collection[str] = ()) -> set[str]:
    """Delete the copies that no process has open and none has opened for KEPT_SECONDS, and what a kill has left.

    superseded: versions that go as soon as no process has them open. Returns those of them that are gone.
    """
    copies, gone = _folder(folder), set()
    with suppress(BlockingIOError), _locked(copies, fcntl.LOCK_EX | fcntl.LOCK_NB):
        (copies / _INCOMPLETE).unlink(missing_ok=True)
        for copy in copies.iterdir():
            with suppress(OSError):
                old = _VERSION.fullmatch(copy.name) and time.time() - copy.stat().st_mtime > KEPT_SECONDS
                if old or copy.name in superseded:
                    with open(copy, "rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        copy.unlink()
        gone = {version for version in superseded if not (copies / version).exists()}
    return gone


def seal(version: str, folder: str | None = None) -> Seal | None:
    """Return what tells a process of this machine that this copy, which was checked here, has not changed since.

    A change gives a file another time of change. Of plain values; None if this cannot be told.
    """
    with suppress(OSError):
        return _seal(os.stat(_folder(folder) / version))
    return None


def _seal(state: os.stat_result) -> Seal:
    return [_BOOT.read_text(), state.st_dev, state.st_ino, state.st_size, state.st_ctime_ns]


def _is_sealed(descriptor: int, sealed: Seal | None) -> bool:
    with suppress(OSError):
        return sealed is not None and list(sealed) == _seal(os.fstat(descriptor))
    return False


def _open(copy: Path, sealed: Seal | None) -> ItemSet | None:
    """Open, lock and check a copy. None where there is none or it is damaged."""
    try:
        descriptor = os.open(copy, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ItemSetError(f"cannot read {copy}: {error.strerror}: delete it, or {_OPTION}") from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    known = _is_sealed(descriptor, sealed)
    try:
        if (index_file.named(copy) if known else index_file.version(copy)) != copy.name:
            raise ItemSetError(f"{copy} is another file")
        item_set = from_index(*index_file.read(copy), name=str(copy), check=False)
    except ItemSetError:
        os.close(descriptor)
        return None
    if not known:  # or the seal would break
        with suppress(OSError):  # of another owner's copy
            os.utime(descriptor)
    weakref.finalize(item_set, os.close, descriptor)
    return item_set


def _copy(path: str, copies: Path, wanted: str | None) -> tuple[ItemSet, str]:
    """Make the copy: under another name, until it has been checked. The folder is locked."""
    incomplete = copies / _INCOMPLETE
    try:
        incomplete.unlink(missing_ok=True)
        descriptor = os.open(incomplete, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o400)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            index_file.copy_into(path, descriptor)
            version = index_file.version(incomplete, path)
            if wanted not in (None, version):
                raise ItemSetError(
                    f"{path} is not the file that the server was started with (version {version}, not {wanted}): give "
                    "every machine the same file, and start the server again"
                )
            item_set = from_index(*index_file.read(incomplete, path), name=path, check=False)
            incomplete.rename(copies / version)
        except BaseException:
            os.close(descriptor)
            incomplete.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ItemSetError(
            f"{path} cannot be copied to {copies}: {error.strerror}: make room there, or {_OPTION}"
        ) from error
    weakref.finalize(item_set, os.close, descriptor)
    return item_set, version


def _folder(given: str | None) -> Path:
    """The folder of the copies, made where there is none. Raises ItemSetError where it cannot be written."""
    user = os.geteuid()
    folders = [Path(given).expanduser()] if given else []
    if not given:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folders = [Path(cache, "static-backend")] if os.path.isabs(cache) else []
        folders.append(Path(tempfile.gettempdir(), f"static-backend-{user}"))
    why = ""
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.lstat()
            if not given and (state.st_uid != user or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
                why = "others can write to it"  # and could have made it: all may guess its name
            else:
                with suppress(BlockingIOError), _locked(folder, fcntl.LOCK_SH | fcntl.LOCK_NB):
                    pass  # only to see that files can be made and locked there
                return folder
        except OSError as error:
            why = error.strerror or str(error)
    raise ItemSetError(f"item sets cannot be copied to {folders[-1]}: {why}: {_OPTION}")


@contextmanager
def _locked(copies: Path, how: int) -> Iterator[None]:
    descriptor = os.open(copies / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
