"""What one step tells the kernels about its logits rows, and how a slot's integer is made up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# A row's state is one integer: the state within a set (walk.py) in 32 bits, above it the set's number in 12. A slot's
# cell holds above these, modulo 2^20, how many committed tokens led to it: whoever reads a cell, old or just written
# by another program of the same launch, knows which tokens are still to be walked.
LOCAL = (1 << 32) - 1
CONSUMED = 44
CONSUMED_MASK = (1 << 20) - 1
STATE = (1 << CONSUMED) - 1


CHAIN, TREE, COLUMNS = range(3)


class Batch(NamedTuple):
    """The layout of one step. All tensors are integers on the device; their contents may change between replays.

    slots: [rows], or [requests] with `rows_each`. Each logits row's slot; -1 for padding.
    history: [slots, width], or as many rows as `slots` has. Committed tokens: a request's output begins at column
        `begin` and ends before column `end`.
    begin, end: as many as history has rows. begin may be negative where history is a window on the newest tokens, as
        long as no token left of it has not been walked yet.
    by_slot: whether history, begin and end have one row a slot, or one for each of `slots`.
    above, tokens: the drafts that lead to each row, or None and None. Laid out as a
        CHAIN: a request's rows are neighbours. above [rows]: how many drafts lead to this row, 0 for a request's first.
            tokens [rows]: the last of them; for a request's first row see `positions`.
            above may be None with `rows_each`: row after row, one draft more leads to it.
        TREE: above [rows]: the parent's row, -1 for a request's first. tokens as in a chain.
        COLUMNS: tokens [rows, any], drafts of each row from left to right. above [1]: how many of them, in all rows.
    max_drafts: most drafts that lead to a row, if the host knows; fewer steps for `torch_kernels`, no more.
    rows_each: logits rows of a request, if all have as many: [requests x rows_each] rows. None: see `slots`.
    positions: [rows], or None. Of a CHAIN with tokens. At a request's first row, tokens holds what history holds in
        this column, and is read in its place: history may lie in the host's memory. Not read for other rows. Any column
        outside begin .. end says nothing.
    """

    slots: Tensor
    history: Tensor
    begin: Tensor
    end: Tensor
    by_slot: bool = True
    above: Tensor | None = None
    tokens: Tensor | None = None
    layout: int = CHAIN
    max_drafts: int | None = None
    rows_each: int | None = None
    positions: Tensor | None = None

    @property
    def rows(self) -> int:
        """Logits rows."""
        return len(self.slots) * (self.rows_each or 1)
