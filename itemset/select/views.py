"""Views: a set without some of its items, over the same tables."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet, built
from itemset.opening import from_index
from itemset.select.boosts import Placed, by_place, check_size, of_keys
from itemset.select.filters import leaves, passing
from itemset.trie import file as index_file
from itemset.trie.keys import KeyList, Keys, in_item_order
from itemset.trie.numbering import items_at
from itemset.trie.potential import boosted_of, boosts_of, potentials
from itemset.trie.rows import as_rows, sort_unique
from itemset.trie.view import bits_of, dead_of


class View(ItemSet):
    """A set without the items that a filter or a list omits. The others keep their numbers.

    base: the set, or the view, whose tables these are. own: the arrays of `Tables` that replace some of them.
    """

    def __init__(
        self, base: ItemSet, own: Mapping[str, NDArray[np.uint32]], items: int, *, keys: Keys | None = None,
        digest: str | None = None,
    ) -> None:  # fmt: skip
        """keys: those that pass; the base's if nobody asks this object for keys."""
        trie = replace(base.trie, tables=replace(base.trie.tables, **own), items=items)  # type: ignore[arg-type]
        super().__init__(trie, keys or base._keys, base._origin, digest=digest)
        self.base, self.own = base, own

    @property
    def digest(self) -> str:
        """Hex digest of the base's tables and of the view's own arrays."""
        if self._digest is None:
            digest = hashlib.blake2b((self.base or self).digest.encode(), digest_size=16)
            for name, array in self.own.items():
                digest.update(name.encode() + array.data)
            self._digest = digest.hexdigest()
        return self._digest

    @property
    def attributes(self) -> pa.Table:
        """Return those of the whole set, a row for each of `keys`, omitted ones included."""
        return self.whole.attributes

    @property
    def nbytes(self) -> int:
        """Bytes of the view's own arrays."""
        return sum(array.nbytes for array in self.own.values())

    def items(self) -> list[list[int]]:
        """Return the tokens of each of its items, in the set's own order."""
        return [item for part, rows in self.whole.parts() for item in self.items_at(part[self._numbers_of(rows) >= 0])]

    def to_bytes(self) -> bytes:
        """Return the view's own arrays, for `view_from_bytes`."""
        return index_file.to_bytes(self._header(), dict(self.own))


@dataclass(frozen=True)
class _Passing:
    """Which places pass, by a bit of each."""

    bits: NDArray[np.uint8]

    def __call__(self, at: NDArray[Any]) -> NDArray[np.bool_]:
        return np.asarray(self.bits[at >> 3] >> (at & 7).astype(np.uint8) & 1 != 0)


@dataclass(frozen=True)
class _Omitting:
    """Which places pass: those of other keys but for some."""

    keys: Keys
    places: NDArray[np.int64]

    def __call__(self, at: NDArray[Any]) -> NDArray[np.bool_]:
        return self.keys.passes(at) & ~np.isin(at, self.places)


def view(
    item_set: ItemSet,
    item_filter: Mapping[str, Any] | None = None,
    *,
    exclude_keys: KeyList | None = None,
    only_keys: KeyList | None = None,
    boost: Mapping[str, float] | None = None,
    boost_keys: Mapping[Any, float] | None = None,
) -> ItemSet:
    """Return the set without what does not pass. An item stays if one of its keys does, and has only those keys. What a
    boost adds to items, lists and draws of the result add to their scores.

    item_filter: a query over the set's attributes, in the language of docs/library.md. exclude_keys, only_keys: keys
        that do not pass, or that alone do. One that the set has not is ignored.
    boost: by attribute, what a unit of it adds to a log-probability: of numbers, bools, and dates in days since 1970; a
        missing value adds 0. boost_keys: by key, what it adds. An item with several keys has the largest sum of those
        that pass.
    A filter costs a pass over the attributes and one over the edges, and a bit an edge; a boost by attributes 4 bytes
    an edge; exclusions and boosts by keys what they are long. `only_keys` gives a small set of its own, without
    attributes but for `attributes_of`.
    Raises ItemSetError: a malformed query, keys of another type, or no item is left, with what each condition leaves;
    an attribute that is no number; boosts of a set that has some, or that change a score by more than `boosts.MOST`.
    """
    if (boost or boost_keys) and item_set.is_steered:
        raise ItemSetError("this set has boosts already: give all of them, and the filter, in one call")
    seen = item_set
    if item_filter is not None:
        passes, columns = passing(item_filter, item_set.attributes), item_set.attributes
        ours = item_set._keys.passes
        seen = filtered(
            item_set, passes, lambda: leaves(item_filter, columns.filter(pa.array(ours(np.arange(len(columns))))))
        )
    if boost and boosts_come_first(item_set, exclude_keys, only_keys):
        seen, boost, boost_keys = boosted(seen, boost, by_place(seen, boost_keys or {})), None, None
    if exclude_keys is not None:
        seen = without(seen, seen._keys.places_of(exclude_keys))
    if only_keys is not None:  # last: it gives another set, with other places
        places = seen._keys.places_of(only_keys)
        if not len(places):
            raise ItemSetError(f"no item is left: none of only_keys is a key of the {len(seen):,} items: give others")
        seen = only(seen, places)
    if boost or boost_keys:
        seen = boosted(seen, boost or {}, by_place(seen, boost_keys or {}))
    if seen.is_steered and not item_set.is_steered:
        check_size(seen)
    return seen


def view_from_bytes(base: ItemSet, data: bytes, name: str = "the view", *, keys: Keys | None = None) -> ItemSet:
    """Open what `to_bytes` of a part of this set wrote. Raises ItemSetError if the bytes are damaged.

    base: the set or the view that it was made of. keys: those that pass; without them it cannot be asked for keys.
    """
    header, arrays = index_file.parse(data, name)
    if "labels" in arrays:
        return from_index(header, arrays, name=name, check=True)
    index_file.check(header, arrays, name)
    base = base.whole if "alive" in arrays else base  # a filter of a view has that view's bits in its own
    return View(base, arrays, header.items, keys=keys, digest=header.digest)


def filtered(base: ItemSet, passes: NDArray[np.bool_], why: Callable[[], str] = lambda: "no key passes") -> View:
    """Return the view of the keys that pass, [keys] bool. Raises ItemSetError, which says `why`, if there are none.

    Of a view, it is one of the whole set: of the keys that pass both. Not of a set that has boosts.
    """
    _refuse_steered(base)
    starts, whole = base.key_starts, base.whole
    if base is not whole:
        passes = passes & base._keys.passes(np.arange(len(passes)))
    lives = passes if starts is None else np.logical_or.reduceat(passes, starts[:-1].astype(np.int64))
    if not (items := int(np.count_nonzero(lives))):
        raise _nothing_left(why())
    alive, terminal = bits_of(whole.trie.tables, lives)
    packed = np.packbits(passes, bitorder="little")
    keys = replace(whole._keys, base=whole._keys, test=_Passing(packed), own_bytes=packed.nbytes)
    return View(whole, {"alive": alive, "terminal": terminal}, items, keys=keys)


def boosts_come_first(item_set: ItemSet, exclude_keys: Any, only_keys: Any) -> bool:
    """Return whether boosts by attributes are the same whatever keys are excluded, so that many requests share them."""
    return only_keys is None and (exclude_keys is None or item_set.key_starts is None)


def boosted(base: ItemSet, boost: Mapping[str, float], keyed: Placed) -> ItemSet:
    """Return the set or view with a potential of each edge; of a set that `only` has made, such a set. Without `boost`
    the view has those of a few items, at a cost in proportion.

    boost: as for `view`. keyed: of its `by_place`. Raises as `of_keys`.
    """
    if not boost and base.rows_of is None:
        return _boosted_by_keys(base, *keyed)
    sums, starts, whole = of_keys(base, boost), base.key_starts, base.whole
    places, added = keyed
    sums[places] += added
    np.fmax(sums, np.finfo(np.float32).min, out=sums)  # -inf is for what does not pass: `check_size` refuses this
    if base._keys.test is not None:
        sums[~base._keys.passes(np.arange(len(sums)))] = -np.inf
    values = sums if starts is None else np.maximum.reduceat(sums, starts[:-1].astype(np.int64))
    found = potentials(base.trie.tables, whole.trie.tables, values.astype(np.float32))
    return _with_potential(base, found)


def tempered(base: ItemSet, temperature: float, boost: float = 1.0) -> ItemSet:
    """Return the set or view with potentials for draws at a temperature above 1, in place of its boosts.

    boost: what these are multiplied by. It costs what boosts by attributes cost, and with boosts a look-up an item.
    """
    tables, whole = base.trie.tables, base.whole
    values = np.zeros(len(whole), np.float32)
    if base.is_steered:
        each = boosts_of(tables, whole.trie.tables, np.arange(len(whole)))
        values = (boost / temperature * each).astype(np.float32)
    made = _with_potential(base, potentials(tables, whole.trie.tables, values, 1 - 1 / temperature))
    made.temperature = temperature
    return made


def _with_potential(base: ItemSet, found: NDArray[np.uint32]) -> ItemSet:
    if base.base is not None and base.own.keys() == {"boosted"}:
        return _with_potential(base.base, found)
    if base.rows_of is None:
        own = {} if base.base is None else {name: one for name, one in base.own.items() if name != "boosted"}
        return View(base.base or base, {**own, "potential": found}, len(base), keys=base._keys)
    trie = replace(base.trie, tables=replace(base.trie.tables, potential=found))
    made = ItemSet(trie, base._keys, base._origin, duplicates=base.duplicates)
    made.rows_of = base.rows_of
    return made


def _boosted_by_keys(base: ItemSet, places: NDArray[np.int64], values: NDArray[np.float64]) -> ItemSet:
    if not len(places):
        return base
    numbers, starts, whole = places, base.key_starts, base.whole
    if starts is not None:
        numbers = np.unique(base._keys.owners(places))
        theirs, begins = in_item_order(numbers, starts)
        sums, named = np.zeros(len(theirs)), np.isin(theirs, places)
        sums[named] = values[np.searchsorted(places, theirs[named])]
        sums[~base._keys.passes(theirs)] = -np.inf
        assert begins is not None
        values = np.maximum.reduceat(sums, begins[:-1].astype(np.int64))
    found = boosted_of(whole.trie.tables, numbers, values.astype(np.float32))
    excludes = base.base is not None and base.own.keys() == {"dead"}
    own, below = (base.own, base.base) if excludes else ({}, base)
    return View(below or base, {**own, "boosted": found}, len(base), keys=base._keys)


def without(base: ItemSet, places: NDArray[np.int64]) -> ItemSet:
    """Return the set without these keys, given by their places in `keys`: ascending and distinct, all of which pass.

    It never stands on other exclusions: a view is at most two above its whole set. Raises ItemSetError if it is empty.
    """
    if not len(places):
        return base
    numbers, starts = places, base.key_starts
    if starts is not None:  # an item stays while one of its keys does
        numbers = np.unique(base._keys.owners(places))
        theirs, begins = in_item_order(numbers, starts)
        assert begins is not None
        left = base._keys.passes(theirs) & ~np.isin(theirs, places)
        numbers = numbers[~np.logical_or.reduceat(left, begins[:-1].astype(np.int64))]
    if len(numbers) >= len(base):
        raise _nothing_left(f"exclude_keys leaves 0 of the {len(base):,} items")
    dead, below = dead_of(base.trie.tables, base.whole.trie.tables, numbers), base
    if base.base is not None and base.own.keys() == {"dead"}:
        below = base.base
        if isinstance(base._keys.test, _Omitting):
            places = np.union1d(base._keys.test.places, places)
    keys = replace(below._keys, base=below._keys, test=_Omitting(below._keys, places), own_bytes=places.nbytes)
    return View(below, {"dead": dead}, len(base) - len(numbers), keys=keys)


def only(base: ItemSet, places: NDArray[np.int64]) -> ItemSet:
    """Return a set of its own of the items with the keys at these places, which pass. Not of a set with boosts."""
    _refuse_steered(base)
    whole, numbers = base.whole, base._keys.owners(places)
    rows = items_at(whole.trie.tables, numbers, whole.longest)
    made = built(sort_unique(as_rows(rows)), pa.array(places), None, base._origin)
    at = made.keys.to_numpy()
    chosen = ItemSet(
        made.trie, Keys(base.keys.take(made.keys), made.key_starts), base._origin, duplicates=made.duplicates
    )
    chosen.rows_of = (whole, at) if whole.rows_of is None else (whole.rows_of[0], whole.rows_of[1][at])
    return chosen


def _refuse_steered(base: ItemSet) -> None:
    if base.is_steered:
        raise ItemSetError("this set has boosts, which a selection would lose: give both in one call of `view`")


def _nothing_left(why: str) -> ItemSetError:
    return ItemSetError(f"no item is left: {why}. Relax the filter, or exclude fewer keys")
