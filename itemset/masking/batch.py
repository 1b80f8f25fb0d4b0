"""What kernels read: a step's logits rows, a slot's integer, a set's row. And which kernels a device takes."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.masking import Kernels
from itemset.trie.pointers import Pointers
from itemset.trie.walk import STATE_BITS

if TYPE_CHECKING:
    from torch import Tensor

# A row's state is one integer: the state within a set (walk.py) in 34 bits, above it the set's number in 12. Above
# these, a slot's cell holds how many committed tokens led to it, modulo 2^17, and whether any did. So whoever reads a
# cell, old or just written by another program of the same launch, knows which tokens are still to be walked: all if
# none did, else fewer than 2^17.
SET_BITS = 12
LOCAL = (1 << STATE_BITS) - 1
CONSUMED = STATE_BITS + SET_BITS
STATE = (1 << CONSUMED) - 1
ANY_CONSUMED = 1 << 63 - CONSUMED
CONSUMED_MASK = 2 * ANY_CONSUMED - 1
COUNT_MASK = ANY_CONSUMED - 1

# A set's row begins with its `Pointers`: where its sections lie, then counts and widths. Triton takes a section's place
# as a word of `Arena.words`, NO_BITS if there is none; Numba as an address, 0 if there is none.
ROW_OFFSETS, TERMINAL, LABELS, TARGETS, NODE_BASE, TAIL_BASE, TAILS, ALIVE, DEAD_LIST, DEAD_COUNT = range(10)
POTENTIAL, BOOSTED, BOOSTED_COUNT, _, EDGES = range(10, 15)
# READY: where its ready masks lie (trie.levels). WIDTHS: for Triton, all in one. On the host path: where a request's
# stop tokens lie, and how many.
READY, WIDTHS, STOPS, STOP_COUNT = range(21, 25)
assert len(Pointers._fields) == READY
ROW = STOP_COUNT + 1
NO_BITS = -1
NARROW_LABELS, NARROW_TARGETS = 1 << 8, 1 << 9  # bits of WIDTHS, above token_bits: 16-bit elements, else 32
COUNTED = 1 << 10  # another: counted targets
FAR_BLOCK = 32  # bits of WIDTHS below `Tables.far_block`, or of counted targets below the words of `Tables.tail_base`


def kernels_for(room: Literal["masking", "ranking"], device: str, choice: Kernels = "auto") -> ModuleType:
    """Return a room's kernels: Numba's on a CPU, Triton's on an accelerator, or as `choice` says.

    device: its kind, "cpu" or another. Raises ImportError if Triton is missing, ItemSetError for Numba on another.
    """
    triton = choice == "triton" or (choice == "auto" and device != "cpu")
    if not triton and device != "cpu":
        raise ItemSetError(f"the kernels in Numba are for CPUs, not for {device}: choose triton")
    return importlib.import_module(f"itemset.{room}.{'triton' if triton else 'cpu'}_kernels")


def table_row(item_set: ItemSet, stops: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return a set's row with addresses: [ROW] int64. The set and `stops` must live while compiled code reads it."""
    tables, ready = item_set.trie.tables, item_set.ready
    row = np.zeros(ROW, np.int64)
    row[:READY] = tables.pointers
    row[READY] = ready.ctypes.data if len(ready) else 0
    if stops is not None:
        row[STOPS], row[STOP_COUNT] = stops.ctypes.data, len(stops)
    return row


CHAIN, TREE, COLUMNS = range(3)


class Batch(NamedTuple):
    """The layout of one step. All tensors are integers on the device; their contents may change between replays.

    slots: [rows], or [requests] with `rows_each`. Each logits row's slot; -1 for padding.
    history: [slots, width], or as many rows as `slots` has. Committed tokens: a request's output begins at column
        `begin` and ends before column `end`.
    begin, end: as many as history has rows. begin may be negative if history is a window on the newest tokens and all
        tokens left of it have been walked.
    by_slot: whether history, begin and end have one row a slot, or one for each of `slots`.
    above, tokens: the drafts that lead to each row, or None and None. Laid out as a
        CHAIN: a request's rows are neighbours. above [rows]: how many drafts lead to this row, 0 for a request's first.
            tokens [rows]: the last of them; for a request's first row see `positions`.
            above may be None with `rows_each`: row after row, one draft more leads to it.
        TREE: above [rows]: the parent's row, -1 for a request's first. tokens as in a chain.
        COLUMNS: tokens [rows, any], drafts of each row from left to right. above [1]: how many of them, in all rows.
    rows_each: logits rows of a request, if all have as many: [requests x rows_each] rows. None: see `slots`.
    positions: [rows], or None; for a CHAIN with tokens. The column of history that a request's first row has in
        `tokens`, too, and is read there: history may be in the host's memory. Other rows', and columns outside
        begin .. end, are ignored.
    """

    slots: Tensor
    history: Tensor
    begin: Tensor
    end: Tensor
    by_slot: bool = True
    above: Tensor | None = None
    tokens: Tensor | None = None
    layout: int = CHAIN
    rows_each: int | None = None
    positions: Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.slots.shape[0]) * (self.rows_each or 1)  # `len` of a tensor takes five times longer


def refuse_strides(**tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor has another stride than 1 in its last dimension: a kernel would read elsewhere."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} has a stride of {tensor.stride(-1)} in its last dimension, and a kernel takes 1: "
                "give a tensor that is contiguous there"
            )
