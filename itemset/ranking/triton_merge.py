"""The Triton kernels that write the next beams and the best items: `follow` and `merge` of `beam_state`."""

import triton
import triton.language as tl

from itemset.masking import triton_tables as tables
from itemset.ranking import triton_reads as reads


@reads.kernel
def follow_kernel(
    words, sets, logits, columns, list_stride, row_stride, query_stride, vocabulary, table, tokens, bars,
    lists, width, count, queries, k, longest, taken, end_token, power, boost, length, norm, sums, ends, offsets, keys,
    places, new, new_tokens, words_end, wanted, rows, riding,
    RACES: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):
    one, n, plane = tl.program_id(1).to(tl.int64), tl.program_id(0), lists * width
    number = reads.int_of(table, reads.STATE, plane, one * width, True) & ~tables.LOCAL
    fields = tables.set_fields(sets, number)
    rides, first_beam = n < riding, one * width
    at = tl.zeros((), tl.int32)
    if rides:  # the beam that is the n-th of those with a tail that goes on
        bar = tl.load(bars + one * k + k - 1)
        seen = at
        found = at + count
        for low in range(0, count, LANES):
            lane = low + tl.arange(0, LANES)
            tails = reads.int_of(table, reads.TAIL, plane, first_beam + lane, lane < count)
            goes_on = (lane < count) & (tails + (end_token >= 0).to(tl.int64) > queries)
            goes_on = goes_on & (reads.float_of(table, reads.SCORE, plane, first_beam + lane, lane < count) > bar)
            place = seen + tl.cumsum(goes_on.to(tl.int32), 0)
            found = tl.minimum(found, tl.min(tl.where(goes_on & (place == n + 1), lane, count), 0))
            seen += tl.sum(goes_on.to(tl.int32), 0)
        at, live, child = found, found < count, seen.to(tl.int64)
    else:
        child = tl.load(places + one * wanted + n - riding)
        for low in range(0, count, LANES):
            lane = low + tl.arange(0, LANES)
            end = tl.load(offsets + first_beam + lane, mask=lane < count, other=child + 1)
            at += tl.sum((end <= child).to(tl.int32), 0)
        live = tl.load(keys + one * wanted + n - riding) != reads.NOTHING
    at = tl.where(live, tl.minimum(at, count - 1), 0).to(tl.int64)
    beam = first_beam + at
    is_child = live & (n >= riding)
    edge = reads.int_of(table, reads.FIRST, plane, beam, is_child) + child
    edge -= tl.load(offsets + beam, mask=is_child, other=0) - reads.int_of(table, reads.DEGREE, plane, beam, is_child)
    edge = tl.where(is_child, edge, 0)
    token = reads.edge_token(words, fields, edge, is_child, WHOLE)
    token = tl.where(rides, tl.load(tokens + beam * longest + taken, mask=live & rides, other=0), token)
    mine = logits + one * list_stride + at * row_stride
    logit = reads.logit_of(mine, columns, token, live & (token < vocabulary)).to(tl.float64)
    cost = logit - tl.load(sums + (one * count + at) * queries)
    mass = reads.float_of(table, reads.LOG, plane, beam, True)
    log = mass + cost
    above = reads.float_of(table, reads.BOOST, plane, beam, True)
    is_edge = is_child if WHOLE else is_child & (edge < tables.TAIL)
    own = reads.boost_of(words, sets, number, edge, boost, above, is_edge)
    score = log * norm.to(tl.float64, bitcast=True) + own
    key = tl.zeros((), tl.int64)
    if RACES:
        power = power.to(tl.float64, bitcast=True)
        key = reads.token_bits(reads.int_of(table, reads.KEY, plane, beam, True), token)
        earliest = tl.load(ends + reads.EARLIEST * lists * count + one * count + at)
        clock = -reads.float_of(table, reads.SCORE, plane, beam, True)
        share = power * cost + own - above
        score = -reads.clock_after(clock, reads.time_of(key, share), earliest, power * mass + above)
    local = reads.state_after_edge(words, fields, edge, is_child, WHOLE)
    local = tl.where(is_child, local, tl.where(live, tables.END, tables.DEAD))

    copied = tl.where(rides, longest, taken)
    tail = tl.where(rides, reads.int_of(table, reads.TAIL, plane, beam, True) - 1, 0)
    columns = longest - taken - 1
    over = local < tables.TAIL
    for low in range(0, longest, TOKENS):
        column = low + tl.arange(0, TOKENS)
        value = tl.load(tokens + beam * longest + column, mask=live & (column < copied) & (column < longest), other=-1)
        value = tl.where(is_child & (column == taken), token, value)
        if WHOLE:
            step = column - taken - 1
            if (low + TOKENS > taken) & ~over:
                at_tail = local + tl.maximum(step, 0)
                bit = (at_tail - tables.TAIL) * ((fields[tables.WIDTHS] & 0xFF) + 1)
                inside = (step >= 0) & (step < columns)
                # A tail ends before the tables do; what is read after it may not.
                exists = inside & ((bit >> 5) + 1 < words_end - fields[tables.TAILS])
                following, is_last = tables.tail_entry(words, fields, at_tail, exists)
                last = tl.min(tl.where(inside & is_last, step, columns), 0)
                inside = inside & (step <= last)
                value = tl.where(inside, following, value)
                tail += tl.sum(inside.to(tl.int64), 0)
                over = last < columns
        tl.store(new_tokens + (one * rows + n) * longest + column, value, mask=column < longest)
    if WHOLE:
        local = tl.where(local >= tables.TAIL, tables.END, local)
    is_node = local < tables.WAITING
    begin = tables.word(words, fields, tables.ROW_OFFSETS, local, is_node)
    degree = tables.word(words, fields, tables.ROW_OFFSETS, local + 1, is_node) - begin
    if not WHOLE:
        begin = tl.where(local >= tables.TAIL, local, begin)
        degree = tl.where(local >= tables.TAIL, 1, degree)
    out, size = new + one * rows + n, lists * rows
    tl.store(reads.column_of(out, reads.STATE, size), local | number)
    tl.store(reads.column_of(out, reads.SCORE, size), tl.where(live, score, -float("inf")).to(tl.int64, bitcast=True))
    tl.store(reads.column_of(out, reads.LOG, size), tl.where(live, log, -float("inf")).to(tl.int64, bitcast=True))
    tl.store(reads.column_of(out, reads.BOOST, size), tl.where(live, own, 0.0).to(tl.int64, bitcast=True))
    tl.store(reads.column_of(out, reads.KEY, size), tl.where(live, key, 0))
    tl.store(reads.column_of(out, reads.PARENT, size), at)
    tl.store(reads.column_of(out, reads.TAIL, size), tl.where(live, tail, -1).to(tl.int64))
    tl.store(reads.column_of(out, reads.FIRST, size), begin)
    tl.store(reads.column_of(out, reads.DEGREE, size), degree)


@reads.kernel
def merge_kernel(
    table, tokens, item_tokens, item_scores, item_logs, ends, done, done_tokens, new_tokens, new_scores, new_logs,
    alive, lists, width, count, done_count, k, longest, riding,
    ITEMS: tl.constexpr, OTHERS: tl.constexpr, TOKENS: tl.constexpr,
):
    """Every item finds its own place: how many are better, or as good and before it."""
    one = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        above = tl.zeros((), tl.int64)
        for low in range(riding, count, OTHERS):
            beam = low + tl.arange(0, OTHERS)
            score = reads.float_of(table, reads.SCORE, lists * width, one * width + beam, beam < count)
            above += tl.sum(((beam < count) & (score > tl.load(item_scores + one * k + k - 1))).to(tl.int64), 0)
        tl.store(alive + one, above)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    mine = _value_of(item, item_scores, ends, done, reads.SCORE, lists, one, count, done_count, k)
    rank = tl.zeros((ITEMS,), tl.int32)
    for low in range(0, k + count + done_count, OTHERS):
        other = low + tl.arange(0, OTHERS)
        score = _value_of(other, item_scores, ends, done, reads.SCORE, lists, one, count, done_count, k)[None, :]
        before = (score > mine[:, None]) | ((score == mine[:, None]) & (other[None, :] < item[:, None]))
        exists = other[None, :] < k + count + done_count
        rank += tl.sum((before & exists).to(tl.int32), 1)
    stays = (item < k + count + done_count) & (rank < k)
    place = one * k + rank
    logs = ends + reads.END_LOG * lists * count
    tl.store(new_scores + place, mine, mask=stays)
    log = _value_of(item, item_logs, logs, done, reads.LOG, lists, one, count, done_count, k)
    tl.store(new_logs + place, log, mask=stays)
    real = (stays & (mine > -float("inf")))[:, None]
    was_item, was_beam = (item < k)[:, None], (item < k + count)[:, None]
    for low in range(0, longest, TOKENS):
        column = (low + tl.arange(0, TOKENS))[None, :]
        copied = real & (column < longest)
        at = (one * k + item)[:, None] * longest + column
        value = tl.load(item_tokens + at, mask=copied & was_item, other=-1)
        at = (one * width + item - k)[:, None] * longest + column
        from_beam = tl.load(tokens + at, mask=copied & was_beam & ~was_item, other=-1)
        value = tl.where(was_item, value, from_beam)
        if done_tokens is not None:
            at = (one * done_count + item - k - count)[:, None] * longest + column
            value = tl.where(was_beam, value, tl.load(done_tokens + at, mask=copied & ~was_beam, other=-1))
        tl.store(new_tokens + place[:, None] * longest + column, value, mask=stays[:, None] & (column < longest))


@triton.jit
def _value_of(item, items, ends, done, COLUMN: tl.constexpr, lists, one, count, done_count, k):
    """A number of each: of the items so far, then the beams that end here, then what is done. None is -inf."""
    value = tl.load(items + one * k + item, mask=item < k, other=-float("inf"))
    end = tl.load(ends + one * count + item - k, mask=(item >= k) & (item < k + count), other=-float("inf"))
    value = tl.where(item < k, value, end)
    if done is not None:
        is_done = (item >= k + count) & (item < k + count + done_count)
        row = one * done_count + item - k - count
        value = tl.where(is_done, reads.float_of(done, COLUMN, lists * done_count, row, is_done), value)
    return value
