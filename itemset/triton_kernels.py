"""The kernels in Triton. What they do, and their arguments, is said in `torch_kernels`.

One program walks one row; one program masks one chunk of a row's logits. A node's labels are compared LANES at a time,
so a row costs what its children cost. Nothing is allocated, nothing is read back, and no launch depends on what a
tensor holds: each can be captured in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from itemset import arena as arena_module
from itemset import batch as batch_module
from itemset import walk as walk_module
from itemset.arena import Arena
from itemset.batch import Batch

LANES = 256  # labels of a node that are compared at once
CHUNK = 4096  # logits that one program masks
FEW = 32  # a row of no more children than this is masked without CHUNK lanes
WALK_WARPS, MASK_WARPS = 4, 8  # with these no register spills (sm_90)

_TAIL = tl.constexpr(walk_module.TAIL)
_END = tl.constexpr(walk_module.END)
_DEAD = tl.constexpr(walk_module.DEAD)
_FREE = tl.constexpr(walk_module.FREE)
_WAITING = tl.constexpr(walk_module.WAITING)
_LOCAL = tl.constexpr(batch_module.LOCAL)
_STATE = tl.constexpr(batch_module.STATE)
_CONSUMED = tl.constexpr(batch_module.CONSUMED)
_CONSUMED_MASK = tl.constexpr(batch_module.CONSUMED_MASK)
_TREE = tl.constexpr(batch_module.TREE)
_COLUMNS = tl.constexpr(batch_module.COLUMNS)
_ROW_OFFSETS = tl.constexpr(arena_module.ROW_OFFSETS)
_TERMINAL = tl.constexpr(arena_module.TERMINAL)
_LABELS = tl.constexpr(arena_module.LABELS)
_TARGETS = tl.constexpr(arena_module.TARGETS)
_NODE_BASE = tl.constexpr(arena_module.NODE_BASE)
_TAIL_BASE = tl.constexpr(arena_module.TAIL_BASE)
_TAILS = tl.constexpr(arena_module.TAILS)
_WIDTHS = tl.constexpr(arena_module.WIDTHS)
_NARROW_LABELS = tl.constexpr(arena_module.NARROW_LABELS)
_NARROW_TARGETS = tl.constexpr(arena_module.NARROW_TARGETS)


def advance(arena: Arena, states: Tensor, tokens: Tensor, marks: Tensor | None, out: Tensor) -> Tensor:
    _advance_kernel[(len(states),)](
        arena.words, arena.sets, states, tokens, marks, 0 if marks is None else marks.stride(0), out,
        **_stop_lanes(marks), LANES=LANES,
    )
    return out


def walk(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, most: int | None = None) -> Tensor:
    _launch(arena, cells, marks, batch, out, None)
    return out


def mask(arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor) -> Tensor:
    rows, vocabulary = logits.shape
    _mask_kernel[(rows, triton.cdiv(vocabulary, _chunk(vocabulary)))](
        arena.words, arena.sets, states, slots, marks, marks.stride(0), logits, logits.stride(0), vocabulary,
        **_stop_lanes(marks), LANES=LANES, CHUNK=_chunk(vocabulary), FEW=FEW, num_warps=MASK_WARPS,
    )
    return logits


def step(
    arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, logits: Tensor, most: int | None = None
) -> Tensor:
    """One launch where a row's logits are one chunk, else two: every chunk would repeat the walk."""
    if logits.shape[1] <= CHUNK:
        _launch(arena, cells, marks, batch, out, logits)
        return logits
    walk(arena, cells, marks, batch, out)
    return mask(arena, logits, out, marks, batch.slots)


def forced(
    arena: Arena, states: Tensor, marks: Tensor, slots: Tensor, out: Tensor, guess: bool = False
) -> Tensor:
    _forced_kernel[(len(states),)](
        arena.words, arena.sets, states, slots, marks, marks.stride(0), out, out.stride(0), out.shape[1],
        GUESS=guess, LANES=LANES,
    )
    return out


def _launch(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, logits: Tensor | None) -> None:
    vocabulary = 0 if logits is None else logits.shape[1]
    _walk_kernel[(len(batch.slots),)](
        arena.words, arena.sets, cells, marks, marks.stride(0),
        batch.slots, batch.history, batch.history.stride(0), batch.begin, batch.end,
        batch.above, batch.tokens, 0 if batch.tokens is None else batch.tokens.stride(0), out,
        logits, 0 if logits is None else logits.stride(0), vocabulary,
        BY_SLOT=batch.by_slot, LAYOUT=batch.layout, **_stop_lanes(marks), LANES=LANES, CHUNK=_chunk(vocabulary),
        FEW=FEW, num_warps=WALK_WARPS if logits is None else MASK_WARPS,
    )


def _chunk(vocabulary: int) -> int:
    return min(CHUNK, int(triton.next_power_of_2(max(vocabulary, 1))))


def _stop_lanes(marks: Tensor | None) -> dict[str, int]:
    count = 0 if marks is None else marks.shape[1] - 1
    return {"STOPS": count, "STOP_LANES": triton.next_power_of_2(max(count, 1))}


@triton.jit
def _advance_kernel(
    words, sets, states, tokens, marks, marks_stride, out,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    state = tl.load(states + i)
    token = tl.load(tokens + i).to(tl.int64)
    row_marks = marks
    if marks is not None:
        row_marks = marks + i * marks_stride
    tl.store(out + i, _after(words, sets, state, token, row_marks, STOPS, STOP_LANES, LANES))


@triton.jit
def _walk_kernel(
    words, sets, cells, marks, marks_stride,
    slots, history, history_stride, begins, ends, above, tokens, tokens_stride, out,
    logits, logits_stride, vocabulary,
    BY_SLOT: tl.constexpr, LAYOUT: tl.constexpr, STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    state = slot * 0 + _FREE
    if slot >= 0:
        cell = tl.load(cells + slot)
        if cell & _LOCAL != _FREE:
            place = slot if BY_SLOT else row
            begin = tl.load(begins + place).to(tl.int64)
            end = tl.load(ends + place).to(tl.int64)
            row_marks = marks + slot * marks_stride
            state = cell & _STATE
            new = (end - begin - (cell >> _CONSUMED)) & _CONSUMED_MASK
            if new > end:  # the window does not reach back so far
                state = (state & ~_LOCAL) | _DEAD
            else:
                for column in range(end - new, end):
                    token = tl.load(history + place * history_stride + column).to(tl.int64)
                    state = _after(words, sets, state, token, row_marks, STOPS, STOP_LANES, LANES)
            # Every row of a request writes the same.
            tl.store(cells + slot, state | (((end - begin) & _CONSUMED_MASK) << _CONSUMED))
            if state & _LOCAL == _DEAD:
                state = state - _DEAD + _END
            if above is not None:
                depth = _depth(above, row, LAYOUT)
                for i in range(1, depth + 1):
                    place = row - depth + i
                    if LAYOUT == _TREE:
                        place = row
                        for _ in range(i, depth):
                            place = tl.load(above + place).to(tl.int64)
                    if LAYOUT == _COLUMNS:
                        place = row * tokens_stride + i - 1
                    token = tl.load(tokens + place).to(tl.int64)
                    state = _after(words, sets, state, token, row_marks, STOPS, STOP_LANES, LANES)
    tl.store(out + row, state)
    if logits is not None:
        _mask_chunk(
            words, sets, state, marks + tl.maximum(slot, 0) * marks_stride, slot >= 0, logits + row * logits_stride,
            0, vocabulary, STOPS, STOP_LANES, LANES, CHUNK, FEW,
        )


@triton.jit
def _mask_kernel(
    words, sets, states, slots, marks, marks_stride, logits, logits_stride, vocabulary,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    _mask_chunk(
        words, sets, tl.load(states + row), marks + tl.maximum(slot, 0) * marks_stride, slot >= 0,
        logits + row * logits_stride, tl.program_id(1) * CHUNK, vocabulary, STOPS, STOP_LANES, LANES, CHUNK, FEW,
    )


@triton.jit
def _forced_kernel(
    words, sets, states, slots, marks, marks_stride, out, out_stride, columns,
    GUESS: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    state = tl.load(states + row)
    stop = tl.load(marks + slot * marks_stride + 1, mask=slot >= 0, other=-1).to(tl.int64)
    applies = (state & _LOCAL < _WAITING) | (state & _LOCAL >= _END)
    going = applies
    for column in range(columns):
        token = slot * 0 - 1
        if going:
            fields, local = sets + (state >> 32) * (_WIDTHS + 1), state & _LOCAL
            if local >= _TAIL:
                token, _ = _tail_entry(words, fields, local)
            elif local == _END:
                token = stop
            elif local < _WAITING:
                first, end = _row(words, fields, local)
                if GUESS | ((end - first == 1) & ~_may_end(words, fields, local)):
                    token = _element(words, fields, _LABELS, first, _NARROW_LABELS, True)
            going = (token >= 0) & (GUESS | (local != _END))
            if going & (local != _END):
                state = _after(words, sets, state, token, None, 0, 1, LANES)
        tl.store(out + row * out_stride + column, token, mask=applies)


@triton.jit
def _mask_chunk(
    words, sets, state, row_marks, has_marks, logits, low, vocabulary,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr,
):
    """Mask the logits from `low` to `low + CHUNK` of one row."""
    local = state & _LOCAL
    if (local < _WAITING) | (local >= _END):
        fields = sets + (state >> 32) * (_WIDTHS + 1)
        first, count, tail_token, may_end = local * 0, local * 0, local * 0 - 1, local == _END
        if local >= _TAIL:
            tail_token, _ = _tail_entry(words, fields, local)
        elif local < _WAITING:
            may_end = _may_end(words, fields, local)
            first, end = _row(words, fields, local)
            count = end - first
            if count > min(LANES, CHUNK):
                behind = _first_from(words, fields, first, count, low + CHUNK, LANES)
                first = _first_from(words, fields, first, count, low, LANES)
                count = behind - first
        if count > FEW:
            _keep(words, fields, first, count, tail_token, row_marks, may_end & has_marks, local == _END, logits, low,
                  vocabulary, STOPS, STOP_LANES, CHUNK, CHUNK)
        else:
            _keep(words, fields, first, count, tail_token, row_marks, may_end & has_marks, local == _END, logits, low,
                  vocabulary, STOPS, STOP_LANES, CHUNK, FEW)


@triton.jit
def _keep(
    words, fields, first, count, tail_token, row_marks, keep_stops, ended, logits, low, vocabulary,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):
    """Read what stays of a chunk, overwrite all of it, write back what stays. Of edges there are at most WIDTH whose
    label lies in the chunk, and they come first: labels ascend and differ."""
    lane = tl.arange(0, WIDTH)
    high = tl.minimum(low + CHUNK, vocabulary)
    label = _element(words, fields, _LABELS, first + lane, _NARROW_LABELS, lane < count)
    label = tl.where(lane < count, label, tl.where(lane == 0, tail_token, -1))
    stays = (label >= low) & (label < high)
    kept = tl.load(logits + label, mask=stays)
    stop_lane = tl.arange(0, STOP_LANES)
    stop = tl.load(row_marks + 1 + stop_lane, mask=(stop_lane < STOPS) & keep_stops, other=-1).to(tl.int64)
    stop_stays = (stop >= low) & (stop < high)
    kept_stop = tl.load(logits + stop, mask=stop_stays)
    kept_stop = tl.where(ended & (kept_stop == -float("inf")), 0.0, kept_stop)
    tl.debug_barrier()
    chunk = low + tl.arange(0, CHUNK)
    tl.store(logits + chunk, -float("inf"), mask=chunk < vocabulary)
    tl.debug_barrier()
    tl.store(logits + label, kept, mask=stays)
    tl.store(logits + stop, kept_stop, mask=stop_stays)


@triton.jit
def _after(
    words, sets, state, token, row_marks, STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr
):
    """The state, with its set, after one more token."""
    local = state & _LOCAL
    result = local * 0 + _DEAD
    if local == _FREE:
        result = local
    elif local == _WAITING:
        result = local
        if row_marks is not None:
            if (token >= 0) & (tl.load(row_marks) == token):
                result = local * 0
    else:
        fields = sets + (state >> 32) * (_WIDTHS + 1)
        may_end = local == _END
        if local >= _TAIL:
            expected, last = _tail_entry(words, fields, local)
            if expected == token:
                result = tl.where(last, _END, local + 1).to(tl.int64)
        elif local < _WAITING:
            may_end = _may_end(words, fields, local)
            result = _child(words, fields, local, token, LANES)
        if row_marks is not None:
            if (result == _DEAD) & may_end:
                if _is_stop(row_marks, token, STOPS, STOP_LANES):
                    result = local * 0 + _END
    return (state & ~_LOCAL) | result


@triton.jit
def _child(words, fields, node, token, LANES: tl.constexpr):
    """The state behind the edge that carries `token`, or DEAD. What stands behind each edge is loaded beside the
    labels: one round trip to memory instead of two."""
    first, end = _row(words, fields, node)
    first, count = _narrow(words, fields, first, end - first, token, LANES)
    lane = tl.arange(0, LANES)
    edge, present = first + lane, lane < count
    label = _element(words, fields, _LABELS, edge, _NARROW_LABELS, present)
    target = _element(words, fields, _TARGETS, edge, _NARROW_TARGETS, present)
    leaf = tl.where((tl.load(fields + _WIDTHS) & _NARROW_TARGETS) != 0, 1 << 15, 1 << 31).to(tl.int64)
    node_behind = _word(words, fields, _NODE_BASE, edge >> 5, present) + target
    tail_behind = _word(words, fields, _TAIL_BASE, edge >> 5, present) + target - leaf + _TAIL
    behind = tl.where(target == 2 * leaf - 1, _END, tl.where(target >= leaf, tail_behind, node_behind))
    found = tl.max(tl.where(present & (label == token), behind, 0), 0)  # nothing leads to node 0
    return tl.where(found > 0, found, _DEAD).to(tl.int64)


@triton.jit
def _narrow(words, fields, first, count, token, LANES: tl.constexpr):
    """At most LANES of the edges, among which `token` stands if any carries it: all before carry less, all behind
    more."""
    lane = tl.arange(0, LANES).to(tl.int64)
    while count > LANES:
        stride = (count + LANES - 1) // LANES
        sample = lane * stride
        label = _element(words, fields, _LABELS, first + sample, _NARROW_LABELS, sample < count)
        skipped = tl.maximum(tl.sum(((sample < count) & (label <= token)).to(tl.int64), 0) - 1, 0) * stride
        first += skipped
        count = tl.minimum(stride, count - skipped)
    return first, count


@triton.jit
def _first_from(words, fields, first, count, token, LANES: tl.constexpr):
    """The first of the edges whose label is not below `token`, or the one behind the last."""
    first, count = _narrow(words, fields, first, count, token, LANES)
    lane = tl.arange(0, LANES)
    label = _element(words, fields, _LABELS, first + lane, _NARROW_LABELS, lane < count)
    return first + tl.sum(((lane < count) & (label < token)).to(tl.int64), 0)


@triton.jit
def _row(words, fields, node):
    """First edge of a node and the one behind its last."""
    return _word(words, fields, _ROW_OFFSETS, node, True), _word(words, fields, _ROW_OFFSETS, node + 1, True)


@triton.jit
def _may_end(words, fields, node):
    return ((_word(words, fields, _TERMINAL, node >> 5, True) >> (node & 31)) & 1) != 0


@triton.jit
def _tail_entry(words, fields, local):
    """Token at this position of the tails, and whether it is the last of its tail."""
    token_bits = tl.load(fields + _WIDTHS) & 0xFF
    at = (local - _TAIL) * (token_bits + 1)
    low = _word(words, fields, _TAILS, at >> 5, True)
    high = _word(words, fields, _TAILS, (at >> 5) + 1, True)
    entry = (low | (high << 32)) >> (at & 31)
    one = token_bits * 0 + 1
    return entry & ((one << token_bits) - 1), ((entry >> token_bits) & 1) != 0


@triton.jit
def _element(
    words, fields, SECTION: tl.constexpr, index, NARROW: tl.constexpr, mask
):
    """Element `index` of a section of 16-bit or 32-bit elements."""
    narrow = (tl.load(fields + _WIDTHS) & NARROW) != 0
    word = _word(words, fields, SECTION, tl.where(narrow, index >> 1, index), mask)
    return tl.where(narrow, (word >> ((index & 1) * 16)) & 0xFFFF, word)


@triton.jit
def _word(words, fields, SECTION: tl.constexpr, index, mask):
    return tl.load(words + tl.load(fields + SECTION) + index, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _is_stop(row_marks, token, STOPS: tl.constexpr, STOP_LANES: tl.constexpr):
    lane = tl.arange(0, STOP_LANES)
    stop = tl.load(row_marks + 1 + lane, mask=lane < STOPS, other=-1)
    return tl.max(((stop == token) & (stop >= 0)).to(tl.int32), 0) != 0


@triton.jit
def _depth(above, row, LAYOUT: tl.constexpr):
    """How many drafts lead to this row."""
    depth = tl.load(above + (0 if LAYOUT == _COLUMNS else row)).to(tl.int64)
    if LAYOUT == _TREE:
        parent = depth
        depth = row * 0
        while parent >= 0:
            depth += 1
            parent = tl.load(above + parent).to(tl.int64)
    return depth
