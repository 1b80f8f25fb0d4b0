"""What an engine answers a front end that follows published sets: it takes versions up before any request has them.

A question is a mapping of plain values, and so is its answer:

    {"prepare": NAME, "version": VERSION, "path": FILE}     {"ready": whether requests may have it, "path": "device" or
        "host", where their masks are made} or {"refused": why it cannot be had}. Besides, in the question: "sealed", as
        for `held.open_copy`; "ahead": true, if it is only to be opened meanwhile, and may be asked for never. In the
        answer: "copying": true, if it is being copied to the devices, a piece for each question.
    {"serves": NAME, "sequence": N, "front": I}             {"fronts": {"I": N, ...}}, what each front end serves
    {"drop": NAME}                                          {}: no request will name this set
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.serving.catalogue import Catalogue
from itemset.serving.versions import Opened, Versions

Result = TypeVar("Result")
Place = Callable[[Mapping[str, Any], Opened | None], dict[str, Any]]
"""Bring a version to the devices, or a piece of it: the answer to a question. None while the version is being opened
in this process. Raises ItemSetError if it cannot be had."""


def begun(
    versions: Versions, question: Mapping[str, Any], on_thread: Callable[[ItemSet], object] = lambda item_set: None
) -> Opened | None:
    """Do `Versions.begun` for what a question asks to prepare."""
    asked = question["prepare"], question["version"], question["path"]
    return versions.begun(*asked, on_thread, sealed=question.get("sealed"))


def or_why_not(work: Callable[[], Result], log: logging.Logger) -> Result | str:
    """Return what some work returns, or why it cannot be done: an error would end the engine, or leave ranks alone."""
    try:
        return work()
    except ItemSetError as error:
        return str(error)
    except Exception as error:
        log.exception("A question about item sets could not be answered")
        return f"{type(error).__name__}: {error}"


def no_room(opened: Opened, error: ItemSetError, options: str) -> str:
    """Return what the log says of a version that an arena has no room for. options: where the plugin's are."""
    return (
        f"Version {opened.version} of the item set {opened.name!r} takes the host path until there is room: {error} "
        f"(item_set_headroom {options})"
    )


def on_host(question: Mapping[str, Any], opened: Opened | None) -> dict[str, Any]:
    """An engine without arenas."""
    return {"ready": opened is not None, "path": "host"}


class Preparer:
    """Answers in a process whose requests have item sets. Call it from one thread, between steps: it never waits."""

    def __init__(
        self,
        catalogue: Catalogue,
        log: logging.Logger,
        place: Place = on_host,
        on_served: Callable[[Opened, Collection[str]], object] = lambda opened, open_sets: None,
        on_dropped: Callable[[str, Collection[str]], object] = lambda name, open_sets: None,
    ) -> None:
        """on_served, on_dropped: told of a version that requests may have from now on, or the name of a set that is
        gone, and the digests of the sets that are open then."""
        self._catalogue, self._log = catalogue, log
        self._place, self._on_served, self._on_dropped = place, on_served, on_dropped
        self._fronts: dict[str, dict[str, int]] = {}

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question. What goes wrong is refused, and raises nothing: the engine goes on."""
        answer = or_why_not(lambda: self._answer(question), self._log)
        return {"ready": False, "refused": answer} if isinstance(answer, str) else answer

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        versions = self._catalogue.versions
        if "serves" in question:
            fronts = self._fronts.setdefault(question["serves"], {})
            fronts[str(question["front"])] = question["sequence"]
            return {"fronts": dict(fronts)}
        if "drop" in question:
            self._fronts.pop(question["drop"], None)
            self._catalogue.drop(question["drop"])
            self._on_dropped(question["drop"], versions.open_sets())
            return {}
        opened = begun(versions, question)
        if question.get("ahead"):
            opened = None
        answer = self._place(question, opened)
        if answer["ready"] and opened is not None:
            self.serve(opened)
        return answer

    def serve(self, opened: Opened) -> None:
        """Requests may have this version from now on."""
        self._catalogue.serve(opened)
        self._on_served(opened, self._catalogue.versions.open_sets())
