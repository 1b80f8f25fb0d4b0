"""Copies beside steps: what waits for what, on streams whose work is done late, in any order that events allow.

The streams are those of `torch.cuda` as far as `itemset.masking.arena` uses them, with the device's freedom made
explicit: an order that is not enforced is one that happens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import itemset
from itemset.masking import arena as arenas
from itemset.masking.arena import Arena, ArenaFullError, Copies, Resident, room_for


class Marker:
    """A recorded event: done when its stream has come to it."""

    done = False

    def reach(self) -> None:
        self.done = True


class Stream:
    """Work in order, each with what it waits for. waits: how many waits for unfinished work it was given."""

    def __init__(self, device: Any = None) -> None:
        self.work: deque[tuple[Marker | None, Callable[[], None]]] = deque()
        self.waits = 0


class Streams:
    """Streams of a device. ignored: of "steps", "copies" and "host", who does not wait: then reads must go wrong."""

    def __init__(self, seed: int, ignored: str = "") -> None:
        self.random = random.Random(seed)
        self.ignored = ignored
        self.steps, self.made, self.host_waits = self.Stream(), [], 0

    def Stream(self, device: Any = None) -> Any:  # noqa: N802
        streams = self

        class Made(Stream):
            def wait_event(self, event: Any) -> None:
                self.waits += not event.query()
                if streams.ignored != ("steps" if self is streams.steps else "copies"):
                    self.work.append((event.marker, lambda: None))

            def wait_stream(self, other: Stream) -> None:
                event = streams.Event()
                event.record(other)
                self.wait_event(event)

        made = Made()
        if hasattr(self, "made"):
            self.made.append(made)
        return made

    def Event(self) -> Any:  # noqa: N802
        streams = self

        class Event:
            marker: Marker | None = None

            def record(self, stream: Stream) -> None:
                self.marker = Marker()
                stream.work.append((None, self.marker.reach))

            def query(self) -> bool:
                return self.marker is None or self.marker.done

            def synchronize(self) -> None:
                streams.host_waits += not self.query()
                while not self.query() and streams.ignored != "host":
                    streams.advance()

        return Event()

    def current_stream(self, device: Any = None) -> Stream:
        return self.steps

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        class Later(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is torch.Tensor.copy_:
                    stream.work.append((None, lambda: args[0].copy_(args[1])))
                    return args[0]
                return function(*args, **kwargs or {})

        with Later():
            yield

    def advance(self) -> bool:
        """Do the next work of some stream that may go on. False if there is none."""
        ready = [s for s in [self.steps, *self.made] if s.work and (s.work[0][0] is None or s.work[0][0].done)]
        if not ready:
            return False
        self.random.choice(ready).work.popleft()[1]()
        return True

    def finish(self) -> None:
        while self.advance():
            pass


def late(nbytes: int, streams: Streams, max_sets: int = 6) -> Arena:
    arena = Arena(nbytes, max_sets=max_sets, kernels="triton")
    with mock.patch.object(torch, "get_device_module", return_value=streams):
        arena._copies = Copies(arena.device, max_sets)
    streams.finish()
    return arena


def sets(count: int, seed: int = 0) -> list[itemset.ItemSet]:
    draw = np.random.default_rng(seed)
    return [itemset.build(draw.integers(0, 300, (int(draw.integers(20, 900)), 5))) for _ in range(count)]


def image(item_set: itemset.ItemSet, nbytes: int, number: int, start: int) -> tuple[torch.Tensor, ...]:
    """What must stand in the arena: the set's piece of memory, where in it there is nothing, and the set's row."""
    found = []
    for filler in (0, -1):
        arena = Arena(nbytes, max_sets=6, kernels="triton")
        arena.words.fill_(filler)
        arena.place(item_set, number, start)
        found.append(arena.words[start // 4 : (start + room_for(item_set)) // 4])
    return found[0], found[0] != found[1], arena.sets[number].clone()


def wrong_reads(seed: int, ignored: str = "", *, names: bool = True, pieces: bool = False) -> tuple[int, int]:
    """An engine's life: sets come, are read by steps, and go while the steps are still to be done. Returns how many
    sets steps have read, and how many of them were not what they should have been.

    names: as the engines do it, with a plan and steps that name their sets; else by `acquire` and `release` alone.
    pieces: some sets come piece by piece, and some of those are given up on the way.
    """
    draw, streams, pool = random.Random(seed), Streams(seed, ignored), sets(8, seed)
    arena = late(sum(sorted(map(room_for, pool))[-3:]), streams)
    running: dict[int, tuple[int, int, tuple[torch.Tensor, ...]]] = {}
    coming: dict[int, tuple[Resident, Iterator[None]]] = {}
    reads: list[bool] = []

    def read(start: int, number: int, expected: tuple[torch.Tensor, ...]) -> None:
        words, nothing, row = expected
        found = arena.words[start // 4 : start // 4 + len(words)]
        reads.append(bool(((found == words) | nothing).all()) and torch.equal(arena.sets[number], row))

    for _ in range(150):
        for which in [which for which in coming if draw.random() < 0.1]:
            arena.plan.release(coming.pop(which)[0].number)  # and whoever needs the room may take it
        for which, (resident, left) in [*coming.items()]:
            if next(left, left) is left:
                del coming[which]
                assert arena.holds(pool[which].digest, resident.number, resident.start)
                expected = image(pool[which], arena.plan.nbytes, resident.number, resident.start)
                running[which] = (resident.start, resident.number, expected)
        which = draw.randrange(len(pool))
        if which not in {*running, *coming} and draw.random() < 0.7:
            try:
                resident = arena.plan.acquire(pool[which])
            except ArenaFullError:
                continue
            if pieces and draw.random() < 0.5:
                coming[which] = resident, arena.placing(pool[which], resident.number, resident.start)
                continue
            if names:
                arena.place(pool[which], resident.number, resident.start)
            else:
                arena.acquire(pool[which])
                arena.plan.release(resident.number)
            expected = image(pool[which], arena.plan.nbytes, resident.number, resident.start)
            running[which] = (resident.start, resident.number, expected)
        chosen = [entry for entry in running.values() if draw.random() < 0.7]
        if names:
            arena.use(np.array([number for _, number, _ in chosen] + [-1]))
        if names and draw.random() < 0.5:  # lists in this step, and drafts after them
            listed = [entry for entry in running.values() if draw.random() < 0.3]
            chosen += listed + chosen
            arena.use(np.array([number for _, number, _ in listed] + [-1]), begins=False)
        for start, number, expected in chosen:
            streams.steps.work.append((None, lambda s=start, n=number, e=expected: read(s, n, e)))
        for which in [which for which in running if draw.random() < 0.3]:
            (arena.plan if names else arena).release(running.pop(which)[1])
        for _ in range(draw.randrange(12)):
            streams.advance()
    streams.finish()
    return len(reads), reads.count(False)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most sets are larger than a staging buffer, some larger than both."""
    monkeypatch.setattr(arenas, "PIECE", 4096)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("way", [{}, {"names": False}, {"pieces": True}], ids=["named", "acquired", "in pieces"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_steps_read_what_they_should_in_any_order_that_events_allow(seed: int, way: dict[str, bool]) -> None:
    reads, wrong = wrong_reads(seed, **way)
    assert (reads > 100, wrong) == (True, 0)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ignored", ["steps", "copies", "host"])
@pytest.mark.slow
def test_every_wait_is_needed(ignored: str) -> None:
    assert sum(wrong_reads(seed, ignored)[1] for seed in range(6)) > 0


def test_only_who_must_waits() -> None:
    streams, rows = Streams(0), np.random.default_rng(0).integers(0, 300, (300, 5))
    pool = [itemset.build(np.concatenate([rows, [[900 + i] * 5]])) for i in range(4)]  # of one size
    arena = late(3 * room_for(pool[0]), streams)
    (copying,) = streams.made
    copying.waits = 0  # at first for the memory, which is filled with zeros

    def place(which: int) -> int:
        resident = arena.plan.acquire(pool[which])
        arena.place(pool[which], resident.number, resident.start)
        return resident.number

    def waits() -> tuple[int, int, int]:
        return streams.steps.waits, copying.waits, streams.host_waits

    first = place(0)
    arena.use([first])
    assert waits() == (1, 0, 0)  # a step that reads a set whose copy is under way
    streams.finish()
    arena.use([first])
    second = place(1)
    for _ in range(5):
        arena.use([first])
    assert waits() == (1, 0, 0)  # others do not wait for a copy, nor does a copy where nobody reads
    arena.use([first, second])
    assert waits() == (2, 0, 0)
    third = place(2)
    streams.finish()
    for number in (first, second, third):
        arena.use([number, -1])
        arena.plan.release(number)
    assert place(3) == first  # which the step before the last has read
    assert waits() == (2, 1, 0)
    streams.finish()
    for _ in range(3):
        arena.use([-1])
    streams.finish()
    assert place(0) == second  # whose readers are done
    assert waits() == (2, 1, 0)


@pytest.mark.usefixtures("small_pieces")
def test_the_host_waits_only_where_a_set_is_larger_than_both_buffers() -> None:
    streams = Streams(0)
    small, large = itemset.build([[1, 2], [3, 4]]), itemset.build(np.random.default_rng(0).integers(0, 300, (3000, 5)))
    arena = late(1 << 20, streams)
    assert room_for(small) < 4096 < 3 * 4096 < room_for(large)
    arena.acquire(small)
    assert streams.host_waits == 0
    arena.acquire(large)
    assert streams.host_waits > 0
    assert sum(buffer.nbytes for buffer in arena._copies._buffers) == 2 * 4096
