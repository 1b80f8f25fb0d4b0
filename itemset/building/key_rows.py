"""What keys say of sets: which belong to several items, and which are gone, new or changed from a set to the next."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.building.external import database
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.storage import PathLike
from itemset.text import decode
from itemset.trie.attributes import as_attributes, kind_of


class Changes(NamedTuple):
    """How many keys are gone, new, changed (another item or attributes) and the same; of items without keys, items."""

    gone: int
    new: int
    changed: int
    same: int
    notes: tuple[str, ...] = ()  # what else differs: attributes that are new or gone, and types
    retyped: bool = False  # whether keys, or an attribute, have become another type than numbers of another kind

    @property
    def alarming(self) -> bool:
        """Return whether a broken file looks so: a type is another, or of 100 keys or more over half are gone."""
        count = self.gone + self.changed + self.same
        return self.retyped or (count >= 100 and 2 * self.gone > count)

    def __str__(self) -> str:
        counts = f"{self.gone:,} gone, {self.new:,} new, {self.changed:,} changed, {self.same:,} the same"
        return "; ".join([counts, *self.notes])


def changes(
    before: ItemSet, after: ItemSet, *, by_key: bool = True, memory: int | None = None, folder: PathLike | None = None
) -> Changes:
    """Compare a set with the one before it, made with the same tokenizer, key by key: items, and attributes of both.

    by_key: False if row numbers are the keys, which say nothing: then item by item. memory, folder: as of `database`.
    """
    numbers = np.concatenate([after._numbers_of(rows) for _, rows in before.parts()])
    numbers = np.where(numbers < 0, -1 - np.arange(len(before)), numbers)
    of_both = [_rows(before, numbers, by_key), _rows(after, np.arange(len(after)), by_key)]
    was, now = (as_attributes(s.attributes, len(s.keys)) for s in (before, after))
    kinds = [{field.name: kind_of(field.type) for field in table.schema} for table in (was, now)]
    notes = [f"attribute {name!r} is new" for name in kinds[1].keys() - kinds[0].keys()]
    notes += [f"attribute {name!r} is gone" for name in kinds[0].keys() - kinds[1].keys()]
    other_keys = by_key and before.keys.type != after.keys.type
    values, shared, retyped = [], sorted(kinds[0].keys() & kinds[1].keys()), other_keys
    for i, name in enumerate(shared):
        of_both = [rows.append_column(f"v{i}", table[name]) for rows, table in zip(of_both, (was, now), strict=True)]
        before_kind, kind = kinds[0][name], kinds[1][name]
        if kind != before_kind:
            notes.append(f"attribute {name!r} is {kind} and was {before_kind}")
        other = kind != before_kind and not {kind, before_kind} <= {"integer", "float"}
        values.append(f"CAST(v{i} AS VARCHAR) v{i}" if other else f"v{i}")
        retyped = retyped or (other and was[name].null_count < len(was))  # else it had any type
    if other_keys:
        notes.append(f"keys are {kind_of(after.keys.type)}s and were {kind_of(before.keys.type)}s")
    key = "CAST(key AS VARCHAR) AS key" if other_keys else "key"
    chosen = ", ".join([key, "item", *values])
    with database("the keys of both sets", memory, folder) as connection:
        for name, rows in zip(("before", "after"), of_both, strict=True):
            connection.register(f"rows_{name}", rows)
        ((gone, new, changed, same),) = connection.execute(f"""
            WITH given AS (SELECT {chosen}, -1 side FROM rows_before UNION ALL SELECT {chosen}, 1 side FROM rows_after),
            summed AS (SELECT * EXCLUDE (side), sum(side) <> 0 s, max(side) > 0 now, min(side) < 0 was
                       FROM given GROUP BY ALL),
            by_key AS (SELECT bool_or(s) other, bool_or(now) now, bool_or(was) was FROM summed GROUP BY key)
            SELECT count_if(NOT now), count_if(NOT was), count_if(now AND was AND other), count_if(NOT other)
            FROM by_key
        """).fetchall()
    return Changes(gone, new, changed, same, tuple(sorted(notes)), retyped)


def _rows(s: ItemSet, numbers: NDArray[np.int64], by_key: bool) -> pa.Table:
    items = numbers if s.key_starts is None else np.repeat(numbers, np.diff(s.key_starts))
    return pa.table({"key": s.keys if by_key else items, "item": items})


def refuse_repeated(
    source: PathLike, key: str | None, s: ItemSet, tokenizer: Any, memory: int | None, folder: PathLike,
    among: Any = None,
) -> None:  # fmt: skip
    """Raise ItemSetError if different items have the same key, which comes from a source's column `key`.

    among: keys to look at, an Arrow array; None for all.
    """
    if not key:
        return
    what = f"{source}: keys in column {key!r}"
    with database(what, memory, folder) as connection:
        table = _rows(s, np.arange(len(s)), True)
        rows = connection.from_arrow(table if among is None else table.filter(pc.is_in(table["key"], value_set=among)))
        several = rows.aggregate("key, min(item) a, max(item) b, count(*) n", "key").filter("a < b")
        found = several.project("*, count(*) OVER ()").order("n DESC, key").limit(1).fetchall()
    if not found:
        return
    ((key_of_two, *two, _, count),) = found
    items = [decode(one, tokenizer) if tokenizer else str(one) for one in s.items_at(np.array(two))]
    raise ItemSetError(
        f"{what} are those of different items ({count:,}), such as {key_of_two!r} of "
        f"{shown(items[0])} and {shown(items[1])}: name another column, none for the row numbers, or allow it "
        "(--keys-repeat, in a source &keys_repeat=yes)"
    )
