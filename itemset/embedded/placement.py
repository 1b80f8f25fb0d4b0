"""Where item sets stand in a constraint: our words in it, its limits, a survey of it, and a grammar with marks."""

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from itemset.errors import ItemSetError, shown
from itemset.select.filters import digits

JSON, TAG, EBNF, LARK, SLATE = "json", "structural_tag", "ebnf", "lark", "slate"  # kinds of constraints
REGEX = "regex"  # in which no set can be named
WORD = "item_set"  # the keyword of a JSON schema, the type of a structural tag's content, and of it the set
SELECTION = ("item_filter", "exclude_keys", "only_keys")  # may stand beside it: which of its items, as in a request
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINITIONS)  # keywords of JSON schemas with names below them
NO_SCHEMAS = {"const", "enum", "default", "examples"}  # keywords under which anything may stand
EBNF_SET = re.compile(r"(?<![\w.-])[Ii]tem_?[Ss]ets?\s*\(")  # a set in a grammar, rightly or nearly
NO_SPACE = (
    "may not end in a space, which belongs to the first token of an item: omit it, and build the set with --prefix ' '"
)
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
REPETITIONS = 2_000  # that patterns state: xgrammar takes 0.3 s for these, and the square of it for more
PLACES = 1_000  # of one constraint, each reference counted as one; each takes its time
TEXT = 1 << 20  # characters of one constraint, lists of texts and keys among them
SETS, REFERRING, ANY = 1, 2, 3  # what may stand in a part of a constraint: item sets, references, either
_SLATE = 'such as {"item_set": "films", "n": 5, "separator": "\\n"}'
_DEEPEST = 128  # levels of a constraint with item sets: deeper ones would overflow a stack, xgrammar's or Python's
_ESCAPED = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}  # in literals of xgrammar's, where any character may be escaped
_CLOSERS = 8  # bytes after a hole that bridges are looked for over: each takes memory, and more is no JSON
_COUNTS = re.compile(r"\{(\d{1,9})?,?(\d{1,9})?\}")
_WRITTEN = re.compile(r"items?[-_ ]?sets?")


def means_set(key: str) -> bool:
    """Return whether a key is `item_set`, or that in another spelling or the plural."""
    return _WRITTEN.fullmatch(key.lower()) is not None


def says_set(text: str) -> bool:
    """Return whether a text has one of our words in it, if not in escapes. Never wrong about one that has not."""
    text = text.lower()  # a pattern without cases is found many times as fast
    return _WRITTEN.search(text) is not None or any(word in text for word in SELECTION)


class Survey:
    """What stands in the objects and lists of a constraint, whatever it means there."""

    def __init__(self) -> None:
        self._characters = self.references = self.repetitions = 0
        self._holding = dict[int, int]()  # by the id of an object or list

    def parsed(self, given: Any) -> Any:
        """Survey a constraint, an object or its JSON text; return the object. Raises ItemSetError: no JSON, too long or
        too deep."""
        check_characters(len(given) if isinstance(given, str) else 0)
        try:
            parsed = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            raise ItemSetError(f"the constraint is no JSON: {error}") from error
        except RecursionError as error:
            raise _too_deep() from error
        self._add(parsed, 1)
        return parsed

    def _add(self, node: Any, depth: int, names: bool = False) -> int:
        """Return what stands in a part. names: whether its keys are names, and no keywords."""
        self._characters += 1 + (len(node) if isinstance(node, str) else digits(node))
        if not isinstance(node, dict | list):
            return 0
        if depth > _DEEPEST:
            raise _too_deep()
        holding = 0
        for key, value in node.items() if isinstance(node, dict) else (("", one) for one in node):
            self._characters += len(str(key))
            self.repetitions += _repetitions(value) if key == "pattern" and isinstance(value, str) else 0
            below = self._add(value, depth + 1, key in NAMED and not names)
            holding |= 0 if key in NO_SCHEMAS and not names else below
        check_characters(self._characters)
        if isinstance(node, dict):
            references = sum(word in node for word in REFERENCES)
            self.references += references
            holding |= SETS * (WORD in node) | REFERRING * (references > 0)
        self._holding[id(node)] = holding
        return holding

    def holds(self, node: Any, what: int) -> bool:
        """Return whether sets or references stand anywhere in a part. what: SETS, REFERRING or ANY."""
        return bool(self._holding.get(id(node), 0) & what)


def objects(given: Any, names: bool = False) -> Iterator[dict[str, Any]]:
    """Yield every object in a constraint, whatever it means there, but for constants. names: as of `Survey`."""
    if isinstance(given, dict):
        yield given
        for key, value in given.items():
            if names or key not in NO_SCHEMAS:
                yield from objects(value, key in NAMED and not names)
    elif isinstance(given, list):
        for value in given:
            yield from objects(value)


def check_characters(count: int) -> None:
    """Raises ItemSetError for a constraint of more characters than TEXT."""
    if count > TEXT:
        raise ItemSetError(
            f"the constraint has more than {TEXT:,} characters: register long lists as item sets, and state less"
        )


def read_slate(slate: Any) -> tuple[dict[str, Any], int, str]:
    """Return a slate (item_set, n, separator, what selects items), its n and its separator. Raises ItemSetError."""
    if not isinstance(slate, dict):
        raise ItemSetError(f"slate must be an object of {WORD}, n and separator, {_SLATE}, not {shown(slate)}")
    if others := sorted(set(slate) - {WORD, "n", "separator", *SELECTION}):
        raise ItemSetError(f"slate: there is no {shown(others[0])}, only {WORD}, n, separator, {', '.join(SELECTION)}")
    for word, meaning in ((WORD, "the set's name"), ("n", "how many items")):
        if slate.get(word) is None:
            raise ItemSetError(f"slate has no {word}, which is {meaning}: state it, {_SLATE}")
    n, separator = slate["n"], slate.get("separator", "\n")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= PLACES:
        raise ItemSetError(f"slate.n must be a number of items, 1 to {PLACES:,}, not {shown(n)}")
    if not isinstance(separator, str):
        raise ItemSetError(f"slate.separator must be a text, not {shown(separator)}")
    for character in separator:
        if unicodedata.category(character).startswith("C") and character not in "\n\r\t":
            raise ItemSetError(
                f"slate.separator has the character U+{ord(character):04X}, which is invisible and no space: of "
                "such, only the line feed, the carriage return and the tab may stand in it"
            )
    if separator.endswith(" "):
        raise ItemSetError(f"slate.separator {NO_SPACE}")
    return slate, n, separator


def _repetitions(pattern: str) -> int:
    """Return how often a regular expression repeats something, as far as it is said by numbers."""
    counts = [max(int(least or 1), int(most or 1)) for least, most in _COUNTS.findall(pattern)]
    return math.prod(counts) if "){" in pattern else sum(counts)  # one in another


def _too_deep() -> ItemSetError:
    return ItemSetError(f"the constraint is nested more than {_DEEPEST} levels deep: make it flatter")


@dataclass(frozen=True)
class Place:
    """One place of an item set."""

    path: str  # for people, such as `$.properties.film`
    named: str | list[Any]  # the set's name, or the texts of an inline one
    selection: Mapping[str, Any] = field(default_factory=dict)  # which of its items
    group: int | None = None  # as of `holes.Hole`, and so is `begins`
    begins: bool = False
    closers: str = ""  # what may come right after it, as far as its place says that
    spaced: bool = False  # whether the space at the end of the text before it is its items' own
    number: bool = False  # whether it is a JSON number, without quotes
    quoted: bool = False  # whether it is inside a JSON string; known once it is placed

    @property
    def asks(self) -> tuple[str | tuple[str, ...], str, bool, bool, bool]:
        """Return what it asks for: equal for equal items."""
        named = self.named if isinstance(self.named, str) else tuple(self.named)
        selection = json.dumps(self.selection, sort_keys=True, default=repr)
        return named, selection, self.spaced, self.number, self.quoted


def occurrence(mark: re.Match[str]) -> tuple[int, bool]:
    """Return a mark's number, and whether it stands in quotes: one definition may be used with and without them."""
    return int(mark[1] or mark[2]), mark[1] is not None


@dataclass(frozen=True)
class Marked:
    """A grammar as xgrammar prints it, with marks in it."""

    spec: str  # what it was made of, with marks in place of the sets
    grammar: str
    mark: re.Pattern[str]  # finds them: see `occurrence`
    holes: list[Place]
    hole_of: Mapping[tuple[int, bool], int]  # of each occurrence the number of its hole in `holes`

    def ebnf(self, first: int) -> str:
        """Return the grammar in which hole k is the token `first + k`."""
        return self.mark.sub(lambda mark: f'" Token({first + self.hole_of[occurrence(mark)]}) "', self.grammar)

    def closers(self) -> list[bytes]:
        """Return, of each hole, the bytes that may come next, as far as the grammar says them right there."""
        found = [set(place.closers) for place in self.holes]
        for mark in re.finditer(rf'(?:{self.mark.pattern})(?:"\)*\s+(?:\(*)")?((?:[^"\\]|\\.)?)', self.grammar):
            found[self.hole_of[occurrence(mark)]].add(_ESCAPED.get(mark[3], mark[3][-1:]))
        each = ["".join(sorted(texts)).encode("utf-8", "ignore") for texts in found]
        return [texts if len(texts) <= _CLOSERS else b"" for texts in each]
