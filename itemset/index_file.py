"""The index file: a checked prelude, a header that describes itself, then raw aligned arrays.

Prelude, 32 bytes: magic (8), format version (uint32), header length (uint32), file length (uint64), CRC-32 of the
header and of the prelude up to here (uint32), zero (uint32). The header is JSON. All numbers are little-endian.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.text import TokenizerId

FORMAT = 1
_MAGIC = b"ITEMSET\n"
_PRELUDE = struct.Struct("<8sIIQII")
_ALIGN = 64
_DTYPES = {"uint8", "uint16", "uint32", "int64"}


@dataclass(frozen=True)
class Section:
    """One array: `count` values of `dtype` from byte `offset` of the file on, with their CRC-32."""

    name: str
    dtype: str
    count: int
    offset: int
    crc32: int


@dataclass(frozen=True)
class Header:
    """What the file says of itself. `digest` names the tables' content: equal sets have equal digests."""

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
    digest: str
    sections: tuple[Section, ...] = ()


def _encode(header: Header, arrays: dict[str, NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """The file in pieces."""
    import msgspec

    parts = {name: np.ascontiguousarray(array).view(np.uint8).data for name, array in arrays.items()}
    checksums = {name: zlib.crc32(part) for name, part in parts.items()}

    def layout(start: int) -> tuple[Section, ...]:
        sections, offset = [], start
        for name, array in arrays.items():
            sections.append(Section(name, array.dtype.name, array.size, offset, checksums[name]))
            offset = _aligned(offset + parts[name].nbytes)
        return tuple(sections)

    # The offsets stand in the header, so it is laid out for a start that surely lies behind it.
    probe = msgspec.json.encode(replace(header, sections=layout(1 << 48)))
    start = _aligned(_PRELUDE.size + len(probe))
    sections = layout(start)
    body = msgspec.json.encode(replace(header, sections=sections)).ljust(start - _PRELUDE.size)
    size = max(section.offset + parts[section.name].nbytes for section in sections)
    unchecked = _PRELUDE.pack(_MAGIC, FORMAT, len(body), size, 0, 0)[:24]
    yield unchecked + struct.pack("<II", zlib.crc32(body, zlib.crc32(unchecked)), 0)
    yield body
    position = start
    for section in sections:
        yield bytes(section.offset - position)
        yield parts[section.name]
        position = section.offset + parts[section.name].nbytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def to_bytes(header: Header, arrays: dict[str, NDArray[Any]]) -> bytes:
    """The whole file in memory."""
    return b"".join(_encode(header, arrays))


def write(path: str | os.PathLike[str], header: Header, arrays: dict[str, NDArray[Any]]) -> None:
    """Write the file under a name of its own, or no name at all where the system can, and put it in place at once.

    Raises ItemSetError where the folder is missing or not writable.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a build that was killed
        descriptor, nameless = _open_nameless(path.parent, temporary)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                for piece in _encode(header, arrays):
                    file.write(piece)
                file.flush()
                os.fsync(descriptor)
            if nameless:
                # Python follows the link only where a folder's descriptor is given; an absolute path ignores it.
                os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor, follow_symlinks=True)
            os.replace(temporary, path)
        finally:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ItemSetError(f"cannot write {path}: {error.strerror}: choose a folder you can write to") from error


def _open_nameless(folder: Path, temporary: Path) -> tuple[int, bool]:
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o644), True
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), False


def read(path: str | os.PathLike[str]) -> tuple[Header, dict[str, NDArray[Any]]]:
    """Map the file into memory. Raises ItemSetError as `parse` does, or where there is no such file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError as error:
        raise ItemSetError(f"{path}: no such file: build it with `itemset build`") from error
    except IsADirectoryError as error:
        raise ItemSetError(f"{path} is a directory, not an index file: name the file in it") from error
    except OSError as error:
        raise ItemSetError(f"{path}: cannot be read: {error.strerror}") from error
    return parse(buffer, str(path))


def parse(buffer: bytes | mmap.mmap, name: str) -> tuple[Header, dict[str, NDArray[Any]]]:
    """Header and read-only arrays over `buffer`, which they keep alive. Section checksums are left to `check`.

    Raises ItemSetError: not an index file, another format version, truncated, or a header that does not fit itself.
    """
    import msgspec

    again = "build it again with `itemset build`"
    if bytes(buffer[: len(_MAGIC)]) != _MAGIC[: len(buffer)] or not len(buffer):
        raise ItemSetError(f"{name} is not an item-set index: give a file that `itemset build` wrote")
    if len(buffer) < _PRELUDE.size:
        raise ItemSetError(f"{name} is truncated, it has {len(buffer)} bytes: {again}")
    _, version, header_size, size, crc, _ = _PRELUDE.unpack_from(buffer)
    if version != FORMAT:
        mend = "upgrade static-backend" if version > FORMAT else again
        raise ItemSetError(
            f"{name} has the {'newer' if version > FORMAT else 'older'} format version {version}, "
            f"this is version {FORMAT}: {mend}"
        )
    if len(buffer) < size:
        raise ItemSetError(f"{name} is truncated, it has {len(buffer):,} of {size:,} bytes: {again}")
    body = bytes(buffer[_PRELUDE.size : _PRELUDE.size + header_size])
    if len(buffer) != size or zlib.crc32(body, zlib.crc32(bytes(buffer[:24]))) != crc:
        raise ItemSetError(f"{name} is corrupted, its header does not match its checksum: {again}")
    try:
        header = msgspec.json.decode(body, type=Header)
        arrays = {}
        for section in header.sections:
            room = len(buffer) - section.offset
            if section.dtype not in _DTYPES or section.offset % _ALIGN or section.offset < 0:
                raise ValueError(f"section {section.name}")
            if not 0 <= section.count * np.dtype(section.dtype).itemsize <= room:
                raise ValueError(f"section {section.name} has no room")
            array = np.frombuffer(buffer, section.dtype, section.count, section.offset)
            array.flags.writeable = False
            arrays[section.name] = array
    except (msgspec.MsgspecError, ValueError) as error:
        raise ItemSetError(f"{name} is corrupted, its header is not valid ({error}): {again}") from error
    return header, arrays


def check(header: Header, arrays: dict[str, NDArray[Any]], name: str) -> None:
    """Read every section and compare it with its checksum; raises ItemSetError that names the section."""
    for section in header.sections:
        if zlib.crc32(arrays[section.name].data) != section.crc32:
            raise ItemSetError(
                f"{name} is corrupted, section {section.name} does not match its checksum: "
                "build it again with `itemset build`"
            )
