"""The tensors of a beam search over item sets, as the kernels of both languages take and return them.

`cpu_kernels` (Numba) and `triton_kernels` have the same six functions, with the same arguments and results:

log_sums(now): log-sum-exp of the logits over the vocabulary, [L, R, q] float32. Infinite for beams below the bar.
legal_sums(now): the same over what may follow each beam: its children, and the end token if an item may end there.
ended(now, sums): the items that end at the beams, [3, L, R] float64: END_SCORE, END_LOG, EARLIEST.
best(now, sums, ends, size, wanted): the `wanted` best of each list's children, of which there are `size` at most.
    Returns keys and places, each [1 or 2, L, wanted] int64: of children to go on with, then of those that are items.
follow(now, sums, ends, keys, places, rows, riding): the next `rows` beams: `riding` tails, then the chosen children.
merge(now, ends, done, riding): the best items of those so far, of `ends` and of `done`; and how many beams, from row
    `riding` on, were above the bar, [L] int64.

L lists have W beams each, of which the first R have logits, at q query tokens. The *bar* of a list is the score of its
last item: what goes on must beat it. Scores are compared in float64; children are ordered by a key of 64 bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import ROW_OFFSETS
from itemset.trie.walk import DEAD, STATE_BITS

NOTHING = -(1 << 63)  # the key of no candidate
OPEN, ENDED, ALONE = range(3)  # which candidates are items at once: none, those that have ended, those that stand alone
COLUMNS = 9
STATE, SCORE, LOG, KEY, PARENT, TAIL, FIRST, DEGREE, BOOST = range(COLUMNS)
END_SCORE, END_LOG, EARLIEST = range(3)


class Rules(NamedTuple):
    """What does not change during a search."""

    end_token: int  # the token after an item, which counts in its score; -1: an end costs nothing
    items: int  # OPEN, ENDED or ALONE: which children are items at once
    whole: bool  # whether a child's tail is read at once; else beams go through it token by token
    power: float  # 1 / temperature of races, whose score is a Gumbel time; 0 of lists, whose score is log-probability
    boost: float  # what the potentials of the sets are multiplied by; 0 if they have none
    # An item's log-probability is divided by its tokens to the power of `length`, a prefix's multiplied by `norm`: what
    # it would be divided by if the longest item were below it. 0 and 1 if lengths do not count.
    length: float
    norm: float


class Rows(NamedTuple):
    """Beams.

    table: [COLUMNS, L, W] int64, contiguous:
        STATE, with the set's number, as in `Slots.row_states`: DEAD if there is no beam, END of a beam with its tail.
        SCORE and LOG, the bits of float64: what orders beams, and their log-probability, both without the tail. In
            lists the score is LOG times the rules' `norm`, and BOOST; in races it is the time, negated. -inf if there
            is no beam.
        KEY, of races: where a beam's random numbers come from.
        PARENT, the row of the pass before that the beam continues; 0 if there is no beam.
        TAIL, how many of the tail's tokens are still to be scored; -1 if there is no beam.
        FIRST and DEGREE, the first child's edge, and how many children there are. Inside a tail, if beams go on token
            by token, the one child has the state in place of an edge.
        BOOST, the bits of float64: its potential (`trie.potential`), times the rules' boost.
    tokens: [L, W, longest] int64, -1 after a beam's tokens. Those of its tail are among them.
    """

    table: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, lists: int, width: int, longest: int, device: torch.device) -> "Rows":
        options = {"dtype": torch.int64, "device": device}
        return cls(torch.empty(COLUMNS, lists, width, **options), torch.empty(lists, width, longest, **options))

    @classmethod
    def roots(cls, arena: Arena, numbers: Tensor, width: int, longest: int) -> "Rows":
        """Return the beams that a search begins with: of each list one, at the root of its set. numbers: [L] int64."""
        rows = cls.empty(len(numbers), width, longest, arena.device)
        rows.table.zero_()
        rows.tokens.fill_(-1)
        rows.table[STATE] = (numbers << STATE_BITS | DEAD)[:, None]
        rows.table[STATE, :, 0] -= DEAD
        rows.table[TAIL, :, 1:].fill_(-1)  # to assign a number would copy it from the host
        for column in (SCORE, LOG):
            rows.table[column, :, 1:].view(torch.float64).fill_(-torch.inf)
        # The root is node 0, and its edges are the first ones.
        rows.table[DEGREE, :, 0] = arena.words[arena.sets[numbers, ROW_OFFSETS] + 1].long() & 0xFFFFFFFF
        return rows

    @property
    def scores(self) -> Tensor:
        """[L, W] float64."""
        return self.table[SCORE].view(torch.float64)


class Items(NamedTuple):
    tokens: Tensor  # [L, k, longest] int64, -1 after an item's tokens
    scores: Tensor  # [L, k] float64, contiguous, what orders them, -inf for no item
    logs: Tensor  # their log-probabilities, as the scores

    @classmethod
    def empty(cls, lists: int, k: int, longest: int, device: torch.device) -> "Items":
        tokens = torch.empty(lists, k, longest, dtype=torch.int64, device=device)
        return cls(tokens, *torch.empty(2, lists, k, dtype=torch.float64, device=device))


class Pass(NamedTuple):
    arena: Arena
    logits: Tensor  # [L, R, q, vocabulary], of any floating dtype, a stride of 1 in the last dimension
    rows: Rows
    items: Items
    # [L, W] int64. The children of a list stand one beam after another: where those of each beam end.
    offsets: Tensor
    taken: int  # how many tokens stand before a beam's tail
    rules: Rules
    # [vocabulary] int32, contiguous: the column of each token that may follow; None if each has its own. The logits
    # are then [L, R, q, columns], and `log_sums` is not for them.
    columns: Tensor | None = None


def score_of(keys: Tensor) -> Tensor:
    """Return the score that each key orders by, float64; -inf for NOTHING.

    A key has the score as float32 above, its bits turned so that integers compare as the floats do, and the complement
    of 32 bits of the edge, or of the state inside a tail, below: of equal scores the lower edge is better.
    """
    high = keys >> 32
    scores = (high ^ (high >> 31) & 0x7FFFFFFF).int().view(torch.float32).double()
    return torch.where(keys == NOTHING, -torch.inf, scores)
