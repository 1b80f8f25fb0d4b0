"""Reading an arena's tables in Triton: what the kernels of `triton_kernels` are made of.

words, fields: `Arena.words`, and what `set_fields` reads of the state's set. States and tokens: int64.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from itemset.masking import batch
from itemset.trie import levels, targets, walk
from itemset.trie import tables as trie_tables


def constants(module: ModuleType, names: str) -> list[tl.constexpr]:
    """Return these constants of a module as kernels may read them."""
    return [tl.constexpr(getattr(module, name)) for name in names.split()]


STATE_BITS, TAIL, END, DEAD, FREE, WAITING = constants(walk, "STATE_BITS TAIL END DEAD FREE WAITING")
ROW_OFFSETS, TERMINAL, LABELS, TARGETS, NODE_BASE, TAIL_BASE, TAILS, ALIVE, DEAD_LIST = constants(
    batch, "ROW_OFFSETS TERMINAL LABELS TARGETS NODE_BASE TAIL_BASE TAILS ALIVE DEAD_LIST"
)
_WIDTHS, READY, ROW, DEAD_COUNT, NARROW_LABELS, NARROW_TARGETS, COUNTED, FAR_BLOCK, NO_BITS = constants(
    batch, "WIDTHS READY ROW DEAD_COUNT NARROW_LABELS NARROW_TARGETS COUNTED FAR_BLOCK NO_BITS"
)
WIDTHS = tl.constexpr(batch.DEAD_COUNT + 1)  # of `set_fields`
FAR, FIRST_EDGE, START, START_HIGH, LENGTH, OF_A_LEVEL = constants(
    targets, "FAR FIRST_EDGE START START_HIGH LENGTH OF_A_LEVEL"
)
LOCAL, HEADER = tl.constexpr(batch.LOCAL), tl.constexpr(levels.HEADER)
DEAD_NODE = tl.constexpr(trie_tables.TERMINAL)


def jit(kernel: Callable[..., None]) -> Any:
    """Compile a kernel for the alignment of the arena's tensors and its constants alone: all other arguments differ
    from step to step, and it would have to be compiled again."""
    given = inspect.signature(kernel).parameters.items()
    names = sorted({name for name, one in given if one.annotation is not tl.constexpr} - {"words", "sets"})
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(kernel)


@triton.jit
def set_fields(sets, state):
    """Load the row of the state's set in `Arena.sets`, in one round trip to memory."""
    row = set_row(sets, state)
    return (
        tl.load(row + ROW_OFFSETS), tl.load(row + TERMINAL), tl.load(row + LABELS), tl.load(row + TARGETS),
        tl.load(row + NODE_BASE), tl.load(row + TAIL_BASE), tl.load(row + TAILS), tl.load(row + ALIVE),
        tl.load(row + DEAD_LIST), tl.load(row + DEAD_COUNT), tl.load(row + _WIDTHS),
    )


@triton.jit
def set_row(sets, state):
    return sets + (state >> STATE_BITS) * ROW


@triton.jit
def ready_row(words, sets, state):
    """Return where a node's ready mask begins in `words`, the first word that it is for, and how many, 0 if none."""
    ready = tl.load(set_row(sets, state) + READY)
    has = ready != NO_BITS
    nodes = tl.load(words + ready, mask=has, other=0).to(tl.int64)
    first_word = tl.load(words + ready + 1, mask=has, other=0).to(tl.int64)
    width = tl.load(words + ready + 2, mask=has, other=0).to(tl.int64)
    node = state & LOCAL
    return ready + HEADER + node * width, first_word, tl.where(node < nodes, width, 0)


@triton.jit
def next_state(
    words, fields, state, token, row_marks, STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr
):
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
            expected, last = tail_entry(words, fields, local, True)
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
    """Return the state after the edge that carries `token`, or DEAD. Labels and targets are loaded in one go."""
    first, end = row_bounds(words, fields, node)
    first, count = narrowed(words, fields, first, end - first, token, LANES)
    lane = tl.arange(0, LANES)
    edge, present = first + lane, lane < count
    label = element(words, fields, LABELS, edge, NARROW_LABELS, present)
    after = state_after(words, fields, edge, present)
    carries = present & (label == token)
    found = tl.max(tl.where(carries & _has_bit(words, fields, edge, present), after, 0), 0)  # nothing leads to node 0
    if fields[DEAD_COUNT] > 0:
        carrying = tl.max(tl.where(carries, edge, 0), 0)
        if is_dead(words, fields, carrying, found > 0, fields[DEAD_COUNT]):
            found = found * 0
    return tl.where(found > 0, found, DEAD).to(tl.int64)


@triton.jit
def state_after(words, fields, edge, mask):
    """The state after each edge, as `walk.follow`."""
    if (fields[WIDTHS] & COUNTED) != 0:
        after = _state_counted(words, fields, edge, mask)
    else:
        after = _state_stored(words, fields, edge, mask)
    return after


@triton.jit
def _state_counted(words, fields, edge, mask):
    leaves = word(words, fields, TARGETS, edge >> 5, mask)
    base = word(words, fields, NODE_BASE, edge >> 5, mask)
    start = (edge * 0).to(tl.int64)
    length = start
    end = fields[WIDTHS] >> FAR_BLOCK
    at = end * 0
    while at < end:
        reached = edge >= word(words, fields, TAIL_BASE, at + FIRST_EDGE, True)
        low = word(words, fields, TAIL_BASE, at + START, True)
        high = word(words, fields, TAIL_BASE, at + START_HIGH, True)
        start = tl.where(reached, low | (high << 32), start)
        length = tl.where(reached, word(words, fields, TAIL_BASE, at + LENGTH, True), length)
        at += OF_A_LEVEL
    bit = edge & 31  # nothing loaded before is needed until here: the loads of a level do not wait for them
    nodes = base + bit - _ones(leaves & (((bit * 0 + 1) << bit) - 1))
    tail = tl.where(length == 0, END, start + (edge - nodes + 1) * length + TAIL)
    return tl.where(((leaves >> bit) & 1) != 0, tail, nodes).to(tl.int64)


@triton.jit
def _ones(word):
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0xFF


@triton.jit
def _state_stored(words, fields, edge, mask):
    target = element(words, fields, TARGETS, edge, NARROW_TARGETS, mask)
    leaf = tl.where((fields[WIDTHS] & NARROW_TARGETS) != 0, 1 << 15, 1 << 31).to(tl.int64)
    node = word(words, fields, NODE_BASE, edge >> 5, mask) + target
    far = tl.where((edge >> 5) >= (fields[WIDTHS] >> FAR_BLOCK), FAR, 0)
    tail = word(words, fields, TAIL_BASE, edge >> 5, mask) + far + target - leaf + TAIL
    return tl.where(target == 2 * leaf - 1, END, tl.where(target >= leaf, tail, node))


@triton.jit
def narrowed(words, fields, first, count, token, LANES: tl.constexpr):
    """Return at most LANES of the edges: those before them carry less than `token`, those after them more."""
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
def first_from(words, fields, SECTION: tl.constexpr, NARROW: tl.constexpr, low, high, value):
    """Return the first index from `low` on whose element is not below `value`; `high` if none is. They ascend."""
    while low < high:
        middle = (low + high) >> 1
        below = element(words, fields, SECTION, middle, NARROW, True) < value
        high = tl.where(below, high, middle)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def row_bounds(words, fields, node):
    return word(words, fields, ROW_OFFSETS, node, True), word(words, fields, ROW_OFFSETS, node + 1, True)


@triton.jit
def children(words, fields, node, LANES: tl.constexpr):
    """Return the first edge of a node that a walk may take, and how many there are, at least 2 for more."""
    first, end = row_bounds(words, fields, node)
    count = end - first
    if (fields[ALIVE] != NO_BITS) | (fields[DEAD_COUNT] > 0):
        at, first, count = first, end, count * 0
        while (at < end) & (count < 2):
            edge = at + tl.arange(0, LANES)
            present = edge < end
            alive = present & is_alive(words, fields, edge, present, fields[DEAD_COUNT])
            count += tl.sum(alive.to(tl.int64), 0)
            first = tl.minimum(first, tl.min(tl.where(alive, edge, end), 0))
            at += LANES
    return first, count


@triton.jit
def is_alive(words, fields, edge, mask, most):
    """Return whether a walk may take each edge; most: entries of the longest list that is looked at."""
    alive = _has_bit(words, fields, edge, mask)
    if most > 0:
        alive = alive & ~is_dead(words, fields, edge, mask, most)
    return alive


@triton.jit
def _has_bit(words, fields, edge, mask):
    bits = fields[ALIVE]
    word = tl.load(words + tl.maximum(bits, 0) + (edge >> 5), mask=mask & (bits != NO_BITS), other=-1)
    return ((word >> (edge & 31).to(tl.int32)) & 1) != 0


@triton.jit
def is_dead(words, fields, entry, mask, most):
    """Return whether each entry is in the list of dead ones; none is, and nothing is read, if there is no list."""
    low = (entry * 0).to(tl.int32)
    high = low + fields[DEAD_COUNT].to(tl.int32)
    while most > 0:
        middle = (low + high) >> 1
        below = (low < high) & (word(words, fields, DEAD_LIST, middle, mask & (low < high)) < entry)
        high = tl.where((low < high) & ~below, middle, high)
        low = tl.where(below, middle + 1, low)
        most = most >> 1
    inside = mask & (low < fields[DEAD_COUNT])
    return inside & (word(words, fields, DEAD_LIST, low, inside) == entry)


@triton.jit
def ends_here(words, fields, node):
    ends = ((word(words, fields, TERMINAL, node >> 5, True) >> (node & 31)) & 1) != 0
    return ends & ~is_dead(words, fields, node + DEAD_NODE, ends, fields[DEAD_COUNT])


@triton.jit
def tail_entry(words, fields, local, mask):
    """Return the token at each position of the tails, and whether it is the last of its tail; 0 if not `mask`."""
    token_bits = fields[WIDTHS] & 0xFF
    at = (local - TAIL) * (token_bits + 1)
    low = word(words, fields, TAILS, at >> 5, mask)
    high = word(words, fields, TAILS, (at >> 5) + 1, mask)
    entry = (low | (high << 32)) >> (at & 31)
    one = token_bits * 0 + 1
    return entry & ((one << token_bits) - 1), ((entry >> token_bits) & 1) != 0


@triton.jit
def element(words, fields, SECTION: tl.constexpr, index, NARROW: tl.constexpr, mask):
    """Return element `index` of a section of 16-bit or 32-bit elements."""
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
