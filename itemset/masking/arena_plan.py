"""Which set has which piece of an arena's memory, and which are held for requests to come."""

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.masking.batch import SET_BITS

MOST_SETS = 1 << SET_BITS  # that a state can name
_ALIGNMENT = 128  # bytes: sections begin at a cache line


class ArenaFullError(ItemSetError):
    """No room for a set until one that is in use is released."""


class Place(NamedTuple):
    """Where a request's set lies in the arenas of its engine, and when its constraint begins: see `Resident`."""

    number: int
    start: int
    digest: str
    begins_after: int  # the token after which the constraint begins, or -1
    below: tuple[tuple[int, ...], ...] = ()


@dataclass
class Resident:
    """One set in the arena. A set that comes back after it was forgotten is another Resident."""

    number: int  # its row in `Arena.sets`
    digest: str
    start: int  # of its piece of the memory
    nbytes: int
    users: int = 0  # `acquire` calls not yet released
    sent: bool = False  # whether the workers whose arenas are planned here have been given the tables
    base: "Resident | None" = None  # of a view, the set whose tables it reads: it stays while the view does

    @property
    def below(self) -> tuple[tuple[int, int], ...]:
        """Number and start of each set that a view stands on, the whole set first."""
        return () if self.base is None else (*self.base.below, (self.base.number, self.base.start))


class Plan:
    """Who has which piece of an arena: sets are added, shared by equal content, counted, and forgotten to make room.

    A set in use stays where it is, another one until its place is needed. A plan touches no memory, so one process can
    plan the arenas of several devices. Safe for threads.
    """

    def __init__(self, nbytes: int, *, max_sets: int = MOST_SETS) -> None:
        """Raise ItemSetError if max_sets is more than a state can name (4,096)."""
        if not 1 <= max_sets <= MOST_SETS:
            raise ItemSetError(f"an arena holds 1 to {MOST_SETS:,} sets, not {max_sets:,}")
        self.nbytes = aligned(max(nbytes, 1))
        self._free_numbers = list(range(max_sets - 1, -1, -1))
        self._residents: dict[str, Resident] = {}  # by digest, the one released longest ago first
        self._by_number: dict[int, Resident] = {}
        self._lock = threading.RLock()

    def acquire(self, item_set: ItemSet) -> Resident:
        """Return the place of this set, or of an equal one. Raises ArenaFullError, which says how much is missing."""
        with self._lock:
            resident = self._residents.get(item_set.digest)
            if resident is None:
                base = None if item_set.base is None else self.acquire(item_set.base)
                nbytes = piece_of(item_set)
                try:
                    start = self._take(nbytes)
                except ArenaFullError:
                    if base is not None:
                        self._release(base)
                    raise
                number = self._free_numbers.pop()
                resident = Resident(number, item_set.digest, start, nbytes, base=base)
                self._residents[resident.digest] = self._by_number[number] = resident
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
        if not resident.users:
            self._residents[resident.digest] = self._residents.pop(resident.digest)

    @property
    def residents(self) -> tuple[Resident, ...]:
        """Return what is in the arena, in use or kept: for reports and metrics."""
        with self._lock:
            return tuple(self._residents.values())

    def send_again(self, open_sets: Collection[str]) -> None:
        """Of views whose whole sets are not among these digests, the workers have forgotten what they were given."""
        with self._lock:
            for resident in self._residents.values():
                if resident.below and self._by_number[resident.below[0][0]].digest not in open_sets:
                    resident.sent = False

    @property
    def used(self) -> int:
        """Bytes taken by sets that are in use."""
        return sum(resident.nbytes for resident in self.residents if resident.users)

    def _take(self, nbytes: int) -> int:
        """Find a free piece and return its start. Forgets unused sets for it, the one unused longest first."""
        while True:
            free = free_pieces(((one.start, one.nbytes) for one in self._residents.values()), self.nbytes)
            fitting = [piece for piece in free if piece[1] >= nbytes]
            if fitting and self._free_numbers:
                return min(fitting, key=lambda piece: piece[1])[0]
            unused = next((resident for resident in self._residents.values() if not resident.users), None)
            if unused is None:
                break
            del self._residents[unused.digest], self._by_number[unused.number]
            if unused.base is not None:
                self._release(unused.base)
            self._free_numbers.append(unused.number)
        sets, sizes = f"{len(self._residents):,} sets are in use, of {self.nbytes:,} bytes", [size for _, size in free]
        if not self._free_numbers:
            raise ArenaFullError(
                f"the arena is full: {sets}, and it was made for no more of them: at most {MOST_SETS:,}. Make it for "
                "more sets, or serve the others by another server"
            )
        raise ArenaFullError(
            f"the arena is full: the set takes {nbytes:,} bytes, {nbytes - max(sizes, default=0):,} more than are free "
            f"in one piece ({sum(sizes):,} are free in all; {sets}). Make the arena larger, or wait until requests end"
        )


def free_pieces(taken: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return start and size of each free piece of a memory that ends there. taken: those of all others."""
    pieces = sorted(taken)
    ends = [0, *map(sum, pieces)]
    return [(before, at - before) for before, (at, _) in zip(ends, [*pieces, (end, 0)], strict=True) if at > before]


Piece = tuple[int, int]  # number and start of a set


class Holdings:
    """The room of each set's served version, and of the one on its way. Call it from one thread.

    What was held before stays until the room is needed: a rollback copies nothing.
    """

    def __init__(self, plan: Plan, served: Mapping[str, ItemSet]) -> None:
        """served: the sets that are held from the start, by name."""
        self._plan = plan
        self._held = {name: plan.acquire(item_set) for name, item_set in served.items()}
        self._next: dict[str, Resident] = {}

    def hold(self, name: str, item_set: ItemSet) -> Piece:
        """Hold room for a version, beside the one that is served. Return where it is to be placed.

        Raises ArenaFullError if there is no such room now; then only the one that is served has its own.
        """
        if name in self._next and self._next[name].digest != item_set.digest:
            self.give_up(name)  # at once: this one may need its room
        try:
            resident = self._plan.acquire(item_set)
        finally:
            self.give_up(name)
        self._next[name] = resident
        return resident.number, resident.start

    def give_up(self, name: str) -> None:
        """Hold no room for the version that was asked for last."""
        if name in self._next:
            self._plan.release(self._next.pop(name).number)

    def settle(self, name: str, version: str | None) -> None:
        """The version that was asked for last is served, or no version of the set: what was before holds no room."""
        if version is None:
            self.give_up(name)
        if name in self._held:
            self._plan.release(self._held.pop(name).number)
        if name in self._next:
            self._held[name] = self._next.pop(name)


def room_for(item_set: ItemSet) -> int:
    """Return the bytes that a set takes in an arena, a view with its base: tables and ready masks, in cache lines."""
    return arena_bytes([item_set], 0)


def piece_of(item_set: ItemSet) -> int:
    """Return the bytes of what an arena holds of a set and of no base."""
    return max(_ALIGNMENT, sum(aligned(array.nbytes) for array in item_set.resident.values()))


def arena_bytes(registered: Iterable[ItemSet], spare: int) -> int:
    """Return the size of an arena for the registered sets and `spare` bytes for inline ones.

    Processes with the same configuration give the registered sets the same places, if they acquire them in its order.
    """
    pieces = {}
    for item_set in registered:
        below: ItemSet | None = item_set
        while below is not None:
            pieces[below.digest], below = piece_of(below), below.base
    return sum(pieces.values()) + spare


def aligned(nbytes: int) -> int:
    """Return how far the next section begins after one of this many bytes."""
    return int(nbytes + -nbytes % _ALIGNMENT)
