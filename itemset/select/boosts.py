"""Boosts: what a request adds to the scores of items, by their attributes or by their keys."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.select.filters import PER_SECOND, known
from itemset.trie.attributes import kind_of

MOST_ATTRIBUTES = 8  # of one boost
MOST = 1_000.0  # that may be added to a score, or taken from it: e^1,000 and more would be no search for items
Placed = tuple[NDArray[np.int64], NDArray[np.float64]]  # of boosted keys: their places, and what each adds
_NUMBERS = ("integer", "float", "bool", "date", "timestamp")


def parted(boost: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Return the boost of which one view serves all weights, and what its potentials are to be multiplied by.

    That is of one attribute, whose weights of a sign differ by a factor. Raises ItemSetError for what is no weight.
    """
    weights = {name: _number(weight, f"the weight of {shown(name)}") for name, weight in boost.items()}
    if len(weights) > MOST_ATTRIBUTES:
        raise ItemSetError(f"{len(weights)} attributes are more than {MOST_ATTRIBUTES}: boost by fewer")
    if len(weights) != 1:
        return weights, 1.0
    ((name, weight),) = weights.items()
    return {name: math.copysign(1.0, weight)}, abs(weight)


def check_size(item_set: ItemSet, scale: float = 1.0) -> None:
    """Raise ItemSetError if the potentials of a steered set, times `scale`, pass what a score may be changed by."""
    most = item_set.trie.tables.largest_boost * scale
    if not most <= MOST:
        raise ItemSetError(f"it changes a score by up to {most:,.4g}, the limit is {MOST:,.0f}: give smaller weights")


def of_keys(item_set: ItemSet, boost: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return what the attributes of each key add up to: [keys]. boost: as for `views.view`.

    Raises ItemSetError: an attribute that there is not, or that is no number, or a weight that is no finite number.
    """
    of, at = item_set.whole.rows_of or (item_set.whole, None)
    table, parts = of.attributes, list[NDArray[np.float64]]()
    for name, weight in boost.items():
        if name not in table.column_names:
            raise ItemSetError(f"there is no attribute {shown(name)}: {known([table.schema])}")
        column = table.column(name)
        label = kind_of(column.type)
        if label not in _NUMBERS:
            raise ItemSetError(f"{shown(name)} ({label}) is no number, date or bool: boost by one of these")
        if at is not None:
            column = column.take(pa.array(at))
        parts.append(_number(weight, f"the weight of {shown(name)}") * _numbers(column, label))
    return sum(parts[1:], parts[0]) if parts else np.zeros(len(item_set.keys))


def _numbers(column: pa.ChunkedArray, label: str) -> NDArray[np.float64]:
    """Return a column as floats; 0 in place of what is missing or no number."""
    unit = 1
    if label == "date":
        column = column.cast(pa.date32()).cast(pa.int32())
    elif label == "timestamp":
        unit, column = 86_400 * PER_SECOND[column.type.unit], column.cast(pa.int64())
    numbers: NDArray[np.float64] = pc.fill_null(column.cast(pa.float64(), safe=False), 0.0).to_numpy()
    if np.isnan(numbers).any():
        numbers = np.nan_to_num(numbers, posinf=np.inf, neginf=-np.inf)
    return numbers / unit if unit != 1 else numbers


def by_place(item_set: ItemSet, boost_keys: Mapping[Any, Any]) -> Placed:
    """Return the places of boosted keys, ascending, and what each adds; keys that the set has not have none.

    Raises ItemSetError: a key of another type, or given twice, or what it adds is no finite number.
    """
    integers, values = pa.types.is_integer(item_set.keys.type), dict[Any, float]()
    for key, value in boost_keys.items():
        parsed = key
        if integers and isinstance(key, str):  # JSON has no other names
            try:
                parsed = int(key)
            except ValueError:
                raise ItemSetError(f"{shown(key)} is no key: the keys of this set are integers") from None
        if parsed in values:
            raise ItemSetError(f"the key {shown(parsed)} is given twice: give it once")
        values[parsed] = _number(value, f"what the key {shown(key)} adds")
    places = item_set._keys.places_of(list(values))
    keys = item_set.keys.take(pa.array(places)).to_pylist()
    return places, np.array([values[key] for key in keys], np.float64)


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ItemSetError(f"{what} is {shown(value)}: give a number such as 0.3")
    return float(value)
