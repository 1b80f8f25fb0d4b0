"""The item sets one process knows: the registered ones by name, the inline ones by what they hold."""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from itemset.config import StaticConfig
from itemset.errors import ItemSetError, shown
from itemset.held import delete_unused, open_copy
from itemset.item_set import ItemSet, from_bytes

INLINE = "inline:"
INLINE_BYTES = 256 << 20  # of inline sets kept for their next request, as `InlineSet.nbytes` counts them
OVERHEAD = 4_000  # bytes of Python objects around an open set, as measured: docs/serving.md


class RefusedError(ItemSetError):
    """One request cannot be served as it is. `reason` is a few words for the metrics, the same for all like it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class InlineSet:
    """A set that came with its request, as texts. In the request it then stands in their place.

    reference: what the request carries through the engine. index: its index file in memory. item_set: opened over
    these same bytes, so that they are there once. nbytes: what all of it takes in this process.
    """

    reference: str
    index: bytes = field(repr=False)
    item_set: ItemSet
    nbytes: int

    @classmethod
    def opened(cls, reference: str, index: bytes, *, token_ids: bool = False) -> InlineSet:
        """token_ids: find them now, in a process that asks what occurs in the set. Raises ItemSetError as `from_bytes`
        does."""
        item_set = from_bytes(index, reference)
        found = item_set.token_ids.nbytes if token_ids else 0
        return cls(reference, index, item_set, len(index) + found + OVERHEAD)

    def __deepcopy__(self, memo: Any) -> InlineSet:
        """Engines copy a request's parameters; this is immutable."""
        return self


class Catalogue:
    """Maps a reference, as a request carries it, to its item set. Safe for threads.

    A reference is the name of a registered set, or INLINE and a digest for a set that came with its request. Inline
    sets are kept until newer ones need their room, and known for as long as anybody holds them.
    """

    def __init__(self, config: StaticConfig) -> None:
        """Open every registered set, from the private copy that `held.open_copy` makes; raises ItemSetError as it does.

        Where the configuration names no versions, this is the process that starts the engine: `versions` is what the
        configuration of all others must carry, so that they open the same, whatever happens to the files meanwhile.
        """
        opened = {name: _open(name, path, config) for name, path in config.item_sets.items()}
        self.registered = {name: item_set for name, (item_set, _) in opened.items()}
        self.versions = {name: version for name, (_, version) in opened.items()}
        if opened and not config.item_set_versions:
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


def _open(name: str, path: str, config: StaticConfig) -> tuple[ItemSet, str]:
    try:
        return open_copy(path, config.item_set_cache, config.item_set_versions.get(name))
    except ItemSetError as error:
        raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
