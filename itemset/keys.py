"""The caller's own keys of the items: integers or strings, one an item, kept in the order of the item numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.errors import ItemSetError


def as_keys(keys: Iterable[int] | Iterable[str] | NDArray[Any], items: int) -> pa.Array:
    """An int64 or large_string array of one key an item.

    Raises ItemSetError: as many keys as items are needed, all integers or all strings.
    """
    try:
        array = pa.array(keys if isinstance(keys, np.ndarray | list | pa.Array) else list(keys))
    except (pa.ArrowException, OverflowError) as error:
        raise ItemSetError(f"keys must be all integers or all strings: {error}") from error
    if len(array) != items:
        raise ItemSetError(f"{len(array)} keys for {items} items: give one key for each item")
    if array.null_count:
        raise ItemSetError(f"key {pc.index(pc.is_null(array), True).as_py()} is missing: give every item a key")
    if pa.types.is_integer(array.type):
        return array.cast(pa.int64())
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return array.cast(pa.large_string())
    raise ItemSetError(f"keys must be integers or strings, not {array.type}")


def to_sections(keys: pa.Array) -> dict[str, NDArray[Any]]:
    """The arrays that stand for the keys in a file."""
    if pa.types.is_integer(keys.type):
        return {"keys": keys.to_numpy(zero_copy_only=False)}
    starts, buffer = keys.buffers()[1:]
    offsets = np.frombuffer(starts, np.int64, len(keys) + 1, keys.offset * 8)
    text = np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
    first, end = offsets[0], offsets[-1]  # a gathered array may share its buffers with another
    return {"key_offsets": offsets - first if first else offsets, "key_text": text[first:end]}


def from_sections(sections: dict[str, NDArray[Any]]) -> pa.Array:
    """The keys over the file's own memory. Raises ValueError where the sections do not fit each other."""
    if "keys" in sections:
        if sections["keys"].dtype != np.int64:
            raise ValueError("its keys are no integers of 64 bits")
        return pa.array(sections["keys"])
    offsets, text = sections["key_offsets"], sections["key_text"]
    if offsets.dtype != np.int64 or text.dtype != np.uint8 or not len(offsets):
        raise ValueError("its keys are no text")
    if offsets[0] != 0 or offsets[-1] > len(text) or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError("its keys overlap")
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text))


def keys_at(keys: pa.Array, positions: NDArray[np.int64]) -> NDArray[np.int64] | list[str]:
    """The keys at these positions, each 0 .. keys - 1. Raises ItemSetError where a damaged file holds no text."""
    found = keys.take(pa.array(positions))
    try:
        taken: NDArray[np.int64] | list[str]
        taken = found.to_numpy() if pa.types.is_integer(found.type) else found.to_pylist()
        return taken
    except UnicodeDecodeError as error:
        raise ItemSetError("the index is corrupted, a key is no text: build it again with `itemset build`") from error


def positions_of(keys: pa.Array, wanted: Iterable[int] | Iterable[str] | NDArray[Any]) -> NDArray[np.int64]:
    """Where each wanted key stands first. Raises ItemSetError for a key that is not there.

    One pass over `keys`, with a hash table of the wanted ones.
    """
    if isinstance(wanted, str | bytes):
        raise ItemSetError(f"keys must be a list, not the one key {wanted!r}: put it into a list")
    asked = wanted if isinstance(wanted, np.ndarray) else list(wanted)
    values = as_keys(asked, len(asked))
    if values.type != keys.type:
        raise ItemSetError(f"the keys of this set are of type {keys.type}, not {values.type}")
    distinct = pc.unique(values)
    hits = pc.index_in(keys, value_set=distinct)
    rows = np.flatnonzero(hits.is_valid().to_numpy(zero_copy_only=False))
    which = hits.take(pa.array(rows)).to_numpy(zero_copy_only=False).astype(np.int64)
    first = np.full(len(distinct), -1, np.int64)
    first[which[::-1]] = rows[::-1]
    found: NDArray[np.int64] = first[pc.index_in(values, value_set=distinct).to_numpy(zero_copy_only=False)]
    if (missing := np.flatnonzero(found < 0)).size:
        raise ItemSetError(f"no item has the key {values[int(missing[0])].as_py()!r}")
    return found
