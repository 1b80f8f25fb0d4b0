"""The grammars of constraints with item sets in them, where the engine walks them."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from weakref import WeakValueDictionary

from itemset.embedded.holes import Compiled, Hole, Items, Once, Vocabulary
from itemset.item_set import ItemSet
from itemset.serving.constraint import ENVELOPE, SMALL

Sets = Callable[[str], ItemSet]  # returns a set by its reference

_TURN = 2e-4  # seconds
_compiling = threading.Lock()
_turns: list[float] = []  # the interpreter's switch interval as each thread that compiles now has found it


@contextmanager
def short_turns() -> Iterator[None]:
    """While a constraint is compiled, give Python's threads short turns: an engine's loop spins until it is there, and
    each thread waits 5 ms for the other's usual turn, whenever it has let go of the interpreter."""
    with _compiling:
        _turns.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_TURN, _turns[-1]))
    try:
        yield
    finally:
        with _compiling:  # whoever ends last restores what the first one found
            sys.setswitchinterval(_turns.pop())


class Grammars:
    """The grammars of constraints, in one engine core or scheduler. Safe for threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary: returns the model's, made when it is first asked for."""
        self._vocabulary, self._lock = vocabulary, threading.Lock()
        self._large = ThreadPoolExecutor(1, "item-holes-large")
        self._items: WeakValueDictionary[str, Items] = WeakValueDictionary()
        self._shared: WeakValueDictionary[str, Once[Compiled]] = WeakValueDictionary()

    def threads(self, spec: str | None) -> ThreadPoolExecutor | None:
        """Return where a constraint is compiled that may take xgrammar long: it waits for its like alone. None for a
        small one, and for any other grammar: the engine's own threads compile these."""
        return self._large if spec and spec.startswith(ENVELOPE) and len(spec) > SMALL else None

    def get(self, spec: str, sets: Sets) -> Once[Compiled]:
        """Return the grammar of a constraint, compiled once for all requests that hold it at a time.

        spec: `Constraint.spec()`. Raises RuntimeError as xgrammar does, and as `sets` does.
        """
        with self._lock:
            if (shared := self._shared.get(spec)) is None:
                self._shared[spec] = shared = Once(lambda: self._compiled(spec, sets))
        shared.get()
        return shared

    @short_turns()
    def _compiled(self, spec: str, sets: Sets) -> Compiled:
        vocabulary, (grammar, given) = self._vocabulary(), json.loads(spec.removeprefix(ENVELOPE))
        holes = [
            Hole(self._of(reference, sets), vocabulary.bridges(closers.encode("latin-1")), *group)
            for reference, closers, *group in given
        ]
        return vocabulary, vocabulary.compile(grammar), holes

    def _of(self, reference: str, sets: Sets) -> Items:
        with self._lock:
            if (items := self._items.get(reference)) is None:
                self._items[reference] = items = Items(sets(reference))
            return items
