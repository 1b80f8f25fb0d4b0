"""What a body would lose: sets, even misspelled, where its endpoint does not read them, or in unread constraints."""

import contextlib
import dataclasses
import functools
import itertools
import json
import secrets
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from itemset.embedded.placement import EBNF, EBNF_SET, JSON, NAMED, NO_SCHEMAS, SLATE, TAG, means_set, says_set
from itemset.embedded.rewrite import Marker, mentions
from itemset.errors import ItemSetError, shown
from itemset.serving.catalogue import RefusedError
from itemset.serving.constraint import SMALL

from itemset.serving.front.request_fields import (  # isort: skip
    CHOICE, COMPARED, DRAW, DRAWS, EXTRAS, GUIDED, LIST_AFTER, OF_ANSWERS, PARAMS, REFERENCE, SELECTION, STEERING,
    STRUCTURED, WORDS, at, nearest, objects, wrong_type,
)  # fmt: skip

Fields = Mapping[str, Any]  # by name, what a field's type is
LOOKED_AT = 2_000  # values of what an endpoint drops that are looked at one by one; more are searched as one text
CONTENTS = frozenset({"messages", "prompt", "input", "documents", "metadata", "stop", "chat_template_kwargs"})
"""Fields that are what a user says, also where an endpoint does not know them."""

SHAPES: Mapping[str, Fields] = {
    "response_format": dict.fromkeys(("type", "json_schema", "format", "structures", "triggers")),
    "response_format.json_schema": dict.fromkeys(("name", "description", "schema", "strict")),
}
"""The fields of objects that an endpoint declares as anything, and reads so."""

_DISGUISE = f"item_set {secrets.token_hex(8)} "  # begins no client's text
_STATED = (("json", JSON), ("json_schema", JSON), ("structural_tag", TAG), ("grammar", EBNF), ("ebnf", EBNF))

Read = Mapping[str, Collection[str]]  # by place ("" is the body): words read there, and constraints judged later


@dataclass(frozen=True)
class Surface:
    """Where one engine's endpoints read our words."""

    served: Mapping[str, Read]  # by path, what is read at each place
    mends: Mapping[str, str]  # how a word is said right
    inside: str  # where a constraint with sets belongs
    elsewhere: Read = field(default_factory=dict)  # what all endpoints read that declare these places
    dropped: Collection[str] = ()  # declared, and read by nothing

    def check(self, path: str, body: Any, fields: Fields, *, ours: bool) -> None:
        """Raises RefusedError for a word of ours, or a set inside a constraint, that would be lost.

        fields: those that the endpoint declares. ours: whether this server has item sets; else `item_set` alone counts.
        """
        watched = WORDS if ours else (REFERENCE,)
        fields = {name: inner for name, inner in fields.items() if name not in self.dropped}
        loose: dict[str, Any] = {}
        for number, (place, key, value, read) in enumerate(self._loose(self.served.get(path, {}), body, fields)):
            word = nearest(key, watched) if number < COMPARED or key in watched else None
            if key in read:
                continue
            if word is not None and (word != STRUCTURED or chooses(value)):
                raise self._lost(path, place, key, word)
            loose[f"{place}.{key}" if place else key] = value
        if (where := set_in(loose)) is not None:
            mend = self.inside if path in self.served else self._send
            raise RefusedError("item set inside", f"{path:.60} does not read the item set at {where:.200}: {mend}")

    def _loose(
        self, read: Read, given: Any, fields: Fields, place: str = ""
    ) -> Iterator[tuple[str, str, Any, Collection[str]]]:
        """Yield the members of a body that its endpoint does not declare: place, key, value, and what is read there."""
        for one in objects(given):
            members = iter(one.items())
            for key, value in itertools.islice(members, LOOKED_AT):
                where, declared = f"{place}.{key}" if place else key, key in fields
                inner = (fields_of_type(fields[key]) or SHAPES.get(where, {})) if declared else {}
                if not (value is None or declared or key in CONTENTS or (where in EXTRAS and objects(value))):
                    yield place, key, value, read.get(place, ())
                if where in EXTRAS or inner:
                    yield from self._loose({**read, **self.elsewhere} if declared else read, value, inner, where)
            known = {*fields, *read.get(place, ())}
            if rest := {key: value for key, value in members if key not in known}:
                yield from ((place, key, rest[key], ()) for key in rest.keys() & WORDS)
                yield place, "", rest, ()

    def _lost(self, path: str, place: str, key: str, word: str) -> RefusedError:
        if path not in self.served and word not in self.elsewhere.get(place, ()):
            return RefusedError("wrong endpoint", f"{path:.60} takes no {key}: {self._send}")
        where = f" in {place}" if place else ""
        return wrong_type(f"there is no field {key}{where}: {self.mends[word]}")

    @property
    def _send(self) -> str:
        return f"send it to one of {', '.join(sorted(self.served))}"


def mends(choice: str, drawing: str) -> dict[str, str]:
    """Return how each word is said right. choice: where the texts of an inline list belong. drawing: who draws."""
    said = {word: f"send {word} beside item_set to {drawing}" for word in (DRAWS, *STEERING, LIST_AFTER)}
    return said | {
        REFERENCE: "name the item set in item_set, beside the other fields",
        **dict.fromkeys((CHOICE, STRUCTURED, GUIDED), f"send the texts as {choice}"),
        SLATE: "send slate beside the other fields",
        **dict.fromkeys(SELECTION, f"send {', '.join(SELECTION)} beside item_set"),
        DRAW: said[DRAWS],
        **{word: f"send {word} beside item_set" for word in OF_ANSWERS},
    }


def set_in(given: Mapping[str, Any]) -> str | None:
    """Return where an item set stands in JSON of any kind, rightly or nearly; None where none does.

    In a schema a property may be called item_set, and constants and examples may hold what they like.
    """
    looked, level = 0, [(given, "", False)]
    for value, where, names in level:
        if isinstance(value, str):
            if (says := _says(value)) and EBNF_SET.search(value):
                return where
            if (says or "\\u" in value) and value.lstrip()[:1] in ("{", "["):
                with contextlib.suppress(ValueError):
                    level.append((json.loads(value), where, False))
        elif isinstance(value, list):
            level += [(one, f"{where}[{i}]", False) for i, one in enumerate(value[:LOOKED_AT])]
        elif isinstance(value, dict):
            for key, inner in itertools.islice(value.items(), LOOKED_AT):
                there = f"{where}.{key:.60}" if where else f"{key:.60}"
                schema = names and isinstance(inner, dict | bool)
                brings = chooses(inner) and nearest(key, (STRUCTURED,)) is not None
                if inner is not None and not schema and (means_set(key) or key == GUIDED or brings):
                    return there
                if names or key not in NO_SCHEMAS:
                    level.append((inner, there, key in NAMED and not names))
        looked += len(value) if isinstance(value, list | dict) else 1
        if looked > LOOKED_AT:
            return "one of its fields" if _says(json.dumps(given, ensure_ascii=False)) else None
    return None


def _says(text: str) -> bool:
    return says_set(text) or GUIDED in text or STRUCTURED[:-1] in text


def chooses(structured: Any) -> bool:
    """Return whether a value of `structured_outputs` brings an inline list, rightly written or not."""
    return isinstance(structured, dict) and any(
        structured[key] is not None and nearest(key, (CHOICE, GUIDED))
        for key in (*itertools.islice(structured, COMPARED), *structured.keys() & {CHOICE})
    )


def fields_of_route(scope: Mapping[str, Any], body: Any) -> Fields:
    """Return the fields of a request's body, by the route that FastAPI has chosen for it. If that declares none, as
    /invocations, which hands the body on to another: those of all models whose required fields are there."""
    if (declared := getattr(scope.get("route"), "body_field", None)) is not None:
        return fields_of_type(declared.field_info.annotation)
    fields: dict[str, Any] = {}
    for route in scope["app"].routes if isinstance(body, dict) else ():
        declared = getattr(route, "body_field", None)
        for model in () if declared is None else _models(declared.field_info.annotation):
            if issubclass(model, BaseModel) and all(
                (one.alias or name) in body for name, one in model.model_fields.items() if one.is_required()
            ):
                fields |= _fields(model)
    return fields


def fields_of_type(annotation: Any) -> Fields:
    """Return the fields of objects of a type, or of all of a union's; none of a list, or of a dict: these are free."""
    return {name: inner for model in _models(annotation) for name, inner in _fields(model).items()}


def _models(annotation: Any) -> Iterator[type]:
    annotation = getattr(annotation, "__value__", annotation)  # of an alias
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        declares = dataclasses.is_dataclass(annotation) or hasattr(annotation, "__struct_fields__")
        if declares or issubclass(annotation, BaseModel):
            yield annotation
    elif typing.get_origin(annotation) not in (list, dict, tuple, set, typing.Literal):
        for one in typing.get_args(annotation):
            yield from _models(one)


@functools.lru_cache(1024)
def _fields(model: type) -> Fields:
    if issubclass(model, BaseModel):
        ends = model.__module__.startswith("xgrammar")  # a grammar, in which sets may stand, as in a dict
        return {field.alias or name: None if ends else field.annotation for name, field in model.model_fields.items()}
    types: Mapping[str, Any] = {}
    with contextlib.suppress(NameError):  # of names that only type checkers import
        types = typing.get_type_hints(model)
    names = getattr(model, "__struct_fields__", None) or [field.name for field in dataclasses.fields(model)]  # type: ignore[arg-type]
    return {name: types.get(name) for name in names}


def holds_sets(kind: str, spec: Any) -> bool:
    """Return whether item sets stand in a constraint, rightly or not."""
    if kind == SLATE or not may_hold(kind, spec):
        return kind == SLATE
    if not is_small(spec):
        return True  # this may be asked on an event loop
    try:
        return Marker(lambda place: 1 << 30).finds(kind, spec)
    except ItemSetError:
        return True
    except Exception:  # no constraint, as its engine will say
        return False


def may_hold(kind: str, spec: Any) -> bool:
    return kind == SLATE or mentions(spec)


def is_small(spec: Any) -> bool:
    """Return whether a constraint has few characters. Looks at no more of it than that."""
    waiting, characters = [spec], 0
    while waiting and characters <= SMALL:
        node = waiting.pop()
        characters += 4 + (len(node) if isinstance(node, str | list | dict) else 0)  # quotes, and what parts them
        if isinstance(node, list | dict) and characters <= SMALL:
            waiting += node
            waiting += node.values() if isinstance(node, dict) else ()
    return characters <= SMALL


def constraints_of(body: Any, fields: Collection[str]) -> list[tuple[str, Any]]:
    """Return kinds and texts of the constraints that may hold sets, by any engine's words. fields: those declared."""
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


def refuse_loose_tools(tools: Sequence[Any], choice: Any, held: Callable[[bool], bool], *, named_holds: bool) -> None:
    """Raises RefusedError for tools with item sets in their parameters, which the engine would leave free.

    tools, choice: of OpenAI's or Anthropic's form. held: whether a tool's parameters hold, given whether it is strict.
    named_holds: whether they do if the tool is named.
    """
    chosen = choice if isinstance(choice, dict) else {}
    named = (chosen["function"] if isinstance(chosen.get("function"), dict) else chosen).get("name")
    for given in objects(tools):
        if isinstance(given.get("tools"), list):  # a namespace of several
            refuse_loose_tools(given["tools"], choice, held, named_holds=named_holds)
        function = given["function"] if isinstance(given.get("function"), dict) else given
        parameters, strict = function.get("parameters", function.get("input_schema")), function.get("strict") is True
        if isinstance(parameters, dict) and not held(strict) and holds_sets(JSON, parameters):
            mends = [] if strict else ['add "strict": true to the function']
            mends += ["name it in tool_choice"] if named_holds and named != function.get("name") else []
            raise RefusedError(
                "item set inside",
                f"the parameters of the tool {shown(function.get('name'))} hold an item_set, but this engine leaves "
                f"them free: {', or '.join(mends) or 'give them as a JSON schema of the answer'}",
                "tools",
            )


def disguised(tag: Any) -> Any:
    """Return a structural tag of a body, as JSON or read, with what engines take as they parse it (xgrammar's `Format`)
    in place of its sets: a constant text, out of which `undisguised` takes the set again."""
    if not mentions(tag):
        return tag
    try:
        read = json.loads(tag if isinstance(tag, str) else json.dumps(tag), object_hook=_constant)
    except ValueError:  # as the engine will say
        return tag
    return json.dumps(read) if isinstance(tag, str) else read


def undisguised(tag: str | dict[str, Any]) -> str:
    """Return the same structural tag with its sets, as JSON."""
    text = tag if isinstance(tag, str) else json.dumps(tag)
    return json.dumps(json.loads(text, object_hook=_item_set)) if _DISGUISE in text else text


def _constant(node: dict[str, Any]) -> dict[str, Any]:
    if "json_schema" in node:  # which stays as it is
        node["json_schema"] = json.loads(undisguised(json.dumps(node["json_schema"])))
    return {"type": "const_string", "value": _DISGUISE + json.dumps(node)} if node.get("type") == REFERENCE else node


def _item_set(node: dict[str, Any]) -> Any:
    value = node.get("value")
    if not isinstance(value, str) or not value.startswith(_DISGUISE):
        return node
    return json.loads(value[len(_DISGUISE) :], object_hook=_item_set)
