"""How much of its lists a step makes beside other requests: what takes as long as the rest of the step, by measurement.

A list comes in pieces: forward passes of some rows, logits of some rows, the choice of beams. What pieces and steps
take is measured as they run, and read when it is there: nothing waits for the device. Ranks follow the first one's
measurements.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

QUIET = 256  # steps without another request, after which lists have steps for themselves
MOST_STEPS = 16  # that a list is spread over, about: a wide one has more time in each
ROWS = 16  # of cut pieces, a multiple
KINDS = ("pass", "logits", "choice", "graph", "draft")
MOST_PENDING = 256  # measurements that are not read: no list goes on
KEPT = 0.9  # of what was measured before, with each measurement


class Piece(NamedTuple):
    """What a list goes on with. It may be cut by rows, if it is a pass or logits."""

    kind: str
    rows: int  # of passes: those that count in `max_list_rows_per_step`
    each: int = 1  # tokens of a row, or of a row of each list


Pieces = Generator[Piece, int, Tensor]  # yields each piece, and is sent how many of its rows to run


class StepShare:
    """The share of a worker's steps that lists have.

    rows: of passes in a part, where these are what is bounded: before anything is measured, and without other requests.
    timed: whether time is the bound beside these.
    """

    def __init__(self, device: torch.device, rows: int, *, timed: bool, group: Any = None) -> None:
        """group: of the ranks that make the same lists, as of torch.distributed on CPUs; None of a single one."""
        self.rows, self.timed = rows, timed
        self._cpu, self._group = device.type == "cpu", group
        # Of each kind, and of the rest of a step: weighted sums of 1, tokens, ms, tokens squared, and tokens x ms.
        self._sums = np.zeros((len(KINDS) + 1, 5))
        self._pending = list[tuple[int, int, Any, Any]]()
        self._start: Any = None  # of the step
        self._alone = QUIET  # steps since another request was seen
        self._pieces, self._run, self._spent, self._bound = 0, 0, 0.0, np.inf

    def start_step(self) -> None:
        self._start = self._mark() if self.timed else None

    def step(self, *, others: bool) -> None:
        """Note that a step has run but for its lists. others: whether it has requests that are not lists."""
        self._alone = 0 if others else self._alone + 1
        if self._start is not None:
            self._await(len(KINDS), 1, self._start)

    def begin(self) -> None:
        """Begin a part of the lists, on all ranks alike."""
        self._pieces, self._run, self._spent, self._bound = 0, 0, 0.0, np.inf
        if self.timed:
            self._read()
            if self._alone < QUIET and self._sums[-1, 0]:
                self._bound = self._sums[-1, 2] / self._sums[-1, 0]

    def grant(self, piece: Piece, tokens: list[int]) -> int:
        """Return how many rows of a piece this step runs next; 0 if the piece waits. tokens: of its list's passes."""
        lines = [self._line(kind) for kind in ("pass", "logits")]
        whole = sum(fixed * len(tokens) + more * sum(tokens) for fixed, more in lines)  # ms of the list
        bound = max(self._bound, whole / MOST_STEPS)
        rows = piece.rows
        if piece.kind in ("pass", "logits") and bound < np.inf:
            fixed, more = self._line(piece.kind)
            fits = max(bound - self._spent - fixed, fixed) / (more * piece.each) if more else rows
            rows = rows if fits >= rows else max(1, int(fits) // ROWS * ROWS or int(fits))
        counted = rows if piece.kind in ("pass", "graph") else 0
        run, spent = self._run + counted, self._spent + self.ms(piece.kind, rows * piece.each)
        too_many = self._run and counted and run > self.rows and bound == np.inf
        if too_many or (self._pieces and spent > bound):
            return 0
        self._pieces, self._run, self._spent = self._pieces + 1, run, spent
        return rows

    @contextmanager
    def measured(self, piece: Piece, rows: int) -> Iterator[None]:
        start = self._mark() if self.timed else None
        try:
            yield
        finally:  # also if it was the last one
            if self.timed:
                self._await(KINDS.index(piece.kind), rows * piece.each, start)

    def ms(self, kind: str, tokens: int) -> float:
        """Return how long a piece is expected to take, 0 if none has been measured."""
        fixed, more = self._line(kind)
        return fixed + more * tokens

    def _line(self, kind: str) -> tuple[float, float]:
        """Return the least-squares line through what was measured: ms of any piece, and of each token."""
        count, tokens, ms, squares, both = self._sums[KINDS.index(kind)].tolist()
        if not count:
            return 0.0, 0.0
        spread = squares * count - tokens * tokens
        more = (both * count - tokens * ms) / spread if spread > 1e-6 * squares * count else ms / tokens
        more = min(max(more, 0.0), ms / tokens)
        return (ms - more * tokens) / count, more

    def note(self, kind: int, tokens: int, ms: float) -> None:
        """Take in a measurement of a kind, an index of KINDS."""
        self._sums[kind] = KEPT * self._sums[kind] + (1, tokens, ms, tokens * tokens, tokens * ms)

    def _await(self, kind: int, tokens: int, start: Any) -> None:
        if len(self._pending) < MOST_PENDING:
            self._pending.append((kind, tokens, start, self._mark()))

    def _mark(self) -> Any:
        if self._cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> None:
        """Read what has been measured in full, in order; on several ranks take over what the first has."""
        done = 0
        for kind, tokens, start, end in self._pending:
            if not (self._cpu or end.query()):
                break
            ms = 1e3 * (end - start) if self._cpu else start.elapsed_time(end)
            self.note(kind, tokens, ms)
            done += 1
        del self._pending[:done]
        if self._group is not None:
            dist.broadcast(torch.from_numpy(self._sums), group_src=0, group=self._group)
