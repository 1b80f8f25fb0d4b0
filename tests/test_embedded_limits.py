"""Hostile constraints with item sets in them: what they cost has a limit, ends when the client leaves, and is no other
request's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from holes import KINDS, setting, size_of
from models import tiny_tokenizer
from tokenizers.normalizers import NFC

from itemset import ItemSetError
from itemset.embedded import rewrite
from itemset.embedded.placement import EBNF, JSON, PLACES, TEXT
from itemset.embedded.rewrite import Marker
from itemset.serving.catalogue import RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.constraint import ENVELOPE, SMALL, Constraint
from itemset.serving.engine.grammars import Grammars
from itemset.serving.front.admission import Checks
from itemset.serving.front.beside import at_once
from itemset.serving.front.embedded_sets import Constraints
from itemset.serving.front.lost_fields import holds_sets

FILM = {"type": "string", "item_set": "films"}
INLINE = {"type": "string", "item_set": ["red", "green"]}


def fields(count: int, value: Any = {"type": "string"}, **more: Any) -> dict[str, Any]:  # noqa: B006
    return {"type": "object", "properties": {f"p{i}": value for i in range(count)} | more}


def referring(count: int) -> dict[str, Any]:
    return {"$defs": {"film": FILM}, **fields(count, {"$ref": "#/$defs/film"})}


def doubling(depth: int) -> dict[str, Any]:
    """Definitions that each refer to the next one many times."""
    each = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 50} for i in range(depth)}
    return {"$defs": each | {f"d{depth}": FILM}, "$ref": "#/$defs/d0"}


def tags(count: int) -> dict[str, Any]:
    each = [
        {"begin": f"<t{i}>", "content": {"type": "item_set", "item_set": "films"}, "end": "</t>"} for i in range(count)
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t"], "tags": each}}


RULES = "".join(f'r{i} ::= "a" r{i + 1} | "b"\n' for i in range(20_000)) + 'r20000 ::= "c"\n'
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "references": ("schema", referring(4_000), "more than 1,000 places of the constraint, each \\$ref counted"),
    "references to references": ("schema", doubling(30), "more than 1,000 places"),
    "sets in anyOf": ("schema", {"anyOf": [FILM] * 4_000}, "more than 1,000 places"),
    "tags": ("tag", tags(4_000), "more than 1,000 places"),
    "fields beside a set": (
        "schema",
        fields(4_000, film=FILM),
        "characters of grammar of the constraint, the limit is",
    ),
    "rules": ("ebnf", f'root ::= ItemSet("films") r0\n{RULES}', "characters of grammar of the constraint"),
    "text": ("schema", fields(1, film=FILM, long={"const": "x" * TEXT}), "more than 1,048,576 characters"),
    "text, as JSON": ("schema", json.dumps(FILM | {"title": "x" * TEXT}), "^the constraint has more than 1,048,576"),
    "keys": ("schema", FILM | {"exclude_keys": ["x" * 1_000] * 1_100}, "more than 1,048,576 characters"),
    "grammar": ("ebnf", 'root ::= ItemSet("films")' + " " * TEXT, "more than 1,048,576 characters"),
}


@pytest.mark.parametrize(("kind", "given", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_constraint_over_a_limit_is_refused(kind: str, given: Any, message: str) -> None:
    with pytest.raises(ItemSetError, match=message):
        Marker(size_of).mark(KINDS.get(kind, kind), given)


def test_as_many_references_as_places_may_be_there() -> None:
    marked = Marker(size_of).mark(JSON, referring(PLACES - 1))
    assert marked is not None
    assert len(marked.holes) == 1
    with pytest.raises(ItemSetError, match="more than 1,000 places"):
        Marker(size_of).mark(JSON, referring(PLACES))


class Watched(dict[str, Any]):
    """Counts how often its values are walked through."""

    walks = 0

    def items(self) -> Any:
        Watched.walks += 1
        return super().items()

    def values(self) -> Any:
        Watched.walks += 1
        return super().values()


def watched(node: Any) -> Any:
    if isinstance(node, list):
        return [watched(one) for one in node]
    return Watched({key: watched(one) for key, one in node.items()}) if isinstance(node, dict) else node


def objects(node: Any) -> int:
    children: Any = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return isinstance(node, dict) + sum(map(objects, children))


def test_marking_takes_a_constant_number_of_passes() -> None:
    """However deep it is nested, in what must be looked through for sets below."""
    for depth in (3, 30):
        node: Any = {"anyOf": [{"type": "integer"}] * 300}
        for _ in range(depth):
            node = {"allOf": [{"type": "array", "items": node}, {"maxItems": 2}]}
        given = watched(fields(1, film=FILM, deep=node) | {"not": FILM})
        Watched.walks = 0
        with pytest.raises(ItemSetError, match=r"\$\.not: an item_set does not hold there"):
            Marker(size_of).mark(JSON, given)
        assert Watched.walks <= 8 * objects(given)


def test_what_is_not_closed_is_looked_for_once() -> None:
    """From each bracket to the end of the line would take the square of its length."""
    for opened in ("[", '"', "[^\\", '\\"['):
        text = opened * 10_000
        assert sum(match.end() - match.start() for match in rewrite._EBNF.finditer(text)) >= len(text) - len(opened)
        assert not holds_sets(EBNF, f'root ::= "a" {text}')
        assert holds_sets(EBNF, f'root ::= "a" ItemSet("films") {text}')


def test_what_is_asked_on_an_event_loop_has_a_limit() -> None:
    """One pass over a large constraint, for a word of ours: what stands there is then found beside the loop."""
    for value, holds in ({"title": "item_set"}, True), ({"title": "none"}, False):
        given = watched(fields(10_000, value))
        Watched.walks = 0
        assert holds_sets(JSON, given) == holds
        assert Watched.walks <= 1.1 * objects(given)
    assert not holds_sets(JSON, fields(100, {"title": "item_set"}))
    assert not holds_sets(JSON, fields(1, item_set={"type": "string"}))
    assert holds_sets(JSON, fields(1, film=FILM))


class Gate:
    """An engine's own judgement of constraints, which waits at the large ones until it is opened."""

    def __init__(self) -> None:
        self.judged, self.begun, self.opened = list[int](), threading.Event(), threading.Event()

    def __call__(self, kind: str, spec: str) -> None:
        if len(spec) > SMALL:
            self.judged.append(len(spec))
            self.begun.set()
            assert self.opened.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def constraints_of(validate: Any, tokenizer: Any = None) -> Constraints:
    words, tokenizer = Words("", "", "", ""), tokenizer or tiny_tokenizer()
    checks = Checks(StaticConfig(), tokenizer, words, ModelLimits(2112, 256, 0, {1}))
    vocabulary = setting("tiny").vocabulary
    return Constraints(checks, lambda: vocabulary, options={}, validate=validate)


def test_texts_that_the_tokenizer_makes_one_are_counted_once() -> None:
    """Else a slate would have room for an item that is not there."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = NFC()
    made, texts = constraints_of(lambda kind, spec: None, tokenizer), ["caf\u00e9", "cafe\u0301", "red"]
    assert at_once(made.prepare("slate", {"item_set": texts, "n": 2}, here=True)) is not None
    with pytest.raises(RefusedError, match="there are 2 distinct items"):
        at_once(made.prepare("slate", {"item_set": texts, "n": 3}, here=True))


def test_large_constraints_hold_up_no_others_and_end_when_their_clients_leave(gate: Gate) -> None:
    made = constraints_of(gate)
    large = [fields(900, film=INLINE, why={"const": f"because {i}"}) for i in range(3)]

    async def run() -> None:
        waiting = [asyncio.create_task(made.prepare(JSON, one)) for one in large]
        await asyncio.to_thread(gate.begun.wait)
        for kind, spec in ((JSON, fields(3, film=INLINE)), ("slate", {"item_set": ["red", "green"], "n": 2})):
            assert isinstance(await asyncio.wait_for(made.prepare(kind, spec), 60), Constraint)
        for one in waiting[1:]:
            one.cancel()
        gate.opened.set()
        assert isinstance(await waiting[0], Constraint)
        assert isinstance(await made.prepare(JSON, fields(900, film=INLINE, why={"const": "last"})), Constraint)

    asyncio.run(run())
    assert len(gate.judged) == 2


def test_what_is_kept_of_constraints_has_a_limit_in_characters() -> None:
    made = constraints_of(lambda kind, spec: None)
    for i in range(120):
        assert made._mark(JSON, fields(250, {}, film=INLINE, why={"const": f"because {i}"}), {}) is not None
    kept = sum(len(key) + len(marked.spec) + len(marked.grammar) for key, (marked, *_) in made._marked.items())
    assert 0 < kept <= 8 << 20
    with pytest.raises(RefusedError, match="1,000 places"):
        at_once(made.prepare(JSON, {"$defs": {"f": INLINE}, **fields(PLACES, {"$ref": "#/$defs/f"})}, here=True))


def test_an_engine_compiles_large_grammars_apart() -> None:
    grammars = Grammars(lambda: setting("tiny").vocabulary)
    assert grammars.threads(ENVELOPE + "x" * 1_000) is None
    threads = grammars.threads(ENVELOPE + "x" * SMALL)
    assert threads is not None
    assert threads is grammars.threads(ENVELOPE + "y" * 3 * SMALL)
    assert threads._max_workers == 1
