"""Exact draws as beams: the races of `draws`, run over tensors of shapes that the host knows, inside an engine's step.

A beam's score is how early it rings: the logarithm of its clock, negated (a Gumbel variable; Kool et al. 2019 search
beams so). So the search for the best items is the race, the bar that ends it is the last item's clock, and a race is
decided if nothing that was left out would have rung before its items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.slots import Kernels
from itemset.ranking import beams
from itemset.ranking.beams import Beams, table_of, twin_for
from itemset.ranking.torch_expand import Found, Rows, score_of
from itemset.ranking.torch_races import Looked, Racing, log_exponential
from itemset.trie.levels import LevelPlan

_NEAR = 2.0**-20  # keys of children order by float32: what is nearer than so much of a score is not told apart


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
        stepwise: bool = False,
        kernels: Kernels = "auto",
    ) -> None:
        """keys: [races] int64, on the arena's device: see `draws.Drawing.races`. k: how many items are drawn without
        replacement in each race. stepwise: as for `Beams`; what is pruned on its tail leaves its race undecided.
        Raises ValueError as `Beams`, and if the temperature is not above 0 and at most 1."""
        if not 0 < temperature <= 1:
            raise ValueError(f"temperature is {temperature}: make it more than 0, and at most 1")
        super().__init__(
            arena, numbers, plan, width=width, k=k, end_token=end_token, stepwise=stepwise, kernels=kernels
        )
        self._rounds = twin_for("races", arena.device, kernels)
        self._racing = Racing(self._rows.scores, keys[:, None].repeat(1, width), 1 / temperature)
        clocks = log_exponential(self._racing.keys)
        self._rows = self._rows._replace(scores=torch.where(self._rows.scores == 0, -clocks, -torch.inf))
        self._logs = torch.zeros_like(self._found.scores)  # of the items found
        self._look: Looked

    @property
    def exact(self) -> Tensor:
        """Which items are decided, [races, k] bool: no other item of the set can have rung before. Of an item that
        there is not: whether the set has no more."""
        left = score_of(self._left)[:, None]
        return left.isneginf() | (self._found.scores > left + _NEAR * (left.abs() + 1))

    @property
    def decided(self) -> Found:
        """The items that are, earliest first, with their log-probabilities; -inf for each of the others."""
        return Found(self._found.tokens, torch.where(self.exact, self._of_items, -torch.inf))

    @property
    def proven(self) -> Tensor:
        """Whether all items of each race are decided: [races] bool."""
        return self.exact.all(1)

    @property
    def result(self) -> Tensor:
        """The items, earliest first: [races, k, 2 + longest] float64. Log-probability, number of tokens, tokens, then
        -1. Where there is no item: -inf, 0 and -1."""
        return table_of(Found(self._found.tokens, self._of_items))

    @property
    def _of_items(self) -> Tensor:
        """The log-probability of each item, -inf where there is none."""
        return torch.where(self._found.scores.isneginf(), -torch.inf, self._logs)

    def _sums(self, logits: Tensor, rows: Rows, offsets: Tensor, size: int) -> Tensor:
        sums = super()._sums(logits, rows, offsets, size)
        self._look = self._rounds.looked(
            self.arena, logits, sums, rows, self._racing, self._found, offsets, size, self.width + 1, self.taken,
            self._rules,
        )  # fmt: skip
        return sums

    def _ended(self, logits: Tensor, sums: Tensor, rows: Rows) -> Tensor:
        return self._look.scores

    def _go_on(self, logits: Tensor, sums: Tensor, rows: Rows, offsets: Tensor, size: int, columns: int) -> None:
        keys, places = self._rounds.best(
            self.arena, logits, sums, rows, self._racing, self._look, self._found, offsets, size, self.width + 1,
            self._rules,
        )  # fmt: skip
        self._left = torch.maximum(self._left, keys[0, :, self.width])
        new = self._kernels.follow(
            self.arena, logits, sums, rows._replace(scores=self._racing.logs), offsets, keys[0, :, : self.width],
            places[0, :, : self.width], self.taken, columns, self._rules,
        )  # fmt: skip
        self._rows, self._racing = self._rounds.went_on(new, rows, self._racing, self._look, self.taken)

    def _merged(self, rows: Rows, ends: Tensor, done: Rows | None) -> Found:
        found: Found
        found, self._logs = self._rounds.merged(self._found, self._logs, rows, self._look)
        return found


def warm_up(arena: Arena, logits: Tensor, *, stepwise: bool = False, kernels: Kernels = "auto") -> None:
    """As `beams.warm_up`, for lists and races. stepwise: of the races."""
    beams.warm_up(arena, logits, kernels=kernels)
    options: dict[str, Any] = {"width": 1, "k": 1, "end_token": 0, "stepwise": stepwise, "kernels": kernels}
    races = Races(arena, [0], beams.ONE_NODE, torch.zeros(1, dtype=torch.int64, device=arena.device), **options)
    races._found.scores.fill_(torch.inf)  # a bar that nothing passes: there may be no set to follow an edge in
    races.round(logits)
