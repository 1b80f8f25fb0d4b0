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
    keys = pa.concat_arrays([keys])  # a gathered array may share buffers with another; this one starts at offset 0
    offsets, text = keys.buffers()[1:]
    count = len(keys) + 1
    return {
        "key_offsets": np.frombuffer(offsets, np.int64, count, keys.offset * 8),
        "key_text": np.frombuffer(text, np.uint8) if text is not None else np.zeros(0, np.uint8),
    }


def from_sections(sections: dict[str, NDArray[Any]]) -> pa.Array:
    """The keys over the file's own memory."""
    if "keys" in sections:
        return pa.array(sections["keys"])
    offsets, text = sections["key_offsets"], sections["key_text"]
    if offsets[0] != 0 or offsets[-1] > len(text) or np.any(np.diff(offsets) < 0):
        raise ItemSetError("the index is corrupted, its keys overlap: build it again with `itemset build`")
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text))


def positions_of(keys: pa.Array, wanted: Iterable[int] | Iterable[str] | NDArray[Any]) -> NDArray[np.int64]:
    """Where each wanted key stands first. Raises ItemSetError for a key that is not there.

    One pass over `keys`, with a hash table of the wanted ones.
    """
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
