"""The holes of a grammar: which items may stand in each, and which of them have been given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from itemset.inside.vocabulary import Bridges
from itemset.item_set import ItemSet, build
from itemset.masking.host import Walk
from itemset.trie.walk import DEAD

_REMEMBERED = 1 << 12  # states of a set whose closing children are kept


class Items(Walk):
    """The items that may come in a hole: a set without those that have been given. Immutable."""

    def __init__(self, item_set: ItemSet) -> None:
        super().__init__(item_set.trie.tables)
        self.item_set, self._all = item_set, self
        self._closing: dict[tuple[int, int], list[int]] = {}

    def without(self, tokens: tuple[int, ...]) -> Items:
        """Return what is left after this item."""
        left = object.__new__(Items)
        left.item_set, left._all = self.item_set, self._all
        left._begin_without(self, tokens)
        return left

    def closing(self, state: int, bridges: Bridges) -> list[int]:
        """Return the tokens after which an item ends and that a bridge may begin with."""
        if self is not self._all:  # whose answer is remembered
            of_all = self._all.closing(state, bridges)
            return [t for t in of_all if (after := self.step(state, t)) != DEAD and self.ends(after)]
        key = (state, id(bridges))
        if (known := self._closing.get(key)) is None:
            row = np.empty(len(bridges.last), np.int32)
            self.fill(state, row)
            known, words = [], row.view(np.uint32) & bridges.last
            for word in np.flatnonzero(words).tolist():
                bits = int(words[word])
                while bits:
                    token = word << 5 | (bits & -bits).bit_length() - 1
                    if (after := self.step(state, token)) != DEAD and self.ends(after):
                        known.append(token)
                    bits &= bits - 1
            if len(self._closing) >= _REMEMBERED:
                self._closing.clear()
            self._closing[key] = known
        return known


def warm_up() -> None:
    """Load what giving an item takes: no request should wait for it."""
    Items(build([[0], [1]])).without((0,)).step(0, 1)


@dataclass(frozen=True)
class Hole:
    """One hole of a grammar.

    bridges: over what follows it, None if that is not known. group: holes of one group give distinct items. begins: it
    is the first of its group, in which all items may come anew.
    """

    items: Items
    bridges: Bridges | None = None
    group: int | None = None
    begins: bool = False
