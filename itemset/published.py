"""Published sets: a folder of index files that never change, and one small file that says which of them is current.

    NAME.itemset   a version: an index file; NAME is its `index_file.version`, 32 hex digits
    current.json   the pointer: the versions that are kept, the current one first, and their sequence numbers
    lock           locked by whoever publishes, while it does; readers lock nothing

A version is copied under another name, checked, and renamed; then the pointer is replaced at once. So a kill leaves the
old version or the new one, and what else it leaves, the next publication removes. Times are shown and never compared:
sequence numbers order the versions. All names are relative: a folder can be copied.
"""

import errno
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from itemset.errors import ItemSetError, ItemSetWarning
from itemset.item_set import ItemSet
from itemset.opening import load, verify
from itemset.storage import PathLike, incomplete, locked, write_whole
from itemset.trie import file as index_file

KEEP = 5  # versions that a folder keeps by default
KEEP_MOST = 20_000
POINTER = "current.json"
FORMAT = 1  # of the pointer
POINTER_BYTES = 1 << 23  # that are read of it: KEEP_MOST versions have fewer
_INCOMING = "incoming"  # the copy that is being made: there is one at a time
_NO_FOLDER = Path()
_FILE = re.compile(r"([0-9a-f]{32})\.itemset")


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version of a published set.

    name: 32 hex digits, a hash of all that is in the file, and an answer's `item_set_version`. sequence: grows by one
    whenever another version becomes current, an earlier one, too. published: when its index was published last, UTC,
    only to be shown. items: in the set. bytes: of the file. folder: as it was given; the pointer does not have it.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    sequence: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    published: Annotated[datetime, msgspec.Meta(tz=True)]
    items: Annotated[int, msgspec.Meta(ge=1)]
    bytes: Annotated[int, msgspec.Meta(ge=1)]
    folder: Path = _NO_FOLDER

    @property
    def path(self) -> Path:
        """Its index file, in the folder as it was given."""
        return file_of(self.folder, self.name)


class _Pointer(msgspec.Struct, frozen=True):
    format: int
    versions: Annotated[list[Version], msgspec.Meta(min_length=1)]  # sequence numbers descend: the current one first


def publish(
    index: PathLike, folder: PathLike, *, keep: int = KEEP,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> Version:  # fmt: skip
    """Make the index file the current version of the set in `folder`, which is made if it is missing.

    The file is copied and may be changed afterwards. If the folder has this version already, nothing is copied; if it
    is current, nothing changes. keep: versions that stay, the latest ones, KEEP_MOST at most; the current one and its
    predecessor always do. Waits while another process publishes there. progress: as of `itemset.verify`, of the copy.
    Raises ItemSetError, and moves no pointer: a bad index (as `itemset.verify`), a damaged pointer, a read-only folder.
    """
    folder = Path(folder)
    if keep < 1:
        raise ItemSetError(f"{keep} versions cannot be kept: keep 1 or more")
    name = index_file.version(index, checked=False)  # before anything is made: many bad files end here
    with _publishing(folder):
        before = _versions(folder)
        if not _sound(file_of(folder, name), name):
            name = _copy(index, folder, progress)
        after = before
        if not before or before[0].name != name:
            path, sequence = file_of(folder, name), before[0].sequence + 1 if before else 1
            now, items = datetime.now(UTC).replace(microsecond=0), index_file.read(path)[0].items
            new = Version(name, sequence, now, items, path.stat().st_size, folder)
            after = [new, *(version for version in before if version.name != name)]
        after = after[: min(max(keep, 2), KEEP_MOST)]
        if after != before:
            _point(folder, after)
        kept = {version.path.name for version in after}
        for path in folder.iterdir() if before else ():  # else the pointer may have been lost, and its versions not
            if _FILE.fullmatch(path.name) and path.name not in kept:  # an older one, or one of a killed publisher
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # the new version is published all the same
                    text = f"{path} is no longer needed and cannot be deleted: {error.strerror}"
                    warnings.warn(text, ItemSetWarning, stacklevel=2)
    return after[0]


def rollback(folder: PathLike, version: str | None = None) -> Version:
    """Make an earlier version current again, which copies nothing. Return it, with its new sequence number.

    version: the beginning of its name; by default the one before this one, so a second rollback undoes the first.
    Raises ItemSetError: no such version, one whose file is missing or damaged, or as `current` and `publish` do.
    """
    folder = Path(folder)
    versions(folder)  # a folder without a set stays as it is
    with _publishing(folder):
        before = versions(folder)
        if version is None and len(before) == 1:
            raise ItemSetError(f"{folder} has one version, there is none to go back to: publish another index")
        begins = before[1].name if version is None else version.lower()
        matching = [one for one in before if one.name.startswith(begins)]
        if len(matching) != 1:
            what = f"{len(matching)} versions whose names begin with" if matching else "no version"
            known = ", ".join(one.name for one in before)
            raise ItemSetError(f"{folder} has {what} {version!r}: choose one of {known}")
        chosen = matching[0]
        if not _sound(chosen.path, chosen.name):
            raise ItemSetError(f"{chosen.path} is missing or damaged: publish its index again, or choose another")
        if chosen == before[0]:
            return chosen
        again = replace(chosen, sequence=before[0].sequence + 1)
        _point(folder, [again, *(one for one in before if one != chosen)])
    return again


def versions(folder: PathLike) -> list[Version]:
    """Return the versions in the folder, the current one first, then by when they were current last.

    Raises ItemSetError if there is no pointer, or if it is damaged.
    """
    folder = Path(folder)
    if in_pointer := _versions(folder):
        return in_pointer
    raise ItemSetError(
        f"{folder} is no published set, it has no file {POINTER}: publish an index there, "
        f"`itemset publish FILE {folder}`"
    )


def current(folder: PathLike) -> Version:
    """Return the current version: reads the pointer and looks whether the version's file is there, nothing more.

    Made to be asked every second by many processes, also over a network. It keeps no file open. A folder may vanish
    and come back: ask again. What is returned differs from the last answer whenever another version became current.
    Raises ItemSetError, which says what to do: a pointer that is missing or damaged, or that names a missing file.
    """
    while True:
        version = versions(folder)[0]
        try:
            version.path.stat()
            return version
        except OSError as error:
            if versions(folder)[0] == version:  # else it was deleted, because newer ones came
                raise ItemSetError(
                    f"{version.path}, the current version, cannot be read: {error.strerror}: publish its index again, "
                    f"or go back with `itemset publish {folder} --rollback`"
                ) from error


def file_of(folder: PathLike, version: str) -> Path:
    """Return the path of a version's file."""
    return Path(folder) / f"{version}.itemset"


def sets_in(folder: PathLike) -> set[str]:
    """Return the names of the folders in this one that are published sets. Raises ItemSetError if it cannot be read.

    One that cannot be looked into counts; one with a colon or unprintable characters in its name, which no request can
    carry, does not.
    """
    names = set()
    try:
        for one in Path(folder).expanduser().iterdir():
            may_be_a_set = ":" not in one.name and one.name.isprintable()
            with suppress(OSError):
                may_be_a_set = may_be_a_set and (one / POINTER).is_file()
            if may_be_a_set:
                names.add(one.name)
    except OSError as error:
        raise ItemSetError(f"{folder} cannot be read: {error.strerror}: name the folder of published sets") from error
    return names


def load_current(folder: PathLike) -> tuple[Version, ItemSet]:
    """Open the current version by memory map, or the next one if publishers delete it meanwhile.

    The map outlives the file on a local disk, not over a network (SIGBUS): copy the file first. Raises as these do.
    """
    while True:
        version = current(folder)
        try:
            return version, load(version.path)
        except ItemSetError:
            if current(folder) == version:
                raise


def _versions(folder: Path) -> list[Version]:
    """Return what the pointer says, nothing if there is none. Raises ItemSetError if it cannot be read."""
    path = folder / POINTER
    try:
        pointer = msgspec.json.decode(_read(path), type=_Pointer)
        disorder = any(one.sequence <= earlier.sequence for one, earlier in pairwise(pointer.versions))
        if disorder and pointer.format == FORMAT:
            raise ValueError("its sequence numbers do not descend")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ItemSetError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ItemSetError(f"{path} is damaged ({error}): delete it, and publish an index again") from error
    if pointer.format != FORMAT:
        raise ItemSetError(f"{path} has the format {pointer.format}, this is {FORMAT}: upgrade static-backend")
    return [replace(version, folder=folder) for version in pointer.versions]


def _read(path: Path) -> bytes:
    """Raises ValueError for what cannot be a pointer: nobody waits for a pipe, or reads a device without end."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no regular file")
            content = file.read(POINTER_BYTES + 1)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return _read(path)  # another machine replaced it between opening and reading
    if len(content) > POINTER_BYTES:
        raise ValueError(f"it has more than {POINTER_BYTES:,} bytes")
    return content


def _sound(path: Path, name: str) -> bool:
    """Return whether the version's file is there and whole. It was verified before it got its name."""
    with suppress(ItemSetError):
        return index_file.version(path) == name
    return False


def _copy(index: PathLike, folder: Path, progress: Callable[[int, int], object]) -> str:
    """Copy the index file into the folder and check the copy, while it goes to the disk. Return its name."""
    incoming = folder / _INCOMING
    with incomplete(incoming, 0o444) as descriptor:
        index_file.copy_into(index, descriptor)
        with ThreadPoolExecutor(1) as other:
            written = other.submit(os.fsync, descriptor)
            verify(incoming, name=str(index), progress=progress)
            written.result()
        name = index_file.version(incoming, str(index), checked=False)
        incoming.rename(file_of(folder, name))
    os.close(descriptor)
    _sync(folder)
    return name


def _point(folder: Path, after: Sequence[Version]) -> None:
    pointer = _Pointer(FORMAT, [replace(version, folder=_NO_FOLDER) for version in after])
    content = msgspec.json.format(msgspec.json.encode(pointer)) + b"\n"
    write_whole(folder / POINTER, folder / f"{POINTER}.new", 0o666, [content])
    _sync(folder)


def _sync(folder: Path) -> None:
    """Make the names in a folder lasting."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to do there
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _publishing(folder: Path) -> Iterator[None]:
    """Lock the folder, made if missing, against other publishers. What the system refuses becomes an ItemSetError."""
    try:
        if not folder.is_dir():
            made = [folder, *(one for one in folder.parents if not one.exists())]
            folder.mkdir(parents=True, exist_ok=True)
            for one in made:
                _sync(one.parent)
        with locked(folder / "lock"):
            yield
    except OSError as error:
        raise ItemSetError(
            f"cannot publish to {folder}: {error.strerror}: choose a folder that you can write to, with room"
        ) from error
