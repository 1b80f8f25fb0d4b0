"""Files on this machine, or under a URI in an object store, on a web server or on a model hub.

URIs are read through fsspec: pyarrow serves s3:// and gs://, fsspec itself all others (hf://, https://, abfs://, ...),
each with the credentials that it finds. Here `pathlib` reads: fsspec follows no links in a folder, and rounds times.
"""

import fcntl
import fnmatch
import io
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from itemset.errors import ItemSetError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # of collections.abc from Python 3.12 on

PathLike = str | os.PathLike[str]
TRIES = 3  # of each read: a connection may break in the middle
_WAIT = 0.5  # seconds before the second try, twice that before the third
_PIECE = 1 << 23  # bytes of one read
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_uri(path: PathLike) -> bool:
    """Return whether this names a file under a URI, and none of this machine."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


@dataclass(frozen=True)
class SourceFile:
    name: str  # its path or URI, for errors
    path: str  # within its file system
    size: int  # in bytes
    changed: Any  # when it was changed last, None if the system does not say
    system: Any = field(compare=False)  # of fsspec, None for this machine's

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        """Open it for reading, at any place. Raises OSError, and so do reads, whatever the file system raises."""
        if self.system is None:
            return open(self.path, "rb")
        return cast(BinaryIO, io.BufferedReader(_RemoteReader(self), _PIECE))

    def check_unchanged(self) -> None:
        """Raise ItemSetError if another file stands there now: what was read may be of both."""
        now = file_at(self.path if self.system is None else self.name)
        if now.size != self.size or self.changed not in (None, now.changed):
            raise ItemSetError(f"{self.name} was changed while it was read: start again")


def file_at(path: PathLike) -> SourceFile:
    """Return the file that stands there. Raises ItemSetError: there is none, or it cannot be reached."""
    if is_uri(path):
        system, info = _lookup(str(path))
        if info["type"] != "directory":
            return _remote(str(path), system, info)
    elif not Path(path).is_dir():
        return _local(Path(path))
    raise ItemSetError(f"{path} is a folder: name a file in it")


def files_at(path: PathLike) -> list[SourceFile]:
    """Return the file that stands there, or those of a folder or a glob, in the order of their names.

    A folder's files include those in folders below it, but for names that begin with "_" or ".": notes of clusters. A
    glob has its `*` in the last part of the path. Raises ItemSetError: nothing is there, or it cannot be reached.
    """
    name = str(path)
    above, slash, last = name.rpartition("/")
    if "*" in last:
        there = _list(above + slash, False)
        files = [file for file in there if fnmatch.fnmatchcase(PurePosixPath(file.path).name, last)]
    elif _lookup(name)[1]["type"] == "directory" if is_uri(path) else Path(path).is_dir():
        files = _list(name, True)
    else:
        return [file_at(path)]
    if not files:
        raise ItemSetError(f"no file in {name}: check the path")
    return sorted(files, key=lambda file: file.path)


def fetch(path: PathLike, target: int) -> None:
    """Copy the file under a URI to a descriptor. Raises ItemSetError for what is read, OSError for what is written."""
    source, piece = file_at(path), b"-"
    with open(target, "wb", closefd=False) as copy, source.open() as file:
        while piece:
            with _as_item_set_errors(source.name):
                piece = file.read(_PIECE)
            copy.write(piece)
    source.check_unchanged()


def fetched(path: PathLike) -> BinaryIO:
    """Return a copy of the file under a URI, which has no name and is deleted when closed. Raises as `fetch` does."""
    with ExitStack() as unless_copied:
        copy = unless_copied.enter_context(tempfile.TemporaryFile())
        fetch(path, copy.fileno())
        unless_copied.pop_all()
    return cast(BinaryIO, copy)


@contextmanager
def locked(path: PathLike, how: int = fcntl.LOCK_EX, mode: int = 0o666, *, must: bool = True) -> Iterator[int]:
    """Lock a file, made if missing, for the block or until the process ends, and yield its descriptor.

    how, and OSErrors: of `fcntl.flock`. must: False to go on without on a file system that has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            with suppress(*() if must else (OSError,)):
                fcntl.flock(descriptor, how)
            with suppress(FileNotFoundError):  # else it was deleted meanwhile, and others lock a new one
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def incomplete(path: Path, mode: int) -> Iterator[int]:
    """Make a file and yield its descriptor, which stays open. If the block fails, close and delete it."""
    path.unlink(missing_ok=True)  # a killed process left it
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        yield descriptor
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def write_whole(path: Path, temporary: Path, mode: int, pieces: Iterable["Buffer"]) -> None:
    """Write a file under a temporary name, and give it its own once it is on the disk. Raises OSError.

    Another process that writes the same file waits meanwhile.
    """
    if temporary.exists() and not os.access(temporary, os.W_OK, effective_ids=True):  # another user's, who was killed
        temporary.unlink(missing_ok=True)
    with locked(temporary, mode=mode, must=False) as descriptor:
        try:
            os.ftruncate(descriptor, 0)  # a killed process left it
            with open(descriptor, "wb", closefd=False) as file:
                file.writelines(pieces)
            os.fsync(descriptor)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _as_item_set_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ItemSetError:
        raise
    except Exception as error:  # of fsspec's file systems: whatever their clients raise
        missing = f"{error} (pip install 'static-backend[remote]')" if isinstance(error, ImportError) else None
        raise ItemSetError(f"{name} cannot be read: {missing or _reason(error)}") from error


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = text.partition("\n")[0]
    if isinstance(error, PermissionError) or re.search(r"denied|forbidden|\b40[13]\b", text, re.IGNORECASE):
        return f"{text}: give credentials that may read it"
    unreached = re.search(r"NETWORK_CONNECTION|resolve host|refused|timed? ?out|unreachable", text, re.IGNORECASE)
    return f"{text}: check the network, the address and its region or endpoint" if unreached else text


def _system(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URI, and the path within it."""
    import fsspec  # type: ignore[import-untyped]
    import pyarrow as pa
    from fsspec.implementations.arrow import ArrowFSWrapper  # type: ignore[import-untyped]
    from pyarrow import fs

    try:
        system, inside = fs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid:  # none of pyarrow's own
        system, inside = fsspec.core.url_to_fs(uri)
        system.invalidate_cache()  # fsspec shares it, and some keep what a folder held when it was first asked for
        return system, inside
    return ArrowFSWrapper(system, skip_instance_cache=True), inside


def _lookup(uri: str) -> tuple[Any, dict[str, Any]]:
    """Return the file system of a URI, and its entry for it: name, size, type. Raises ItemSetError as `file_at`."""
    with _as_item_set_errors(uri):
        system, inside = _system(uri)
        try:
            return system, system.info(inside)
        except FileNotFoundError as error:
            cause = error.__cause__  # of a web server: fsspec calls each of its errors a missing file
            if type(cause).__name__ == "TooManyRedirects":
                raise OSError("its server redirects in circles: correct the address") from cause
            if getattr(cause, "status", 404) not in (404, 410):
                raise OSError(f"its server answers with status {getattr(cause, 'status', None)}: {cause}") from cause
            raise ItemSetError(f"no file {uri}: check the address") from error


def _local(path: Path) -> SourceFile:
    if not path.exists():
        raise ItemSetError(f"no file {path}: check the path")
    state = path.stat()
    return SourceFile(str(path), str(path), state.st_size, state.st_mtime_ns, None)


def _remote(name: str, system: Any, info: dict[str, Any]) -> SourceFile:
    if info["size"] is None:
        raise ItemSetError(f"{name} cannot be read in parts, its server does not say its size: download it first")
    return SourceFile(name, info["name"], info["size"], info.get("mtime"), system)


def _list(folder: str, below: bool) -> list[SourceFile]:
    """Return the files of a folder. below: and those of the folders in it."""
    if not is_uri(folder):
        top = Path(folder)
        paths = top.rglob("*") if below else top.glob("*")
        return [_local(path) for path in paths if path.is_file() and not _is_note(path.relative_to(top).parts)]
    scheme = folder.partition("://")[0]
    with _as_item_set_errors(folder):
        system, inside = _system(folder)
        inside = system.info(inside.rstrip("/"))["name"]  # which raises if there is none
        files = system.find(inside, maxdepth=None if below else 1, detail=True).values()
        return [
            _remote(info["name"] if is_uri(info["name"]) else f"{scheme}://{info['name']}", system, info)
            for info in files
            if info["type"] == "file" and not _is_note(PurePosixPath(info["name"]).relative_to(inside).parts)
        ]


def _is_note(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(("_", ".")) for part in parts)


class _RemoteReader(io.RawIOBase):
    """A file under a URI, read where it is asked for. A read that fails is tried again on a new connection."""

    def __init__(self, source: SourceFile) -> None:
        super().__init__()
        self._source, self._at = source, 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        return self._at

    def readinto(self, buffer: "Buffer") -> int:
        room = memoryview(buffer).cast("B")
        if (size := min(len(room), self._source.size - self._at)) <= 0:
            return 0
        data = self._read(size)
        room[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, size: int, tries: int = 1) -> bytes:
        try:
            if self._file is None:
                self._file = self._source.system.open(self._source.path, "rb")
            self._file.seek(self._at)
            if data := self._file.read(size):
                return bytes(data)
            raise OSError("it ends before its size")
        except Exception as error:
            self._file = None
            if tries == TRIES or isinstance(error, FileNotFoundError | PermissionError):
                raise OSError(_reason(error)) from error
        time.sleep(_WAIT * tries)
        return self._read(size, tries + 1)
