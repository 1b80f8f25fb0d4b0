"""A place of an item set in a constraint, and a grammar with marks in such places."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORD = "item_set"
"""The keyword of a JSON schema, the type of a structural tag's content, and of it the set."""
SELECTION = ("item_filter", "exclude_keys", "only_keys")
"""What may stand beside it: which of its items, as in a request."""
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON schemas under which names stand, not keywords."""
NO_SCHEMAS = {"const", "enum", "default", "examples"}
"""Keywords under which anything may stand."""
EBNF_SET = re.compile(r"(?<![\w.-])[Ii]tem_?[Ss]ets?\s*\(")
"""A set in a grammar, rightly or nearly."""
NO_SPACE = (
    "may not end in a space, which belongs to the first token of an item: omit it, and build the set with --prefix ' '"
)
_WRITTEN = re.compile(r"items?[-_ ]?sets?")


def means_set(key: str) -> bool:
    """Whether a key is `item_set`, or that in another spelling or the plural."""
    return _WRITTEN.fullmatch(key.lower()) is not None


def says_set(text: str) -> bool:
    """Whether a text has one of our words in it, if not in escapes. Never wrong about one that has not."""
    text = text.lower()  # a pattern without cases is found many times as fast
    return _WRITTEN.search(text) is not None or any(word in text for word in SELECTION)


_ESCAPED = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}  # in literals of xgrammar's, where any character may be escaped
_CLOSERS = 16
"""Bytes after a hole over which bridges are looked for: each takes a pass over the vocabulary, and more is no JSON."""


@dataclass(frozen=True)
class Place:
    """One place of an item set.

    path: for people, such as `$.properties.film`. named: the set's name, or the texts of an inline one. selection:
    which of its items. group, begins: as of `holes.Hole`. closers: what may come right after it, as far as its place
    says that. quoted: whether it is inside a JSON string; known once it is placed.
    """

    path: str
    named: str | list[Any]
    selection: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None
    begins: bool = False
    closers: str = ""
    quoted: bool = False

    @property
    def asks(self) -> tuple[str | tuple[str, ...], str, bool]:
        """What it asks for: equal for equal items."""
        named = self.named if isinstance(self.named, str) else tuple(self.named)
        return named, json.dumps(self.selection, sort_keys=True, default=repr), self.quoted


@dataclass(frozen=True)
class Marked:
    """A grammar as xgrammar prints it, with marks in it.

    spec: what it was made of, with marks in place of the sets. mark: finds them, and their numbers. hole_of: of each
    number that of its hole in `holes`. slate: of a slate, how many items, and the text between them.
    """

    spec: str
    grammar: str
    mark: re.Pattern[str]
    holes: list[Place]
    hole_of: Mapping[int, int]
    slate: tuple[int, str] | None = None

    def ebnf(self, first: int) -> str:
        """Return the grammar in which hole k is the token `first + k`."""
        return self.mark.sub(lambda mark: f'" Token({first + self.hole_of[int(mark[1])]}) "', self.grammar)

    def closers(self) -> list[bytes]:
        """Return, of each hole, the bytes that may come next, as far as the grammar says them right there."""
        found = [set(place.closers) for place in self.holes]
        for number, after in re.findall(self.mark.pattern + r'(?:"\)*\s+(?:\(*)")?((?:[^"\\]|\\.)?)', self.grammar):
            found[self.hole_of[int(number)]].add(_ESCAPED.get(after, after[-1:]))
        each = ["".join(sorted(texts)).encode("utf-8", "ignore") for texts in found]
        return [texts if len(texts) <= _CLOSERS else b"" for texts in each]
