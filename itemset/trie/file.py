"""The index file: a checked prelude, a header that describes itself, then raw aligned arrays.

Prelude, 32 bytes, little-endian: magic (8), format version (uint32), header length (uint32), file length (uint64),
CRC-32 of the header and of the prelude up to here (uint32), zero (uint32). Header: JSON, padded to 64 bytes.
"""

import errno
import hashlib
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from itemset.errors import AGAIN, ItemSetError
from itemset.storage import PathLike, fetch, fetched, file_at, is_uri, write_whole
from itemset.text import Escape, TokenizerId

FORMAT = 1
MAGIC = b"ITEMSET\n"
_PRELUDE = struct.Struct("<8sIIQII")
_ALIGN = 64
_PIECE = 1 << 25  # bytes that are read between two looks at the time
_DTYPES = {"uint8", "uint16", "uint32", "uint64", "int64"}


@dataclass(frozen=True)
class Section:
    """One array: `count` values of `dtype`, their CRC-32, and their first byte, counted from the end of the header."""

    name: str
    dtype: str
    count: int
    offset: int
    crc32: int


@dataclass(frozen=True)
class Header:
    """What the file says of itself. Equal sets have equal digests, whatever their keys."""

    items: int
    duplicates: int
    shortest: int
    longest: int
    level_nodes: tuple[int, ...]
    level_edges: tuple[int, ...]
    tail_tokens: int
    token_bits: int
    vocab_size: int | None
    tokenizer: TokenizerId | None
    prefix: str
    escape: Escape | None
    digest: str
    sections: tuple[Section, ...] = ()


def _encode(header: Header, arrays: dict[str, NDArray[Any]]) -> Iterator[bytes | memoryview]:
    import msgspec  # which loops on another machine do without

    parts = {name: np.ascontiguousarray(array).view(np.uint8).data for name, array in arrays.items()}
    sections, size = [], 0
    for name, array in arrays.items():
        sections.append(Section(name, array.dtype.name, array.size, _aligned(size), zlib.crc32(parts[name])))
        size = _aligned(size) + parts[name].nbytes
    body = msgspec.json.encode(replace(header, sections=tuple(sections)))
    body = body.ljust(_aligned(_PRELUDE.size + len(body)) - _PRELUDE.size)
    unchecked = _PRELUDE.pack(MAGIC, FORMAT, len(body), _PRELUDE.size + len(body) + size, 0, 0)[:24]
    yield unchecked + struct.pack("<II", zlib.crc32(body, zlib.crc32(unchecked)), 0)
    yield body
    end = 0
    for section in sections:
        yield bytes(section.offset - end)
        yield parts[section.name]
        end = section.offset + parts[section.name].nbytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def to_bytes(header: Header, arrays: dict[str, NDArray[Any]]) -> bytes:
    return b"".join(_encode(header, arrays))


def write(path: PathLike, header: Header, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a file as a whole or not at all. Raises ItemSetError if the folder is missing or not writable."""
    path = Path(path)
    try:
        write_whole(path, path.with_name(f".{path.name}.tmp"), 0o644, _encode(header, arrays))
    except OSError as error:
        raise ItemSetError(f"cannot write {path}: {error.strerror}: choose a folder you can write to") from error


def open_file(path: PathLike) -> BinaryIO:
    """Open an index file; of a URI, a nameless copy. Raises ItemSetError: missing, no plain file, or not readable."""
    if is_uri(path):
        return fetched(path)
    try:
        mode = os.stat(path).st_mode  # before it is opened: a pipe would wait for a writer
        if stat.S_ISDIR(mode):
            raise ItemSetError(f"{path} is a directory, not an index file: name the file in it")
        if not stat.S_ISREG(mode):
            raise ItemSetError(f"{path} is a pipe, a socket or a device: give a file that `itemset build` wrote")
        return open(path, "rb")
    except FileNotFoundError as error:
        raise ItemSetError(f"{path}: no such file: build it with `itemset build`") from error
    except OSError as error:
        raise ItemSetError(f"{path}: cannot be read: {error.strerror}") from error


def copy_into(path: PathLike, target: int) -> None:
    """Copy an index file to a descriptor, sharing its blocks where it can. Raises as `open_file` and OSError."""
    if is_uri(path):
        fetch(path, target)
        return
    with open_file(path) as source, open(target, "wb", closefd=False) as file:
        try:
            while hasattr(os, "copy_file_range") and os.copy_file_range(source.fileno(), target, 1 << 30):
                pass  # Linux only
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
        while piece := os.read(source.fileno(), 1 << 20):  # what is left: nothing, or all of it
            file.write(piece)


def read(path: PathLike, name: str = "") -> tuple[Header, dict[str, NDArray[Any]]]:
    """Map the file into memory. name: for errors; its path by default. Raises as `open_file` and `parse` do."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    return parse(buffer, name or str(path))


def version(path: PathLike, name: str = "", *, checked: bool = True) -> str:
    """Check the file, and return the hash, in hex, of its prelude and header, which hold the checksums of all else.

    checked: else only the header is read. The file is not mapped: if it is cut meanwhile, that is an error and not the
    end of the process. Raises ItemSetError as `open_file`, `parse` and `check` do.
    """
    name = name or str(path)
    try:
        with file_at(path).open() if is_uri(path) and not checked else open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            start = file.read(_PRELUDE.size)
            start += file.read(_header_size(start))
            header = _parse_header(start, size, name)
            if checked:
                with ThreadPoolExecutor(2) as pool:
                    right = pool.map(partial(_is_right, file.fileno(), len(start)), header.sections)
                    for section, is_right in zip(header.sections, right, strict=True):
                        if not is_right:
                            raise _damaged(name, section)
    except OSError as error:
        raise ItemSetError(f"{name}: cannot be read: {error.strerror or error}") from error
    return hashlib.blake2b(start, digest_size=16).hexdigest()


def _is_right(descriptor: int, start: int, section: Section) -> bool:
    """Read a section of a file whose header ends at byte `start`, and return whether it has its checksum."""
    piece = memoryview(bytearray(1 << 20))
    crc, at = 0, start + section.offset
    end = at + section.count * np.dtype(section.dtype).itemsize
    while at < end and (count := os.preadv(descriptor, [piece[: end - at]], at)):
        crc, at = zlib.crc32(piece[:count], crc), at + count
    return at == end and crc == section.crc32


def parse(buffer: bytes | mmap.mmap, name: str) -> tuple[Header, dict[str, NDArray[Any]]]:
    """Return the header, and read-only arrays that keep `buffer` alive. Section checksums are left to `check`.

    Raises ItemSetError: not an index file, another format version, truncated, or a header that does not fit itself.
    """
    start = bytes(buffer[: _PRELUDE.size])
    start += bytes(buffer[_PRELUDE.size : _PRELUDE.size + _header_size(start)])
    header, arrays = _parse_header(start, len(buffer), name), {}
    for section in header.sections:
        arrays[section.name] = np.frombuffer(buffer, section.dtype, section.count, len(start) + section.offset)
        arrays[section.name].flags.writeable = False
    return header, arrays


def _header_size(prelude: bytes) -> int:
    return int(_PRELUDE.unpack(prelude)[2]) if len(prelude) == _PRELUDE.size else 0


def _parse_header(start: bytes, length: int, name: str) -> Header:
    """Return the header of a file of `length` bytes. start: its prelude and header."""
    if start[: len(MAGIC)] != MAGIC[: len(start)] or not start:
        raise ItemSetError(f"{name} is not an item-set index: give a file that `itemset build` wrote")
    if len(start) < _PRELUDE.size:
        raise ItemSetError(f"{name} is truncated, it has {length} bytes: {AGAIN}")
    _, format_version, _, size, crc, _ = _PRELUDE.unpack_from(start)
    if format_version != FORMAT:
        age, mend = ("newer", "upgrade static-backend") if format_version > FORMAT else ("older", AGAIN)
        raise ItemSetError(f"{name} has the {age} format version {format_version}, this is version {FORMAT}: {mend}")
    if length < size:
        raise ItemSetError(f"{name} is truncated, it has {length:,} of {size:,} bytes: {AGAIN}")
    body = start[_PRELUDE.size :]
    if length != size or len(start) % _ALIGN or zlib.crc32(body, zlib.crc32(start[:24])) != crc:
        raise ItemSetError(f"{name} is corrupted, its header does not match its checksum: {AGAIN}")
    import msgspec

    try:
        header = msgspec.json.decode(body, type=Header)
        for section in header.sections:
            if section.dtype not in _DTYPES or section.offset % _ALIGN or section.offset < 0:
                raise ValueError(f"section {section.name}")
            if not 0 <= section.count * np.dtype(section.dtype).itemsize <= length - len(start) - section.offset:
                raise ValueError(f"section {section.name} has no room")
    except (msgspec.MsgspecError, ValueError) as error:
        raise ItemSetError(f"{name} is corrupted, its header is not valid ({error}): {AGAIN}") from error
    return header


def pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """Yield the bytes of an array, some megabytes at a time, so that a bar can show how many have been read."""
    for start in range(0, array.nbytes, _PIECE):
        yield memoryview(array.data).cast("B")[start : start + _PIECE]


def check(
    header: Header, arrays: dict[str, NDArray[Any]], name: str, on_read: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Raise ItemSetError for the first section that differs from its checksum. on_read: called with bytes read."""
    for section in header.sections:
        crc = 0
        for piece in pieces(arrays[section.name]):
            crc = zlib.crc32(piece, crc)
            on_read(len(piece))
        if crc != section.crc32:
            raise _damaged(name, section)


def _damaged(name: str, section: Section) -> ItemSetError:
    return ItemSetError(f"{name} is corrupted, section {section.name} does not match its checksum: {AGAIN}")
