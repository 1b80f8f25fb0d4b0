"""The item sets one process knows: the registered ones by name, the inline ones by what they hold."""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet, from_bytes
from itemset.serving.config import StaticConfig
from itemset.serving.held import delete_unused, open_copy
from itemset.views import view, view_from_bytes

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
        """Open every registered set, from the private copy that `held.open_copy` makes; raises ItemSetError as it does.

        Where the configuration names no versions, this is the process that starts the engine: `versions` is what the
        configuration of all others must carry, so that they open the same, whatever happens to the files meanwhile.
        """
        self.versions = Versions(config)
        for name, (version, path) in at_start(config).items():
            self.versions.serve(self.versions.open(name, version, path))
        _check_views(config, self.registered)
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
        if reference in self.registered:
            return self.registered[reference]
        kept = self.inline(reference)
        return kept.item_set if kept else None

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


def with_versions(options: Mapping[str, Any]) -> dict[str, Any]:
    """The plugin's options with the versions of their sets, unless they have them: the first process decides for all.

    Raises ItemSetError as `StaticConfig.of` and `Catalogue` do.
    """
    config = StaticConfig.of(options)
    if config.item_set_versions or not config.item_sets:
        return dict(options)
    return {**options, "item_set_versions": Catalogue(config).versions}


def name_of(reference: str) -> str:
    """Return the registered set's name in the reference of what is left of it; another reference as it is."""
    return reference.partition("@")[2] if reference.startswith(VIEW) else reference


def _seen(name: str, base: str, query: Mapping[str, Any], registered: Mapping[str, ItemSet]) -> ItemSet:
    if base not in registered:
        raise ItemSetError(f"the item view {name!r} is of {base!r}, and no item set is called so: register it")
    try:
        return view(registered[base], query)
    except ItemSetError as error:
        raise ItemSetError(f"the item view {name!r} cannot be made: {error}") from error


def _open(name: str, path: str, config: StaticConfig) -> tuple[ItemSet, str]:
    try:
        return open_copy(path, config.item_set_cache, config.item_set_versions.get(name))
    except ItemSetError as error:
        raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
