"""Where files are: on this machine, or under a URI in an object store, on a web server or on a model hub.

pyarrow's own file systems serve s3:// and gs://, fsspec's all others (hf://, https://, abfs://, ...), each with the
credentials that it finds by itself: environment variables, its configuration files, the machine's role.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A file to be read, wherever it is.

    name: its path or URI, as errors call it. path: within its file system. size: its bytes. changed: when it was
    changed last, in nanoseconds, None if the system does not tell. system: pyarrow's, None for this machine's.
    """

    name: str
    path: str
    size: int
    changed: int | None
    system: Any = field(compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """In lower case, with its dot."""
        return PurePosixPath(self.path).suffix.lower()

    def open(self) -> BinaryIO:
        """Open it for reading, at any place. Raises OSError, and so do reads, whatever the file system raises."""
        if self.system is None:
            return open(self.path, "rb")
        return cast(BinaryIO, io.BufferedReader(_Remote(self), _PIECE))

    def check_unchanged(self) -> None:
        """Raise ItemSetError if another file stands there now: what was read may be of both."""
        self.check_is(self.now())

    def now(self) -> SourceFile:
        """Return the file that stands there now. Raises ItemSetError as `file_at` does."""
        return file_at(self.path if self.system is None else self.name)

    def check_is(self, now: SourceFile) -> None:
        """Raise ItemSetError if that which stands there now is another file."""
        if now.size != self.size or self.changed not in (None, now.changed):
            raise ItemSetError(f"{self.name} was changed while it was read: start again")


def file_at(path: PathLike) -> SourceFile:
    """Return the file that stands there. Raises ItemSetError: there is none, or it cannot be reached."""
    if not is_uri(path):
        return _local(Path(path))
    name = str(path)
    system, info, is_folder = _looked_up(name)
    if is_folder:
        raise ItemSetError(f"{name} is a folder: name a file in it")
    return _remote(name, system, info)


def files_at(path: PathLike) -> list[SourceFile]:
    """Return the file that stands there, or those of a folder or a glob, in the order of their names.

    A folder's files are also those in folders below it. Names that begin with "_" or "." are left out: clusters write
    notes of their own beside the parts of a table. A glob has its `*` in the last part of the path.
    Raises ItemSetError: nothing is there, or it cannot be reached.
    """
    name = str(path)
    above, slash, last = name.rpartition("/")
    if "*" in last:
        found = [
            one for one in _listed(above + slash, False) if fnmatch.fnmatchcase(PurePosixPath(one.path).name, last)
        ]
    elif is_uri(path):
        system, info, is_folder = _looked_up(name)
        if not is_folder:
            return [_remote(name, system, info)]
        found = _listed(name, True)
    elif Path(path).is_dir():
        found = _listed(name, True)
    else:
        return [_local(Path(path))]
    if not found:
        raise ItemSetError(f"no file in {name}: check the path")
    return sorted(found, key=lambda one: one.path)


def fetch(path: PathLike, target: int) -> None:
    """Copy the file under a URI to the file of the descriptor `target`.

    Raises ItemSetError: it cannot be read, or was changed meanwhile; OSError if the copy cannot be written.
    """
    found = file_at(path)
    with open(target, "wb", closefd=False) as copy, found.open() as file:
        while True:
            with reached(found.name):
                piece = file.read(_PIECE)
            if not piece:
                break
            copy.write(piece)
    found.check_unchanged()


def fetched(path: PathLike) -> BinaryIO:
    """Return a copy of the file under a URI, which has no name and goes when it is closed. Raises as `fetch` does."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115  it is returned
    try:
        fetch(path, copy.fileno())
    except BaseException:
        copy.close()
        raise
    return cast(BinaryIO, copy)


def put(folder: PathLike, name: str, data: Buffer) -> None:
    """Write a file into a folder, at once: until it is whole, nobody sees it. A folder of this machine must be there.

    Raises ItemSetError if it cannot be written.
    """
    target = f"{folder}/{name}"
    try:
        if is_uri(folder):
            system, inside = _system(target)
            with system.open_output_stream(inside) as stream:  # what is sent is an object once it is closed
                stream.write(data)
        else:
            unfinished = Path(folder, f".{name}.{uuid.uuid4().hex}")
            unfinished.write_bytes(data)
            os.replace(unfinished, target)
    except Exception as error:  # as for `reached`
        raise ItemSetError(f"{target} cannot be written: {_reason(error)}") from error


@contextmanager
def reached(name: str) -> Iterator[None]:
    """Turn what file systems raise into ItemSetErrors."""
    try:
        yield
    except ItemSetError:
        raise
    except ImportError as error:
        raise ItemSetError(f"{name} cannot be read: {error} (pip install 'static-backend[remote]')") from error
    except Exception as error:  # of fsspec's file systems: whatever their clients raise
        raise ItemSetError(f"{name} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    text = text.partition("\n")[0]
    denied = isinstance(error, PermissionError) or re.search(r"denied|forbidden|\b40[13]\b", text, re.IGNORECASE)
    if denied:
        return f"{text}: give credentials that may read it"
    unreached = re.search(r"NETWORK_CONNECTION|resolve host|refused|timed? ?out|unreachable", text, re.IGNORECASE)
    return f"{text}: check the network, the address and its region or endpoint" if unreached else text


def _system(uri: str) -> tuple[Any, str]:
    """Return pyarrow's file system for a URI, and the path within it."""
    import pyarrow as pa
    from pyarrow import fs

    try:
        system, inside = fs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid:  # none of pyarrow's own
        import fsspec  # type: ignore[import-untyped]

        other, inside = fsspec.core.url_to_fs(uri)
        system = fs.PyFileSystem(fs.FSSpecHandler(other))
    return system, inside


def _local(path: Path) -> SourceFile:
    if path.is_dir():
        raise ItemSetError(f"{path} is a folder: name a file in it")
    if not path.exists():
        raise ItemSetError(f"no file {path}: check the path")
    state = path.stat()
    return SourceFile(str(path), str(path), state.st_size, state.st_mtime_ns, None)


def _remote(name: str, system: Any, info: Any) -> SourceFile:
    if info.size is None:
        raise ItemSetError(f"{name} cannot be read in parts, its server does not say its size: download it first")
    return SourceFile(name, info.path, info.size, info.mtime_ns, system)


def _looked_up(uri: str) -> tuple[Any, Any, bool]:
    """Return pyarrow's file system, what it says of the file under a URI, and whether that is a folder.

    Raises ItemSetError as `file_at` does.
    """
    from pyarrow import fs

    with reached(uri):
        system, inside = _system(uri)
        found = system.get_file_info(inside)
        if found.type == fs.FileType.NotFound:
            _ask_why(system, inside)
    if found.type == fs.FileType.NotFound:
        raise ItemSetError(f"no file {uri}: check the address")
    return system, found, found.type == fs.FileType.Directory


def _ask_why(system: Any, inside: str) -> None:
    """Raise OSError if a web server says something else of a file than that there is none: fsspec calls each of its
    errors a missing file."""
    client = getattr(getattr(system, "handler", None), "fs", None)
    try:
        if client is not None:
            client.info(inside)
    except FileNotFoundError as error:
        cause = error.__cause__
        if type(cause).__name__ == "TooManyRedirects":
            raise OSError("its server redirects in circles: correct the address") from cause
        if getattr(cause, "status", 404) not in (404, 410):
            raise OSError(f"its server answers with status {getattr(cause, 'status', None)}: {cause}") from cause


def _listed(folder: str, below: bool) -> list[SourceFile]:
    """Return the files of a folder. below: and those of the folders in it."""
    if not is_uri(folder):
        top = Path(folder)
        every = top.rglob("*") if below else top.glob("*")
        return [_local(one) for one in every if one.is_file() and not _is_note(one.relative_to(top).parts)]
    from pyarrow import fs

    scheme = folder.partition("://")[0]
    with reached(folder):
        system, inside = _system(folder)
        every = system.get_file_info(fs.FileSelector(inside, recursive=below))
        return [
            _remote(one.path if is_uri(one.path) else f"{scheme}://{one.path}", system, one)
            for one in every
            if one.type == fs.FileType.File and not _is_note(PurePosixPath(one.path).relative_to(inside).parts)
        ]


def _is_note(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(("_", ".")) for part in parts)


class _Remote(io.RawIOBase):
    """A file that is elsewhere, read where it is asked for. A read that fails is tried again on a new connection."""

    def __init__(self, source: SourceFile) -> None:
        super().__init__()
        self._source, self._at = source, 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        room = memoryview(buffer).cast("B")
        wanted = min(len(room), self._source.size - self._at)
        if wanted <= 0:
            return 0
        data = self._read(wanted)
        room[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        tries = 0
        while True:
            try:
                if self._file is None:
                    self._file = self._source.system.open_input_file(self._source.path)
                self._file.seek(self._at)
                if data := self._file.read(wanted):
                    return bytes(data)
                raise OSError("it ends before its size")
            except Exception as error:
                self._file, tries = None, tries + 1
                if tries == TRIES or isinstance(error, FileNotFoundError | PermissionError):
                    raise OSError(_reason(error)) from error
                time.sleep(_WAIT * tries)
