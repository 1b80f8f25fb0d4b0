"""Item sets of numbers, which stand in JSON without quotes."""

import re
from collections.abc import Sequence

from itemset.item_set import ItemSet

_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_PIECE = re.compile(rb"-?[0-9]*")


def not_integers(item_set: ItemSet, texts: Sequence[bytes]) -> str | None:
    """Return the text of an item that JSON would not take for an integer, None if there is none.

    texts: of each token id. Looks at the tokens that there are, and at those items alone that may be wrong: all digits
    are right, unless a zero begins them.
    """
    pieces = {token: texts[token] if token < len(texts) else b"?" for token in item_set.token_ids.tolist()}
    odd = {token for token, text in pieces.items() if not text.isdigit()}
    first, _ = item_set.children()
    zeros = [token for token in first.tolist() if pieces[token].startswith(b"0")]
    longer = [token for token in zeros if pieces[token] != b"0" or len(item_set.children([token])[0])]
    wrong = next((token for token in odd if _PIECE.fullmatch(pieces[token]) is None), None)
    suspects = item_set.holding([wrong] if wrong is not None else odd)
    for item in item_set.items_at(suspects):
        if _INTEGER.fullmatch(text := b"".join(pieces[token] for token in item)) is None:
            return text.decode("utf-8", "replace")
    return pieces[longer[0]].decode() + "..." if longer else None
