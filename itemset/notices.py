"""What a build warns of: tokens that no answer's text shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from itemset.errors import ItemSetWarning
from itemset.text import never_shown


def of_build(occurring: Callable[[list[int]], list[int]], tokenizer: Any) -> None:
    """Warn if items hold tokens that answers' texts omit. occurring: returns which of some tokens occur in items."""
    if tokenizer is not None and (hidden := occurring(never_shown(tokenizer))):
        warnings.warn(
            f"{len(hidden):,} of the tokens in items are special ones of the tokenizer, such as "
            f"{tokenizer.convert_ids_to_tokens(hidden[0])!r} (id {hidden[0]}). Engines leave them out of an answer's "
            "text: send skip_special_tokens: false with requests, or add them to the tokenizer with "
            "special_tokens=False",
            ItemSetWarning,
            stacklevel=3,
        )
