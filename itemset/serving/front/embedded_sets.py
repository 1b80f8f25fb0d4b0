"""Constraints with item sets in them, in one front end: sets are found, looked up and checked, grammars compiled."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import xgrammar

from itemset.embedded.holes import Once, Vocabulary
from itemset.embedded.placement import SLATE, Marked, Place
from itemset.embedded.rewrite import Marker
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.serving.catalogue import InlineSet, Opened, RefusedError
from itemset.serving.constraint import SMALL, Constraint, SetHole
from itemset.serving.front.admission import Checks
from itemset.serving.front.beside import on
from itemset.serving.front.lost_fields import is_small, may_hold
from itemset.serving.front.request import ItemRequest
from itemset.text import Escape

_MARKED, _LONGEST_KEPT = 8 << 20, 1 << 18  # characters of the constraints whose marks are kept, and of one
_PLACE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time, file and line, before what it says


def _asked(place: Place, serving: Mapping[str, Opened]) -> ItemRequest:
    escape: Escape = "json" if place.quoted else "space" if place.spaced else "text"
    if isinstance(place.named, list):
        return ItemRequest(choice=list(place.named), escape=escape)
    reference = serving[place.named].reference if place.named in serving else ""
    return ItemRequest(place.named, selection=place.selection, escape=escape, reference=reference)


class Constraints:
    """Those of one front end. Safe for threads."""

    def __init__(
        self, checks: Checks, vocabulary: Callable[[], Vocabulary], *, options: Mapping[str, Any],
        validate: Callable[[str, str], None] = lambda kind, spec: None,
    ) -> None:  # fmt: skip
        """vocabulary: makes the model's, once it is asked for. options: of `xgrammar.Grammar.from_json_schema`.
        validate: raises what it likes for the kind and text, with constants for sets, that the engine itself refuses.
        """
        self._checks, self._options, self._validate = checks, options, validate
        self.vocabulary, self._lock = Once(vocabulary), threading.Lock()
        self._marked: OrderedDict[str, tuple[Marked, int]] = OrderedDict()
        self._integers = WeakSet[ItemSet]()  # sets of nothing else
        self._marked_characters, self._served = 0, list[str]()  # the versions of the sets in them
        self._threads = ThreadPoolExecutor(2, "item-holes")
        # What may take xgrammar long waits for its like alone. xgrammar cannot be stopped; what waits can.
        self._large = ThreadPoolExecutor(1, "item-holes-large")

    async def prepare(self, kind: str, spec: Any, *, here: bool = False) -> Constraint | None:
        """Return the constraint, None if no set stands in it. Raises RefusedError for what cannot hold, or be made.

        here: see `at_once`; else it is made beside the event loop.
        """
        if not may_hold(kind, spec):
            return None
        serving = self._checks.catalogue.serving  # one version of each set, whatever is served later
        threads = None if here else self._threads if is_small(spec) else self._large
        if (marked := await on(threads, self._mark, kind, spec, serving)) is None:
            return None
        made = list[InlineSet]()
        for place in marked.holes:
            try:
                made.append(await self._checks.prepare(_asked(place, serving), here=here))
            except RefusedError as error:
                raise RefusedError(error.reason, f"{place.path}: {error}", error.param) from error
        threads = None if here else self._threads if len(marked.grammar) <= SMALL else self._large
        return await on(threads, self._assembled, kind, marked, made)

    def _mark(self, kind: str, spec: Any, serving: Mapping[str, Opened]) -> Marked | None:
        """Find and mark the places, unless that was done not long ago, with sets as large as those that are served."""
        key = f"{kind}:{spec if isinstance(spec, str) else json.dumps(spec)}" if is_small(spec) else ""
        served = [one.version for one in serving.values()]
        with self._lock:
            if served != self._served:
                self._served, self._marked_characters = served, 0
                self._marked.clear()
            known, _ = self._marked.get(key, (None, 0))
        if (marked := known or self._marked_anew(kind, spec, serving)) is None or not key:
            return marked
        # Characters that stay in memory: of the text with the lists of its places, twice, and of its grammar.
        count = 2 * len(key) + len(marked.spec) + len(marked.grammar)
        with self._lock:
            if known is None and count <= _LONGEST_KEPT and served == self._served and key not in self._marked:
                self._marked_characters += count
                self._marked[key] = marked, count
                while self._marked_characters > _MARKED:
                    self._marked_characters -= self._marked.popitem(last=False)[1][1]
        return marked

    def _marked_anew(self, kind: str, spec: Any, serving: Mapping[str, Opened]) -> Marked | None:
        try:
            marked = Marker(partial(self._size, serving)).mark(kind, spec, self._options)
            if marked is not None:
                self._validate(kind, marked.spec)
                xgrammar.Grammar.from_ebnf(marked.ebnf(0))
        except RefusedError:
            raise
        except ItemSetError as error:
            raise RefusedError("item set inside", str(error)) from error
        except Exception as error:  # xgrammar's own, and the engine's
            why = _PLACE_IN_XGRAMMAR.sub("", str(error)).strip()
            raise RefusedError("item set inside", f"the constraint cannot be used: {why}") from error
        return marked

    def _size(self, serving: Mapping[str, Opened], place: Place) -> int:
        asked = _asked(place, serving)  # a list itself: a tokenizer may make two of its texts one item
        asked = asked if asked.choice is not None else replace(asked, escape=None)  # as many in any spelling
        return len(self._checks.made(asked).item_set)

    def _assembled(self, kind: str, marked: Marked, made: list[InlineSet]) -> Constraint:
        holes, vocabulary = list(map(SetHole, marked.holes, marked.closers(), made)), self.vocabulary.get()
        for place, _, one in holes:
            if kind == SLATE and not place.closers and one.item_set.trie.tables.terminal.any():
                raise RefusedError(
                    "item set inside",
                    "slate.separator is empty, but some items begin others, so that nothing would tell them apart: "
                    "give a separator",
                )
            if place.number and one.item_set not in self._integers:
                if (wrong := vocabulary.not_integer(one.item_set)) is not None:
                    message = (
                        f'{place.path}: the item {shown(wrong)} is no integer as JSON writes it: write "type": "string"'
                    )
                    raise RefusedError("item set inside", message)
                self._integers.add(one.item_set)
        grammar = marked.ebnf(vocabulary.first)
        try:
            compiled = vocabulary.compile(grammar)
        except RuntimeError as error:  # what the engine would find, too late to refuse the request
            raise RefusedError("item set inside", f"the constraint cannot be used: {error}") from error
        return Constraint(kind, grammar, holes, compiled)
