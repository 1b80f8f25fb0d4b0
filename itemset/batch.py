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


class Batch(NamedTuple):
    """The layout of one step. All tensors are integers on the device; their contents may change between replays.

    slots: [rows]. Each logits row's slot; -1 for padding.
    history: [slots or rows, width]. Committed tokens: a request's output begins at column `begin` and ends before
        column `end`.
    begin, end: [slots or rows]. begin may be negative where history is a window on the newest tokens, as long as no
        token left of it has not been walked yet.
    by_slot: whether history, begin and end have one row a slot, or one a logits row.
    above: [rows]. In a chain the number of drafts before this row, 0 for a request's first row; in a tree the parent's
        row, -1 for a request's first. None: no drafts.
    tokens: [rows]. The token that leads to each row; not read for a request's first row.
    tree: which of the two `above` holds.
    max_drafts: depth of the deepest row. Read by `torch_kernels` only.
    """

    slots: Tensor
    history: Tensor
    begin: Tensor
    end: Tensor
    by_slot: bool = True
    above: Tensor | None = None
    tokens: Tensor | None = None
    tree: bool = False
    max_drafts: int = 0
