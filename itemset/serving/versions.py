"""Which versions of each registered set a process has open, and which one requests get.

A version's life: `begin` opens it on a thread, `serve` makes it the current one, and the second `serve` after that (or
`drop`) forgets it. The version before the current one stays open, so that a rollback opens nothing. A request carries
its version in its reference, and what it holds lives for as long as it does.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.select.filters import passing
from itemset.select.views import view
from itemset.serving.config import StaticConfig
from itemset.serving.private_copies import Seal, open_copy
from itemset.serving.wire import VERSION, Prepare, version_of, version_reference

ROUNDING = 128  # bytes of an arena that an array, or a set, takes more at most
_KEPT = 2  # versions of a set that stay open


@dataclass(frozen=True, eq=False)
class Opened:
    """A version of a registered set that this process has open. sets: it and the views of it, by name."""

    name: str
    version: str
    sets: Mapping[str, ItemSet]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in an arena, at most."""
        own = [array.nbytes + ROUNDING for item_set in self.sets.values() for array in item_set.resident.values()]
        return sum(own) + ROUNDING * len(self.sets)

    def reference(self, name: str) -> str:
        """How a request carries this version of the set, or of a view of it."""
        return version_reference(self.version, name)


class Versions:
    """The open versions of registered sets. Safe for threads.

    serving: the current version of each set. registered: the current sets and views by name. Both are new objects
    whenever that changes.
    """

    def __init__(self, config: StaticConfig) -> None:
        self._config = config
        self._bases = {name: base for name, (base, _) in config.views.items()}
        self.serving: tuple[Opened, ...] = ()
        self.registered: Mapping[str, ItemSet] = {}
        self._current: Mapping[str, Opened] = {}  # by the names of sets and views
        self._open: dict[str, list[Opened]] = {}  # by set: those that stay open, the current one last
        self._opening: dict[tuple[str, str], Future[Opened]] = {}  # by set and version: begun, and not served yet
        self._known: WeakValueDictionary[str, ItemSet] = WeakValueDictionary()  # by reference
        self._thread = ThreadPoolExecutor(1, "item-set-versions")
        self._lock = threading.RLock()

    def open(
        self, name: str, version: str | None, path: str | Path | None, seal: Seal | None = None, make_views: bool = True
    ) -> Opened:
        """Open a version of a set and make its views, which may take seconds.

        version, path, seal: as for `open_copy`. make_views: else only judge their queries, and let the set stand for
        them. Raises ItemSetError as `open_copy` does, and for a view that cannot be made.
        """
        try:
            item_set = self._known.get(version_reference(version or "", name))
            if item_set is None or version is None:
                item_set, version = open_copy(path, self._config.item_set_cache, version, seal)
        except ItemSetError as error:
            raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
        sets = {name: item_set}
        for view_name, (base, query) in self._config.views.items():
            if base not in sets:
                continue
            try:
                sets[view_name] = view(sets[base], query) if make_views else sets[base]
                if not make_views:
                    passing(query, sets[base].attributes.slice(0, 0))
            except ItemSetError as error:
                raise ItemSetError(f"the item view {view_name!r} cannot be made: {error}") from error
        opened = Opened(name, version, sets)
        with self._lock:
            self._known |= {opened.reference(name): item_set for name, item_set in sets.items()}
        return opened

    def begin(self, message: Prepare, check: Callable[[ItemSet], object]) -> Opened | None:
        """Return the version once it is open, and until then None: a thread opens it, and checks the set and each view.

        Raises ItemSetError as `open` and `check` do, once.
        """
        key = name, version = message.name, message.version

        def work() -> Opened:
            opened = self.open(name, version, message.path, seal=message.seal)
            for item_set in opened.sets.values():
                check(item_set)
            return opened

        with self._lock:
            for opened in self._open.get(name, ()):
                if opened.version == version:
                    return opened
            if key not in self._opening:
                for other in [one for one in self._opening if one[0] == name and self._opening[one].done()]:
                    del self._opening[other]  # it was never served
                self._opening[key] = self._thread.submit(work)
            elif self._opening[key].done():
                future = self._opening[key]
                if future.exception() is not None:
                    del self._opening[key]  # another time it may be well
                return future.result()
        return None

    def begun(self, name: str, version: str) -> Opened | None:
        """Return a version that `begin` has opened, None if there is none."""
        with self._lock:
            future = self._opening.get((name, version))
            return future.result() if future and future.done() and not future.exception() else None

    def serve(self, opened: Opened) -> list[str]:
        """Make this the current version of its set and its views. Return the versions of it that are forgotten."""
        with self._lock:
            before = [one for one in self._open.get(opened.name, ()) if one.version != opened.version]
            self._open[opened.name] = [*before[1 - _KEPT :], opened]
            self._opening.pop((opened.name, opened.version), None)
            self._update()
        return [one.version for one in before[: 1 - _KEPT]]

    def drop(self, name: str) -> list[str]:
        """Forget a set. Return its versions."""
        with self._lock:
            closed = self._open.pop(name, [])
            for key in [key for key in self._opening if key[0] == name]:
                del self._opening[key]
            self._update()
        return [one.version for one in closed]

    def _update(self) -> None:
        self.serving = tuple(versions[-1] for versions in self._open.values())
        self._current = {name: opened for opened in self.serving for name in opened.sets}
        self.registered = {name: opened.sets[name] for name, opened in self._current.items()}

    def open_sets(self) -> set[str]:
        """Return the digests of the sets, not of views, whose versions stay open."""
        with self._lock:
            return {one.sets[one.name].digest for versions in self._open.values() for one in versions}

    def is_closed(self, reference: str) -> bool:
        """Return whether this is the reference of a version that does not stay open."""
        version, name = version_of(reference)
        if not version:
            return False
        with self._lock:
            return all(one.version != version for one in self._open.get(self.of(name), ()))

    def current(self, name: str) -> Opened | None:
        """Return the version that requests for this set, or view, get; None if there is no such name."""
        return self._current.get(name)

    def of(self, name: str) -> str:
        """Return the set that this is, or is a view of."""
        while name in self._bases:
            name = self._bases[name]
        return name

    def known(self, reference: str) -> ItemSet | None:
        """Return what `get` returns, but open nothing."""
        item_set = self._known.get(reference)
        return self.registered.get(reference) if item_set is None else item_set

    def get(self, reference: str) -> ItemSet | None:
        """Return the set of a reference or a name, None if this process cannot have it."""
        if (item_set := self.known(reference)) is not None or not reference.startswith(VERSION):
            return item_set
        version, name = version_of(reference)
        try:  # closed here, while a request elsewhere has held it: this machine has a copy then
            return self.open(self.of(name), version, None).sets.get(name)
        except ItemSetError:
            return None
