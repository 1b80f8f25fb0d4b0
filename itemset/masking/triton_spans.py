"""How a kernel in Triton masks a span of one row's logits, wherever in the row it lies: for `triton_kernels`."""

import triton
import triton.language as tl

from itemset.masking import triton_tables as tables

NEAR = tl.constexpr(16)  # columns that are written at once, from a multiple of as many on; what is beyond, one by one
_NEAR_BITS = tl.constexpr((1 << 16) - 1)


@triton.jit
def mask_span(
    words, sets, fields, state, row_marks, has_marks, logits, offset, low, high,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Mask the logits from `low` to `high` of the row that begins at `offset`."""
    logits += offset
    if ALIGNED:
        logits = tl.multiple_of(logits, 16)
    local = state & tables.LOCAL
    if (local < tables.WAITING) | (local >= tables.END):
        ended = local == tables.END
        first, count, tail_token, may_end = local * 0, local * 0, local * 0 - 1, ended
        if local >= tables.TAIL:
            tail_token, _ = tables.tail_entry(words, fields, local, True)
        elif local < tables.WAITING:
            may_end = tables.ends_here(words, fields, local)
            first, end = tables.row_bounds(words, fields, local)
            count = end - first
        may_end = may_end & has_marks
        # What follows an end has its columns saved and written back, whoever overwrites them.
        stop_lane = tl.arange(0, STOP_LANES)
        stop = tl.load(row_marks + 1 + stop_lane, mask=(stop_lane < STOPS) & may_end, other=-1)
        stop_stays = (stop >= low) & (stop < high)
        kept_stop = tl.load(logits + stop, mask=stop_stays)
        kept_stop = tl.where(ended & (kept_stop == -float("inf")), 0.0, kept_stop)
        bits, first_word, width = local * 0, local * 0, local * 0
        if count > LANES:
            bits, first_word, width = tables.ready_row(words, sets, state)
        if width > 0:
            tl.debug_barrier()
            _forbid_others(words + bits, first_word, width, logits, low, high, CHUNK)
            _forbid_dead(words, fields, first, first + count, logits, low, high, LANES)
            tl.debug_barrier()
        else:
            _keep(words, fields, first, count, tail_token, logits, low, high, LANES, CHUNK)
        tl.store(logits + stop, kept_stop, mask=stop_stays)


@triton.jit
def _keep(words, fields, first, count, tail_token, logits, low, high, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Read what stays of the logits from `low` to `high`, overwrite all of them, write back what stays.

    LANES edges at a time, each time up to the label at which the next ones begin. That is a multiple of spare, for
    aligned writes. Labels ascend and differ, so up to spare - 1 edges come again.
    """
    spare: tl.constexpr = max(LANES // 16, 1)
    end = first + count
    if (low > 0) & (count > LANES - spare):  # else all edges are read at once, and what is below `low` is another's
        first = tables.first_from(words, fields, tables.LABELS, tables.NARROW_LABELS, first, end, low)
    part = low
    while part < high:
        lane = first + tl.arange(0, LANES)
        edge = lane < end
        label = tables.element(words, fields, tables.LABELS, lane, tables.NARROW_LABELS, edge)
        label = tl.where(edge, label, tl.where(lane == first, tail_token, -1))
        beyond = first + (LANES - spare)
        next_label = tables.element(words, fields, tables.LABELS, beyond, tables.NARROW_LABELS, beyond < end)
        until = tl.minimum(tl.where(beyond < end, (next_label // spare * spare).to(tl.int32), high), high)
        stays = (label >= part) & (label < until)
        stays = stays & (~edge | tables.is_alive(words, fields, lane, edge, fields[tables.DEAD_COUNT]))
        kept = tl.load(logits + label, mask=stays)
        tl.debug_barrier()
        start, whole = part, until // NEAR * NEAR
        if LANES >= 256:  # `spare` is a multiple of NEAR, and so is `part`, which the compiler sees here alone
            start = part // NEAR * NEAR
        for begin in range(start, whole, CHUNK):
            _forbid(logits, begin, whole, CHUNK)
        rest = whole + tl.arange(0, NEAR)
        tl.store(logits + rest, -float("inf"), mask=(rest >= part) & (rest < until))
        tl.debug_barrier()
        tl.store(logits + label, kept, mask=stays)
        first = beyond - spare + 1
        part = until


@triton.jit
def _forbid_dead(words, fields, first, end, logits, low, high, LANES: tl.constexpr):
    """Overwrite the logits of those edges of a node, `first` to `end`, that are in the list of dead ones."""
    count = fields[tables.DEAD_COUNT]
    if count > 0:
        tl.debug_barrier()  # other threads write back what the ready mask of all edges keeps
        at = tables.first_from(words, fields, tables.DEAD_LIST, 0, count * 0, count, first)
        while at < count:
            lane = at + tl.arange(0, LANES)
            edge = tables.word(words, fields, tables.DEAD_LIST, lane, lane < count)
            dead = (lane < count) & (edge < end)
            label = tables.element(words, fields, tables.LABELS, edge, tables.NARROW_LABELS, dead)
            tl.store(logits + label, -float("inf"), mask=dead & (label >= low) & (label < high))
            at += LANES
            more = at < count
            at = tl.where(more & (tables.word(words, fields, tables.DEAD_LIST, at, more) < end), at, count)


@triton.jit
def _forbid(logits, begin, high, CHUNK: tl.constexpr):
    column = begin + tl.arange(0, CHUNK)
    tl.store(logits + column, -float("inf"), mask=column < high)


@triton.jit
def _forbid_others(bits, first_word, width, logits, low, high, CHUNK: tl.constexpr):
    """Overwrite the logits from `low` to `high` whose bit is not set in a ready mask.

    bits: [width] words, the first for the 32 columns from 32 * first_word on. Threads write 16 bytes where they can:
    logits among which some stay are read and written back, which takes a third of what single stores take (H200).
    """
    whole = high // NEAR * NEAR
    for begin in range(low, whole, CHUNK):
        word = (begin >> 5) - first_word
        if (word + (CHUNK + 31) // 32 > 0) & (word < width):
            start = begin + tl.arange(0, CHUNK // NEAR) * NEAR
            near = _near_bits(bits, first_word, width, start)
            lane = tl.arange(0, NEAR)[None, :]
            at = logits + (start[:, None] + lane)
            written = ((near != _NEAR_BITS) & (start < whole))[:, None]
            kept = tl.load(at, mask=written & (near != 0)[:, None])
            forbidden = tl.full((1, 1), -float("inf"), tl.float32).to(kept.dtype)
            tl.store(at, tl.where(((near[:, None] >> lane) & 1) == 0, forbidden, kept), mask=written)
        else:
            _forbid(logits, begin, whole, CHUNK)
    lane = tl.arange(0, NEAR)
    near = _near_bits(bits, first_word, width, whole + lane * 0)
    tl.store(logits + whole + lane, -float("inf"), mask=(whole + lane < high) & (((near >> lane) & 1) == 0))


@triton.jit
def _near_bits(bits, first_word, width, start):
    """Return the bits of a ready mask for the NEAR columns from each `start` on, a multiple of as many."""
    at = (start >> 5) - first_word
    mask = tl.load(bits + at, mask=(at >= 0) & (at < width), other=0)
    return (mask >> (start & 31)) & _NEAR_BITS
