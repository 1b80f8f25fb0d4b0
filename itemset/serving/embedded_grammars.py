"""The grammars of constraints with item sets in them, in one engine core or scheduler."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import xgrammar

from itemset.embedded.composite_grammar import Composite
from itemset.embedded.holes import Hole, Items
from itemset.embedded.vocabulary import OverVocabulary, Vocabulary
from itemset.item_set import ItemSet
from itemset.serving.constraint import ENVELOPE, SMALL

Sets = Callable[[str], ItemSet]
"""Returns a set by its reference."""
Compiled = tuple[Vocabulary, xgrammar.CompiledGrammar, list[Hole]]


class SharedGrammar:
    """What all requests with the same constraint share. Safe for threads."""

    def __init__(self, compile: Callable[[], Compiled]) -> None:
        self._compile, self._lock = compile, threading.Lock()
        self._made: Compiled | None = None

    def prepare(self) -> None:
        """Compile it, unless that was done. Raises as `Grammars.get` says."""
        with self._lock:
            if self._made is None:
                self._made = self._compile()

    def begin(self, stop_token_ids: Iterable[int]) -> Composite:
        """Return a request's own place in it. It must outlive the request's."""
        assert self._made is not None
        return Composite(*self._made, stop_token_ids)


class Grammars(OverVocabulary):
    """Makes them. Safe for threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        super().__init__(vocabulary)
        self._large = ThreadPoolExecutor(1, "item-holes-large")
        self._items: WeakValueDictionary[str, Items] = WeakValueDictionary()
        self._shared: WeakValueDictionary[str, SharedGrammar] = WeakValueDictionary()

    def threads(self, spec: str) -> ThreadPoolExecutor | None:
        """Return where a constraint is compiled that may take xgrammar long: it waits for its like alone. None for a
        small one, which the engine's own threads compile."""
        return self._large if len(spec) > SMALL else None

    def get(self, spec: str, sets: Sets) -> SharedGrammar:
        """Return the grammar of a constraint, compiled: once for all requests that have it at a time.

        spec: `Constraint.spec()`. Raises RuntimeError as xgrammar does, and as `sets` does.
        """
        with self._lock:
            if (shared := self._shared.get(spec)) is None:
                self._shared[spec] = shared = SharedGrammar(lambda: self._compiled(spec, sets))
        shared.prepare()
        return shared

    def _compiled(self, spec: str, sets: Sets) -> Compiled:
        vocabulary, (grammar, given) = self.vocabulary, json.loads(spec.removeprefix(ENVELOPE))
        holes = []
        for reference, closers, group, begins in given:
            bridges = vocabulary.bridges(closers.encode("latin-1")) if closers else None
            holes.append(Hole(self._of(reference, sets), bridges, group, begins))
        return vocabulary, vocabulary.compile(grammar), holes

    def _of(self, reference: str, sets: Sets) -> Items:
        with self._lock:
            if (items := self._items.get(reference)) is None:
                self._items[reference] = items = Items(sets(reference))
            return items
