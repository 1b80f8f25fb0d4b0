"""Constraints that list very many tools: alternatives that begin with a name, and go on by a schema of their own.

The names become the items of one hole. An answer begins in a grammar without any tool. Once it has named one, it is
read anew by a grammar that has that tool, too, beside the hole for the names of all others.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from itemset.embedded.placement import JSON, TAG, objects

_SIGN, _TO_THE_LAST_SIGN = re.compile(r"[^\w\s.-]"), re.compile(r"(?s).*[^\w\s.-]")  # what no name has
_INTO_OTHERS = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"\s*:\s*"(?!#/(?:\$defs|definitions)/)')
# Counts that xgrammar unrolls: compiling a schema with one takes longer than a step may wait.
_SLOW = re.compile(r'"(?:min|max)(?:Length|Items|Properties)"\s*:\s*\d{4}|\{\d*,?\d{3,}\}')
_SCHEMA, _TAG = {"type", "properties", "required"}, {"type", "begin", "content", "end"}  # their keys, and no others
_Cut = tuple[list[str], dict[str, Any], str]  # of each alternative the name, one with marks, and what follows a name


class ToolList(NamedTuple):
    """A constraint, cut where its tools stand."""

    kind: str  # of `placement`
    size: int  # in tools: one may stand there in two forms
    before: str
    after: str
    tools: dict[str, list[str]]  # of each name, the alternatives that begin with it
    other: str  # an alternative with marks in the places of the name, and of what only the tool itself says
    mark: str
    closers: bytes  # what comes right after each name

    def spec(self, named: Collection[str]) -> str:
        """Return the constraint with the tools of these names, and a mark in the place of another name."""
        alternatives = [one for name in named for one in self.tools[name]]
        return f"{self.before}{', '.join([*alternatives, self.other])}{self.after}"


def tool_list(kind: str, spec: str, least: int) -> ToolList | None:
    """Return a constraint's list of more than `least` tools; None if it has none. Raises ValueError: no JSON."""
    if kind not in (JSON, TAG) or (kind == JSON and _INTO_OTHERS.search(spec)) or _SLOW.search(spec):
        return None
    parsed = json.loads(spec)
    word, mark = "tags" if kind == TAG else "anyOf", "TOOL" + hashlib.sha256(spec.encode()).hexdigest()
    for node in objects(parsed):
        listed = node.get(word)
        if not isinstance(listed, list) or len(listed) <= least:
            continue
        cut = _tags(listed, node.get("triggers") or [], mark) if kind == TAG else _schemas(listed, mark)
        if cut is None or (size := len({_TO_THE_LAST_SIGN.sub("", name) for name in cut[0]})) <= least:
            continue
        node[word] = [mark]
        before, after = json.dumps(parsed).split(json.dumps(mark))
        tools: dict[str, list[str]] = {}
        for name, one in zip(cut[0], listed, strict=True):
            tools.setdefault(name, []).append(json.dumps(one))
        return ToolList(kind, size, before, after, tools, json.dumps(cut[1]), mark, cut[2].encode())
    return None


def _schemas(listed: list[Any], mark: str) -> _Cut | None:
    """Cut objects of two properties, of which the first has one text alone."""
    found = [one for one in map(_keys_and_name, listed) if one is not None]
    if len(found) < len(listed) or len({one[:2] for one in found}) > 1:
        return None
    other = {**listed[0], "properties": {key: {"const": mark} for key in found[0][:2]}}
    return [one[2] for one in found], other, '"'


def _keys_and_name(schema: Any) -> tuple[str, str, str] | None:
    """Return the two keys and the one text of an object, None of any other schema."""
    match schema:
        case {"properties": {**properties}, "required": [str(), str()] as required}:
            if schema.keys() <= _SCHEMA and schema.get("type", "object") == "object" and {*required} == {*properties}:
                first, second = map(str, properties)
                named: Any = properties[first]
                match list({"type": "string", **(named if isinstance(named, dict) else {})}.items()):
                    case [("type", "string"), ("const", str(text)) | ("enum", [str(text)])]:
                        if json.dumps(text) == f'"{text}"' and "/" not in text and text.isprintable():  # no escapes
                            return first, second, text
    return None


def _tags(listed: list[Any], triggers: list[Any], mark: str) -> _Cut | None:
    """Cut tags with names in their beginnings, between the signs that all of these begin and end with."""
    if any(one.keys() != _TAG or not isinstance(one["begin"], str) for one in listed) or len(triggers) > 1:
        return None
    begins = [one["begin"] for one in listed]
    shared = _TO_THE_LAST_SIGN.match(os.path.commonprefix(begins))  # noqa: RUF071 - of texts
    before = max([shared[0] if shared else "", *triggers], key=len)
    if not before or before[-1].isspace() or not all(one.startswith(before) for one in begins):
        return None
    rests = [one[len(before) :] for one in begins]
    ended = os.path.commonprefix([one[::-1] for one in rests])[::-1]  # noqa: RUF071
    after = ended[sign.start() :] if (sign := _SIGN.search(ended)) else ""
    elements = [{"type": "const_string", "value": text} for text in (mark, after, mark) if text]
    other = {**listed[0], "begin": before, "content": {"type": "sequence", "elements": elements}}
    return [one.removesuffix(after) for one in rests], other, after[:1]
