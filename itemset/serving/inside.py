"""Item sets inside other grammars: found in a request's constraint, looked up, checked, and carried to the engine."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from itemset.errors import ItemSetError, shown
from itemset.inside.answer import items_of, json_paths, text_of
from itemset.inside.composite import Composite, Found
from itemset.inside.holes import Hole, Items
from itemset.inside.marks import Marker, mentions
from itemset.inside.places import Marked, Place
from itemset.inside.vocabulary import Vocabulary
from itemset.item_set import ItemSet
from itemset.serving import words
from itemset.serving.admission import Checks
from itemset.serving.catalogue import Catalogue, InlineSet, RefusedError, set_ref
from itemset.serving.request import ItemRequest
from itemset.serving.wire import INLINE, HolesSpec, name_of
from itemset.serving.words import at
from itemset.text import Escape, continues, encode
from itemset.trie.walk import NO_TOKEN

ENVELOPE = "\0item_set_holes:"
"""Before what the engine gets of such a constraint, in place of a grammar. No grammar begins so."""

JSON, TAG, EBNF, LARK, SLATE = KINDS = ("json", "structural_tag", "ebnf", "lark", "slate")

_MARKED, _LONGEST_KEPT = 8 << 20, 1 << 18  # characters of the constraints whose marks are kept, and of one
_THREADS = 2
_PLACE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time, file and line, before what it says
_STATED = (("json", JSON), ("json_schema", JSON), ("structural_tag", TAG), ("grammar", EBNF), ("ebnf", EBNF))
SMALL = 20_000
"""Characters of a constraint, and of its grammar, that xgrammar compiles within about a tenth of a second."""


def holds_sets(kind: str, spec: Any) -> bool:
    """Whether item sets stand in a constraint, rightly or not."""
    if kind == SLATE or not _may_hold(kind, spec):
        return kind == SLATE
    if not is_small(spec):
        return True  # this may be asked on an event loop
    try:
        return Marker(lambda place: 1 << 30).finds({JSON: "schema", TAG: "tag"}.get(kind, "ebnf"), spec)
    except ItemSetError:
        return True
    except Exception:  # no constraint, as its engine will say
        return False


def _may_hold(kind: str, spec: Any) -> bool:
    return kind == SLATE or mentions(spec)


def is_small(spec: Any) -> bool:
    """Whether a constraint has few characters. Looks at no more of it than that."""
    waiting, characters = [spec], 0
    while waiting and characters <= SMALL:
        node = waiting.pop()
        characters += 4 + (len(node) if isinstance(node, str | list | dict) else 0)  # quotes, and what parts them
        if isinstance(node, list | dict) and characters <= SMALL:
            waiting += node
            waiting += node.values() if isinstance(node, dict) else ()
    return characters <= SMALL


def stated(body: Any, fields: Collection[str]) -> list[tuple[str, Any]]:
    """The constraints of a body, by any engine's words, that may hold item sets: kinds and texts.

    fields: those that its endpoint declares.
    """
    found: list[tuple[str, Any]] = []
    for given in at(body, ""):
        one = {name: value for name, value in given.items() if name in fields or name == words.SLATE}
        if one.get(words.SLATE) is not None:
            found.append((SLATE, one[words.SLATE]))
        for place in ("response_format", "text.format", "output_config.format"):
            for given in at(one, place):
                if given.get("type") == TAG or "format" in given:
                    found.append((TAG, {**given, "type": TAG}))
                else:
                    found += [(JSON, inner.get("schema")) for inner in (given, *at(given, "json_schema"))]
        for place in ("", words.STRUCTURED, words.PARAMS, f"{words.PARAMS}.{words.STRUCTURED}"):
            found += [(kind, inner.get(name)) for inner in at(one, place) for name, kind in _STATED]
    return [one for one in found if one[0] == SLATE or (isinstance(one[1], str | dict) and mentions(one[1]))]


def refuse_lost(stated: Collection[tuple[str, Any]], reached: int) -> None:
    """Raises RefusedError if sets stand in more constraints of a body than have reached its requests."""
    if len(stated) > reached and sum(holds_sets(*one) for one in stated) > reached:
        raise RefusedError(
            "two constraints",
            "an item set inside a constraint would be lost: a beam search, a tool or another constraint of this body "
            "takes the place of that one; omit it",
        )


def refuse_loose_tools(tools: Iterable[Any], choice: Any, held: Callable[[bool], bool]) -> None:
    """Raises RefusedError for tools with item sets in their parameters, which the engine would leave free.

    tools, choice: as a body has them, of OpenAI's or Anthropic's form. held: whether the engine constrains a tool's
    parameters, given whether it is strict.
    """
    chosen = choice if isinstance(choice, dict) else {}
    named = (chosen["function"] if isinstance(chosen.get("function"), dict) else chosen).get("name")
    for tool in tools:
        given = tool if isinstance(tool, dict) else {}
        if isinstance(given.get("tools"), list):  # a namespace of several
            refuse_loose_tools(given["tools"], choice, held)
        function = given["function"] if isinstance(given.get("function"), dict) else given
        parameters = function.get("parameters", function.get("input_schema"))
        if isinstance(parameters, dict) and not held(function.get("strict") is True) and holds_sets(JSON, parameters):
            mends = ['add "strict": true to the function'] if function.get("strict") is not True else []
            mends += ["name it in tool_choice"] if named is None or named != function.get("name") else []
            raise RefusedError(
                "item set inside",
                f"the parameters of the tool {shown(function.get('name'))} hold an item_set, but this engine leaves "
                f"them free: {', or '.join(mends) or 'give them as a JSON schema of the answer'}",
                "tools",
            )


def _marked(marker: Marker, kind: str, spec: Any, options: Mapping[str, Any]) -> Marked | None:
    if kind == JSON:
        return marker.schema(spec, **options)
    if kind == TAG:
        return marker.tag(spec)
    if kind == SLATE:
        return marker.slate(spec)
    return marker.ebnf(spec, xgrammar.Grammar.from_lark if kind == LARK else xgrammar.Grammar.from_ebnf)


@dataclass(frozen=True, eq=False)
class SetHole:
    """A hole and the set in it.

    kept: the set that came with the request or was chosen for it, held as long as the request needs it.
    """

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
        """Return what `grammars.Grammars` reads in the engine."""
        holes = [
            [hole.reference, hole.closers.decode("latin-1"), hole.place.group, hole.place.begins] for hole in self.holes
        ]
        return ENVELOPE + json.dumps([self.grammar, holes])

    def holes_spec(self, catalogue: Catalogue) -> HolesSpec:
        """Return what the request carries."""
        return HolesSpec(self.spec(), [set_ref(catalogue, one) for one in self.references], self.slate)


def _characters(key: str, marked: Marked) -> int:
    """What is kept of a constraint: its text with the lists of its places, twice, and its grammar."""
    return 2 * len(key) + len(marked.spec) + len(marked.grammar)


class OverVocabulary:
    """What stands on a model's vocabulary, which is made once it is asked for. Safe for threads."""

    def __init__(self, make: Callable[[], Vocabulary]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._vocabulary: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make()
            return self._vocabulary


class Constraints(OverVocabulary):
    """Those of one front end. Safe for threads."""

    def __init__(
        self,
        checks: Checks,
        tokenizer: Any,
        vocabulary: Callable[[], Vocabulary],
        *,
        options: Mapping[str, Any],
        validate: Callable[[str, str], None] = lambda kind, spec: None,
    ) -> None:
        """vocabulary: makes the model's, once it is asked for. options: of `xgrammar.Grammar.from_json_schema`.
        validate: what the engine itself says of a constraint (its kind, and its text with constants in place of the
        sets); raises what it likes."""
        self._checks, self._tokenizer, self._options, self._validate = checks, tokenizer, options, validate
        super().__init__(vocabulary)
        self._marked: OrderedDict[str, tuple[Marked, dict[str, int]]] = OrderedDict()
        self._marked_characters = 0
        self._threads = ThreadPoolExecutor(_THREADS, "item-holes")
        # What may take xgrammar long waits for its like alone. xgrammar cannot be stopped; what waits can.
        self._large = ThreadPoolExecutor(1, "item-holes-large")
        self._unsafe: NDArray[np.bool_] | None = None

    def get(self, kind: str, spec: Any) -> Constraint | None:
        """Return the constraint, None if no item set stands in it. Waits for all of it.

        Raises RefusedError for what cannot hold, and as `Checks.reference` does.
        """
        if not _may_hold(kind, spec) or (marked := self._mark(kind, spec)) is None:
            return None
        return self._assembled(kind, marked, [self._checks.reference(self._asked(place)) for place in marked.holes])

    async def prepare(self, kind: str, spec: Any) -> Constraint | None:
        """Do `get` beside the event loop."""
        if not _may_hold(kind, spec):
            return None
        loop = asyncio.get_running_loop()
        marked = await loop.run_in_executor(self._threads if is_small(spec) else self._large, self._mark, kind, spec)
        if marked is None:
            return None
        held = [await self._checks.prepare(self._asked(place)) for place in marked.holes]
        references = [self._checks.reference(one) for one in held]
        threads = self._threads if len(marked.grammar) <= SMALL else self._large
        return await loop.run_in_executor(threads, self._assembled, kind, marked, references)

    def _mark(self, kind: str, spec: Any) -> Marked | None:
        """Find and mark the places, unless that was done not long ago and the sets' sizes are the same."""
        key = f"{kind}:{spec if isinstance(spec, str) else json.dumps(spec)}" if is_small(spec) else ""
        with self._lock:
            marked, sizes = self._marked.get(key, (None, {}))
        if marked is None or any(self._size(json.loads(asks)) != size for asks, size in sizes.items()):
            sizes = {}
            marked = self._marked_anew(kind, spec, sizes)
            if marked is not None and key and _characters(key, marked) <= _LONGEST_KEPT:
                with self._lock:
                    self._forget(key)
                    self._marked[key] = marked, sizes
                    self._marked_characters += _characters(key, marked)
                    while self._marked_characters > _MARKED:
                        self._forget(next(iter(self._marked)))
        return marked

    def _forget(self, key: str) -> None:
        if key in self._marked:
            self._marked_characters -= _characters(key, self._marked.pop(key)[0])

    def _marked_anew(self, kind: str, spec: Any, sizes: dict[str, int]) -> Marked | None:
        def size_of(place: Place) -> int:
            asks = json.dumps([place.named, dict(place.selection)])
            sizes[asks] = self._size(json.loads(asks))
            return sizes[asks]

        try:
            marked = _marked(Marker(size_of), kind, spec, self._options)
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

    def _size(self, asked: list[Any]) -> int:
        named, selection = asked
        if isinstance(named, list):
            return len({str(text) for text in named})
        return len(self._checks.catalogue[self._checks.reference(ItemRequest(named, **selection))])

    def _asked(self, place: Place) -> ItemRequest:
        if isinstance(place.named, str):
            return ItemRequest(place.named, **place.selection)
        escape: Escape = "json" if place.quoted else "text"
        return ItemRequest(choice=list(place.named), escape=escape)

    def _assembled(self, kind: str, marked: Marked, references: list[str]) -> Constraint:
        catalogue, holes = self._checks.catalogue, list[SetHole]()
        for place, closers, reference in zip(marked.holes, marked.closers(), references, strict=True):
            item_set = catalogue[reference]
            if isinstance(place.named, str):
                self._check_texts(place, item_set)
            if kind == SLATE and not place.closers and item_set.trie.tables.terminal.any():
                raise RefusedError(
                    "item set inside",
                    "slate.separator is empty, but some items begin others, so that nothing would tell them apart: "
                    "give a separator",
                )
            holes.append(SetHole(place, closers, reference, item_set, catalogue.inline(reference)))
        vocabulary = self.vocabulary
        grammar = marked.ebnf(vocabulary.first)
        try:
            compiled = vocabulary.compile(grammar)
        except RuntimeError as error:  # what the engine would find, too late to refuse the request
            raise RefusedError("item set inside", f"the constraint cannot be used: {error}") from error
        return Constraint(kind, grammar, holes, compiled, self._slate(marked, holes), self._least(marked, holes))

    def _least(self, marked: Marked, holes: Sequence[SetHole]) -> int:
        """Return `Constraint.least`: a separator adds a token, unless one may be an item's end and the separator."""
        if marked.slate is None:
            return 0
        (n, separator), item_set = marked.slate, holes[0].item_set
        closing = self.vocabulary.bridges(holes[0].closers).by_token.values() if n > 1 and separator else ()
        bridged = {last for pairs in closing for last, rest in pairs if rest == separator.encode()}
        adds = bool(separator) and not item_set.occurring(bridged)
        return n * item_set.shortest + (n - 1) * adds

    def _slate(self, marked: Marked, holes: Sequence[SetHole]) -> tuple[int, int] | None:
        """Return `Constraint.slate`: a separator must be one token of its own, which no item holds."""
        if marked.slate is None:
            return None
        (n, separator), token = marked.slate, NO_TOKEN
        if separator and n > 1:
            try:
                tokens = encode([separator], self._tokenizer, escape="text")[0].tolist()
            except ItemSetError:
                return None
            token = tokens[0]
            alone = len(tokens) == 1 and self.vocabulary.bytes[token] == separator.encode()
            if not alone or holes[0].item_set.occurring([token]):
                return None
        return n - 1, token

    def check(
        self,
        constraint: Constraint,
        *,
        prompt_tokens: int,
        min_tokens: int,
        max_tokens: int | None,
        stop_tokens: Collection[int],
    ) -> None:
        """Raises RefusedError where a constraint and the rest of the request leave no way to its end."""
        for reference in constraint.references:
            self._checks.request(reference, prompt_tokens=prompt_tokens, min_tokens=0, stop_tokens=stop_tokens)
        if constraint.kind == SLATE:
            self._check_stops(constraint, stop_tokens)
            self._checks.slate(
                constraint.least, prompt_tokens=prompt_tokens, min_tokens=min_tokens, max_tokens=max_tokens
            )

    def _check_stops(self, constraint: Constraint, stop_tokens: Iterable[int]) -> None:
        """Raises RefusedError for a stop token at which a slate would end after its first item."""
        texts, begins = self.vocabulary.bytes, tuple(hole.closers for hole in constraint.holes if hole.closers)
        for token in stop_tokens:
            if begins and 0 <= token < len(texts) and texts[token].startswith(begins):
                raise RefusedError(
                    "stop token inside",
                    f"the stop token {token} begins as the slate's separator does, so the slate would end after an "
                    "item: leave it out, or give another separator",
                    "stop_token_ids",
                )

    def _check_texts(self, place: Place, item_set: ItemSet) -> None:
        """Raises RefusedError for a set whose texts are not as they must be where it stands."""
        unsafe = self._to_be_escaped(item_set.whole)
        how = "json" if place.quoted else "text"
        if place.quoted and unsafe and item_set.whole.escape != "json":
            why = "has items with a quote, a backslash or a control character, which a JSON string must escape"
        elif not place.quoted and unsafe and item_set.whole.escape == "json":
            why = "has items that are escaped for JSON strings, and stands in none"
        elif item_set.whole.escape is None and item_set.tokenizer is not None and not self._continues:
            why = "has items as the model's tokenizer encodes them at the beginning of a text, after a space"
        else:
            return
        raise RefusedError(
            "item set inside", f"{place.path}: the item set {place.named!r} {why}: build it with --escape {how}"
        )

    def _to_be_escaped(self, item_set: ItemSet) -> bool:
        if self._unsafe is None:
            harmful = {*range(32), ord('"'), ord("\\")}
            self._unsafe = np.array([not harmful.isdisjoint(text) for text in self.vocabulary.bytes])
        return bool(self._unsafe[item_set.token_ids[item_set.token_ids < len(self._unsafe)]].any())

    @property
    def _continues(self) -> bool:
        return continues(self._tokenizer)


@dataclass(frozen=True)
class ExpectedItems:
    """What a front end keeps of a request whose constraint has holes, and reads the answer's tokens with.

    The rest is as for `answer.Expected`.
    """

    constraint: Constraint
    vocabulary: Vocabulary
    catalogue: Catalogue
    stop_tokens: frozenset[int]
    content: Callable[[Sequence[int]], Sequence[int]] | None = None

    weighed = False

    def told(self, tokens: Sequence[int], *, cut: bool, weight: float | None = None) -> dict[str, Any]:
        """What an answer says of its items: a list, in their order. cut: whether it ended before its end."""
        tokens = tokens if self.content is None else self.content(tokens)
        bridges = self.vocabulary.bridges
        holes = [
            Hole(Items(hole.item_set), bridges(hole.closers) if hole.closers else None, *_group(hole))
            for hole in self.constraint.holes
        ]
        composite = Composite(self.vocabulary, self.constraint.compiled, holes, self.stop_tokens)
        found, text = items_of(composite, tokens), text_of(self.vocabulary, tokens)
        paths = json_paths(text) if self.constraint.kind == JSON else {}
        return {"items": [self._item(one, text, paths.get(one.begin)) for one in found]}

    def _item(self, found: Found, text: bytes, path: str | None) -> dict[str, Any]:
        hole = self.constraint.holes[found.hole]
        keys = hole.item_set.keys_of([found.tokens])[0]
        shown = text[found.begin : found.end].decode("utf-8", "replace")
        if hole.place.quoted:
            shown = json.loads(f'"{shown}"', strict=False)
        where = {} if path is None else {"path": path}
        named = {} if hole.reference.startswith(INLINE) else {"set": name_of(hole.reference)}
        told = self.catalogue.told(hole.reference)
        return {**where, "text": shown, **named, "key": keys[0], "keys": keys, **told}


def _group(hole: SetHole) -> tuple[int | None, bool]:
    return hole.place.group, hole.place.begins
