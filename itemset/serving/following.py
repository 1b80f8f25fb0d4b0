"""Following published sets: a front end takes a new version up when every process that needs it has it.

A look reads each set's pointer. A new version is opened and checked here, then in the engines, beside requests and
steps; only then do requests get it. What cannot be served is refused once, and what was served goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from itemset import published
from itemset.errors import ItemSetError
from itemset.serving.admission import Checks
from itemset.serving.catalogue import RefusedError, where
from itemset.serving.config import StaticConfig
from itemset.serving.held import delete_unused, seal
from itemset.serving.versions import Opened

AGAIN = 0.01  # seconds between two questions to engines that are not ready
PATIENCE = 60.0  # seconds that `refresh` waits for the other front ends

Ask = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Puts a question (`preparing`) to every engine of this front end, and returns their answers. Called on any thread."""


@dataclass
class Followed:
    """What is known of one set.

    sequence: of the served version in its folder; 0 until the first look. since: when requests began to get it. path:
    where its masks are made, "device" or "host", as the engines say. refused: the state of the folder that is not
    served, and why. missed: what was wrong with the last look, said once.
    """

    folder: Path
    sequence: int = 0
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    path: str = "host"
    refused: tuple[int, str, str] | None = None
    missed: str = ""


class Follower:
    """Follows the sets of one front end. Safe for threads.

    Looks are made on a thread of its own once `start` was called, and by `look` and `refresh`.
    """

    def __init__(
        self,
        checks: Checks,
        config: StaticConfig,
        ask: Ask,
        *,
        path: str,
        front: int = 0,
        fronts: int = 1,
        logger: logging.Logger,
        on_served: Callable[[str, str], object] = lambda name, version: None,
        on_refused: Callable[[str], object] = lambda name: None,
    ) -> None:
        """path: where masks are made. front, fronts: which of the engine's front ends this is, and how many there are.
        on_served, on_refused: told of the set, for metrics."""
        self._checks, self._config, self._ask = checks, config, ask
        self._path, self._front, self._fronts = path, front, fronts
        self._log, self._on_served, self._on_refused = logger, on_served, on_refused
        self._sets: dict[str, Followed] = {}
        self._superseded: set[str] = set()
        self._missed = ""  # what was wrong with the last look at `item_set_dir`
        self._lock = threading.RLock()  # one look at a time
        self._started = threading.Event()
        for opened in checks.catalogue.versions.serving:
            self._sets[opened.name] = Followed(Path(where(config, opened.name)), path=path)
        self.follows = config.item_set_dir is not None or any(map(checks.catalogue.follows, self._sets))

    def start(self) -> None:
        """Look every `item_set_refresh_seconds` from now on. Does nothing if no set is followed."""
        if self.follows and not self._started.is_set():
            self._started.set()
            threading.Thread(target=self._run, name="item-set-follower", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._config.item_set_refresh_seconds)
            try:
                self.look()
            except Exception:  # the engine may be ending; a follower that ends would be noticed by nobody
                self._log.exception("Item sets could not be looked at; the next look follows")

    def look(self) -> None:
        """Look at every set once, and take up what is new."""
        with self._lock:
            self._look_at_folder()
            for name in list(self._sets):
                self._look_at(name)

    def refresh(self, name: str) -> dict[str, Any]:
        """Look at one set, and return its entry of `listed` when what is current serves in every front end.

        Raises RefusedError: no such set, a version that is not served, or front ends that have not followed.
        """
        with self._lock:
            self._look_at_folder()
            if name not in self._sets:  # a view is refreshed with its set
                raise self._unfollowed(name)
            followed = self._sets[name]
            followed.refused = None  # what was wrong may have been mended
            self._look_at(name)
            if followed.missed or followed.refused:
                raise RefusedError("refused version", followed.missed or (followed.refused or (0, "", ""))[2])
            sequence, entry = followed.sequence, self._entry(name, followed)
        until = time.monotonic() + PATIENCE
        while not self._serves_everywhere(name, sequence):
            if time.monotonic() > until:
                raise RefusedError(
                    "refused version",
                    f"another API server of this engine has not taken up version {entry['version']} of {name!r} in "
                    f"{PATIENCE:.0f} s: see its log",
                )
            time.sleep(AGAIN)
        return entry

    def _unfollowed(self, name: str) -> RefusedError:
        catalogue = self._checks.catalogue
        for one in self._sets:
            opened = catalogue.versions.current(one)
            if opened is not None and name in opened.sets:
                what = f"{name!r} is a view of {one!r}, and refreshed with it: name {one!r}"
                return RefusedError("unknown set", what)
        return catalogue.unknown(name)

    def refreshed(self, name: str | None) -> list[dict[str, Any]]:
        """Do `refresh` for one set, or for all."""
        return [self.refresh(one) for one in ([*self._sets] if name is None else [name])]

    def listed(self) -> list[dict[str, Any]]:
        """What is served, a mapping for each set: for `GET /v1/item_sets`."""
        return [self._entry(name, followed) for name, followed in list(self._sets.items())]

    def _entry(self, name: str, followed: Followed) -> dict[str, Any]:
        catalogue = self._checks.catalogue
        refused = followed.refused and {"version": followed.refused[1], "reason": followed.refused[2]}
        entry = {"name": name, "version": None, "followed": catalogue.follows(name), "refused_version": refused}
        if (opened := catalogue.versions.current(name)) is None:  # it has none that can be served
            return entry
        try:
            kept = published.versions(followed.folder) if entry["followed"] else []
        except ItemSetError:
            kept = []
        return entry | {
            "version": opened.version,
            "items": len(opened.sets[name]),
            "bytes": opened.sets[name].nbytes,
            "serving_since": followed.since.isoformat(timespec="milliseconds"),
            "path": followed.path,
            "views": [called for called in opened.sets if called != name],
            "previous_versions": [one.name for one in kept if one.name != opened.version],
        }

    def _look_at_folder(self) -> None:
        """Of `item_set_dir`: which sets are there."""
        if self._config.item_set_dir is None:
            return
        try:
            found, self._missed = published.sets_in(self._config.item_set_dir), ""
        except ItemSetError as error:
            if str(error) != self._missed:
                self._missed = str(error)
                self._log.warning("Item sets stay as they are: %s", error)
            return
        for name in found - self._sets.keys() - self._config.item_views.keys():
            self._sets[name] = Followed(Path(where(self._config, name)), path=self._path)
        for name in self._sets.keys() - found - self._config.item_sets.keys():
            del self._sets[name]
            closed = self._checks.catalogue.drop(name)
            self._ask({"drop": name})
            self._close(closed)
            self._log.info("Item set %r is no longer there, and no longer served", name)

    def _look_at(self, name: str) -> None:
        followed = self._sets[name]
        if not self._checks.catalogue.follows(name):
            return
        try:
            version = published.current(followed.folder)
        except ItemSetError as error:
            self._miss(name, error)
            return
        followed.missed = ""
        opened = self._checks.catalogue.versions.current(name)
        if opened is not None and not followed.sequence:
            self._on_served(name, opened.version)
        if version.sequence == followed.sequence or (followed.refused and followed.refused[0] == version.sequence):
            return
        try:
            if opened is None or opened.version != version.name:
                self._take_up(name, version)
        except ItemSetError as error:
            try:
                went_on = published.current(followed.folder).sequence != version.sequence
            except ItemSetError as missing:  # it vanished meanwhile: when it is back, it is tried again
                self._miss(name, missing)
                return
            if went_on:  # this one may be deleted by now
                self._look_at(name)
                return
            followed.refused = (version.sequence, version.name, str(error))
            self._close([version.name])
            self._on_refused(name)
            self._log.error("Version %s of the item set %r is not served: %s", version.name, name, error)
            return
        followed.sequence, followed.refused = version.sequence, None
        self._serves_everywhere(name, version.sequence)

    def _miss(self, name: str, error: ItemSetError) -> None:
        """Say once what is wrong with a folder."""
        followed = self._sets[name]
        if str(error) != followed.missed:
            followed.missed = str(error)
            self._log.warning("Item set %r stays as it is: %s", name, error)

    def _went_on(self, followed: Followed, version: published.Version) -> bool:
        try:
            return published.current(followed.folder).sequence != version.sequence
        except ItemSetError:
            return False

    def _take_up(self, name: str, version: published.Version) -> None:
        """Have the version opened here and in the engines, and let requests get it.

        Raises ItemSetError if it cannot be had, or if another became current meanwhile: several front ends must not ask
        the engines for several versions.
        """
        began = time.monotonic()
        question: dict[str, Any] = {"prepare": name, "version": version.name, "path": str(version.path)}

        def ask_ahead() -> None:  # the engines open it while it is checked here
            question["sealed"] = seal(version.name, self._config.item_set_cache)
            self._ask(question | {"ahead": True})

        opened = self._checks.open(name, version.name, version.path, ask_ahead)
        while True:
            answers = self._ask(question)
            if refused := [answer["refused"] for answer in answers if answer.get("refused")]:
                raise ItemSetError(refused[0])
            if all(answer["ready"] for answer in answers):
                break
            if not all(answer["ready"] or answer.get("copying") for answer in answers):
                time.sleep(AGAIN)
            if self._went_on(self._sets[name], version):
                raise ItemSetError("another version became current")
        self._serve(name, opened, "host" if any(answer["path"] == "host" for answer in answers) else "device")
        self._log.info(
            "Version %s of the item set %r is served: %s items, %.2f s after it was noticed",
            version.name,
            name,
            f"{len(opened.sets[name]):,}",
            time.monotonic() - began,
        )

    def _serve(self, name: str, opened: Opened, path: str) -> None:
        self._superseded.discard(opened.version)
        self._close(self._checks.catalogue.serve(opened))
        followed = self._sets[name]
        followed.since, followed.path = datetime.now(UTC), path
        self._on_served(name, opened.version)

    def _close(self, versions: Iterable[str]) -> None:
        """Delete this machine's copies of these versions, and of earlier ones, once nobody has them open."""
        self._superseded.update(versions)
        self._superseded -= delete_unused(self._config.item_set_cache, self._superseded)

    def _serves_everywhere(self, name: str, sequence: int) -> bool:
        """Say which version this front end serves; return whether all serve it, or a later one."""
        told = self._ask({"serves": name, "sequence": sequence, "front": self._front})
        return all(len(one["fronts"]) >= self._fronts and min(one["fronts"].values()) >= sequence for one in told)
