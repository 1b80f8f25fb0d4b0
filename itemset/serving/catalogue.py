"""The item sets of a process: registered ones by name, inline ones and parts of sets by a digest."""

import difflib
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from itemset import published
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.opening import from_bytes
from itemset.select.views import view_from_bytes
from itemset.serving.config import StaticConfig
from itemset.serving.private_copies import delete_unused
from itemset.serving.startup import opening
from itemset.serving.versions import Opened, Versions
from itemset.serving.wire import SetRef, part_of, version_of, whole_of
from itemset.storage import is_uri

OVERHEAD = 4_000  # bytes of Python objects around an open set, as measured: docs/serving.md


class RefusedError(ItemSetError):
    """One request cannot be served. reason: its label in the metrics. param: the field at fault, None for its set."""

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.param = reason, param


@dataclass(frozen=True, eq=False)
class InlineSet:
    """A set that came with its request, in whose place it then stands: texts, or a part of a registered set.

    reference: what the request carries through the engine. index: its index file, or a view's own arrays. item_set:
    opened over these same bytes. nbytes: of all of it in this process. filter: the one that exclusions stand on.
    """

    reference: str
    index: bytes = field(repr=False)
    item_set: ItemSet
    nbytes: int
    filter: "InlineSet | None" = None

    @classmethod
    def from_index(
        cls, reference: str, index: bytes, base: ItemSet | None = None, *, token_ids: bool = False, **more: Any
    ) -> Self:
        """base: of which it is a part. token_ids: find them now, in a process that asks what occurs in the set. more:
        fields. Raises ItemSetError as `from_bytes` does."""
        if base is None:
            item_set = from_bytes(index, reference)
            item_set.in_order = True  # a process of this server built it, and its checksums hold
        else:
            item_set = view_from_bytes(base, index, reference)
        nbytes = len(index) + OVERHEAD + (item_set.token_ids.nbytes if token_ids else 0)
        return cls(reference, index, item_set, nbytes, **more)

    @property
    def own_filter(self) -> "InlineSet | None":
        """The filter that it is or stands on."""
        return self if "alive" in self.item_set.own else self.filter

    @property
    def ref(self) -> SetRef:
        """What a request with this set carries: requests with equal sets then share its bytes."""
        below = self.own_filter
        return SetRef(self.reference, None if below is self else self.index, None if below is None else below.index)


class Catalogue(Versions):
    """Maps a reference, as a request carries it, to its item set. Safe for threads.

    What came with requests is kept until newer sets need the room, and known for as long as anybody holds it.
    """

    def __init__(self, config: StaticConfig) -> None:
        """Open every registered set from its private copy. Raises ItemSetError as `private_copies.open_copy` and
        `published.current` do."""
        super().__init__(config)
        self._inline: OrderedDict[str, InlineSet] = OrderedDict()
        self.inline_bytes = 0  # of what came with requests and is cached
        self._held: WeakValueDictionary[str, InlineSet] = WeakValueDictionary()
        self._files = {name for name in config.item_sets if not os.path.isdir(where(config, name))}
        for name, (version, path) in at_start(config).items():
            self.serve(self.open(name, version, path))
        _check_bases(config, self.registered)

    def __getitem__(self, reference: str) -> ItemSet:
        """Do `get`. Raises RefusedError if this process cannot have the set."""
        if (item_set := self.get(reference)) is None:
            raise self.unknown(reference)
        return item_set

    def known(self, reference: str) -> ItemSet | None:
        inline = self.inline(reference)
        return inline.item_set if inline else super().known(reference)

    def reference(self, name: str) -> str:
        """Return the reference of what a request for this set or view gets. Raises RefusedError if there is none."""
        # To look a name up takes its time, of a name of megabytes too long.
        known = len(name) <= max(map(len, self.registered), default=0)
        if (opened := self.current(name) if known else None) is None:
            raise self.unknown(name)
        return opened.reference(name)

    def version_fields(self, reference: str) -> dict[str, str]:
        """Return what an answer says of its set: of one that is followed, its version."""
        version, name = version_of(reference)
        return {"item_set_version": version} if version and self.follows(self.of(name)) else {}

    def follows(self, name: str) -> bool:
        """Return whether this is a published set, which may change, and no file."""
        return name not in self._files

    def serve(self, opened: Opened) -> list[str]:
        """Do `Versions.serve`, and forget the parts of what it returns."""
        return self._forget(super().serve(opened))

    def drop(self, name: str) -> list[str]:
        """Do `Versions.drop`, and forget the parts of what it returns."""
        return self._forget(super().drop(name))

    def _forget(self, versions: list[str]) -> list[str]:
        with self._lock:
            for reference in [one for one in self._inline if version_of(one)[0] in versions]:
                self.inline_bytes -= self._inline.pop(reference).nbytes
        return versions

    def headroom(self) -> int:
        """Bytes of an arena for a next version of a followed set beside the present one."""
        if (given := self._config.item_set_headroom) is not None:
            return given
        return max((one.nbytes for one in self.serving if self.follows(one.name)), default=0)

    def inline(self, reference: str) -> InlineSet | None:
        """Return what came with a request, None if it is no longer here."""
        with self._lock:
            if reference in self._inline:
                self._inline.move_to_end(reference)
            return self._held.get(reference)

    def keep(self, inline_set: InlineSet) -> InlineSet:
        """Cache an inline set, in place of the least recently used ones if room is short. Return it, or its equal here.

        A part of a version that is closed by now is not cached, but known for as long as somebody holds it.
        """
        with self._lock:
            if inline_set.reference in self._inline:
                return self._inline[inline_set.reference]
            self._held[inline_set.reference] = inline_set
            if self.is_closed(whole_of(inline_set.reference)):
                return inline_set
            self._inline[inline_set.reference] = inline_set
            self.inline_bytes += inline_set.nbytes
            while self.inline_bytes > self._config.inline_set_host_memory and len(self._inline) > 1:
                self.inline_bytes -= self._inline.popitem(last=False)[1].nbytes
            return inline_set

    def unknown(self, reference: str) -> RefusedError:
        """Return the error for a name that no set has, or a version. Its work does not grow with the name."""
        version, name = version_of(reference)
        if version:
            called = f"version {version[:12]} of item set {name!r}"
            return RefusedError("unknown set", f"{called} is no longer loaded: retry the request")
        names = sorted(self.registered)
        # A comparison takes its time, and a name of twice the length is not alike.
        alike = difflib.get_close_matches(reference[: 2 * max(map(len, names), default=0)], names, 1)
        if alike:
            hint = f"did you mean {alike[0]!r}?"
        elif names:
            hint = "it has " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        else:
            hint = "this server has none, start it with --item-set NAME=FILE"
        return RefusedError("unknown set", f"no item set is called {shown(reference)}: {hint}")


def where(config: StaticConfig, name: str) -> Path | str:
    """Return the file of a set or its URI, or the folder of a published one."""
    given = config.item_sets.get(name) or Path(config.item_set_dir or "", name)
    return str(given) if is_uri(given) else Path(given).expanduser()


def at_start(config: StaticConfig) -> dict[str, tuple[str | None, Path | str]]:
    """Return the version and the file of each set that a process begins with; None for the file's own version.

    Raises ItemSetError as `published.current` does.
    """
    versions, in_folder = config.item_set_versions, set[str]()
    if versions is not None:
        in_folder = {*versions}
    elif config.item_set_dir is not None:
        in_folder = published.sets_in(config.item_set_dir)
    sets: dict[str, tuple[str | None, Path | str]] = {}
    for name in (*config.item_sets, *sorted(in_folder - config.item_sets.keys() - config.item_views.keys())):
        path, version = where(config, name), versions[name] if versions is not None else None
        if os.path.isdir(path) or (version is not None and name not in config.item_sets):
            try:
                version = version or published.current(path).name
            except ItemSetError as error:
                raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
            path = published.file_of(path, version)
        sets[name] = version, path
    return sets


def with_versions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plugin's options with the versions of their sets: the process that starts an engine decides them.

    Views are judged, not made. Raises ItemSetError as `StaticConfig.of` does, for a set that cannot be opened, and for
    a view of none or whose query does not go with its set's attributes.
    """
    config = StaticConfig.of(options)
    if config.item_set_versions is not None or not (config.item_sets or config.item_set_dir):
        return dict(options)
    versions = Versions(config)
    with opening():
        opened = [versions.open(name, *file, make_views=False) for name, file in at_start(config).items()]
    _check_bases(config, {name for one in opened for name in one.sets})
    if opened:
        delete_unused(config.item_set_cache)
    return {**options, "item_set_versions": {one.name: one.version for one in opened}}


def _check_bases(config: StaticConfig, registered: Collection[str]) -> None:
    """Raises ItemSetError for a view of no set, unless that may come."""
    for name, (base, _) in config.views.items():
        if name not in registered and config.item_set_dir is None:
            raise ItemSetError(f"the item view {name!r} is of {base!r}, and no item set is called so: register it")


def set_ref(catalogue: Catalogue, reference: str) -> SetRef:
    """Return what a request with this set carries.

    An engine may have forgotten any set that came with a request, so each request brings all of its own.
    """
    inline = catalogue.inline(reference)
    return SetRef(reference) if inline is None else inline.ref


def receive(catalogue: Catalogue, ref: SetRef) -> InlineSet | None:
    """Return the set that came with a request, opened unless the catalogue has it; None for a registered one.

    Raises ItemSetError as `InlineSet.from_index` does.
    """
    below, of = None, part_of(ref.reference)
    if ref.filter is not None:
        name = ref.reference if ref.index is None else of
        below = catalogue.inline(name)
        below = below or catalogue.keep(InlineSet.from_index(name, ref.filter, catalogue[part_of(name)]))
    if ref.index is None:
        return below
    if kept := catalogue.inline(ref.reference):
        return kept
    base = catalogue.get(of) if below is None else below.item_set
    return catalogue.keep(InlineSet.from_index(ref.reference, ref.index, base, filter=below))


def receive_set(catalogue: Catalogue, ref: SetRef) -> ItemSet:
    """Return the set of a request. Raises ItemSetError as `receive` does, and for a set that is not known."""
    inline = receive(catalogue, ref)
    return inline.item_set if inline else catalogue[ref.reference]


def open_set(catalogue: Catalogue, ref: SetRef, below: ItemSet | None) -> ItemSet:
    """Return the set of a request, for a worker, which keeps none of those that came with requests.

    below: the filter that the set stands on, if its bits came before. Raises ItemSetError as `InlineSet.from_index`
    does, and for a version of a set that is no longer loaded.
    """
    of = part_of(ref.reference)
    if ref.filter is not None:
        name = ref.reference if ref.index is None else of
        below = InlineSet.from_index(name, ref.filter, catalogue[part_of(name)]).item_set
    if ref.index is not None:
        return InlineSet.from_index(ref.reference, ref.index, catalogue.get(of) or below).item_set
    return catalogue[ref.reference] if ref.filter is None or below is None else below
