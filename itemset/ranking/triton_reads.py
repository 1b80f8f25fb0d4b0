"""What kernels of a beam search read and compute, in Triton: beams, children, random numbers, sums of exponentials."""

import triton
import triton.language as tl

from itemset.masking import batch
from itemset.masking import triton_tables as tables
from itemset.ranking import beam_state, exact_sampling

STATE, SCORE, LOG, KEY, PARENT, TAIL, FIRST, DEGREE, BOOST = map(tl.constexpr, range(beam_state.COLUMNS))
END_LOG, EARLIEST, NOTHING = tables.constants(beam_state, "END_LOG EARLIEST NOTHING")
_LOW = tl.constexpr((1 << 32) - 1)
_POTENTIAL, _BOOSTED, _BOOSTED_COUNT, _EDGES = tables.constants(batch, "POTENTIAL BOOSTED BOOSTED_COUNT EDGES")
_NOBODY, _TOKEN = tables.constants(exact_sampling, "NOBODY TOKEN")
# The constants of `exact_sampling.mixed`, as int64.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))

kernel = tables.jit


@triton.jit
def column_of(table, COLUMN: tl.constexpr, size):
    """Where a column of `Rows.table` begins, each of which has `size` entries."""
    return table + COLUMN * size


@triton.jit
def int_of(table, COLUMN: tl.constexpr, size, beam, mask):
    return tl.load(column_of(table, COLUMN, size) + beam, mask=mask, other=0)


@triton.jit
def float_of(table, COLUMN: tl.constexpr, size, beam, mask):
    return int_of(table, COLUMN, size, beam, mask).to(tl.float64, bitcast=True)


@triton.jit
def logit_of(logits, columns, token, inside):
    """The logit of a token, in its own column if no columns are given."""
    if columns is not None:
        token = tl.load(columns + token, mask=inside, other=0)
    return tl.load(logits + token, mask=inside, other=-float("inf"))


@triton.jit
def child_at(table, offsets, plane, one, width, count, column, start, size, steps, LANES: tl.constexpr):
    """The beam whose child stands at each place, its edge, and whether there is one: `size` places from `start` on."""
    place = start + column
    ends = offsets + one * width
    # The beam whose children end after this place, the first of them.
    low = tl.zeros((LANES,), tl.int32)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        after = tl.load(ends + middle, mask=low < high, other=0) <= place
        high = tl.where((low < high) & ~after, middle, high)
        low = tl.where((low < high) & after, middle + 1, low)
    inside = (column < size) & (low < count)
    beam = one * width + low
    begin = tl.load(ends + low, mask=inside, other=0) - int_of(table, DEGREE, plane, beam, inside)
    return low, int_of(table, FIRST, plane, beam, inside) + place - begin, inside


@triton.jit
def boost_of(words, sets, state, entry, boost, above, inside):
    """What the potentials of some entries (`trie.potential`) add, no more than that `above` them; elsewhere as much.

    state: of the set. entry: int64, edges or DEAD_NODE + nodes. boost: what they are multiplied by, as bits of float64.
    """
    own = above + (entry * 0).to(tl.float64)  # of the shape of the entries
    scale = boost.to(tl.float64, bitcast=True)
    if scale != 0.0:
        row = tables.set_row(sets, state)
        dense, first, count = tl.load(row + _POTENTIAL), tl.load(row + _BOOSTED), tl.load(row + _BOOSTED_COUNT)
        has = dense != tables.NO_BITS
        at = tl.where(entry < tables.DEAD_NODE, entry, entry - tables.DEAD_NODE + tl.load(row + _EDGES))
        bits = tl.load(words + dense + at, mask=inside & has, other=0)
        low = (entry * 0).to(tl.int32)
        high = low + count.to(tl.int32)
        most = count
        while most > 0:
            middle = (low + high) >> 1
            there = inside & (low < high)
            found = tl.load(words + first + middle, mask=there, other=0).to(tl.int64) & _LOW
            below = there & (found < entry)
            high = tl.where(there & ~below, middle, high)
            low = tl.where(below, middle + 1, low)
            most = most >> 1
        listed = inside & (low < count)
        listed = listed & ((tl.load(words + first + low, mask=listed, other=0).to(tl.int64) & _LOW) == entry)
        bits = tl.where(has, bits, tl.load(words + first + count + low, mask=listed, other=0))
        own = scale * bits.to(tl.float32, bitcast=True).to(tl.float64)
        own = tl.where(inside, tl.minimum(above, own), above)
    return own


@triton.jit
def key_of(score, edge):
    """As `beam_state.score_of` says."""
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (_LOW - (edge & _LOW))


@triton.jit
def add_exponentials(most, part, logits):
    """The greatest logit of each lane and its sum of exponentials, with some more logits [lanes, any]."""
    greatest = tl.maximum(most, tl.max(logits, 1))
    base = tl.where(greatest == -float("inf"), 0.0, greatest)
    return greatest, part * tl.exp(most - base) + tl.sum(tl.exp(logits - base[:, None]), 1)


@triton.jit
def log_of_sums(most, part):
    """The log-sum-exp of all lanes."""
    greatest = tl.max(most, 0)
    base = tl.where(greatest == -float("inf"), 0.0, greatest)
    return tl.log(tl.sum(part * tl.exp(most - base), 0)) + base


@triton.jit
def may_end_at(words, fields, local):
    ends = local == tables.END
    if local < tables.WAITING:
        ends = tables.ends_here(words, fields, local)
    return ends


@triton.jit
def edge_lives(words, fields, edge, inside, WHOLE: tl.constexpr):
    """Whether there is each edge, or the state inside a tail that stands in its place."""
    if WHOLE:
        return inside & tables.is_alive(words, fields, edge, inside, fields[tables.DEAD_COUNT])
    else:
        is_edge = inside & (edge < tables.TAIL)
        return inside & (~is_edge | tables.is_alive(words, fields, edge, is_edge, fields[tables.DEAD_COUNT]))


@triton.jit
def edge_token(words, fields, edge, inside, WHOLE: tl.constexpr):
    """The token of each edge, or of a state inside a tail that stands in its place."""
    token = tables.element(words, fields, tables.LABELS, edge, tables.NARROW_LABELS, inside & (edge < tables.TAIL))
    if not WHOLE:
        in_tail = inside & (edge >= tables.TAIL)
        token = tl.where(in_tail, tables.tail_entry(words, fields, edge, in_tail)[0], token)
    return token


@triton.jit
def state_after_edge(words, fields, edge, inside, WHOLE: tl.constexpr):
    """The state after each edge, or after the next token of a tail."""
    after = tables.state_after(words, fields, edge, inside & (edge < tables.TAIL))
    if not WHOLE:
        in_tail = inside & (edge >= tables.TAIL)
        last = tables.tail_entry(words, fields, edge, in_tail)[1]
        after = tl.where(in_tail, tl.where(last, tables.END, edge + 1), after)
    return after


@triton.jit
def token_bits(key, token):
    return random_bits(key, token + _TOKEN)


@triton.jit
def random_bits(key, n):
    """As `exact_sampling.mixed`, on int64."""
    z = key + (n + 1) * _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def log_exponential(bits):
    """As `exact_sampling.log_exponential`."""
    unit = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.0**-52
    return tl.log(-tl.log(unit))


@triton.jit
def time_of(key, share):
    """When what has such a share rings, by its key: never if it has none."""
    return tl.where(share > -float("inf"), log_exponential(key) - share, float("inf"))


@triton.jit
def time_outside(key, total):
    """The time of what lies outside the set, which has what a total of shares leaves."""
    left = tl.where(total < 1.0, tl.log(1.0 - tl.minimum(total, 1.0)), -float("inf"))
    return log_exponential(random_bits(key, _NOBODY)) - left


@triton.jit
def clock_after(clock, time, earliest, mass):
    """When what has such a time rings, after a prefix of such a mass that rings at `clock`."""
    gap = time + tl.log(1.0 - tl.exp(tl.minimum(earliest - time, 0.0)))
    after = tl.where(time > earliest, gap, -float("inf")) - mass
    apart = tl.log(1.0 + tl.exp(-tl.abs(clock - after)))
    return tl.where(time < float("inf"), tl.maximum(clock, after) + apart, float("inf"))
