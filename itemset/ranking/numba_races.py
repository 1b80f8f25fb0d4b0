"""A round of races in Numba, for a CPU. What each function does, and its arguments, is said in `torch_races`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import LOCAL
from itemset.ranking.clocks import NOBODY, TOKEN, gap, log_exponential, log_left, log_of_sum, mixed
from itemset.ranking.numba_expand import (
    _LOW,
    _arrays,
    _flat,
    _logit,
    _ordered,
    _replace,
    _tables,
    lives,
    pointers_in,
    token_of,
)
from itemset.ranking.torch_expand import NOTHING, Found, Rows, Rules
from itemset.ranking.torch_races import Looked, Racing
from itemset.trie.jit import compiled
from itemset.trie.walk import is_terminal


def looked(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, found: Found, offsets: Tensor, size: int,
    wanted: int, taken: int, rules: Rules,
) -> Looked:  # fmt: skip
    columns = _arrays(sums, rows.states, rows.scores, rows.first, rows.degrees, rows.tails, rows.tokens)
    state = _arrays(racing.logs, racing.keys, found.scores)
    look = Looked(*torch.empty(3, *sums.shape[:2], dtype=torch.float64))
    given = (*_tables(arena), *_flat(logits), *columns, *state)
    _looked(*given, racing.power, taken, rules.end_token, *_arrays(*look[:3]))
    return look


def best(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, look: Looked, found: Found, offsets: Tensor,
    size: int, wanted: int, rules: Rules,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    keys = torch.full((1, len(sums), wanted), NOTHING)
    places = torch.zeros_like(keys)
    columns = _arrays(sums, rows.states, rows.scores, rows.first, rows.degrees)
    state = _arrays(racing.logs, racing.keys, look.earliest, found.scores)
    _best(*_tables(arena), *_flat(logits), *columns, *state, racing.power, keys[0].numpy(), places[0].numpy())
    return keys, places


def went_on(new: Rows, rows: Rows, racing: Racing, look: Looked, taken: int) -> tuple[Rows, Racing]:
    scores, keys = torch.empty_like(new.scores), torch.empty_like(new.parents)
    chosen = _arrays(new.scores, new.parents, new.tokens)
    _went_on(
        *chosen, *_arrays(rows.scores, racing.logs, racing.keys, look.earliest), racing.power, taken,
        *_arrays(scores, keys),
    )  # fmt: skip
    return new._replace(scores=scores), Racing(new.scores, keys, racing.power)


def merged(found: Found, logs: Tensor, rows: Rows, look: Looked) -> tuple[Found, Tensor]:
    new = Found(torch.full_like(found.tokens, -1), torch.empty_like(found.scores))
    new_logs = torch.empty_like(logs)
    _merged(*_arrays(*found, logs, rows.tokens, look.scores, look.logs, *new, new_logs))
    return new, new_logs


@compiled
def _nobody(key, total):  # type: ignore[no-untyped-def]
    return log_exponential(mixed(key, NOBODY)) - log_left(total)


@compiled
def _clock(clock, time, earliest, mass):  # type: ignore[no-untyped-def]
    """When what has such a time rings, after a prefix of such a mass that rings at `clock`."""
    return log_of_sum(clock, gap(time, earliest) - mass) if time < math.inf else math.inf


@compiled
def _looked(  # type: ignore[no-untyped-def]
    words, sets, logits, stride, vocabulary, sums, states, scores, first, degrees, tails, tokens, logs, keys, found,
    power, taken, end_token, earliest, ends, end_logs,
):  # fmt: skip
    lists, count, queries = sums.shape
    for one in range(lists):
        tables, bar = pointers_in(words, sets, states[one, 0]), found[one, -1]
        for beam in range(count):
            earliest[one, beam], ends[one, beam], end_logs[one, beam] = math.inf, -math.inf, 0.0
            if not scores[one, beam] > bar:
                continue
            at, tail, key = (one * count + beam) * queries, tails[one, beam], np.uint64(keys[one, beam])
            may_end, total, nearest = is_terminal(tables, states[one, beam] & LOCAL), 0.0, math.inf
            begin = first[one, beam]
            for edge in range(begin, begin + degrees[one, beam]):
                if lives(tables, edge):
                    token = token_of(tables, edge)
                    share = power * (_logit(logits, at * stride, token, vocabulary) - sums[one, beam, 0])
                    if share > -math.inf:
                        total += math.exp(share)
                        nearest = min(nearest, log_exponential(mixed(key, TOKEN + token)) - share)
            clock, mass = -scores[one, beam], power * logs[one, beam]
            for column in range(tail + 1 if may_end else 0):
                token = tokens[one, beam, taken + column] if column < tail else end_token
                logit = _logit(logits, (at + column) * stride, token, vocabulary)
                share = power * (logit - sums[one, beam, column])
                after = mixed(key, TOKEN + token)
                time = log_exponential(after) - share if share > -math.inf else math.inf
                if column:
                    here = min(time, _nobody(key, math.exp(share)))
                else:
                    here = min(time, nearest, _nobody(key, total + math.exp(share)))
                    earliest[one, beam] = here
                clock, mass, key = _clock(clock, time, here, mass), mass + share, after
            if may_end:
                ends[one, beam] = -clock if clock == clock else -math.inf
                end_logs[one, beam] = mass / power
            else:
                earliest[one, beam] = min(nearest, _nobody(key, total))


@compiled
def _best(  # type: ignore[no-untyped-def]
    words, sets, logits, stride, vocabulary, sums, states, scores, first, degrees, logs, keys, earliest, found, power,
    best_keys, places,
):  # fmt: skip
    """The best stand in a heap, the worst of them first."""
    lists, count, queries = sums.shape
    for one in range(lists):
        tables, bar, before = pointers_in(words, sets, states[one, 0]), found[one, -1], 0
        for beam in range(count):
            begin, degree = first[one, beam], degrees[one, beam]
            at, key = (one * count + beam) * queries * stride, np.uint64(keys[one, beam])
            clock, mass = -scores[one, beam], power * logs[one, beam]
            for child in range(degree if scores[one, beam] > bar else 0):
                edge = begin + child
                token = token_of(tables, edge)
                share = power * (_logit(logits, at, token, vocabulary) - sums[one, beam, 0])
                if not share > -math.inf:
                    continue
                time = log_exponential(mixed(key, TOKEN + token)) - share
                score = -_clock(clock, time, earliest[one, beam], mass)
                if score > bar:
                    order = np.int64(_ordered(np.float32(score).view(np.int32))) << 32 | (_LOW - (edge & _LOW))
                    if order > best_keys[one, 0] and lives(tables, edge):
                        _replace(best_keys[one], places[one], order, before + child)
            before += degree
        order = np.argsort(best_keys[one])[::-1]
        best_keys[one], places[one] = best_keys[one][order], places[one][order]


@compiled
def _went_on(  # type: ignore[no-untyped-def]
    new_logs, parents, tokens, scores, logs, keys, earliest, power, taken, new_scores, new_keys
):
    lists, width = new_logs.shape
    for one in range(lists):
        for n in range(width):
            new_scores[one, n], new_keys[one, n], at = -math.inf, 0, parents[one, n]
            if new_logs[one, n] > -math.inf:
                key = mixed(np.uint64(keys[one, at]), TOKEN + tokens[one, n, taken])
                time = log_exponential(key) - power * (new_logs[one, n] - logs[one, at])
                new_scores[one, n] = -_clock(-scores[one, at], time, earliest[one, at], power * logs[one, at])
                new_keys[one, n] = np.int64(key)


@compiled
def _merged(  # type: ignore[no-untyped-def]
    found_tokens, found_scores, found_logs, tokens, ends, end_logs, new_tokens, new_scores, new_logs
):
    k = found_tokens.shape[1]
    for one in range(len(ends)):
        scores = np.concatenate((found_scores[one], ends[one]))
        order = np.argsort(-scores, kind="mergesort")[:k]  # stable
        for place, i in enumerate(order):
            new_scores[one, place] = scores[i]
            new_logs[one, place] = found_logs[one, i] if i < k else end_logs[one, i - k]
            if scores[i] > -math.inf:
                new_tokens[one, place] = found_tokens[one, i] if i < k else tokens[one, i - k]
