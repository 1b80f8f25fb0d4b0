"""Items inside other grammars: walks against xgrammar's own grammars with all items written out, and refusals."""

from __future__ import annotations

import functools
import gc
import json
import random
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, permutations
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from holes import FEW, FILM, KINDS, PERSON, TEXTS, Setting, as_json, items_in, setting, size_of, written_out
from real_tokenizers import NAMES

import itemset
from itemset import ItemSetError
from itemset.embedded.composite_grammar import Composite, Found
from itemset.embedded.forced import extend
from itemset.embedded.holes import HOLES, Hole, Items, Vocabulary, warm_up
from itemset.embedded.placement import JSON, PLACES, SLATE
from itemset.embedded.rewrite import Marker
from itemset.serving.constraint import ENVELOPE
from itemset.serving.engine.grammars import Grammars
from itemset.trie.walk import DEAD

SEEN, SHORT = ({"type": "string", "item_set": name} for name in ("seen", "short"))


def object_of(_required: Any = None, **properties: Any) -> dict[str, Any]:
    required = list(properties) if _required is None else _required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "object": object_of(film=FILM, reason={"type": "string"}),
    "optional": object_of(["year"], film=FILM, alt=FILM, year={"type": "integer"}),
    "array": {"type": "array", "items": FILM, "minItems": 1, "maxItems": 3},
    "nested": object_of(
        films={"type": "array", "items": {"anyOf": [FILM, {"type": "null"}]}, "maxItems": 4},
        deep=object_of(a=object_of(b=FILM)),
    ),
    "constants": object_of(film={"anyOf": [FILM, {"const": "unknown"}, {"const": "Alien4"}, {"type": "null"}]}),
    "reference": {
        "$defs": {"f": FILM},
        **object_of(
            x={"$ref": "#/$defs/f"}, y={"type": "array", "items": {"$ref": "#/$defs/f"}, "minItems": 2, "maxItems": 2}
        ),
    },
    "any key": {"type": "object", "additionalProperties": FILM},
    "or any text": object_of(film={"anyOf": [FILM, {"type": "string"}]}),
    "distinct": object_of(top={"type": "array", "items": FEW, "uniqueItems": True, "minItems": 1}, why=FILM),
    "distinct, nested": {
        "type": "array",
        "items": {"type": "array", "items": FEW, "uniqueItems": True, "minItems": 1, "maxItems": 2},
        "maxItems": 3,
    },
    "keys of a pattern": {"type": "object", "patternProperties": {"^x[0-9]$": FILM}, "maxProperties": 2},
    "two sets": object_of(film=FILM, by={"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}),
    "views": object_of(seen=SEEN, short={"type": "array", "items": SHORT, "maxItems": 3}, any=FILM),
    "one root": FILM,
}


def bits(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


class Walker:
    """A walk through a constraint, both ways at once."""

    def __init__(
        self, at: Setting, composite: Composite, own: xgrammar.GrammarMatcher, seed: int, phrases: Any = ()
    ) -> None:
        """phrases: texts that it says now and then, where it may."""
        self.phrases, self.saying = phrases, list[int]()
        self.at, self.composite, self.own, self.random = at, composite, own, random.Random(seed)
        self.tokens: list[int] = []
        self.masks: list[np.ndarray] = []

    def mask(self) -> np.ndarray:
        """The mask, which writes every word."""
        row = np.full(self.at.vocabulary.model_words, self.random.choice([0, -1, 12345]), np.int32)
        self.composite.fill_bitmask(row)
        return row

    def step(self, quoted: bool) -> bool:
        """Compare, and take a token; return whether the walk goes on."""
        at, composite, own, rng = self.at, self.composite, self.own, self.random
        row, theirs = self.mask(), at.mask(own)
        text = at.text_of(self.tokens)
        assert not (extra := bits(row & ~theirs)).size, (text, at.text_of(extra[:3]))
        allowed = bits(row)
        assert allowed.max(initial=0) < at.vocabulary.size
        assert allowed.size, f"a dead end after {text!r}"
        if quoted and self.outside(len(text)):
            missing = bits(theirs & ~row)
            assert not (lost := missing[~at.crossing[missing]]).size, (text, at.text_of(lost[:3]))
        assert may_end(composite, at) == own.is_completed(), text
        assert not composite.is_terminated
        tried = [*rng.sample(range(at.vocabulary.size - 70), 3), *rng.sample(allowed.tolist(), min(2, allowed.size))]
        for token in tried:
            taken = composite.accept(token)
            assert taken == (token in allowed), (text, at.vocabulary.bytes[token])
            if taken:
                composite.rollback(1)
        forced = extend(composite, (), 3, at.vocabulary.model_words)
        assert bool(forced) == (composite.in_set and allowed.size == 1)
        assert not forced or forced[:1] == allowed.tolist()
        if rng.random() < 0.3:
            assert (self.mask() == row).all()
        self.masks.append(row)
        token = self._chosen(allowed)
        assert composite.accept(token)
        assert own.accept_token(token)
        self.tokens.append(token)
        if token == at.stop:
            assert composite.is_terminated
            return False
        if rng.random() < 0.1:
            self._back(rng.randrange(1, len(self.tokens) + 1))
        return True

    def outside(self, end: int) -> bool:
        """Whether every reading is outside of holes, and none has just left one: there, other spellings are missing."""
        threads = self.composite._history[-1]
        if any(thread.hole >= 0 or self.composite._open(thread) for thread in threads):
            return False
        return not any(thread.found and thread.found[-1].end == end for thread in threads)

    def _chosen(self, allowed: np.ndarray) -> int:
        """Mostly what ends a text soon, and no long white space."""
        if self.phrases and not self.saying and self.random.random() < 0.2:
            self.saying = self.at.tokenizer.encode(self.random.choice(self.phrases), add_special_tokens=False)
        if self.saying and (token := self.saying.pop(0)) in allowed:
            return token
        self.saying.clear()
        if self.phrases and len(self.tokens) > 50 and self.at.stop in allowed:
            return int(self.at.stop)
        ending, full = allowed[self.at.ending[allowed]], allowed[self.at.full[allowed]]
        ends = ending.size and self.random.random() < 0.5
        return int(self.random.choice(ending if ends else full if full.size else allowed))

    def _back(self, count: int) -> None:
        """Forget tokens and take them again, as drafts are."""
        composite, back = self.composite, self.tokens[-count:]
        composite.rollback(count)
        assert (self.mask() == self.masks[-count]).all()
        drafts = [*back, self.random.randrange(self.at.vocabulary.size)]
        assert composite.allowed_prefix(drafts)[:count] == back
        assert extend(composite, back, count + 3, self.at.vocabulary.model_words)[:count] == back
        assert (self.mask() == self.masks[-count]).all()
        for token in back:
            assert composite.accept(token)

    def walk(self, steps: int, quoted: bool = True) -> bytes | None:
        """The text, None if it has not ended."""
        for _ in range(steps):
            if not self.step(quoted):
                text = self.at.text_of(self.tokens[:-1])
                self.ended(text, quoted)
                return text
        return None

    def ended(self, text: bytes, quoted: bool) -> None:
        """What was found is what stands in the text."""
        last = 0
        for item in self.composite.found:
            there = text[item.begin : item.end]
            assert last <= item.begin < item.end
            assert there == self.at.text_of(list(item.tokens))
            if quoted:
                assert text[item.begin - 1 : item.begin] == text[item.end : item.end + 1] == b'"'
            last = item.end


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SCHEMAS)
def test_walks_of_schemas(shape: str, name: str) -> None:
    """No token too many; too few only over an opening quote; every way back; every text legal, and its items found."""
    at, schema, ended = setting(name), SCHEMAS[shape], 0
    for seed in range(4):
        composite, own = at.made("schema", schema, any_whitespace=bool(seed % 2))
        walker = Walker(at, composite, own, seed)
        if (text := walker.walk(120)) is None:
            continue
        ended += 1
        answer = json.loads(text.decode(errors="replace"))  # xgrammar takes any bytes in strings
        jsonschema.validate(answer, schema)
        jsonschema.validate(answer, written_out(schema))
        found = [json.loads(b'"%s"' % text[item.begin : item.end]) for item in composite.found]
        if shape == "or any text":
            assert not found  # it may have been any text
        else:
            assert found == items_in(schema, answer, schema)
    assert ended


PARAMETERS = object_of(["film"], film=FILM, why={"type": "string"}, n={"type": "integer"})
TAGS: dict[str, dict[str, Any]] = {
    "free text": {
        "type": "triggered_tags",
        "triggers": ["<film"],
        "tags": [{"begin": "<film>", "content": {"type": "item_set", "item_set": "films"}, "end": "</film>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
    "two tags": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [
            {"begin": "<film>", "content": {"type": "item_set", "item_set": "films"}, "end": "</film>"},
            {"begin": "<by>", "content": {"type": "item_set", "item_set": "people"}, "end": ["</by>", "\n"]},
        ],
    },
    "sequence": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "My film:"},
            {"type": "item_set", "item_set": "short"},
            {"type": "optional", "content": {"type": "const_string", "value": " (mine)"}},
            {"type": "const_string", "value": "."},
        ],
    },
    "json in a tag": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": PARAMETERS},
        "end": "</a>",
    },
    **{
        style: {"type": "json_schema", "style": style, "json_schema": PARAMETERS}
        for style in ("qwen_xml", "minimax_xml", "glm_xml")
    },
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", TAGS)
def test_walks_of_structural_tags(shape: str, name: str) -> None:
    at, ended = setting(name), 0
    legal = {text.encode() for texts in TEXTS.values() for text in texts}
    for seed in range(4):
        composite, own = at.made("tag", {"type": "structural_tag", "format": TAGS[shape]})
        walker = Walker(at, composite, own, seed, ["see <film>", "\n<by>"] if shape == "two tags" else [])
        if (text := walker.walk(120, quoted=False)) is None:
            continue
        ended += 1
        found = [text[item.begin : item.end] for item in composite.found]
        if shape == "json in a tag":
            assert [json.loads(b'"%s"' % one) for one in found] == [json.loads(text[3:-4])["film"]]
            continue
        assert legal.issuperset(found)
        if shape != "two tags":
            assert len(found) == 1
            continue
        for item in composite.found:
            assert text[: item.begin].endswith((b"<film>", b"<by>"))
            assert text[item.end :].startswith((b"</film>", b"</by>", b"\n"))
        outside = b"".join(text[before.end : item.begin] for before, item in pairwise([START, *composite.found]))
        assert len(found) == outside.count(b"<film>") + outside.count(b"<by>")
        ended += 100 * len(found)
    assert ended > 100 or shape != "two tags"
    assert ended


START = Found(0, (), 0, 0)

GRAMMARS = {
    "lines": 'root ::= "film: " film "\\n" root | "done"\nfilm ::= ItemSet("films") | "unknown"',
    "list": 'root ::= "[" ItemSet("few") ("," ItemSet("few"))* "]"',
    "twice the same set": 'root ::= "a:" ItemSet("films") " b:" (ItemSet("people") | ItemSet("films")) ";"',
    "at the end": 'root ::= "The film is: " quoted\nquoted ::= "\\"" ItemSet("few") "\\"" ItemSet("people")?',
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", GRAMMARS)
def test_walks_of_grammars(shape: str, name: str) -> None:
    at, ended = setting(name), 0
    for seed in range(4):
        composite, own = at.made("ebnf", GRAMMARS[shape])
        text = Walker(at, composite, own, seed).walk(120, quoted=False)
        ended += text is not None
        if text is not None and shape == "list":
            # What was found leaves nothing but the grammar's own text, whatever commas the items have.
            found = composite.found
            outside = b"".join(text[a.end : b.begin] for a, b in pairwise([START, *found])) + text[found[-1].end :]
            assert outside == b"[" + b"," * (len(found) - 1) + b"]"
    assert ended


SLATES = {
    "lines": {"item_set": "few", "n": 3},
    "all of them": {"item_set": "few", "n": 4, "separator": "; and:"},
    "a separator that items have": {"item_set": "few", "n": 2, "separator": ","},
    "a space that is no ASCII": {"item_set": "few", "n": 2, "separator": ",\xa0"},
    "one": {"item_set": "people", "n": 1, "separator": ""},
    "of a view": {"item_set": "short", "n": 2, "separator": '"\\\n'},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SLATES)
def test_walks_of_slates(shape: str, name: str) -> None:
    at, slate, ended = setting(name), SLATES[shape], 0
    separator = slate.get("separator", "\n").encode()
    for seed in range(3):
        composite, own = at.made("slate", slate)
        text = Walker(at, composite, own, seed).walk(120, quoted=False)
        if text is None:
            continue
        ended += 1
        found = [text[item.begin : item.end] for item in composite.found]
        assert len(set(found)) == len(found)
        assert {one.decode() for one in found} <= set(TEXTS[slate["item_set"]])
        if shape != "a separator that items have":  # of which two readings may differ
            assert separator.join(found) == text
            assert len(found) == slate["n"]
    assert ended


@pytest.mark.parametrize("n", [2, 3])
def test_slates_without_a_separator(n: int) -> None:
    """Where a text could be of other items, too, the tokens tell: `ab` is an item, or `a` and `b`."""
    at = setting("tekken")
    items = {(token,): text for token, text in enumerate(at.vocabulary.bytes) if text in (b"a", b"ab", b"b", b"abb")}
    assert len(items) == 4
    marked = Marker(lambda _: 4).mark(SLATE, {"item_set": "few", "n": n, "separator": ""})
    compiled, _ = at.composite(marked)
    films = Items(itemset.build([*items]))
    holes = [Hole(films, None, place.group, place.begins) for place in marked.holes]
    for order in permutations(items, n):
        composite = Composite(at.vocabulary, compiled, holes)
        for i, (token,) in enumerate(order):
            row = np.zeros(at.vocabulary.model_words, np.int32)
            composite.fill_bitmask(row)
            assert bits(row).tolist() == sorted(token for (token,) in {*items} - {*order[:i]})
            assert composite.accept(token)
        assert may_end(composite, at)
        assert [one.tokens for one in composite.found] == [*order]


def may_end(composite: Composite, at: Setting) -> bool:
    return composite.allowed_prefix([at.stop]) == [at.stop]


def accepted(composite: Composite, at: Setting, tokens: list[int]) -> bool:
    return all(map(composite.accept, tokens)) and may_end(composite, at)


@pytest.mark.parametrize("name", NAMES)
def test_every_item_in_its_own_tokens(name: str) -> None:
    """Also where the item's last token and what closes it are one token of the vocabulary."""
    at, bridged = setting(name), 0
    schema = object_of(film=FILM, reason={"type": "string"})
    composite, _ = at.made("schema", schema, any_whitespace=False)

    def plain(text: str) -> list[int]:
        return at.tokenizer.encode("\n" + text, add_special_tokens=False)[len(newline) :]

    newline = at.tokenizer.encode("\n", add_special_tokens=False)
    items = at.set_of("films", True)
    for key, item in zip(items.keys.to_pylist(), items.items(), strict=True):
        text = TEXTS["films"][key]
        before, after = plain('{"film": "'), plain('", "reason": "good"}')
        assert at.text_of(item) == as_json(text)
        assert accepted(composite, at, [*before, *item, *after])
        found = [Found(0, tuple(item), 10, 10 + len(as_json(text)))]
        assert composite.found == found
        composite.reset()
        for token, one in enumerate(at.vocabulary.bytes):
            if one == at.vocabulary.bytes[item[-1]] + b'",':
                rest = plain(' "reason": "good"}')
                assert accepted(composite, at, [*before, *item[:-1], token, *rest]), (text, one)
                assert composite.found == found
                composite.reset()
                bridged += 1
    assert bridged or name == "tiny"


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_has_every_bridge_that_is_taken(name: str) -> None:
    """And no other: of texts after an item that are tokens of their own, and of those that are none."""
    at, seen = setting(name), Counter[bool]()

    def tokens(text: str) -> list[int]:
        return at.tokenizer.encode("\n" + text, add_special_tokens=False)[len(newline) :]

    newline, row = at.tokenizer.encode("\n", add_special_tokens=False), np.zeros(at.vocabulary.model_words, np.int32)
    field, _ = at.made("schema", object_of(film=FILM, reason={"type": "string"}), any_whitespace=False)
    distinct, _ = at.made("schema", {"type": "array", "items": FEW, "uniqueItems": True}, any_whitespace=False)
    cases = [(field, tokens('{"film": "'), item) for item in at.set_of("films", True).items()]
    for first, second in permutations(at.set_of("few", True).items(), 2):
        cases.append((distinct, [*tokens('["'), *first, *tokens('", "')], second))
    for composite, before, item in cases:
        for token in (*before, *item[:-1]):
            assert composite.accept(token)
        composite.fill_bitmask(row)
        allowed, bridges = {*bits(row).tolist()}, at.vocabulary.bridges(b'"')
        for token, pairs in bridges.by_token.items():
            taken = composite.accept(token)
            composite.rollback(taken)
            assert taken == (token in allowed), (at.text_of(item), at.vocabulary.bytes[token])
            for _, rest in pairs if taken else ():
                seen[rest in bridges.alone] += 1
        composite.reset()
    assert seen[True] or name == "tiny", seen


def test_readings_that_differ_find_what_they_share() -> None:
    """`M` and `Alien` are films and people: which of them was given, nothing tells. The others are found."""
    at = setting("tekken")
    schema = {"type": "array", "items": {"anyOf": [FILM, PERSON]}, "minItems": 3, "maxItems": 3}
    composite, _ = at.made("schema", schema, any_whitespace=False)
    assert accepted(composite, at, at.tokenizer.encode('["Aliens", "M", "Mo"]', add_special_tokens=False))
    assert [at.text_of(list(item.tokens)) for item in composite.found] == [b"Aliens", b"Mo"]
    schema = object_of(a={"anyOf": [FILM, {"const": "Up"}]}, b=FILM)
    composite, _ = at.made("schema", schema, any_whitespace=False)
    assert accepted(composite, at, at.tokenizer.encode('{"a": "Up", "b": "Upside"}', add_special_tokens=False))
    assert [at.text_of(list(item.tokens)) for item in composite.found] == [b"Upside"]


def test_wrong_calls() -> None:
    at = setting("tiny")
    composite, _ = at.made("schema", FILM)
    before = len(composite._history)
    for token in (-1, at.vocabulary.size, at.vocabulary.first, at.vocabulary.decoy, at.vocabulary.decoy + 1):
        assert not composite.accept(token)
    for count in (-1, before):
        with pytest.raises(ValueError, match="cannot roll back"):
            composite.rollback(count)
    assert composite.allowed_prefix([at.stop]) == []
    short = np.full(3, -1, np.int32)
    composite.fill_bitmask(short)  # a bitmask narrower than the vocabulary
    row = np.zeros(at.vocabulary.words + 2, np.int32)
    composite.fill_bitmask(row)
    assert (row[:3] == short).all()
    assert not row[at.vocabulary.model_words :].any()


def test_stop_tokens_of_a_request() -> None:
    at = setting("tekken")
    compiled, holes = at.composite(marked("schema", FILM))
    other = at.tokenizer.convert_tokens_to_ids("Ġthe")
    composite = Composite(at.vocabulary, compiled, holes, [other])
    for token in at.tokenizer.encode('"Up"', add_special_tokens=False):
        assert composite.accept(token)
    row = np.zeros(at.vocabulary.model_words, np.int32)
    composite.fill_bitmask(row)
    assert other in bits(row)
    assert at.stop not in bits(row)
    for _ in range(2):  # with ignore_eos a request goes on
        assert composite.accept(other)
        assert composite.is_terminated
        composite.fill_bitmask(row)
        assert bits(row).tolist() == [other]
        assert not any(map(composite.accept, (at.stop, *at.tokenizer.encode("x", add_special_tokens=False))))
    composite.rollback(2)
    assert not composite.is_terminated


def marked(kind: str, given: Any, size: Any = size_of) -> Any:
    return Marker(size).mark(KINDS.get(kind, kind), given)


def within(**node: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "object", **node}}}


def defining(**properties: Any) -> dict[str, Any]:
    """A schema with two definitions, of a film and an object."""
    return {"$defs": {"f": FILM, "g": {"type": "object"}}, **object_of(**properties)}


UNHELD: dict[str, Any] = {
    **{
        word: within(**{word: FILM})
        for word in ("not", "if", "then", "else", "contains", "propertyNames", "contentSchema", "no_such_keyword")
    },
    "then of if": within(**{"if": {"type": "string"}, "then": FILM}),
    "dependentSchemas": within(dependentSchemas={"b": object_of(c=FILM)}),
    "items as a list": {"type": "array", "items": [FILM, {"type": "null"}]},
    "several of allOf": {"allOf": [FILM, {"type": "string"}]},
    "allOf by references": {
        "$defs": {"f": FILM},
        "properties": {"b": FILM},
        "allOf": [{"$ref": "#/$defs/f"}, {"type": "string"}],
    },
    "not by reference": {"$defs": {"f": FILM}, "properties": {"b": FILM, "a": {"not": {"$ref": "#/$defs/f"}}}},
    "distinct by reference": {
        "$defs": {"f": FILM},
        "type": "array",
        "items": {"$ref": "#/$defs/f"},
        "uniqueItems": True,
    },
    "distinct or null": {"type": "array", "items": {"anyOf": [FILM, {"type": "null"}]}, "uniqueItems": True},
    "distinct after others": {"type": "array", "prefixItems": [FILM], "items": FILM, "uniqueItems": True},
    "distinct with null": {"type": "array", "items": {**FILM, "type": ["string", "null"]}, "uniqueItems": True},
    "more than there are": {"type": "array", "items": FEW, "uniqueItems": True, "minItems": 5},
    **{word: {**FILM, word: 3} for word in ("minLength", "maxLength", "enum", "const", "items", "x-mine")},
    **{f"{word} beside": {**FILM, word: "date"} for word in ("format", "pattern")},
    "another type": {"item_set": "films", "type": "number"},
    "other types": {"item_set": "films", "type": ["string", "integer"]},
    "no name": {"item_set": 3},
    "no texts": {"item_set": []},
    "a filter of an inline set": {"item_set": ["a"], "exclude_keys": [1]},
    "beside a type that has none": {"type": "integer", "properties": {"a": FILM}},
    "a number of items": {"type": "array", "items": FEW, "uniqueItems": True, "maxItems": "3"},
    "another document": defining(b={"$ref": "#/$defs/f"}, a={"$ref": "https://x.org/f.json#/$defs/f"}),
    "an anchor": defining(b={"$ref": "#/$defs/f"}, a={"$ref": "#f"}),
    "a key of a pattern": object_of(b=FILM) | {"patternProperties": {"^[a-z]$": {"type": "string"}}},
    "a key of two patterns": {"type": "object", "patternProperties": {"^x": FILM, "^xy": {"type": "string"}}},
    "a property called definitions": within(properties={"definitions": {"not": FILM}}),
    **{
        f"properties beside {word}": defining(
            b={"$ref": "#/$defs/f"}, a={word: value, "properties": {"c": {"$ref": "#/$defs/f"}}}
        )
        for word, value in {"anyOf": [{"required": ["c"]}], "allOf": [{}], "$ref": "#/$defs/g", "enum": [{}]}.items()
    },
}


@pytest.mark.parametrize("where", UNHELD)
def test_refuses_what_would_not_hold(where: str) -> None:
    with pytest.raises(ItemSetError):
        marked("schema", UNHELD[where])
    deeper = {"type": "array", "items": object_of(x=UNHELD[where], y=FILM)}
    if "$defs" not in json.dumps(deeper):
        with pytest.raises(ItemSetError):
            marked("schema", json.dumps(deeper))
        content = {"type": "json_schema", "json_schema": deeper}
        with pytest.raises(ItemSetError):
            marked("tag", {"type": "structural_tag", "format": content})


OF_TAG = {"type": "item_set", "item_set": "films"}
BAD_TAGS: dict[str, dict[str, Any]] = {
    "no set": {"type": "item_set"},
    "another word": {"type": "item_set", "item_set": "films", "style": "x"},
    "a space": {"type": "tag", "begin": "<f> ", "content": {"type": "or", "elements": [OF_TAG, OF_TAG]}, "end": "</f>"},
    "no format": {"type": "regex", "pattern": {"type": "item_set", "item_set": "films"}},
    "excluded texts": {"type": "json_schema", "json_schema": FILM, "excludes": ["Alien"]},
    "after any text but": {"type": "sequence", "elements": [{"type": "any_text", "excludes": ["x"]}, OF_TAG]},
    "after any text in a tag": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "sequence", "elements": [{"type": "any_text"}, OF_TAG]},
        "end": "</f>",
    },
    "after tags without end": {
        "type": "sequence",
        "elements": [{"type": "triggered_tags", "triggers": ["<f>"], "tags": []}, OF_TAG],
    },
}


@pytest.mark.parametrize("where", BAD_TAGS)
def test_refuses_tags(where: str) -> None:
    with pytest.raises((ItemSetError, ValueError, RuntimeError)):
        marked("tag", {"type": "structural_tag", "format": BAD_TAGS[where]})


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= ItemSet()",
        "root ::= ItemSet(films)",
        'root ::= ItemSet("films"',
        'root ::= ItemSet("films", "people")',
        'root ::= ItemSet({"item_set": "films", "limit": 3})',
        'root ::= ItemSet({"exclude_keys": [3]})',
        'root ::= ItemSet("films',
    ],
)
def test_refuses_grammars(grammar: str) -> None:
    with pytest.raises(ItemSetError):
        marked("ebnf", grammar)


def test_a_space_before_an_item_is_the_items_own() -> None:
    grammars = ['root ::= "a film: " ItemSet("films") "."', 'root ::= x " "\nItemSet("films")\nx ::= "a"']
    for grammar in grammars:
        found = marked("ebnf", grammar)
        assert [place.spaced for place in found.holes] == [True]
        assert ' "' not in found.grammar.replace(' "ITEMSET', "").replace(' "a', "").replace(' "."', "")
    for grammar in ('root ::= "x " ItemSet("films")?', 'root ::= "x " ItemSet("films") {2}'):
        with pytest.raises(ItemSetError, match="may not end in a space"):
            marked("ebnf", grammar)
    found = marked("ebnf", '# say "x "\nroot ::= ItemSet("films")')
    assert [place.spaced for place in found.holes] == [False]
    tag = {"type": "tag", "begin": "pip install ", "content": OF_TAG, "end": "\n"}
    form = {"type": "triggered_tags", "triggers": ["pip install"], "tags": [tag]}
    found = marked("tag", {"type": "structural_tag", "format": form})
    assert [place.spaced for place in found.holes] == [True]
    assert "pip install " not in found.spec
    with pytest.raises(ItemSetError, match="triggers: 'pip install ' ends in the space of an item's first token"):
        marked("tag", {"type": "structural_tag", "format": form | {"triggers": ["pip install "]}})
    assert tag["begin"] == "pip install "  # the caller's object is not changed


class Counting(Vocabulary):
    """How often it was asked for what takes its time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts = Counter[str]()

    def compile(self, grammar: str) -> xgrammar.CompiledGrammar:
        self.counts["compiled"] += 1
        return super().compile(grammar)

    @functools.lru_cache  # noqa: B019
    def _bridges(self, closers: bytes) -> Any:
        self.counts["bridges"] += 1
        time.sleep(0.05)  # so that the others come in the meantime
        return super()._bridges(closers)


def test_copies_of_a_request_share_its_grammar() -> None:
    """With `n` all of them come at once. When they have ended, nothing of it is left."""
    at, made = setting("tiny"), list[Vocabulary]()

    def vocabulary() -> Vocabulary:
        made.append(Counting(at.info))
        return made[-1]

    found, grammars = marked("slate", {"item_set": "few", "n": 3}), Grammars(vocabulary)
    closing = [closers.decode() for closers in found.closers()]
    holes = [["few", closers, one.group, one.begins] for one, closers in zip(found.holes, closing, strict=True)]
    spec = ENVELOPE + json.dumps([found.ebnf(at.vocabulary.first), holes])
    with ThreadPoolExecutor(16) as pool:
        shared = list(pool.map(lambda _: grammars.get(spec, lambda name: at.set_of(name, False)), range(16)))
    assert len({*shared}) == len(made) == 1
    assert made[0].counts == {"compiled": 1, "bridges": 1}
    first, second = (Composite(*one.get(), [at.stop]) for one in shared[:2])
    for token in at.tokenizer.encode("Up", add_special_tokens=False):
        assert first.accept(token)
    assert not second.found
    alone = weakref.ref(shared[0])
    del shared, first, second
    gc.collect()
    assert alone() is None


def test_the_items_of_a_hole_stand_in_no_circle() -> None:
    """A set whose version is superseded goes with its last request, not when Python next looks for circles."""
    warm_up()  # a compiler's own circles may hold its arguments
    gc.disable()
    try:
        item_set = itemset.build([[0, 1], [0, 2], [1]])
        alone = weakref.ref(item_set)
        left = Items(item_set).without((1,))
        assert (left.step(0, 1), left.step(0, 0) != DEAD) == (DEAD, True)
        del item_set, left
        assert alone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "word", ["item_set", "not", "if", "enum", "$ref", "properties", "items", "const", "default", "definitions"]
)
def test_a_property_may_have_any_name(word: str) -> None:
    """Also one that is a keyword: with a set as its value, and with a string beside a set."""
    for value in (FILM, {"type": "string"}):
        schema = object_of(**{word: value, "film": FILM})
        holes = marked("schema", schema)
        assert len(holes.hole_of) == (2 if value is FILM else 1)
        assert len(holes.holes) == 1
        at = setting("tiny")
        composite, _ = at.made("schema", schema, any_whitespace=False)
        text = json.dumps({word: "Up", "film": "Alien"})
        assert accepted(composite, at, at.tokenizer.encode(text, add_special_tokens=False))
        assert len(composite.found) == len(holes.hole_of)
    assert marked("schema", object_of(**{word: {"type": "string"}})) is None


@pytest.mark.parametrize("name", ["com.acme.Film", "a b", "definitions", "default"])
def test_a_definition_may_have_any_name(name: str) -> None:
    """One that nothing refers to is left out. The reference may stand below a property with a keyword's name."""
    refers = {"$ref": f"#/$defs/{name}"}
    for schema in (object_of(default=refers), {"$defs": {"g": object_of(a=refers)}, "$ref": "#/$defs/g"}):
        definitions = schema.get("$defs", {}) | {name: FILM, "unused": object_of(b=PERSON)}
        assert [place.named for place in marked("schema", schema | {"$defs": definitions}).holes] == ["films"]
    assert marked("schema", object_of(a={"type": "null"}) | {"$defs": {name: FILM}}) is None


def test_one_definition_inside_and_outside_a_string() -> None:
    """The style of some models' tools: an argument is bare text, but in an object it is JSON."""
    refers = {"$ref": "#/$defs/f"}
    schema = {"$defs": {"f": FILM}, **object_of(film=refers, more=object_of(film=refers))}
    form = {"type": "qwen_xml_parameter", "json_schema": schema}
    holes = marked("tag", {"type": "structural_tag", "format": form}).holes
    assert [(place.named, place.quoted) for place in holes] == [("films", False), ("films", True)]


def test_no_escape_brings_a_stated_key_again() -> None:
    schema = {**object_of(film=FILM), "additionalProperties": True}
    at = setting("tiny")
    for key, allowed in (("filn", True), ("fil\\u006d", False), ("\\u0066ilm", False), ("film", False), ("x\\n", True)):
        composite, _ = at.made("schema", schema, any_whitespace=False)
        text = f'{{"film": "Alien", "{key}": 3}}'
        assert accepted(composite, at, at.tokenizer.encode(text, add_special_tokens=False)) == allowed, key
        composite.reset()


def test_an_array_of_no_items() -> None:
    found = marked("schema", object_of(a={"type": "array", "items": FILM, "uniqueItems": True, "maxItems": 0}, b=FILM))
    assert [place.path for place in found.holes] == ["$.properties.b"]


def test_patterns_with_counts() -> None:
    """xgrammar's cache of rules fails for many of them, and without it a pattern takes the square of its counts."""
    at = setting("tiny")
    for pattern in ("^[a-z]{0,200}$", "^[a-z]{1900,}$"):
        found = marked("schema", object_of(film=FILM, why={"type": "string", "pattern": pattern}))
        assert at.vocabulary.compile(found.ebnf(at.vocabulary.first)) is not None
    for pattern in ("^[a-z]{0,2001}$", "^[a-z]{1001}[0-9]{1000,}$", "^([a-z]{0,50}){0,41}x{}$"):
        given = {"type": "sequence", "elements": [{"type": "regex", "pattern": pattern}, OF_TAG]}
        schema = object_of(film=FILM, why={"type": "string", "pattern": pattern})
        for kind, one in (("schema", schema), ("tag", {"type": "structural_tag", "format": given})):
            with pytest.raises(ItemSetError, match="patterns of the constraint repeat something 2,0"):
                marked(kind, one)


def test_what_is_kept_of_an_answer_grows_with_its_length() -> None:
    """Each token's readings share the items before."""
    at = setting("tiny")
    composite, _ = at.made("ebnf", 'root ::= (ItemSet("few") ";")*')
    tokens = at.tokenizer.encode("Up;Upside;" * 200, add_special_tokens=False)
    assert composite.read(tokens) == len(tokens)
    assert len(composite.found) == 400
    readings = [one for threads in composite._history for one in threads]
    assert sum(len(one.found or ()) for one in readings) <= 2 * len(readings)


def test_quotes_in_patterns_of_grammars() -> None:
    assert len(marked("lark", r'start: /"/ ItemSet("films") /[^"\/]/ "//" ItemSet("people")').holes) == 2


BAD_SLATES: dict[str, Any] = {
    "must be an object of item_set, n and separator": ["films"],
    'such as {"item_set": "films", "n": 5, "separator": "\\\\n"}, not \'films\'': "films",
    "slate has no item_set": {"n": 5},
    "no JSON": "{",
    "there is no 'k'": {"item_set": "films", "k": 5},
    "slate has no n, which is how many items": {"item_set": "films"},
    "n must be a number": {"item_set": "films", "n": "5"},
    "not True": {"item_set": "films", "n": True},
    "not 0": {"item_set": "films", "n": 0},
    "not 1001": {"item_set": "films", "n": 1_001},
    "there are 4 distinct": {"item_set": "few", "n": 5},
    "not 7": {"item_set": "few", "n": 1, "separator": 7},
    r"the character U\+0000": {"item_set": "few", "n": 1, "separator": "\0"},
    r"the character U\+D800": {"item_set": "few", "n": 1, "separator": "\ud800"},
    r"the character U\+200D, which is invisible": {"item_set": "few", "n": 1, "separator": ",\u200d"},
    "end in a space": {"item_set": "few", "n": 1, "separator": ", "},
    "must be a set's name": {"item_set": 5, "n": 1},
    "must be a list of keys": {"item_set": "few", "n": 1, "only_keys": 3},
    "more than 128 levels": json.loads('{"item_set": ' + "[" * 200 + "]" * 200 + ', "n": 1}'),
}


@pytest.mark.parametrize("sentence", BAD_SLATES)
def test_refuses_slates(sentence: str) -> None:
    with pytest.raises(ItemSetError, match=sentence):
        marked("slate", BAD_SLATES[sentence])


def test_what_is_no_set() -> None:
    """Constants, texts in grammars, comments and character classes."""
    for schema in (
        {"const": {"item_set": "films"}},
        {"enum": [{"item_set": "films"}, "ITEMSET0123456789abcdefN0E"]},
        {"type": "string", "default": {"item_set": "films"}},
        True,
        {},
    ):
        assert marked("schema", schema) is None
    assert marked("ebnf", 'root ::= "ItemSet(" [ItemSet("x")] # ItemSet("films")') is None
    constant = object_of(a={"const": "ITEMSET0123456789abcdefN0E"}, film=FILM)
    holes = marked("schema", constant)
    assert len(holes.hole_of) == 1
    assert "ITEMSET0123456789abcdefN0E" in holes.ebnf(1000)


def test_too_many_sets() -> None:
    def several(count: int) -> dict[str, Any]:
        return object_of(**{f"p{i}": {"type": "string", "item_set": f"set {i}"} for i in range(count)})

    assert len(marked("schema", several(HOLES)).holes) == HOLES
    with pytest.raises(ItemSetError, match=f"the limit is {HOLES}"):
        marked("schema", several(HOLES + 1))
    many = object_of(**{f"p{i}": FILM for i in range(100)})
    assert len(marked("schema", many).holes) == 1


@pytest.mark.parametrize("depth", [60, 130, 1_000, 100_000])
def test_deep_constraints(depth: int) -> None:
    """They are refused before anything walks them: whatever is too deep for Python, or for xgrammar."""
    deep: dict[str, Any] = FILM
    for _ in range(depth):
        deep = {"items": deep}
    text = '{"items":' * depth + json.dumps(FILM) + "}" * depth
    tag = '{"type":"structural_tag","format":{"type":"json_schema","json_schema":%s}}'
    if depth == 60:
        assert len(marked("schema", deep).holes) == len(marked("schema", text).holes) == 1
        return
    for kind, given in (("schema", deep), ("schema", text), ("tag", tag % text), ("tag", {"format": [deep]})):
        with pytest.raises(ItemSetError, match="levels deep"):
            marked(kind, given)


def test_rules_cache_forgets_ids() -> None:
    """Why `Vocabulary` compiles grammars that name a model's own tokens without a cache."""
    at = setting("tiny")
    rows = []
    for cached in (True, False):
        compiler = xgrammar.GrammarCompiler(at.info, max_threads=1, cache_enabled=cached)
        for token in (100, 200):
            compiled = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(f'root ::= ("a" | Token({token})) "b"'))
            matcher = xgrammar.GrammarMatcher(compiled)
            rows.append(sorted({100, 200}.intersection(bits(at.mask(matcher)).tolist())))
    assert rows[2:] == [[100], [200]]
    assert rows[:2] == [[100], [100]], (
        "this release of xgrammar no longer forgets the ids of Token() in its cache of rules: `Vocabulary` may compile "
        "all grammars with its cached compiler, without `_exact` and `_names_tokens`, once that one is required"
    )


def test_grammars_with_a_models_tokens() -> None:
    """A vocabulary compiles two that differ in an id alone, and one with holes."""
    at = setting("tiny")
    for token in (100, 200, 300):
        text = f'root ::= ("a" | Token({token}) | ItemSet("few")) "b"'
        compiled, holes = at.composite(marked("ebnf", text))
        row = np.zeros(at.vocabulary.model_words, np.int32)
        Composite(at.vocabulary, compiled, holes).fill_bitmask(row)
        assert {100, 200, 300}.intersection(bits(row).tolist()) == {token}


def test_names_tokens() -> None:
    vocabulary = setting("tiny").vocabulary
    first = vocabulary.first
    for text in ("Token(3)", f"Token({first}, 3)", "ExcludeToken(1)", "TokenTagDispatch((1, a))", f"Token( 3,{first})"):
        assert vocabulary._names_tokens(f"root ::= {text}"), text
    for text in (f"Token({first})", f'"a" Token({first}) "b"', '"x"'):
        assert not vocabulary._names_tokens(f"root ::= {text}"), text


def test_vocabularies_of_any_size() -> None:
    """Holes begin on the border of a word."""
    for size in (547, 544, 576, 577):
        info = xgrammar.TokenizerInfo.from_huggingface(setting("tiny").tokenizer, vocab_size=max(size, 547))
        vocabulary = Vocabulary(info)
        assert vocabulary.first % 32 == 0
        assert vocabulary.size <= vocabulary.first < vocabulary.size + 32
        assert vocabulary.words == vocabulary.model_words + 1


def test_many_places_of_one_set() -> None:
    """As many as there may be make one hole; one more is refused."""
    field = {"type": "string", "item_set": "films"}

    def schema(places: int) -> dict[str, Any]:
        return {"type": "array", "prefixItems": [field] * places, "items": False}

    marked = Marker(lambda place: 5).mark(JSON, schema(PLACES))
    assert marked is not None
    assert len(marked.holes) == 1
    assert marked.ebnf(96).count("Token(96)") == PLACES
    assert marked.closers() == [b'"']
    with pytest.raises(ItemSetError, match="more than 1,000 places"):
        Marker(lambda place: 5).mark(JSON, schema(PLACES + 1))
