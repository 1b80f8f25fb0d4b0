"""What a request carries of its set through an engine: a reference, and what its receiver needs to know the set."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from itemset.item_set import ItemSet
from itemset.serving.catalogue import Catalogue, InlineSet, part_of
from itemset.serving.words import FILTERED, INDEX, REFERENCE

Carried = dict[str, Any]
"""REFERENCE; INDEX, of an inline set or of exclusions; FILTERED, [query, bits] of the filter that the set is or stands
on, either of which may be None."""


class Sender:
    """Says what each request of a front end carries to the engine. Safe for threads."""

    def __init__(self, catalogue: Catalogue, *, engines: int) -> None:
        """engines: how many there are. A request goes to one: of several, any may not have seen a filter yet."""
        self._catalogue, self._several = catalogue, engines > 1
        self._sent: WeakSet[InlineSet] = WeakSet()  # filters
        self._lock = threading.Lock()

    def carried(self, reference: str) -> Carried:
        """Return what a request with this set carries.

        A filter's bits go with its first request. Later ones carry its query alone: if the engine has forgotten the
        filter, or the first request never got there, it makes the filter again.
        """
        kept = self._catalogue.inline(reference)
        if kept is None:
            return {REFERENCE: reference}
        bits, below = True, kept.own_filter
        if below is not None and below.query is not None and not self._several:
            with self._lock:
                bits = below not in self._sent
                self._sent.add(below)
        return {REFERENCE: reference, **tables(kept, bits=bits)}


def tables(kept: InlineSet, *, bits: bool = True) -> Carried:
    """Return what a request carries beside the reference. bits: of its filter too, not the query alone."""
    carried: Carried = {}
    if (below := kept.own_filter) is not None:
        carried[FILTERED] = [below.query, below.index if bits else None]
    return carried if below is kept else {**carried, INDEX: kept.index}


def arrived(catalogue: Catalogue, carried: Mapping[str, Any]) -> InlineSet | None:
    """Return the set that came with a request, opened unless it is here; None for a registered one.

    Raises ItemSetError as `InlineSet.opened` does.
    """
    reference, index, filtered = carried[REFERENCE], carried.get(INDEX), carried.get(FILTERED)
    below = None
    if filtered is not None:
        name = reference if index is None else part_of(reference)
        below = catalogue.inline(name) or catalogue.keep(_filter(catalogue, name, *filtered))
    if index is None:
        return below
    base = catalogue.registered.get(part_of(reference)) if below is None else below.item_set
    return catalogue.inline(reference) or catalogue.keep(InlineSet.opened(reference, index, base, filter=below))


def _filter(catalogue: Catalogue, reference: str, query: str | None, bits: bytes | None) -> InlineSet:
    base = catalogue[part_of(reference)]
    if bits is None:
        return InlineSet.filtered(reference, base, json.loads(query or "{}"))
    return InlineSet.opened(reference, bits, base, query=query)


def opened(registered: Mapping[str, ItemSet], carried: Mapping[str, Any], below: ItemSet | None) -> ItemSet:
    """Return the set of a request, for a process that keeps none of those that came with requests.

    below: the filter that the set stands on, if its bits were here before. Raises ItemSetError as `InlineSet.opened`
    does.
    """
    reference, index, filtered = carried[REFERENCE], carried.get(INDEX), carried.get(FILTERED)
    if reference in registered:
        return registered[reference]
    if filtered is not None:
        name = reference if index is None else part_of(reference)
        below = InlineSet.opened(name, filtered[1], registered[part_of(name)]).item_set
        if index is None:
            return below
    return InlineSet.opened(reference, carried[INDEX], registered.get(part_of(reference), below)).item_set
