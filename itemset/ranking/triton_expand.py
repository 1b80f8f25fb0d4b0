"""A round of ranked lists in Triton. What each function does, and its arguments, is said in `torch_expand`.

Logits take a stride of 1 in the last dimension, and one stride between all query tokens of all rows. One program reads
the logits of one token, looks at some children of one list, or follows one beam's edge: a round costs what its logits
and its children cost. No launch depends on what a tensor holds.

A kernel has one form for all sizes, strides and addresses, so that none is compiled in a step: an engine pads the rows
of its logits or does not, and parts of them begin anywhere. Only what reads whole rows has two, for rows that all begin
at a multiple of 16 bytes and for others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from itemset.masking import triton_tables as tables
from itemset.masking.arena import Arena
from itemset.ranking import torch_expand
from itemset.ranking.torch_expand import OPEN, Found, Rows, Rules

SUM_LANES, SUM_EACH = 512, 8  # logits that one program reads at once: so many lanes, so many each
CHILDREN = 512  # children that one program looks at, or at once
ENDS = 64  # beams that one program looks at for items that end there
LANES = 256  # beams of a list among which a child's is looked for at once
ITEMS, OTHERS = 16, 128  # items that one program places, and how many others it compares them with at once
COLUMNS = 32  # tokens that are copied at once
SUM_WARPS, WARPS, FOLLOW_WARPS = 8, 4, 1

# All but the addresses of tables: these stay for as long as an engine runs.
_ANY_VALUE = ["width", "count", "queries", "k", "longest", "taken", "columns", "start", "size", "steps", "end_token"]
_ANY_VALUE += ["wanted", "keys_stride", "done_count", "words_end", "logits_stride", "vocabulary"]
_ANY_ADDRESS = ["scores", "tails", "found_scores", "sums", "states", "tokens", "offsets", "first", "degrees", "out"]
_ANY_ADDRESS += ["logits", "keys", "places", "ends", "done_scores", "done_tokens", "found_tokens"]
_ANY_ADDRESS += [f"new_{name}" for name in Rows._fields]

_NOTHING = tl.constexpr(torch_expand.NOTHING)
_OPEN = tl.constexpr(torch_expand.OPEN)
_ENDED = tl.constexpr(torch_expand.ENDED)
_LOW = tl.constexpr((1 << 32) - 1)
_jit = tables.jit(_ANY_VALUE, _ANY_ADDRESS)


def log_sums(logits: Tensor, rows: Rows, found: Found) -> Tensor:
    (lists, width), (total, queries, vocabulary) = rows.scores.shape, logits.shape
    count, flat = total // lists, logits.view(-1, vocabulary)
    sums = torch.empty(lists, count, queries, dtype=torch.float32, device=logits.device)
    _log_sums_kernel[(total, queries)](
        flat, flat.stride(0), vocabulary, rows.scores, rows.tails, found.scores, sums,
        width, count, queries, found.scores.shape[1],
        ALIGNED=_aligned(flat), LANES=SUM_LANES, EACH=SUM_EACH, num_warps=SUM_WARPS,
    )
    return sums


def legal_sums(arena: Arena, logits: Tensor, rows: Rows, offsets: Tensor, size: int, rules: Rules) -> Tensor:
    (lists, width), (total, _, vocabulary) = rows.scores.shape, logits.shape
    flat = logits.view(-1, vocabulary)
    sums = torch.empty(lists, total // lists, 1, dtype=torch.float32, device=logits.device)
    _legal_sums_kernel[(total,)](
        arena.words, arena.sets, flat, flat.stride(0), vocabulary, rows.states, rows.first, rows.degrees, sums,
        width, total // lists, rules.end_token,
        WHOLE=rules.whole, LANES=CHILDREN, num_warps=WARPS,
    )
    return sums


def ended(arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, taken: int, rules: Rules) -> Tensor:
    lists, count, queries = sums.shape
    flat = logits.view(-1, logits.shape[2])
    out = torch.empty(lists, count, dtype=torch.float64, device=logits.device)
    _ended_kernel[(-(-lists * count // ENDS),)](
        arena.words, arena.sets, flat, flat.stride(0), flat.shape[1], sums,
        rows.states, rows.scores, rows.tails, rows.tokens, out,
        lists * count, rows.scores.shape[1], count, queries, rows.tokens.shape[2], taken, rules.end_token,
        LANES=ENDS, num_warps=WARPS,
    )
    return out


def candidates(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, start: int, size: int,
    rules: Rules,
) -> Tensor:
    lists, count, queries = sums.shape
    flat = logits.view(-1, logits.shape[2])
    keys = torch.empty(1 if rules.items == OPEN else 2, lists, size, dtype=torch.int64, device=logits.device)
    _candidates_kernel[(-(-size // CHILDREN), lists)](
        arena.words, arena.sets, flat, flat.stride(0), flat.shape[1], sums,
        rows.states, rows.scores, rows.first, rows.degrees, offsets, found.scores, keys,
        rows.scores.shape[1], count, queries, found.scores.shape[1], start, size, count.bit_length(),
        ITEMS=rules.items, WHOLE=rules.whole, LANES=CHILDREN, num_warps=WARPS,
    )
    return keys


def best(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, size: int, wanted: int,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    return torch_expand.best(arena, logits, sums, rows, found, offsets, size, wanted, rules, candidates)


def follow(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, offsets: Tensor, keys: Tensor, places: Tensor, taken: int,
    columns: int, rules: Rules,
) -> Rows:
    (lists, wanted), longest = keys.shape, rows.tokens.shape[2]
    flat = logits.view(-1, logits.shape[2])
    scores = torch.empty(lists, wanted, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(lists, wanted, longest, dtype=torch.int64, device=logits.device)
    states, parents, tails, first, degrees = (
        torch.empty(lists, wanted, dtype=torch.int64, device=logits.device) for _ in range(5)
    )
    _follow_kernel[(wanted, lists)](
        arena.words, len(arena.words), arena.sets, flat, flat.stride(0), flat.shape[1], sums,
        rows.states, rows.scores, rows.tokens, rows.first, rows.degrees, offsets, keys, places,
        tokens, states, scores, parents, tails, first, degrees,
        rows.scores.shape[1], *sums.shape[1:], wanted, keys.stride(0), longest, taken, columns,
        WHOLE=rules.whole, LANES=LANES, COLUMNS=COLUMNS, num_warps=FOLLOW_WARPS,
    )
    return Rows(tokens, states, scores, parents, tails, first, degrees)


def merge(found: Found, rows: Rows, scores: Tensor, done: Rows | None) -> Found:
    lists, k, longest = found.tokens.shape
    count, done_count = scores.shape[1], 0 if done is None else done.scores.shape[1]
    merged = Found(torch.empty_like(found.tokens), torch.empty_like(found.scores))
    _merge_kernel[(-(-(k + count + done_count) // ITEMS), lists)](
        found.tokens, found.scores, rows.tokens, scores,
        None if done is None else done.tokens, None if done is None else done.scores,
        merged.tokens, merged.scores,
        rows.tokens.shape[1], count, done_count, k, longest,
        ITEMS=ITEMS, OTHERS=OTHERS, COLUMNS=COLUMNS, num_warps=WARPS,
    )
    return merged


def _aligned(logits: Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes."""
    bytes_apart: int = logits.stride(0) * logits.element_size()
    return logits.data_ptr() % 16 == 0 and bytes_apart % 16 == 0


@_jit
def _log_sums_kernel(
    logits, logits_stride, vocabulary, scores, tails, found_scores, sums, width, count, queries, k,
    ALIGNED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):
    row = tl.program_id(0)
    query = tl.program_id(1)
    beam = (row // count) * width + row % count
    at = row.to(tl.int64) * queries + query
    bar = tl.load(found_scores + (row // count) * k + k - 1)
    total = float("inf")  # so that nothing of a beam that cannot lead to something better passes the bar
    if (query <= tl.load(tails + beam)) & (tl.load(scores + beam) > bar):
        # Each lane keeps its own greatest logit and its own sum.
        column = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        most = tl.full((LANES,), -float("inf"), tl.float32)
        part = tl.zeros((LANES,), tl.float32)
        mine = logits + at * logits_stride
        if ALIGNED:
            mine = tl.multiple_of(mine, 16)
        whole = vocabulary // (LANES * EACH) * (LANES * EACH)
        for low in range(0, whole, LANES * EACH):  # without a mask, lanes read 16 bytes at once whatever the vocabulary
            most, part = _added(most, part, tl.load(mine + low + column).to(tl.float32))
        logit = tl.load(mine + whole + column, mask=whole + column < vocabulary, other=-float("inf"))
        most, part = _added(most, part, logit.to(tl.float32))
        total = _log_sum(most, part)
    tl.store(sums + at, total)


@_jit
def _legal_sums_kernel(
    words, sets, logits, logits_stride, vocabulary, states, first, degrees, sums, width, count, end_token,
    WHOLE: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0)
    beam = (row // count) * width + row % count
    state = tl.load(states + beam)
    fields = tables.set_fields(sets, state)
    begin, degree = tl.load(first + beam), tl.load(degrees + beam)
    row_logits = logits + row.to(tl.int64) * logits_stride
    # The end token is one more child, the last.
    local = state & tables.LOCAL
    may_end = _may_end(words, fields, local, fields[tables.DEAD_COUNT])
    may_end = (end_token >= 0) & (end_token < vocabulary) & may_end
    lane = tl.arange(0, LANES)
    most = tl.full((LANES,), -float("inf"), tl.float32)
    part = tl.zeros((LANES,), tl.float32)
    for low in range(0, degree + 1, LANES):
        child = low + lane
        token = _token(words, fields, begin + child, child < degree, WHOLE)
        token = tl.where(child < degree, token, end_token)
        alive = _alive(words, fields, begin + child, child < degree, WHOLE)
        inside = (alive & (token < vocabulary)) | ((child == degree) & may_end)
        logit = tl.load(row_logits + token, mask=inside, other=-float("inf")).to(tl.float32)
        most, part = _added(most, part, logit[:, None])
    tl.store(sums + row, _log_sum(most, part))


@_jit
def _ended_kernel(
    words, sets, logits, logits_stride, vocabulary, sums, states, scores, tails, tokens, out,
    size, width, count, queries, longest, taken, end_token,
    LANES: tl.constexpr,
):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = row < size
    beam = (row // count).to(tl.int64) * width + row % count
    at = row.to(tl.int64) * queries
    state = tl.load(states + beam, mask=exists, other=tables.DEAD)
    fields = tables.set_fields(sets, state)
    may_end = exists & _may_end(words, fields, state & tables.LOCAL, tl.max(fields[tables.DEAD_COUNT], 0))
    tail = tl.load(tails + beam, mask=may_end, other=0)
    score = tl.load(scores + beam, mask=may_end, other=-float("inf"))
    for query in range(queries - 1):
        inside = may_end & (query < tail)
        token = tl.load(tokens + beam * longest + taken + query, mask=inside, other=0)
        logit = tl.load(
            logits + (at + query) * logits_stride + token, mask=inside & (token < vocabulary), other=-float("inf")
        )
        cost = logit.to(tl.float64) - tl.load(sums + at + query, mask=inside, other=0)
        score += tl.where(inside, cost, 0.0)
    if end_token >= 0:
        inside = may_end & (end_token < vocabulary)
        logit = tl.load(logits + (at + tail) * logits_stride + end_token, mask=inside, other=-float("inf"))
        score += logit.to(tl.float64) - tl.load(sums + at + tail, mask=may_end, other=0)
    tl.store(out + row, score, mask=exists)


@_jit
def _candidates_kernel(
    words, sets, logits, logits_stride, vocabulary, sums,
    states, scores, first, degrees, offsets, found_scores, keys,
    width, count, queries, k, start, size, steps,
    ITEMS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):
    one = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    low, edge, inside = _child_at(first, degrees, offsets, one, width, count, column, start, size, steps, LANES)
    beam = one * width + low
    fields = tables.set_fields(sets, tl.load(states + one * width))
    token = _token(words, fields, edge, inside, WHOLE)
    row = (one * count + low) * queries
    inside = _alive(words, fields, edge, inside, WHOLE) & (token < vocabulary)
    logit = tl.load(logits + row * logits_stride + token, mask=inside, other=-float("inf")).to(tl.float64)
    score = tl.load(scores + beam, mask=inside, other=-float("inf")) - tl.load(sums + row, mask=inside, other=0) + logit
    better = inside & (score > tl.load(found_scores + one * k + k - 1))
    key = _key_of(score, edge)
    out = keys + one * size + column
    if ITEMS == _OPEN:
        tl.store(out, tl.where(better, key, _NOTHING), mask=column < size)
    else:
        after_edge = _after(words, fields, edge, inside, WHOLE)
        done = after_edge == tables.END if ITEMS == _ENDED else after_edge >= tables.END
        tl.store(out, tl.where(better & ~done, key, _NOTHING), mask=column < size)
        out += tl.num_programs(1).to(tl.int64) * size
        tl.store(out, tl.where(better & done, key, _NOTHING), mask=column < size)


@_jit
def _follow_kernel(
    words, words_end, sets, logits, logits_stride, vocabulary, sums,
    states, scores, tokens, first, degrees, offsets, keys, places,
    new_tokens, new_states, new_scores, new_parents, new_tails, new_first, new_degrees,
    width, count, queries, wanted, keys_stride, longest, taken, columns,
    WHOLE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):
    one = tl.program_id(1).to(tl.int64)
    out = one * wanted + tl.program_id(0)
    key = tl.load(keys + one * keys_stride + tl.program_id(0))
    place = tl.load(places + one * keys_stride + tl.program_id(0))
    live = key != _NOTHING
    sets_bits = tl.load(states + one * width) & ~tables.LOCAL
    fields = tables.set_fields(sets, sets_bits)
    at = 0
    for low in range(0, count, LANES):
        lane = low + tl.arange(0, LANES)
        end = tl.load(offsets + one * width + lane, mask=lane < count, other=place + 1)
        at += tl.sum((end <= place).to(tl.int32), 0)
    at = tl.where(live, tl.minimum(at, count - 1), 0)
    row = (one * count + at) * queries
    if WHOLE:
        edge = tl.where(live, _LOW - (key & _LOW), 0)
    else:  # inside a tail 32 bits of a key do not hold the state
        beam = one * width + at
        begin = tl.load(offsets + beam) - tl.load(degrees + beam)
        edge = tl.where(live, tl.load(first + beam) + place - begin, 0)
    token = _token(words, fields, edge, live, WHOLE)
    logit = tl.load(logits + row * logits_stride + token, mask=live & (token < vocabulary), other=-float("inf"))
    score = tl.load(scores + one * width + at) + (logit.to(tl.float64) - tl.load(sums + row))
    local = _after(words, fields, edge, live, WHOLE)

    tail = 0
    over = (local < tables.TAIL) | ~live
    for low in range(0, longest, COLUMNS):
        column = low + tl.arange(0, COLUMNS)
        before = live & (column < taken)
        value = tl.load(tokens + (one * width + at) * longest + column, mask=before, other=-1)
        value = tl.where(live & (column == taken), token, value)
        if WHOLE:
            step = column - taken - 1
            if (low + COLUMNS > taken) & ~over:
                bits = fields[tables.WIDTHS] & 0xFF
                bit = (local - tables.TAIL + tl.maximum(step, 0)) * (bits + 1)
                inside = (step >= 0) & (step < columns)
                word = bit >> 5
                # A tail ends before the tables do; what is read after it may not.
                exists = inside & (word + 1 < words_end - fields[tables.TAILS])
                low_word = tables.word(words, fields, tables.TAILS, word, exists)
                high_word = tables.word(words, fields, tables.TAILS, word + 1, exists)
                entry = (low_word | (high_word << 32)) >> (bit & 31)
                mask = ((bits * 0 + 1) << bits) - 1
                last = tl.min(tl.where(inside & (((entry >> bits) & 1) != 0), step, columns), 0)
                inside = inside & (step <= last)
                value = tl.where(inside, entry & mask, value)
                tail += tl.sum(inside.to(tl.int32), 0)
                over = last < columns
        tl.store(new_tokens + out * longest + column, value, mask=column < longest)
    if WHOLE:
        local = tl.where(local >= tables.TAIL, tables.END, local)
    is_node = live & (local < tables.WAITING)
    begin = tables.word(words, fields, tables.ROW_OFFSETS, local, is_node)
    degree = tables.word(words, fields, tables.ROW_OFFSETS, local + 1, is_node) - begin
    if not WHOLE:
        in_tail = live & (local >= tables.TAIL)
        begin, degree = tl.where(in_tail, local, begin), tl.where(in_tail, 1, degree)
    tl.store(new_states + out, tl.where(live, local, tables.DEAD) | sets_bits)
    tl.store(new_scores + out, tl.where(live, score, -float("inf")))
    tl.store(new_parents + out, at.to(tl.int64))
    tl.store(new_tails + out, tl.where(live, tail, -1).to(tl.int64))
    tl.store(new_first + out, begin)
    tl.store(new_degrees + out, degree)


@_jit
def _merge_kernel(
    found_tokens, found_scores, tokens, ends, done_tokens, done_scores, new_tokens, new_scores,
    width, count, done_count, k, longest,
    ITEMS: tl.constexpr, OTHERS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Every item finds its own place: how many are better, or as good and before it."""
    one = tl.program_id(1).to(tl.int64)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    mine = _score_of(item, found_scores, ends, done_scores, one, count, done_count, k)
    rank = tl.zeros((ITEMS,), tl.int32)
    for low in range(0, k + count + done_count, OTHERS):
        other = low + tl.arange(0, OTHERS)
        score = _score_of(other, found_scores, ends, done_scores, one, count, done_count, k)[None, :]
        before = (score > mine[:, None]) | ((score == mine[:, None]) & (other[None, :] < item[:, None]))
        exists = other[None, :] < k + count + done_count
        rank += tl.sum((before & exists).to(tl.int32), 1)
    stays = (item < k + count + done_count) & (rank < k)
    place = one * k + rank
    tl.store(new_scores + place, mine, mask=stays)
    real = (stays & (mine > -float("inf")))[:, None]
    was_found, was_beam = (item < k)[:, None], (item < k + count)[:, None]
    for low in range(0, longest, COLUMNS):
        column = (low + tl.arange(0, COLUMNS))[None, :]
        copied = real & (column < longest)
        at = (one * k + item)[:, None] * longest + column
        value = tl.load(found_tokens + at, mask=copied & was_found, other=-1)
        at = (one * width + item - k)[:, None] * longest + column
        from_beam = tl.load(tokens + at, mask=copied & was_beam & ~was_found, other=-1)
        value = tl.where(was_found, value, from_beam)
        if done_tokens is not None:
            at = (one * done_count + item - k - count)[:, None] * longest + column
            value = tl.where(was_beam, value, tl.load(done_tokens + at, mask=copied & ~was_beam, other=-1))
        tl.store(new_tokens + place[:, None] * longest + column, value, mask=stays[:, None] & (column < longest))


@triton.jit
def _child_at(first, degrees, offsets, one, width, count, column, start, size, steps, LANES: tl.constexpr):
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
    inside = (column < size) & (place < tl.load(ends + width - 1))
    beam = one * width + low
    end = tl.load(ends + low, mask=inside, other=0)
    edge = tl.load(first + beam, mask=inside, other=0) + place - end + tl.load(degrees + beam, mask=inside, other=0)
    return low, edge, inside


@triton.jit
def _key_of(score, edge):
    """As `torch_expand.keys_of_scores`."""
    bits = score.to(tl.float32).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (_LOW - (edge & _LOW))


@triton.jit
def _score_of(item, found_scores, ends, done_scores, one, count, done_count, k):
    """The score of each: what was found, then the beams that end here, then what is done. None is -inf."""
    score = tl.load(found_scores + one * k + item, mask=item < k, other=-float("inf"))
    end = tl.load(ends + one * count + item - k, mask=(item >= k) & (item < k + count), other=-float("inf"))
    score = tl.where(item < k, score, end)
    if done_scores is not None:
        is_done = (item >= k + count) & (item < k + count + done_count)
        done = tl.load(done_scores + one * done_count + item - k - count, mask=is_done, other=-float("inf"))
        score = tl.where(is_done, done, score)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def _added(most, part, logits):
    """The greatest logit of each lane and its sum of exponentials, with some more logits [lanes, any]."""
    greatest = tl.maximum(most, tl.max(logits, 1))
    base = tl.where(greatest == -float("inf"), 0.0, greatest)
    return greatest, part * tl.exp(most - base) + tl.sum(tl.exp(logits - base[:, None]), 1)


@triton.jit
def _log_sum(most, part):
    """The log-sum-exp of all lanes."""
    greatest = tl.max(most, 0)
    base = tl.where(greatest == -float("inf"), 0.0, greatest)
    return tl.log(tl.sum(part * tl.exp(most - base), 0)) + base


@triton.jit
def _may_end(words, fields, local, most):
    """Whether an item may end at each state. most: as for `tables.is_alive`."""
    is_node = local < tables.WAITING
    terminal = tables.word(words, fields, tables.TERMINAL, local >> 5, is_node)
    ends = is_node & (((terminal >> (local & 31)) & 1) != 0)
    return (local == tables.END) | (ends & ~tables.is_dead(words, fields, local + tables.DEAD_NODE, ends, most))


@triton.jit
def _alive(words, fields, edge, inside, WHOLE: tl.constexpr):
    """Whether there is each edge, or the state inside a tail that stands in its place."""
    if WHOLE:
        return inside & tables.is_alive(words, fields, edge, inside, fields[tables.DEAD_COUNT])
    else:
        is_edge = inside & (edge < tables.TAIL)
        return inside & (~is_edge | tables.is_alive(words, fields, edge, is_edge, fields[tables.DEAD_COUNT]))


@triton.jit
def _token(words, fields, edge, inside, WHOLE: tl.constexpr):
    """The token of each edge, or of a state inside a tail that stands in its place."""
    token = tables.element(words, fields, tables.LABELS, edge, tables.NARROW_LABELS, inside & (edge < tables.TAIL))
    if not WHOLE:
        in_tail = inside & (edge >= tables.TAIL)
        token = tl.where(in_tail, _tail_entry(words, fields, edge, in_tail)[0], token)
    return token


@triton.jit
def _after(words, fields, edge, inside, WHOLE: tl.constexpr):
    """The state after each edge, or after the next token of a tail."""
    after = tables.state_after(words, fields, edge, inside & (edge < tables.TAIL))
    if not WHOLE:
        in_tail = inside & (edge >= tables.TAIL)
        last = _tail_entry(words, fields, edge, in_tail)[1]
        after = tl.where(in_tail, tl.where(last, tables.END, edge + 1), after)
    return after


@triton.jit
def _tail_entry(words, fields, state, inside):
    """As `tables.tail_entry`, where `inside`."""
    bits = fields[tables.WIDTHS] & 0xFF
    at = (state - tables.TAIL) * (bits + 1)
    low = tables.word(words, fields, tables.TAILS, at >> 5, inside)
    high = tables.word(words, fields, tables.TAILS, (at >> 5) + 1, inside)
    entry = (low | (high << 32)) >> (at & 31)
    return entry & (((bits * 0 + 1) << bits) - 1), ((entry >> bits) & 1) != 0
