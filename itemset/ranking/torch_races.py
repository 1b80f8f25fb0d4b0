"""A round of races on tensors: when children ring, and items. What `torch_expand` is for lists, this is for `races`.

Shares, times and clocks are float64 logarithms. A beam's score is its clock, negated; see `draws` for the race.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import LOCAL
from itemset.masking.torch_tables import TablesOf
from itemset.ranking import torch_expand
from itemset.ranking.clocks import NOBODY, TOKEN
from itemset.ranking.torch_expand import NOTHING, Children, Found, Rows, Rules, token_logits

_TOGETHER = 1 << 20  # children that stand in memory at once, each with a dozen numbers
_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64


class Racing(NamedTuple):
    """What beams of races have besides. logs: [L, W] float64, log-probabilities, as the scores of a list's `Rows`.
    keys: [L, W] int64, of which their random numbers are made. power: 1 / temperature."""

    logs: Tensor
    keys: Tensor
    power: float


class Looked(NamedTuple):
    """What a pass says of R rows. earliest: [L, R] float64, the time of the earliest of all that may follow. scores:
    [L, R] float64, of the items that end there, -inf where none does. logs: their log-probabilities. children: all of
    them, if they are few."""

    earliest: Tensor
    scores: Tensor
    logs: Tensor
    children: Children | None = None


def looked(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, found: Found, offsets: Tensor, size: int,
    wanted: int, taken: int, rules: Rules,
) -> Looked:  # fmt: skip
    """Look at what may follow each row. size: the most children that a race may have. wanted: as for `best`."""
    lists, count, queries = sums.shape
    keys, rows = racing.keys[:, :count], _first_rows(rows, count)
    tokens, shares = _certain(arena, logits, sums, rows, racing, taken, rules)
    first = shares[:, :, 0]
    total, earliest = first.exp(), log_exponential(mixed(keys, tokens[:, :, 0] + TOKEN)) - first
    together, seen = _together(wanted, lists), None
    for start in range(0, size, together):
        part = min(together, max(size, wanted) - start)
        some = torch_expand.children(arena, logits, rows, offsets, start, part, rules)
        of_children, times = _times(some, sums, racing)
        total = total.scatter_add(1, some.at, of_children.exp())
        earliest = earliest.scatter_reduce(1, some.at, times, "amin")
        seen = some if part >= size else None
    earliest = torch.minimum(earliest, _nobody(keys, total))
    # Where no tail goes on, an item ends at the first step, beside the children.
    clocks, masses, here = -rows.scores, racing.power * racing.logs[:, :count], earliest
    for column in range(queries):
        share, after = shares[:, :, column], mixed(keys, tokens[:, :, column] + TOKEN)
        time = log_exponential(after) - share
        if column:
            here = torch.minimum(time, _nobody(keys, share.exp()))
        inside = column <= rows.tails
        clocks = torch.where(inside, _later(clocks, time, here, masses), clocks)
        masses, keys = torch.where(inside, masses + share, masses), after
    ends = TablesOf(arena, rows.states).may_end(rows.states & LOCAL) & ~clocks.isnan()
    return Looked(earliest, torch.where(ends, -clocks, -torch.inf), masses / racing.power, seen)


def best(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, look: Looked, found: Found, offsets: Tensor,
    size: int, wanted: int, rules: Rules,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the keys of the `wanted` children that ring first, and their places, as `torch_expand.best` does."""

    def keys_of(*arguments: Any) -> Tensor:
        """As `torch_expand.candidates`, by when children ring."""
        *_, start, part, _ = arguments
        some = look.children
        if some is None:
            some = torch_expand.children(arena, logits, rows, offsets, start, part, rules)
        _, times = _times(some, sums, racing)
        clocks, masses = -rows.scores.gather(1, some.at), racing.power * racing.logs.gather(1, some.at)
        scores = -_later(clocks, times, look.earliest.gather(1, some.at), masses)
        better = some.inside & (scores > found.scores[:, -1:])
        return torch.where(better, torch_expand.keys_of_scores(scores, some.edge), NOTHING)[None]

    together = _together(wanted, len(sums)) * len(sums)
    return torch_expand.best(arena, logits, sums, rows, found, offsets, size, wanted, rules, keys_of, together)


def went_on(new: Rows, rows: Rows, racing: Racing, look: Looked, taken: int) -> tuple[Rows, Racing]:
    """Return the chosen beams with their scores, and what they have besides. new: with log-probabilities as scores."""
    at, old = new.parents, racing.logs.gather(1, new.parents)
    keys = mixed(racing.keys.gather(1, at), new.tokens[:, :, taken] + TOKEN)
    times = log_exponential(keys) - racing.power * (new.scores - old)
    clocks = _later(-rows.scores.gather(1, at), times, look.earliest.gather(1, at), racing.power * old)
    live = ~new.scores.isneginf()
    return new._replace(scores=torch.where(live, -clocks, -torch.inf)), Racing(new.scores, keys, racing.power)


def merged(found: Found, logs: Tensor, rows: Rows, look: Looked) -> tuple[Found, Tensor]:
    """Return the items that ring first, of those found and those that end here, and their log-probabilities."""
    k, longest = found.tokens.shape[1:]
    scores, order = torch.cat((found.scores, look.scores), 1).sort(dim=1, descending=True, stable=True)
    scores, order = scores[:, :k].contiguous(), order[:, :k]
    tokens = torch.cat((found.tokens, rows.tokens[:, : look.scores.shape[1]]), 1)
    tokens = tokens.gather(1, order[:, :, None].expand(-1, -1, longest))
    logs = torch.cat((logs, look.logs), 1).gather(1, order)
    return Found(torch.where(scores[:, :, None].isneginf(), -1, tokens), scores), logs


def mixed(keys: Tensor, n: Tensor | int) -> Tensor:
    """As `clocks.mixed`, on int64: the numbers n of keys, bit by bit."""
    z = keys + (n + 1) * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def log_exponential(bits: Tensor) -> Tensor:
    """As `clocks.log_exponential`: float64."""
    return (-((_shifted(bits, 12).double() + 0.5) * 2.0**-52).log()).log()


def _together(wanted: int, lists: int) -> int:
    return max(wanted, _TOGETHER // lists)


def _first_rows(rows: Rows, count: int) -> Rows:
    """The first rows; those after them still have children, which stand after the others'."""
    tokens, states, scores, parents, tails = (column[:, :count] for column in rows[:5])
    return rows._replace(tokens=tokens, states=states, scores=scores, parents=parents, tails=tails)


def _certain(
    arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, racing: Racing, taken: int, rules: Rules
) -> tuple[Tensor, Tensor]:
    """The tokens that are certain to follow each beam's edge, its tail and the end token after it, and the share of
    each: [L, R, queries] int64 and float64, -inf where an item cannot end."""
    lists, count, queries = sums.shape
    columns, tails = torch.arange(queries, device=logits.device), rows.tails[:, :, None]
    run = rows.tokens[:, :, taken : taken + queries]
    run = torch.nn.functional.pad(run, (0, queries - run.shape[2]))
    tokens = torch.where(columns < tails, run, rules.end_token)
    shares = racing.power * (token_logits(logits.unflatten(0, (lists, count)), tokens).double() - sums)
    ends = TablesOf(arena, rows.states).may_end(rows.states & LOCAL)[:, :, None]
    return tokens, torch.where((columns <= tails) & ends, shares, -torch.inf)


def _times(some: Children, sums: Tensor, racing: Racing) -> tuple[Tensor, Tensor]:
    """The share of each child, and its time."""
    logs = some.logit.double() - sums[:, :, 0].gather(1, some.at)
    shares = torch.where(some.inside, racing.power * logs, -torch.inf)
    return shares, log_exponential(mixed(racing.keys.gather(1, some.at), some.token + TOKEN)) - shares


def _nobody(keys: Tensor, total: Tensor) -> Tensor:
    """The time of what lies outside the set, which has what a total of shares leaves."""
    return log_exponential(mixed(keys, NOBODY)) - torch.log1p(-total.clamp(max=1.0))


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shifted to the right as integers without a sign."""
    return (z >> by) & ((1 << 64 - by) - 1)


def _later(clocks: Tensor, times: Tensor, earliest: Tensor, masses: Tensor) -> Tensor:
    """When what has such a time rings, after a prefix of such a mass that rings at `clocks`. The prefix's earliest
    rings with it, and what never rings has an infinite time."""
    gaps = times + torch.log1p(-(earliest - times).clamp(max=0.0).exp())
    return torch.where(times == torch.inf, torch.inf, torch.logaddexp(clocks, gaps - masses))
