"""Grammars with holes and, for the same constraint, xgrammar's own grammars, in which all items are written out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from itertools import chain, permutations
from typing import Any

import numpy as np
import torch
import xgrammar
from real_tokenizers import tokenizer

import itemset
from itemset.embedded.composite_grammar import Composite
from itemset.embedded.holes import Hole, Items, Vocabulary
from itemset.embedded.placement import JSON, TAG, Marked, Place
from itemset.embedded.rewrite import Marker
from itemset.item_set import ItemSet
from itemset.select.views import view
from itemset.text import Escape, escaped

FILMS = [
    "Alien", "Aliens", "Alien 3", "Alien³", "The Godfather", "The Godfather: Part II", "Mamma Mia!", "Amélie",
    "Mamma Mia! (2008)", "(500) Days", "千と千尋の神隠し", 'He said "No"', "Back\\slash", "Tab\there", "New\nline",
    "M", "M*A*S*H", "2001", "2001: A Space Odyssey", '"Quoted"', "AC/DC", "<film>", "A</film>", '{"x": 1}', "null", "1",
    "12", "😀", "😀😀", " a space first", "a space last ", "x" * 40, "]", "[", ",", "}", "Up", "Upside",
]  # fmt: skip
PEOPLE = ["M", "Mo", "Ann Lee", 'Bob "B" Ray', "Al", "Alien"]
SEEN = FILMS[::2]
SHORT = [text for text in FILMS if len(text) < 5 and text != "Up"]
TEXTS = {"films": FILMS, "people": PEOPLE, "few": ["Up", "Upside", "A, B", 'A"'], "seen": SEEN, "short": SHORT}
KINDS = {"schema": JSON, "tag": TAG}  # shorter words of the tests
FILM, FEW, PERSON = ({"type": "string", "item_set": name} for name in ("films", "few", "people"))


class Setting:
    """A tokenizer with its vocabulary, its sets and xgrammar's own compiler."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tokenizer(name)
        self.info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=len(self.tokenizer) + 70)
        self.vocabulary = Vocabulary(self.info)
        self.plain = xgrammar.GrammarCompiler(self.info, max_threads=2)
        self.stop = self.info.stop_token_ids[0]
        texts = [*self.vocabulary.bytes, *[b""] * 32]
        ids = np.arange(self.vocabulary.first) < self.vocabulary.size
        self._tokens = np.packbits(ids, bitorder="little").view(np.int32)  # xgrammar may set bits after the last one
        self.crossing = np.array([b'"' in text[:-1] for text in texts])
        """Of each token, whether it goes on after a quote."""
        self.ending = np.array([any(end in text for end in (b'"', b"}", b"]", b"<")) for text in texts])
        self.ending[self.stop] = True
        self.full = np.array([bool(text.strip()) for text in texts])

    @functools.lru_cache  # noqa: B019 - as many as there are sets
    def set_of(self, name: str, quoted: bool) -> ItemSet:
        """A set, for JSON strings or for other text. `seen` and `short` are views of the films."""
        if name == "seen":
            return view(self.set_of("films", quoted), exclude_keys=[i for i, t in enumerate(FILMS) if t not in SEEN])
        if name == "short":
            return view(self.set_of("films", quoted), {"length": {"$lt": 5}}, exclude_keys=[FILMS.index("Up")])
        attributes = {"length": [len(text) for text in TEXTS[name]]}
        escape: Escape = "json" if quoted else "text"
        return itemset.build_text(TEXTS[name], self.tokenizer, escape=escape, attributes=attributes)

    def holes(self, marked: Marked) -> list[Hole]:
        """The holes of a marked grammar, as a server makes them."""
        items = {place.asks: Items(self.set_of(str(place.named), place.quoted)) for place in marked.holes}
        bridges = [self.vocabulary.bridges(closers) for closers in marked.closers()]
        return [
            Hole(items[place.asks], bridge, place.group, place.begins)
            for place, bridge in zip(marked.holes, bridges, strict=True)
        ]

    def composite(self, marked: Marked) -> tuple[xgrammar.CompiledGrammar, list[Hole]]:
        return self.vocabulary.compile(marked.ebnf(self.vocabulary.first)), self.holes(marked)

    def made(self, kind: str, given: Any, **options: Any) -> tuple[Composite, xgrammar.GrammarMatcher]:
        """A constraint of the kind schema, tag, slate or ebnf, with holes and written out."""
        compiled, holes, own = self._made(kind, json.dumps(given), tuple(options.items()))
        return Composite(self.vocabulary, compiled, holes), xgrammar.GrammarMatcher(own)

    @functools.lru_cache  # noqa: B019 - a few of them
    def _made(self, kind: str, text: str, options: tuple[tuple[str, Any], ...]) -> tuple[Any, list[Hole], Any]:
        given = json.loads(text)
        marked = Marker(size_of).mark(KINDS.get(kind, kind), given, dict(options))
        assert marked is not None
        if kind == "schema":
            own = self.plain.compile_json_schema(json.dumps(written_out(given)), **dict(options))
        elif kind == "tag":
            own = self.plain.compile_structural_tag(json.dumps(written_out(given)))
        elif kind == "slate":
            orders = permutations(TEXTS[given["item_set"]], given["n"])
            texts = [json.dumps(given.get("separator", "\n").join(order), ensure_ascii=False) for order in orders]
            own = self.plain.compile_grammar(f"root ::= {' | '.join(texts)}")
        else:
            own = self.plain.compile_grammar(written_out(given))
        return *self.composite(marked), own

    def text_of(self, tokens: list[int]) -> bytes:
        return b"".join(self.vocabulary.bytes[token] for token in tokens)

    def mask(self, matcher: xgrammar.GrammarMatcher) -> Any:
        """xgrammar's bitmask, [ceil(vocabulary / 32)] int32."""
        row = torch.zeros((1, self.vocabulary.model_words), dtype=torch.int32)
        matcher.fill_next_token_bitmask(row)
        return row.numpy()[0] & self._tokens


@functools.cache
def setting(name: str) -> Setting:
    return Setting(name)


def size_of(place: Place) -> int:
    return len(TEXTS[str(place.named)])


def written_out(node: Any) -> Any:
    """A constraint without item sets: enums, alternatives, and distinct items in every order that they may have."""
    if isinstance(node, str):
        for name, texts in TEXTS.items():
            literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            node = node.replace(f'ItemSet("{name}")', f"({literals})")
        return node
    if isinstance(node, list):
        return [written_out(one) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "item_set":
        return {"type": "or", "elements": [{"type": "const_string", "value": t} for t in TEXTS[node["item_set"]]]}
    if isinstance(node.get("item_set"), str) and node.get("type") == "string":
        return {"enum": TEXTS[node["item_set"]]}
    if node.get("uniqueItems"):
        texts = TEXTS[node["items"]["item_set"]]
        orders = [
            {"type": "array", "prefixItems": [{"const": text} for text in order], "items": False, "minItems": n}
            for n in range(node.get("minItems", 0), min(node.get("maxItems", len(texts)), len(texts)) + 1)
            for order in permutations(texts, n)
        ]
        return {"anyOf": orders}
    return {key: written_out(value) if key != "default" else value for key, value in node.items()}


def items_in(node: Any, value: Any, whole: Mapping[str, Any]) -> list[str]:
    """The items in an answer to a schema, in the order in which they stand there."""
    if "$ref" in node:
        return items_in(whole["$defs"][node["$ref"].rsplit("/", 1)[1]], value, whole)
    if "item_set" in node and isinstance(node["item_set"], str):
        return [value]
    for one in node.get("anyOf", ()):
        if found := items_in(one, value, whole):
            return [text for text in found if one.get("item_set") is None or text in TEXTS[one["item_set"]]]
    if isinstance(value, dict):
        others = node.get("additionalProperties") or {}
        others = next(iter(node.get("patternProperties", {}).values()), others)
        each = [items_in(node.get("properties", {}).get(key, others), one, whole) for key, one in value.items()]
        return list(chain(*each))
    if isinstance(value, list) and isinstance(node.get("items"), dict):
        return list(chain(*(items_in(node["items"], one, whole) for one in value)))
    return []


def as_json(text: str) -> bytes:
    return escaped(text, "json").encode()
