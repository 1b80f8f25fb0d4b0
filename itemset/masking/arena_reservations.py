"""Room in an arena for sets that requests may name, and their tables on the way there, a piece at a time."""

from collections.abc import Iterator, Mapping, Sequence

from itemset.item_set import ItemSet
from itemset.masking.arena import Arena, ArenaFullError, Plan, Resident

Pieces = Sequence[tuple[int, int]]
"""Number and start of each set of a version, in its order."""


class Holdings:
    """The served version of each set has its room, and the one that is on its way. Call it from one thread.

    What was held before stays in the arena until the room is needed: a rollback copies nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._held: dict[str, list[Resident]] = {}
        self._next: dict[str, list[Resident]] = {}

    def hold(self, name: str, sets: Mapping[str, ItemSet]) -> Pieces:
        """Hold room for a version's sets, beside the one that is served. Return where they are to be placed.

        Raises ArenaFullError if there is no such room now; then only the one that is served has its own.
        """
        taken: list[Resident] = []
        try:
            for item_set in sets.values():
                taken.append(self._plan.acquire(item_set))
        except ArenaFullError:
            self._release(taken)
            raise
        finally:
            self.give_up(name)
        self._next[name] = taken
        return [(resident.number, resident.start) for resident in taken]

    def give_up(self, name: str) -> None:
        """Hold no room for the version that was asked for last."""
        self._release(self._next.pop(name, []))

    def settle(self, name: str) -> None:
        """The version that was asked for last is served: the one before it holds no room any more."""
        self._release(self._held.pop(name, []))
        if name in self._next:
            self._held[name] = self._next.pop(name)

    def drop(self, name: str) -> None:
        """Hold nothing under this name any more."""
        self.give_up(name)
        self._release(self._held.pop(name, []))

    def _release(self, residents: Sequence[Resident]) -> None:
        for resident in residents:
            self._plan.release(resident.number)


class Arrivals:
    """Brings the tables of versions to an arena in pieces, between an engine's steps."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._coming: dict[str, tuple[Pieces, Iterator[None]]] = {}  # by the name of the set

    def advance(self, name: str, sets: Mapping[str, ItemSet], pieces: Pieces) -> bool:
        """Copy one piece more of a version. Return whether all of its sets are there.

        Raises ItemSetError as `Arena.place` does.
        """
        if name not in self._coming or self._coming[name][0] != pieces:
            self._coming[name] = pieces, self._all(sets, pieces)
        if next(self._coming[name][1], self) is not self:
            return False
        del self._coming[name]  # what was overtaken meanwhile comes again
        placed = zip(sets.values(), pieces, strict=True)
        return all(self._arena.holds(item_set.digest, number, start) for item_set, (number, start) in placed)

    def _all(self, sets: Mapping[str, ItemSet], pieces: Pieces) -> Iterator[None]:
        for item_set, (number, start) in zip(sets.values(), pieces, strict=True):
            yield from self._arena.placing(item_set, number, start)
