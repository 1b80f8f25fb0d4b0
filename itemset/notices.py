"""What a build warns of: tokens that no answer's text shows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from itemset.errors import ItemSetWarning
from itemset.text import never_shown

if TYPE_CHECKING:
    from itemset.item_set import ItemSet


def of_build(item_set: ItemSet, tokenizer: Any) -> None:
    """Warn of what may surprise in a new set."""
    if tokenizer is not None and (hidden := item_set.occurring(never_shown(tokenizer))):
        warnings.warn(
            f"{len(hidden):,} of the tokens in items are special ones of the tokenizer, such as "
            f"{tokenizer.convert_ids_to_tokens(hidden[0])!r} (id {hidden[0]}). Engines leave them out of an answer's "
            "text: send skip_special_tokens: false with requests, or add them to the tokenizer with "
            "special_tokens=False",
            ItemSetWarning,
            stacklevel=3,
        )
