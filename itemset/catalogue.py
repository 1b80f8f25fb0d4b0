"""The item sets one process knows: the registered ones by name, the inline ones by what they hold."""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict

from itemset.config import StaticConfig
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet, load

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
        """Open every registered set. Raises ItemSetError as `itemset.load` does."""
        self.registered = {name: _load(name, path) for name, path in config.item_sets.items()}
        self._inline: OrderedDict[str, tuple[ItemSet, bytes]] = OrderedDict()
        self._inline_bytes = 0
        self._lock = threading.Lock()

    def __getitem__(self, reference: str) -> ItemSet:
        """Raises RefusedError for a reference that is not known."""
        item_set = self.get(reference)
        if item_set is not None:
            return item_set
        raise RefusedError("unknown set", f"no item set is called {shown(reference)}: {self._known(reference)}")

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
        # A comparison takes its time, and a name of twice the length is not alike.
        alike = difflib.get_close_matches(reference[: 2 * max(map(len, names))], names, 1)
        if alike:
            return f"did you mean {alike[0]!r}?"
        return "it has " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _load(name: str, path: str) -> ItemSet:
    try:
        return load(path)
    except ItemSetError as error:
        raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
