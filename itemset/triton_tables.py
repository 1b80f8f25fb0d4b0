"""Reading an arena's tables in Triton: what the kernels of `triton_kernels` are made of.

words, fields: `Arena.words`, and the row of `Arena.sets` of the state's set, as `set_fields` reads it. States and
tokens: int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from itemset import arena as arena_module
from itemset import batch as batch_module
from itemset import walk as walk_module

TAIL = tl.constexpr(walk_module.TAIL)
END = tl.constexpr(walk_module.END)
DEAD = tl.constexpr(walk_module.DEAD)
FREE = tl.constexpr(walk_module.FREE)
WAITING = tl.constexpr(walk_module.WAITING)
LOCAL = tl.constexpr(batch_module.LOCAL)
ROW_OFFSETS = tl.constexpr(arena_module.ROW_OFFSETS)
TERMINAL = tl.constexpr(arena_module.TERMINAL)
LABELS = tl.constexpr(arena_module.LABELS)
TARGETS = tl.constexpr(arena_module.TARGETS)
NODE_BASE = tl.constexpr(arena_module.NODE_BASE)
TAIL_BASE = tl.constexpr(arena_module.TAIL_BASE)
TAILS = tl.constexpr(arena_module.TAILS)
WIDTHS = tl.constexpr(arena_module.WIDTHS)
NARROW_LABELS = tl.constexpr(arena_module.NARROW_LABELS)
NARROW_TARGETS = tl.constexpr(arena_module.NARROW_TARGETS)


@triton.jit
def set_fields(sets, state):
    """The row of the state's set in `Arena.sets`, all of it in one round trip to memory."""
    row = sets + (state >> 32) * (WIDTHS + 1)
    return (
        tl.load(row + ROW_OFFSETS), tl.load(row + TERMINAL), tl.load(row + LABELS), tl.load(row + TARGETS),
        tl.load(row + NODE_BASE), tl.load(row + TAIL_BASE), tl.load(row + TAILS), tl.load(row + WIDTHS),
    )


@triton.jit
def next_state(
    words, fields, state, token, row_marks, STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr
):
    """The state, with its set, after one more token."""
    local = state & LOCAL
    result = local * 0 + DEAD
    if local == FREE:
        result = local
    elif local == WAITING:
        result = local
        if row_marks is not None:
            if (token >= 0) & (tl.load(row_marks) == token):
                result = local * 0
    else:
        may_end = local == END
        if local >= TAIL:
            expected, last = tail_entry(words, fields, local)
            if expected == token:
                result = tl.where(last, END, local + 1).to(tl.int64)
        elif local < WAITING:
            may_end = ends_here(words, fields, local)
            result = child_state(words, fields, local, token, LANES)
        if row_marks is not None:
            if (result == DEAD) & may_end:
                if is_stop(row_marks, token, STOPS, STOP_LANES):
                    result = local * 0 + END
    return (state & ~LOCAL) | result


@triton.jit
def child_state(words, fields, node, token, LANES: tl.constexpr):
    """The state behind the edge that carries `token`, or DEAD. What stands behind each edge is loaded beside the
    labels: one round trip to memory instead of two."""
    first, end = row_bounds(words, fields, node)
    first, count = narrowed(words, fields, first, end - first, token, LANES)
    lane = tl.arange(0, LANES)
    edge, present = first + lane, lane < count
    label = element(words, fields, LABELS, edge, NARROW_LABELS, present)
    target = element(words, fields, TARGETS, edge, NARROW_TARGETS, present)
    leaf = tl.where((fields[WIDTHS] & NARROW_TARGETS) != 0, 1 << 15, 1 << 31).to(tl.int64)
    node_behind = word(words, fields, NODE_BASE, edge >> 5, present) + target
    tail_behind = word(words, fields, TAIL_BASE, edge >> 5, present) + target - leaf + TAIL
    behind = tl.where(target == 2 * leaf - 1, END, tl.where(target >= leaf, tail_behind, node_behind))
    found = tl.max(tl.where(present & (label == token), behind, 0), 0)  # nothing leads to node 0
    return tl.where(found > 0, found, DEAD).to(tl.int64)


@triton.jit
def narrowed(words, fields, first, count, token, LANES: tl.constexpr):
    """At most LANES of the edges, among which `token` stands if any carries it: all before carry less, all behind
    more."""
    lane = tl.arange(0, LANES).to(tl.int64)
    while count > LANES:
        stride = (count + LANES - 1) // LANES
        sample = lane * stride
        label = element(words, fields, LABELS, first + sample, NARROW_LABELS, sample < count)
        skipped = tl.maximum(tl.sum(((sample < count) & (label <= token)).to(tl.int64), 0) - 1, 0) * stride
        first += skipped
        count = tl.minimum(stride, count - skipped)
    return first, count


@triton.jit
def first_from(words, fields, first, count, token, LANES: tl.constexpr):
    """The first of the edges whose label is not below `token`, or the one behind the last."""
    first, count = narrowed(words, fields, first, count, token, LANES)
    lane = tl.arange(0, LANES)
    label = element(words, fields, LABELS, first + lane, NARROW_LABELS, lane < count)
    return first + tl.sum(((lane < count) & (label < token)).to(tl.int64), 0)


@triton.jit
def row_bounds(words, fields, node):
    """First edge of a node and the one behind its last."""
    return word(words, fields, ROW_OFFSETS, node, True), word(words, fields, ROW_OFFSETS, node + 1, True)


@triton.jit
def ends_here(words, fields, node):
    return ((word(words, fields, TERMINAL, node >> 5, True) >> (node & 31)) & 1) != 0


@triton.jit
def tail_entry(words, fields, local):
    """Token at this position of the tails, and whether it is the last of its tail."""
    token_bits = fields[WIDTHS] & 0xFF
    at = (local - TAIL) * (token_bits + 1)
    low = word(words, fields, TAILS, at >> 5, True)
    high = word(words, fields, TAILS, (at >> 5) + 1, True)
    entry = (low | (high << 32)) >> (at & 31)
    one = token_bits * 0 + 1
    return entry & ((one << token_bits) - 1), ((entry >> token_bits) & 1) != 0


@triton.jit
def element(
    words, fields, SECTION: tl.constexpr, index, NARROW: tl.constexpr, mask
):
    """Element `index` of a section of 16-bit or 32-bit elements."""
    narrow = (fields[WIDTHS] & NARROW) != 0
    whole = word(words, fields, SECTION, tl.where(narrow, index >> 1, index), mask)
    return tl.where(narrow, (whole >> ((index & 1) * 16)) & 0xFFFF, whole)


@triton.jit
def word(words, fields, SECTION: tl.constexpr, index, mask):
    return tl.load(words + fields[SECTION] + index, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def is_stop(row_marks, token, STOPS: tl.constexpr, STOP_LANES: tl.constexpr):
    lane = tl.arange(0, STOP_LANES)
    stop = tl.load(row_marks + 1 + lane, mask=lane < STOPS, other=-1)
    return tl.max(((stop == token) & (stop >= 0)).to(tl.int32), 0) != 0
