"""A round of races in Triton. What each function does, and its arguments, is said in `torch_races`.

As in `triton_expand`, a program looks at all that may follow one beam, or at some children of one race; no launch
depends on what a tensor holds.
"""

from __future__ import annotations

import struct
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from itemset.masking import triton_tables as tables
from itemset.masking.arena import Arena
from itemset.ranking import clocks, torch_expand, torch_races
from itemset.ranking.torch_expand import Found, Rows, Rules
from itemset.ranking.torch_races import Looked, Racing, merged
from itemset.ranking.triton_expand import (
    _ANY_ADDRESS,
    _ANY_VALUE,
    _NOTHING,
    _alive,
    _child_at,
    _key_of,
    _may_end,
    _token,
)

__all__ = ["best", "looked", "merged", "went_on"]

CHILDREN = 256  # children that one program looks at, or at once
BEAMS = 64  # beams that one program goes on with
WARPS = 4

_jit = tables.jit(
    [*_ANY_VALUE, "power"], [*_ANY_ADDRESS, "logs", "earliest", "end_logs", "parents", "new_keys", "new_logs"]
)
_GOLDEN = tl.constexpr(torch_races._GOLDEN)
_FIRST = tl.constexpr(torch_races._FIRST)
_SECOND = tl.constexpr(torch_races._SECOND)
_NOBODY = tl.constexpr(clocks.NOBODY)
_TOKEN = tl.constexpr(clocks.TOKEN)
_INFINITE = tl.constexpr(float("inf"))


def looked(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, found: Found, offsets: Tensor, size: int,
    wanted: int, taken: int, rules: Rules,
) -> Looked:
    lists, count, queries = sums.shape
    flat = logits.view(-1, logits.shape[2])
    earliest, scores, logs = torch.empty(3, lists, count, dtype=torch.float64, device=logits.device)
    _looked_kernel[(lists * count,)](
        arena.words, arena.sets, flat, flat.stride(0), flat.shape[1], sums,
        rows.states, rows.scores, rows.first, rows.degrees, rows.tails, rows.tokens, racing.logs, racing.keys,
        found.scores, earliest, scores, logs,
        rows.scores.shape[1], count, queries, found.scores.shape[1], rows.tokens.shape[2], taken, rules.end_token,
        _bits(racing.power),
        WHOLE=rules.whole, LANES=CHILDREN, num_warps=WARPS,
    )
    return Looked(earliest, scores, logs)


def candidates(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, start: int, size: int,
    rules: Rules, *, racing: Racing, look: Looked,
) -> Tensor:
    """As `torch_expand.candidates`, by when children ring: [1, L, size]."""
    lists, count, queries = sums.shape
    flat = logits.view(-1, logits.shape[2])
    keys = torch.empty(1, lists, size, dtype=torch.int64, device=logits.device)
    _candidates_kernel[(-(-size // CHILDREN), lists)](
        arena.words, arena.sets, flat, flat.stride(0), flat.shape[1], sums,
        rows.states, rows.scores, rows.first, rows.degrees, offsets, racing.logs, racing.keys, look.earliest,
        found.scores, keys,
        rows.scores.shape[1], count, queries, found.scores.shape[1], start, size, count.bit_length(),
        _bits(racing.power),
        WHOLE=rules.whole, LANES=CHILDREN, num_warps=WARPS,
    )
    return keys


def best(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, look: Looked, found: Found, offsets: Tensor,
    size: int, wanted: int, rules: Rules,
) -> tuple[Tensor, Tensor]:
    keys_of = partial(candidates, racing=racing, look=look)
    return torch_expand.best(arena, logits, sums, rows, found, offsets, size, wanted, rules, keys_of)


def went_on(new: Rows, rows: Rows, racing: Racing, look: Looked, taken: int) -> tuple[Rows, Racing]:
    (lists, width), longest = new.scores.shape, new.tokens.shape[2]
    scores, keys = torch.empty_like(new.scores), torch.empty_like(new.parents)
    _went_on_kernel[(-(-width // BEAMS), lists)](
        new.scores, new.parents, new.tokens, rows.scores, racing.logs, racing.keys, look.earliest, scores, keys,
        width, look.earliest.shape[1], longest, taken, _bits(racing.power),
        LANES=BEAMS, num_warps=1,
    )
    return new._replace(scores=scores), Racing(new.scores, keys, racing.power)


def _bits(power: float) -> int:
    """A float64 as a kernel takes it: a number with a point would be a float32 there."""
    bits: int = struct.unpack("<q", struct.pack("<d", power))[0]
    return bits


@_jit
def _looked_kernel(
    words, sets, logits, logits_stride, vocabulary, sums,
    states, scores, first, degrees, tails, tokens, logs, keys, found_scores, earliest, ends, end_logs,
    width, count, queries, k, longest, taken, end_token, power,
    WHOLE: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    one = row // count
    beam = one * width + row % count
    power = power.to(tl.float64, bitcast=True)
    score = tl.load(scores + beam)
    live = score > tl.load(found_scores + one * k + k - 1)
    state = tl.load(states + beam)
    fields = tables.set_fields(sets, state)
    may_end = live & _may_end(words, fields, state & tables.LOCAL, fields[tables.DEAD_COUNT])
    begin, degree = tl.load(first + beam), tl.where(live, tl.load(degrees + beam), 0)
    at = row * queries
    key, sum_here = tl.load(keys + beam), tl.load(sums + at).to(tl.float64)

    lane = tl.arange(0, LANES)
    part = tl.zeros((LANES,), tl.float64)
    near = tl.full((LANES,), _INFINITE, tl.float64)
    for low in range(0, degree, LANES):
        child = low + lane
        token = _token(words, fields, begin + child, child < degree, WHOLE)
        inside = _alive(words, fields, begin + child, child < degree, WHOLE) & (token < vocabulary)
        logit = tl.load(logits + at * logits_stride + token, mask=inside, other=-_INFINITE)
        share = power * (logit.to(tl.float64) - sum_here)
        part += tl.where(inside, tl.exp(share), 0.0)
        near = tl.minimum(near, tl.where(inside, _time(_mixed(key, token + _TOKEN), share), _INFINITE))
    total, nearest = tl.sum(part, 0), tl.min(near, 0)

    clock, mass = -score, power * tl.load(logs + beam)
    here = tl.minimum(nearest, _nobody(key, total))
    steps = tl.where(may_end, tl.load(tails + beam), -1) + 1
    for column in range(0, steps):
        token = tl.load(tokens + beam * longest + taken + column, mask=column < steps - 1, other=0)
        token = tl.where(column < steps - 1, token, end_token)
        logit = tl.load(logits + (at + column) * logits_stride + token, mask=token < vocabulary, other=-_INFINITE)
        share = power * (logit.to(tl.float64) - tl.load(sums + at + column))
        after = _mixed(key, token + _TOKEN)
        time = _time(after, share)
        # What follows is certain but at the first step, which children may share.
        now = tl.minimum(time, _nobody(key, tl.exp(share) + tl.where(column == 0, total, 0.0)))
        now = tl.where(column == 0, tl.minimum(now, nearest), now)
        here = tl.where(column == 0, now, here)
        clock = _later(clock, time, now, mass)
        mass += share
        key = after
    tl.store(earliest + row, here)
    tl.store(ends + row, tl.where(may_end & (clock == clock), -clock, -_INFINITE))
    tl.store(end_logs + row, tl.where(may_end, mass / power, 0.0))


@_jit
def _candidates_kernel(
    words, sets, logits, logits_stride, vocabulary, sums,
    states, scores, first, degrees, offsets, logs, keys, earliest, found_scores, out,
    width, count, queries, k, start, size, steps, power,
    WHOLE: tl.constexpr, LANES: tl.constexpr,
):
    one = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    power = power.to(tl.float64, bitcast=True)
    low, edge, inside = _child_at(first, degrees, offsets, one, width, count, column, start, size, steps, LANES)
    beam, row = one * width + low, one * count + low
    fields = tables.set_fields(sets, tl.load(states + one * width))
    token = _token(words, fields, edge, inside, WHOLE)
    inside = _alive(words, fields, edge, inside, WHOLE) & (token < vocabulary)
    logit = tl.load(logits + row * queries * logits_stride + token, mask=inside, other=-_INFINITE)
    share = power * (logit.to(tl.float64) - tl.load(sums + row * queries, mask=inside, other=0))
    time = _time(_mixed(tl.load(keys + beam, mask=inside, other=0), token + _TOKEN), share)
    clock = -tl.load(scores + beam, mask=inside, other=-_INFINITE)
    mass = power * tl.load(logs + beam, mask=inside, other=0)
    score = -_later(clock, time, tl.load(earliest + row, mask=inside, other=0), mass)
    better = inside & (score > tl.load(found_scores + one * k + k - 1))
    tl.store(out + one * size + column, tl.where(better, _key_of(score, edge), _NOTHING), mask=column < size)


@_jit
def _went_on_kernel(
    new_logs, parents, tokens, scores, logs, keys, earliest, new_scores, new_keys,
    width, count, longest, taken, power,
    LANES: tl.constexpr,
):
    one = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    power = power.to(tl.float64, bitcast=True)
    beam, exists = one * width + lane, lane < width
    log = tl.load(new_logs + beam, mask=exists, other=-_INFINITE)
    live = log > -_INFINITE
    at = tl.load(parents + beam, mask=live, other=0)
    token = tl.load(tokens + beam * longest + taken, mask=live, other=0)
    before = tl.load(logs + one * width + at, mask=live, other=0)
    key = _mixed(tl.load(keys + one * width + at, mask=live, other=0), token + _TOKEN)
    here = tl.load(earliest + one * count + at, mask=live, other=0)
    clock = -tl.load(scores + one * width + at, mask=live, other=0)
    clock = _later(clock, _time(key, power * (log - before)), here, power * before)
    tl.store(new_scores + beam, tl.where(live, -clock, -_INFINITE), mask=exists)
    tl.store(new_keys + beam, tl.where(live, key, 0), mask=exists)


@triton.jit
def _mixed(key, n):
    """As `clocks.mixed`, on int64."""
    z = key + (n + 1) * _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _log_exponential(bits):
    """As `clocks.log_exponential`."""
    unit = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.0**-52
    return tl.log(-tl.log(unit))


@triton.jit
def _time(key, share):
    """When what has such a share rings, by its key: never if it has none."""
    return tl.where(share > -_INFINITE, _log_exponential(key) - share, _INFINITE)


@triton.jit
def _nobody(key, total):
    """As `torch_races._nobody`."""
    left = tl.where(total < 1.0, tl.log(1.0 - tl.minimum(total, 1.0)), -_INFINITE)
    return _log_exponential(_mixed(key, _NOBODY)) - left


@triton.jit
def _later(clock, time, earliest, mass):
    """As `numba_races._clock`."""
    after = tl.where(time > earliest, time + tl.log(1.0 - tl.exp(tl.minimum(earliest - time, 0.0))), -_INFINITE) - mass
    apart = tl.log(1.0 + tl.exp(-tl.abs(clock - after)))
    return tl.where(time < _INFINITE, tl.maximum(clock, after) + apart, _INFINITE)
