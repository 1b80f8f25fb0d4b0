"""The beams of an engine that decodes one token of each row a pass: tails take a token a pass too.

The lists are those of `Beams`: an item that stands alone is never pruned on its tail. While its tail lasts, it has a
row of its own beside the beams. Draws need no such rows: what they prune, they know.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.ranking.beam_state import ALONE, ENDED, OPEN
from itemset.ranking.beams import Beams, items_of
from itemset.ranking.search import Width, width_at
from itemset.trie.levels import LevelPlan

_Groups = list[tuple[int, int]]  # of tails: rows, and the most tokens that one of them has to score


def rows_of_passes(
    plan: LevelPlan, width: Width, *, renormalised: bool = False, end_token: int | None = 0, races: int = 0
) -> tuple[int, ...]:
    """Return how many rows each pass after the prompt's has at most: beams, and tails that ride along.

    end_token: None if ends cost nothing; then nothing complete is passed on. races: how many share the rows.
    """
    items = None if races else items_of(end_token, renormalised)
    counts, beams, groups = list[int](), 1, _Groups()
    while True:
        taken = len(counts)
        beams, groups = _after(plan, taken, beams, groups, width_at(width, taken + 1), items)
        if not beams and not groups:
            return tuple(counts)
        counts.append(beams * max(1, races) + sum(rows for rows, _ in groups))


class Lockstep(Beams):
    """The beams of some lists or races of one set, or of sets that share a plan, one token of each row a pass.

    A pass of lists has `row_count` rows of each list: the tails that ride along, then the beams; `next_inputs` and
    `parents` are [lists * row_count], list by list. The last beams of a single list may be omitted from a pass where
    `rows_after` says that there is none. A pass of races has `row_count` rows, the first beam of each race, then the
    second of each, and so on: the last of all of them may be omitted together.

    riding: how many rows of each list are tails in the next pass. rows: how many are beams.
    """

    def __init__(
        self, arena: Arena, numbers: Sequence[int], plan: LevelPlan, *, keys: Tensor | None = None, **options: Any
    ) -> None:
        """As `Beams`. Tails that ride along are not `stepwise`: they do not compete."""
        races = 0 if keys is None else len(numbers)
        super().__init__(arena, numbers, plan, keys=keys, stepwise=keys is not None, **options)
        counts = rows_of_passes(
            plan, self._widths, renormalised=self._renormalised, end_token=options["end_token"], races=races
        )
        self.passes_left = 1 + len(counts)
        self._groups = _Groups()

    @property
    def row_count(self) -> int:
        """Return how many rows the next pass has: of each list, or of all races."""
        return self.rows * self.lists if self._races else self.riding + self.rows

    def rows_after(self, open_beams: int) -> int:
        """Return how many rows of the next pass are needed. open_beams: as it was before the last call of `round`."""
        if self._races:
            return min(self.rows, self._plan.successors(self.taken - 1, open_beams)) * self.lists
        return self.riding + min(self.rows, self._plan.children(self.taken - 1, open_beams))

    @property
    def next_inputs(self) -> Tensor:
        """Return the token of each row of the next pass, [rows] int64."""
        return self._by_row(self._rows.tokens[:, :, self.taken - 1].clamp(min=0))

    @property
    def parents(self) -> Tensor:
        """Return the row of the pass before that each row continues, [rows] int64: of lists, the row of its list."""
        parents = super().parents
        if self._races and self.taken > 1:
            parents = parents * self.lists + torch.arange(self.lists, device=parents.device)[:, None]
        return self._by_row(parents)

    def _by_row(self, column: Tensor) -> Tensor:
        column = column[:, : self.riding + self.rows]
        return (column.T if self._races else column).flatten()

    def round(self, logits: Tensor, *, columns: Tensor | None = None, sums: Tensor | None = None) -> None:
        """Take the logits of a pass, [rows, vocabulary] or [rows, 1, vocabulary], or of those rows that `rows_after`
        says; of races, the prompt's are one row. Else as `Beams.round`."""
        if self.passes_left and (not self.row_count or not self._count(logits)):
            # An engine has a row at least, and there is nothing to learn from it.
            self.taken, self.passes_left = self.taken + 1, self.passes_left - 1
            return
        super().round(logits, columns=columns, sums=sums)

    def _count(self, logits: Tensor) -> int:
        return 1 if self._races and not self.taken else len(logits) // self.lists

    def _by_list(self, logits: Tensor) -> Tensor:
        count = self._count(logits)
        self.rows = min(self.rows, count - self.riding)
        logits = logits.view(len(logits), 1, -1)
        if self._races and not self.taken:
            logits = logits.expand(self.lists, -1, -1)
        by_list = logits[: count * self.lists]
        if self._races:
            return by_list.unflatten(0, (count, self.lists)).transpose(0, 1)
        return by_list.unflatten(0, (self.lists, count))

    def _plan_pass(self, size: int) -> int:
        items = None if self._races else self._rules.items
        self.rows, self._groups = _after(self._plan, self.taken, self.rows, self._groups, self._next_width, items)
        self.riding = sum(rows for rows, _ in self._groups)
        return self.rows


def _after(
    plan: LevelPlan, taken: int, beams: int, groups: _Groups, width: int, items: int | None
) -> tuple[int, _Groups]:
    """Return the most beams after a pass of beams of length `taken`, and the groups of tails, which those with a tail
    have joined. items: as of `Rules`; None for races, in which tails are beams."""
    if items is None:
        return min(width, plan.successors(taken, beams)) if taken < plan.longest else 0, []
    if items != ALONE and 0 < taken <= plan.levels:
        groups = [*groups, (min(beams, plan.tailed[taken - 1]), plan.tails[taken - 1])]
    groups = [(rows, left - 1) for rows, left in groups if rows and left > (items == ENDED)]
    beams = min(width, plan.children(taken, beams))
    if items != OPEN and taken + 1 == plan.levels:  # nothing but tails goes on after the last level
        beams = 0 if items == ALONE else min(beams, plan.tailed[taken])
    return beams, groups
