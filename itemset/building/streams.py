"""A source's bytes and its text: decompressed, decoded, and how much of it has been read."""

import bz2
import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

from itemset.errors import ItemSetError
from itemset.storage import SourceFile

_OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".zst": lambda file: io.BufferedReader(pa.CompressedInputStream(file, "zstd")),
}
COMPRESSIONS = tuple(_OPENERS)
_EMPTY_BYTES = 1 << 10  # that nothing may take when it is compressed, with a name
_MARKS = (  # the longest first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def format_of(source: SourceFile) -> str:
    """Return the suffix that says a file's format: of films.csv.gz it is .csv."""
    path = PurePosixPath(source.path.lower())
    return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix


@contextmanager
def opened(source: SourceFile) -> Iterator[tuple[BinaryIO, Callable[[], float]]]:
    """Open a file, decompressed. Yields it, and a function that returns which share of the file has been read."""
    with source.open() as file:
        opener = _OPENERS.get(PurePosixPath(source.path.lower()).suffix)
        yield cast(BinaryIO, opener(file)) if opener else file, lambda: file.tell() / source.size


def encoding_of(source: SourceFile, given: str | None) -> str:
    """Return the encoding given, that of a byte order mark, or UTF-8. Raises ItemSetError for an unknown one, or UTF-16
    without a mark."""
    name = None
    if given is not None:
        try:
            "".encode(given)  # refuses also what encodes no text, such as hex
            name = codecs.lookup(given).name
        except LookupError as error:
            raise ItemSetError(f"unknown encoding {given!r}: give one such as latin-1 or utf-16") from error
    with opened(source) as (file, _):
        head = file.read(4096)
    for mark, encoding in _MARKS:
        if head.startswith(mark) and (name is None or name.startswith(f"{encoding}-")):
            return encoding  # which drops the mark: utf-16-le would not
    if name is not None:
        return name
    if b"\0" in head:
        mend = "save it as UTF-8, or give its encoding (--encoding utf-16-le, in a source ?encoding=utf-16-le)"
        raise ItemSetError(f"{source} holds NUL bytes: {mend}")
    return "utf-8"


def not_decoded(encoding: str) -> str:
    """Return what is wrong with a row, and the mend."""
    if encoding != "utf-8":
        return f"is not {encoding}: give the file's own encoding, or save it as UTF-8"
    return "is not UTF-8: save it as UTF-8, or give its encoding (--encoding latin-1, in a source ?encoding=latin-1)"


@contextmanager
def text_of(source: SourceFile, encoding: str) -> Iterator[tuple[io.TextIOWrapper, Callable[[], float]]]:
    """Open a file as text with its own line ends. Bytes that are not in the encoding become lone surrogates."""
    with opened(source) as (file, share):
        name = "utf-8-sig" if encoding == "utf-8" else encoding
        yield io.TextIOWrapper(file, name, "surrogateescape", newline=""), share


def line_blocks(source: SourceFile, encoding: str, size: int) -> Iterator[tuple[bytes, float]]:
    """Yield a file in blocks of whole lines of UTF-8, without a byte order mark, and the share up to their end."""
    if encoding != "utf-8":
        with text_of(source, encoding) as (text, share):
            while part := text.read(size) + text.readline():
                yield part.encode("utf-8", "surrogateescape"), share()
        return
    with opened(source) as (file, share):
        first = True
        while lines := file.read(size) + file.readline():
            yield lines.removeprefix(codecs.BOM_UTF8) if first else lines, share()
            first = False


@contextmanager
def guarded(source: SourceFile) -> Iterator[None]:
    """Turn what is raised as a file is read into ItemSetErrors. Raises one also if it changes."""
    try:
        yield
    except pa.ArrowException as error:
        raise ItemSetError(f"{source} cannot be read: {error}") from error
    except UnicodeError as error:
        raise ItemSetError(f"{source} {not_decoded(getattr(error, 'encoding', ''))}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ItemSetError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    source.check_unchanged()


def is_empty(source: SourceFile) -> bool:
    """Return whether a file holds nothing, also once it is decompressed. Raises ItemSetError if it cannot be read."""
    if source.size > _EMPTY_BYTES or not source.size:
        return not source.size
    with guarded(source), opened(source) as (file, _):
        return not file.read(1)
