"""A request's constraint with item sets in it: made in the front end, carried to the engine, its grammar there, and the
items that its answers have."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import xgrammar

from itemset.embedded.composite_grammar import Composite, Found
from itemset.embedded.holes import Hole, Items, Once, Vocabulary
from itemset.embedded.placement import Place
from itemset.item_set import ItemSet
from itemset.serving.answer_fields import Logs
from itemset.serving.catalogue import Catalogue, InlineSet
from itemset.serving.wire import INLINE, name_of

ENVELOPE = "\0item_set_holes:"
"""Before what the engine gets of such a constraint, in place of a grammar. No grammar begins so."""

JSON, TAG, EBNF, LARK, SLATE = KINDS = ("json", "structural_tag", "ebnf", "lark", "slate")
SMALL = 20_000
"""Characters of a constraint, and of its grammar, that xgrammar compiles within about a tenth of a second."""
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")


class SetHole(NamedTuple):
    """A hole and the set in it, which is held meanwhile."""

    place: Place
    closers: bytes
    made: InlineSet


@dataclass(frozen=True, eq=False)
class Constraint:
    """A request's constraint with holes. In the request it stands in place of what it was made of.

    kind: one of KINDS. grammar: xgrammar's EBNF with the holes' tokens. compiled: it, in this process.
    """

    kind: str
    grammar: str
    holes: Sequence[SetHole]
    compiled: xgrammar.CompiledGrammar = field(repr=False)

    def __deepcopy__(self, memo: Any) -> "Constraint":
        """Engines copy a request's parameters; this is immutable."""
        return self

    @property
    def sets(self) -> list[InlineSet]:
        return list({hole.made.reference: hole.made for hole in self.holes}.values())

    def spec(self) -> str:
        """Return what `Grammars` reads in the engine."""
        holes = [
            [one.made.reference, one.closers.decode("latin-1"), one.place.group, one.place.begins] for one in self.holes
        ]
        return ENVELOPE + json.dumps([self.grammar, holes])


Sets = Callable[[str], ItemSet]
"""Returns a set by its reference."""
Compiled = tuple[Vocabulary, xgrammar.CompiledGrammar, list[Hole]]


class SharedGrammar(Once[Compiled]):
    """What all requests with the same constraint share."""

    def begin(self, stop_token_ids: Iterable[int]) -> Composite:
        """Return a request's own place in it. It must outlive the request's."""
        return Composite(*self.get(), stop_token_ids)


class Grammars:
    """The grammars of constraints, in one engine core or scheduler. Safe for threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary: makes the model's, once it is asked for."""
        self._vocabulary, self._lock = Once(vocabulary), threading.Lock()
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
        shared.get()
        return shared

    def _compiled(self, spec: str, sets: Sets) -> Compiled:
        vocabulary, (grammar, given) = self._vocabulary.get(), json.loads(spec.removeprefix(ENVELOPE))
        holes = [
            _hole(vocabulary, self._of(reference, sets), closers.encode("latin-1"), *group)
            for reference, closers, *group in given
        ]
        return vocabulary, vocabulary.compile(grammar), holes

    def _of(self, reference: str, sets: Sets) -> Items:
        with self._lock:
            if (items := self._items.get(reference)) is None:
                self._items[reference] = items = Items(sets(reference))
            return items


def _hole(vocabulary: Vocabulary, items: Items, closers: bytes, group: int | None, begins: bool) -> Hole:
    return Hole(items, vocabulary.bridges(closers) if closers else None, group, begins)


@dataclass(frozen=True)
class ExpectedItems:
    """What a front end keeps of a request whose constraint has holes, and reads the answer's tokens with.

    The rest is as for `answer_fields.Expected`.
    """

    constraint: Constraint
    vocabulary: Vocabulary
    catalogue: Catalogue
    stop_tokens: frozenset[int]
    content: Callable[[Sequence[int]], Sequence[int]] | None = None

    weighed = ""

    def answer_fields(self, tokens: Sequence[int], *, cut: bool, logs: Logs = ((), ())) -> dict[str, Any]:
        """What an answer says of its items: a list, in their order. cut: whether it was aborted."""
        tokens = tokens if self.content is None else self.content(tokens)
        holes = [
            _hole(self.vocabulary, Items(one.made.item_set), one.closers, one.place.group, one.place.begins)
            for one in self.constraint.holes
        ]
        composite = Composite(self.vocabulary, self.constraint.compiled, holes, self.stop_tokens)
        composite.read(tokens)
        text = b"".join(self.vocabulary.bytes[token] for token in tokens if 0 <= token < self.vocabulary.size)
        paths = json_paths(text) if self.constraint.kind == JSON else {}
        return {"items": [self._item(one, text, paths.get(one.begin)) for one in composite.found]}

    def _item(self, found: Found, text: bytes, path: str | None) -> dict[str, Any]:
        hole = self.constraint.holes[found.hole]
        keys = hole.made.item_set.keys_of([found.tokens])[0]
        shown = text[found.begin : found.end].decode("utf-8", "replace")
        if hole.place.quoted:
            shown = json.loads(f'"{shown}"', strict=False)
        where = {} if path is None else {"path": path}
        named = {} if hole.made.reference.startswith(INLINE) else {"set": name_of(hole.made.reference)}
        told = self.catalogue.version_fields(hole.made.reference)
        return {**where, "text": shown, **named, "key": keys[0], "keys": keys, **told}


def json_paths(text: bytes) -> dict[int, str]:
    """Return of each string in a JSON text, or in the beginning of one, its path: `$.films[0]`.

    By where its content begins, in bytes. Keys of objects have none.
    """
    found: dict[int, str] = {}
    above: list[list[str | int | None]] = []  # of each open object the key, of each array the place
    is_key = False
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token in (b"{", b"["):
            above.append([None if token == b"{" else 0])
            is_key = token == b"{"
        elif token in (b"}", b"]"):
            if above:
                above.pop()
        elif token == b",":
            is_key = bool(above) and not isinstance(above[-1][0], int)
            if above and isinstance(place := above[-1][0], int):
                above[-1][0] = place + 1
        elif token == b":":
            is_key = False
        elif token.startswith(b'"'):
            if is_key:
                above[-1][0] = json.loads(token)
            else:
                found[match.start() + 1] = "$" + "".join(_step(one[0]) for one in above)
    return found


def _step(key: str | int | None) -> str:
    key = "" if key is None else key
    return f".{key}" if _NAME.fullmatch(str(key)) else f"[{json.dumps(key, ensure_ascii=False)}]"
