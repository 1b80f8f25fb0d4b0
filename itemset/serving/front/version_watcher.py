"""Version roll-outs in a front end: it follows published sets, and serves a new version once every engine has it.

A look reads each set's pointer. A new version is opened and checked here, then in the engines (`version_rollout`), and
only then do requests get it. A version that cannot be served is refused once, and the one before it stays.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from itemset import published
from itemset.errors import ItemSetError
from itemset.serving import metrics
from itemset.serving.catalogue import RefusedError
from itemset.serving.config import StaticConfig
from itemset.serving.front.admission import Checks
from itemset.serving.private_copies import delete_unused
from itemset.serving.warm_up import compile_all
from itemset.serving.wire import Answer, Drop, Message, Prepare, Stage

AGAIN = 0.01  # seconds between two messages to engines that are not ready

Send = Callable[[Any], list[Any]]  # sends plain values to every engine of a front end, from any thread; their answers


@dataclass
class Followed:
    path: str  # where its masks are made, "device" or "host", as the engines say
    since: datetime = field(default_factory=lambda: datetime.now(UTC))  # when requests began to get it
    refused: published.Version | None = None  # that is not served
    why: str = ""  # it is refused
    missed: str = ""  # what was wrong with the folder at the last look, logged once


class Follower:
    """Follows the sets of one front end. Safe for threads."""

    def __init__(
        self, checks: Checks, config: StaticConfig, send: Send, *, path: str, log: logging.Logger,
        by_rounds: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """path: where masks are made. by_rounds: see `OneRequest`."""
        self._checks, self._config, self._send = checks, config, send
        self._path, self._log, self._by_rounds = path, log, by_rounds
        self._sets = {name: Followed(path) for name in checks.catalogue.serving}
        self._superseded: set[str] = set()
        self._missed = ""  # what was wrong with the last look at `item_set_dir`
        self._lock = threading.RLock()  # one look at a time
        for opened in checks.catalogue.serving.values():
            if checks.catalogue.follows(opened.name):
                metrics.served(opened.name, opened.version)
        self.follows = config.item_set_dir is not None or any(map(checks.catalogue.follows, self._sets))

    def _ask(self, message: Message) -> list[Answer]:
        return msgspec.convert(self._send(msgspec.to_builtins(message)), list[Answer])

    def start(self) -> None:
        """Look every `item_set_refresh_seconds` from now on, on a thread, if a set is followed."""
        threading.Thread(target=self._run, name="item-set-follower", daemon=True).start()

    def _run(self) -> None:
        try:
            compile_all()  # the engine has; no request should wait until they are loaded
        except Exception:
            self._log.exception("Loops could not be loaded ahead: the first requests wait for them")
        while self.follows:  # the first look at once: it says which sets of the folder the start has left out
            try:
                self.look()
            except Exception:  # the engine may be ending; a follower that ends would be noticed by nobody
                self._log.exception("Item sets could not be looked at; the next look follows")
            time.sleep(self._config.item_set_refresh_seconds)

    def look(self) -> None:
        """Look at every set once, and take up what is new."""
        with self._lock:
            self._look_at_folder()
            for name in list(self._sets):
                self._look_at(name)

    def refresh(self, name: str) -> dict[str, Any]:
        """Look at one set; return its entry of `described`. Raises RefusedError: no such set, or what is current is not
        served."""
        with self._lock:
            self._look_at_folder()
            if (followed := self._sets.get(name)) is None:
                raise self._checks.catalogue.unknown(name)
            followed.refused = None  # what was wrong may have been mended
            self._look_at(name)
            if followed.missed or followed.refused:
                raise RefusedError("refused version", followed.missed or followed.why)
            return self._entry(name, followed)

    def refreshed(self, name: str | None) -> list[dict[str, Any]]:
        return [self.refresh(one) for one in ([*self._sets] if name is None else [name])]

    def described(self) -> dict[str, Any]:
        """Return what `GET /v1/item_sets` says: the sets, and why rounds of requests make all lists, if they do."""
        data = [self._entry(name, followed) for name, followed in list(self._sets.items())]
        return {"object": "list", "data": data, "lists_by_rounds": self._by_rounds()}

    def _entry(self, name: str, followed: Followed) -> dict[str, Any]:
        catalogue = self._checks.catalogue
        refused: dict[str, str | None] | None = None
        if followed.missed:
            refused = {"version": None, "reason": followed.missed}
        elif followed.refused:
            refused = {"version": followed.refused.name, "reason": followed.why}
        entry = {"name": name, "version": None, "followed": catalogue.follows(name), "refused_version": refused}
        if (opened := catalogue.serving.get(name)) is None:  # it has none that can be served
            return entry
        try:
            kept = published.versions(self._config.where(name)) if entry["followed"] else []
        except ItemSetError:
            kept = []
        return entry | {
            "version": opened.version,
            "items": len(opened.item_set),
            "bytes": opened.item_set.nbytes,
            "serving_since": followed.since.isoformat(timespec="milliseconds"),
            "path": followed.path,
            "previous_versions": [one.name for one in kept if one.name != opened.version],
        }

    def _look_at_folder(self) -> None:
        if self._config.item_set_dir is None:
            return
        try:
            names, self._missed = published.sets_in(self._config.item_set_dir), ""
        except ItemSetError as error:
            if str(error) != self._missed:
                self._missed = str(error)
                self._log.warning("Item sets stay as they are: %s", error)
            return
        for name in names - self._sets.keys():
            self._sets[name] = Followed(self._path)
        for name in self._sets.keys() - names - self._config.item_sets.keys():
            del self._sets[name]
            closed = self._checks.catalogue.drop(name)
            self._ask(Drop(name))
            metrics.served(name, None)
            self._delete_copies(closed)
            self._log.info("Item set %r is no longer there, and no longer served", name)

    def _look_at(self, name: str) -> None:
        """Take up the current version of a set, unless it is served or was refused."""
        followed, catalogue = self._sets[name], self._checks.catalogue
        failed: published.Version | None = None
        while catalogue.follows(name):
            try:
                version = published.current(self._config.where(name))
            except ItemSetError as error:  # of a folder that is away: when it is back, its version is tried again
                if str(error) != followed.missed:
                    followed.missed = str(error)
                    metrics.REFUSED_VERSIONS.labels(name).inc()
                    state = "stays as it is" if catalogue.serving.get(name) else "is not served"
                    self._log.warning("Item set %r %s: %s", name, state, error)
                return
            followed.missed = ""
            if (current := catalogue.serving.get(name)) is not None and current.version == version.name:
                followed.refused = None
                return
            if version == followed.refused:
                return
            if failed == version:  # else another one became current meanwhile
                followed.refused = version
                self._delete_copies([])
                metrics.REFUSED_VERSIONS.labels(name).inc()
                self._log.error("Version %s of the item set %r is not served: %s", version.name, name, followed.why)
                return
            try:
                self._take_up(name, version)
                followed.refused = None
                return
            except ItemSetError as error:
                failed, followed.why = version, str(error)
                self._superseded.add(version.name)  # its copy is here, also if another becomes current meanwhile

    def _take_up(self, name: str, version: published.Version) -> None:
        """Have the version opened here and in the engines, and let requests get it.

        Raises ItemSetError if it cannot be had, or another became current: front ends ask engines for one version.
        """
        catalogue, followed, began = self._checks.catalogue, self._sets[name], time.monotonic()
        message = Prepare(name, version.name, str(version.path))
        opened = self._checks.open(name, version.name, version.path)
        while True:
            answers = self._ask(message)
            if refused := next((answer.refused for answer in answers if answer.refused), None):
                raise ItemSetError(refused)
            stages = {answer.stage for answer in answers}
            if all(stage.is_ready for stage in stages):
                break
            if Stage.OPENING in stages:
                time.sleep(AGAIN)
            newest = version
            with suppress(ItemSetError):
                newest = published.current(self._config.where(name))
            if newest != version:
                raise ItemSetError("another version became current")
        self._superseded.discard(version.name)
        self._delete_copies(catalogue.serve(opened))
        followed.since, followed.path = datetime.now(UTC), "host" if Stage.HOST in stages else "device"
        metrics.served(name, version.name)
        items, seconds = f"{len(opened.item_set):,}", time.monotonic() - began
        text = "Version %s of the item set %r is served: %s items, %.2f s after it was noticed"
        self._log.info(text, version.name, name, items, seconds)

    def _delete_copies(self, versions: Iterable[str]) -> None:
        """Delete this machine's copies of these versions, and of earlier ones, once nobody has them open."""
        self._superseded.update(versions)
        self._superseded -= delete_unused(self._config.item_set_cache, self._superseded)
