"""Items as rows of token ids: any input as one flat array, checked, sorted and folded."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.trie.pointers import compiled, element, put_element

MAX_ITEMS = 2**31 - 1
MAX_ITEM_TOKENS = 65_535  # a prefix length fits in 16 bits
MAX_TOKEN_ID = 2**31 - 2  # engines hold token ids in signed 32 bits; one value stays free for "end of item"


class Rows:
    """N items, one after another.

    tokens: [T], uint16 or uint32 (any integer type at construction).
    offsets: [N + 1], int64, ascending from 0 to T: item i is ``tokens[offsets[i]:offsets[i + 1]]``.
    width: tokens of each item if all have the same number; then no offsets are kept.
    """

    def __init__(self, tokens: NDArray[Any], offsets: NDArray[np.int64] | None = None, *, width: int = 0) -> None:
        if (offsets is None) == (width == 0):
            raise ItemSetError("rows need offsets or a width")
        if width and (tokens.ndim != 1 or width < 0 or len(tokens) % width):
            raise ItemSetError(f"rows of {width} tokens are one array of all, not one of shape {list(tokens.shape)}")
        self.tokens = tokens
        self.layout = (np.zeros(0, np.int64) if offsets is None else offsets, width)
        """What the compiled loops take: the offsets, empty if there is a width, and the width, 0 if there is none."""

    def __len__(self) -> int:
        offsets, width = self.layout
        return len(self.tokens) // width if width else len(offsets) - 1

    @property
    def offsets(self) -> NDArray[np.int64]:
        offsets, width = self.layout
        return np.arange(len(self) + 1, dtype=np.int64) * width if width else offsets

    @property
    def cells(self) -> tuple[int, int, NDArray[np.int64], int]:
        """Return the address of the tokens, which live as long as this does, the bytes of each, and `layout`."""
        return self.tokens.ctypes.data, self.tokens.itemsize, *self.layout

    @property
    def shortest(self) -> int:
        return self.layout[1] or int(np.diff(self.offsets).min())

    @property
    def longest(self) -> int:
        return self.layout[1] or int(np.diff(self.offsets).max())

    def take(self, order: NDArray[Any]) -> "Rows":
        """Return the rows at these positions, in this order."""
        offsets, width = self.layout
        if width:
            return Rows(np.take(self.tokens.reshape(-1, width), order, axis=0).reshape(-1), width=width)
        taken = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.diff(offsets)[order], out=taken[1:])
        tokens = np.empty(int(taken[-1]), self.tokens.dtype)
        _gather(*self.cells[:3], np.asarray(order, np.int64), taken, tokens.ctypes.data)
        return Rows(tokens, taken)


def joined(parts: Sequence[Rows]) -> Rows:
    tokens, widths = np.concatenate([part.tokens for part in parts]), {part.layout[1] for part in parts}
    if len(widths) == 1 and (width := widths.pop()):
        return Rows(tokens, width=width)
    return Rows(tokens, np.append(0, np.cumsum(np.concatenate([np.diff(part.offsets) for part in parts]))))


def as_rows(
    items: Any, vocab_size: int | None = None, *, before: int = 0, name: str = "item {}", first: int | None = None
) -> Rows:
    """Check `items` and return them as rows of uint16, or of uint32 if a token id needs it.

    items: `Rows`, an integer matrix [N, L], or an iterable of token-id sequences of any lengths >= 1.
    before: number of items before these, if they are a part of many. name: what errors call an item, with {} for its
    number, which counts from `first`, or from the first of all.
    Raises ItemSetError: no item, an empty item, an item of more than 65,535 tokens, a value that is no integer,
    a token id below 0, above 2^31 - 2 or >= `vocab_size`.
    """
    if isinstance(items, Rows):
        rows = items
    elif isinstance(items, np.ndarray) and items.ndim == 2:
        rows = Rows(items.reshape(-1), width=items.shape[1]) if items.size else Rows(*_flatten(items.tolist()))
    else:
        rows = Rows(*_flatten(items))
    tokens, (offsets, width) = np.asarray(rows.tokens), rows.layout
    first = before if first is None else first
    if len(rows) < 1:
        raise ItemSetError("the item set is empty: give at least one item")
    if before + len(rows) > MAX_ITEMS:
        raise ItemSetError(f"{before + len(rows):,} items are too many, the limit is {MAX_ITEMS:,}: split the set")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ItemSetError(f"token ids must be integers, not {tokens.dtype}: encode texts with build_text()")
    if width == 0:
        lengths = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != len(tokens) or (lengths < 0).any():
            raise ItemSetError("offsets must ascend from 0 to the number of tokens")
        if not lengths.all():
            empty = first + int(lengths.argmin())
            raise ItemSetError(f"{name.format(empty)} is empty: remove it, an item has at least one token")
        if lengths.max() > MAX_ITEM_TOKENS:
            called = name.format(first + int(lengths.argmax()))
            raise ItemSetError(f"{called} has {lengths.max()} tokens, the limit is {MAX_ITEM_TOKENS}")
    elif width > MAX_ITEM_TOKENS:
        raise ItemSetError(f"the items have {width} tokens, the limit is {MAX_ITEM_TOKENS}")
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else min(vocab_size, MAX_TOKEN_ID + 1)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limit:
        where = int(np.argmax((tokens < 0) | (tokens >= limit)))
        item = where // width if width else int(np.searchsorted(offsets, where, side="right")) - 1
        raise ItemSetError(
            f"{name.format(first + item)} holds token id {int(tokens[where])}, outside the vocabulary 0..{limit - 1}: "
            "use the model's own token ids"
        )
    return Rows(np.ascontiguousarray(tokens, dtype=token_dtype(high)), None if width else offsets, width=width)


def token_dtype(highest: int) -> type[np.uint16] | type[np.uint32]:
    """Return the type in which token ids up to `highest` are stored."""
    return np.uint16 if highest < 2**16 else np.uint32


def _flatten(items: Iterable[Sequence[int]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ItemSetError(f"items must be a matrix or a list of token-id lists, not {type(items).__name__}")
    rows = list(items)
    for i, row in enumerate(rows):
        if isinstance(row, str | bytes) or not hasattr(row, "__len__"):
            raise ItemSetError(
                f"item {i} is {row!r:.60}, not a list of token ids: put each item in a list of its own, "
                "encode texts with build_text()"
            )
    offsets = np.fromiter(accumulate(map(len, rows), initial=0), np.int64, len(rows) + 1)
    flat = list(chain.from_iterable(rows))
    try:
        tokens = np.asarray(flat if flat else np.zeros(0, np.int64))
    except (ValueError, OverflowError) as error:
        raise ItemSetError(f"token ids must be integers: {error}") from error
    if tokens.dtype == np.bool_ or tokens.ndim != 1 or tokens.dtype == object:
        raise ItemSetError("token ids must be integers, and items flat lists of them")
    return tokens, offsets


class Distinct(NamedTuple):
    """The distinct ones of N rows, R of them, ascending."""

    rows: Rows
    # [N], where each stands in the input, those of equal rows in its order; None if it was ascending and distinct.
    order: NDArray[np.uint32] | None
    starts: NDArray[np.uint32] | None  # [R + 1], where each row's begin in `order`; None if no two rows are equal
    lcp: NDArray[np.uint16]  # [R + 1], tokens that each row shares with the one before, 0 at both ends


def sort_unique(rows: Rows) -> Distinct:
    """Sort the rows by their tokens, and fold equal ones."""
    lcp = np.empty(len(rows) + 1, np.uint16)
    verdict = common_prefixes(*rows.cells, lcp)
    if verdict == _ASCENDING:
        return Distinct(rows, None, None, lcp)
    if verdict == _REPEATS:
        order = np.arange(len(rows), dtype=np.uint32)
    else:
        order = sort_order(rows)
        rows = rows.take(order)
        verdict = common_prefixes(*rows.cells, lcp)
    if verdict == _ASCENDING:
        return Distinct(rows, order, None, lcp)
    lengths = rows.layout[1] or np.diff(rows.offsets)[1:]  # a row that begins the one before equals it
    first = np.concatenate((np.ones(1, np.bool_), lcp[1:-1] != lengths))
    starts = np.append(np.flatnonzero(first), len(rows)).astype(np.uint32)
    return Distinct(rows.take(starts[:-1]), order, starts, np.append(lcp[:-1][first], np.uint16(0)))


def sort_order(rows: Rows) -> NDArray[np.uint32]:
    """Return the positions of the rows in ascending order, equal ones in theirs: by 64 bits of tokens at a time."""
    bits = (int(rows.tokens.max()) + 1).bit_length()
    longest = rows.longest

    def sort(members: NDArray[np.uint32], depth: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64], int]:
        """Return the order of `members` by their tokens from `depth` on, their keys in it, and the tokens in a key."""
        index_bits = max(1, (len(members) - 1).bit_length())
        width = min((64 - index_bits) // bits, max(1, longest - depth))
        keys = pack_keys(*rows.cells, members, depth, width, bits, index_bits)
        keys.sort()
        by_key = (keys & np.uint64((1 << index_bits) - 1)).astype(np.uint32)
        keys >>= np.uint64(index_bits)
        return by_key, keys, width

    order, keys, depth = sort(np.arange(len(rows), dtype=np.uint32), 0)
    same = keys[1:] == keys[:-1]
    del keys
    positions, group = _tied(same)
    while len(positions) and depth < longest:
        members = order[positions]
        by_key, keys, width = sort(members, depth)
        keys_of = np.empty_like(keys)
        keys_of[by_key] = keys
        within = _stable_by_group(by_key, group)
        order[positions] = members[within]
        keys, group = keys_of[within], group[within]
        same = (keys[1:] == keys[:-1]) & (group[1:] == group[:-1])
        tied, group = _tied(same)
        positions, depth = positions[tied], depth + width
    return order


def _tied(same: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the elements that have an equal neighbour, and the number of each one's run. same[i]: i + 1 equals i."""
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    return tied, np.append(0, np.cumsum(~same))[tied]


_ASCENDING, _REPEATS, _UNSORTED = 0, 1, 2


@compiled
def bounds(offsets, width, i):  # type: ignore[no-untyped-def]
    """Return where row i starts and ends. offsets, width: as in `Rows.layout`."""
    if width:
        return i * width, (i + 1) * width
    return offsets[i], offsets[i + 1]


@compiled
def grown(array, size):  # type: ignore[no-untyped-def]
    """Return the array, or a copy of it with room for `size` entries."""
    if size <= len(array):
        return array
    larger = np.zeros(2 * size, array.dtype)
    for i in range(len(array)):
        larger[i] = array[i]
    return larger


@compiled
def common_prefixes(tokens, size, offsets, width, lcp):  # type: ignore[no-untyped-def]
    """Fill lcp up to the first row that is out of order; return whether the rows ascend, repeat, or are unsorted."""
    rows = len(lcp) - 1
    verdict = 0
    lcp[0] = 0
    lcp[rows] = 0
    for i in range(1, rows):
        a, b = bounds(offsets, width, i - 1)
        _, end = bounds(offsets, width, i)
        shared = min(b - a, end - b)
        k = 0
        while k < shared and element(tokens, size, a + k) == element(tokens, size, b + k):
            k += 1
        lcp[i] = k
        if k == b - a:  # the earlier row is a prefix of this one, or the same
            if k == end - b:
                verdict = 1
        elif k == end - b or element(tokens, size, b + k) < element(tokens, size, a + k):
            return 2
    return verdict


@compiled
def pack_keys(tokens, size, offsets, width, members, depth, count, bits, index_bits):  # type: ignore[no-untyped-def]
    """Return sort keys, uint64: `count` tokens from `depth` on, the first highest, 0 after the end; then positions."""
    keys, index_mask = np.empty(len(members), np.uint64), (np.uint64(1) << np.uint64(index_bits)) - np.uint64(1)
    for i in range(len(members)):
        start, end = bounds(offsets, width, np.int64(members[i]))
        start += depth
        key = np.uint64(0)
        for k in range(count):
            key <<= np.uint64(bits)
            if start + k < end:
                key |= np.uint64(element(tokens, size, start + k) + 1)
        keys[i] = (key << np.uint64(index_bits)) | (np.uint64(i) & index_mask)
    return keys


@compiled
def _stable_by_group(order, group):  # type: ignore[no-untyped-def]
    """Return the permutation `order` rearranged by the group of each element, groups in ascending order."""
    room = np.zeros(group[-1] + 2, np.int64)
    for g in group:
        room[g + 1] += 1
    room = np.cumsum(room)
    out = np.empty_like(order)
    for i in order:
        out[room[group[i]]] = i
        room[group[i]] += 1
    return out


@compiled
def _gather(tokens, size, offsets, order, out_offsets, out):  # type: ignore[no-untyped-def]
    for i in range(len(order)):
        start, to = offsets[order[i]], out_offsets[i]
        for k in range(out_offsets[i + 1] - to):
            put_element(out, size, to + k, element(tokens, size, start + k))
