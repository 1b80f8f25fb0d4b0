"""The beams of ranked lists as tensors of shapes that the host knows: for whoever runs the model.

The search is `search.Search` without `exact`: the same items, order and scores for the same width, up to the rounding
of floats.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.slots import Kernels, backend_for
from itemset.masking.torch_tables import may_end
from itemset.ranking import torch_expand
from itemset.ranking.torch_expand import ALONE, ENDED, NOTHING, OPEN, Found, Rows, Rules, score_of
from itemset.trie.levels import LevelPlan

__all__ = ["Beams", "LevelPlan", "warm_up"]


class Beams:
    """The beams of some ranked lists of one set, or of sets that share a plan.

    A forward pass has `width` rows a list, one a beam, which the caller lays out as one pleases; only the first `rows`
    of each list are ever alive in the next pass. Each pass goes to `round`:

        beams = Beams(arena, [number] * lists, item_set.level_plan, width=256, k=100, end_token=end_token)
        beams.round(logits)  # [lists, 1, vocabulary]: after each list's prompt
        while beams.passes_left:
            # Row i of a list continues row parents[i] of the pass before, or the prompt, and so do its keys and values.
            logits = model(beams.next_inputs, beams.parents)  # [lists * width, queries, vocabulary]
            beams.round(logits)
        beams.result

    Nothing is read back and no shape depends on what a tensor holds. All of it is on the arena's device and current
    stream; the caller names the sets to `Arena.use`. With the same logits every rank finds the same.

    A beam is a prefix. One that leads to a single item goes on with all of that item's tokens: these are the further
    query tokens of its row, and the row's last pass. Open prefixes compete for the `width` places, and what is complete
    is kept apart in the best `k`, whose last is a bar for all that goes on.

    lists, width, k, longest: as given; longest is the most tokens of an item.
    queries: query tokens of each row in the next pass, 1 + the longest tail that may be there.
    rows: how many rows of each list the next pass needs at most: 1 at first, then `width` or fewer, which stand first.
        Where reading a number costs nothing, `narrow` makes them fewer after each round.
    passes_left: passes that may still be needed; 0 at the end.
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
        stepwise: bool = False,
        longest: int | None = None,
        normalised: bool = False,
        kernels: Kernels = "auto",
    ) -> None:
        """Raises ValueError if width, k or longest is less than 1, there is no list, or options exclude each other.

        numbers: the set of each list, as the arena numbers it. plan: of that set.
        end_token: if given, the end of an item counts in its score.
        renormalised: score each token by its share among those that may stand there; tails then cost nothing.
        stepwise: one token a pass for all beams: `queries` is 1, and an item that stands alone may be pruned later.
        longest: with stepwise, the most tokens of an item that is found; those of the plan's longest if None.
        normalised: the logits that come are log-probabilities, so that nobody has to add them up.
        """
        if renormalised and stepwise:
            raise ValueError("renormalised and stepwise exclude each other: tails cost nothing, and take no pass")
        if longest is not None and not stepwise:
            raise ValueError("longest is given without stepwise: tails are read whole")
        for name, value in (("width", width), ("k", k), ("longest", longest), ("lists", len(numbers))):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: make it at least 1")
        self.arena, self.lists, self.width, self.k = arena, len(numbers), width, k
        self.longest = plan.longest if longest is None else min(longest, plan.longest)
        self.queries, self.rows, self.taken = 1, 1, 0
        self._plan, self._renormalised, self._normalised = plan, renormalised, normalised
        self._rules = Rules(-1 if end_token is None else end_token, items_of(end_token, renormalised), not stepwise)
        self._kernels = twin_for("expand", arena.device, kernels)
        self.passes_left = self._passes()
        states = torch.empty(self.lists, dtype=torch.int64, device=arena.device)
        for i, number in enumerate(numbers):
            states[i].fill_(number)  # a copy from the host would make it wait
        shape = (self.lists, k, self.longest)
        self._rows = torch_expand.root(arena, states, width, self.longest)
        self._found = Found(
            torch.full(shape, -1, dtype=torch.int64, device=arena.device),
            torch.full(shape[:2], -torch.inf, dtype=torch.float64, device=arena.device),
        )
        self._left = torch.full((self.lists,), NOTHING, dtype=torch.int64, device=arena.device)
        self._alive = [torch.zeros(self.lists, dtype=torch.int64, device=arena.device)]  # beams of each pass, [lists]

    @property
    def row_count(self) -> int:
        """How many rows of each list the next pass has: `rows`, and in `Lockstep` others."""
        return self.rows

    @property
    def tokens(self) -> Tensor:
        """Each beam's tokens, those of its tail included, then -1: [lists, width, longest] int64."""
        return self._rows.tokens

    @property
    def states(self) -> Tensor:
        """Each beam's state with its set's number, DEAD if there is no beam: [lists, width] int64."""
        return self._rows.states

    @property
    def scores(self) -> Tensor:
        """Log-probability of each beam without its tail, best first, -inf without a beam: [lists, width] float64."""
        return self._rows.scores

    @property
    def parents(self) -> Tensor:
        """The row of the pass before that each beam continues: [lists, width] int64, 0 if there is no beam."""
        return self._rows.parents

    @property
    def next_inputs(self) -> Tensor:
        """The tokens of the next pass, [lists, width, queries] int64: the last ones of each beam, then its tail.

        Those after a beam's tokens are 0, and so are those of rows without a beam: what the pass makes of them is not
        read. Their first position is the prompt's length + `taken` - 1.
        """
        return self._rows.tokens[:, :, self.taken - 1 : self.taken - 1 + self.queries].clamp(min=0)

    @property
    def all_over(self) -> Tensor:
        """Whether no beam of any list can lead to a better item: a bool on the device. To stop early, read it."""
        over = (self._rows.scores <= self._found.scores[:, -1:]).all()
        return over if self.passes_left else torch.ones_like(over)

    @property
    def open_beams(self) -> Tensor:
        """How many of the beams lead on, and may lead to something better, in the list that has most: an int64 on the
        device. Not counted are those whose item stands alone."""
        return ((self._rows.degrees > 0) & (self._rows.scores > self._found.scores[:, -1:])).sum(1).max()

    @property
    def found(self) -> Found:
        """The items so far, best first: tokens [lists, k, longest] int64, scores [lists, k] float64."""
        return self._found

    @property
    def decided(self) -> Found:
        """Those of them that no further pass could change at the end, a score of -inf in place of the others'."""
        return self._found

    @property
    def proven(self) -> Tensor:
        """Whether no other item can beat the last of those found, at the end: [lists] bool."""
        return score_of(self._left) <= self._found.scores[:, -1]

    @property
    def took(self) -> Tensor:
        """How many beams were passed to the model so far, and in how many rounds: [lists, 2] int64."""
        alive = torch.stack(self._alive)
        return torch.stack((alive.sum(0), (alive > 0).sum(0)), 1)

    @property
    def result(self) -> Tensor:
        """The items, best first: [lists, k, 2 + longest] float64. Score, number of tokens, tokens, then -1.

        Where there is no item: -inf, 0 and -1. Equal scores stand in the order in which they were found.
        """
        return table_of(self._found)

    def round(self, logits: Tensor) -> None:
        """Take the logits of a pass: items are found, and the next beams chosen.

        logits: [lists * R, queries, vocabulary], of any floating dtype, on the arena's device, a stride of 1 in the
        last dimension; R is at least `rows`, those that stand first in each list, and 1 at first. They are not changed.
        Raises ValueError for another shape, or if no pass is left.
        """
        count, extra = divmod(len(logits), self.lists)
        if logits.dim() != 3 or extra or not self.rows <= count <= self.width or logits.shape[1] != self.queries:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)}: {self.lists} lists of {self.rows} to {self.width} rows with "
                f"{self.queries} query tokens are next"
            )
        if not self.passes_left:
            raise ValueError("the search is over: no pass is left")
        rows, size = self._alive_rows(), self._children()
        offsets = rows.degrees.cumsum(1)
        sums = self._sums(logits, rows, offsets, size)
        ends = self._ended(logits, sums, rows)
        done = None
        if size:
            columns = self._tail_columns()
            done = self._go_on(logits, sums, rows, offsets, size, columns)
            self.queries = 1 if self._renormalised else 1 + columns
            self.rows = min(self.width, size)
        self._found = self._merged(rows, ends, done)
        self.taken += 1
        self.passes_left -= 1
        if not (self.passes_left or self._rules.whole) and self._rules.items == ENDED:
            # Where `longest` cuts longer items off, what ends there costs no further pass.
            ends = torch.where(may_end(self.arena, self.states), self.scores, -torch.inf)
            self._found = self._kernels.merge(self._found, self._rows, ends, None)

    def narrow(self) -> None:
        """Omit from the next pass the last rows, none of which can lead to a better item; without rows the search is
        over. What is found stays the same. Not for `Lockstep`, which has `rows_after`.

        It reads how many rows stay: on an accelerator the host waits for that.
        """
        if not self.passes_left:
            return
        alive = self._rows.scores > self._found.scores[:, -1:]
        places = torch.arange(1, self.width + 1, device=alive.device)
        self.rows = min(self.rows, int((alive * places).max()))
        self._rows.degrees[:, self.rows :] = 0  # their children are nobody's
        if not self.rows:
            self.passes_left = 0

    def _alive_rows(self) -> Rows:
        """The beams, of which those are counted that can still lead to something better."""
        self._alive.append((self._rows.scores > self._found.scores[:, -1:]).sum(1))
        return self._rows

    def _passes(self) -> int:
        plan, items = self._plan, self._rules.items
        if not self._rules.whole:
            return self.longest + (items == OPEN)
        last_scored = items == OPEN or (items == ENDED and plan.tails[-1] > 0)
        return min(self.longest, plan.levels) + last_scored

    def _children(self) -> int:
        """The most children that a list's beams may have now."""
        if self.taken >= self.longest:
            return 0
        plan = self._plan
        return (plan.children if self._rules.whole else plan.successors)(self.taken, self.rows)

    def _tail_columns(self) -> int:
        return self._plan.tails[self.taken] if self._rules.whole else 0

    def _sums(self, logits: Tensor, rows: Rows, offsets: Tensor, size: int) -> Tensor:
        if self._renormalised:
            return self._kernels.legal_sums(self.arena, logits, rows, offsets, size, self._rules)
        if self._normalised:
            return torch.zeros(self.lists, len(logits) // self.lists, logits.shape[1], device=logits.device)
        return self._kernels.log_sums(logits, rows, self._found)

    def _ended(self, logits: Tensor, sums: Tensor, rows: Rows) -> Tensor:
        """The score of the item that ends at each beam."""
        ends: Tensor = self._kernels.ended(self.arena, logits, sums, rows, self.taken, self._rules)
        return ends

    def _merged(self, rows: Rows, ends: Tensor, done: Rows | None) -> Found:
        """What is found with the items that end here, and those that are complete."""
        found: Found = self._kernels.merge(self._found, rows, ends, done)
        return found

    def _go_on(self, logits: Tensor, sums: Tensor, rows: Rows, offsets: Tensor, size: int, columns: int) -> Rows | None:
        """Choose the beams to go on with, note the best that does not, and return the items that are complete."""
        kernels, rules = self._kernels, self._rules
        kinds = [self.width] if rules.items == OPEN else [self.width, self.k]
        wanted = max(self.width + 1, *kinds)
        best = kernels.best(self.arena, logits, sums, rows, self._found, offsets, size, wanted, rules)
        self._left = torch.maximum(self._left, best[0][0, :, self.width])
        new = [
            kernels.follow(
                self.arena, logits, sums, rows, offsets, keys[:, :n], places[:, :n], self.taken, columns, rules
            )
            for keys, places, n in zip(*best, kinds, strict=True)
        ]
        self._rows = new[0]
        return new[1] if len(new) > 1 else None


def items_of(end_token: int | None, renormalised: bool) -> int:
    """Which children are items at once, of `Rules`."""
    return ALONE if renormalised else ENDED if end_token is None else OPEN


def table_of(found: Found) -> Tensor:
    """Items as the rows of `Beams.result`."""
    tokens, scores = found
    return torch.cat((scores[:, :, None], (tokens >= 0).sum(2, keepdim=True).double(), tokens.double()), 2)


def twin_for(name: str, device: torch.device, choice: Kernels = "auto") -> ModuleType:
    """Return what makes rounds of lists ("expand") or races ("races"): Numba on a CPU, Triton on an accelerator, torch
    if it has none; or as `choice` says."""
    on_cpu = choice == "auto" and device.type == "cpu"
    return importlib.import_module(f"itemset.ranking.{'numba' if on_cpu else backend_for(device, choice)}_{name}")


ONE_NODE = LevelPlan((1,), (np.ones(1, np.int64),), (0,), (0,), 1)
"""The plan of a set of one item of one token."""


def warm_up(arena: Arena, logits: Tensor, *, kernels: Kernels = "auto") -> None:
    """Compile what a search launches, all that would else be compiled while the first list waits.

    logits: [1, 1, vocabulary], any values, of the type of those to come. The arena may be empty.
    """
    options: dict[str, Any] = {"width": 1, "k": 1, "kernels": kernels}
    size = logits.shape[2]
    rows = logits.new_zeros(2, 1, size - size % 16 + 32)
    for end_token, renormalised in ((0, False), (None, False), (0, True)):
        for first in (0, 1):  # rows that begin at a multiple of 16 bytes, and others
            beams = Beams(arena, [0, 0], ONE_NODE, end_token=end_token, renormalised=renormalised, **options)
            beams._found.scores.zero_()  # a bar that nothing passes: there may be no set to follow an edge in
            beams.round(rows[:, :, first : first + size])
