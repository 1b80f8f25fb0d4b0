"""The best keys of each list in one launch, in Triton: a radix select on 64 bits, then each key finds its own place.

A program has one list. It reads the keys once for each digit, of eight at most, from the highest on, until it knows
which key is the last of the best. torch's `topk` of integers takes several launches, and sorts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from itemset.ranking import triton_reads as reads

LANES, ITEMS, OTHERS, WARPS = 1024, 32, 128, 8  # keys read at once; keys placed at once, and compared with at once
MOST_KEYS, MOST_WANTED = 1 << 16, 1 << 10  # of a list, beyond which several programs are faster than one
_DIGIT = tl.constexpr(8)
_BINS = tl.constexpr(1 << 8)
_SIGN = tl.constexpr(-(1 << 63))  # turned, integers compare as their digits do


def best_keys(keys: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Return the `wanted` greatest keys of each list, best first, and their places: each [any, lists, wanted] int64.

    keys: [any, lists, size] int64, contiguous, at least `wanted`. Equal keys stand in the order of their places.
    """
    if keys.shape[2] > MOST_KEYS or wanted > MOST_WANTED:
        return keys.topk(wanted)
    kinds, lists, size = keys.shape
    found = torch.empty(4, kinds, lists, wanted, dtype=torch.int64, device=keys.device)
    select_kernel[(kinds * lists,)](
        keys, found, size, wanted, kinds * lists, LANES=LANES, ITEMS=ITEMS, OTHERS=OTHERS, num_warps=WARPS
    )
    return found[2], found[3]


@reads.kernel
def select_kernel(
    keys, found, size, wanted, lists, LANES: tl.constexpr, ITEMS: tl.constexpr, OTHERS: tl.constexpr
):
    one = tl.program_id(0).to(tl.int64)
    mine = keys + one * size
    last, left = _last_of_the_best(mine, size, wanted, LANES)
    plane = lists * wanted
    some = found + one * wanted  # the best in the order of their places, then sorted, each with its place
    seen, equal = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for low in range(0, size, LANES):
        lane = low + tl.arange(0, LANES)
        key = tl.load(mine + lane, mask=lane < size, other=reads.NOTHING)
        is_last = (lane < size) & (key == last)
        taken = (lane < size) & (key > last)
        taken = taken | (is_last & (equal + tl.cumsum(is_last.to(tl.int32), 0) <= left))
        place = seen + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(some + place, key, mask=taken)
        tl.store(some + plane + place, lane.to(tl.int64), mask=taken)
        seen += tl.sum(taken.to(tl.int32), 0)
        equal += tl.sum(is_last.to(tl.int32), 0)
    tl.debug_barrier()
    for low in range(0, wanted, ITEMS):
        item = low + tl.arange(0, ITEMS)
        key = tl.load(some + item, mask=item < wanted, other=0)
        rank = tl.zeros((ITEMS,), tl.int32)
        for first in range(0, wanted, OTHERS):
            other = first + tl.arange(0, OTHERS)[None, :]
            before = tl.load(some + other, mask=other < wanted, other=0)
            earlier = (before > key[:, None]) | ((before == key[:, None]) & (other < item[:, None]))
            rank += tl.sum((earlier & (other < wanted)).to(tl.int32), 1)
        at = tl.load(some + plane + item, mask=item < wanted, other=0)
        tl.store(some + 2 * plane + rank, key, mask=item < wanted)
        tl.store(some + 3 * plane + rank, at, mask=item < wanted)


@triton.jit
def _last_of_the_best(keys, size, wanted, LANES: tl.constexpr):
    """Return the key that stands last among the best, or one below it and above all others, and how many of its equals
    are among these."""
    prefix, left = tl.zeros((), tl.int64), wanted
    bins = tl.arange(0, _BINS)
    digit = tl.zeros((), tl.int32)
    while digit < 64 // _DIGIT:
        shift = 64 - _DIGIT * (digit + 1)
        counts = tl.zeros((_BINS,), tl.int32)
        for low in range(0, size, LANES):
            lane = low + tl.arange(0, LANES)
            key = tl.load(keys + lane, mask=lane < size, other=0) ^ _SIGN
            above = tl.where(digit == 0, 0, (key ^ prefix) >> tl.minimum(shift + _DIGIT, 63))
            value = ((key >> shift) & (_BINS - 1)).to(tl.int32)
            counts += tl.histogram(value, _BINS, mask=(lane < size) & (above == 0))
        from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # how many have this digit or a higher one
        chosen = tl.max(tl.where(from_here >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins > chosen, counts, 0), 0)
        prefix |= chosen.to(tl.int64) << shift
        # If all that have these digits are among the best, no further one matters: scores seldom share four of them.
        all_taken = tl.sum(tl.where(bins == chosen, counts, 0), 0) == left
        digit = tl.where(all_taken, 64 // _DIGIT, digit + 1)
    return prefix ^ _SIGN, left
