"""Beam search over item sets as tensors of shapes that the host knows: for whoever runs the model.

With log-probabilities as scores it finds ranked lists: those of `search.Search` without `exact`, but for rounding. With
Gumbel times it draws from the model's own distribution without replacement: stochastic beam search (Kool, van Hoof and
Welling 2019), by the *races* of `exact_sampling.Drawing` in place of lists.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from itemset.masking import Kernels
from itemset.masking.arena import Arena
from itemset.masking.batch import kernels_for
from itemset.ranking import beam_state as form
from itemset.ranking.beam_state import ENDED, NOTHING, OPEN, Items, Pass, Rows, Rules, score_of
from itemset.ranking.search import Width, check_positive, check_widths, width_at
from itemset.trie.levels import LevelPlan

_NEAR = 2.0**-20  # children order by float32: what is nearer than such a part of a score is not told apart


class Found(NamedTuple):
    """Items, best first."""

    tokens: Tensor  # [lists, k, longest] int64, -1 after an item's
    scores: Tensor  # [lists, k] float64, their log-probabilities, -inf where there is no item


class Beams:
    """The beams of some ranked lists or races of one set, or of sets that share a plan.

    A forward pass has `width` rows a list, one a beam, which the caller lays out as one pleases; in the next pass only
    the first `rows` of each list are alive. Each pass goes to `round`:

        beams = Beams(arena, [number] * lists, item_set.level_plan, width=256, k=100, end_token=end_token)
        beams.round(logits)  # [lists, 1, vocabulary]: after each list's prompt
        while beams.passes_left:
            # Row i of a list continues row parents[i] of the pass before, or the prompt, and so do its keys and values.
            logits = model(beams.next_inputs, beams.parents)  # [lists * width, queries, vocabulary]
            beams.round(logits)
        beams.found

    Nothing is read back and no shape depends on what a tensor holds. All of it is on the arena's device and current
    stream; the caller names the sets to `Arena.use`. With the same logits every rank finds the same.

    A beam is a prefix. One that leads to a single item goes on with all of that item's tokens: these are the further
    query tokens of its row, and the row's last pass. Open prefixes compete for the `width` places, and what is complete
    is kept apart in the best `k`, whose last is a bar for all that goes on.

    Draws: whatever the width, those that `exact` names are the first ones of a `Drawing` with the same keys and logits.
    That must make the others, with the same keys: to take the exact ones of several tries would favour likely items.

    longest: the most tokens of an item.
    queries: query tokens of each row in the next pass, 1 + the longest tail that may be there.
    rows: how many rows of each list the next pass needs at most: 1 at first, then `width` or fewer, which stand first.
        Where reading a number costs nothing, `narrow` makes them fewer after each round.
    passes_left: passes that may still be needed; 0 at the end.
    """

    def __init__(
        self, arena: Arena, numbers: Sequence[int], plan: LevelPlan, *, width: Width, k: int, end_token: int | None,
        renormalised: bool = False, stepwise: bool = False, longest: int | None = None, keys: Tensor | None = None,
        temperature: float = 1.0, boost: float = 1.0, normalise_length: float = 0.0, kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        """Raises ValueError if width, k or longest is less than 1, there is no list, or options exclude each other.

        numbers: the set of each list, as the arena numbers it. plan: of that set. width: places that open prefixes
        compete for. k: items to find; in each race, items drawn without replacement.
        end_token: if given, the end of an item counts in its score. Races need it.
        renormalised: score each token by its share among those that may stand there; tails then cost nothing.
        stepwise: one token a pass for all beams: `queries` is 1, and an item that stands alone may be pruned later.
        longest: with stepwise, the most tokens of an item that is found; those of the plan's longest if None.
        keys: [lists] int64, on the arena's device: draw, by these keys of `exact_sampling.Drawing.races`.
        temperature: of draws, above 0; above 1 of sets that `tempered` has made. boost: what the boosts of the sets
        count, see `view`. normalise_length: of lists with an end token, as of `search.Search`; not with renormalised.
        kernels: by default as the arena's; "auto" is Numba on a CPU and Triton on an accelerator.
        """
        if renormalised and stepwise:
            raise ValueError("renormalised and stepwise exclude each other: tails cost nothing, and take no pass")
        if longest is not None and not stepwise:
            raise ValueError("longest is given without stepwise: tails are read whole")
        if normalise_length and (renormalised or end_token is None):
            raise ValueError("normalise_length takes lists whose ends are scored, and that are not renormalised")
        check_widths(width)
        check_positive(k=k, longest=longest, lists=len(numbers))
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}: make it more than 0")
        self.arena, self.lists, self.k, self._widths = arena, len(numbers), k, width
        self.longest = min(longest or plan.longest, plan.longest)
        self.queries, self.rows, self.riding, self.taken = 1, 1, 0, 0
        self._plan, self._renormalised, self._races = plan, renormalised, keys is not None
        boosts, length = [arena.most_boost(number) for number in numbers], float(normalise_length)
        boost *= any(one is not None for one in boosts)
        self._rules = Rules(
            end_token=-1 if end_token is None else end_token,
            items=items_of(end_token, renormalised),
            whole=not stepwise,
            power=0.0 if keys is None else 1 / temperature,
            boost=boost,
            length=length,
            norm=(self.longest + (end_token is not None)) ** -length,
        )
        self._kernels = kernels_for("ranking", arena.device.type, kernels or arena.choice)
        self.passes_left = self._passes()
        sets = torch.empty(self.lists, dtype=torch.int64, device=arena.device)
        for i, number in enumerate(numbers):
            sets[i].fill_(number)  # a copy from the host would make it wait
        self._rows = Rows.roots(arena, sets, width_at(self._widths, 1), self.longest)
        if keys is not None:
            self._rows.table[form.KEY, :, 0] = keys
            self._rows.scores[:, 0] = -_log_exponential(keys)
        for i, most in enumerate(boosts if boost else ()):
            self._rows.scores[i, 0] += boost * (most or 0.0)
            self._rows.table[form.BOOST].view(torch.float64)[i, 0].fill_(boost * (most or 0.0))
        self._items = Items.empty(self.lists, self.k, self.longest, arena.device)
        self._items.tokens.fill_(-1)
        for column in self._items[1:]:
            column.fill_(-torch.inf)
        self._left = [torch.full((self.lists,), NOTHING, device=arena.device)]  # of each round, the best it has pruned
        self._alive = [torch.zeros(self.lists, dtype=torch.int64, device=arena.device)]

    @property
    def width(self) -> int:
        """Beams of the next pass, alive or not; before the first one, those of the second."""
        return len(self._rows.table[0, 0])

    @property
    def _next_width(self) -> int:
        return width_at(self._widths, self.taken + 1)

    @property
    def row_count(self) -> int:
        """Return how many rows of each list the next pass has: `rows`, and in `Lockstep` others."""
        return self.rows

    @property
    def tokens(self) -> Tensor:
        """Return each beam's tokens, those of its tail included, then -1: [lists, width, longest] int64."""
        return self._rows.tokens

    @property
    def parents(self) -> Tensor:
        """Return the row of the pass before that each beam continues: [lists, width] int64, 0 if there is no beam."""
        return self._rows.table[form.PARENT]

    @property
    def next_inputs(self) -> Tensor:
        """Return the tokens of the next pass, [lists, width, queries] int64: the last ones of each beam, then its tail.

        After a beam's tokens, and without a beam, they are 0. The first position is the prompt's length + `taken` - 1.
        """
        return self._rows.tokens[:, :, self.taken - 1 : self.taken - 1 + self.queries].clamp(min=0)

    @property
    def span(self) -> tuple[int, int] | None:
        """Return the lowest and the highest token whose logits the next round reads, besides sums; None: any token."""
        plan, end = self._plan, self._rules.end_token
        if not plan.spans or (any(plan.tails) and not self._renormalised):
            return None
        return plan.spans[self.taken] if self.taken < plan.levels else (end, end)

    @property
    def all_over(self) -> Tensor:
        """Return whether no beam can lead to a better item, to stop early: a bool on the device."""
        over = (self._rows.scores <= self.bar).all()
        return over if self.passes_left else torch.ones_like(over)

    @property
    def open_beams(self) -> Tensor:
        """Return the most beams of a list that may lead to something better but for lone items: int64 on the device."""
        return ((self._rows.table[form.DEGREE] > 0) & (self._rows.scores > self.bar)).sum(1).max()

    @property
    def bar(self) -> Tensor:
        """Return the score that a beam must beat: [lists, 1] float64."""
        return self._items.scores[:, -1:]

    @property
    def found(self) -> Found:
        """Return the items so far. Equal scores stand in the order in which they were found."""
        return Found(self._items.tokens, self._items.logs)

    @property
    def decided(self) -> Found:
        """Return `found` with a score of -inf for what further passes could have changed, at the end."""
        tokens, scores = self.found
        return Found(tokens, torch.where(self.exact, scores, -torch.inf) if self._races else scores)

    @property
    def exact(self) -> Tensor:
        """Return which items of races no other item can precede, at the end: [lists, k] bool. Of a missing one: whether
        the set has no more."""
        left = self._best_left[:, None]
        return left.isneginf() | (self._items.scores > left + _NEAR * (left.abs() + 1))

    @property
    def proven(self) -> Tensor:
        """Return whether no other item can beat the last of those found, at the end: [lists] bool."""
        return self.exact.all(1) if self._races else self._best_left <= self._items.scores[:, -1]

    @property
    def took(self) -> Tensor:
        """Return how many beams were passed to the model so far, and in how many rounds: [lists, 2] int64."""
        alive = torch.stack(self._alive)
        return torch.stack((alive.sum(0), (alive > 0).sum(0)), 1)

    @property
    def _best_left(self) -> Tensor:
        return score_of(torch.stack(self._left).amax(0))

    def round(self, logits: Tensor, *, columns: Tensor | None = None, sums: Tensor | None = None) -> None:
        """Take the logits of a pass: items are found, and the next beams chosen.

        logits: [lists * R, queries, vocabulary], of any floating dtype, on the arena's device, a stride of 1 in the
        last dimension; R is at least `rows`, those that stand first in each list, and 1 at first. They are not changed.
        columns: as of `Pass`, if there are logits of the set's own tokens only. sums: then, unless `renormalised`, of
        `log_sums`; zeros for log-probabilities. Raises ValueError for another shape, or if no pass is left.
        """
        if not self.passes_left:
            raise ValueError("the search is over: no pass is left")
        logits = self._by_list(logits)
        kernels, rules, riding = self._kernels, self._rules, self.riding
        most_children = self._plan.children if rules.whole else self._plan.successors
        size = most_children(self.taken, self.rows) if self.taken < self.longest else 0
        now = self._now(logits, columns)
        if sums is None:
            if columns is not None and not self._renormalised:
                raise ValueError("columns without sums: the logits are not those of all tokens")
            sums = (kernels.legal_sums if self._renormalised else kernels.log_sums)(now)
        ends = kernels.ended(now, sums)
        keys = places = torch.empty(1, self.lists, 0, dtype=torch.int64, device=self.arena.device)
        done = None
        if size:
            wanted = max(self._next_width + 1, 0 if rules.items == OPEN else self.k)
            keys, places = kernels.best(now, sums, ends, size, wanted)
            self._left.append(keys[0, :, self._next_width])
            if rules.items != OPEN:
                done = kernels.follow(now, sums, ends, keys[1], places[1], self.k, 0)
        count = self._plan_pass(size)
        self._rows = kernels.follow(now, sums, ends, keys[0], places[0], self.riding + count, self.riding)
        self._items, alive = kernels.merge(now, ends, done, riding)
        self._alive.append(alive)
        self.taken += 1
        self.passes_left -= 1
        if not (self.passes_left or rules.whole) and rules.items == ENDED:
            # Where `longest` cuts longer items off, what ends there costs no further pass, and no logits.
            last = now._replace(rows=self._rows, items=self._items, logits=logits[:, :1].expand(-1, count, -1, -1))
            ends = kernels.ended(last, sums[:, :1].repeat(1, count, 1))
            self._items, _ = kernels.merge(last, ends, None, 0)

    def log_sums(self, logits: Tensor, first: int = 0) -> Tensor:
        """Return the log-sum-exp of some rows' logits, if those of a whole pass would take too much memory.

        It is [lists, some, queries] float32, infinite for beams that lead to nothing better. logits: [lists * some,
        queries, vocabulary], those of each list from row `first` on.
        """
        by_list = logits.unflatten(0, (self.lists, -1))
        some = slice(first, first + by_list.shape[1])
        rows = Rows(self._rows.table[:, :, some].contiguous(), self._rows.tokens[:, some].contiguous())
        return self._kernels.log_sums(self._now(by_list)._replace(rows=rows))

    def _by_list(self, logits: Tensor) -> Tensor:
        """Return the logits of a pass as [lists, R, queries, vocabulary]. Raises ValueError for another shape."""
        count, extra = divmod(len(logits), self.lists)
        if logits.dim() != 3 or extra or not self.rows <= count <= self.width or logits.shape[1] != self.queries:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)}: {self.lists} lists of {self.rows} to {self.width} rows with "
                f"{self.queries} query tokens are next"
            )
        return logits.unflatten(0, (self.lists, count))

    def _now(self, logits: Tensor, columns: Tensor | None = None) -> Pass:
        offsets = self._rows.table[form.DEGREE].cumsum(1)
        return Pass(self.arena, logits, self._rows, self._items, offsets, self.taken, self._rules, columns)

    def _plan_pass(self, size: int) -> int:
        """Settle the rows and query tokens of the next pass, of `size` children; return how many beams are chosen."""
        if not size:
            return 0
        self.queries = 1 if self._renormalised or not self._rules.whole else 1 + self._plan.tails[self.taken]
        self.rows = min(self._next_width, size)
        return self._next_width

    def narrow(self) -> None:
        """Omit from the next pass the last rows, which lead to no better item; without rows the search is over.

        On an accelerator the host waits for how many stay. Not for `Lockstep`, which has `rows_after`.
        """
        if not self.passes_left:
            return
        alive = self._rows.scores > self.bar
        places = torch.arange(1, self.width + 1, device=alive.device)
        self.rows = min(self.rows, int((alive * places).max()))
        self._rows.table[form.DEGREE, :, self.rows :] = 0  # their children are nobody's
        if not self.rows:
            self.passes_left = 0

    def _passes(self) -> int:
        plan, items = self._plan, self._rules.items
        if not self._rules.whole:
            return self.longest + (items == OPEN)
        last_scored = items == OPEN or (items == ENDED and plan.tails[-1] > 0)
        return min(self.longest, plan.levels) + last_scored


def items_of(end_token: int | None, renormalised: bool) -> int:
    """Return which children are items at once, of `Rules`."""
    return form.ALONE if renormalised else ENDED if end_token is None else OPEN


def table_of(found: Found) -> Tensor:
    """Return a table of items, [lists, k, 2 + longest] float64: log p or -inf, number of tokens, tokens, then -1."""
    tokens, scores = found
    return torch.cat((scores[:, :, None], (tokens >= 0).sum(2, keepdim=True).double(), tokens.double()), 2)


def _log_exponential(keys: Tensor) -> Tensor:
    """As `exact_sampling.log_exponential`, of int64: float64."""
    unit = (((keys >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    return (-unit.log()).log()


def warm_up(arena: Arena, logits: Tensor, *, stepwise: bool = False, columns: Tensor | None = None) -> None:
    """Compile what lists and races launch, all that would else be compiled while the first list waits.

    logits: [1, 1, vocabulary], any values, of the type to come. stepwise: of races. columns: as of `Pass`.
    """
    size, one_token = logits.shape[2], LevelPlan((1,), (np.ones(1, np.int64),), (0,), (0,), 1)  # a set of one item
    rows = logits.new_zeros(2, 1, size - size % 16 + 32)
    both: dict[str, Any] = {"width": 1, "k": 1, "end_token": 0}
    keys = torch.zeros(2, dtype=torch.int64, device=arena.device)
    searches = [both, {**both, "end_token": None}, {**both, "renormalised": True}]
    for options in [*searches, {**both, "keys": keys, "stepwise": stepwise}]:
        for first in (0, 1):  # rows that begin at a multiple of 16 bytes, and others
            beams = Beams(arena, [0, 0], one_token, **options)
            beams._items.scores.fill_(torch.inf)  # a bar that nothing passes: there may be no set to follow an edge in
            now = rows[:, :, first : first + size]
            beams.round(now, columns=columns, sums=None if columns is None else beams.log_sums(now))
