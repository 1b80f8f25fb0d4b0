"""The item sets one process knows: the registered ones by name, the inline ones by what they hold."""

from __future__ import annotations

import difflib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet, from_bytes
from itemset.serving.config import StaticConfig
from itemset.serving.held import delete_unused, open_copy
from itemset.trie.filters import passing
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

    reference: what the request carries through the engine. index: its index file in memory, or what a view has of its
    own. item_set: opened over these same bytes, so that they are there once. nbytes: what all of it takes in this
    process. query: a filter's, as JSON, if JSON can hold it. filter: the one that a request's exclusions stand on.
    """

    reference: str
    index: bytes = field(repr=False)
    item_set: ItemSet
    nbytes: int
    query: str | None = None
    filter: InlineSet | None = None

    @classmethod
    def opened(
        cls, reference: str, index: bytes, base: ItemSet | None = None, *, token_ids: bool = False, **more: Any
    ) -> InlineSet:
        """base: the set or the view of which it is a part. token_ids: find them now, in a process that asks what occurs
        in the set. more: fields. Raises ItemSetError as `from_bytes` does."""
        item_set = from_bytes(index, reference) if base is None else view_from_bytes(base, index, reference)
        found = item_set.token_ids.nbytes if token_ids else 0
        return cls(reference, index, item_set, len(index) + found + OVERHEAD, **more)

    @classmethod
    def filtered(cls, reference: str, base: ItemSet, query: Mapping[str, Any]) -> InlineSet:
        """Make a filter of a registered set or view. Raises ItemSetError as `views.view` does."""
        seen = view(base, query)
        index = seen.to_bytes()
        item_set = view_from_bytes(base, index, reference, keys=seen._keys)
        nbytes = len(index) + len(base.keys) // 8 + OVERHEAD  # a bit for each key beside them
        try:
            return cls(reference, index, item_set, nbytes, json.dumps(query))
        except (TypeError, ValueError):
            return cls(reference, index, item_set, nbytes)

    @property
    def own_filter(self) -> InlineSet | None:
        """The filter that it is or stands on."""
        return self if "alive" in self.item_set.own else self.filter

    def __deepcopy__(self, memo: Any) -> InlineSet:
        """Engines copy a request's parameters; this is immutable."""
        return self


class Catalogue:
    """Maps a reference, as a request carries it, to its item set. Safe for threads.

    A reference is the name of a registered set or view; INLINE and a digest for texts that came with a request; or
    VIEW, a digest, @ and the reference of what it is a part of: a registered one, or a filter of one. What came with
    requests is kept until newer sets need the room, and known for as long as anybody holds it.
    """

    def __init__(self, config: StaticConfig) -> None:
        """Open every registered set, from the private copy that `held.open_copy` makes; raises ItemSetError as it does.

        Where the configuration names no versions, this is the process that starts the engine.
        """
        self.registered = {name: item_set for name, (item_set, _) in _opened(config).items()}
        for name, (base, query) in config.views.items():
            self.registered[name] = _seen(name, base, query, self.registered)
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
    """The plugin's options with the versions of their sets, unless they have them: the first process decides for all,
    which so open the same, whatever happens to the files meanwhile.

    Views are not made. Raises ItemSetError as `StaticConfig.of` does, for a set that cannot be opened, and for a view
    of none or whose query does not go with its set's attributes.
    """
    config = StaticConfig.of(options)
    if config.item_set_versions or not config.item_sets:
        return dict(options)
    opened = _opened(config)
    below = {name: item_set for name, (item_set, _) in opened.items()}
    for name, (base, query) in config.views.items():
        with _naming(name, base, below):
            below[name] = below[base]
            passing(query, below[base].attributes.slice(0, 0))
    return {**options, "item_set_versions": {name: version for name, (_, version) in opened.items()}}


def part_of(reference: str) -> str:
    """Return the reference of what a part was made of; of what is no part, the empty one."""
    return reference.partition("@")[2] if reference.startswith(VIEW) else ""


def name_of(reference: str) -> str:
    """Return the registered set's name in the reference of what is left of it; another reference as it is."""
    while above := part_of(reference):
        reference = above
    return reference


def _seen(name: str, base: str, query: Mapping[str, Any], registered: Mapping[str, ItemSet]) -> ItemSet:
    with _naming(name, base, registered):
        return view(registered[base], query)


@contextmanager
def _naming(name: str, base: str, registered: Mapping[str, ItemSet]) -> Iterator[None]:
    """Errors name the view."""
    if base not in registered:
        raise ItemSetError(f"the item view {name!r} is of {base!r}, and no item set is called so: register it")
    try:
        yield
    except ItemSetError as error:
        raise ItemSetError(f"the item view {name!r} cannot be made: {error}") from error


def _opened(config: StaticConfig) -> dict[str, tuple[ItemSet, str]]:
    """Return the registered sets, each with its version; delete copies of others that nobody uses."""
    opened = {name: _open(name, path, config) for name, path in config.item_sets.items()}
    if opened and not config.item_set_versions:
        delete_unused(config.item_set_cache)
    return opened


def _open(name: str, path: str, config: StaticConfig) -> tuple[ItemSet, str]:
    try:
        return open_copy(path, config.item_set_cache, config.item_set_versions.get(name))
    except ItemSetError as error:
        raise ItemSetError(f"the item set {name!r} cannot be opened: {error}") from error
