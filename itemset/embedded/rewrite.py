"""Where item sets stand in a JSON schema, a structural tag or a grammar, and the grammar with holes in their places.

Each place becomes a mark, a constant text that no other can be, in the grammar that xgrammar prints. A mark that is
missing there was dropped; the others become holes. A mark that is quoted is inside a JSON string, as its items are.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import xgrammar

from itemset.embedded.holes import HOLES

from itemset.embedded.placement import (  # isort: skip
    ANY, DEFINITIONS, JSON, NAMED, NO_SCHEMAS, NO_SPACE, PLACES, REFERENCES, REFERRING, REPETITIONS, SELECTION, SETS,
    SLATE, TAG, WORD, Marked, Place, Survey, check_characters, means_set, objects, occurrence, read_slate, says_set,
)  # fmt: skip
from itemset.embedded.printed import printed
from itemset.errors import ItemSetError, shown

_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
_READ = {"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"}
_READ_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_RULING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # xgrammar reads the first of these, and nothing else
_OTHER_KEYS = ("properties", "additionalProperties", "unevaluatedProperties")  # which keys may be a pattern's as well
_UNREAD = {
    "not", "if", "then", "else", "contains", "propertyNames", "dependentSchemas", "dependencies", "contentSchema",
}  # fmt: skip
# What is not closed goes on to its line's end: to look for that from each of many brackets would take the square.
_LITERAL = r'"(?:[^"\\\n]|\\.)*"?|\[(?:[^\]\\\n]|\\.)*\]?|#[^\n]*|//[^\n]*|/(?:[^/\\\n]|\\.)+/'
_EBNF = re.compile(_LITERAL + r"|(?<![\w.-])ItemSet\s*\(\s*")
_REPEATED = re.compile(r"\s*[?*+{~]")  # after an element
_ESCAPED_WORD = re.compile(r"\\u00(?:[4-7][0-9a-fA-F]|2[0dD])")  # of a letter, _, - or a space
# xgrammar's rules of other keys than those that are stated, which an escape in a key would let in again.
_OTHER_KEY = re.compile(r"(?m)^\w+_addl_key(?:_\d+)? ::= .*")
_ESCAPED_KEY = r' | ("\\" basic_escape basic_string_sub)'
GRAMMAR = 1 << 18  # characters of the grammar that xgrammar makes of it, with marks in place of the sets


def mentions(spec: Any) -> bool:
    """Return whether a constraint may hold item sets, rightly or not: cheap, and a no is never wrong."""
    try:
        text = spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)
    except RecursionError:
        return True
    return says_set(text) or (text is spec and _ESCAPED_WORD.search(text) is not None)


class Marker:
    """Finds and marks the places of one constraint. Raises ItemSetError for one where no item set would hold."""

    def __init__(self, size_of: Callable[[Place], int]) -> None:
        """size_of: how many items may come at a place; raises ItemSetError as it likes."""
        self._size_of, self._places, self._groups = size_of, list[Place](), 0
        self._nonce = secrets.token_hex(8)
        self._digits = 10**13 + secrets.randbelow(9 * 10**13)  # the same of numbers
        self._unheld = list[str]()  # of a schema, references where nothing holds, each with what is wrong
        self._defined = dict[int, str]()  # of the places in definitions, the definition's name
        self._survey = Survey()

    def finds(self, kind: str, given: Any) -> bool:
        """Return whether item sets stand in a constraint: without xgrammar. Raises as `mark`."""
        self._marked(kind, given)
        return bool(self._places)

    def mark(self, kind: str, given: Any, options: Mapping[str, Any] = {}) -> Marked | None:
        """Mark a constraint; None without a set, or if nothing refers to the definitions in which sets stand.

        given: a JSON schema, a structural tag of the present form or of the older one with `structures`, a slate as of
        `read_slate`, each an object or its text; or a grammar with `ItemSet("films")` or `ItemSet({"item_set": "films",
        "exclude_keys": [...]})` in it. kind, options: as of `printed`. Raises as xgrammar does, too.
        """
        marked, parsed = self._marked(kind, given)
        if not self._places:
            return None
        if self._survey.repetitions > REPETITIONS:
            raise ItemSetError(
                f"patterns of the constraint repeat something {self._survey.repetitions:,} times, the limit beside "
                f"item sets is {REPETITIONS:,}: state less, or maxLength, which takes no time"
            )
        if kind == TAG and isinstance(parsed, dict) and isinstance(parsed.get("structures"), list):
            marked = of_present_form(marked)
        spec = marked if isinstance(marked, str) else json.dumps(marked)
        return self._placed(spec, printed(kind, spec, options), parsed)

    def _marked(self, kind: str, given: Any) -> tuple[Any, Any]:
        """Return the constraint with marks in place of its sets, and as it was: a schema or tag parsed, else None."""
        if kind == SLATE:
            return self._slate(given), None
        if kind not in (JSON, TAG):
            check_characters(len(given))
            return "".join(self._elements(given)), None
        parsed = self._survey.parsed(given)
        return self._tag(parsed, "$") if kind == TAG else self._whole_schema(parsed, "$"), parsed

    def _slate(self, given: Any) -> str:
        is_json = not isinstance(given, str) or given.lstrip().startswith("{")
        slate, n, separator = read_slate(self._survey.parsed(given) if is_json else given)
        place = replace(self._place(slate, "slate"), closers=separator[:1], group=0)
        if n > (size := self._size_of(place)):
            raise ItemSetError(f"slate.n is {n:,}, but there are {size:,} distinct items: ask for fewer")
        grammar = f'root ::= "{self._mark(replace(place, begins=True))}"'
        if n > 1:
            literal = json.dumps(separator, ensure_ascii=False)
            grammar += f' ({literal if separator else ""} "{self._mark(place)}"){{{n - 1}}}'
        return grammar

    def _mark(self, place: Place) -> str | int:
        if len(self._places) + self._survey.references >= PLACES:
            raise ItemSetError(
                f"item sets stand in more than {PLACES:,} places of the constraint, each $ref counted: state fewer"
            )
        self._places.append(place)
        if place.number:
            return self._digits * PLACES + len(self._places) - 1
        return f"ITEMSET{self._nonce}N{len(self._places) - 1}E"

    def _place(self, node: Mapping[str, Any], path: str, *, number: bool = False) -> Place:
        named = node[WORD]
        if number and isinstance(named, list) and set(map(type, named)) == {int}:
            named = list(map(str, named))
        if not isinstance(named, str) and not (isinstance(named, list) and set(map(type, named)) == {str}):
            given = "an empty one" if named == [] else shown(named)
            if isinstance(named, list) and int in map(type, named):
                given = 'one with numbers: quote them, or write "type": "integer" for numbers alone'
            raise ItemSetError(f"{path}.{WORD} must be a set's name, or a list of texts, not {given}")
        selection = {key: node[key] for key in SELECTION if node.get(key) is not None}
        for key, value in selection.items():
            if not isinstance(value, dict if key == "item_filter" else list):
                example = "an object of conditions" if key == "item_filter" else "a list of keys"
                raise ItemSetError(f"{path}.{key} must be {example}, not {shown(value)}")
        if selection and not isinstance(named, str):
            raise ItemSetError(f"{path}: {min(selection)} chooses among the items of a registered set: name one")
        return Place(path, named, selection, number=number)

    # JSON schemas

    def _whole_schema(self, given: Any, path: str) -> Any:
        """Raises ItemSetError for a schema with sets whose references lead to where xgrammar takes any text."""
        before, self._unheld = len(self._places), []
        marked = self._schema(given, path)
        if self._unheld and len(self._places) > before:
            raise ItemSetError(self._unheld[0])
        return marked

    def _schema(self, node: Any, path: str, read: bool = True) -> Any:
        """read: whether xgrammar reads this part of a schema: elsewhere it takes any text, and no set would hold."""
        if isinstance(node, list):
            return [self._schema(one, f"{path}[{i}]", read) for i, one in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if read and WORD in node:
            return self._string(node, path)
        for key, value in node.items():
            if read and (key in SELECTION or means_set(key)):
                raise ItemSetError(f"{path} has {key}, but no {WORD}: name a set as {WORD}, or omit it")
            if means_set(key) and isinstance(value, str | list):
                raise ItemSetError(_does_not_hold(path))
        out, distinct = dict(node), read and self._is_distinct(node, path)
        for key, value in node.items():
            below, is_list = f"{path}.{key}", isinstance(value, list)
            self._unheld += self._lost(node, key, path) if read else []
            if key in NAMED and isinstance(value, dict):
                out[key] = dict[str, Any]()
                for name, one in value.items():
                    first, out[key][name] = len(self._places), self._schema(one, f"{below}.{name}", read)
                    if key in DEFINITIONS:  # that of the innermost stays
                        self._defined |= dict.fromkeys({*range(first, len(self._places))} - self._defined.keys(), name)
            elif key not in NO_SCHEMAS and not (key == "items" and distinct):
                out[key] = self._schema(value, below, read and (key in _READ_LISTS if is_list else key in _READ))
        return self._distinct_items(node, out, path) if distinct else out

    def _lost(self, node: dict[str, Any], key: str, path: str) -> list[str]:
        """Return what is wrong with a keyword, by itself or because of another one beside it."""
        value = node[key]
        several = key == "allOf" and isinstance(value, list) and len(value) > 1 and self._survey.holds(value, ANY)
        refers = key in REFERENCES[1:] or (key in _UNREAD and self._survey.holds(value, REFERRING))
        away = key == "$ref" and isinstance(value, str) and value != "#" and not value.startswith("#/")
        if several or refers or away:
            return [_does_not_hold(f"{path}.{key}")]
        ruling = next((one for one in _RULING if one in node), key)
        if ruling != key and key not in DEFINITIONS and self._survey.holds(value, REFERRING):
            return [
                f"{path}.{key}: xgrammar drops it beside {ruling}, so no item_set would hold there: omit one of them"
            ]
        others = [one for one in _OTHER_KEYS if node.get(one) not in (None, False)]
        if key == "patternProperties" and self._survey.holds(node, ANY) and (others or len(value) > 1):
            message = "the same key may come by another rule, so that an item_set would not hold: state all keys in"
            return [f"{path}.{key}: {message} properties, or one pattern alone"]
        return []

    def _string(self, node: dict[str, Any], path: str) -> Any:
        if others := sorted(set(node) - {WORD, "type", *SELECTION, *_ANNOTATIONS}):
            raise ItemSetError(f"{path}: {others[0]} beside item_set would not hold: omit it")
        types = node.get("type", "string")
        each = types if isinstance(types, list) else [types]
        kinds = [kind for kind in each if kind != "null"]
        if kinds not in (["string"], ["integer"]) or len(each) > 2:
            raise ItemSetError(
                f"{path}: an item_set is a string, or an integer if all items are, its type cannot be {shown(types)}: "
                'write "type": "string"'
            )
        constant = {"const": self._mark(self._place(node, path, number=kinds == ["integer"]))}
        return {"anyOf": [constant, {"type": "null"}]} if len(each) > 1 else constant

    def _is_distinct(self, node: dict[str, Any], path: str) -> bool:
        """Return whether this is an array of distinct items of a set."""
        if node.get("uniqueItems") is not True or not self._survey.holds(node.get("items"), ANY):
            return False
        items = node["items"]
        if "prefixItems" in node or not isinstance(items, dict) or WORD not in items or items.get("type") == "null":
            message = (
                f"{path}: uniqueItems holds for items that are an item_set, stated right there without a $ref, anyOf "
                "or prefixItems: state it so, or omit uniqueItems"
            )
            if self._survey.holds(node, SETS):
                raise ItemSetError(message)
            self._unheld.append(message)  # of no set, maybe
            return False
        return True

    def _distinct_items(self, node: dict[str, Any], out: dict[str, Any], path: str) -> dict[str, Any]:
        least, most = node.get("minItems", 0), node.get("maxItems")
        for name, value in (("minItems", least), ("maxItems", most)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ItemSetError(f"{path}.{name} must be a number of items, not {shown(value)}")
        constant = self._string(dict(node["items"]), f"{path}.items")
        if "const" not in constant:
            raise ItemSetError(f"{path}: distinct items cannot be null: omit uniqueItems, or null")
        place = self._places[-1]
        size = self._size_of(replace(place, quoted=not place.number))
        if least > size:
            raise ItemSetError(f"{path}: minItems={least:,}, but there are {size:,} distinct items: ask for fewer")
        most = size if most is None else min(most, size)
        if most == 0:
            self._places.pop()
            return {"const": []}
        self._groups += 1
        del out["uniqueItems"]
        self._places[-1] = replace(place, group=self._groups, begins=True)
        out["maxItems"], out["prefixItems"], out["items"] = most, [constant], False
        if most > 1:
            out["items"] = {"const": self._mark(replace(place, group=self._groups))}
        return out

    # Structural tags

    def _tag(self, node: Any, path: str, closers: str = "") -> Any:
        """closers: with what the text after this format begins, if that is known."""
        if isinstance(node, list):
            return [self._tag(one, f"{path}[{i}]") for i, one in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if node.get("type") == WORD:
            if others := sorted(set(node) - {"type", WORD, *SELECTION}):
                raise ItemSetError(f"{path}: {others[0]} beside item_set would not hold: omit it")
            if WORD not in node:
                raise ItemSetError(f'{path}: name the set, as {{"type": "item_set", "item_set": "films"}}')
            return {"type": "const_string", "value": self._mark(replace(self._place(node, path), closers=closers))}
        if node.get("excludes") and self._survey.holds(node.get("json_schema"), SETS):
            raise ItemSetError(f"{path}.excludes would not hold for the items of a set: omit it, or exclude keys")
        if node.get("type") == "sequence" and isinstance(elements := node.get("elements"), list):
            at = next((i for i, one in enumerate(elements) if _is_endless(one, ".content" in path)), len(elements))
            if any(self._survey.holds(one, SETS) for one in elements[at + 1 :]):
                raise ItemSetError(
                    f"{path}.elements[{at}] takes all text up to the end, so that no item_set after "
                    "it would begin: put a tag before the item, with triggered_tags and stop_after_first"
                )
        begin, ends = node.get("begin"), node.get("end")
        ends = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, str)]
        out: dict[str, Any] = {}
        own_space = isinstance(begin, str) and begin.endswith(" ") and _begins_with_item(node.get("content"))
        if own_space and (node["content"].get("type") != WORD or begin == " "):
            raise ItemSetError(f"{path}.begin {NO_SPACE}")
        for key, value in node.items():
            if key in ("json_schema", "schema"):  # the latter of the older form
                out[key] = self._whole_schema(value, f"{path}.{key}")
            else:
                out[key] = self._tag(value, f"{path}.{key}", "".join(end[:1] for end in ends))
            if own_space and key == "content":
                self._places[-1] = replace(self._places[-1], spaced=True)
        if own_space:
            out["begin"] = node["begin"][:-1]
        if isinstance(triggers := node.get("triggers"), list) and isinstance(node.get("tags"), list):
            begun = [one["begin"] for one in out["tags"] if isinstance(one, dict) and isinstance(one.get("begin"), str)]
            for text in triggers:  # without its space it would stand in other words, too: nobody has asked for that
                if isinstance(text, str) and text.endswith(" ") and text[:-1] in begun:
                    raise ItemSetError(
                        f"{path}.triggers: {shown(text)} ends in the space of an item's first token: leave the space "
                        f"out, which then triggers inside longer words as well, or begin with a mark such as <item>"
                    )
        return out

    # Grammars

    def _elements(self, text: str) -> list[str]:
        at, parts, last = 0, list[str](), ""
        while (match := _EBNF.search(text, at)) is not None:
            if not match[0].startswith("ItemSet"):
                parts.append(text[at : match.end()])
                at, last = match.end(), match[0]
                continue
            where = f"ItemSet at character {match.start()}"
            try:
                given, end = json.JSONDecoder().raw_decode(text, match.end())
            except ValueError as error:
                raise ItemSetError(f'{where}: give it the name of a set, as ItemSet("films"): {error}') from error
            close = re.compile(r"\s*\)").match(text, end)
            node = given if isinstance(given, dict) else {WORD: given}
            if close is None or WORD not in node:
                raise ItemSetError(f'{where}: give it one argument, the name of a set, as ItemSet("films")')
            if others := sorted(set(node) - {WORD, *SELECTION}):
                raise ItemSetError(f"{where}: there is no {others[0]}")
            between = text[at : match.start()]
            literal = last.startswith('"') and last.endswith(' "') and not last.endswith('\\ "')
            if spaced := literal and not between.strip():
                if _REPEATED.match(text, close.end()):  # which would not hold for the space
                    raise ItemSetError(f"the text before the {where} {NO_SPACE}")
                parts[-1] = parts[-1].removesuffix(' "') + '"'
            parts += [between, f'"{self._mark(replace(self._place(node, where), spaced=spaced))}"']
            at, last = close.end(), ""
        return [*parts, text[at:]]

    # What xgrammar made of it

    def _placed(self, spec: str, text: str, given: Any) -> Marked | None:
        """text: xgrammar's grammar of `spec`. given: without the marks."""
        holes, hole_of = list[Place](), dict[tuple[int, bool], int]()
        mark = rf"(?:ITEMSET{self._nonce}N|{self._digits})(\d+)E?"
        marks = re.compile(rf'(?<=\\"){mark}(?=\\")|{mark}')
        text = _OTHER_KEY.sub(lambda rule: rule[0].replace(_ESCAPED_KEY, ""), text)
        if len(text) > GRAMMAR:
            raise ItemSetError(
                f"xgrammar makes {len(text):,} characters of grammar of the constraint, the limit is {GRAMMAR:,}: "
                "state fewer properties, references, tags or rules"
            )
        there = sorted({occurrence(found) for found in marks.finditer(text)})
        named = {str(node.get("$ref")).rpartition("/")[2] for node in objects(given)}
        for number in {*range(len(self._places))} - {number for number, _ in there}:
            if self._defined.get(number) in {None, *named}:  # no definition, or one that is used
                raise ItemSetError(
                    f"{self._places[number].path}: xgrammar drops what stands there, so the item_set would not hold: "
                    "state it in properties, items or anyOf"
                )
        numbers: dict[Any, int] = {}
        for number, quoted in there:
            place = replace(self._places[number], quoted=quoted)
            key = (*place.asks, place.group, place.begins)
            if key not in numbers:
                numbers[key] = len(holes)
                holes.append(place)
            hole_of[number, quoted] = numbers[key]
        if len(holes) > HOLES:
            raise ItemSetError(f"the constraint has {len(holes)} different item sets, the limit is {HOLES}")
        return Marked(spec, text, marks, holes, hole_of) if holes else None


def _does_not_hold(path: str) -> str:
    return f"{path}: an item_set does not hold there: state it in properties, items, prefixItems or anyOf"


def of_present_form(tag: dict[str, Any]) -> Any:
    """Return a structural tag of the older form, with `structures`, in the present one."""
    items = []
    for one in tag["structures"]:
        schema = json.dumps(one.get("schema") or {})
        items.append(xgrammar.StructuralTagItem(begin=one["begin"], schema=schema, end=one["end"]))
    new = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    new.format = new.format.model_copy(update={"at_least_one": bool(tag.get("at_least_one"))})  # SGLang's word
    return new.model_dump(mode="json")


def _begins_with_item(node: Any) -> bool:
    """Return whether a structural tag's format may begin with an item, and not with the quote before one."""
    if not isinstance(node, dict):
        return False
    elements = node.get("elements") or [node.get("content")]
    if node.get("type") == "or":
        return any(map(_begins_with_item, elements))
    return node.get("type") == WORD or (node.get("type") != "tag" and _begins_with_item(elements[0]))


def _is_endless(node: Any, bounded: bool) -> bool:
    """Return whether nothing of a structural tag begins after this format. bounded: it ends where a tag's end comes."""
    match node:
        case {"type": "any_text"}:
            return bounded or bool(node.get("excludes"))
        case {"type": "triggered_tags"}:
            return not node.get("stop_after_first")
    return False
