"""What a request says of a slate: several distinct items in one answer."""

import unicodedata
from typing import Any

from itemset.embedded.placement import NO_SPACE, SELECTION, WORD
from itemset.embedded.survey import PLACES
from itemset.errors import ItemSetError, shown

_EXAMPLE = 'such as {"item_set": "films", "n": 5, "separator": "\\n"}'


def read(slate: Any) -> tuple[dict[str, Any], int, str]:
    """Return a slate, how many items it has, and the text between two. Raises ItemSetError.

    A slate is an object of item_set, n and separator; what chooses among the items may stand in it, too.
    """
    if not isinstance(slate, dict):
        raise ItemSetError(f"slate must be an object of {WORD}, n and separator, {_EXAMPLE}, not {shown(slate)}")
    if others := sorted(set(slate) - {WORD, "n", "separator", *SELECTION}):
        raise ItemSetError(f"slate: there is no {shown(others[0])}, only {WORD}, n, separator, {', '.join(SELECTION)}")
    for word, meaning in ((WORD, "the set's name"), ("n", "how many items")):
        if slate.get(word) is None:
            raise ItemSetError(f"slate has no {word}, which is {meaning}: state it, {_EXAMPLE}")
    n, separator = slate["n"], slate.get("separator", "\n")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= PLACES:
        raise ItemSetError(f"slate.n must be a number of items, 1 to {PLACES:,}, not {shown(n)}")
    if not isinstance(separator, str):
        raise ItemSetError(f"slate.separator must be a text, not {shown(separator)}")
    for character in separator:
        if unicodedata.category(character).startswith("C") and character not in "\n\r\t":
            raise ItemSetError(
                f"slate.separator has the character U+{ord(character):04X}, which is invisible and no space: of "
                "such, only the line feed, the carriage return and the tab may stand in it"
            )
    if separator.endswith(" "):
        raise ItemSetError(f"slate.separator {NO_SPACE}")
    return slate, n, separator
