"""Answers that hold items, for the tests with real engines: constraints, and what every answer must satisfy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import itemset

TITLES = [
    *("Alien", "Aliens", "Alien 3", "The Godfather", "The Godfather: Part II", "Up", "Upside", "Amélie", "千と千尋"),
    *("M", "M*A*S*H", "(500) Days", "2001", "2001: A Space Odyssey", "Who?", "Who? Me?", "<film>", "]", "null"),
]
KEYS = [f"title {i}" for i in range(len(TITLES))]
QUOTED = ['He said "No"', "Back\\slash", "Tab\there", "plain"]

FILM = {"type": "string", "item_set": "titles"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
COLOURS = ["red", "grün", 'the "blue"']
OBJECT = {"type": "object", "properties": {"film": FILM, "n": DIGIT}, "required": ["film", "n"]}
SLATE = {"type": "array", "items": FILM, "uniqueItems": True, "minItems": 3, "maxItems": 5}
SCHEMAS: dict[str, Any] = {
    "object": OBJECT,
    "slate": SLATE,
    "optional": {"type": "object", "properties": {"film": FILM, "other": {"anyOf": [FILM, {"type": "null"}]}}},
    "referenced": {
        "$defs": {"film": FILM},
        "type": "array",
        "items": {"$ref": "#/$defs/film"},
        "minItems": 2,
        "maxItems": 2,
    },
    "or a constant": {"type": "array", "items": {"anyOf": [FILM, {"const": "unknown"}]}, "minItems": 2, "maxItems": 3},
    "inline": {"type": "object", "properties": {"c": {"type": "string", "item_set": COLOURS}}, "required": ["c"]},
    "quoted": {"type": "object", "properties": {"q": {"type": "string", "item_set": "quoted"}}, "required": ["q"]},
    "escaped": {"type": "array", "items": {"type": "string", "item_set": "escaped"}, "minItems": 2, "maxItems": 2},
    "some": {
        "type": "array",
        "items": FILM | {"exclude_keys": KEYS[:15]},
        "uniqueItems": True,
        "minItems": 4,
        "maxItems": 9,
    },
    "called so": {"type": "object", "properties": {"item_set": FILM, "if": FILM}, "required": ["item_set", "if"]},
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "see "},
            {"type": "tag", "begin": "<f>", "content": {"type": "item_set", "item_set": "titles"}, "end": "</f>"},
            {"type": "regex", "pattern": "[a-c]{2}"},
        ],
    },
}
EBNF = 'root ::= "[" ItemSet("titles") ("; " [x-z])? "]"'
SPACED = {  # the space before an item belongs to its first token
    "type": "triggered_tags",
    "triggers": ["see"],
    "tags": [{"begin": "see ", "content": {"type": "item_set", "item_set": "titles"}, "end": "!"}],
    "at_least_one": True,
    "stop_after_first": True,
}
ALONE = {"item_set": "titles", "n": 3, "exclude_keys": KEYS[:1]}
BAD = {
    "$.properties.film: format": {"type": "object", "properties": {"film": FILM | {"format": "date"}}},
    "$.properties.film: no item set is called": {"properties": {"film": {"type": "string", "item_set": "title"}}},
    "stated right there without a $ref": {
        "$defs": {"f": FILM},
        "properties": {"b": {"type": "array", "items": {"$ref": "#/$defs/f"}, "uniqueItems": True}},
    },
    "$.not": {"type": "string", "not": FILM},
    "does not hold there": {"allOf": [FILM, {"type": "string"}]},
    "uniqueItems": {"$defs": {"f": FILM}, "type": "array", "items": {"$ref": "#/$defs/f"}, "uniqueItems": True},
    "minItems=20": SLATE | {"minItems": 20, "maxItems": 20},
    "its type cannot be": {"type": "number", "item_set": "titles"},
    "$: the item 'Alien' is no integer": {"type": "integer", "item_set": ["Alien", "12"]},
    "must be a list of keys": FILM | {"exclude_keys": 5},
    "used: Cannot find field nowhere": {"type": "object", "properties": {"film": FILM, "other": {"$ref": "#/nowhere"}}},
}
"""Refused, each with a sentence that holds its key."""
BAD_SLATES: dict[str, dict[str, Any]] = {
    "but some items begin others": {"slate": ALONE | {"separator": ""}},
    "there are 18 distinct items": {"slate": ALONE | {"n": 19}},
    "no item set is called": {"slate": ALONE | {"item_set": "title"}},
    "such as": {"slate": 5},
    "not 'titles'": {"slate": "titles"},
    "slate has no n, which is how many items": {"slate": {"item_set": "titles"}},
    "U+200B": {"slate": ALONE | {"separator": ",\u200b"}},
    "exclude each other": {"slate": ALONE, "item_set": "titles"},
    "state it in the slate": {"slate": ALONE, "exclude_keys": KEYS[:2]},
    "draws": {"slate": ALONE, "draws": 3},
    "add use_beam_search": {"slate": ALONE, "width": 3},
}
"""Fields of bodies that are refused."""


def sets(directory: Path, tokenizer: Any) -> dict[str, str]:
    """Files of the sets `titles`, `quoted` and `escaped`, by name."""
    places = {"place": range(len(TITLES))}
    itemset.build_text(TITLES, tokenizer, keys=KEYS, attributes=places).save(directory / "titles.itemset")
    itemset.build_text(QUOTED, tokenizer).save(directory / "quoted.itemset")
    itemset.build_text(QUOTED, tokenizer, escape="json").save(directory / "escaped.itemset")
    return {name: str(directory / f"{name}.itemset") for name in ("titles", "quoted", "escaped")}


def check_json(name: str, text: str, items: Sequence[dict[str, Any]]) -> None:
    """Whether an answer to a schema of SCHEMAS is what it must be, and its items are told."""
    answer = json.loads(text)
    strings = dict(_strings(answer, "$"))
    assert {item["path"] for item in items} == {path for path in strings if strings[path] not in ("unknown", None)}
    for item in items:
        assert item["text"] == strings[item["path"]]
        allowed = {"inline": COLOURS, "quoted": QUOTED, "escaped": QUOTED}.get(name, TITLES)
        at = allowed.index(item["text"])
        assert item.get("set") == {"inline": None, "quoted": name, "escaped": name}.get(name, "titles")
        assert item["key"] == (at if allowed is not TITLES else KEYS[at])
        assert item["keys"] == [item["key"]]
    if name in ("slate", "some"):
        assert len(set(answer)) == len(answer) >= SCHEMAS[name]["minItems"]
    if name == "some":
        assert not set(answer) & set(TITLES[:15])
        assert len(answer) == 4


def check_tag(text: str, items: Sequence[dict[str, Any]]) -> None:
    (title,) = re.fullmatch("see <f>(.*)</f>[a-c]{2}", text).groups()
    assert items == [{"text": title, "set": "titles", "key": (key := KEYS[TITLES.index(title)]), "keys": [key]}]


def check_slate(text: str, items: Sequence[dict[str, Any]]) -> None:
    assert [item["text"] for item in items] == text.split("\n")
    assert len({item["key"] for item in items}) == ALONE["n"]
    assert {item["key"] for item in items} <= set(KEYS[1:])


def check_ebnf(text: str, items: Sequence[dict[str, Any]]) -> None:
    assert re.fullmatch(r"\[(.*?)(; [x-z])?\]", text, re.DOTALL), text
    assert text[1:].startswith(items[0]["text"])
    assert items[0]["text"] in TITLES


def check_spaced(text: str, items: Sequence[dict[str, Any]]) -> None:
    (title,) = re.fullmatch("see (.*)!", text).groups()
    assert items == [{"text": title, "set": "titles", "key": (key := KEYS[TITLES.index(title)]), "keys": [key]}]


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "films"}], "max_tokens": 150, "temperature": 1}


MANY_TOOLS = {f"{verb}_{i}": (f"size_{i % 9}", f"of_{i % 7}") for i in range(150) for verb in ("send", "find")}
"""Of each name, the two arguments."""


def _parameters(size: str, wrapped: str) -> dict[str, Any]:
    properties = {size: {"enum": ["small", "large"]}, wrapped: {"type": "boolean"}}
    return {"type": "object", "properties": properties, "required": [size, wrapped]}


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _parameters(*keys), "strict": True}}
    for name, keys in MANY_TOOLS.items()
]
CALLS_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": f'<t>{{"name": "{name}", "arguments": ',
                "content": {
                    "type": "regex",  # without the white space that a small model may write until it has no tokens left
                    "pattern": rf'\{{"{size}": "(small|large)", "{wrapped}": (true|false)\}}',
                },
                "end": "}</t>",
            }
            for name, (size, wrapped) in MANY_TOOLS.items()
        ],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": True,
    },
}


def calls_schema(most: int) -> dict[str, Any]:
    """As both engines make of tools."""
    calls = [
        {"properties": {"name": {"enum": [name]}, "parameters": _parameters(*keys)}, "required": ["name", "parameters"]}
        for name, keys in MANY_TOOLS.items()
    ]
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"type": "object", "anyOf": calls}}


def check_refused_beside_slates(server: Any) -> None:
    """A forced tool, and a ranked list."""
    tools = [{"type": "function", "function": {"name": "show", "parameters": {"type": "object"}}}]
    for beside in ({"tools": tools, "tool_choice": "required"}, {"use_beam_search": True, "n": 2}):
        status, answer = server.post("/v1/chat/completions", CHAT | {"slate": ALONE} | beside)
        assert (status, "slate" in str(answer) or "item set" in str(answer)) == (400, True), answer


CASES: dict[str, tuple[str, Any, Callable[[str, Any], None]]] = {
    **{
        name: ("json", schema, lambda text, items, name=name: check_json(name, text, items))
        for name, schema in SCHEMAS.items()
    },
    "tag": ("structural_tag", json.dumps(TAG), check_tag),
    "ebnf": ("grammar", EBNF, check_ebnf),
    "ebnf with a space": ("grammar", 'root ::= "see " ItemSet("titles") "!"', check_spaced),
    "tag with a space": ("structural_tag", json.dumps({"type": "structural_tag", "format": SPACED}), check_spaced),
    "slate alone": ("slate", ALONE, check_slate),
}
"""By name: the constraint's kind as vLLM calls it, or slate; the constraint; what checks an answer's text and items."""


def _strings(value: Any, path: str) -> list[tuple[str, Any]]:
    """The strings and nulls in a JSON value, by their paths."""
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in _strings(inner, f"{path}.{key}")]
    if isinstance(value, list):
        return [one for i, inner in enumerate(value) for one in _strings(inner, f"{path}[{i}]")]
    return [(path, value)] if isinstance(value, str | None) else []
