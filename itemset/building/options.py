"""How the items of a file become token ids."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from itemset.errors import ItemSetError
from itemset.text import Escape, encode
from itemset.trie.rows import Rows


@dataclass(frozen=True)
class Encoding:
    """The options of `build` (token ids) and `build_text` (texts) by which items become token ids."""

    tokenizer: Any = None
    prefix: str = ""
    escape: Escape | None = None
    vocab_size: int | None = None

    @property
    def limit(self) -> int | None:
        """The number that token ids stay below: the tokenizer's if none is given, None if there is neither."""
        return len(self.tokenizer) if self.vocab_size is None and self.tokenizer is not None else self.vocab_size

    def check(self, path: str | os.PathLike[str], *, texts: bool) -> None:
        """Raise ItemSetError for an option that does not go with what the file holds, texts or token ids."""
        if not texts and self.prefix:
            raise ItemSetError(f"{path} holds token ids: the prefix is for texts, omit it (--prefix)")
        if not texts and self.escape:
            raise ItemSetError(f"{path} holds token ids: to escape is for texts, omit it (--escape)")
        if texts and self.tokenizer is None:
            raise ItemSetError(f"{path} holds texts: give the model's tokenizer (--tokenizer DIR)")
        if texts and self.vocab_size is not None:
            raise ItemSetError(f"{path} holds texts: omit the vocabulary size (--vocab-size), the tokenizer knows it")

    def encode(self, texts: list[str], before: int) -> Rows:
        """Return the tokens of texts. before: the number of items before them. Raises ItemSetError as `encode` does."""
        return Rows(*encode(texts, self.tokenizer, prefix=self.prefix, escape=self.escape, before=before))
