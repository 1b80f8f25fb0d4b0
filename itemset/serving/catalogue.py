"""The item sets of a process: registered ones by name and version, inline ones and parts of sets by a digest.

A version's life is in `engine.version_rollout`. The one before the current stays open: a rollback opens nothing. A
request carries its version in its reference, and what it holds lives for as long as it does.
"""

import difflib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.masking.arena_plan import arena_bytes
from itemset.opening import from_bytes
from itemset.select.prompt_items import TextIndex
from itemset.select.views import view_from_bytes
from itemset.serving.config import StaticConfig
from itemset.serving.private_copies import delete_unused, open_copy
from itemset.serving.wire import FORM, VERSION, Prepare, SetRef, part_of, version_of

OVERHEAD = 4_000  # bytes of Python objects around an open set, as measured: docs/sets.md
_ROUNDING = 128  # bytes of an arena that an array, or a set, takes more at most
_LONGEST = 1_000  # characters that are looked at of a reference that a client may have made up
_KEPT = 2  # versions of a set that stay open


class RefusedError(ItemSetError):
    """One request cannot be served. reason: its label in the metrics. param: the field at fault, None for its set."""

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.param = reason, param


@dataclass(frozen=True, eq=False)
class Opened:
    """A version of a registered set that this process has open."""

    name: str
    version: str
    item_set: ItemSet

    @property
    def reference(self) -> str:
        """Return how a request carries this version of the set."""
        return f"{VERSION}{self.version}@{self.name}"


@dataclass(frozen=True, eq=False)
class InlineSet:
    """The set of a request, in whose place it then stands: a registered one, or one that came with requests."""

    reference: str  # what the request carries through the engine
    item_set: ItemSet  # opened over the same bytes as the next
    # Of texts the index file, of a part of another set the view's own arrays; None of a registered set.
    index: bytes | None = field(default=None, repr=False)
    nbytes: int = 0  # of all that came, in this process
    base: "InlineSet | None" = None  # the filter that it stands on
    texts: TextIndex | None = None  # in place of all that, what finds its items in texts

    @classmethod
    def from_index(
        cls, reference: str, index: bytes, below: ItemSet | None = None, *, token_ids: bool = False,
        base: "InlineSet | None" = None,
    ) -> Self:  # fmt: skip
        """below: of which it is a part. token_ids: find them now. Raises ItemSetError as `from_bytes` does."""
        if below is None:
            item_set = from_bytes(index, reference)
            item_set.in_order = True  # a process of this server built it, and its checksums hold
        else:
            item_set = view_from_bytes(below, index, reference)
        nbytes = len(index) + OVERHEAD + (item_set.token_ids.nbytes if token_ids else 0)
        return cls(reference, item_set, index, nbytes, base)

    @property
    def ref(self) -> SetRef:
        """Return what a request with this set carries: requests with equal sets then share its bytes."""
        return SetRef(self.reference, self.index, None if self.base is None else self.base.ref)


def alike(name: str, names: Collection[str]) -> str | None:
    """Return the one of some names that is most like another one, None if none is."""
    # A comparison takes its time, and a name of twice the length is not alike.
    return next(iter(difflib.get_close_matches(name[: 2 * max(map(len, names), default=0)], names, 1)), None)


class Catalogue:
    """Maps a reference, as a request carries it, to its item set. Safe for threads.

    What came with requests is kept until newer sets need the room, and known for as long as anybody holds it.
    """

    def __init__(self, config: StaticConfig) -> None:
        """Open every registered set from its private copy. Raises ItemSetError as `open` and `StaticConfig.at_start`
        do, but for a set of `item_set_dir`: that is not served."""
        self._config = config
        self._files = {name for name in config.item_sets if not os.path.isdir(config.where(name))}
        self.serving: Mapping[str, Opened] = {}  # the current version of each registered set, which requests get
        self.registered: Mapping[str, ItemSet] = {}  # these sets. Both are new objects whenever that changes
        self._open: dict[str, list[Opened]] = {}  # by set: those that stay open, the current one last
        self._opening: dict[tuple[str, str], Future[Opened]] = {}  # by set and version: begun, and not served yet
        self._known: WeakValueDictionary[str, ItemSet] = WeakValueDictionary()  # registered ones, by reference
        self._inline: OrderedDict[str, InlineSet] = OrderedDict()
        self.inline_bytes = 0  # of what came with requests and is cached
        self._held: WeakValueDictionary[str, InlineSet] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, "item-set-versions")
        self._lock = threading.RLock()
        for name, (version, path) in config.at_start().items():
            try:
                self.serve(self.open(name, version, path))
            except ItemSetError as error:
                if config.item_set_versions is not None:
                    raise  # the process that has chosen them serves this one
                config.left_out(name, error)

    # Versions of registered sets

    def open(self, name: str, version: str | None, path: str | Path | None) -> Opened:
        """Open a version of a set, which may take seconds. version, path: as for `open_copy`. Raises as that does."""
        try:
            item_set = self._known.get(f"{VERSION}{version}@{name}")
            if item_set is None or version is None:
                item_set, version = open_copy(path, self._config.item_set_cache, version)
        except ItemSetError as error:
            raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
        opened = Opened(name, version, item_set)
        with self._lock:
            self._known[opened.reference] = item_set
        return opened

    def begin(self, message: Prepare, check: Callable[[ItemSet], object]) -> Opened | None:
        """Return the version once a thread has opened and checked it; None until then. Raises as these do, once."""
        key = name, version = message.name, message.version

        def work() -> Opened:
            opened = self.open(name, version, message.path)
            check(opened.item_set)
            return opened

        with self._lock:
            if (opened := self.begun(name, version)) is not None:
                return opened
            if (future := self._opening.get(key)) is None:
                for other in [one for one in self._opening if one[0] == name and self._opening[one].done()]:
                    del self._opening[other]  # it was never served
                self._opening[key] = self._thread.submit(work)
            elif future.done():
                del self._opening[key]  # another time it may be well
                future.result()
        return None

    def begun(self, name: str, version: str) -> Opened | None:
        """Return a version that is open, served or not; None if there is none."""
        with self._lock:
            for opened in self._open.get(name, ()):
                if opened.version == version:
                    return opened
            future = self._opening.get((name, version))
            return future.result() if future and future.done() and not future.exception() else None

    def serve(self, opened: Opened) -> list[str]:
        """Make this the current version of its set. Return the versions of it that are forgotten."""
        with self._lock:
            before = [one for one in self._open.get(opened.name, ()) if one.version != opened.version]
            self._open[opened.name] = [*before[1 - _KEPT :], opened]
            self._opening.pop((opened.name, opened.version), None)
            if closed := before[: 1 - _KEPT]:  # on machines without a front end nobody else deletes copies
                self._thread.submit(delete_unused, self._config.item_set_cache)
            return self._forget(closed)

    def drop(self, name: str) -> list[str]:
        """Forget a set. Return its versions."""
        with self._lock:
            self._opening = {key: one for key, one in self._opening.items() if key[0] != name}
            return self._forget(self._open.pop(name, []))

    def _forget(self, closed: list[Opened]) -> list[str]:
        """Note which versions are current, and forget the parts of closed ones. Return these versions."""
        versions = [one.version for one in closed]
        for reference in [one for one in self._inline if version_of(one)[0] in versions]:
            self.inline_bytes -= self._inline.pop(reference).nbytes
        self.serving = {name: opened[-1] for name, opened in self._open.items()}
        self.registered = {name: opened.item_set for name, opened in self.serving.items()}
        return versions

    def open_sets(self) -> set[str]:
        """Return the digests of the sets whose versions stay open."""
        with self._lock:
            return {one.item_set.digest for opened in self._open.values() for one in opened}

    def follows(self, name: str) -> bool:
        """Return whether this is a published set, which may change, and no file."""
        return name not in self._files

    def arena_bytes(self) -> int:
        """Bytes of an arena: for the registered sets, for inline ones, and for a next version of a followed set."""
        headroom = self._config.item_set_headroom
        if headroom is None:
            followed = [one.resident.values() for name, one in self.registered.items() if self.follows(name)]
            sizes = (sum(array.nbytes + _ROUNDING for array in arrays) + _ROUNDING for arrays in followed)
            headroom = max(sizes, default=0)
        return arena_bytes(self.registered.values(), self._config.inline_set_memory + headroom)

    # References

    def __getitem__(self, reference: str) -> ItemSet:
        """Return the set of a reference or a name. Raises RefusedError if this process cannot have it."""
        item_set, (version, name) = self.known(reference), version_of(reference)
        with suppress(ItemSetError):  # closed here, while a request elsewhere has held it: there is a copy then
            if item_set is None and reference.startswith(VERSION):
                item_set = self.open(name, version, None).item_set
            elif item_set is None and reference.startswith(FORM):
                form = reference.removeprefix(FORM).partition("@")[0]
                item_set, _ = open_copy(None, self._config.item_set_cache, form)
                self.keep(InlineSet(reference, item_set, nbytes=OVERHEAD))  # its file is mapped
        if item_set is None:
            raise self.unknown(reference)
        return item_set

    def known(self, reference: str) -> ItemSet | None:
        """Return the set of a reference or a name, but open nothing."""
        if (inline := self.inline(reference)) is not None:
            return inline.item_set
        item_set = self._known.get(reference)
        return self.registered.get(reference) if item_set is None else item_set

    def reference(self, name: str) -> str:
        """Return the reference of what a request for this set gets. Raises RefusedError if there is none."""
        # To look a name up takes its time, of a name of megabytes too long.
        known = len(name) <= max(map(len, self.registered), default=0)
        if (opened := self.serving.get(name) if known else None) is None:
            raise self.unknown(name)
        return opened.reference

    def version_fields(self, reference: str) -> dict[str, str]:
        """Return what an answer says of its set: of one that is followed, its version."""
        version, name = version_of(reference)
        return {"item_set_version": version} if version and self.follows(name) else {}

    def unknown(self, reference: str) -> RefusedError:
        """Return the error for a name that no set has, or a version. Its work does not grow with the name."""
        version, name = version_of(reference[:_LONGEST])
        if version:
            called = f"version {version[:12]} of item set {shown(name)}"
            return RefusedError("unknown set", f"{called} is no longer loaded: retry the request")
        names = sorted(self.registered)
        if meant := alike(reference, names):
            hint = f"did you mean {meant!r}?"
        elif names:
            hint = "it has " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        else:
            hint = "this server has none, start it with --item-set NAME=FILE"
        return RefusedError("unknown set", f"no item set is called {shown(reference)}: {hint}")

    # Sets that come with requests

    def inline(self, reference: str) -> InlineSet | None:
        """Return what came with a request, None if it is no longer here."""
        with self._lock:
            if reference in self._inline:
                self._inline.move_to_end(reference)
            return self._held.get(reference)

    def made(self, reference: str) -> InlineSet:
        """Return the set of a request. Raises RefusedError if this process cannot have it."""
        return self.inline(reference) or InlineSet(reference, self[reference])

    def keep(self, inline_set: InlineSet) -> InlineSet:
        """Cache an inline set, in place of the least recently used ones if room is short. Return it, or its equal here.

        A part of a version that is closed by now is not cached, but known for as long as somebody holds it.
        """
        with self._lock:
            if inline_set.reference in self._inline:
                return self._inline[inline_set.reference]
            self._held[inline_set.reference] = inline_set
            version, name = version_of(inline_set.reference)
            if version and all(one.version != version for one in self._open.get(name, ())):
                return inline_set
            self._inline[inline_set.reference] = inline_set
            self.inline_bytes += inline_set.nbytes
            while self.inline_bytes > self._config.inline_set_host_memory and len(self._inline) > 1:
                self.inline_bytes -= self._inline.popitem(last=False)[1].nbytes
            return inline_set

    def receive(self, ref: SetRef, below: ItemSet | None = None, *, keep: bool = True) -> InlineSet:
        """Return the set of a request, opened unless it is here.

        An engine may have forgotten any set that came with a request, so each request brings all of its own. below: of
        which it is a part, if that came before. keep: whether other requests find here what this one has brought.
        Raises ItemSetError as `InlineSet.from_index` does, and for a set that is not known.
        """
        base = None if ref.base is None else self.receive(ref.base, keep=keep)
        if ref.index is None:
            return self.made(ref.reference)
        if (kept := self.inline(ref.reference)) is not None:
            return kept
        below = below if base is None else base.item_set
        if below is None and (of := part_of(ref.reference)).startswith((FORM, VERSION)):
            below = self[of]
        made = InlineSet.from_index(ref.reference, ref.index, below, base=base)
        return self.keep(made) if keep else made


def with_versions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with their sets' versions, for all processes. Raises ItemSetError as `Catalogue` does."""
    config = StaticConfig.of(options)
    if config.item_set_versions is not None or not (config.item_sets or config.item_set_dir):
        return dict(options)
    serving = Catalogue(config).serving
    if serving:
        delete_unused(config.item_set_cache)
    return {**options, "item_set_versions": {name: one.version for name, one in serving.items()}}
