"""The item sets one process knows: the registered ones by name, the inline ones by what they hold."""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from itemset.config import StaticConfig
from itemset.errors import ItemSetError
from itemset.held import delete_unused, open_copy
from itemset.item_set import ItemSet

INLINE = "inline:"
INLINE_BYTES = 256 << 20  # index bytes of inline sets kept for their next request


class RefusedError(ItemSetError):
    """One request cannot be served as it is. `reason` is a few words for the metrics, the same for all like it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Catalogue:
    """Maps a reference, as a request carries it, to its item set. Safe for threads.

    A reference is the name of a registered set, or INLINE and a digest for a set that came with its request. Inline
    sets are kept until newer ones need their room; a request that runs holds on to its own.
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
        self._inline: OrderedDict[str, tuple[ItemSet, bytes]] = OrderedDict()
        self._inline_bytes = 0
        self._lock = threading.Lock()

    def __getitem__(self, reference: str) -> ItemSet:
        """Raises RefusedError for a reference that is not known."""
        item_set = self.get(reference)
        if item_set is not None:
            return item_set
        raise RefusedError("unknown set", f"no item set is called {reference!r}: {self._known(reference)}")

    def get(self, reference: str) -> ItemSet | None:
        if reference in self.registered:
            return self.registered[reference]
        kept = self.inline(reference)
        return kept[0] if kept else None

    def inline(self, reference: str) -> tuple[ItemSet, bytes] | None:
        """An inline set and its index file, if it is still here."""
        with self._lock:
            kept = self._inline.get(reference)
            if kept:
                self._inline.move_to_end(reference)
            return kept

    def keep(self, reference: str, item_set: ItemSet, index: bytes) -> None:
        """Keep an inline set; the least recently used ones go where the room is short."""
        with self._lock:
            if reference in self._inline:
                return
            self._inline[reference] = (item_set, index)
            self._inline_bytes += len(index)
            while self._inline_bytes > INLINE_BYTES and len(self._inline) > 1:
                _, (_, dropped) = self._inline.popitem(last=False)
                self._inline_bytes -= len(dropped)

    def _known(self, reference: str) -> str:
        if not self.registered:
            return "this server has none, start it with --item-set NAME=FILE"
        names = sorted(self.registered)
        if alike := difflib.get_close_matches(reference, names, 1):
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
