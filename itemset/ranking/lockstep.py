"""The beams of ranked lists for an engine that decodes one token of each row a pass: tails take a token a pass too.

The lists are those of `Beams`, and so of `search.Search`: an item that stands alone is never pruned on its tail. It
gets a row of its own beside the beams, for as long as its tail lasts. Draws need no such rows: what they prune, they
know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import LOCAL
from itemset.masking.slots import Kernels
from itemset.ranking.beams import Beams, LevelPlan, items_of
from itemset.ranking.races import Races
from itemset.ranking.torch_expand import ALONE, ENDED, OPEN, Rows, first_logits
from itemset.trie.walk import DEAD


def rows_of_passes(
    plan: LevelPlan, width: int, *, renormalised: bool = False, end_token: int | None = 0
) -> tuple[int, ...]:
    """Return how many rows each pass after the prompt's has at most: beams, and tails that ride along.

    end_token: None if ends cost nothing; then nobody passes what is complete to the model.
    """
    items = items_of(end_token, renormalised)
    counts: list[int] = []
    beams, riding = 1, list[tuple[int, int]]()
    for taken in range(plan.longest + 2):
        riding = _still_riding(plan, taken, beams, riding, items)
        beams = _beams_after(plan, taken, beams, width, items)
        if not beams and not riding:
            break
        counts.append(beams + sum(rows for rows, _ in riding))
    return tuple(counts)


def rows_of_races(plan: LevelPlan, width: int, races: int) -> tuple[int, ...]:
    """The same for so many races: the beams of all of them."""
    counts, beams = list[int](), 1
    for taken in range(plan.longest):
        beams = min(width, plan.successors(taken, beams))
        counts.append(beams * races)
    return tuple(counts)


class Lockstep(Beams):
    """The beams of some ranked lists of one set, or of sets that share a plan, one token of each row a pass.

    A pass has `row_count` rows of each list: the tails that ride along, then the beams. `next_inputs` and `parents` are
    [lists * row_count], list by list. The last beams of a single list may be omitted from a pass where `rows_after`
    says that there is none. There is no `queries`.

    riding: how many rows of each list are tails in the next pass. rows: how many are beams.
    """

    def __init__(
        self,
        arena: Arena,
        numbers: Sequence[int],
        plan: LevelPlan,
        *,
        width: int,
        k: int,
        end_token: int | None,
        renormalised: bool = False,
        kernels: Kernels = "auto",
    ) -> None:
        """As `Beams`."""
        super().__init__(
            arena, numbers, plan, width=width, k=k, end_token=end_token, renormalised=renormalised, kernels=kernels
        )
        self.passes_left = 1 + len(rows_of_passes(plan, width, renormalised=renormalised, end_token=end_token))
        # All rows of the next pass. A tail's score counts its tokens so far, and `tails` those that are left.
        self._rows = _first(self._rows, 1)
        self._groups: list[tuple[int, int]] = []  # of tails: rows, and tokens to score

    @property
    def riding(self) -> int:
        return sum(rows for rows, _ in self._groups)

    @property
    def row_count(self) -> int:
        """How many rows of each list the next pass has."""
        return self.riding + self.rows

    def rows_after(self, open_beams: int) -> int:
        """Return how many rows of the next pass are needed. open_beams: as it was before the last call of `round`."""
        return self.riding + min(self.rows, self._plan.children(self.taken - 1, open_beams))

    @property
    def next_inputs(self) -> Tensor:
        """The token of each row of the next pass, [lists * rows] int64."""
        return self._rows.tokens[:, :, self.taken - 1].clamp(min=0).flatten()

    @property
    def parents(self) -> Tensor:
        """The row of its list in the pass before that each row continues, [lists * rows] int64."""
        return self._rows.parents.flatten()

    def round(self, logits: Tensor) -> None:
        """Take the logits of a pass, [lists * rows, vocabulary] or [lists * rows, 1, vocabulary], or of those rows that
        `rows_after` says; else as `Beams.round`."""
        if not self.passes_left:
            raise ValueError("the search is over: no pass is left")
        if self.row_count:  # an engine has a row at least, and there is nothing to learn from it
            self._take(logits.view(len(logits), 1, -1), len(logits) // self.lists)
        self.taken += 1
        self.passes_left -= 1

    def _take(self, logits: Tensor, count: int) -> None:
        kernels, plan = self._kernels, self._plan
        riding, rows = self.riding, _first(self._rows, count)
        self.rows = min(self.rows, count - riding)
        if self.rows:
            self._alive.append((rows.scores[:, riding:] > self._found.scores[:, -1:]).sum(1))
        size = plan.children(self.taken, self.rows) if self.taken < self.longest else 0
        offsets = rows.degrees.cumsum(1)
        one_token = rows
        if riding or _joining(plan, self.taken, self.rows, self._rules.items)[0]:
            states = torch.where(rows.tails > 0, rows.states & ~LOCAL | DEAD, rows.states)  # their items end later
            one_token = rows._replace(tails=torch.zeros_like(rows.tails), states=states)
        sums = self._sums(logits, one_token, offsets, size)
        ends = self._ended(logits, sums, one_token)
        tails, over = self._ride_on(logits, sums, rows)
        done = self._go_on(logits, sums, rows, offsets, size, plan.tails[self.taken]) if size else None
        self._found = kernels.merge(self._found, rows, ends, done)
        if over is not None:
            self._found = kernels.merge(self._found, over, over.scores, None)
        self.rows = _beams_after(plan, self.taken, self.rows, self.width, self._rules.items)
        parts = [tails] if tails is not None else []
        if self.rows or not parts:
            parts.append(_first(self._rows, self.rows))
        self._rows = parts[0] if len(parts) == 1 else Rows(*(torch.cat(pair, 1) for pair in zip(*parts, strict=True)))

    def _ride_on(self, logits: Tensor, sums: Tensor, rows: Rows) -> tuple[Rows | None, Rows | None]:
        """Score the next token of tails, and of the beams that lead to a single item. Returns the tails of the next
        pass, and, if ends cost nothing, those that are complete."""
        device, first, items = rows.scores.device, 0, self._rules.items
        on, over, groups = list[Tensor](), list[Tensor](), list[tuple[int, int]]()
        joining, tokens = _joining(self._plan, self.taken, self.rows, items)
        for count, left in [*self._groups, (self.rows, tokens if joining else 0)]:
            first, before = first + count, first
            if not left:
                continue
            which = torch.arange(before, first, device=device).expand(self.lists, -1)
            if first == rows.scores.shape[1] and 0 < joining < self.rows:
                which = which[:, :1] + (rows.tails[:, -self.rows :] > 0).int().topk(joining)[1]
            if left > (items == ENDED):
                groups.append((which.shape[1], left - 1))
                on.append(which)
            else:
                over.append(which)
        self._groups = groups
        if not on and not over:
            return None, None
        at = torch.cat([*on, *over], 1)
        run = rows.tokens.gather(1, at[:, :, None].expand(-1, -1, self.longest))
        states, scores, tails = (column.gather(1, at) for column in (rows.states, rows.scores, rows.tails))
        cost = first_logits(logits, at, run[:, :, self.taken], tails > 0).double() - sums[:, :, 0].gather(1, at)
        nothing = torch.zeros_like(at)
        scores = torch.where(tails > 0, scores + cost, -torch.inf)
        scored = Rows(run, states, scores, at, tails - 1, nothing, nothing)
        if items != ENDED:
            return scored, None
        complete = scored._replace(scores=torch.where(scored.tails == 0, scores, -torch.inf))
        scored = scored._replace(scores=torch.where(scored.tails > 0, scores, -torch.inf))
        return _first(scored, self.riding) if on else None, complete


class LockstepRaces(Races):
    """The beams of some races of one set, one token of each row a pass.

    A pass has `row_count` rows, the first beam of each race, then the second of each, and so on: so that the last of
    all of them may be left out together. As `Lockstep` else.
    """

    def __init__(
        self,
        arena: Arena,
        number: int,
        plan: LevelPlan,
        keys: Tensor,
        *,
        width: int,
        k: int,
        end_token: int,
        temperature: float = 1.0,
        kernels: Kernels = "auto",
    ) -> None:
        """As `Races`, for races of one set."""
        super().__init__(
            arena, [number] * len(keys), plan, keys, width=width, k=k, end_token=end_token, temperature=temperature,
            stepwise=True, kernels=kernels,
        )  # fmt: skip

    @property
    def row_count(self) -> int:
        """How many rows the next pass has."""
        return self.rows * self.lists

    def rows_after(self, open_beams: int) -> int:
        """As `Lockstep.rows_after`."""
        return min(self.rows, self._plan.successors(self.taken - 1, open_beams)) * self.lists

    @property
    def next_inputs(self) -> Tensor:
        """The token of each row of the next pass, [rows] int64."""
        return self._rows.tokens[:, : self.rows, self.taken - 1].T.flatten().clamp(min=0)

    @property
    def parents(self) -> Tensor:
        """The row of the pass before that each row continues, [rows] int64; after the prompt's pass, that."""
        parents = self._rows.parents[:, : self.rows]
        if self.taken > 1:
            parents = parents * self.lists + torch.arange(self.lists, device=parents.device)[:, None]
        return parents.T.flatten()

    def round(self, logits: Tensor) -> None:
        """As `Lockstep.round`. The prompt's logits, [1, vocabulary], are those of all races."""
        if not self.taken:
            super().round(logits.expand(self.lists, -1)[:, None])
            return
        count = len(logits) // self.lists
        self.rows = min(self.rows, count)
        if count:
            by_beam = logits[: count * self.lists].unflatten(0, (count, self.lists))
            super().round(by_beam.transpose(0, 1).flatten(0, 1)[:, None])
        else:  # an engine has a row at least, and there is nothing to learn from it
            self.taken, self.passes_left = self.taken + 1, self.passes_left - 1


def _joining(plan: LevelPlan, taken: int, beams: int, items: int) -> tuple[int, int]:
    """How many beams of length `taken` may lead to single items whose tails are not read yet, and how many
    tokens the longest of these has."""
    if items == ALONE or not 0 < taken <= plan.levels:
        return 0, 0
    return min(beams, plan.tailed[taken - 1]), plan.tails[taken - 1]


def _still_riding(
    plan: LevelPlan, taken: int, beams: int, groups: Sequence[tuple[int, int]], items: int
) -> list[tuple[int, int]]:
    """The groups of tails after a pass, each with its rows, and how many of its tokens are still to be scored."""
    groups = [*groups, _joining(plan, taken, beams, items)]
    return [(rows, left - 1) for rows, left in groups if rows and left > (items == ENDED)]


def _beams_after(plan: LevelPlan, taken: int, beams: int, width: int, items: int) -> int:
    """The most beams that there are after a pass of beams of length `taken`."""
    beams = min(width, plan.children(taken, beams))
    if items != OPEN and taken + 1 == plan.levels:  # nothing but tails goes on after the last level
        beams = 0 if items == ALONE else min(beams, plan.tailed[taken])
    return beams


def _first(rows: Rows, count: int) -> Rows:
    """The first rows of each list, without gaps in memory."""
    return Rows(*(column[:, :count].contiguous() for column in rows))
