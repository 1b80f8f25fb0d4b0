"""A place of an item set in a constraint, and a grammar with marks in such places."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORD = "item_set"
"""The keyword of a JSON schema, the type of a structural tag's content, and of it the set."""
SELECTION = ("item_filter", "exclude_keys", "only_keys")
"""What may stand beside it: which of its items, as in a request."""


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
    def asks(self) -> str:
        """What it asks for: equal for equal items."""
        return json.dumps([self.named, self.selection, self.quoted], sort_keys=True, default=repr)


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
            found[self.hole_of[int(number)]].add(_unescaped(after))
        return ["".join(sorted(texts)).encode("utf-8", "ignore") for texts in found]


def _unescaped(character: str) -> str:
    """A character of a literal of xgrammar's, or the escape of one."""
    if not character.startswith("\\"):
        return character
    return {"n": "\n", "r": "\r", "t": "\t"}.get(character[1], character[1])
