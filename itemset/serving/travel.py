"""What a request carries of its set through an engine: a reference, and what its receiver needs to know the set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from itemset.item_set import ItemSet
from itemset.serving.catalogue import Catalogue, InlineSet, part_of
from itemset.serving.versions import Versions
from itemset.serving.words import FILTERED, INDEX, REFERENCE

Carried = dict[str, Any]
"""REFERENCE, which names a part by a digest of what was asked; INDEX, of an inline set or of exclusions; FILTERED, the
bits of the filter that the set is or stands on."""


def carried(catalogue: Catalogue, reference: str) -> Carried:
    """Return what a request with this set carries to the engine.

    An engine may have forgotten any set that came with a request, so each request brings all of its own: an engine
    then has nothing to make, and keeps no query.
    """
    kept = catalogue.inline(reference)
    return {REFERENCE: reference} if kept is None else {REFERENCE: reference, **tables(kept)}


def tables(kept: InlineSet) -> Carried:
    """Return what a request carries beside the reference."""
    carried: Carried = {}
    if (below := kept.own_filter) is not None:
        carried[FILTERED] = below.index
    return carried if below is kept else {**carried, INDEX: kept.index}


def arrived(catalogue: Catalogue, carried: Mapping[str, Any]) -> InlineSet | None:
    """Return the set that came with a request, opened unless it is here; None for a registered one.

    Raises ItemSetError as `InlineSet.opened` does.
    """
    reference, index, filtered = carried[REFERENCE], carried.get(INDEX), carried.get(FILTERED)
    below = None
    if filtered is not None:
        name = reference if index is None else part_of(reference)
        below = catalogue.inline(name)
        below = below or catalogue.keep(InlineSet.opened(name, filtered, catalogue[part_of(name)]))
    if index is None:
        return below
    base = catalogue.versions.get(part_of(reference)) if below is None else below.item_set
    return catalogue.inline(reference) or catalogue.keep(InlineSet.opened(reference, index, base, filter=below))


def opened(versions: Versions, carried: Mapping[str, Any], below: ItemSet | None) -> ItemSet:
    """Return the set of a request, for a process that keeps none of those that came with requests.

    below: the filter that the set stands on, if its bits were here before. Raises ItemSetError as `InlineSet.opened`
    does, and for a version of a set that is no longer to be had.
    """
    reference, index, filtered = carried[REFERENCE], carried.get(INDEX), carried.get(FILTERED)
    if index is None and filtered is None:
        return versions[reference]
    if filtered is not None:
        name = reference if index is None else part_of(reference)
        below = InlineSet.opened(name, filtered, versions[part_of(name)]).item_set
        if index is None:
            return below
    return InlineSet.opened(reference, carried[INDEX], versions.get(part_of(reference)) or below).item_set
