"""Per-request state on the device: one integer a slot, and what a step does with it."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from itemset.arena import Arena
from itemset.batch import CONSUMED, LOCAL, STATE, Batch
from itemset.walk import FREE, WAITING

NO_SET = -1
Kernels = Literal["auto", "torch", "triton"]


def kernels_for(device: torch.device | str, choice: Kernels = "auto") -> ModuleType:
    """`triton_kernels` on an accelerator that has Triton, else `torch_kernels`; or what `choice` says.

    Both offer advance, walk, mask, step and forced, with equal arguments and results.
    """
    if choice == "auto":
        on_cpu = torch.device(device).type == "cpu"
        choice = "torch" if on_cpu or importlib.util.find_spec("triton") is None else "triton"
    return importlib.import_module(f"itemset.{choice}_kernels")


class Slots:
    """The state of each of an engine's request slots.

    All of it lies on the device and is written there. Nothing here waits for the device; `step`, `walk` and `forced`
    allocate nothing where Triton runs them, and can be captured in a CUDA graph.

    cells: [slots + 1] int64. Each slot's set, its state in that set, and how many tokens led there (batch.py). The last
        one is nobody's.
    marks: [slots + 1, 1 + max_stop_tokens] int32. The token behind which each slot's constraint begins, or -1; its stop
        tokens, then -1.
    row_states: [max_rows] int64. The state of each logits row, as the last `walk` or `step` found it.
    """

    def __init__(
        self, arena: Arena, slots: int, *, max_rows: int, max_stop_tokens: int = 16, kernels: Kernels = "auto"
    ) -> None:
        self.arena = arena
        self.kernels = kernels_for(arena.device, kernels)
        self.cells = torch.full((slots + 1,), FREE, dtype=torch.int64, device=arena.device)
        self.marks = torch.full((slots + 1, 1 + max_stop_tokens), -1, dtype=torch.int32, device=arena.device)
        self.row_states = torch.full((max_rows,), FREE, dtype=torch.int64, device=arena.device)

    def assign(self, slots: Tensor, sets: Tensor, marks: Tensor) -> None:
        """Put these slots at the beginning of an item, or where `marks` says so before it, whatever they held before.

        A request that already has output (resumed, moved here from another slot) is assigned like any other: the next
        `walk` takes the tokens that it has committed.

        slots: [n] integers. sets: [n] integers, the arena's numbers, or NO_SET. marks: [n, 1 + max_stop_tokens]
        integers, as in `Slots.marks`.
        """
        self.marks.index_copy_(0, slots.long(), marks.to(self.marks.dtype))
        self._begin(slots.long(), sets.long())

    def reset(self, slots: Tensor) -> None:
        """Put these slots, which keep their sets and marks, where `assign` had put them."""
        index = slots.long()
        cells = self.cells[index]
        self._begin(index, torch.where(cells & LOCAL == FREE, NO_SET, (cells & STATE) >> 32))

    def _begin(self, slots: Tensor, sets: Tensor) -> None:
        local = torch.where(self.marks[slots, 0] >= 0, WAITING, 0)
        self.cells.index_copy_(0, slots, torch.where(sets >= 0, sets << 32 | local, FREE))

    def walk(self, batch: Batch, *, most: int | None = None) -> Tensor:
        """Take the committed tokens, and return the state of each row: [rows] int64, a view of `row_states`.

        most: see `torch_kernels.walk`.
        """
        out = self.row_states[: len(batch.slots)]
        self.kernels.walk(self.arena, self.cells, self.marks, batch, out, most)
        return out

    def step(self, batch: Batch, logits: Tensor, *, most: int | None = None) -> None:
        """Take the committed tokens and mask the logits, [rows, vocabulary], in place."""
        out = self.row_states[: len(batch.slots)]
        self.kernels.step(self.arena, self.cells, self.marks, batch, out, logits, most)

    def mask(self, states: Tensor, slots: Tensor, logits: Tensor) -> None:
        """Mask the logits of rows whose states [rows] and slots [rows] are given."""
        self.kernels.mask(self.arena, logits, states, self.marks, slots)

    def forced(self, states: Tensor, slots: Tensor, out: Tensor, *, guess: bool = False) -> None:
        """Fill out [rows, k] with what must follow the states, then -1 or guesses: see `torch_kernels.forced`."""
        self.kernels.forced(self.arena, states, self.marks, slots, out, guess)

    def states(self) -> list[tuple[int, int, int]]:
        """(set, state, committed tokens) of every slot. Waits for the device: for tests and metrics."""
        cells = self.cells[:-1].tolist()
        return [(cell >> 32 & 0xFFF, cell & LOCAL, cell >> CONSUMED & 0xFFFFF) for cell in cells]
