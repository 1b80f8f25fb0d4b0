"""What an engine answers a front end that follows published sets: it takes versions up before any request has them.

A question is a mapping of plain values, and so is its answer:

    {"prepare": NAME, "version": VERSION, "path": FILE}     {"ready": whether requests may have it, "path": "device" or
        "host", where their masks are made} or {"refused": why it cannot be had}
    {"serves": NAME, "sequence": N, "front": I}             {"fronts": {"I": N, ...}}, what each front end serves
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from itemset.errors import ItemSetError
from itemset.serving.catalogue import Catalogue
from itemset.serving.versions import Opened

Place = Callable[[Mapping[str, Any], Opened | None], dict[str, Any]]
"""Bring a version to the devices, or a piece of it: the answer to a question. None while the version is being opened
in this process. Raises ItemSetError if it cannot be had."""


def on_host(question: Mapping[str, Any], opened: Opened | None) -> dict[str, Any]:
    """An engine without arenas."""
    return {"ready": opened is not None, "path": "host"}


class Preparer:
    """Answers in a process whose requests have item sets. Call it from one thread, between steps: it never waits."""

    def __init__(
        self,
        catalogue: Catalogue,
        place: Place = on_host,
        on_closed: Callable[[Collection[str]], object] = lambda open_sets: None,
    ) -> None:
        """on_closed: told the digests of the sets that are open, when versions of others were closed."""
        self._catalogue, self._place, self._on_closed = catalogue, place, on_closed
        self._fronts: dict[str, dict[str, int]] = {}

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question. Bad sets are refused, and raise nothing."""
        if "serves" in question:
            fronts = self._fronts.setdefault(question["serves"], {})
            fronts[str(question["front"])] = question["sequence"]
            return {"fronts": dict(fronts)}
        try:
            opened = self._catalogue.versions.begun(question["prepare"], question["version"], question["path"])
            answer = self._place(question, opened)
        except ItemSetError as error:
            return {"ready": False, "refused": str(error)}
        if answer["ready"] and opened is not None and self._catalogue.serve(opened):
            self._on_closed(self._catalogue.versions.open_sets())
        return answer
