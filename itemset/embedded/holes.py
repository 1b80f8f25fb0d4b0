"""The holes of a grammar: which items may stand in each, and which of them have been given."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.embedded.vocabulary import Bridges
from itemset.item_set import ItemSet, build
from itemset.masking import host
from itemset.masking.host import Walk
from itemset.trie.jit import compiled
from itemset.trie.walk import DEAD, END

Bridge = tuple[int, int, bytes]
"""An item's last token, the token that is it and more, and the text of what is more."""

_REMEMBERED = 1 << 12  # states of a set whose bridges are kept


class Closing:
    """The bridges that a state may leave its hole by, if the grammar takes what is more of them.

    others: those of which what is more is no token of its own.
    """

    __slots__ = ("_each", "_lasts", "_rests", "_tokens", "others")

    def __init__(self, bridges: Iterable[Bridge], alone: dict[bytes, int]) -> None:
        self._each = list(bridges)
        known = [(last, token, alone[rest]) for last, token, rest in self._each if rest in alone]
        self._lasts, self._tokens, self._rests = np.array(known, np.int64).reshape(-1, 3).T.copy()
        self.others = [one for one in self._each if one[2] not in alone]

    def without(self, lasts: set[int], alone: dict[bytes, int]) -> "Closing":
        """Return those with other last tokens."""
        return Closing((one for one in self._each if one[0] not in lasts), alone)

    def let_in(self, after: NDArray[np.int32], inside: NDArray[np.int32], row: NDArray[np.int32]) -> None:
        """Set the bits of those bridges in `row` whose rest may come `after` the hole, and their last token `inside`.

        Each is a bitmask, [ceil(vocabulary / 32)].
        """
        _let_in(self._lasts, self._tokens, self._rests, after, inside, row)


_OfState = tuple[Closing, list[int]] | None


@compiled
def _let_in(lasts: Any, tokens: Any, rests: Any, after: Any, inside: Any, row: Any) -> None:
    allowed = np.empty(len(tokens), np.bool_)
    for i in range(len(tokens)):  # before any is set: `inside` may be `row`
        allowed[i] = (after[rests[i] >> 5] >> (rests[i] & 31)) & (inside[lasts[i] >> 5] >> (lasts[i] & 31)) & 1
    for i in range(len(tokens)):
        if allowed[i]:
            row[tokens[i] >> 5] |= np.int32(1) << np.int32(tokens[i] & 31)


class Items(Walk):
    """The items that may come in a hole: a set without those that have been given. Immutable."""

    def __init__(self, item_set: ItemSet) -> None:
        super().__init__(item_set)
        self.item_set = item_set
        self._all: Items | None = None  # itself; a reference to it would keep the set until Python looks for circles
        self._closing: dict[tuple[int, Bridges], _OfState] = {}

    def without(self, tokens: tuple[int, ...]) -> "Items":
        """Return what is left after this item."""
        left = object.__new__(Items)
        left.item_set, left._all = self.item_set, self._all or self
        left._begin_without(self, tokens)
        return left

    def closing(self, state: int, bridges: Bridges) -> Closing | None:
        """Return the bridges over an item's end that may begin in this state, None if there are none.

        That their last token may follow is for the state's mask to say.
        """
        if (of_all := (self._all or self)._closing_of_all(state, bridges)) is None:
            return None
        closing, longer = of_all
        if self._all is None or not longer:
            return closing
        given = {t for t in longer if (after := self.step(state, t)) == DEAD or not self.ends(after)}
        return closing.without(given, bridges.alone) if given else closing

    def _closing_of_all(self, state: int, bridges: Bridges) -> _OfState:
        """Return them, and the last tokens after which an item ends that begins a longer one, of the whole set."""
        key = (state, bridges)
        if (known := self._closing.get(key)) is not None or key in self._closing:
            return known
        row, lasts = np.empty(len(bridges.last), np.int32), list[int]()
        self.fill(state, row)
        words = row.view(np.uint32) & bridges.last
        for word in np.flatnonzero(words).tolist():
            bits = int(words[word])
            while bits:
                token = word << 5 | (bits & -bits).bit_length() - 1
                if (after := self.step(state, token)) != DEAD and self.ends(after):
                    lasts.append(token)
                bits &= bits - 1
        if len(self._closing) >= _REMEMBERED:
            self._closing.clear()
        closing = Closing(((last, *one) for last in lasts for one in bridges.by_last[last]), bridges.alone)
        longer = [last for last in lasts if self.step(state, last) != END]
        self._closing[key] = found = (closing, longer) if lasts else None
        return found


def warm_up() -> None:
    """Load what masks and giving an item take: no request should wait for it."""
    host.warm_up()
    Items(build([[0], [1]])).without((0,)).step(0, 1)
    row = np.zeros(1, np.int32)
    Closing([(0, 1, b"")], {b"": 2}).let_in(row, row, row)


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
