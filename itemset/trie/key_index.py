"""A hash table of all keys of a set, made when a first key is looked up."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.trie.jit import compiled


class KeyIndex:
    """Where each key stands among the keys of a set: 6 to 11 bytes a key."""

    def __init__(self, keys: pa.Array) -> None:
        self._columns = _columns(keys)
        self._slots = np.zeros(1 << max(3, (len(self._columns[0]) * 4 // 3).bit_length()), np.uint32)
        _insert(*self._columns, self._slots)

    def places_of(self, given: pa.Array) -> NDArray[np.int64]:
        """Return every place of the given keys, of the same kind as the set's: ascending and distinct."""
        return np.unique(np.array(_find(*self._columns, self._slots, *_columns(given)), np.int64))

    def holds(self, given: pa.Array) -> NDArray[np.bool_]:
        """Return which of these keys, of the same kind, are in the index. Made for many that are not."""
        out = np.zeros(len(given), np.bool_)
        _holds(*self._columns, self._slots, np.zeros(len(self._slots), np.uint8), *_columns(given), out)
        return out


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
def _holds(numbers, text, slots, seen, given, given_text, out):  # type: ignore[no-untyped-def]
    """Set `out` to which of the given keys are there. seen: zeros, a power of two: bits that rule most others out."""
    mask, bits = np.uint64(len(slots) - 1), np.uint64(8 * len(seen) - 1)
    for i in range(_count(numbers, text)):
        bit = _bit(numbers, text, i) & bits
        seen[bit >> np.uint64(3)] |= np.uint8(1 << (bit & np.uint64(7)))
    lowest, highest = (numbers.min(), numbers.max()) if not len(text) else (np.int64(0), np.int64(0))
    for i in range(len(out)):
        if not len(text) and not lowest <= given[i] <= highest:
            continue
        bit = _bit(given, given_text, i) & bits
        if not seen[bit >> np.uint64(3)] >> (bit & np.uint64(7)) & np.uint64(1):
            continue
        at = _hash(given, given_text, i) & mask
        while slots[at] and not out[i]:
            out[i] = _equal(numbers, text, np.int64(slots[at]) - 1, given, given_text, i)
            at = (at + np.uint64(1)) & mask


@compiled
def _bit(numbers, text, i):  # type: ignore[no-untyped-def]
    """Return a hash of a key for a first look: of integers, the quickest that spreads them."""
    if len(text):
        return _hash(numbers, text, i)
    return (np.uint64(numbers[i]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)


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
