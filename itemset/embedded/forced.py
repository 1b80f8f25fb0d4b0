"""Drafts on the host path: tokens that a set forces, of an item that stands alone or inside an answer."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from itemset.embedded.composite_grammar import Composite
from itemset.masking.host import HostState


def extend(place: HostState | Composite, drafts: Iterable[int], most: int, words: int) -> list[int]:
    """Return drafts and, after them, the tokens that the set forces: `most` in all. The place stays.

    drafts: which the place allows. words: of a bitmask of the vocabulary, 32 tokens each.
    Verification accepts a forced token whatever the model says. Where more than one token is legal, the drafts end;
    so they do after the stop token that follows an item.
    """
    found, taken, row, ended = list(drafts), 0, np.empty(words, np.int32), False
    while True:
        taken += place.read(found[taken:])
        if ended or not taken == len(found) < most or not (isinstance(place, HostState) or place.in_set):
            break
        ended = isinstance(place, HostState) and place.ends(place.state)
        if (token := _only(place, row)) is None:
            break
        found.append(token)
    place.rollback(taken)
    return found[:taken]


def _only(place: HostState | Composite, row: NDArray[np.int32]) -> int | None:
    """Return the one token that may follow; None if there are several."""
    place.fill_bitmask(row)
    (at,) = np.nonzero(row)
    word = int(row.view(np.uint32)[at[0]]) if len(at) == 1 else 0
    return 32 * int(at[0]) + word.bit_length() - 1 if word and word & (word - 1) == 0 else None
