"""The memory that the tables of all item sets share on a device.

One allocation, made once. A set's tables lie in one piece of it, as they lie in its file, and one row of `Arena.sets`
says where: a state on the device is a set's number and the state within that set, so one kernel serves every set.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from itemset.copies import Copies
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.numbering import in_order

# The columns of `Arena.sets`: the word at which each section begins, then the widths of what is in them.
ROW_OFFSETS, TERMINAL, LABELS, TARGETS, NODE_BASE, TAIL_BASE, TAILS, WIDTHS = range(8)
NARROW_LABELS, NARROW_TARGETS = 1 << 8, 1 << 9  # bits of WIDTHS, above token_bits: 16-bit elements, else 32

SET_BITS = 12
_ALIGNMENT = 128  # bytes: sections begin at a cache line


class ArenaFullError(ItemSetError):
    """There is no room for a set until one that is in use is released."""


@dataclass
class Resident:
    """One set in the arena.

    number: its row in `Arena.sets`. start, nbytes: its piece of the memory. users: `acquire` calls not yet released.
    sent: whether those whose arenas are planned here have been given the tables. A set that comes back after it was
        forgotten is another Resident.
    """

    number: int
    digest: str
    start: int
    nbytes: int
    users: int = 0
    sent: bool = False


class Plan:
    """Who has which piece of an arena: sets are added, shared by equal content, counted, and forgotten when room is
    wanted. A set in use is never moved or forgotten; one that nobody uses stays until another needs its place.

    It touches no memory, so that one process can plan the arenas of several devices. Safe for threads.
    """

    def __init__(self, nbytes: int, *, max_sets: int = 1024) -> None:
        """Raises ItemSetError where max_sets is more than a state can name (4,096)."""
        if not 1 <= max_sets <= 1 << SET_BITS:
            raise ItemSetError(f"an arena holds 1 to {1 << SET_BITS:,} sets, not {max_sets:,}")
        self.nbytes = _aligned(max(nbytes, 1))
        self._holes = [(0, self.nbytes)]  # (start, bytes), ascending, never adjacent
        self._free_numbers = list(range(max_sets - 1, -1, -1))
        self._residents: dict[str, Resident] = {}  # by digest, the one released longest ago first
        self._by_number: dict[int, Resident] = {}
        self._lock = threading.Lock()

    def acquire(self, item_set: ItemSet) -> Resident:
        """The place of this set, or of an equal one. Raises ArenaFullError, which says how much is missing."""
        with self._lock:
            resident = self._residents.get(item_set.digest)
            if resident is None:
                nbytes = room_for(item_set)
                start = self._take(nbytes)
                resident = Resident(self._free_numbers.pop(), item_set.digest, start, nbytes)
                self._residents[resident.digest] = self._by_number[resident.number] = resident
            resident.users += 1
            return resident

    def release(self, number: int) -> None:
        """Take back one `acquire`. Raises ValueError where there is none to take back."""
        with self._lock:
            resident = self._by_number.get(number)
            if resident is None or not resident.users:
                raise ValueError(f"set {number} of the arena is not in use")
            resident.users -= 1
            if not resident.users:
                self._residents[resident.digest] = self._residents.pop(resident.digest)

    @property
    def residents(self) -> tuple[Resident, ...]:
        """What is in the arena, in use or kept: for reports and metrics."""
        with self._lock:
            return tuple(self._residents.values())

    @property
    def used(self) -> int:
        """Bytes taken by sets that are in use."""
        return sum(resident.nbytes for resident in self.residents if resident.users)

    def _take(self, nbytes: int) -> int:
        """Where there are so many free bytes in one piece; forgets unused sets, the longest unused first."""
        unused = [resident for resident in self._residents.values() if not resident.users]
        while True:
            fitting = [hole for hole in self._holes if hole[1] >= nbytes]
            if fitting and self._free_numbers:
                start, size = min(fitting, key=lambda hole: hole[1])
                self._holes.remove((start, size))
                if size > nbytes:
                    insort(self._holes, (start + nbytes, size - nbytes))
                return start
            if not unused:
                raise ArenaFullError(self._what_is_missing(nbytes))
            self._forget(unused.pop(0))

    def _forget(self, resident: Resident) -> None:
        del self._residents[resident.digest], self._by_number[resident.number]
        self._free_numbers.append(resident.number)
        insort(self._holes, (resident.start, resident.nbytes))
        merged: list[tuple[int, int]] = []
        for start, size in self._holes:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._holes = merged

    def _what_is_missing(self, nbytes: int) -> str:
        sets = f"{len(self._residents):,} sets are in use, of {self.nbytes:,} bytes"
        if not self._free_numbers:
            return f"the arena is full: {sets}, and it was made for no more of them. Make it for more sets"
        largest = max((size for _, size in self._holes), default=0)
        free = sum(size for _, size in self._holes)
        return (
            f"the arena is full: the set takes {nbytes:,} bytes, {nbytes - largest:,} more than are free in one piece "
            f"({free:,} are free in all; {sets}). Make the arena larger, or wait until requests end"
        )


class Arena:
    """Tables of item sets on a device. Call it from one thread. `room_for` says how many bytes a set takes.

    words: [nbytes / 4] int32. All tables.
    sets: [max_sets, 8] int64. Where each set's sections begin, in words, and their widths.
    widest: most children of a node that any set here so far had. It bounds the work of `torch_kernels`.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu", *, max_sets: int = 1024) -> None:
        """Raises ItemSetError where the device has no such room, or as `Plan` does."""
        self.plan = Plan(nbytes, max_sets=max_sets)
        self.device = torch.device(device)
        self.widest = 1
        nbytes = self.plan.nbytes
        try:
            self.words = torch.zeros(nbytes // 4, dtype=torch.int32, device=self.device)
        except (RuntimeError, AssertionError) as error:  # out of memory, or torch without CUDA
            raise ItemSetError(f"{self.device} cannot hold an arena of {nbytes:,} bytes: {error}") from error
        self.sets = torch.zeros(max_sets, WIDTHS + 1, dtype=torch.int64, device=self.device)
        self._placed: dict[int, tuple[str, int, int]] = {}  # digest, start and end of what stands there, by number
        self._copies = Copies(self.device, max_sets)

    def acquire(self, item_set: ItemSet) -> int:
        """The number of this set, whose tables are copied to the device unless they, or equal ones, are there.

        What the current stream does from now on sees them. Raises as `Plan.acquire` and `place` do.
        """
        resident = self.plan.acquire(item_set)
        try:
            self.place(item_set, resident.number, resident.start)
        except ItemSetError:
            self.plan.release(resident.number)
            raise
        self.use([resident.number])
        return resident.number

    def release(self, number: int) -> None:
        """As `Plan.release`. What the current stream was given so far may still read the set."""
        self.plan.release(number)
        self.use([number])

    def use(self, numbers: NDArray[np.integer[Any]] | Iterable[int]) -> None:
        """Begin a step that reads these sets (numbers, or -1 for none), on the current stream.

        The stream waits for copies of these sets that `place` has begun, and no others; until the next call, what it
        reads of them is not overwritten. `acquire` and `release` do the same: only who calls `place`, or lets another
        plan release sets, has to call this before each step. The host waits for nothing.
        """
        self._copies.use(numbers)

    def holds(self, digest: str, number: int, start: int) -> bool:
        """Whether the tables of this set stand there: `place` would copy nothing."""
        return self._placed.get(number, (None, None))[:2] == (digest, start)

    def place(self, item_set: ItemSet, number: int, start: int) -> None:
        """Copy the tables to where a plan, this arena's or another with the same room, has put them.

        Nothing is copied where they stand already. Steps see them after `use`. The copy waits for steps only if they
        may still read what it overwrites; the host waits as `copies.Staging` says. Raises ItemSetError where the tables
        are no trie.
        """
        if self.holds(item_set.digest, number, start):
            return
        standing = (item_set.digest, start, start + room_for(item_set))
        tables = item_set.trie.tables
        if not in_order(tables, item_set.trie.tail_tokens):
            raise ItemSetError("the item set's tables are no trie: build its index again with `itemset build`")
        sections = [array.view(np.uint8) for array in tables[:-1]]
        starts = start + np.cumsum([0, *(_aligned(section.nbytes) for section in sections)])
        row = np.zeros(WIDTHS + 1, np.int64)
        row[:WIDTHS] = starts[:-1] // 4
        row[WIDTHS] = tables.token_bits
        row[WIDTHS] |= NARROW_LABELS if tables.labels.itemsize == 2 else 0
        row[WIDTHS] |= NARROW_TARGETS if tables.targets.itemsize == 2 else 0
        memory = self.words.view(torch.uint8)
        parts = [(memory[at : at + len(s)], s) for s, at in zip(sections, starts[:-1].tolist(), strict=True)]
        overwritten = [n for n, (_, first, end) in self._placed.items() if first < standing[2] and start < end]
        self._copies.copy(number, overwritten, [*parts, (self.sets[number].view(torch.uint8), row.view(np.uint8))])
        self.widest = max(self.widest, int(np.diff(tables.row_offsets).max()))
        for n in overwritten:
            del self._placed[n]
        self._placed[number] = standing


def room_for(item_set: ItemSet) -> int:
    """Bytes that a set takes in an arena: `ItemSet.nbytes`, with each section at a cache line."""
    return sum(_aligned(array.nbytes) for array in item_set.trie.tables[:-1])


def arena_bytes(registered: Iterable[ItemSet], spare: int) -> int:
    """The size of an arena for the registered sets and `spare` bytes for inline ones.

    Processes with the same configuration that acquire the registered sets in its order give them the same places.
    """
    return sum(room_for(item_set) for item_set in registered) + spare


def _aligned(nbytes: Any) -> int:
    return int(nbytes + -nbytes % _ALIGNMENT)
