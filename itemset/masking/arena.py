"""The memory that the tables of all item sets share on a device.

One allocation, made once. It holds each set's tables in one piece, as the file does, and one row of `Arena.sets` says
where. A state on the device is a set's number and the state within that set, so one kernel serves every set.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet, build
from itemset.masking import cpu_kernels
from itemset.masking.batch import SET_BITS
from itemset.masking.copies import Copies, Parts
from itemset.masking.slates import Slate
from itemset.trie.levels import LevelPlan
from itemset.trie.tables import SECTIONS
from itemset.trie.walk import NO_TOKEN

# The columns of `Arena.sets`: the word at which each section begins, then the widths of their elements.
# DEAD_COUNT is how many entries the section at DEAD_LIST has. ALIVE is NO_BITS if a set has no such section.
ROW_OFFSETS, TERMINAL, LABELS, TARGETS, NODE_BASE, TAIL_BASE, TAILS, ALIVE, DEAD_LIST, DEAD_COUNT, WIDTHS = range(11)
# Of a slate, whose row is written on the device: the token between two items, -1 if nothing stands there, and how many
# items come after the present one. LEFT is 0 for all other sets.
SEPARATOR, LEFT = WIDTHS + 1, WIDTHS + 2
# What only `grow` reads: LEFT and DEAD_COUNT as they are at first, and what would leave out the item so far.
MORE, FIRST_DEAD, ENTRY = range(LEFT + 1, LEFT + 4)
READY = ENTRY + 1  # the word at which ready masks begin (trie.ready), NO_BITS if there are none: for wide rows alone
COLUMNS = READY + 1
NO_BITS = -1
_COLUMNS = dict(zip((*SECTIONS, "alive", "dead", "ready"), (*range(TAILS + 1), ALIVE, DEAD_LIST, READY), strict=True))
NARROW_LABELS, NARROW_TARGETS = 1 << 8, 1 << 9  # bits of WIDTHS, above token_bits: 16-bit elements, else 32
COUNTED = 1 << 10  # another: counted targets
FAR_BLOCK = 32  # bits of WIDTHS below `Tables.far_block`, or of counted targets below the words of `Tables.tail_base`

_ALIGNMENT = 128  # bytes: sections begin at a cache line


class ArenaFullError(ItemSetError):
    """No room for a set until one that is in use is released."""


class Place(NamedTuple):
    """Where a request's set lies in the arenas of its engine, and when its constraint begins.

    number, digest, start, below: those of its Resident. begins_after: the token after which the constraint begins, or
    -1.
    """

    number: int
    start: int
    digest: str
    begins_after: int
    below: Sequence[Sequence[int]] = ()


@dataclass
class Resident:
    """One set in the arena.

    number: its row in `Arena.sets`. start, nbytes: its piece of the memory. users: `acquire` calls not yet released.
    sent: whether the workers whose arenas are planned here have been given the tables. A set that comes back after it
        was forgotten is another Resident. base: of a view, the set whose tables it reads: it stays while the view does.
    once: whether it is one request's own, a slate, and is forgotten as soon as nobody uses it.
    """

    number: int
    digest: str
    start: int
    nbytes: int
    users: int = 0
    sent: bool = False
    base: Resident | None = None
    once: bool = False

    @property
    def below(self) -> list[tuple[int, int]]:
        """Number and start of each set that a view stands on, the whole set first."""
        return [] if self.base is None else [*self.base.below, (self.base.number, self.base.start)]


class Plan:
    """Who has which piece of an arena: sets are added, shared by equal content, counted, and forgotten to make room.

    A set in use is never moved or forgotten; one that nobody uses stays until another needs its place. A plan touches
    no memory, so one process can plan the arenas of several devices. Safe for threads.
    """

    def __init__(self, nbytes: int, *, max_sets: int = 1024) -> None:
        """Raise ItemSetError if max_sets is more than a state can name (4,096)."""
        if not 1 <= max_sets <= 1 << SET_BITS:
            raise ItemSetError(f"an arena holds 1 to {1 << SET_BITS:,} sets, not {max_sets:,}")
        self.nbytes = _aligned(max(nbytes, 1))
        self._holes = [(0, self.nbytes)]  # (start, bytes), ascending, never adjacent
        self._free_numbers = list(range(max_sets - 1, -1, -1))
        self._residents: dict[str, Resident] = {}  # by digest, the one released longest ago first
        self._by_number: dict[int, Resident] = {}
        self._lock = threading.Lock()

    def acquire(self, item_set: ItemSet) -> Resident:
        """Return the place of this set, or of an equal one. Raises ArenaFullError, which says how much is missing."""
        with self._lock:
            return self._acquire(item_set)

    def _acquire(self, item_set: ItemSet) -> Resident:
        resident = self._residents.get(item_set.digest)
        if resident is None:
            base = None if item_set.base is None else self._acquire(item_set.base)
            nbytes = _piece(item_set)
            try:
                start = self._take(nbytes)
            except ArenaFullError:
                if base is not None:
                    self._release(base)
                raise
            resident = Resident(self._free_numbers.pop(), item_set.digest, start, nbytes, base=base)
            resident.once = isinstance(item_set, Slate)
            self._residents[resident.digest] = self._by_number[resident.number] = resident
        resident.users += 1
        return resident

    def release(self, number: int) -> None:
        """Take back one `acquire`. Raises ValueError if there is none to take back."""
        with self._lock:
            resident = self._by_number.get(number)
            if resident is None or not resident.users:
                raise ValueError(f"set {number} of the arena is not in use")
            self._release(resident)

    def _release(self, resident: Resident) -> None:
        resident.users -= 1
        if not resident.users and resident.once:
            self._forget(resident)
        elif not resident.users:
            self._residents[resident.digest] = self._residents.pop(resident.digest)

    @property
    def residents(self) -> tuple[Resident, ...]:
        """What is in the arena, in use or kept: for reports and metrics."""
        with self._lock:
            return tuple(self._residents.values())

    def send_again(self, open_sets: Collection[str]) -> None:
        """Of views whose whole sets are not among these digests, the workers have forgotten what they were given."""
        with self._lock:
            for resident in self._residents.values():
                whole = resident
                while whole.base is not None:
                    whole = whole.base
                resident.sent = resident.sent and (whole is resident or whole.digest in open_sets)

    @property
    def used(self) -> int:
        """Bytes taken by sets that are in use."""
        return sum(resident.nbytes for resident in self.residents if resident.users)

    def _take(self, nbytes: int) -> int:
        """Take a free piece and return its start. Forgets unused sets for it, the one unused longest first."""
        while True:
            fitting = [hole for hole in self._holes if hole[1] >= nbytes]
            if fitting and self._free_numbers:
                start, size = min(fitting, key=lambda hole: hole[1])
                self._holes.remove((start, size))
                if size > nbytes:
                    insort(self._holes, (start + nbytes, size - nbytes))
                return start
            unused = next((resident for resident in self._residents.values() if not resident.users), None)
            if unused is None:
                raise ArenaFullError(self._what_is_missing(nbytes))
            self._forget(unused)

    def _forget(self, resident: Resident) -> None:
        del self._residents[resident.digest], self._by_number[resident.number]
        if resident.base is not None:
            self._release(resident.base)
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


Kernels = Literal["auto", "numba", "triton"]


def backend_for(device: torch.device | str, choice: Kernels = "auto") -> Literal["numba", "triton"]:
    """Return "numba" on a CPU and "triton" on an accelerator; or what `choice` says."""
    if choice != "auto":
        return choice
    return "numba" if torch.device(device).type == "cpu" else "triton"


class Arena:
    """The sets that a device's kernels read. Call it from one thread. `room_for` says how many bytes a set takes.

    kernels: `cpu_kernels` or `triton_kernels`.
    words: [nbytes / 4 + 1] int32. All tables; the last word is nobody's.
    sets: [max_sets + 1, COLUMNS] int64. Where each set's sections begin, in words, and their widths. The last row is
        nobody's.
    rows: [max_sets + 1, cpu_kernels.ROW] int64, on a CPU: where the tables of each set lie, for compiled loops.
    rows_at: the address of `rows`.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device | str = "cpu",
        *,
        max_sets: int = 1024,
        kernels: Kernels = "auto",
    ) -> None:
        """Raise ItemSetError if the device has no such room or no such kernels, or as `Plan` does."""
        self.plan = Plan(nbytes, max_sets=max_sets)
        self.device = torch.device(device)
        backend = backend_for(self.device, kernels)
        nbytes = self.plan.nbytes
        try:
            self.kernels = import_module(f"itemset.masking.{'cpu' if backend == 'numba' else backend}_kernels")
            self.words = torch.zeros(nbytes // 4 + 1, dtype=torch.int32, device=self.device)
        except ImportError as error:
            raise ItemSetError(f"item sets on {self.device} need Triton, which is missing: {error}") from error
        except (RuntimeError, AssertionError) as error:  # out of memory, or torch without CUDA
            raise ItemSetError(f"{self.device} cannot hold an arena of {nbytes:,} bytes: {error}") from error
        if backend == "numba" and self.device.type != "cpu":
            raise ItemSetError(f"the kernels in Numba are for CPUs, not for {self.device}: choose triton")
        self.sets = torch.zeros(max_sets + 1, COLUMNS, dtype=torch.int64, device=self.device)
        if self.device.type == "cpu":
            self._nothing = build([[0]])  # may be read in place of a set that is not there
            self.rows = np.tile(cpu_kernels.table_row(self._nothing), (max_sets + 1, 1))
            self.rows_at = self.rows.ctypes.data
        self._read: dict[int, ItemSet] = {}  # the sets to whose tables `rows` lead, by number
        self._level_plans: dict[int, LevelPlan] = {}  # of what is there, by number
        self._set_rows: dict[int, NDArray[np.int64]] = {}  # of `sets`, by number
        self._views: dict[int, ItemSet] = {}  # of what is there, by number
        self._bases = np.append(np.arange(max_sets), -1)  # whose tables each set reads: its own, or those of its base
        self._placed: dict[int, tuple[str, int, int]] = {}  # digest, start and end of what is there, by number
        self._under_way: dict[int, tuple[str, int, int]] = {}  # the same, of what `placing` has begun to copy
        self._copies = Copies(self.device, max_sets)

    def acquire(self, item_set: ItemSet) -> int:
        """Return the number of this set. Its tables are copied to the device unless they, or equal ones, are there.

        The current stream sees them from now on. Raises as `Plan.acquire` and `place` do.
        """
        resident = self.plan.acquire(item_set)
        try:
            self.place(item_set, resident.number, resident.start, resident.below)
        except ItemSetError:
            self.plan.release(resident.number)
            raise
        self.use([resident.number])
        return resident.number

    def release(self, number: int) -> None:
        """Do `Plan.release`. The current stream's work so far may still read the set."""
        self.plan.release(number)
        self.use([number])

    def use(self, numbers: NDArray[np.integer[Any]] | Iterable[int]) -> None:
        """Begin a step that reads these sets (numbers, or -1 for none), on the current stream.

        The stream waits for copies of these sets that `place` has begun, and no others. Until the next call, these sets
        are not overwritten. `acquire` and `release` call it. Call it before each step yourself if you call `place`, or
        if another plan releases sets. The host waits for nothing.
        """
        numbers = np.asarray(numbers, np.int64)
        below = self._bases[numbers]  # whose tables a view's steps read, and a view may stand over a view
        self._copies.use(np.concatenate((numbers, below, self._bases[below])))

    def holds(self, digest: str, number: int, start: int) -> bool:
        """Return whether the tables of this set are there, so that `place` would copy nothing."""
        return self._placed.get(number, (None, None))[:2] == (digest, start)

    def level_plan(self, number: int) -> LevelPlan:
        """Return the plan of a set's levels, for a search over it. Raises KeyError if no such set is here."""
        return self._level_plans[number]

    def view(self, number: int) -> ItemSet | None:
        """Return the view that was placed as this set, for others to stand on; None if there is none."""
        return self._views.get(number)

    def forget_views(self, open_sets: Collection[str]) -> None:
        """Let go of views whose whole sets are not among these digests: see `view`. Their tables stay."""
        self._views = {n: view for n, view in self._views.items() if view.whole.digest in open_sets}

    def place(self, item_set: ItemSet, number: int, start: int, below: Sequence[Sequence[int]] = ()) -> None:
        """Copy the tables to where a plan, this arena's or another with the same room, has put them.

        below: `Resident.below`, where the sets that a view stands on go before it, unless all of them are there.
        Nothing is copied if they are there already. Steps see them after `use`. The copy waits for steps only if they
        may still read what it overwrites; the host waits as `copies.Staging` says. Raises ItemSetError if the tables
        are no trie.
        """
        if below and item_set.base is not None and not self.holds(item_set.digest, number, start):
            *lower, (base_number, base_start) = below
            self.place(item_set.base, base_number, base_start, lower)
        for _ in self.placing(item_set, number, start):
            pass

    def placing(self, item_set: ItemSet, number: int, start: int) -> Iterator[None]:
        """Do `place` in pieces of `copies.PIECE` bytes, one each time this is advanced: steps may run in between.

        What a view stands on must be there. It ends early, and nothing is there, if something else is placed meanwhile
        where this lies: ask `holds`.
        """
        if self.holds(item_set.digest, number, start):
            return
        standing = (item_set.digest, start, start + _piece(item_set))
        base = self._below(item_set)
        if base is None:
            check_tables(item_set)
        overwritten = _overlapping(self._placed, standing)
        row, parts = self._parts(item_set, number, start, base)
        for n in overwritten:
            del self._placed[n], self._level_plans[n], self._set_rows[n]
        for n in {*overwritten, number}:
            self._views.pop(n, None)
            self._lead_to(n, None)
        self._placed.pop(number, None)
        for n in {*_overlapping(self._under_way, standing), number}:
            self._under_way.pop(n, None)
        self._under_way[number] = standing
        for _ in self._copies.pieces(number, overwritten, parts):
            yield
            if self._under_way.get(number) is not standing:
                return
        del self._under_way[number]
        self._lead_to(number, item_set)
        if base is not None and not isinstance(item_set, Slate):
            self._views[number] = item_set
        # What is placed last stands last.
        self._placed[number], self._level_plans[number], self._set_rows[number] = standing, item_set.level_plan, row
        self._bases[number] = number if base is None else base

    def _parts(self, item_set: ItemSet, number: int, start: int, base: int | None) -> tuple[NDArray[np.int64], Parts]:
        """Return the row of `sets`, and what is to be copied where, the row last. base: the number of a view's base."""
        row = _first_row(item_set) if base is None else self._set_rows[base].copy()
        if "alive" in item_set.own:
            row[READY] = NO_BITS  # the base's let through what the view leaves out
        memory, at = self.words[:-1].view(torch.uint8), start
        parts: Parts = []
        for name, array in item_set.resident.items():
            row[_COLUMNS[name]] = at // 4
            parts.append((memory[at : at + array.nbytes], array.view(np.uint8)))
            at += _aligned(array.nbytes)
        row[DEAD_COUNT] = row[FIRST_DEAD] = len(item_set.trie.tables.dead)
        if isinstance(item_set, Slate):
            row[MORE] = row[LEFT] = item_set.more
            row[SEPARATOR] = item_set.separator
            row[DEAD_LIST] += row[FIRST_DEAD]  # before it lies the list as it is at first
        parts.append((self.sets[number].view(torch.uint8), row.view(np.uint8)))
        return row, parts

    def _lead_to(self, number: int, item_set: ItemSet | None) -> None:
        """Let this number's entry of `rows` lead to a set's own tables, or to those of no set."""
        if self.device.type == "cpu":
            self.rows[number] = cpu_kernels.table_row(item_set or self._nothing)
            if item_set is None:
                self._read.pop(number, None)
            else:
                self._read[number] = item_set

    def _below(self, item_set: ItemSet) -> int | None:
        """Return the number of the set whose tables a view shares; None for a whole set. Raises as `place` does."""
        if item_set.base is None:
            return None
        for number, (digest, _, _) in reversed(self._placed.items()):  # an earlier place may be free again
            if digest == item_set.base.digest:
                return number
        raise ItemSetError("the arena does not hold the set of which this is a view: acquire that first")


def _first_row(item_set: ItemSet) -> NDArray[np.int64]:
    """Return a whole set's row of `Arena.sets`, but for where its sections are."""
    tables = item_set.trie.tables
    row = np.zeros(COLUMNS, np.int64)
    row[ALIVE] = row[READY] = NO_BITS
    row[WIDTHS], row[SEPARATOR] = tables.token_bits, NO_TOKEN
    row[WIDTHS] |= NARROW_LABELS if tables.labels.itemsize == 2 else 0
    row[WIDTHS] |= NARROW_TARGETS if tables.targets.itemsize == 2 else 0
    row[WIDTHS] |= COUNTED | len(tables.tail_base) << FAR_BLOCK if tables.counted else tables.far_block << FAR_BLOCK
    return row


def _overlapping(pieces: dict[int, tuple[str, int, int]], one: tuple[str, int, int]) -> list[int]:
    """Return the numbers of those pieces of the memory that overlap one of them; each is a digest, a start, an end."""
    return [number for number, (_, start, end) in pieces.items() if start < one[2] and one[1] < end]


def check_tables(item_set: ItemSet) -> None:
    """Check what `Arena.place` checks first, once: it reads a large set for a fraction of a second.

    Raises ItemSetError if the tables of a set, or of the set below a view, are no trie.
    """
    if not item_set.whole.in_order:
        raise ItemSetError("the item set's tables are no trie: build its index again with `itemset build`")
    _ = item_set.level_plan, item_set.whole.ready


def room_for(item_set: ItemSet) -> int:
    """Return the bytes that a set takes in an arena: `ItemSet.nbytes` and ready masks, each section at a cache line.

    Of a view, what it takes with its base.
    """
    return arena_bytes([item_set], 0)


def _piece(item_set: ItemSet) -> int:
    return max(_ALIGNMENT, sum(_aligned(array.nbytes) for array in item_set.resident.values()))


def arena_bytes(registered: Iterable[ItemSet], spare: int) -> int:
    """Return the size of an arena for the registered sets and `spare` bytes for inline ones.

    Processes with the same configuration give the registered sets the same places, if they acquire them in its order.
    """
    pieces = {}
    for item_set in registered:
        below: ItemSet | None = item_set
        while below is not None:
            pieces[below.digest], below = _piece(below), below.base
    return sum(pieces.values()) + spare


def _aligned(nbytes: Any) -> int:
    return int(nbytes + -nbytes % _ALIGNMENT)
