"""What a round of ranked lists does on the device, in plain torch: the reference.

Children only are looked at, never the vocabulary's mask. Shapes never depend on what the tensors hold and nothing is
read back. `triton_expand` and `numba_expand` have the same functions with the same arguments and results, but for
`candidates`, which is a step of `best`. `beams.Beams` calls them.

In all of them, of L lists with W beams each: logits [L * R, q, vocabulary] of any floating dtype are those of the first
R beams of each list at the q tokens that a pass had of each; sums [L, R, q] float32 are what `log_sums` or `legal_sums`
makes of them; `taken` is how many tokens stand before a beam's tail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from itemset.masking.arena import TAILS, WIDTHS, Arena
from itemset.masking.batch import LOCAL
from itemset.masking.torch_tables import TablesOf
from itemset.trie.walk import DEAD, END, STATE_BITS, TAIL

NOTHING = -(1 << 63)  # the key of no candidate
OPEN, ENDED, ALONE = range(3)  # which candidates are items at once: none, those that have ended, those that stand alone

_LOW = (1 << 32) - 1
_AT_ONCE = 1 << 17  # logits that are made float32 at once: they stay in a core's cache
CANDIDATES = 1 << 23  # keys that stand in memory at once


class Rules(NamedTuple):
    """What does not change during a search.

    end_token: what stands after an item and counts in its score, or -1: an end costs nothing.
    items: OPEN, ENDED or ALONE: which children are items as soon as they are found.
    whole: whether a tail is read at once; else beams go through it token by token.
    """

    end_token: int
    items: int
    whole: bool


class Rows(NamedTuple):
    """Beams. All but `tokens` are [L, W]; a beam that there is not has the score -inf and the state DEAD.

    tokens: [L, W, longest] int64, -1 after a beam's tokens. Those of its tail are among them.
    states: int64, with the set's number, as in `Slots.row_states`. A beam with its tail is at END.
    scores: float64, without what the tail costs.
    parents: int64, the row of the round before that the beam continues; 0 where there is no beam.
    tails: int64, how many tokens the tail has; -1 where there is no beam.
    first, degrees: int64. The first child's edge, and how many children there are. Inside a tail, where beams go on
        token by token, the one child has the state in place of an edge.
    """

    tokens: Tensor
    states: Tensor
    scores: Tensor
    parents: Tensor
    tails: Tensor
    first: Tensor
    degrees: Tensor


class Found(NamedTuple):
    """Items, best first. tokens: [L, k, longest] int64, -1 after an item's tokens. scores: [L, k] float64, -inf where
    there is no item."""

    tokens: Tensor
    scores: Tensor


class Children(NamedTuple):
    """Children of all beams of each list, [L, size] each, one beam after another.

    at: int64, the row of the beam. edge: int64, as in `Rows.first`; 0 where there is none. inside: whether there is a
    child. token: int64. logit: float32 of its token, -inf where there is none.
    """

    at: Tensor
    edge: Tensor
    inside: Tensor
    token: Tensor
    logit: Tensor


def log_sums(logits: Tensor, rows: Rows, found: Found) -> Tensor:
    """Return the log-sum-exp over the vocabulary, [L, R, q] float32. Where no beam asks for it, it may be infinite."""
    lists, (_, queries, vocabulary) = len(rows.scores), logits.shape
    at_once = max(1, _AT_ONCE // (queries * vocabulary))
    parts = []
    for part in logits.split(at_once):
        values = part.float()
        # The softmax has a vectorized kernel of one pass, and of its largest value the sum follows.
        parts.append(values.amax(-1) - values.softmax(-1).amax(-1).log())
    return torch.cat(parts).view(lists, -1, queries)


def legal_sums(arena: Arena, logits: Tensor, rows: Rows, offsets: Tensor, size: int, rules: Rules) -> Tensor:
    """Return the log-sum-exp over what may follow each beam, [L, R, 1] float32: its children, and the end token if an
    item may end there. offsets: as for `candidates`. size: the most children that a list may have."""
    lists = len(rows.scores)
    count = len(logits) // lists
    at, *_, logit = children(arena, logits, rows, offsets, 0, size, rules)
    ends = TablesOf(arena, rows.states).may_end(rows.states & LOCAL)[:, :count]
    end = torch.where(ends, end_logits(logits.unflatten(0, (lists, count))[:, :, 0], rules.end_token), -torch.inf)
    most = end.scatter_reduce(1, at, logit, "amax").nan_to_num(neginf=0.0)
    total = (end - most).exp().scatter_add(1, at, (logit - most.gather(1, at)).exp())
    return (total.log() + most)[:, :, None]


def ended(arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, taken: int, rules: Rules) -> Tensor:
    """Return the score of the item that ends at each beam, [L, R] float64, -inf where none does.

    It counts the tail's tokens, which stand at column `taken` and after it, and the end token.
    """
    lists, count, queries = sums.shape
    logits = logits.unflatten(0, (lists, count))
    states, tails, scores = (column[:, :count] for column in (rows.states, rows.tails, rows.scores))
    columns = torch.arange(queries, device=logits.device)
    if queries > 1:
        tokens = rows.tokens[:, :count, taken : taken + queries - 1]
        run = token_logits(logits[:, :, :-1], tokens).double() - sums[:, :, :-1]
        scores = scores + torch.where(columns[:-1] < tails[:, :, None], run, 0).sum(2)
    if rules.end_token >= 0:
        last = end_logits(logits, rules.end_token).double() - sums
        scores = scores + torch.where(columns == tails[:, :, None], last, 0).sum(2)
    return torch.where(TablesOf(arena, states).may_end(states & LOCAL), scores, -torch.inf)


def candidates(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, start: int, size: int,
    rules: Rules,
) -> Tensor:  # fmt: skip
    """Return the keys of the children of all beams of each list, `size` of them from the child `start` on.

    The children of a list stand one beam after another; offsets [L, W] int64 says where each beam's end. A key orders
    children by score, equal ones by edge: the score as float32 above, the edge below, NOTHING for what is no child, or
    cannot beat the last of `found`. Of a state inside a tail, which stands in an edge's place, the lowest 32 bits are
    below. No two children have the same key, but for two in tails that lie exactly 2^32 apart.

    Keys are [1, L, size] int64 for OPEN, else [2, L, size]: those of the beams to go on with, then those of items.
    """
    at, edge, inside, _, logit = children(arena, logits, rows, offsets, start, size, rules)
    scores = (rows.scores[:, : sums.shape[1]] - sums[:, :, 0]).gather(1, at) + logit
    better = inside & (scores > found.scores[:, -1:])
    key = keys_of_scores(scores, edge)
    if rules.items == OPEN:
        return torch.where(better, key, NOTHING)[None]
    after = _after(TablesOf(arena, rows.states[:, :1]), edge, rules.whole)
    done = after == END if rules.items == ENDED else after >= END
    return torch.stack([torch.where(better & kind, key, NOTHING) for kind in (~done, done)])


def children(
    arena: Arena, logits: Tensor, rows: Rows, offsets: Tensor, start: int, size: int, rules: Rules
) -> Children:  # fmt: skip
    """Return the children of all beams of each list, `size` of them from the child `start` on: see `candidates`."""
    at, inside = _rows_at(offsets, start, size, len(logits) // len(offsets))
    places = torch.arange(start, start + size, device=at.device)
    edge = torch.where(inside, _edges(rows, offsets, at, places), 0)
    tables = TablesOf(arena, rows.states[:, :1])
    inside = inside & _alive(tables, edge)
    token = _labels(tables, edge, rules.whole)
    return Children(at, edge, inside, token, first_logits(logits, at, token, inside))


def best(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, size: int, wanted: int,
    rules: Rules, keys_of: Callable[..., Tensor] = candidates, together: int = CANDIDATES,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the `wanted` best keys of each list among its `size` children, and their places: [1 or 2, L, wanted].

    keys_of: `candidates`, of which so many stand in memory `together`.
    """
    at_once = max(wanted, together // len(sums))
    chosen: tuple[Tensor, Tensor] | None = None
    for start in range(0, max(size, wanted), at_once):
        part = min(at_once, max(size, wanted) - start)
        keys = keys_of(arena, logits, sums, rows, found, offsets, start, part, rules)
        keys, places = keys.topk(min(wanted, part))
        if chosen is not None:
            places = torch.cat((chosen[1], places + start), 2)
            keys, order = torch.cat((chosen[0], keys), 2).topk(wanted)
            places = places.gather(2, order)
        chosen = keys, places
    assert chosen is not None
    return chosen


def follow(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, offsets: Tensor, keys: Tensor, places: Tensor, taken: int,
    columns: int, rules: Rules,
) -> Rows:  # fmt: skip
    """Return the beams of the chosen keys, [L, n] int64 (NOTHING: no beam), whose children stand at `places` [L, n].
    The rows of both are equally far apart in memory.

    taken: the column of their new token. columns: tokens of the longest tail that may come after it.
    """
    live = keys != NOTHING
    at = torch.searchsorted(offsets, places.contiguous(), right=True).clamp(max=sums.shape[1] - 1)
    # Inside a tail 32 bits of a key do not hold the state.
    edge = torch.where(live, _LOW - (keys & _LOW) if rules.whole else _edges(rows, offsets, at, places), 0)
    tables = TablesOf(arena, rows.states[:, :1])
    token = _labels(tables, edge, rules.whole)
    cost = first_logits(logits, at, token, live).double() - sums[:, :, 0].gather(1, at)
    state = _after(tables, edge, rules.whole)
    tokens = rows.tokens.gather(1, at[:, :, None].expand(-1, -1, rows.tokens.shape[2]))
    tokens[:, :, taken] = token
    tails = torch.zeros_like(state)
    if rules.whole:
        if columns:
            run = _tail_runs(tables, state, columns)
            tokens[:, :, taken + 1 : taken + 1 + columns] = run
            tails = (run >= 0).sum(2)
        state = torch.where(state >= TAIL, END, state)
    first, end = tables.row(state)
    sets = rows.states[:, :1] & ~LOCAL
    return Rows(
        torch.where(live[:, :, None], tokens, -1),
        torch.where(live, state, DEAD) | sets,
        torch.where(live, rows.scores.gather(1, at) + cost, -torch.inf),
        torch.where(live, at, 0),
        torch.where(live, tails, -1),
        torch.where(live, torch.where(state >= TAIL, state, first), 0),
        torch.where(live, torch.where(state >= TAIL, 1, end - first), 0),
    )


def merge(found: Found, rows: Rows, scores: Tensor, done: Rows | None) -> Found:
    """Return the best of what was found, of the first beams with the scores [L, R] at which they end, and of `done`.

    Of equal ones, those that stand first here come first. A score that is no number is none.
    """
    k, longest = found.tokens.shape[1:]
    tokens = [found.tokens, rows.tokens[:, : scores.shape[1]], *([] if done is None else [done.tokens])]
    scores = torch.cat([found.scores, scores, *([] if done is None else [done.scores])], 1)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best, order = scores.sort(dim=1, descending=True, stable=True)
    kept = torch.cat(tokens, 1).gather(1, order[:, :k, None].expand(-1, -1, longest))
    return Found(torch.where(best[:, :k, None].isneginf(), -1, kept), best[:, :k].contiguous())


def keys_of_scores(scores: Tensor, edge: Tensor) -> Tensor:
    """Return the keys of children with these scores and edges."""
    bits = scores.float().view(torch.int32).long()
    return (bits ^ (bits >> 31) & 0x7FFFFFFF) << 32 | _LOW - (edge & _LOW)


def score_of(keys: Tensor) -> Tensor:
    """Return the score that each key orders by, as float64; -inf for NOTHING."""
    high = keys >> 32
    scores = (high ^ (high >> 31) & 0x7FFFFFFF).int().view(torch.float32).double()
    return torch.where(keys == NOTHING, -torch.inf, scores)


def root(arena: Arena, numbers: Tensor, width: int, longest: int) -> Rows:
    """Return the beams that every search begins with: of each list, one at the root of its set. numbers: [L] int64."""
    lists, device = len(numbers), arena.device
    first_row = torch.arange(width, device=device) == 0
    states = torch.where(first_row, 0, DEAD) | numbers[:, None] << STATE_BITS
    first, end = TablesOf(arena, states).row(states & LOCAL)
    return Rows(
        torch.full((lists, width, longest), -1, dtype=torch.int64, device=device),
        states,
        torch.where(first_row, 0.0, -torch.inf).double().repeat(lists, 1),
        torch.zeros_like(states),
        torch.where(first_row, 0, -1).repeat(lists, 1),
        first * first_row,
        (end - first) * first_row,
    )


def _rows_at(offsets: Tensor, start: int, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Whose children stand at each of `size` places from `start` on: the beam, and whether there is one."""
    ends = torch.zeros(len(offsets), size + 1, dtype=torch.int64, device=offsets.device)
    ends.scatter_add_(1, (offsets - start).clamp(0, size), torch.ones_like(offsets))
    places = torch.arange(start, start + size, device=offsets.device)
    return ends.cumsum(1)[:, :size].clamp(max=count - 1), places < offsets[:, -1:]


def _edges(rows: Rows, offsets: Tensor, at: Tensor, places: Tensor) -> Tensor:
    """The edge of the child at each place, whose beam is `at`."""
    return (rows.first - (offsets - rows.degrees)).gather(1, at) + places


def first_logits(logits: Tensor, at: Tensor, token: Tensor, inside: Tensor) -> Tensor:
    """The logit of each token at the first token of beam `at`, float32; -inf where not `inside` or none."""
    lists = len(at)
    known = inside & (token < logits.shape[2])
    row = torch.arange(lists, device=at.device)[:, None] * (len(logits) // lists) + at
    return torch.where(known, logits[row, 0, torch.where(known, token, 0)].float(), -torch.inf)


def token_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logit of each token, float32; -inf for one that the vocabulary has not."""
    known = (tokens >= 0) & (tokens < logits.shape[-1])
    picked = logits.gather(-1, torch.where(known, tokens, 0)[..., None])[..., 0]
    return torch.where(known, picked.float(), -torch.inf)


def end_logits(logits: Tensor, end_token: int) -> Tensor:
    inside = 0 <= end_token < logits.shape[-1]
    return logits[..., end_token].float() if inside else torch.full_like(logits[..., 0], -torch.inf).float()


def _labels(tables: TablesOf, edge: Tensor, whole: bool) -> Tensor:
    """The token of each edge, or of a state inside a tail that stands in its place."""
    if whole:
        return tables.label(edge)
    in_tail = edge >= TAIL
    return torch.where(in_tail, tables.tail_entry(edge)[0], tables.label(torch.where(in_tail, 0, edge)))


def _alive(tables: TablesOf, edge: Tensor) -> Tensor:
    """Whether a view has each edge, or the state inside a tail that stands in its place."""
    in_tail = edge >= TAIL
    return in_tail | tables.is_alive(torch.where(in_tail, 0, edge))


def _after(tables: TablesOf, edge: Tensor, whole: bool) -> Tensor:
    """The state after each edge, or after the next token of a tail, without the set."""
    if whole:
        return tables.follow(edge)
    in_tail = edge >= TAIL
    next_in_tail = torch.where(tables.tail_entry(edge)[1], END, edge + 1)
    return torch.where(in_tail, next_in_tail, tables.follow(torch.where(in_tail, 0, edge)))


def _tail_runs(tables: TablesOf, states: Tensor, columns: int) -> Tensor:
    """The tokens of the tail that begins at each state, [..., columns] int64, then -1; none at other states."""
    words = tables.arena.words
    bits = (tables.field(WIDTHS) & 0xFF)[..., None]
    at = torch.where(states >= TAIL, states - TAIL, 0)[..., None] + torch.arange(columns, device=words.device)
    at = at * (bits + 1)
    low = tables.field(TAILS)[..., None] + (at >> 5)
    pair = [words[(low + i).clamp(max=len(words) - 1)].long() & _LOW for i in range(2)]
    entry = pair[0] >> (at & 31) | pair[1] << 32 - (at & 31)
    last = (entry >> bits & 1).cumsum(-1)
    inside = (states >= TAIL)[..., None] & (last - (entry >> bits & 1) == 0)
    return torch.where(inside, entry & (1 << bits) - 1, -1)
