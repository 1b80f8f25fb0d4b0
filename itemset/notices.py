"""What a build warns of: keys that cannot be looked up, and tokens that no answer's text shows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from itemset.errors import ItemSetWarning
from itemset.rows import Rows
from itemset.text import never_shown

if TYPE_CHECKING:
    from itemset.item_set import ItemSet

_EXAMPLES = 3


Folded = Sequence[tuple[Any, list[int]]]
"""Some items that are equal to an earlier one: their keys and their tokens."""


def first_folded(rows: Rows, distinct: int, order: NDArray[np.uint32] | None, keys: pa.Array | None) -> Folded:
    """The first few rows that are equal to an earlier one; none where there are no keys.

    distinct, order: how many rows are not, and where these stand, as `sort_unique` says.
    """
    if keys is None or order is None or distinct == len(rows):
        return []
    folded = np.ones(len(rows), np.bool_)
    folded[order] = False
    found = []
    for i in np.flatnonzero(folded)[:_EXAMPLES].tolist():
        found.append((keys[i].as_py(), rows.take(np.array([i], np.uint32)).tokens.tolist()))
    return found


def of_build(item_set: ItemSet, tokenizer: Any, *, keys_given: bool, folded: Folded = ()) -> None:
    """Warn of what a new set may surprise with. folded: as `first_folded` gives them, where that is known."""
    if keys_given and item_set.duplicates:
        _warn_of_folded_keys(item_set, tokenizer, folded)
    if tokenizer is not None and (hidden := item_set.occurring(never_shown(tokenizer))):
        _warn(
            f"{len(hidden):,} of the tokens in items are special ones of the tokenizer, such as "
            f"{tokenizer.convert_ids_to_tokens(hidden[0])!r} (id {hidden[0]}). Engines leave them out of an answer's "
            "text: send skip_special_tokens: false with requests, or add them to the tokenizer with "
            "special_tokens=False"
        )


def _warn_of_folded_keys(item_set: ItemSet, tokenizer: Any, examples: Folded) -> None:
    named = []
    for key, tokens in examples:
        text = tokens if tokenizer is None else tokenizer.decode(tokens).removeprefix(item_set.prefix)
        (kept,) = np.asarray(item_set.lookup([tokens])).tolist()
        named.append(f"{text!r:.60} (key {key!r}, found as {kept!r})")
    more = item_set.duplicates - len(named)
    shown = f": {', '.join(named)}{f' and {more:,} more' if more else ''}" if named else ""
    _warn(
        f"items equal to an earlier one: {item_set.duplicates:,}. The first one's key stays, those of the others "
        f"cannot be looked up{shown}"
    )


def _warn(sentence: str) -> None:
    warnings.warn(sentence, ItemSetWarning, stacklevel=4)
