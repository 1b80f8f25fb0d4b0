"""Requests' state on the device: one integer a slot, and what a step does with it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from itemset.masking.arena import Arena
from itemset.masking.batch import Batch
from itemset.trie.walk import FREE, STATE_BITS, WAITING


def log_probs_of(legal: Tensor, whole: Tensor, tokens: Tensor) -> Tensor:
    """Return log p and log q of a token a row, [rows, 2] of the logits' dtype.

    legal: [rows, vocabulary], logits of which those that may not follow are -inf. whole: [rows], the log-sum-exp of all
    as they were. tokens: [rows] integers, legal ones; a negative one stands for none.
    """
    chosen = legal.gather(1, tokens.long().clamp(min=0)[:, None])
    return chosen - torch.stack((whole, legal.logsumexp(-1)), 1)


NO_SET = -1
MAX_STOP_TOKENS = 128  # of a request on the device path; vLLM has the same limit (sample/logit_bias.py)


def as_table(rows: Sequence[Sequence[int]], columns: int) -> Tensor:
    """Fill rows of integers up with -1: [rows, columns] int32, on the host. torch would take them one by one."""
    table = np.full((len(rows), columns), -1, np.int32)
    for filled, row in zip(table, rows, strict=True):
        filled[: len(row)] = row
    return torch.from_numpy(table)


class Children(NamedTuple):
    """What may follow each row, and its logits: all that a sampler needs of the vocabulary.

    tokens: [rows, width] int32. A node's children, ascending, then the stop tokens if an item may end; -1 after them.
    logits: [rows, width], of the dtype of those given; -inf after them.
    """

    tokens: Tensor
    logits: Tensor


class Slots:
    """The state of each of an engine's request slots.

    The engine keeps the token history. Call ``assign`` whenever a slot gets a request, with NO_SET if that has no set.
    In each step write the sampled tokens to the history, move `end`, and call ``step``:

        arena = Arena(room_for(films), device)
        slots = Slots(arena, 64, max_rows=64)
        slots.assign(slot, number, marks)  # [n], [n], [n, 1 + max_stop_tokens], all on the device
        history, end = torch.zeros(64, 4096, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        begin = end.clone()  # each request's prompt length
        while running:
            logits = model(...)  # [rows, vocabulary]
            slots.step(Batch(row_to_slot, history, begin, end), logits)  # what may not follow is -inf now
            tokens = sample(logits)
            history[row_to_slot, end[row_to_slot]] = tokens
            end[row_to_slot] += 1  # a request is over when it has sampled one of its stop tokens

    Give every request with a set a stop token within the vocabulary: after the item nothing else is allowed, and a row
    without one is empty. Committed tokens never shrink: an engine that takes some back assigns the slot again. Nothing
    waits for the device. Under Triton `step`, `walk` and `forced` allocate nothing: a CUDA graph can capture them.

    cells: [slots + 1] int64. Each slot's set, its state in that set, and how many tokens led there (batch.py). The last
        cell is nobody's.
    marks: [slots + 1, 1 + max_stop_tokens] int32. The token after which each slot's constraint begins, or -1; its stop
        tokens, then -1.
    row_states: [max_rows] int64. The state of each logits row after its drafts, as the last `walk` or `step` found it.
    """

    def __init__(self, arena: Arena, slots: int, *, max_rows: int, max_stop_tokens: int = 16) -> None:
        self.arena = arena
        self.cells = torch.full((slots + 1,), FREE, dtype=torch.int64, device=arena.device)
        self.marks = torch.full((slots + 1, 1 + max_stop_tokens), -1, dtype=torch.int32, device=arena.device)
        self.row_states = torch.full((max_rows,), FREE, dtype=torch.int64, device=arena.device)

    def assign(self, slots: Tensor, sets: Tensor, marks: Tensor) -> None:
        """Put these slots at the beginning of an item, or before it if `marks` says so, whatever they held.

        Of a request that has output already, because it was resumed or moved, the next `walk` takes the tokens.

        slots: [n] integers. sets: [n] integers, the arena's numbers, or NO_SET. marks: [n, ...], as `Slots.marks`.
        """
        slots, sets, marks = slots.long(), sets.long(), marks.to(self.marks.dtype)
        self.marks.index_copy_(0, slots, marks)
        local = torch.where(marks[:, 0] >= 0, WAITING, 0)
        self.cells.index_copy_(0, slots, torch.where(sets >= 0, sets << STATE_BITS | local, FREE))

    def walk(self, batch: Batch) -> Tensor:
        """Take the committed tokens, and return the state of each row: [rows] int64, a view of `row_states`."""
        return self.arena.kernels.walk(self.arena, self.cells, self.marks, batch, self._out(batch))

    def step(self, batch: Batch, logits: Tensor) -> None:
        """Take the committed tokens, and set to -inf in place what may not follow in the logits, [rows, vocabulary]."""
        self.arena.kernels.walk(self.arena, self.cells, self.marks, batch, self._out(batch), logits)

    def children(self, batch: Batch, logits: Tensor, width: int) -> Children:
        """Take the committed tokens, and return what may follow each row with its logits, which stay as they are.

        Nothing is read or written in proportion to the vocabulary, so with large ones this takes far less than `step`:

            tokens, logits = slots.children(batch, logits, width)
            tokens = tokens.gather(1, logits.softmax(1).multinomial(1))

        logits: [rows, vocabulary]. width: the most that may follow a row, `arena.level_plan(number).children(level, 1)`
        at a level, at least 1, and its stop tokens. More are omitted. A row that nothing constrains has no children.
        """
        given = logits, self.walk(batch), self.marks, batch.slots, batch.rows_each, width
        return Children(*self.arena.kernels.children(self.arena, *given))

    def _out(self, batch: Batch) -> Tensor:
        rows, most = batch.rows, self.row_states.shape[0]
        if rows > most:
            raise ValueError(f"a step of {rows} rows, but max_rows is {most}")
        return self.row_states if rows == most else self.row_states[:rows]

    def mask(self, states: Tensor, slots: Tensor, logits: Tensor) -> None:
        """Mask the logits of rows whose states [rows] and slots [rows] are given."""
        self.arena.kernels.mask(self.arena, logits, states, self.marks, slots)

    def forced(self, states: Tensor, slots: Tensor, out: Tensor, *, guess: bool = False) -> None:
        """Fill out [rows, k] with what must follow the states, then -1 or guesses: see `cpu_kernels.forced`."""
        self.arena.kernels.forced(self.arena, states, self.marks, slots, out, guess)
