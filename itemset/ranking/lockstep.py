"""The beams of a ranked list for an engine that decodes one token of each row a pass: tails take a token a pass too.

The list is that of `Beams`, and so of `search.Search`: an item that stands alone is never pruned on its tail. It gets a
row of its own beside the beams, for as long as its tail lasts. Draws need no such rows: what they prune, they know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import LOCAL
from itemset.masking.slots import Kernels
from itemset.ranking.beams import Beams, LevelPlan
from itemset.ranking.races import Races
from itemset.ranking.torch_expand import Rows, token_logits
from itemset.trie.walk import DEAD


def rows_of_passes(plan: LevelPlan, width: int, *, renormalised: bool = False) -> tuple[int, ...]:
    """Return how many rows each pass after the prompt's has at most: beams, and tails that ride along."""
    counts: list[int] = []
    beams, riding = 1, list[tuple[int, int]]()  # (rows, passes left)
    for taken in range(plan.longest + 2):
        joining = (_joining(plan, taken, beams), plan.tails[taken - 1] if 0 < taken <= plan.levels else 0)
        riding = [(rows, left - 1) for rows, left in riding if left > 1]
        if not renormalised and all(joining):
            riding.append(joining)
        beams = min(width, plan.children(taken, beams))
        if renormalised and taken + 1 == plan.levels:
            beams = 0  # nothing goes on after the last level: all are items
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


class Riders(NamedTuple):
    """Items that stand alone, on their way through their tails. rows: [1, n], with the scores so far, -inf for none.

    column: of the last token that was given to the model. read: how many tokens of the tails that are. most: tokens of
    the longest tail.
    """

    rows: Rows
    column: int
    read: int
    most: int


class Lockstep(Beams):
    """The beams of one ranked list, one token of each row a pass.

    A pass has `row_count` rows: the tails that ride along, then the beams. `next_inputs` and `parents` are [rows]. The
    last of the beams may be left out of a pass where `rows_after` says that there is none. There is no `queries`.
    """

    def __init__(
        self,
        arena: Arena,
        number: int,
        plan: LevelPlan,
        *,
        width: int,
        k: int,
        end_token: int,
        renormalised: bool = False,
        kernels: Kernels = "auto",
    ) -> None:
        """As `Beams`, for a list of one set."""
        super().__init__(
            arena, [number], plan, width=width, k=k, end_token=end_token, renormalised=renormalised, kernels=kernels
        )
        self.passes_left = 1 + len(rows_of_passes(plan, width, renormalised=renormalised))
        self._riders: list[Riders] = []
        self._origins: list[Tensor] = []  # the rows that each of the riders continues
        self._first = 0  # the row of the first beam in the pass before

    @property
    def riding(self) -> int:
        """How many rows of the next pass are tails."""
        return sum(one.rows.scores.shape[1] for one in self._riders)

    @property
    def row_count(self) -> int:
        """How many rows the next pass has."""
        return self.riding + self.rows

    @property
    def open_beams(self) -> Tensor:
        """How many of the beams lead to more than one item, and may lead to a better one: an int64 on the device. To
        leave rows out of the pass after the next, read it."""
        bar = self._found.scores[0, -1]
        return ((self._rows.degrees[0] > 0) & (self._rows.scores[0] > bar)).sum()

    def rows_after(self, open_beams: int) -> int:
        """Return how many rows of the next pass are needed. open_beams: as it was before the last call of `round`."""
        return self.riding + min(self.rows, self._plan.children(self.taken - 1, open_beams))

    @property
    def next_inputs(self) -> Tensor:
        """The token of each row of the next pass, [rows] int64."""
        tails = [one.rows.tokens[0, :, one.column] for one in self._riders]
        return torch.cat([*tails, self._rows.tokens[0, : self.rows, self.taken - 1]]).clamp(min=0)

    @property
    def parents(self) -> Tensor:
        """The row of the pass before that each row continues, [rows] int64."""
        return torch.cat([*self._origins, self._rows.parents[0, : self.rows] + self._first])

    @property
    def all_over(self) -> Tensor:
        """Whether no row can lead to a better item: a bool on the device. To stop early, read it."""
        bar = self._found.scores[0, -1]
        parts = [self._rows.scores[0]] if self.rows else []
        parts += [one.rows.scores[0] for one in self._riders]
        return (torch.cat(parts) <= bar).all() if parts else torch.ones_like(bar, dtype=torch.bool)

    def round(self, logits: Tensor) -> None:
        """Take the logits of a pass, [rows, vocabulary], or of what `rows_after` says; else as `Beams.round`."""
        if not self.passes_left:
            raise ValueError("the search is over: no pass is left")
        logits = logits[:, None]
        self._first = self.riding
        self.rows = min(self.rows, len(logits) - self._first)
        riders, self._riders, self._origins = self._riders, [], []
        first = 0
        for one in riders:
            count = one.rows.scores.shape[1]
            self._ride(one, logits[first : first + count], first)
            first += count
        if self.rows:
            self._expand(logits[first : first + self.rows])
        self.taken += 1
        self.passes_left -= 1

    def _expand(self, logits: Tensor) -> None:
        """Take the logits of the beams. Those that lead to a single item become riders."""
        kernels, rows = self._kernels, self._alive_rows()
        size = self._plan.children(self.taken, self.rows) if self.taken < self.longest else 0
        offsets = rows.degrees.cumsum(1)
        sums = self._sums(logits, rows, offsets, size)
        complete = rows if self._renormalised else _ended_only(rows, 0)
        ends = kernels.ended(self.arena, logits, sums, complete, self.taken, self._rules)
        joining = _joining(self._plan, self.taken, self.rows)
        if joining and not self._renormalised:
            which = (rows.tails[0, : self.rows] > 0).int().topk(joining)[1]
            chosen = Rows(*(column[:, which] for column in rows))
            chosen = chosen._replace(scores=torch.where(chosen.tails > 0, chosen.scores, -torch.inf))
            one = Riders(chosen, self.taken - 1, 0, self._plan.tails[self.taken - 1])
            self._ride_on(one, logits[which], sums[:, which], which + self._first)
        done = None
        if size:
            done = self._go_on(logits, sums, rows, offsets, size, self._plan.tails[self.taken])
        self.rows = min(self.width, size)
        if self._renormalised and self.taken + 1 >= self._plan.levels:
            self.rows = 0  # nothing goes on after the last level: all are items
        self._found = kernels.merge(self._found, rows, ends, done)

    def _ride(self, one: Riders, logits: Tensor, first: int) -> None:
        """Take the logits of riders whose rows begin at the row `first`: some items are complete, the others go on."""
        alive = one.rows.scores > self._found.scores[:, -1:]
        rows = one.rows._replace(scores=torch.where(alive, one.rows.scores, -torch.inf))
        sums = self._kernels.log_sums(logits, rows._replace(tails=torch.zeros_like(rows.tails)), self._found)
        complete = _ended_only(rows, one.read)
        ends = self._kernels.ended(self.arena, logits, sums, complete, self.taken, self._rules)
        self._found = self._kernels.merge(self._found, complete, ends, None)
        if one.read < one.most:
            origins = torch.arange(first, first + len(logits), device=logits.device)
            self._ride_on(one._replace(rows=rows), logits, sums, origins)

    def _ride_on(self, one: Riders, logits: Tensor, sums: Tensor, origins: Tensor) -> None:
        """Score the next token of riders, who stand at these rows."""
        column = one.column + 1
        token = one.rows.tokens[:, :, column]
        cost = token_logits(logits[None, :, 0], token).double() - sums[:, :, 0]
        # A token of -1 stands after a tail's end: its score is that of no item.
        scores = torch.where(one.read < one.rows.tails, one.rows.scores + cost, -torch.inf)
        self._riders.append(Riders(one.rows._replace(scores=scores), column, one.read + 1, one.most))
        self._origins.append(origins)


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

    @property
    def open_beams(self) -> Tensor:
        """As `Lockstep.open_beams`, of the race that has most."""
        bar = self._found.scores[:, -1:]
        return ((self._rows.degrees > 0) & (self._rows.scores > bar)).sum(1).max()

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


def _joining(plan: LevelPlan, taken: int, beams: int) -> int:
    """How many of the beams with so many tokens may lead to single items whose tails are not read yet."""
    return min(beams, plan.tailed[taken - 1]) if 0 < taken <= plan.levels else 0


def _ended_only(rows: Rows, read: int) -> Rows:
    """The rows, of which those whose tails have another number of tokens are nowhere; without their tails."""
    states = torch.where(rows.tails == read, rows.states, rows.states & ~LOCAL | DEAD)
    return rows._replace(states=states, tails=torch.zeros_like(rows.tails))
