"""Where the bodies of requests state constraints, and which of these would lose their item sets."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Any

from itemset.embedded.rewrite import Marker, mentions
from itemset.errors import ItemSetError, shown
from itemset.serving.catalogue import RefusedError
from itemset.serving.constraint import EBNF, JSON, SLATE, SMALL, TAG
from itemset.serving.request_fields import PARAMS, REFERENCE, STRUCTURED, at

_STATED = (("json", JSON), ("json_schema", JSON), ("structural_tag", TAG), ("grammar", EBNF), ("ebnf", EBNF))
_DISGUISE = f"item_set {secrets.token_hex(8)} "  # begins no client's text


def holds_sets(kind: str, spec: Any) -> bool:
    """Whether item sets stand in a constraint, rightly or not."""
    if kind == SLATE or not may_hold(kind, spec):
        return kind == SLATE
    if not is_small(spec):
        return True  # this may be asked on an event loop
    try:
        return Marker(lambda place: 1 << 30).finds({JSON: "schema", TAG: "tag"}.get(kind, "ebnf"), spec)
    except ItemSetError:
        return True
    except Exception:  # no constraint, as its engine will say
        return False


def may_hold(kind: str, spec: Any) -> bool:
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


def constraints_of(body: Any, fields: Collection[str]) -> list[tuple[str, Any]]:
    """The kinds and texts of a body's constraints, by any engine's words, that may hold item sets. fields: those that
    its endpoint declares."""
    stated: list[tuple[str, Any]] = []
    for given in at(body, ""):
        one = {name: value for name, value in given.items() if name in fields or name == SLATE}
        if one.get(SLATE) is not None:
            stated.append((SLATE, one[SLATE]))
        for place in ("response_format", "text.format", "output_config.format"):
            for given in at(one, place):
                if given.get("type") == TAG or "format" in given:
                    stated.append((TAG, {**given, "type": TAG}))
                else:
                    stated += [(JSON, inner.get("schema")) for inner in (given, *at(given, "json_schema"))]
        for place in ("", STRUCTURED, PARAMS, f"{PARAMS}.{STRUCTURED}"):
            stated += [(kind, inner.get(name)) for inner in at(one, place) for name, kind in _STATED]
    return [one for one in stated if one[0] == SLATE or (isinstance(one[1], str | dict) and mentions(one[1]))]


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

    tools, choice: of OpenAI's or Anthropic's form. held: whether a tool's parameters hold, given whether it is strict.
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


def disguised(tag: Any) -> Any:
    """A structural tag of a body, as JSON or read, with what engines take as they parse it (xgrammar's `Format`) in
    place of its sets: a constant text, out of which `undisguised` takes the set again."""
    if not mentions(tag):
        return tag
    if isinstance(tag, str):
        try:
            return json.dumps(disguised(json.loads(tag)))
        except ValueError:  # as the engine will say
            return tag

    def constant(node: dict[str, Any]) -> Any:
        text = {"type": "const_string", "value": _DISGUISE + json.dumps(node)}
        return text if node.get("type") == REFERENCE else None

    return _replaced(tag, constant)


def undisguised(tag: str | dict[str, Any]) -> str:
    """The same structural tag with its sets, as JSON."""
    tag = tag if isinstance(tag, str) else json.dumps(tag)

    def item_set(node: dict[str, Any]) -> Any:
        value = node.get("value")
        return json.loads(value[len(_DISGUISE) :]) if isinstance(value, str) and value.startswith(_DISGUISE) else None

    return json.dumps(_replaced(json.loads(tag), item_set)) if _DISGUISE in tag else tag


def _replaced(node: Any, other: Callable[[dict[str, Any]], Any]) -> Any:
    """The same with other formats in place of those for which there is one; JSON schemas are left as they are."""
    if isinstance(node, list):
        return [_replaced(one, other) for one in node]
    if not isinstance(node, dict):
        return node
    return other(node) or {
        key: value if key == "json_schema" else _replaced(value, other) for key, value in node.items()
    }
