"""Some consecutive items of a file, with keys and attributes, and how they become token ids."""

from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa

from itemset.errors import Faults, ItemSetError
from itemset.text import Escape, Lossy, encode, encode_pieces
from itemset.trie.rows import Rows, as_rows, joined


@dataclass(frozen=True)
class Items:
    """Consecutive items, N of them: either `texts` or `tokens`, the other is None; neither if only keys are read."""

    texts: list[str] | list[list[str]] | None = None  # N strings, or N lists of strings that are a token each
    tokens: Rows | None = None
    keys: pa.Array | None = None  # [N] int64 or large_string, None if no key was asked for
    attributes: pa.Table | None = None  # N rows, None if none were asked for
    done: float = 1.0  # share of all files up to the last of these items
    place: str = "item {}"  # what errors call them
    first: int = 0  # number of the first

    def __len__(self) -> int:
        given: tuple[Any, ...] = (self.texts, self.tokens, self.keys, ())
        return len(next(one for one in given if one is not None))

    @property
    def kind(self) -> str:
        """Return what they are, for people: token ids, tokens (by their names) or texts."""
        if self.texts is None:
            return "token ids"
        return "tokens" if self.texts and isinstance(self.texts[0], list) else "texts"


@dataclass(frozen=True)
class Encoding:
    """How items become token ids: options of `build` (token ids) and `build_text` (texts)."""

    tokenizer: Any = None
    prefix: str = ""
    escape: Escape | None = None
    vocab_size: int | None = None
    keep_text: bool = False  # whether the texts, as they are given, are the keys

    @property
    def limit(self) -> int | None:
        """Return the number that token ids stay below: the tokenizer's if none is given, None if there is neither."""
        return len(self.tokenizer) if self.vocab_size is None and self.tokenizer is not None else self.vocab_size

    def check(self, path: object, *, texts: bool) -> None:
        """Raise ItemSetError for an option that does not go with what the file holds, texts or token ids."""
        if not texts and self.prefix:
            raise ItemSetError(f"{path} holds token ids: the prefix is for texts, omit it (--prefix)")
        if not texts and self.escape:
            raise ItemSetError(f"{path} holds token ids: to escape is for texts, omit it (--escape)")
        if texts and self.tokenizer is None:
            raise ItemSetError(f"{path} holds texts: give the model's tokenizer (--tokenizer DIR)")
        if texts and self.vocab_size is not None:
            raise ItemSetError(f"{path} holds texts: omit the vocabulary size (--vocab-size), the tokenizer knows it")

    def keyed(self, items: Items) -> Items:
        """Return the items, with their texts as keys if these are kept. Raises ItemSetError for token ids, or keys."""
        if not self.keep_text:
            return items
        if items.keys is not None or items.kind != "texts":
            raise ItemSetError("to keep the texts (--keep-text) makes them the keys: it takes texts, and no --key")
        return replace(items, keys=pa.array(items.texts, pa.large_string()))

    def rows(self, items: Items, before: int, faults: Faults, lossy: Lossy) -> Rows | None:
        """Return the items' tokens, checked; None if some are bad, which are added to the faults.

        before: the number of items before them. lossy: as for `encode`. Raises ItemSetError as `rows.as_rows` does.
        """
        given, tokens, texts = faults.count, items.tokens, cast(Any, items.texts)
        told: dict[str, Any] = {"name": items.place, "before": items.first, "faults": faults}
        if items.kind == "tokens":
            if self.prefix or self.escape:
                raise ItemSetError("items are lists of tokens: prefix and escape are for texts, omit them")
            tokens = Rows(*encode_pieces(texts, self.tokenizer, **told))
        elif texts is not None:
            tokens = Rows(*encode(texts, self.tokenizer, prefix=self.prefix, escape=self.escape, lossy=lossy, **told))
        if faults.count > given:
            return None
        return as_rows(tokens, self.limit, before=before, name=items.place, first=items.first)


def joined_items(parts: list[Items]) -> Items:
    keys = None if parts[0].keys is None else pa.concat_arrays([part.keys for part in parts])
    attributes = None if parts[0].attributes is None else pa.concat_tables([part.attributes for part in parts])
    if parts[0].texts is not None:
        texts: Any = [text for part in parts for text in part.texts or ()]
        return Items(texts, None, keys, attributes)
    return Items(None, joined([part.tokens for part in parts if part.tokens is not None]), keys, attributes)
