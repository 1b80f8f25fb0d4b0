"""Items as rows of token ids: any input brought into one flat array, checked, sorted and folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError

MAX_ITEM_TOKENS = 65_535  # a prefix length fits in 16 bits
MAX_TOKEN_ID = 2**31 - 2  # engines hold token ids in signed 32 bits; one value stays free for "end of item"


@dataclass(frozen=True)
class Rows:
    """N items, one after another.

    tokens: [T], uint16 or uint32 (any integer type at construction), item i is ``tokens[offsets[i]:offsets[i + 1]]``.
    offsets: [N + 1], int64, ascending from 0 to T.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def take(self, order: NDArray[np.int64]) -> Rows:
        """The rows `order` names, in that order."""
        lengths = self.lengths[order]
        offsets = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        tokens = np.empty(int(offsets[-1]), self.tokens.dtype)
        _gather(self.tokens, self.offsets, order, offsets, tokens)
        return Rows(tokens, offsets)


def as_rows(items: Any, vocab_size: int | None = None) -> Rows:
    """Check `items` and bring them into the narrowest of uint16 and uint32.

    items: `Rows`, an integer matrix [N, L], or an iterable of token-id sequences of any lengths >= 1.
    Raises ItemSetError: no item, an empty item, an item of more than 65,535 tokens, a value that is no integer,
    a token id below 0, above 2^31 - 2 or >= `vocab_size`.
    """
    if isinstance(items, Rows):
        tokens, offsets = np.asarray(items.tokens), np.asarray(items.offsets, np.int64)
        if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) < 0):
            raise ItemSetError("offsets must ascend from 0 to the number of tokens")
    elif isinstance(items, np.ndarray) and items.ndim == 2:
        tokens = items.reshape(-1)
        offsets = np.arange(items.shape[0] + 1, dtype=np.int64) * items.shape[1]
    else:
        tokens, offsets = _flatten(items)
    if len(offsets) < 2:
        raise ItemSetError("the item set is empty: give at least one item")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ItemSetError(f"token ids must be integers, not {tokens.dtype}: encode texts with build_text()")
    lengths = np.diff(offsets)
    if (shortest := int(lengths.argmin())) >= 0 and lengths[shortest] == 0:
        raise ItemSetError(f"item {shortest} is empty: remove it, an item has at least one token")
    if lengths[longest := int(lengths.argmax())] > MAX_ITEM_TOKENS:
        raise ItemSetError(f"item {longest} has {lengths[longest]} tokens, the limit is {MAX_ITEM_TOKENS}")
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else min(vocab_size, MAX_TOKEN_ID + 1)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limit:
        where = int(np.argmax((tokens < 0) | (tokens >= limit)))
        item = int(np.searchsorted(offsets, where, side="right")) - 1
        raise ItemSetError(
            f"item {item} holds token id {int(tokens[where])}, outside the vocabulary 0..{limit - 1}: "
            "use the model's own token ids"
        )
    return Rows(np.ascontiguousarray(tokens, dtype=token_dtype(high)), offsets)


def token_dtype(highest: int) -> type[np.uint16] | type[np.uint32]:
    """The type that token ids up to `highest` are stored in."""
    return np.uint16 if highest < 2**16 else np.uint32


def _flatten(items: Iterable[Sequence[int]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ItemSetError(f"items must be a matrix or a list of token-id lists, not {type(items).__name__}")
    rows = list(items)
    for i, row in enumerate(rows):
        if isinstance(row, str | bytes) or not hasattr(row, "__len__"):
            raise ItemSetError(f"item {i} is {row!r:.60}, not a list of token ids: encode texts with build_text()")
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    flat = list(chain.from_iterable(rows))
    try:
        tokens = np.asarray(flat if flat else np.zeros(0, np.int64))
    except (ValueError, OverflowError) as error:
        raise ItemSetError(f"token ids must be integers: {error}") from error
    if tokens.dtype == np.bool_ or tokens.ndim != 1 or tokens.dtype == object:
        raise ItemSetError("token ids must be integers, and items flat lists of them")
    return tokens, offsets


def sort_unique(rows: Rows) -> tuple[Rows, NDArray[np.int64] | None, NDArray[np.uint16]]:
    """Sort the rows by their tokens and fold equal ones (the first of the input stays).

    Returns the sorted distinct rows; their positions in the input [N], None where the input was sorted and distinct
    already; and lcp [N + 1], uint16: lcp[i] = tokens that row i shares with row i - 1, 0 at both ends.
    """
    lcp = np.empty(len(rows) + 1, np.uint16)
    verdict = _common_prefixes(rows.tokens, rows.offsets, lcp)
    if verdict == _ASCENDING:
        return rows, None, lcp
    order = np.arange(len(rows)) if verdict == _REPEATS else _sort_order(rows)
    rows = rows.take(order) if verdict != _REPEATS else rows
    if _common_prefixes(rows.tokens, rows.offsets, lcp) == _ASCENDING:
        return rows, order, lcp
    lengths = rows.lengths
    first = np.empty(len(rows), np.bool_)
    first[0] = True
    np.not_equal(lengths[1:], lengths[:-1], out=first[1:])
    first[1:] |= lcp[1:-1] != lengths[1:]
    starts = np.flatnonzero(first)
    kept = rows.take(starts)
    lcp = np.append(lcp[:-1][first], np.uint16(0))
    return kept, np.minimum.reduceat(order, starts), lcp


def _sort_order(rows: Rows) -> NDArray[np.int64]:
    """Positions of the rows in ascending order: argsort of the first tokens packed in 64 bits, then of the next
    ones, for the rows that are still tied."""
    bits = (int(rows.tokens.max()) + 1).bit_length()
    width = 64 // bits
    everything = np.arange(len(rows))
    key = _pack_keys(rows.tokens, rows.offsets, everything, 0, width, bits)
    order = np.argsort(key)
    key = key[order]
    tied = _runs(key[1:] == key[:-1])
    positions, depth, longest = np.flatnonzero(tied), width, int(rows.lengths.max())
    group = key[positions]
    while len(positions) and depth < longest:
        members = order[positions]
        key = _pack_keys(rows.tokens, rows.offsets, members, depth, width, bits)
        by_key = np.lexsort((key, group))
        order[positions] = members[by_key]
        key, group = key[by_key], group[by_key]
        same = (key[1:] == key[:-1]) & (group[1:] == group[:-1])
        tied = _runs(same)
        # Groups stay in order, so the running number of the first of each run names it from now on.
        group = np.cumsum(np.append(True, ~same))[tied]
        positions, depth = positions[tied], depth + width
    return order


def _runs(same: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Members of a run of equals, from `same[i]`: element i + 1 equals element i."""
    tied = np.zeros(len(same) + 1, np.bool_)
    tied[1:] = same
    tied[:-1] |= same
    return tied


_ASCENDING, _REPEATS, _UNSORTED = 0, 1, 2


@numba.njit(cache=True)
def _common_prefixes(tokens, offsets, lcp):  # type: ignore[no-untyped-def]
    """Fill lcp for the rows as they stand, up to the first that is out of order; say whether they ascend strictly,
    ascend with repeats, or are unsorted."""
    rows = len(offsets) - 1
    verdict = 0
    lcp[0] = 0
    lcp[rows] = 0
    for i in range(1, rows):
        a, b, end = offsets[i - 1], offsets[i], offsets[i + 1]
        shared = min(b - a, end - b)
        k = 0
        while k < shared and tokens[a + k] == tokens[b + k]:
            k += 1
        lcp[i] = k
        if k == b - a:  # the earlier row is a prefix of this one, or the same
            if k == end - b and verdict == 0:
                verdict = 1
        elif k == end - b or tokens[b + k] < tokens[a + k]:
            return 2
    return verdict


@numba.njit(cache=True)
def _pack_keys(tokens, offsets, members, depth, width, bits):  # type: ignore[no-untyped-def]
    """Tokens depth .. depth + width of each member, highest first, 0 after the item's end: [members] uint64."""
    keys = np.empty(len(members), np.uint64)
    for i in range(len(members)):
        start, end = offsets[members[i]] + depth, offsets[members[i] + 1]
        key = np.uint64(0)
        for k in range(width):
            key <<= np.uint64(bits)
            if start + k < end:
                key |= np.uint64(tokens[start + k]) + np.uint64(1)
        keys[i] = key
    return keys


@numba.njit(cache=True)
def _gather(tokens, offsets, order, out_offsets, out):  # type: ignore[no-untyped-def]
    for i in range(len(order)):
        start, size, to = offsets[order[i]], out_offsets[i + 1] - out_offsets[i], out_offsets[i]
        for k in range(size):
            out[to + k] = tokens[start + k]
