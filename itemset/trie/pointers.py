"""The decorator of all compiled loops, and where a set's tables lie in memory, as these take them: plain integers.

Numba counts references of arrays, in helper functions at every edge: reading whole tables took up to 93 times as long.
Integers are of one type, whatever the arrays are, so each loop is compiled once.
"""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

_SOURCES = [path.stat() for path in Path(__file__).parents[1].rglob("*.py")]
SOURCES = max(source.st_mtime_ns for source in _SOURCES), sum(source.st_size for source in _SOURCES)


def compiled(function: Callable[..., Any] | None = None, *, fastmath: Collection[str] = ()) -> Any:
    """Compile as `numba.njit(cache=True, nogil=True)` does, but again when any file of this package changes.

    Numba looks at the function's own file only (numba/core/caching.py). fastmath: LLVM's names for what floats may do.
    """
    if function is None:
        return partial(compiled, fastmath=fastmath)
    dispatcher = numba.njit(cache=True, nogil=True, fastmath=set(fastmath))(function)
    cache_file = getattr(dispatcher._cache, "_cache_file", None)
    if cache_file is not None:  # there is none if no folder for it can be written
        cache_file._source_stamp = SOURCES
    return dispatcher


class Pointers(NamedTuple):
    """Addresses and lengths of the arrays of `Tables`, which must live as long as compiled code reads there."""

    row_offsets: int
    terminal: int
    labels: int
    targets: int
    node_base: int
    tail_base: int
    tails: int
    alive: int  # 0 if there is none
    dead: int
    dead_count: int
    potential: int  # 0 if there is none
    boosted: int
    boosted_count: int
    nodes: int
    edges: int
    level_words: int  # the length of `tail_base`
    tail_words: int  # the length of `tails`
    token_bits: int
    far_block: int
    label_bytes: int  # of an element
    target_bytes: int


def _place(builder: Any, arguments: Any, bits: int) -> Any:
    address, index = arguments[:2]
    return builder.gep(builder.inttoptr(address, ir.IntType(bits).as_pointer()), [index])


def _load(bits: int) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value = builder.load(_place(builder, arguments, bits), align=bits // 8)
        return value if bits == 64 else builder.zext(value, ir.IntType(64))

    return intrinsic(lambda _typing, address, index: (types.int64(types.int64, types.int64), generate))


def _store(bits: int) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value = arguments[2] if bits == 64 else builder.trunc(arguments[2], ir.IntType(bits))
        builder.store(value, _place(builder, arguments, bits), align=bits // 8)
        return context.get_dummy_value()

    kind = types.void(types.int64, types.int64, types.int64)
    return intrinsic(lambda _typing, address, index, value: (kind, generate))


load8, load16, load32, load64 = map(_load, (8, 16, 32, 64))
store16, store32, store64 = map(_store, (16, 32, 64))
"""Element `index` of an array of such words at an address, as an integer of 64 bits; and stores of its lowest bits."""


@intrinsic
def count_ones(_typing: Any, _word: Any) -> Any:
    return types.int64(types.int64), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    """Return the address as the pointer that `carray` takes."""
    kind = types.voidptr(types.int64)
    return kind, lambda _context, builder, _signature, arguments: builder.inttoptr(arguments[0], cgutils.voidptr_t)


@compiled
def array_at(address, length, dtype):  # type: ignore[no-untyped-def]
    """Return the array that lies at an address."""
    return carray(_pointer(address), length, dtype)


@compiled
def pointers_at(address):  # type: ignore[no-untyped-def]
    """Return the pointers that lie at an address, int64 each."""
    return Pointers(
        load64(address, 0), load64(address, 1), load64(address, 2), load64(address, 3), load64(address, 4),
        load64(address, 5), load64(address, 6), load64(address, 7), load64(address, 8), load64(address, 9),
        load64(address, 10), load64(address, 11), load64(address, 12), load64(address, 13), load64(address, 14),
        load64(address, 15), load64(address, 16), load64(address, 17), load64(address, 18), load64(address, 19),
        load64(address, 20),
    )  # fmt: skip


@compiled
def element(address, size, index):  # type: ignore[no-untyped-def]
    """Return an element of an array at an address, of 2 or 4 bytes each."""
    return load16(address, index) if size == 2 else load32(address, index)


@compiled
def put_element(address, size, index, value):  # type: ignore[no-untyped-def]
    """Set an element of an array at an address, of 2 or 4 bytes each."""
    if size == 2:
        store16(address, index, value)
    else:
        store32(address, index, value)


@compiled
def first_from(address, size, low, high, value):  # type: ignore[no-untyped-def]
    """Return the first of the elements low .. high - 1, which ascend, that is no less than `value`; else `high`."""
    while low < high:
        middle = (low + high) >> 1
        if element(address, size, middle) < value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def label(tables, edge):  # type: ignore[no-untyped-def]
    """Return the token of an edge."""
    return element(tables.labels, tables.label_bytes, edge)


@compiled
def first_edge(tables, node):  # type: ignore[no-untyped-def]
    """Return the first edge of a node; of the number of nodes, the number of edges."""
    return load32(tables.row_offsets, node)


@compiled
def bit(address, place):  # type: ignore[no-untyped-def]
    """Return a bit of a bitmap of 32-bit words."""
    return load32(address, place >> 5) >> (place & 31) & 1


@compiled
def set_bit(address, place):  # type: ignore[no-untyped-def]
    """Set a bit of a bitmap of 32-bit words."""
    or32(address, place >> 5, np.int64(1) << (place & 31))


@compiled
def or32(address, index, bits):  # type: ignore[no-untyped-def]
    """Set those of a word of 32 bits that are set in the lowest ones of `bits`."""
    store32(address, index, load32(address, index) | bits)
