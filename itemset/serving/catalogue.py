"""The item sets one process knows: the registered ones by name, the inline ones by what they hold."""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from itemset import published
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet, from_bytes
from itemset.serving.config import StaticConfig
from itemset.serving.held import delete_unused
from itemset.serving.versions import VERSION, Versions
from itemset.views import view_from_bytes

INLINE = "inline:"
VIEW = "view:"
INLINE_BYTES = 256 << 20  # of inline sets kept for their next request, as `InlineSet.nbytes` counts them
OVERHEAD = 4_000  # bytes of Python objects around an open set, as measured: docs/serving.md


class RefusedError(ItemSetError):
    """One request cannot be served as it is.

    reason: a few words for the metrics, the same for all like it. param: the field at fault, None if that is its set.
    """

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.param = reason, param


@dataclass(frozen=True, eq=False)
class InlineSet:
    """A set that came with its request: as texts, or as what is left of a registered set. In the request it then stands
    in their place.

    reference: what the request carries through the engine. index: its index file in memory. item_set: opened over
    these same bytes, so that they are there once. nbytes: what all of it takes in this process.
    """

    reference: str
    index: bytes = field(repr=False)
    item_set: ItemSet
    nbytes: int

    @classmethod
    def opened(
        cls, reference: str, index: bytes, registered: Mapping[str, ItemSet] | None = None, *, token_ids: bool = False
    ) -> InlineSet:
        """registered: by name, for what is left of one of them. token_ids: find them now, in a process that asks what
        occurs in the set. Raises ItemSetError as `from_bytes` does."""
        base = (registered or {}).get(name_of(reference))
        item_set = from_bytes(index, reference) if base is None else view_from_bytes(base, index, reference)
        found = item_set.token_ids.nbytes if token_ids else 0
        return cls(reference, index, item_set, len(index) + found + OVERHEAD)

    def __deepcopy__(self, memo: Any) -> InlineSet:
        """Engines copy a request's parameters; this is immutable."""
        return self


class Catalogue:
    """Maps a reference, as a request carries it, to its item set. Safe for threads.

    A reference is the name of a registered set or view; INLINE and a digest for texts that came with a request; or
    VIEW, a digest, @ and a name for what is left of a registered one. What came with requests is kept until newer sets
    need the room, and known for as long as anybody holds it.
    """

    def __init__(self, config: StaticConfig) -> None:
        """Open every registered set, from the private copy that `held.open_copy` makes; raises ItemSetError as it does,
        and as `published.current` does.

        Where the configuration names no versions, this is the process that starts the engine: `versions` is what the
        configuration of all others must carry, so that they open the same, whatever happens to the files meanwhile.
        """
        self._config, self.versions = config, Versions(config)
        for name, (version, path) in at_start(config).items():
            self.versions.serve(self.versions.open(name, version, path))
        for name, (base, _) in config.views.items():
            if name not in self.registered and config.item_set_dir is None:
                raise ItemSetError(
                    f"the item view {name!r} is of {base!r}, and no item set is called so: register it"
                )
        if self.registered and not config.item_set_versions:
            delete_unused(config.item_set_cache)
        self._inline: OrderedDict[str, InlineSet] = OrderedDict()
        self._inline_bytes = 0
        self._held: WeakValueDictionary[str, InlineSet] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __getitem__(self, reference: str) -> ItemSet:
        """Raises RefusedError for a reference that is not known."""
        item_set = self.get(reference)
        if item_set is not None:
            return item_set
        raise self.unknown(reference)

    def get(self, reference: str) -> ItemSet | None:
        if (item_set := self.versions.get(reference)) is not None:
            return item_set
        kept = self.inline(reference)
        return kept.item_set if kept else None

    @property
    def registered(self) -> Mapping[str, ItemSet]:
        """What requests get for each name, a set or a view: another mapping whenever that changes."""
        return self.versions.registered

    def reference(self, name: str) -> str:
        """Return the reference of what a request for this set or view gets. Raises RefusedError if there is none."""
        try:
            return self.versions.current(name).reference(name)
        except KeyError:
            raise self.unknown(name) from None

    def headroom(self) -> int:
        """Bytes of an arena for a next version of a followed set beside the present one."""
        given, followed = self._config.item_set_headroom, self._config.follows
        if given is not None or not followed:
            return given or 0
        opened = {self.versions.current(name) for name in self.registered}
        return max((one.nbytes for one in opened if where(self._config, one.name).is_dir()), default=0)

    def inline(self, reference: str) -> InlineSet | None:
        """An inline set, if it is still here."""
        with self._lock:
            if reference in self._inline:
                self._inline.move_to_end(reference)
            return self._held.get(reference)

    def keep(self, inline_set: InlineSet) -> InlineSet:
        """Keep an inline set; the least recently used ones go if room is short. Returns it, or the equal one kept."""
        with self._lock:
            if inline_set.reference in self._inline:
                return self._inline[inline_set.reference]
            self._inline[inline_set.reference] = self._held[inline_set.reference] = inline_set
            self._inline_bytes += inline_set.nbytes
            while self._inline_bytes > INLINE_BYTES and len(self._inline) > 1:
                _, dropped = self._inline.popitem(last=False)
                self._inline_bytes -= dropped.nbytes
            return inline_set

    def kept(self, reference: str, index: bytes) -> InlineSet:
        """Return the set that came with a request, opened unless it is here. Raises as `InlineSet.opened` does."""
        return self.inline(reference) or self.keep(InlineSet.opened(reference, index, self.registered))

    def unknown(self, reference: str) -> RefusedError:
        """What to say of a name that no registered set has. Its work does not grow with the name."""
        return RefusedError("unknown set", f"no item set is called {shown(reference)}: {self._known(reference)}")

    def _known(self, reference: str) -> str:
        if not self.registered:
            return "this server has none, start it with --item-set NAME=FILE"
        names = sorted(self.registered)
        # A comparison takes its time, and a name of twice the length is not alike.
        alike = difflib.get_close_matches(reference[: 2 * max(map(len, names))], names, 1)
        if alike:
            return f"did you mean {alike[0]!r}?"
        return "it has " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def where(config: StaticConfig, name: str) -> Path:
    """Return the file of a set, or the folder of a published one."""
    return Path(config.item_sets.get(name) or Path(config.item_set_dir or "", name)).expanduser()


def at_start(config: StaticConfig) -> dict[str, tuple[str | None, Path]]:
    """Return the sets that a process begins with: their versions, None for that of the file, and their files.

    Raises ItemSetError as `published.current` does.
    """
    names = [*config.item_sets, *sorted(config.item_set_versions.keys() - config.item_sets.keys())]
    if config.item_set_dir is not None and not config.item_set_versions:
        names += sorted(published.sets_in(config.item_set_dir) - {*names})
    found: dict[str, tuple[str | None, Path]] = {}
    for name in names:
        path, version = where(config, name), config.item_set_versions.get(name)
        if path.is_dir() and version is None:
            current = published.current(path)
            version, path = current.name, current.path
        elif version is not None and (path.is_dir() or name not in config.item_sets):
            path = published.file_of(path, version)
        found[name] = version, path
    return found


def with_versions(options: Mapping[str, Any]) -> dict[str, Any]:
    """The plugin's options with the versions of their sets, unless they have them: the first process decides for all.

    Raises ItemSetError as `StaticConfig.of` and `Catalogue` do.
    """
    config = StaticConfig.of(options)
    if config.item_set_versions or not (config.item_sets or config.item_set_dir):
        return dict(options)
    catalogue = Catalogue(config)
    sets = {name: catalogue.versions.current(name) for name in catalogue.registered}
    return {**options, "item_set_versions": {one.name: one.version for one in sets.values()}}


def name_of(reference: str) -> str:
    """Return the registered set's name in the reference of what is left of it; another reference as it is."""
    while reference.startswith((VIEW, VERSION)):
        reference = reference.partition("@")[2]
    return reference
