"""A round of a beam search in Triton. `beam_state` says what each function does.

A program reads the logits of one query token, looks at what follows one beam or at some children of one list, or
follows one edge: a round costs what its logits and its children cost. No launch depends on what a tensor holds.

A kernel has one form for all sizes, strides and addresses, which engines vary, so that none is compiled in a step. Only
what reads whole rows has two, for rows that all begin at a multiple of 16 bytes and for others.
"""

import struct
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from itemset.masking import triton_tables as tables
from itemset.ranking import beam_state
from itemset.ranking import triton_reads as reads
from itemset.ranking.beam_state import OPEN, Items, Pass, Rows
from itemset.ranking.triton_merge import follow_kernel, merge_kernel
from itemset.ranking.triton_select import best_keys

SUM_LANES, SUM_EACH = 512, 8  # logits that one program reads at once: lanes, and logits of each
CHILDREN = 512  # children that one program looks at, or at once; in races half as many
LANES = 256  # beams of a list among which a child's is looked for at once
ITEMS, OTHERS = 16, 128  # items that one program places, and how many others it compares them with at once
TOKENS = 32  # tokens that are copied at once
SUM_WARPS, WARPS, ROW_WARPS = 8, 4, 1
CANDIDATES = 1 << 23  # keys that stand in memory at once

_OPEN, _ENDED = tables.constants(beam_state, "OPEN ENDED")


def log_sums(now: Pass) -> Tensor:
    lists, count, queries, _ = now.logits.shape
    sums = torch.empty(lists, count, queries, device=now.logits.device)
    log_sums_kernel[(lists * count, queries)](
        **_arguments(now), sums=sums, ALIGNED=_aligned(now.logits), LANES=SUM_LANES, EACH=SUM_EACH, num_warps=SUM_WARPS
    )
    return sums


def legal_sums(now: Pass) -> Tensor:
    lists, count, _, _ = now.logits.shape
    sums = torch.empty(lists, count, 1, device=now.logits.device)
    legal_sums_kernel[(lists * count,)](**_arguments(now), sums=sums, LANES=CHILDREN, num_warps=WARPS)
    return sums


def ended(now: Pass, sums: Tensor) -> Tensor:
    lists, count, _ = sums.shape
    races = now.rules.power > 0
    ends = torch.empty(3, lists, count, dtype=torch.float64, device=sums.device)
    if count:
        ended_kernel[(lists * count,)](
            **_arguments(now), sums=sums, ends=ends, RACES=races, WHOLE=now.rules.whole, LANES=CHILDREN // 4,
            num_warps=WARPS if races else ROW_WARPS,
        )  # fmt: skip
    return ends


def best(now: Pass, sums: Tensor, ends: Tensor, size: int, wanted: int) -> tuple[Tensor, Tensor]:
    """As many keys as CANDIDATES stand in memory at once."""
    lists, rules, chosen = len(sums), now.rules, list[tuple[Tensor, Tensor]]()
    lanes = CHILDREN // 2 if rules.power else CHILDREN
    at_once = max(wanted, CANDIDATES // lists)
    for start in range(0, max(size, wanted), at_once):
        part = min(at_once, max(size, wanted) - start)
        keys = torch.empty(1 if rules.items == OPEN else 2, lists, part, dtype=torch.int64, device=sums.device)
        candidates_kernel[(-(-part // lanes), lists)](
            **_arguments(now), sums=sums, ends=ends, offsets=now.offsets, keys=keys, start=start, size=part,
            steps=sums.shape[1].bit_length(), ITEMS=rules.items, RACES=rules.power > 0, WHOLE=rules.whole, LANES=lanes,
            num_warps=WARPS,
        )  # fmt: skip
        keys, places = best_keys(keys, min(wanted, part))
        if chosen:
            keys, order = torch.cat((chosen[0][0], keys), 2).topk(wanted)
            places = torch.cat((chosen[0][1], places + start), 2).gather(2, order)
        chosen = [(keys, places)]
    return chosen[0]


def follow(now: Pass, sums: Tensor, ends: Tensor, keys: Tensor, places: Tensor, rows: int, riding: int) -> Rows:
    arena, longest = now.arena, now.rows.tokens.shape[2]
    new = Rows.empty(len(sums), rows, longest, sums.device)
    if rows:
        follow_kernel[(rows, len(sums))](
            **_arguments(now), sums=sums, ends=ends, offsets=now.offsets, keys=keys, places=places, new=new.table,
            new_tokens=new.tokens, words_end=len(arena.words), wanted=keys.shape[1], rows=rows, riding=riding,
            RACES=now.rules.power > 0, WHOLE=now.rules.whole, LANES=LANES, TOKENS=TOKENS, num_warps=ROW_WARPS,
        )  # fmt: skip
    return new


def merge(now: Pass, ends: Tensor, done: Rows | None, riding: int) -> tuple[Items, Tensor]:
    lists, k, longest = now.items.tokens.shape
    count, done_count = ends.shape[2], 0 if done is None else done.tokens.shape[1]
    merged = Items.empty(lists, k, longest, ends.device)
    alive = torch.empty(lists, dtype=torch.int64, device=ends.device)
    merge_kernel[(-(-(k + count + done_count) // ITEMS), lists)](
        *now.rows, *now.items, ends, *(done or (None, None)), *merged, alive,
        lists, now.rows.tokens.shape[1], count, done_count, k, longest, riding,
        ITEMS=ITEMS, OTHERS=OTHERS, TOKENS=TOKENS, num_warps=WARPS,
    )  # fmt: skip
    return merged, alive


def _arguments(now: Pass) -> dict[str, Any]:
    logits, items = now.logits, now.items
    # Of 0, and of next to nothing, Triton would make an int32: the bits of -0.0 need 64.
    weights = [weight if weight > 1e-300 else -0.0 for weight in now.rules[-4:]]
    floats = zip(("power", "boost", "length", "norm"), struct.unpack("<4q", struct.pack("<4d", *weights)), strict=True)
    names = ("list_stride", "row_stride", "query_stride", "vocabulary", "lists", "count", "queries", "width", "k")
    vocabulary = logits.shape[3] if now.columns is None else len(now.columns)
    sizes = (*logits.stride()[:3], vocabulary, *logits.shape[:3], now.rows.tokens.shape[1], items.tokens.shape[1])
    return {
        "words": now.arena.words, "sets": now.arena.sets, "logits": logits, "columns": now.columns,
        "table": now.rows.table, "tokens": now.rows.tokens, "bars": items.scores,
        **dict(zip(names, sizes, strict=True)), "longest": now.rows.tokens.shape[2], "taken": now.taken,
        "end_token": now.rules.end_token, **dict(floats),
    }  # fmt: skip


def _aligned(logits: Tensor) -> bool:
    """Return whether each row begins at a multiple of 16 bytes."""
    strides = [stride for size, stride in zip(logits.shape[:3], logits.stride(), strict=False) if size > 1]
    return all(at % 16 == 0 for at in (logits.data_ptr(), *(stride * logits.element_size() for stride in strides)))


@reads.kernel
def log_sums_kernel(
    words, sets, logits, columns, list_stride, row_stride, query_stride, vocabulary, table, tokens, bars,
    lists, width, count, queries, k, longest, taken, end_token, power, boost, length, norm, sums,
    ALIGNED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):
    row = tl.program_id(0)
    query = tl.program_id(1)
    one, at = row // count, row % count
    beam = one * width + at
    total = float("inf")  # so that nothing of a beam that cannot lead to something better passes the bar
    above = reads.float_of(table, reads.SCORE, lists * width, beam, True) > tl.load(bars + one * k + k - 1)
    if (query <= reads.int_of(table, reads.TAIL, lists * width, beam, True)) & above:
        # Each lane keeps its own greatest logit and its own sum.
        column = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        most = tl.full((LANES,), -float("inf"), tl.float32)
        part = tl.zeros((LANES,), tl.float32)
        mine = logits + one.to(tl.int64) * list_stride + at.to(tl.int64) * row_stride + query * query_stride
        if ALIGNED:
            mine = tl.multiple_of(mine, 16)
        whole = vocabulary // (LANES * EACH) * (LANES * EACH)
        for low in range(0, whole, LANES * EACH):  # without a mask, lanes read 16 bytes at once whatever the vocabulary
            most, part = reads.add_exponentials(most, part, tl.load(mine + low + column).to(tl.float32))
        logit = tl.load(mine + whole + column, mask=whole + column < vocabulary, other=-float("inf"))
        most, part = reads.add_exponentials(most, part, logit.to(tl.float32))
        total = reads.log_of_sums(most, part)
    tl.store(sums + row.to(tl.int64) * queries + query, total)


@reads.kernel
def legal_sums_kernel(
    words, sets, logits, columns, list_stride, row_stride, query_stride, vocabulary, table, tokens, bars,
    lists, width, count, queries, k, longest, taken, end_token, power, boost, length, norm, sums,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    one, at = row // count, row % count
    beam = one * width + at
    state = reads.int_of(table, reads.STATE, lists * width, beam, True)
    fields = tables.set_fields(sets, state)
    begin = reads.int_of(table, reads.FIRST, lists * width, beam, True)
    degree = reads.int_of(table, reads.DEGREE, lists * width, beam, True)
    mine = logits + one.to(tl.int64) * list_stride + at.to(tl.int64) * row_stride
    # The end token is one more child, the last.
    may_end = (end_token >= 0) & (end_token < vocabulary) & reads.may_end_at(words, fields, state & tables.LOCAL)
    lane = tl.arange(0, LANES)
    most = tl.full((LANES,), -float("inf"), tl.float32)
    part = tl.zeros((LANES,), tl.float32)
    for low in range(0, degree + 1, LANES):
        child = low + lane
        token = reads.edge_token(words, fields, begin + child, child < degree, True)
        token = tl.where(child < degree, token, end_token)
        alive = reads.edge_lives(words, fields, begin + child, child < degree, True)
        inside = (alive & (token < vocabulary)) | ((child == degree) & may_end)
        logit = reads.logit_of(mine, columns, token, inside).to(tl.float32)
        most, part = reads.add_exponentials(most, part, logit[:, None])
    tl.store(sums + row, reads.log_of_sums(most, part))


@reads.kernel
def ended_kernel(
    words, sets, logits, columns, list_stride, row_stride, query_stride, vocabulary, table, tokens, bars,
    lists, width, count, queries, k, longest, taken, end_token, power, boost, length, norm, sums, ends,
    RACES: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    one, at = row // count, row % count
    beam, plane = one * width + at, lists * width
    score = reads.float_of(table, reads.SCORE, plane, beam, True)
    log = reads.float_of(table, reads.LOG, plane, beam, True)
    live = score > tl.load(bars + one * k + k - 1)
    state = reads.int_of(table, reads.STATE, plane, beam, True)
    tail = reads.int_of(table, reads.TAIL, plane, beam, True)
    fields = tables.set_fields(sets, state)
    steps = tail + (end_token >= 0).to(tl.int64)
    may_end = live & (steps <= queries) & reads.may_end_at(words, fields, state & tables.LOCAL)
    steps = tl.where(may_end, steps, 0)
    mine = logits + one * list_stride + at * row_stride
    above = reads.float_of(table, reads.BOOST, plane, beam, True)
    # An item that ends at a node has a boost of its own; another one has its last edge's.
    local = state & tables.LOCAL
    own = reads.boost_of(words, sets, state, local + tables.DEAD_NODE, boost, above, may_end & (local < tables.WAITING))
    if RACES:
        power = power.to(tl.float64, bitcast=True)
        key = reads.int_of(table, reads.KEY, plane, beam, True)
        begin = reads.int_of(table, reads.FIRST, plane, beam, True)
        degree = tl.where(live, reads.int_of(table, reads.DEGREE, plane, beam, True), 0)
        sum_here = tl.load(sums + row * queries).to(tl.float64)
        part = tl.zeros((LANES,), tl.float64)
        near = tl.full((LANES,), float("inf"), tl.float64)
        for low in range(0, degree, LANES):
            child = low + tl.arange(0, LANES)
            token = reads.edge_token(words, fields, begin + child, child < degree, WHOLE)
            inside = reads.edge_lives(words, fields, begin + child, child < degree, WHOLE) & (token < vocabulary)
            logit = reads.logit_of(mine, columns, token, inside)
            share = power * (logit.to(tl.float64) - sum_here)
            is_edge = inside if WHOLE else inside & (begin + child < tables.TAIL)
            share += reads.boost_of(words, sets, state, begin + child, boost, above, is_edge) - above
            part += tl.where(inside, tl.exp(share), 0.0)
            time = reads.time_of(reads.token_bits(key, token), share)
            near = tl.minimum(near, tl.where(inside, time, float("inf")))
        total, nearest = tl.sum(part, 0), tl.min(near, 0)
        here = tl.minimum(nearest, reads.time_outside(key, total))
        clock = -score
    for column in range(0, steps):
        token = tl.load(tokens + beam * longest + taken + column, mask=column < tail, other=0)
        token = tl.where(column < tail, token, end_token)
        logit = reads.logit_of(mine + column * query_stride, columns, token, token < vocabulary)
        cost = logit.to(tl.float64) - tl.load(sums + row * queries + column)
        if RACES:
            share = power * cost + tl.where(column == 0, own - above, 0.0)
            after = reads.token_bits(key, token)
            time = reads.time_of(after, share)
            # What follows is certain but at the first step, which children may share.
            now = tl.minimum(time, reads.time_outside(key, tl.exp(share) + tl.where(column == 0, total, 0.0)))
            now = tl.where(column == 0, tl.minimum(now, nearest), now)
            here = tl.where(column == 0, now, here)
            clock = reads.clock_after(clock, time, now, power * log + tl.where(column == 0, above, own))
            key = after
        log += cost
    if RACES:
        tl.store(ends + reads.EARLIEST * lists * count + row, here)
        score = -clock
    else:
        scale, tokens_taken = length.to(tl.float64, bitcast=True), (taken + steps).to(tl.float64)
        score = log * tl.exp(-scale * tl.log(tl.maximum(tokens_taken, 1.0))) + own
    real = may_end & (score > -float("inf"))  # nor is a score that is no number one
    tl.store(ends + row, tl.where(real, score, -float("inf")))
    tl.store(ends + reads.END_LOG * lists * count + row, tl.where(real, log, -float("inf")))


@reads.kernel
def candidates_kernel(
    words, sets, logits, columns, list_stride, row_stride, query_stride, vocabulary, table, tokens, bars,
    lists, width, count, queries, k, longest, taken, end_token, power, boost, length, norm, sums, ends, offsets, keys,
    start, size, steps,
    ITEMS: tl.constexpr, RACES: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):
    one, plane = tl.program_id(1).to(tl.int64), lists * width
    column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    at, edge, inside = reads.child_at(table, offsets, plane, one, width, count, column, start, size, steps, LANES)
    beam, bar = one * width + at, tl.load(bars + one * k + k - 1)
    score = reads.float_of(table, reads.SCORE, plane, beam, inside)
    inside = inside & (score > bar)
    state = reads.int_of(table, reads.STATE, plane, one * width, True)
    fields = tables.set_fields(sets, state)
    token = reads.edge_token(words, fields, edge, inside, WHOLE)
    inside = reads.edge_lives(words, fields, edge, inside, WHOLE) & (token < vocabulary)
    mine = logits + one * list_stride + at.to(tl.int64) * row_stride
    logit = reads.logit_of(mine, columns, token, inside)
    sum_here = tl.load(sums + (one * count + at) * queries, mask=inside, other=0)
    log = reads.float_of(table, reads.LOG, plane, beam, inside)
    above = reads.float_of(table, reads.BOOST, plane, beam, inside)
    own = reads.boost_of(words, sets, state, edge, boost, above, inside if WHOLE else inside & (edge < tables.TAIL))
    if RACES:
        power = power.to(tl.float64, bitcast=True)
        share = power * (logit.to(tl.float64) - sum_here) + own - above
        time = reads.time_of(reads.token_bits(reads.int_of(table, reads.KEY, plane, beam, inside), token), share)
        earliest = tl.load(ends + reads.EARLIEST * lists * count + one * count + at, mask=inside, other=0)
        score = -reads.clock_after(-score, time, earliest, power * log + above)
    else:
        score = (log - sum_here + logit.to(tl.float64)) * norm.to(tl.float64, bitcast=True) + own
    better = inside & (score > bar)
    key = reads.key_of(score, edge)
    out = keys + one * size + column
    if ITEMS == _OPEN:
        tl.store(out, tl.where(better, key, reads.NOTHING), mask=column < size)
    else:
        after = reads.state_after_edge(words, fields, edge, inside, WHOLE)
        done = after == tables.END if ITEMS == _ENDED else after >= tables.END
        tl.store(out, tl.where(better & ~done, key, reads.NOTHING), mask=column < size)
        out += tl.num_programs(1).to(tl.int64) * size
        tl.store(out, tl.where(better & done, key, reads.NOTHING), mask=column < size)
