"""Finding keys: a hash table of all keys of a set, made when a first one is looked up; which of many are among some."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.trie.jit import compiled

_TABLE = 1 << 20  # entries that a table of integers may always have


class KeyIndex:
    """Where each key stands among the keys of a set: 6 to 11 bytes a key."""

    def __init__(self, keys: pa.Array) -> None:
        self._columns = _columns(keys)
        self._slots = np.zeros(1 << max(3, (len(self._columns[0]) * 4 // 3).bit_length()), np.uint32)
        _insert(*self._columns, self._slots)

    def places_of(self, given: pa.Array) -> NDArray[np.int64]:
        """Return every place of the given keys, of the same kind as the set's: ascending and distinct."""
        return np.unique(np.array(_find(*self._columns, self._slots, *_columns(given)), np.int64))


def are_among(array: pa.Array, values: pa.Array) -> NDArray[np.bool_]:
    """Return which values of an array are among some of its type; a missing one is not.

    Of integers that lie close together a table says it, which is several times faster than Arrow's `is_in`.
    """
    if pa.types.is_integer(array.type) and len(values):
        low, high = pc.min_max(values).as_py().values()
        if high - low < max(_TABLE, 8 * len(array)):
            table, first = np.zeros(high - low + 2, np.bool_), np.uint64(low % 2**64)
            table[(values.to_numpy().astype(np.uint64) - first).view(np.int64)] = True
            numbers = np.frombuffer(array.buffers()[1], str(array.type))[array.offset : array.offset + len(array)]
            # Differences wrap around: those of numbers below the first are the largest.
            places = np.minimum(numbers.astype(np.uint64) - first, np.uint64(len(table) - 1))
            among: NDArray[np.bool_] = table[places.view(np.int64)]
            return among & valid(array) if array.null_count else among
    return bools(pc.is_in(array, value_set=values))


def bools(array: pa.BooleanArray) -> NDArray[np.bool_]:
    """Return a result of Arrow's, false if it is missing."""
    rows = _bits(array.buffers()[1], array)
    return rows & valid(array) if array.null_count else rows


def valid(array: pa.Array) -> NDArray[np.bool_]:
    """Return which values are there."""
    return _bits(array.buffers()[0], array) if array.null_count else np.ones(len(array), np.bool_)


def _bits(buffer: pa.Buffer, array: pa.Array) -> NDArray[np.bool_]:
    start, skipped = array.offset >> 3, array.offset & 7
    packed = np.frombuffer(buffer, np.uint8)[start:]
    return np.unpackbits(packed, count=skipped + len(array), bitorder="little")[skipped:].view(np.bool_)


def values_to_sections(keys: pa.Array) -> dict[str, NDArray[Any]]:
    """Return the arrays that hold these keys in a file."""
    if pa.types.is_integer(keys.type):
        return {"keys": keys.to_numpy(zero_copy_only=False)}
    starts, buffer = keys.buffers()[1:]
    offsets = np.frombuffer(starts, np.int64, len(keys) + 1, keys.offset * 8)
    text = np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
    first, end = offsets[0], offsets[-1]  # a gathered array may share its buffers with another
    return {"key_offsets": offsets - first if first else offsets, "key_text": text[first:end]}


def _columns(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return integers and no text, or offsets and text; read-only, as a mapped file's are, for loops of one kind."""
    columns = list(values_to_sections(keys).values())
    if len(columns) == 1:
        columns.append(np.zeros(0, np.uint8))
    elif not len(columns[1]):  # without text, the offsets would be taken for integers
        columns[1] = np.zeros(1, np.uint8)
    numbers, text = (column.view() for column in columns)
    numbers.flags.writeable = text.flags.writeable = False
    return numbers, text


@compiled
def _insert(numbers, text, slots):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(slots) - 1)
    for i in range(_count(numbers, text)):
        at = _hash(numbers, text, i) & mask
        while slots[at]:
            at = (at + np.uint64(1)) & mask
        slots[at] = i + 1


@compiled
def _find(numbers, text, slots, given, given_text):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(slots) - 1)
    places = [np.int64(0)]
    places.clear()
    for i in range(_count(given, given_text)):
        at = _hash(given, given_text, i) & mask
        while slots[at]:  # a key may be there several times, one after another
            place = np.int64(slots[at]) - 1
            if _equal(numbers, text, place, given, given_text, i):
                places.append(place)
            at = (at + np.uint64(1)) & mask
    return places


@compiled
def _count(numbers, text):  # type: ignore[no-untyped-def]
    return len(numbers) - 1 if len(text) else len(numbers)


@compiled
def _hash(numbers, text, i):  # type: ignore[no-untyped-def]
    if not len(text):
        return _mixed(np.uint64(numbers[i]))
    value = np.uint64(numbers[i + 1] - numbers[i])
    for k in range(numbers[i], numbers[i + 1]):
        value = (value ^ np.uint64(text[k])) * np.uint64(0x100000001B3)
    return _mixed(value)


@compiled
def _mixed(value):  # type: ignore[no-untyped-def]
    """Spread the bits of a number: the finish of MurmurHash3."""
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@compiled
def _equal(numbers, text, i, others, other_text, k):  # type: ignore[no-untyped-def]
    if not len(text):
        return numbers[i] == others[k]
    length = numbers[i + 1] - numbers[i]
    if others[k + 1] - others[k] != length:
        return False
    for j in range(length):  # noqa: SIM110 - compiled
        if text[numbers[i] + j] != other_text[others[k] + j]:
            return False
    return True
