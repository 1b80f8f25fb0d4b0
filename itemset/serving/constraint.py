"""A request's constraint with item sets in it: made in the front end, carried to the engine, and its grammar there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import xgrammar

from itemset.embedded.composite_grammar import Composite
from itemset.embedded.holes import Hole, Items
from itemset.embedded.placement import Place
from itemset.embedded.vocabulary import OverVocabulary, Vocabulary
from itemset.item_set import ItemSet
from itemset.serving.catalogue import InlineSet

ENVELOPE = "\0item_set_holes:"
"""Before what the engine gets of such a constraint, in place of a grammar. No grammar begins so."""

JSON, TAG, EBNF, LARK, SLATE = KINDS = ("json", "structural_tag", "ebnf", "lark", "slate")
SMALL = 20_000
"""Characters of a constraint, and of its grammar, that xgrammar compiles within about a tenth of a second."""


@dataclass(frozen=True, eq=False)
class SetHole:
    """A hole and the set in it. kept: the set, if it came with the request or was chosen for it, held meanwhile."""

    place: Place
    closers: bytes
    reference: str
    item_set: ItemSet = field(repr=False)
    kept: InlineSet | None = field(repr=False)


@dataclass(frozen=True, eq=False)
class Constraint:
    """A request's constraint with holes. In the request it stands in place of what it was made of.

    kind: one of KINDS. grammar: xgrammar's EBNF with the holes' tokens. compiled: it, in this process.
    slate: of a slate that a device can make, how many items come after the first, and the token between two, or
        NO_TOKEN. least: of a slate, tokens that none has fewer of.
    """

    kind: str
    grammar: str
    holes: Sequence[SetHole]
    compiled: xgrammar.CompiledGrammar = field(repr=False)
    slate: tuple[int, int] | None = None
    least: int = 0

    def __deepcopy__(self, memo: Any) -> Constraint:
        """Engines copy a request's parameters; this is immutable."""
        return self

    @property
    def references(self) -> list[str]:
        return list(dict.fromkeys(hole.reference for hole in self.holes))

    def spec(self) -> str:
        """Return what `Grammars` reads in the engine."""
        holes = [
            [one.reference, one.closers.decode("latin-1"), one.place.group, one.place.begins] for one in self.holes
        ]
        return ENVELOPE + json.dumps([self.grammar, holes])


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
    """The grammars of constraints, in one engine core or scheduler. Safe for threads."""

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
