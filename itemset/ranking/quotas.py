"""Lists with quotas, a limit of the items of one value of an attribute: chosen down the ranking of longer lists."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.ranking.scored_tree import UNSCORED
from itemset.ranking.search import Found, Search, Width
from itemset.select.filters import known


def within(item_set: ItemSet, items: Sequence[Sequence[int]], at_most: Mapping[str, int], k: int) -> list[int]:
    """Return the places of the first k items that pass: those before them have fewer of each of its values.

    items: best first. at_most: items of one value, by attribute. A missing value does not count; of several all do.
    Raises ItemSetError for an attribute that the set has not.
    """
    schema = item_set.attribute_schema
    if missing := at_most.keys() - set(schema.names):
        raise ItemSetError(f"at_most: there is no attribute {shown(min(missing))}: {known([schema])}")
    counts, places = Counter[tuple[str, Any]](), list[int]()
    for place, rows in enumerate(item_set.attributes_of(items, list(at_most))):
        each = [(name, value if isinstance(value, list) else [value]) for row in rows for name, value in row.items()]
        values = {(name, one) for name, several in each for one in several if one is not None}
        if len(places) < k and all(counts[one] < at_most[one[0]] for one in values):
            counts.update(values)
            places.append(place)
    return places


class QuotaSearch(Search):
    """The search for the `k` best items within quotas. After its beam it goes on from the best prefixes until k of all
    items that it has found pass, or if `exact`, are proven; `most` are looked at."""

    def __init__(
        self, item_set: ItemSet, k: int, *, at_most: Mapping[str, int], most: int, width: Width | None = None,
        exact: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """at_most: as for `within`. The others as for `Search`."""
        super().__init__(item_set, max(k, min(most, len(item_set))), width=width or k, exact=True, **options)
        self._of, self._wanted, self._at_most, self._proves = item_set, k, at_most, exact
        self._made: Found | None = None
        self._before = 0, 0  # passes and rounds of what an engine has made

    def begin_with(self, made: Found) -> None:
        """Take a list that an engine has made: `passes` is not empty only if too few of that pass."""
        self._made, self._before = made, (made.passes, made.rounds)

    @property
    def result(self) -> Found:
        found = self._made or super().result
        if self._made is None:
            found = found._replace(passes=found.passes + self._before[0], rounds=found.rounds + self._before[1])
        places = within(self._of, [item.tokens for item in found.items], self._at_most, self._wanted)
        full, items = len(places) == self._wanted, [found.items[i] for i in places]
        proven = found.proven and (full or len(found.items) == len(self._of))
        if full and self._made is None:  # whatever comes after its last item
            nodes = self.tree.nodes
            proven = not (nodes["mass"][nodes["expansion"] == UNSCORED] > items[-1].score).any()
        return found._replace(items=items, proven=bool(proven))

    def _best_prefixes(self, first: int) -> NDArray[np.int64]:
        nodes = super()._best_prefixes(first)
        if self._made is None and self._beam:
            return nodes
        result = self.result
        ended = not self._proves if len(result.items) == self._wanted else len(self._best) == self._k
        if result.proven or ended:
            return nodes[:0]
        self._made = None
        return nodes
