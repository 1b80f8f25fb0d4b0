"""Room in an arena for sets that requests may name, and their tables on the way there, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from itemset.item_set import ItemSet
from itemset.masking.arena import Arena, ArenaFullError, Plan, Resident

Pieces = Sequence[tuple[int, int]]
"""Number and start of each set of a version, in its order."""


class Holdings:
    """The latest version of each set has its room. Call it from one thread.

    What was held before stays in the arena until the room is needed: a rollback copies nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._held: dict[str, list[Resident]] = {}

    def hold(self, name: str, sets: Mapping[str, ItemSet]) -> Pieces:
        """Hold room for a version's sets, in place of the version before it. Return where they are to be placed.

        Raises ArenaFullError if there is no such room now; then none is held under this name.
        """
        taken: list[Resident] = []
        try:
            for item_set in sets.values():
                taken.append(self._plan.acquire(item_set))
        except ArenaFullError:
            self._release(taken)
            raise
        finally:
            self._release(self._held.pop(name, []))
        self._held[name] = taken
        return [(resident.number, resident.start) for resident in taken]

    def _release(self, residents: Sequence[Resident]) -> None:
        for resident in residents:
            self._plan.release(resident.number)


class Arrivals:
    """Brings the tables of versions to an arena, one at a time and in pieces, between an engine's steps."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._coming: tuple[Pieces, Iterator[None]] | None = None

    def advance(self, sets: Mapping[str, ItemSet], pieces: Pieces) -> bool:
        """Copy one piece more. Return whether all of the sets are there.

        Raises ItemSetError as `Arena.place` does.
        """
        if self._there(sets, pieces):
            self._coming = None
            return True
        if self._coming is None or self._coming[0] != pieces:
            self._coming = pieces, self._all(sets, pieces)
        if next(self._coming[1], self) is self:  # its end; what was overtaken meanwhile comes again
            self._coming = None
        return self._there(sets, pieces)

    def _all(self, sets: Mapping[str, ItemSet], pieces: Pieces) -> Iterator[None]:
        for item_set, (number, start) in zip(sets.values(), pieces, strict=True):
            yield from self._arena.placing(item_set, number, start)

    def _there(self, sets: Mapping[str, ItemSet], pieces: Pieces) -> bool:
        placed = zip(sets.values(), pieces, strict=True)
        return all(self._arena.holds(item_set.digest, number, start) for item_set, (number, start) in placed)
