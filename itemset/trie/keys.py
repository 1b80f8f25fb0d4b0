"""The caller's own keys of the items: integers or strings, one or several for each item."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.errors import AGAIN, ItemSetError, shown
from itemset.trie.pointers import compiled, load8, load64

KeyList = Iterable[int] | Iterable[str] | NDArray[Any]
Test = Callable[[NDArray[Any]], NDArray[np.bool_]]  # which of these places pass


@dataclass(frozen=True)
class Keys:
    """The keys of all items, in the order of the item numbers; those of one item in the order of the input."""

    values: pa.Array  # [K] int64 or large_string
    starts: NDArray[np.uint32] | None = None  # [items + 1], where each item's begin; None if each item has one

    base: "Keys | None" = None  # of a view: whose keys they are
    test: Test | None = None  # which places pass
    own_bytes: int = 0  # what the test keeps

    def first(self, numbers: NDArray[np.int64]) -> NDArray[np.int64] | list[str]:
        if self.test is not None and self.starts is not None:
            first = pa.array([keys[0] for keys in self.every(numbers)], self.values.type)
            return _taken(first, np.arange(len(first)))
        return _taken(self.values, numbers if self.starts is None else self.starts[numbers])

    def every(self, numbers: NDArray[np.int64]) -> list[list[int | str]]:
        places, counts = self.places_at(numbers)
        keys: Any = _taken(self.values, places)
        each = iter(keys if isinstance(keys, list) else keys.tolist())
        return [list(islice(each, count)) for count in counts]

    def places_at(self, numbers: NDArray[np.int64]) -> tuple[NDArray[Any], list[int]]:
        """Return the places of these items' keys that pass, item by item, and how many each item has."""
        places, starts = in_item_order(numbers, self.starts)
        if starts is None or not len(numbers):
            return places, [1] * len(places)
        passes = self.passes(places)
        return places[passes], np.add.reduceat(passes.astype(np.int64), starts[:-1].astype(np.int64)).tolist()

    def numbers_of(self, given: KeyList) -> NDArray[np.int64]:
        """Return the first item of each given key. Raises ItemSetError for one not there."""
        values = _as_keys_of(self.values, given)
        # One pass over all keys, but in a view, which comes with a request and whose base has an index.
        rows = np.flatnonzero(are_among(self.values, values)) if self.base is None else self.places_of(values)
        first = pc.index_in(values, value_set=self.values.take(pa.array(rows)))
        if first.null_count:
            what = "item" if self.base is None else "item of the view"
            raise ItemSetError(f"no {what} has the key {values.filter(first.is_null())[0].as_py()!r}")
        return self.owners(rows[first.to_numpy()])

    def owners(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.starts is None:
            return places
        return np.searchsorted(self.starts, places.astype(np.uint32), side="right") - 1  # other types would copy it

    def places_of(self, given: KeyList) -> NDArray[np.int64]:
        """Return every place of these keys, ascending. Raises ItemSetError for what is no list of their type."""
        values = pc.unique(_as_keys_of(self.values, given))
        if not len(values):
            return np.zeros(0, np.int64)
        found = _find(*_addresses(self.values), len(self.values), self._index, *_addresses(values), len(values))
        places = np.sort(np.array(found, np.int64))
        return places[self.passes(places)]

    @functools.cached_property
    def _index(self) -> NDArray[np.uint32]:
        """Return a hash table that finds keys, of 10 to 15 bytes a key. Making it takes 0.1 s for a million, once.

        Of each key, a slot has the last place plus one; after the slots, each place has so the one before, else 0.
        """
        if self.base is not None:
            return self.base._index
        index = np.zeros((1 << max(3, (len(self.values) * 4 // 3).bit_length())) + len(self.values), np.uint32)
        _insert(*_addresses(self.values), len(self.values), index)
        return index

    def gone(self, removed: KeyList, *, missing_ok: bool) -> NDArray[np.bool_]:
        """Return which places hold a key that is removed.

        Raises ItemSetError for keys of another type, and unless `missing_ok` for keys that are not there.
        """
        given = _as_keys_of(self.values, removed)
        gone = are_among(self.values, given)
        missing = [] if missing_ok else given.filter(pc.invert(pc.is_in(given, self.values.filter(pa.array(gone)))))
        if len(missing):
            distinct = pc.unique(missing)
            raise ItemSetError(
                f"{len(distinct):,} of the keys to remove are not in the set, such as {_some(distinct)}: correct the "
                "list, or allow it (--missing-ok, in Python missing_ok=True)"
            )
        return gone

    def added(self, keys: KeyList | None, items: int, gone: NDArray[np.bool_]) -> pa.Array:
        """Return the keys of as many new items. By default they go on from the highest integer.

        gone: which places do not stay. Raises ItemSetError as `as_keys`, and for keys of another type, or such as stay.
        """
        if keys is None:
            if not pa.types.is_integer(self.values.type):
                raise ItemSetError("the keys of this set are strings: give the new items keys, too")
            first = pc.max(self.values).as_py() + 1
            return as_keys(range(first, first + items), items)
        values = as_keys(keys, items)
        double = self.values.filter(pa.array(are_among(self.values, _as_keys_of(self.values, values)) & ~gone))
        if len(double):
            raise ItemSetError(
                f"{len(pc.unique(double)):,} of the new keys are in the set, such as {_some(double)}: give others, or "
                "remove them in the same update, which replaces their items"
            )
        return values

    def passes(self, places: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether the key at each place is one of the set: in a view, some are not."""
        return np.ones(len(places), np.bool_) if self.test is None else self.test(places)

    @staticmethod
    def from_sections(sections: dict[str, NDArray[Any]], items: int) -> "Keys":
        """Return the keys of as many items over the file's own memory. Raises ValueError if they do not fit."""
        if "keys" in sections:
            if sections["keys"].dtype != np.int64:
                raise ValueError("its keys are no integers of 64 bits")
            numbers = sections["keys"]  # by `pa.array` or `to_numpy` PyArrow would import pandas
            values = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])
        else:
            offsets, text = sections["key_offsets"], sections["key_text"]
            if offsets.dtype != np.int64 or text.dtype != np.uint8 or not len(offsets):
                raise ValueError("its keys are no text")
            if offsets[0] != 0 or offsets[-1] > len(text) or np.any(offsets[1:] < offsets[:-1]):
                raise ValueError("its keys overlap")
            values = pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text))
        starts = sections.get("key_starts")
        fits = len(values) == items
        if starts is not None:
            fits = starts.dtype == np.uint32 and len(starts) == items + 1 and not np.any(starts[1:] <= starts[:-1])
            fits = fits and starts[0] == 0 and starts[-1] == len(values)
        if not fits:
            raise ValueError("its number of items does not fit its keys")
        return Keys(values, starts)


def in_item_order(
    members: NDArray[Any], starts: NDArray[np.uint32] | None
) -> tuple[NDArray[Any], NDArray[np.uint32] | None]:
    """Return the place of each key of these items, item after item, and where each begins. starts: as of `Keys`."""
    if starts is None:
        return members, None
    first, counts = starts[members], starts[members + 1] - starts[members]
    begins = np.zeros(len(members) + 1, np.uint32)
    np.cumsum(counts, out=begins[1:])
    # Differences of unsigned numbers wrap around, and so do the sums: the results are right.
    return np.arange(begins[-1], dtype=np.uint32) + np.repeat(first - begins[:-1], counts), begins


def as_keys(keys: KeyList, items: int) -> pa.Array:
    """Return one key for each item of the input, as an int64 or large_string array.

    Raises ItemSetError: more or fewer keys than items, a missing key, or neither all integers nor all strings.
    """
    try:
        array = pa.array(keys if isinstance(keys, np.ndarray | list | pa.Array) else list(keys))
        array = array.cast(pa.int64()) if pa.types.is_integer(array.type) else array
    except OverflowError as error:
        raise ItemSetError("a key is an integer of more than 64 bits: give such keys as strings") from error
    except (pa.ArrowException, UnicodeEncodeError) as error:  # the last: half of a surrogate pair
        raise ItemSetError(f"keys must be all integers or all strings: {error}") from error
    if len(array) != items:
        raise ItemSetError(f"{len(array)} keys for {items} items: give one key for each item")
    if array.null_count:
        raise ItemSetError(f"key {pc.index(pc.is_null(array), True).as_py()} is missing: give every item a key")
    if pa.types.is_integer(array.type):
        return array
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return array.cast(pa.large_string())
    raise ItemSetError(f"keys must be integers or strings, not {str(array.type)[:60]}")


def _taken(keys: pa.Array, places: NDArray[Any]) -> NDArray[np.int64] | list[str]:
    """Return the keys at these places, each 0 .. keys - 1. Raises ItemSetError if a damaged one is no text."""
    taken: Any = keys.take(pa.array(places))
    try:
        return taken.to_numpy() if pa.types.is_integer(taken.type) else taken.to_pylist()
    except UnicodeDecodeError as error:
        raise ItemSetError(f"the index is corrupted, a key is no text: {AGAIN}") from error


def _some(keys: pa.Array) -> str:
    return ", ".join(shown(key) for key in keys[:5].to_pylist())


def _as_keys_of(keys: pa.Array, given: KeyList) -> pa.Array:
    """Return given keys as an array of the type of `keys`. Raises ItemSetError for keys of another type."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ItemSetError(f"keys must be a list, not {shown(given)}: put it in a list")
    listed = given if isinstance(given, np.ndarray | pa.Array) else list(given)
    if not len(listed):
        return keys[:0]
    if isinstance(listed, list) and None in listed:
        raise ItemSetError("a key is missing (null): leave it out of the list")
    values = as_keys(listed, len(listed))
    if values.type != keys.type:
        ours, theirs = ("integers" if pa.types.is_integer(one.type) else "strings" for one in (keys, values))
        raise ItemSetError(f"the keys of this set are {ours}, not {theirs} such as {shown(values[0].as_py())}")
    return values


_TABLE = 1 << 20  # entries that a table of integers may always have
_SLICE = 1 << 16  # numbers that are looked up at a time


def are_among(array: pa.Array, values: pa.Array) -> NDArray[np.bool_]:
    """Return which values are among some of their type, never a missing one; close integers by a table: it is fast."""
    if pa.types.is_integer(array.type) and len(values):
        low, high = pc.min_max(values).as_py().values()
        if high - low < max(_TABLE, 8 * len(array)):
            table, first = np.zeros(high - low + 2, np.bool_), np.uint64(low % 2**64)
            table[(values.to_numpy().astype(np.uint64) - first).view(np.int64)] = True
            numbers = np.frombuffer(array.buffers()[1], str(array.type))[array.offset : array.offset + len(array)]
            among = np.empty(len(array), np.bool_)
            for part in (slice(at, at + _SLICE) for at in range(0, len(array), _SLICE)):
                # Differences wrap around: those of numbers below the first are the largest.
                places = np.minimum(numbers[part].astype(np.uint64) - first, np.uint64(len(table) - 1))
                among[part] = table[places.view(np.int64)]
            return among & valid(array) if array.null_count else among
    return bools(pc.is_in(array, value_set=values))


def are_row_numbers(keys: pa.Array) -> bool:
    """Return whether the keys are 0 .. keys - 1, each once, as they are by default."""
    if not pa.types.is_integer(keys.type) or tuple(pc.min_max(keys).as_py().values()) != (0, len(keys) - 1):
        return False
    return bool(np.bincount(keys.to_numpy(), minlength=len(keys)).all())


def bools(array: pa.BooleanArray) -> NDArray[np.bool_]:
    """Return a result of Arrow's, false if it is missing."""
    rows = _bits(array.buffers()[1], array)
    return rows & valid(array) if array.null_count else rows


def valid(array: pa.Array) -> NDArray[np.bool_]:
    return _bits(array.buffers()[0], array) if array.null_count else np.ones(len(array), np.bool_)


def _bits(buffer: pa.Buffer, array: pa.Array) -> NDArray[np.bool_]:
    start, skipped = array.offset >> 3, array.offset & 7
    packed = np.frombuffer(buffer, np.uint8)[start:]
    return np.unpackbits(packed, count=skipped + len(array), bitorder="little")[skipped:].view(np.bool_)


def values_to_sections(keys: pa.Array) -> dict[str, NDArray[Any]]:
    """Return the arrays that hold these keys in a file."""
    if pa.types.is_integer(keys.type):
        return {"keys": np.frombuffer(keys.buffers()[1], np.int64, len(keys), keys.offset * 8)}
    starts, buffer = keys.buffers()[1:]
    offsets = np.frombuffer(starts, np.int64, len(keys) + 1, keys.offset * 8)
    text = np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
    first, end = offsets[0], offsets[-1]  # a gathered array may share its buffers with another
    return {"key_offsets": offsets - first if first else offsets, "key_text": text[first:end]}


def _addresses(keys: pa.Array) -> tuple[int, int]:
    """Return where keys lie, for compiled loops: the integers and 0, or the offsets and the text."""
    _, numbers, *text = keys.buffers()
    there = text[0].address if text and text[0] else len(text)  # of empty strings alone, nothing is read there
    return numbers.address + 8 * keys.offset, there


@compiled
def _insert(numbers, text, count, index):  # type: ignore[no-untyped-def]
    for i in range(count):
        at = _slot(numbers, text, count, index, numbers, text, i)
        if index[at]:
            index[len(index) - count + i] = index[at]
        index[at] = i + 1


@compiled
def _find(numbers, text, count, index, given, given_text, wanted):  # type: ignore[no-untyped-def]
    places = [np.int64(0) for _ in range(0)]
    for i in range(wanted):
        after = np.int64(index[_slot(numbers, text, count, index, given, given_text, i)])
        while after:
            places.append(after - 1)
            after = np.int64(index[len(index) - count + after - 1])
    return places


@compiled
def _slot(numbers, text, count, index, given, given_text, i):  # type: ignore[no-untyped-def]
    """Return the slot of given key i, an empty one if it is not there."""
    mask = np.uint64(len(index) - count - 1)
    at = _hash(given, given_text, i) & mask
    while index[at] and not _equal(numbers, text, np.int64(index[at]) - 1, given, given_text, i):
        at = (at + np.uint64(1)) & mask
    return at


@compiled
def _hash(numbers, text, i):  # type: ignore[no-untyped-def]
    """Return a key's hash: its number, or its length and bytes, with the bits spread as MurmurHash3 does at its end."""
    value = np.uint64(load64(numbers, i))
    if text:
        value = np.uint64(load64(numbers, i + 1)) - value
        for k in range(load64(numbers, i), load64(numbers, i + 1)):
            value = (value ^ np.uint64(load8(text, k))) * np.uint64(0x100000001B3)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@compiled
def _equal(numbers, text, i, others, other_text, k):  # type: ignore[no-untyped-def]
    begin, other = load64(numbers, i), load64(others, k)
    if not text:
        return begin == other
    length = load64(numbers, i + 1) - begin
    if load64(others, k + 1) - other != length:
        return False
    for j in range(length):  # noqa: SIM110 - compiled
        if load8(text, begin + j) != load8(other_text, other + j):
            return False
    return True
