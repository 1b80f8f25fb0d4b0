"""Copies of tables to a device that run beside its steps: what waits for what.

A copy waits for steps only if they may still read what it overwrites. A step waits for a copy only if it reads what is
copied. The host waits for neither, with one exception: see `Copies`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PIECE = 1 << 24  # bytes of each of the two staging buffers
_REMEMBERED = 4  # steps whose ends are told apart

Parts = list[tuple[torch.Tensor, NDArray[Any]]]
"""What is copied where: a tensor on the device, [bytes] uint8, and as many bytes."""


class Copies:
    """One stream for all copies, and the events that order it with the steps. Call it from one thread.

    All is copied through two buffers of pinned memory: only from there do copies run beside the host. While the device
    reads one, the host fills the other. For a set larger than both it waits until the first is free.

    All steps belong to one stream, the current one of each `use`.

    streams: a module with Stream, Event, current_stream and stream, as `torch.cuda` has them. Those of `torch.cpu` do
    nothing, so the bookkeeping is the same on every device.
    """

    def __init__(self, device: torch.device, max_sets: int, *, streams: Any = None) -> None:
        self._device = device
        self._streams = streams or torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        made = self._streams.Event()  # the tables are filled with zeros before any copy
        made.record(self._streams.current_stream(device))
        self._stream.wait_event(made)
        # Two buffers, each [PIECE] uint8. Made now: pinning memory takes milliseconds, and may wait for the device.
        self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(2)]
        self._free = [self._streams.Event() for _ in range(2)]  # the end of the copies out of each buffer
        self._at = self._filled = 0
        self._pending: dict[int, Any] = {}  # set -> its copy's end, until that is known to be over
        # The end of all work before step i, at i % _REMEMBERED: of the newest steps.
        self._before = [self._streams.Event() for _ in range(_REMEMBERED)]
        self._step = 0
        # [max_sets + 1] the newest step that reads each set, 0 if none did. The last entry is nobody's.
        self._read = np.zeros(max_sets + 1, np.int64)

    def use(self, numbers: NDArray[np.integer[Any]] | Iterable[int]) -> None:
        """Begin a step that reads these sets, on the current stream; -1 means none.

        All that the stream does until the next call may read them. It waits for copies of these sets, and no copy
        overwrites them before it is done.
        """
        numbers = np.asarray(numbers, np.int64)
        steps = self._streams.current_stream(self._device)
        self._step += 1
        self._before[self._step % _REMEMBERED].record(steps)
        self._read[numbers] = self._step
        if self._pending:
            wanted = set(numbers.tolist())
            for number, copied in list(self._pending.items()):
                if copied.query():
                    del self._pending[number]
                elif number in wanted:
                    steps.wait_event(copied)  # and stays pending: `acquire` may have run on another stream

    def pieces(self, number: int, overwritten: Iterable[int], parts: Parts) -> Iterator[None]:
        """Copy each part of a set to its tensor. PIECE bytes each time this is advanced: steps may run in between.

        overwritten: the sets that lay there.
        """
        for other in {*overwritten, number}:
            self._wait_for_readers(other)
        for target, source in parts:
            yield from self._stage(target, source)
        copied = self._streams.Event()
        copied.record(self._stream)
        self._pending[number] = copied

    def _wait_for_readers(self, number: int) -> None:
        self._pending.pop(number, None)
        last, self._read[number] = int(self._read[number]), 0
        if last == 0:
            return
        if last == self._step:  # nothing was recorded since
            over = self._streams.Event()
            over.record(self._streams.current_stream(self._device))
        else:
            over = self._before[max(last + 1, self._step - _REMEMBERED + 1) % _REMEMBERED]
        if not over.query():
            self._stream.wait_event(over)

    def _stage(self, target: torch.Tensor, source: NDArray[Any]) -> Iterator[None]:
        """Copy the bytes of `source` to `target`. Stops whenever a buffer is full. `source` has been read when this
        ends."""
        position = 0
        while position < len(source):
            if self._filled == PIECE:
                yield
                self._free[self._at].record(self._stream)
                self._at, self._filled = 1 - self._at, 0
                self._free[self._at].synchronize()
            size = min(PIECE - self._filled, len(source) - position)
            piece = self._buffers[self._at][self._filled : self._filled + size]
            np.copyto(piece.numpy(), source[position : position + size])
            with self._streams.stream(self._stream):
                target[position : position + size].copy_(piece, non_blocking=True)
            position += size
            self._filled += size
