"""The kernels in Triton, for accelerators: `cpu_kernels` says what they do, and describes their arguments.

Each function raises ValueError for a tensor with another stride than 1 in its last dimension. A contiguous copy would
be no help: a recorded graph would read it again, and what is written to it is lost. No launch depends on what a tensor
holds: each can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from itemset.masking import batch as batch_module
from itemset.masking import triton_tables as tables
from itemset.masking.arena import Arena
from itemset.masking.batch import Batch, refuse_strides
from itemset.masking.triton_spans import NEAR, mask_span

LANES = 256  # labels of a node that are compared at once: a row costs what its children cost
WHOLE = 4096  # a row of no more logits than this is walked and masked in one launch
STORED = 4096  # bytes of logits that are masked at once: 16 of each thread
SPAN = 1 << 15  # logits that one program masks
WALK_WARPS, MASK_WARPS = 1, 8  # a walk waits for memory, and one warp for no other

_STATE, _CONSUMED, _ANY_CONSUMED, _CONSUMED_MASK, _COUNT_MASK, _TREE, _COLUMNS = tables.constants(
    batch_module, "STATE CONSUMED ANY_CONSUMED CONSUMED_MASK COUNT_MASK TREE COLUMNS"
)
# A batch's tensors are single arguments: Triton 3.7 specializes all elements of a tuple, whatever `jit` says.


def advance(arena: Arena, states: Tensor, tokens: Tensor, marks: Tensor, out: Tensor) -> Tensor:
    refuse_strides(states=states, tokens=tokens, marks=marks, out=out)
    _advance_kernel[(len(states),)](
        arena.words, arena.sets, states, tokens, marks, marks.stride(0), out,
        **stop_lanes(marks), LANES=LANES, num_warps=WALK_WARPS,
    )
    return out


def walk(
    arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, logits: Tensor | None = None
) -> Tensor:
    """Launch once, but twice if several programs mask a row: each of them would repeat the walk."""
    refuse_strides(
        slots=batch.slots, history=batch.history, begin=batch.begin, end=batch.end, above=batch.above,
        tokens=batch.tokens, positions=batch.positions, cells=cells, marks=marks, out=out, logits=logits,
    )
    masked = logits if logits is not None and logits.shape[1] <= WHOLE else None
    vocabulary = 0 if masked is None else masked.shape[1]
    chunk = max(_power_of_2(vocabulary), NEAR.value)
    _walk_kernel[(batch.rows,)](
        arena.words, arena.sets, cells, marks, marks.stride(0),
        batch.slots, batch.rows_each, batch.history, batch.history.stride(0), batch.begin, batch.end, batch.above,
        batch.tokens, 0 if batch.tokens is None else batch.tokens.stride(0), batch.positions, out,
        masked, 0 if masked is None else masked.stride(0), vocabulary,
        BY_SLOT=batch.by_slot, LAYOUT=batch.layout, **stop_lanes(marks), LANES=LANES, CHUNK=chunk,
        ALIGNED=_is_aligned(masked), num_warps=WALK_WARPS if masked is None else step_warps(chunk),
    )
    if logits is not None and masked is None:
        mask(arena, logits, out, marks, batch.slots, batch.rows_each)
    return out


def mask(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None = None
) -> Tensor:
    refuse_strides(logits=logits, states=states, marks=marks, slots=slots)
    rows, vocabulary = logits.shape
    chunk = min(STORED // logits.element_size(), max(_power_of_2(vocabulary), NEAR.value))
    chunks = min(max(SPAN // chunk, 1), -(-vocabulary // chunk))
    _mask_kernel[(rows, -(-vocabulary // (chunk * chunks)))](
        arena.words, arena.sets, states, slots, rows_each, marks, marks.stride(0),
        logits, logits.stride(0), vocabulary,
        **stop_lanes(marks), LANES=LANES, CHUNK=chunk, CHUNKS=chunks, ALIGNED=_is_aligned(logits),
        num_warps=MASK_WARPS,
    )
    return logits


def children(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None, width: int
) -> tuple[Tensor, Tensor]:
    refuse_strides(logits=logits, states=states, marks=marks, slots=slots)
    shape = len(states), width
    tokens, found = logits.new_full(shape, -1, dtype=torch.int32), logits.new_full(shape, -torch.inf)
    _children_kernel[(len(states),)](
        arena.words, arena.sets, states, slots, rows_each, marks, marks.stride(0),
        logits, logits.stride(0), logits.shape[1], tokens, found, width,
        **stop_lanes(marks), LANES=LANES, num_warps=WALK_WARPS,
    )
    return tokens, found


def forced(arena: Arena, states: Tensor, marks: Tensor, slots: Tensor, out: Tensor, guess: bool = False) -> Tensor:
    refuse_strides(states=states, marks=marks, slots=slots, out=out)
    _forced_kernel[(len(states),)](
        arena.words, arena.sets, states, slots, marks, marks.stride(0), out, out.stride(0), out.shape[1],
        GUESS=guess, LANES=LANES, num_warps=WALK_WARPS,
    )
    return out


def step_warps(chunk: int) -> int:
    """Return the number of warps, with which hardly a register spills: at 1,024 logits 8 bytes a thread (sm_90)."""
    return min(max(chunk // 512, 1), MASK_WARPS)


def _is_aligned(logits: Tensor | None) -> bool:
    """Return whether each row begins at a multiple of 16 bytes, so that a thread may write several columns at once."""
    return logits is not None and (logits.data_ptr() | logits.stride(0) * logits.element_size()) % 16 == 0


def _power_of_2(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def stop_lanes(marks: Tensor) -> dict[str, int]:
    count = marks.shape[1] - 1
    return {"STOPS": count, "STOP_LANES": _power_of_2(count)}


@tables.jit
def _advance_kernel(
    words, sets, states, tokens, marks, marks_stride, out,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    state = tl.load(states + i)
    token = tl.load(tokens + i).to(tl.int64)
    tl.debug_barrier()  # `out` may be `states`: all threads read before one writes
    fields = tables.set_fields(sets, state)
    row_marks = marks + i * marks_stride
    tl.store(out + i, tables.next_state(words, fields, state, token, row_marks, STOPS, STOP_LANES, LANES))


@tables.jit
def _walk_kernel(
    words, sets, cells, marks, marks_stride,
    slots, rows_each, history, history_stride, begins, ends, above, tokens, tokens_stride, positions, out,
    logits, logits_stride, vocabulary,
    BY_SLOT: tl.constexpr, LAYOUT: tl.constexpr, STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = _request(rows_each)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        tl.store(out + row, tables.FREE)
    else:
        place = slot if BY_SLOT else request
        depth = row - request * rows_each if rows_each is not None else row * 0
        if above is not None:
            depth = _depth(above, row, LAYOUT)
        begin = tl.load(begins + place).to(tl.int64)
        end = tl.load(ends + place).to(tl.int64)
        row_marks = marks + slot * marks_stride
        # Another row's program may be writing the cell: one thread reads it, for all of this program's.
        cell = tl.atomic_or(cells + slot, 0, sem="relaxed")
        state = cell & _STATE
        fields = tables.set_fields(sets, state)
        if positions is not None:
            known = tl.load(positions + row - depth).to(tl.int64)
            newest = tl.load(tokens + row - depth).to(tl.int64)
        if state & tables.LOCAL != tables.FREE:
            total, consumed = end - begin, (cell >> _CONSUMED) & _CONSUMED_MASK
            new = tl.where(consumed == 0, total, (total - consumed) & _COUNT_MASK)
            if new > end:  # the window does not reach back so far
                state = (state & ~tables.LOCAL) | tables.DEAD
            else:
                for column in range(end - new, end):
                    at = history + place * history_stride + column
                    if positions is None:
                        token = tl.load(at).to(tl.int64)
                    else:
                        token = tl.where(column == known, newest, tl.load(at, mask=column != known, other=0))
                    state = tables.next_state(words, fields, state, token, row_marks, STOPS, STOP_LANES, LANES)
            # Every row of a request writes the same.
            count = (total & _COUNT_MASK) | tl.where(total == 0, 0, _ANY_CONSUMED)
            tl.atomic_xchg(cells + slot, state | (count << _CONSUMED), sem="relaxed")
            if state & tables.LOCAL == tables.DEAD:
                state = state - tables.DEAD + tables.END
            if tokens is not None:
                for i in range(1, depth + 1):
                    place = row - depth + i
                    if LAYOUT == _TREE:
                        place = row
                        for _ in range(i, depth):
                            place = tl.load(above + place).to(tl.int64)
                    if LAYOUT == _COLUMNS:
                        place = row * tokens_stride + i - 1
                    token = tl.load(tokens + place).to(tl.int64)
                    state = tables.next_state(words, fields, state, token, row_marks, STOPS, STOP_LANES, LANES)
        tl.store(out + row, state)
        if logits is not None:
            mask_span(words, sets, fields, state, row_marks, True, logits, row * logits_stride, 0, vocabulary,
                        STOPS, STOP_LANES, LANES, CHUNK, ALIGNED)


@tables.jit
def _mask_kernel(
    words, sets, states, slots, rows_each, marks, marks_stride, logits, logits_stride, vocabulary,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + _request(rows_each)).to(tl.int64)
    state = tl.load(states + row)
    low = tl.program_id(1) * (CHUNK * CHUNKS)
    mask_span(
        words, sets, tables.set_fields(sets, state), state, marks + tl.maximum(slot, 0) * marks_stride, slot >= 0,
        logits, row * logits_stride, low, tl.minimum(low + CHUNK * CHUNKS, vocabulary),
        STOPS, STOP_LANES, LANES, CHUNK, ALIGNED,
    )


@tables.jit
def _children_kernel(
    words, sets, states, slots, rows_each, marks, marks_stride, logits, logits_stride, vocabulary, tokens, found, width,
    STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + _request(rows_each)).to(tl.int64)
    state = tl.load(states + row)
    local = state & tables.LOCAL
    fields = tables.set_fields(sets, state)
    logits += row * logits_stride
    tokens += row * width
    found += row * width
    ended = local == tables.END
    may_end, count = ended, local * 0
    if local >= tables.TAIL:
        token, _ = tables.tail_entry(words, fields, local, True)
        lane = tl.arange(0, LANES)
        count = _list(token + lane, (lane == 0) & (token >= 0), logits, vocabulary, count, tokens, found, width, False)
    elif local < tables.WAITING:
        may_end = tables.ends_here(words, fields, local)
        first, end = tables.row_bounds(words, fields, local)
        for low in range(first, end, LANES):
            edge = low + tl.arange(0, LANES)
            stays = edge < end
            label = tables.element(words, fields, tables.LABELS, edge, tables.NARROW_LABELS, stays)
            stays = stays & tables.is_alive(words, fields, edge, stays, fields[tables.DEAD_COUNT])
            count = _list(label, stays, logits, vocabulary, count, tokens, found, width, False)
    if may_end & (slot >= 0):
        lane = tl.arange(0, STOP_LANES)
        stop = tl.load(marks + slot * marks_stride + 1 + lane, mask=lane < STOPS, other=-1)
        _list(stop, stop >= 0, logits, vocabulary, count, tokens, found, width, ended)


@triton.jit
def _list(label, stays, logits, vocabulary, count, tokens, found, width, ended):
    """Write those of some tokens that stay, and their logits, after the first `count`; return how many there are."""
    stays = stays & (label < vocabulary)
    place = count + tl.cumsum(stays.to(tl.int64), 0) - 1
    stays = stays & (place < width)
    logit = tl.load(logits + label, mask=stays)
    tl.store(tokens + place, label, mask=stays)
    tl.store(found + place, tl.where(ended & (logit == -float("inf")), 0.0, logit), mask=stays)
    return count + tl.sum(stays.to(tl.int64), 0)


@tables.jit
def _forced_kernel(
    words, sets, states, slots, marks, marks_stride, out, out_stride, columns,
    GUESS: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    state = tl.load(states + row)
    stop = tl.load(marks + slot * marks_stride + 1, mask=slot >= 0, other=-1).to(tl.int64)
    applies = (state & tables.LOCAL < tables.WAITING) | (state & tables.LOCAL >= tables.END)
    fields = tables.set_fields(sets, state)
    going = applies
    for column in range(columns):
        token = slot * 0 - 1
        if going:
            local = state & tables.LOCAL
            if local >= tables.TAIL:
                token, _ = tables.tail_entry(words, fields, local, True)
            elif local < tables.WAITING:
                first, count = tables.children(words, fields, local, LANES)
                ends = tables.ends_here(words, fields, local)
                if (count > 0) & (GUESS | ((count == 1) & ~ends)):
                    token = tables.element(words, fields, tables.LABELS, first, tables.NARROW_LABELS, True)
                elif ends & (count == 0):
                    state = state - local + tables.END
                    local = local * 0 + tables.END
            if local == tables.END:
                token = stop
            going = (token >= 0) & (GUESS | (local != tables.END))
            if going & (local != tables.END):
                state = tables.next_state(words, fields, state, token, None, 0, 1, LANES)
        tl.store(out + row * out_stride + column, token, mask=applies)


@triton.jit
def _request(rows_each):
    request = tl.program_id(0)
    if rows_each is not None:
        request = request // rows_each
    return request.to(tl.int64)


@triton.jit
def _depth(above, row, LAYOUT: tl.constexpr):
    depth = tl.load(above + (0 if LAYOUT == _COLUMNS else row)).to(tl.int64)
    if LAYOUT == _TREE:
        parent = depth
        depth = row * 0
        while parent >= 0:
            depth += 1
            parent = tl.load(above + parent).to(tl.int64)
    return depth
