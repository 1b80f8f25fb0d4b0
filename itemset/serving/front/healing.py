"""Token healing: most tokenizers put a space into the token of the word after it, so a text that ends in one ends in a
token after which a model has seldom seen a word begin. The prompt's space is taken back, and items are spelt with it.
"""

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from itemset.errors import ItemSetError
from itemset.serving.catalogue import Catalogue
from itemset.serving.front.request import ItemRequest
from itemset.text import decoded, encode, space_token

HEALED: Final = "space"  # the `escape` of such a request
MOST = 1_000_000  # items of a set that are spelt anew for the first such request
_LOOKED_AT, _CHARACTERS = 16, 32  # items, one of which at least must take the space, and as much of each
_REMEMBERED = 1_000  # sets


def ends_in_space(prompt: Any) -> bool:
    """Return whether a prompt is a text that ends in one space after something else."""
    return isinstance(prompt, str) and len(prompt) > 1 and prompt[-1] == " " and not prompt[-2].isspace()


def unhealed(asked: ItemRequest) -> ItemRequest:
    """Return the request as it is after a prompt that keeps its space."""
    return replace(asked, escape=None, made=None) if asked.escape == HEALED else asked


class Healing:
    """That of one front end. Safe for threads."""

    def __init__(self, catalogue: Catalogue, tokenizer: Any) -> None:
        self._catalogue, self._tokenizer, self.on = catalogue, tokenizer, True
        self._set_takes = lru_cache(_REMEMBERED)(self._takes)

    @cached_property
    def space(self) -> int | None:
        """Return the token that is taken back, None if the tokenizer has none."""
        return space_token(self._tokenizer)

    def healed(self, asked: ItemRequest, prompt: Any) -> ItemRequest:
        """Return the request, HEALED if its prompt ends in a space that its items take over.

        Not of constraints, lists after thoughts, requests for log-probabilities of tokens, which trainers read by the
        tokens of the set, and sets that are no texts, spelt for other places, larger than MOST or of codes.
        """
        others = asked.constraint or asked.after or asked.weighed or asked.escape
        if others or not self.on or not ends_in_space(prompt) or self.space is None:
            return asked
        if asked.choice is not None:
            return replace(asked, escape=HEALED, made=None) if self._choice_takes(asked.choice) else asked
        opened = self._catalogue.serving.get(asked.item_set or "")
        if opened is None:
            return asked
        reference = asked.reference or opened.reference  # of one version, whatever is served later
        return replace(asked, escape=HEALED, made=None, reference=reference) if self._set_takes(reference) else asked

    def _choice_takes(self, choice: Any) -> bool:
        few = choice[:_LOOKED_AT] if isinstance(choice, list) else []
        return self._take([text[:_CHARACTERS] for text in few if isinstance(text, str) and text])

    def _takes(self, reference: str) -> bool:
        of = self._catalogue[reference]
        if of.tokenizer is None or of.prefix or of.escape or len(of) > MOST:
            return False
        items = of.items_at(np.linspace(0, len(of) - 1, min(len(of), _LOOKED_AT)).astype(np.int64))
        texts = decoded(items, self._tokenizer)
        try:
            tokens, _ = encode(texts, self._tokenizer)
        except ItemSetError:
            return False
        # Token ids that are not what their text gives are spelt in one way.
        return tokens.tolist() == [token for item in items for token in item] and self._take(texts)

    def _take(self, texts: list[str]) -> bool:
        try:
            ids, offsets = encode(texts, self._tokenizer, escape=HEALED)
        except ItemSetError:  # which is told where they are read
            return False
        return bool((ids[offsets[:-1]] != self.space).any())
