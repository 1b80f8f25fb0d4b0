"""A round of ranked lists in Numba, for a CPU. What each function does, and its arguments, is said in `torch_expand`.

Logits take a stride of 1 in the last dimension, and one stride between all query tokens of all rows, as in Triton. They
are read once, those of living beams alone, and then at the children.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from itemset.masking.arena import (
    ALIVE,
    COUNTED,
    DEAD_COUNT,
    DEAD_LIST,
    FAR_BLOCK,
    LABELS,
    NARROW_LABELS,
    NARROW_TARGETS,
    NO_BITS,
    NODE_BASE,
    ROW_OFFSETS,
    TAIL_BASE,
    TAILS,
    TARGETS,
    TERMINAL,
    WIDTHS,
    Arena,
)
from itemset.masking.batch import LOCAL
from itemset.ranking.torch_expand import ENDED, NOTHING, OPEN, Found, Rows, Rules
from itemset.trie.jit import compiled
from itemset.trie.pointers import Pointers, first_edge, label
from itemset.trie.walk import DEAD, END, STATE_BITS, TAIL, WAITING, is_alive, is_terminal, tail_entry, tail_token
from itemset.trie.walk import follow as step

_NO_BOUND = 1 << 40
_LOW = (1 << 32) - 1
_LOG2_E = np.float32(np.log2(np.e))
# 2^x for x from -1/2 to 1/2, as exactly as a float32 has it.
_POLYNOMIAL = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(value) for value in _POLYNOMIAL.coef)
_ROUNDS = np.float32(3 << 22)  # added to a small float32, it leaves no room for a fraction
_GLANCE = 64  # logits whose greatest is base enough for all, but if another is far above it
_FAR = np.float32(2.0**100)


def log_sums(logits: Tensor, rows: Rows, found: Found) -> Tensor:
    lists, queries = len(rows.scores), logits.shape[1]
    sums = torch.empty(lists, len(logits) // lists, queries, dtype=torch.float32)
    _log_sums(*_flat(logits), *_arrays(rows.scores, rows.tails, found.scores), sums.numpy())
    return sums


def legal_sums(arena: Arena, logits: Tensor, rows: Rows, offsets: Tensor, size: int, rules: Rules) -> Tensor:
    lists = len(rows.scores)
    sums = torch.empty(lists, len(logits) // lists, 1, dtype=torch.float32)
    columns = _arrays(rows.states, rows.first, rows.degrees)
    _legal_sums(*_tables(arena), *_flat(logits), *columns, rules.end_token, sums.numpy())
    return sums


def ended(arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, taken: int, rules: Rules) -> Tensor:
    out = torch.empty(sums.shape[:2], dtype=torch.float64)
    columns = _arrays(sums, rows.states, rows.scores, rows.tails, rows.tokens)
    _ended(*_tables(arena), *_flat(logits), *columns, taken, rules.end_token, out.numpy())
    return out


def best(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, size: int, wanted: int,
    rules: Rules,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    keys = torch.full((1 if rules.items == OPEN else 2, len(sums), wanted), NOTHING)
    places = torch.zeros_like(keys)
    columns = _arrays(sums, rows.states, rows.scores, rows.first, rows.degrees, found.scores)
    _best(*_tables(arena), *_flat(logits), *columns, rules.items, keys.numpy(), places.numpy())
    return keys, places


def follow(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, offsets: Tensor, keys: Tensor, places: Tensor, taken: int,
    columns: int, rules: Rules,
) -> Rows:  # fmt: skip
    shape = keys.shape
    states, parents, tails, first, degrees = torch.zeros(5, *shape, dtype=torch.int64)
    tokens = torch.full((*shape, rows.tokens.shape[2]), -1)
    new = Rows(tokens, states, torch.empty(shape, dtype=torch.float64), parents, tails, first, degrees)
    begins = rows.first, rows.degrees
    given = _arrays(sums, rows.states, rows.scores, rows.tokens, *begins, offsets, keys, places)
    _follow(*_tables(arena), *_flat(logits), *given, taken, rules.whole, *_arrays(*new))
    return new


def merge(found: Found, rows: Rows, scores: Tensor, done: Rows | None) -> Found:
    merged = Found(torch.full_like(found.tokens, -1), torch.empty_like(found.scores))
    tokens, ends = (rows.tokens[:, :0], scores[:, :0]) if done is None else (done.tokens, done.scores)
    _merge(*_arrays(*found, rows.tokens, scores, tokens, ends, *merged))
    return merged


def _arrays(*columns: Tensor) -> list[Any]:
    return [column.contiguous().numpy() for column in columns]


def _tables(arena: Arena) -> tuple[int, Any]:
    """Where the arena begins, and where its sets lie in it."""
    return arena.words.data_ptr(), arena.sets.numpy()


def _flat(logits: Tensor) -> tuple[Any, int, int]:
    """The logits from the first to the last, how far apart two tokens' lie, and the vocabulary."""
    tokens = logits.view(-1, logits.shape[2])
    if logits.dtype == torch.bfloat16:
        tokens = tokens.view(torch.int16)  # which NumPy knows; `_float` reads it
    elif logits.dtype != torch.float32:
        tokens = tokens.float()
    (count, vocabulary), stride = tokens.shape, tokens.stride(0)
    return tokens.as_strided(((count - 1) * stride + vocabulary,), (1,)).numpy(), stride, vocabulary


def _float(value: Any) -> Any:
    """A logit as float32; an integer is the bits of a bfloat16."""
    raise NotImplementedError  # in compiled code it is one of these


@overload(_float)
def _float_of(value):  # type: ignore[no-untyped-def]
    if isinstance(value, types.Integer):
        return lambda value: np.int32(np.int32(value) << np.int32(16)).view(np.float32)
    return lambda value: value


@compiled
def _greatest(logits):  # type: ignore[no-untyped-def]
    """Compare them as integers, of which a core takes eight or sixteen at once."""
    most = np.int32(-(1 << 31))
    for value in logits:
        most = max(most, _ordered(np.float32(_float(value)).view(np.int32)))
    return np.int32(_ordered(most)).view(np.float32)


@compiled
def _ordered(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 as an integer that is ordered as the floats are; and back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def _log_sum(logits):  # type: ignore[no-untyped-def]
    """Return the log-sum-exp. The greatest logit is looked for only if the sum would leave the float32s without it."""
    base = _greatest(logits[:_GLANCE])
    total = _sum_of_powers(logits, base)
    if not total < _FAR:  # or no number
        base = _greatest(logits)
        total = _sum_of_powers(logits, base)
    return base + np.log(total)


@compiled(fastmath={"reassoc", "contract"})
def _sum_of_powers(logits, base):  # type: ignore[no-untyped-def]
    """The sum of e^(logit - base): in any order, so that a core takes eight or sixteen at once."""
    total = np.float32(0)
    for value in logits:
        total += _power(_float(value) - base)
    return total


@compiled(fastmath={"contract"})  # what `reassoc` would do to a sum and a difference of the same is no rounding
def _power(x):  # type: ignore[no-untyped-def]
    """Return e^x by plain operations; 2^127 for more than that."""
    power = x * _LOG2_E
    power = np.float32(-126) if power < np.float32(-126) else power  # nan stays nan
    power = np.float32(127) if power > np.float32(127) else power
    rounded = np.float32(power + _ROUNDS)
    x = power - (rounded - _ROUNDS)
    part = np.float32(((((_C5 * x + _C4) * x + _C3) * x + _C2) * x + _C1) * x + _C0)
    # The last bits of `rounded` are the whole number, and go to where a float32 has its exponent.
    return np.int32(part.view(np.int32) + (rounded.view(np.int32) << np.int32(23))).view(np.float32)


@compiled
def _log_sums(logits, stride, vocabulary, scores, tails, found, sums):  # type: ignore[no-untyped-def]
    lists, count, queries = sums.shape
    for one in range(lists):
        for beam in range(count):
            above = scores[one, beam] > found[one, -1]
            for query in range(queries):
                sums[one, beam, query] = np.inf  # so that nothing of this beam passes the bar
                if above and query <= tails[one, beam]:
                    at = ((one * count + beam) * queries + query) * stride
                    sums[one, beam, query] = _log_sum(logits[at : at + vocabulary])


@compiled
def _legal_sums(  # type: ignore[no-untyped-def]
    words, sets, logits, stride, vocabulary, states, first, degrees, end_token, sums
):
    lists, count, _ = sums.shape
    for one in range(lists):
        tables = pointers_in(words, sets, states[one, 0])
        for beam in range(count):
            at = (one * count + beam) * stride
            begin, degree = first[one, beam], degrees[one, beam]
            may_end = 0 <= end_token < vocabulary and is_terminal(tables, states[one, beam] & LOCAL)
            most = np.float64(_float(logits[at + end_token])) if may_end else -np.inf
            for edge in range(begin, begin + degree):
                token = token_of(tables, edge)
                if token < vocabulary and lives(tables, edge):
                    most = max(most, np.float64(_float(logits[at + token])))
            base = most if most > -np.inf else 0.0
            total = np.exp(_float(logits[at + end_token]) - base) if may_end else 0.0
            for edge in range(begin, begin + degree):
                token = token_of(tables, edge)
                if token < vocabulary and lives(tables, edge):
                    total += np.exp(_float(logits[at + token]) - base)
            sums[one, beam, 0] = np.log(total) + base


@compiled
def _ended(  # type: ignore[no-untyped-def]
    words, sets, logits, stride, vocabulary, sums, states, scores, tails, tokens, taken, end_token, out
):
    lists, count, queries = sums.shape
    for one in range(lists):
        tables = pointers_in(words, sets, states[one, 0])
        for beam in range(count):
            out[one, beam] = -np.inf
            if not is_terminal(tables, states[one, beam] & LOCAL):
                continue
            score, at, tail = scores[one, beam], (one * count + beam) * queries, tails[one, beam]
            for query in range(tail):
                token = tokens[one, beam, taken + query]
                score += _logit(logits, (at + query) * stride, token, vocabulary) - sums[one, beam, query]
            if end_token >= 0:
                score += _logit(logits, (at + tail) * stride, end_token, vocabulary) - sums[one, beam, tail]
            out[one, beam] = score


@compiled
def _best(  # type: ignore[no-untyped-def]
    words, sets, logits, stride, vocabulary, sums, states, scores, first, degrees, found, items, keys, places
):
    """The best of each kind stand in a heap, the worst of them first."""
    lists, count, queries = sums.shape
    for one in range(lists):
        tables, bar, before = pointers_in(words, sets, states[one, 0]), found[one, -1], 0
        for beam in range(count):
            begin, degree = first[one, beam], degrees[one, beam]
            score_here = scores[one, beam] - sums[one, beam, 0]
            at = (one * count + beam) * queries * stride
            for child in range(degree if score_here > -np.inf else 0):
                edge = begin + child
                token = token_of(tables, edge)
                score = score_here + _logit(logits, at, token, vocabulary)
                if score > bar:
                    key = np.int64(_ordered(np.float32(score).view(np.int32))) << 32 | (_LOW - (edge & _LOW))
                    kind = 0
                    if items != OPEN:
                        after = _after(tables, edge)
                        kind = int(after == END if items == ENDED else after >= END)
                    if key > keys[kind, one, 0] and lives(tables, edge):
                        _replace(keys[kind, one], places[kind, one], key, before + child)
            before += degree
        for kind in range(len(keys)):
            order = np.argsort(keys[kind, one])[::-1]
            keys[kind, one], places[kind, one] = keys[kind, one][order], places[kind, one][order]


@compiled
def _replace(keys, places, key, place):  # type: ignore[no-untyped-def]
    """Put a key in the place of a heap's first, and restore the heap."""
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
def _follow(  # type: ignore[no-untyped-def]
    words, sets, logits, stride, vocabulary, sums, states, scores, tokens, first, degrees, offsets, keys, places, taken,
    whole, new_tokens, new_states, new_scores, new_parents, new_tails, new_first, new_degrees,
):  # fmt: skip
    lists, wanted, longest = new_tokens.shape
    _, count, queries = sums.shape
    for one in range(lists):
        number = states[one, 0] & ~LOCAL
        tables = pointers_in(words, sets, number)
        for n in range(wanted):
            new_states[one, n], new_scores[one, n], new_tails[one, n] = number | DEAD, -np.inf, -1
            if keys[one, n] == NOTHING:
                continue
            at = min(np.searchsorted(offsets[one], places[one, n], side="right"), count - 1)
            edge = _LOW - (keys[one, n] & _LOW)
            if not whole:  # inside a tail 32 bits of a key do not hold the state
                edge = first[one, at] + places[one, n] - (offsets[one, at] - degrees[one, at])
            token, state = token_of(tables, edge), _after(tables, edge)
            cost = _logit(logits, (one * count + at) * queries * stride, token, vocabulary) - sums[one, at, 0]
            new_tokens[one, n, :taken] = tokens[one, at, :taken]
            new_tokens[one, n, taken] = token
            tail = 0
            if whole and state >= TAIL:
                for column in range(taken + 1, longest):
                    entry = tail_entry(tables, state - TAIL + tail)
                    new_tokens[one, n, column] = entry & ((1 << tables.token_bits) - 1)
                    tail += 1
                    if entry >> tables.token_bits:
                        break
                state = END
            new_parents[one, n], new_tails[one, n], new_scores[one, n] = at, tail, scores[one, at] + cost
            new_states[one, n] = number | state
            if state >= TAIL:
                new_first[one, n], new_degrees[one, n] = state, 1
            elif state < WAITING:
                begin = first_edge(tables, state)
                new_first[one, n] = begin
                new_degrees[one, n] = first_edge(tables, state + 1) - begin


@compiled
def _merge(  # type: ignore[no-untyped-def]
    found_tokens, found_scores, tokens, ends, done_tokens, done_scores, new_tokens, new_scores
):
    lists, k, _ = found_tokens.shape
    count = ends.shape[1]
    for one in range(lists):
        scores = np.concatenate((found_scores[one], ends[one], done_scores[one]))
        scores[np.isnan(scores)] = -np.inf
        order = np.argsort(-scores, kind="mergesort")[:k]  # stable
        for place, i in enumerate(order):
            new_scores[one, place] = scores[i]
            if scores[i] == -np.inf:
                continue
            if i < k:
                new_tokens[one, place] = found_tokens[one, i]
            elif i < k + count:
                new_tokens[one, place] = tokens[one, i - k]
            else:
                new_tokens[one, place] = done_tokens[one, i - k - count]


@compiled
def _logit(logits, at, token, vocabulary):  # type: ignore[no-untyped-def]
    return np.float64(_float(logits[at + token])) if token < vocabulary else -np.inf


@compiled
def pointers_in(words, sets, state):  # type: ignore[no-untyped-def]
    """Return where the tables of a state's set lie. What is in an arena has been checked: it has no bounds here."""
    fields, base = sets[state >> STATE_BITS], np.int64(words)
    widths = fields[WIDTHS]
    return Pointers(
        base + 4 * fields[ROW_OFFSETS], base + 4 * fields[TERMINAL], base + 4 * fields[LABELS],
        base + 4 * fields[TARGETS], base + 4 * fields[NODE_BASE], base + 4 * fields[TAIL_BASE],
        base + 4 * fields[TAILS], base + 4 * fields[ALIVE] if fields[ALIVE] != NO_BITS else 0,
        base + 4 * fields[DEAD_LIST], WAITING, TAIL, widths >> FAR_BLOCK, _NO_BOUND, fields[DEAD_COUNT],
        widths & 0xFF, widths >> FAR_BLOCK, 2 if widths & NARROW_LABELS else 4,
        8 if widths & COUNTED else 2 if widths & NARROW_TARGETS else 4,
    )  # fmt: skip


@compiled
def token_of(tables, edge):  # type: ignore[no-untyped-def]
    """The token of an edge, or of a state inside a tail that stands in its place."""
    return tail_token(tables, edge) if edge >= TAIL else label(tables, edge)


@compiled
def _after(tables, edge):  # type: ignore[no-untyped-def]
    """The state after an edge, or after the next token of a tail."""
    if edge >= TAIL:
        return np.int64(END) if tail_entry(tables, edge - TAIL) >> tables.token_bits else edge + 1
    return step(tables, edge)


@compiled
def lives(tables, edge):  # type: ignore[no-untyped-def]
    """Whether there is an edge, or the state inside a tail that stands in its place."""
    return edge >= TAIL or is_alive(tables, edge)
