"""Token healing: most tokenizers put a space into the token of the word after it, so a text that ends in one ends in a
token after which a model has seldom seen a word begin. The prompt's space is taken back, and items are spelt with it.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from itemset.serving.catalogue import Catalogue
from itemset.serving.front.request import ItemRequest
from itemset.text import decoded, encode, space_token

HEALED: Final = "space"  # the `escape` of such a request
MOST = 1_000_000  # items of a set that are spelt anew for the first such request
_LOOKED_AT = 16  # items, one of which at least must take the space


class Healing:
    """That of one front end. Safe for threads."""

    def __init__(self, catalogue: Catalogue, tokenizer: Any) -> None:
        self._catalogue, self._tokenizer = catalogue, tokenizer

    @cached_property
    def space(self) -> int | None:
        """Return the token that is taken back, None if the tokenizer has none."""
        return space_token(self._tokenizer)

    def healed(self, asked: ItemRequest, prompt: str) -> ItemRequest:
        """Return the request, HEALED if its prompt ends in a space that its items take over.

        Not of constraints, lists after thoughts, requests for log-probabilities of tokens, which trainers read by the
        tokens of the set, and sets that are no texts, spelt for other places, larger than MOST or of codes.
        """
        ends = prompt.endswith(" ") and not prompt[-2:-1].isspace() and len(prompt) > 1
        if not ends or self.space is None or asked.constraint or asked.after or asked.weighed or asked.escape:
            return asked
        return replace(asked, escape=HEALED, made=None) if self._takes_space(asked) else asked

    def _takes_space(self, asked: ItemRequest) -> bool:
        if asked.choice is not None:
            texts = [text for text in asked.choice[:_LOOKED_AT] if isinstance(text, str) and text]
        else:
            opened = self._catalogue.serving.get(asked.item_set or "")
            if opened is None or (of := opened.item_set).tokenizer is None or of.prefix or of.escape or len(of) > MOST:
                return False
            numbers = np.linspace(0, len(of) - 1, min(len(of), _LOOKED_AT)).astype(np.int64)
            texts = decoded(of.items_at(numbers), self._tokenizer)
        ids, offsets = encode(texts, self._tokenizer, escape=HEALED)
        return bool((ids[offsets[:-1]] != self.space).any())
