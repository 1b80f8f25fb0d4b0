"""Exact draws as beams: the races of `draws`, run over tensors of shapes that the host knows, inside an engine's step.

A beam's score is how early it rings: the logarithm of its clock, negated (a Gumbel variable; Kool et al. 2019 search
beams so). So the search for the best items is the race, the bar that ends it is the last item's clock, and a race is
decided if nothing that was left out would have rung before its items.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import LOCAL
from itemset.masking.slots import Kernels
from itemset.masking.torch_tables import TablesOf
from itemset.ranking import torch_expand
from itemset.ranking.beams import Beams
from itemset.ranking.clocks import NOBODY, TOKEN
from itemset.ranking.torch_expand import NOTHING, Children, Found, Rows, score_of, token_logits
from itemset.trie.levels import LevelPlan

_TOGETHER = 1 << 20  # children that stand in memory at once, each with a dozen numbers
_NEAR = 2.0**-20  # keys of children order by float32: what is nearer than so much of a score is not told apart
_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64


class Races(Beams):
    """The beams of some races of one set, or of sets that share a plan: as `Beams`, a race in place of each list.

    `result` has the items of each race in the order in which they ring, with their log-probabilities; `exact` says
    which of them are decided. With the same key the items are those of `draws.Drawing`, as far as the logits are the
    same: whatever the width, those that are decided are its first ones. So if some are not, it must go on with the same
    keys. To take the decided ones of several tries would favour likely items.

    Temperatures below 1 are exact too: see `draws`.
    """

    def __init__(
        self,
        arena: Arena,
        numbers: Sequence[int],
        plan: LevelPlan,
        keys: Tensor,
        *,
        width: int,
        k: int,
        end_token: int,
        temperature: float = 1.0,
        kernels: Kernels = "auto",
    ) -> None:
        """keys: [races] int64, on the arena's device: see `draws.Drawing.races`. k: how many items are drawn without
        replacement in each race. Raises ValueError as `Beams`, and if the temperature is not above 0 and at most 1."""
        if not 0 < temperature <= 1:
            raise ValueError(f"temperature is {temperature}: make it more than 0, and at most 1")
        super().__init__(arena, numbers, plan, width=width, k=k, end_token=end_token, kernels=kernels)
        self._power, self._end = 1 / temperature, end_token
        self._logs = self._rows.scores  # of each beam, as `Rows.scores` would be: [races, width]
        self._keys = keys[:, None].repeat(1, width)
        clocks = torch.where(self._logs == 0, -log_exponential(self._keys), -torch.inf)
        self._rows = self._rows._replace(scores=clocks)
        self._together = max(width + 1, _TOGETHER // self.lists)
        self._found_logs = torch.zeros_like(self._found.scores)
        # Of the round that is under way: see `_sums`, `_certain` and `_ended`.
        self._earliest = self._end_logs = torch.empty(0)
        self._runs = (self._keys, self._logs)
        self._seen: Children | None = None

    @property
    def exact(self) -> Tensor:
        """Which items are decided, [races, k] bool: no other item of the set can have rung before. Of an item that
        there is not: whether the set has no more."""
        left = score_of(self._left)[:, None]
        return left.isneginf() | (self._found.scores > left + _NEAR * (left.abs() + 1))

    @property
    def proven(self) -> Tensor:
        """Whether all items of each race are decided: [races] bool."""
        return self.exact.all(1)

    @property
    def result(self) -> Tensor:
        """The items, earliest first: [races, k, 2 + longest] float64. Log-probability, number of tokens, tokens, then
        -1. Where there is no item: -inf, 0 and -1."""
        table = super().result
        table[:, :, 0] = torch.where(self._found.scores.isneginf(), -torch.inf, self._found_logs)
        return table

    def _sums(self, logits: Tensor, rows: Rows, offsets: Tensor, size: int) -> Tensor:
        """The sums, and what the first step of each beam needs besides: `_earliest`, the logarithm of the earliest time
        of all that may follow it, [races, R] float64."""
        sums = super()._sums(logits, rows, offsets, size)
        count = sums.shape[1]
        keys = self._keys[:, :count]
        self._runs = self._certain(logits, sums, rows)
        shares = self._runs[1][:, :, 0]
        total, earliest = shares.exp(), log_exponential(mixed(keys, self._runs[0][:, :, 0] + TOKEN)) - shares
        most, self._seen = self._together, None
        for start in range(0, size, most):
            part = min(most, max(size, self.width + 1) - start)
            some = torch_expand.children(self.arena, logits, rows, offsets, start, part, self._rules)
            shares, times, _ = self._times(some, sums)
            total = total.scatter_add(1, some.at, shares.exp())
            earliest = earliest.scatter_reduce(1, some.at, times, "amin")
            if part >= size:
                self._seen = some
        nobody = log_exponential(mixed(keys, NOBODY)) - torch.log1p(-total.clamp(max=1.0))
        self._earliest = torch.minimum(earliest, nobody)
        return sums

    def _certain(self, logits: Tensor, sums: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The tokens that are certain to follow each beam's edge, its tail and the end token after it, and the
        logarithm of the share of each: [races, R, queries] int64 and float64, -inf where an item cannot end."""
        lists, count, queries = sums.shape
        columns = torch.arange(queries, device=logits.device)
        tails, states = rows.tails[:, :count, None], rows.states[:, :count]
        run = rows.tokens[:, :count, self.taken : self.taken + queries]
        run = torch.nn.functional.pad(run, (0, queries - run.shape[2]))
        tokens = torch.where(columns < tails, run, self._end)
        shares = self._power * (token_logits(logits.unflatten(0, (lists, count)), tokens).double() - sums)
        ends = TablesOf(self.arena, states).may_end(states & LOCAL)[:, :, None]
        return tokens, torch.where((columns <= tails) & ends, shares, -torch.inf)

    def _times(self, some: Children, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of children: the logarithm of each one's share and of its time, and its key."""
        logs = some.logit.double() - sums[:, :, 0].gather(1, some.at)
        shares = torch.where(some.inside, self._power * logs, -torch.inf)
        keys = mixed(self._keys.gather(1, some.at), some.token + TOKEN)
        return shares, log_exponential(keys) - shares, keys

    def _ended(self, logits: Tensor, sums: Tensor, rows: Rows) -> Tensor:
        """When each item rings that ends at a beam, after its tail; its log-probability is noted as `_end_logs`."""
        _, count, queries = sums.shape
        tokens, shares = self._runs
        clocks, keys, masses = -rows.scores[:, :count], self._keys[:, :count], self._power * self._logs[:, :count]
        tails = rows.tails[:, :count]
        for column in range(queries):
            share = shares[:, :, column]
            earliest, after = self._earliest, mixed(keys, tokens[:, :, column] + TOKEN)
            time = log_exponential(after) - share
            if column:
                nobody = log_exponential(mixed(keys, NOBODY)) - torch.log1p(-share.exp().clamp(max=1.0))
                earliest = torch.minimum(time, nobody)
            here = column <= tails
            clocks = torch.where(here, _later(clocks, time, earliest, masses), clocks)
            masses, keys = torch.where(here, masses + share, masses), after
        states = rows.states[:, :count]
        ends = TablesOf(self.arena, states).may_end(states & LOCAL)
        self._end_logs = masses / self._power
        return torch.where(ends, -clocks, -torch.inf)

    def _go_on(self, logits: Tensor, sums: Tensor, rows: Rows, offsets: Tensor, size: int, columns: int) -> None:
        keys, places = torch_expand.best(
            self.arena, logits, sums, rows, self._found, offsets, size, self.width + 1, self._rules,
            self._candidates, self._together * self.lists,
        )  # fmt: skip
        self._left = torch.maximum(self._left, keys[0, :, self.width])
        keys, places = keys[0, :, : self.width], places[0, :, : self.width]
        new = self._kernels.follow(
            self.arena, logits, sums, rows._replace(scores=self._logs), offsets, keys, places, self.taken, columns,
            self._rules,
        )  # fmt: skip
        at, old = new.parents, self._logs.gather(1, new.parents)
        new_keys = mixed(self._keys.gather(1, at), new.tokens[:, :, self.taken] + TOKEN)
        times = log_exponential(new_keys) - self._power * (new.scores - old)
        clocks = _later(-rows.scores.gather(1, at), times, self._earliest.gather(1, at), self._power * old)
        self._logs, self._keys = new.scores, new_keys
        self._rows = new._replace(scores=torch.where(keys == NOTHING, -torch.inf, -clocks))

    def _candidates(
        self, arena: Arena, logits: Tensor, sums: Tensor, rows: Rows, found: Found, offsets: Tensor, start: int,
        size: int, rules: torch_expand.Rules,
    ) -> Tensor:  # fmt: skip
        """As `torch_expand.candidates`, by when children ring."""
        some = self._seen
        if some is None:
            some = torch_expand.children(arena, logits, rows, offsets, start, size, rules)
        _, times, _ = self._times(some, sums)
        at = some.at
        masses = self._power * self._logs.gather(1, at)
        scores = -_later(-rows.scores.gather(1, at), times, self._earliest.gather(1, at), masses)
        better = some.inside & (scores > found.scores[:, -1:])
        return torch.where(better, torch_expand.keys_of_scores(scores, some.edge), NOTHING)[None]

    def _merged(self, rows: Rows, ends: Tensor, done: Rows | None) -> Found:
        scores = torch.cat((self._found.scores, torch.where(ends.isnan(), -torch.inf, ends)), 1)
        best, order = scores.sort(dim=1, descending=True, stable=True)
        best, order = best[:, : self.k].contiguous(), order[:, : self.k]
        tokens = torch.cat((self._found.tokens, rows.tokens[:, : ends.shape[1]]), 1)
        kept = tokens.gather(1, order[:, :, None].expand(-1, -1, self.longest))
        self._found_logs = torch.cat((self._found_logs, self._end_logs), 1).gather(1, order)
        return Found(torch.where(best[:, :, None].isneginf(), -1, kept), best)


def mixed(keys: Tensor, n: Tensor | int) -> Tensor:
    """As `clocks.mixed`, on int64: the numbers n of keys, bit by bit."""
    z = keys + (n + 1) * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def log_exponential(bits: Tensor) -> Tensor:
    """As `clocks.log_exponential`: float64."""
    return (-((_shifted(bits, 12).double() + 0.5) * 2.0**-52).log()).log()


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shifted to the right as integers without a sign."""
    return (z >> by) & ((1 << 64 - by) - 1)


def _later(clocks: Tensor, times: Tensor, earliest: Tensor, masses: Tensor) -> Tensor:
    """When what has such a time rings, after a prefix of such a mass that rings at `clocks`; all are logarithms. The
    prefix's earliest rings with it, and what never rings has an infinite time."""
    gaps = times + torch.log1p(-(earliest - times).clamp(max=0.0).exp())
    return torch.where(times == torch.inf, torch.inf, torch.logaddexp(clocks, gaps - masses))
