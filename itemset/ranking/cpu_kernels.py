"""A round of a beam search in Numba, for a CPU. `beam_state` says what each function does.

Logits are read once, those of living beams alone, and then at the children. A heap holds the best children's keys.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from itemset.masking.batch import LOCAL
from itemset.masking.cpu_kernels import row_at
from itemset.ranking import beam_state as form
from itemset.ranking.beam_state import NOTHING, SCORE, STATE, Items, Pass, Rows
from itemset.ranking.cpu_log_sum import as_float, log_sum, ordered
from itemset.ranking.exact_sampling import TOKEN, clock_after, log_exponential, mixed, time_outside
from itemset.trie import walk
from itemset.trie.pointers import compiled, first_edge, label, pointers_at
from itemset.trie.potential import potential_of
from itemset.trie.tables import TERMINAL
from itemset.trie.walk import DEAD, END, TAIL, WAITING, is_alive, is_terminal, tail_entry, tail_token

_LOW = (1 << 32) - 1


def log_sums(now: Pass) -> Tensor:
    sums = torch.empty(now.logits.shape[:3])
    _log_sums(*_arguments(now), sums.numpy())
    return sums


def legal_sums(now: Pass) -> Tensor:
    sums = torch.empty(now.logits.shape[:3])
    _legal_sums(*_arguments(now), now.rules.end_token, sums.numpy())
    return sums


def ended(now: Pass, sums: Tensor) -> Tensor:
    ends = torch.empty(3, *sums.shape[:2], dtype=torch.float64)
    _ended(*_arguments(now), now.rules.end_token, sums.numpy(), now.taken, now.rules[3:], ends.numpy())
    return ends


def best(now: Pass, sums: Tensor, ends: Tensor, size: int, wanted: int) -> tuple[Tensor, Tensor]:
    items = now.rules.items
    keys = torch.full((1 if items == form.OPEN else 2, len(sums), wanted), NOTHING)
    places = torch.zeros_like(keys)
    _best(*_arguments(now), sums.numpy(), ends.numpy(), items, now.rules[3:], keys.numpy(), places.numpy())
    return keys, places


def follow(now: Pass, sums: Tensor, ends: Tensor, keys: Tensor, places: Tensor, rows: int, riding: int) -> Rows:
    new = Rows.empty(len(sums), rows, now.rows.tokens.shape[2], now.arena.device)
    tables = (tensor.numpy() for tensor in (sums, ends, keys, places, now.offsets, *new))
    _follow(*_arguments(now), now.rules.end_token, *tables, now.taken, now.rules.whole, now.rules[3:], riding)
    return new


def merge(now: Pass, ends: Tensor, done: Rows | None, riding: int) -> tuple[Items, Tensor]:
    """In torch: some hundreds of items need no loop of our own."""
    rows, items, count = now.rows, now.items, ends.shape[2]
    each = [items, Items(rows.tokens[:, :count], ends[form.END_SCORE], ends[form.END_LOG])]
    if done is not None:
        each.append(Items(done.tokens, done.scores, done.table[form.LOG].view(torch.float64)))
    tokens, scores, logs = (torch.cat(parts, 1) for parts in zip(*each, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : items.scores.shape[1]]
    scores, tokens = scores.gather(1, order), tokens.take_along_dim(order[:, :, None], 1)
    alive = (rows.scores[:, riding:count] > items.scores[:, -1:]).sum(1)
    return Items(tokens.masked_fill_(scores.isneginf()[:, :, None], -1), scores, logs.gather(1, order)), alive


def _arguments(now: Pass) -> tuple[Any, ...]:
    """Return what all loops take first: the rows of the arena's sets, the logits from the first to the last, how far
    apart those of two lists, rows and query tokens lie, each token's column, the beams, and the items' scores."""
    logits = now.logits
    if logits.dtype == torch.bfloat16:
        logits = logits.view(torch.int16)  # which NumPy knows; `as_float` reads it
    elif logits.dtype != torch.float32:
        logits = logits.float()
    columns = _own_columns(logits.shape[3]) if now.columns is None else now.columns.numpy()
    *strides, _ = logits.stride()
    size = sum((count - 1) * stride for count, stride in zip(logits.shape, logits.stride(), strict=True)) + 1
    flat = logits.as_strided((size,), (1,)).numpy()
    table, tokens, scores = (tensor.numpy() for tensor in (*now.rows, now.items.scores))
    return now.arena.rows_at, flat, tuple(strides), columns, table, tokens, scores


@lru_cache(8)
def _own_columns(vocabulary: int) -> NDArray[np.int32]:
    return np.arange(vocabulary, dtype=np.int32)


@compiled
def _log_sums(sets, logits, strides, columns, table, tokens, bars, sums):
    lists, count, queries = sums.shape
    reals = table.view(np.float64)
    for one in range(lists):
        for beam in range(count):
            above = reals[SCORE, one, beam] > bars[one, -1]
            for query in range(queries):
                sums[one, beam, query] = np.inf  # so that nothing of this beam passes the bar
                if above and query <= table[form.TAIL, one, beam]:
                    at = one * strides[0] + beam * strides[1] + query * strides[2]
                    sums[one, beam, query] = log_sum(logits[at : at + len(columns)])


@compiled
def _legal_sums(sets, logits, strides, columns, table, tokens, bars, end_token, sums):
    lists, count, _ = sums.shape
    for one in range(lists):
        tables = pointers_at(row_at(sets, table[STATE, one, 0]))
        for beam in range(count):
            at = one * strides[0] + beam * strides[1]
            begin, degree = table[form.FIRST, one, beam], table[form.DEGREE, one, beam]
            may_end = 0 <= end_token < len(columns) and is_terminal(tables, table[STATE, one, beam] & LOCAL)
            most, total = -np.inf, 0.0
            for edge in range(begin - may_end, begin + degree):
                token = end_token if edge < begin else label(tables, edge)
                if edge < begin or (token < len(columns) and is_alive(tables, edge)):
                    logit = np.float64(as_float(logits[at + columns[token]]))
                    if logit > most:
                        most, total = logit, total * np.exp(most - logit) + 1
                    elif logit > -np.inf:
                        total += np.exp(logit - most)
            sums[one, beam, 0] = np.log(total) + most


@compiled
def _ended(sets, logits, strides, columns, table, tokens, bars, end_token, sums, taken, weights, ends):
    lists, count, queries = sums.shape
    (power, boost, length, _), reals = weights, table.view(np.float64)
    for one in range(lists):
        tables = pointers_at(row_at(sets, table[STATE, one, 0]))
        for beam in range(count):
            ends[: form.EARLIEST, one, beam], ends[form.EARLIEST, one, beam] = -np.inf, np.inf
            score, log = reals[SCORE, one, beam], reals[form.LOG, one, beam]
            if not score > bars[one, -1]:
                continue
            at, tail = one * strides[0] + beam * strides[1], table[form.TAIL, one, beam]
            above = own = reals[form.BOOST, one, beam]
            state = table[STATE, one, beam] & LOCAL
            # An item that ends at a node has a boost of its own; another one has its last edge's.
            if boost and state < WAITING and is_terminal(tables, state):
                own = boost * potential_of(tables, TERMINAL + state)
            clock, key, total, nearest = -score, np.uint64(table[form.KEY, one, beam]), 0.0, math.inf
            steps = tail + (end_token >= 0)
            if steps > queries or not is_terminal(tables, state):
                steps = -1
            begin = table[form.FIRST, one, beam]
            for edge in range(begin, begin + table[form.DEGREE, one, beam] if power else begin):
                if _lives(tables, edge):
                    token = _token(tables, edge)
                    share = power * (_logit(logits, at, token, columns) - sums[one, beam, 0])
                    share += _boost_of(tables, edge, boost, above) - above
                    if share > -math.inf:
                        total += math.exp(share)
                        nearest = min(nearest, log_exponential(mixed(key, TOKEN + token)) - share)
            if power and steps < 0:
                ends[form.EARLIEST, one, beam] = min(nearest, time_outside(key, total))
            for column in range(steps):
                token = tokens[one, beam, taken + column] if column < tail else end_token
                cost = _logit(logits, at + column * strides[2], token, columns) - sums[one, beam, column]
                if power:
                    after, share = mixed(key, TOKEN + token), power * cost + (0.0 if column else own - above)
                    time = log_exponential(after) - share if share > -math.inf else math.inf
                    if column:
                        here = min(time, time_outside(key, math.exp(share)))
                    else:
                        here = min(time, nearest, time_outside(key, total + math.exp(share)))
                        ends[form.EARLIEST, one, beam] = here
                    clock, key = clock_after(clock, time, here, power * log + (own if column else above)), after
                log += cost
            score = -clock if power else (log * (taken + steps) ** -length if length else log) + own
            if steps >= 0 and score > -math.inf:
                ends[form.END_SCORE, one, beam], ends[form.END_LOG, one, beam] = score, log


@compiled
def _best(sets, logits, strides, columns, table, tokens, bars, sums, ends, items, weights, keys, places):
    """The best of each kind stand in a heap, the worst of them first."""
    lists, count, _ = sums.shape
    power, boost, _, norm = weights
    scores, logs = table[SCORE].view(np.float64), table[form.LOG].view(np.float64)
    boosts = table[form.BOOST].view(np.float64)
    for one in range(lists):
        tables, bar, before = pointers_at(row_at(sets, table[STATE, one, 0])), bars[one, -1], 0
        for beam in range(count):
            begin, degree, score_here = table[form.FIRST, one, beam], table[form.DEGREE, one, beam], scores[one, beam]
            sum_here, at = sums[one, beam, 0], one * strides[0] + beam * strides[1]
            above = boosts[one, beam]
            random, mass = np.uint64(table[form.KEY, one, beam]), power * logs[one, beam] + above
            base = logs[one, beam] - sum_here
            for child in range(degree if score_here > bar else 0):
                edge = begin + child
                token = _token(tables, edge)
                own = _boost_of(tables, edge, boost, above)
                score = (base + _logit(logits, at, token, columns)) * norm + own
                if power:
                    share = power * (_logit(logits, at, token, columns) - sum_here) + own - above
                    if not share > -math.inf:
                        continue
                    time = log_exponential(mixed(random, TOKEN + token)) - share
                    score = -clock_after(-score_here, time, ends[form.EARLIEST, one, beam], mass)
                if score > bar:
                    key = np.int64(ordered(np.float32(score).view(np.int32))) << 32 | (_LOW - (edge & _LOW))
                    kind = 0
                    if items != form.OPEN:
                        after = state_after(tables, edge)
                        kind = int(after == END if items == form.ENDED else after >= END)
                    if key > keys[kind, one, 0] and _lives(tables, edge):
                        _replace(keys[kind, one], places[kind, one], key, before + child)
            before += degree
        for kind in range(len(keys)):
            order = np.argsort(keys[kind, one])[::-1]
            keys[kind, one], places[kind, one] = keys[kind, one][order], places[kind, one][order]


@compiled
def _replace(keys, places, key, place):
    at, size = 0, len(keys)
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[at], places[at] = keys[child], places[child]
        at = child
    keys[at], places[at] = key, place


@compiled
def _follow(
    sets, logits, strides, columns, table, tokens, bars, end_token, sums, ends, keys, places, offsets, new, new_tokens,
    taken, whole, weights, riding,
):  # fmt: skip
    lists, count, queries = sums.shape
    (power, boost, _, norm), reals, new_reals = weights, table.view(np.float64), new.view(np.float64)
    new[:], new_tokens[:] = 0, -1
    for one in range(lists):
        number, n = table[STATE, one, 0] & ~LOCAL, 0
        tables = pointers_at(row_at(sets, number))
        new[STATE, one], new[form.TAIL, one] = number | DEAD, -1
        new_reals[SCORE, one] = new_reals[form.LOG, one] = -np.inf
        for beam in range(count):  # the next token of each tail, of which others are left for later passes
            tail = table[form.TAIL, one, beam]
            if n == riding or not reals[SCORE, one, beam] > bars[one, -1] or tail + (end_token >= 0) <= queries:
                continue
            at, token = one * strides[0] + beam * strides[1], tokens[one, beam, taken]
            log = reals[form.LOG, one, beam] + (_logit(logits, at, token, columns) - sums[one, beam, 0])
            new_reals[form.LOG, one, n], new_reals[form.BOOST, one, n] = log, reals[form.BOOST, one, beam]
            new_reals[SCORE, one, n] = log * norm + reals[form.BOOST, one, beam]
            new[STATE, one, n], new[form.TAIL, one, n] = table[STATE, one, beam], tail - 1
            new[form.PARENT, one, n], new_tokens[one, n] = beam, tokens[one, beam]
            n += 1
        for n in range(riding, new.shape[2]):
            place = places[one, n - riding]
            if keys[one, n - riding] == NOTHING:
                continue
            at = min(np.searchsorted(offsets[one], place, side="right"), count - 1)
            edge = table[form.FIRST, one, at] + place - (offsets[one, at] - table[form.DEGREE, one, at])
            token, state = _token(tables, edge), state_after(tables, edge)
            cost = _logit(logits, one * strides[0] + at * strides[1], token, columns) - sums[one, at, 0]
            before, above = reals[form.LOG, one, at], reals[form.BOOST, one, at]
            own = _boost_of(tables, edge, boost, above)
            log = before + cost
            score = log * norm + own
            if power:
                key = mixed(np.uint64(table[form.KEY, one, at]), TOKEN + token)
                time = log_exponential(key) - (power * cost + own - above)
                clock, earliest = -reals[SCORE, one, at], ends[form.EARLIEST, one, at]
                score = -clock_after(clock, time, earliest, power * before + above)
                new[form.KEY, one, n] = np.int64(key)
            new_reals[SCORE, one, n], new_reals[form.LOG, one, n], new_reals[form.BOOST, one, n] = score, log, own
            new_tokens[one, n, :taken] = tokens[one, at, :taken]
            new_tokens[one, n, taken] = token
            tail = 0
            if whole and state >= TAIL:
                for column in range(taken + 1, new_tokens.shape[2]):
                    entry = tail_entry(tables, state - TAIL + tail)
                    new_tokens[one, n, column] = entry & ((1 << tables.token_bits) - 1)
                    tail += 1
                    if entry >> tables.token_bits:
                        break
                state = END
            new[form.PARENT, one, n], new[form.TAIL, one, n], new[STATE, one, n] = at, tail, number | state
            if state >= TAIL:
                new[form.FIRST, one, n], new[form.DEGREE, one, n] = state, 1
            elif state < WAITING:
                begin = first_edge(tables, state)
                new[form.FIRST, one, n], new[form.DEGREE, one, n] = begin, first_edge(tables, state + 1) - begin


@compiled
def _logit(logits, at, token, columns):
    return np.float64(as_float(logits[at + columns[token]])) if token < len(columns) else -np.inf


@compiled
def state_after(tables, edge):
    if edge >= TAIL:
        return np.int64(END) if tail_entry(tables, edge - TAIL) >> tables.token_bits else edge + 1
    return walk.follow(tables, edge)


@compiled
def _token(tables, edge):
    """The token of an edge, or of a state inside a tail that stands in its place."""
    return tail_token(tables, edge) if edge >= TAIL else label(tables, edge)


@compiled
def _boost_of(tables, edge, boost, above):
    """What a child's potential adds: inside a tail, as much as that of the beam `above` it; no more anywhere."""
    if not boost or edge >= TAIL:
        return above
    return min(above, boost * potential_of(tables, edge))


@compiled
def _lives(tables, edge):
    """Whether there is an edge, or the state inside a tail that stands in its place."""
    return edge >= TAIL or is_alive(tables, edge)
