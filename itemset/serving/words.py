"""What an HTTP body says of item sets: our words where an endpoint reads them; elsewhere, and nearly ours, refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from itemset.errors import shown
from itemset.inside.places import EBNF_SET, NAMED, NO_SCHEMAS, means_set, says_set
from itemset.serving.catalogue import RefusedError
from itemset.serving.declared import Fields, of_type

REFERENCE = "item_set"
"""The name of a registered set; in the engine also an inline set's reference."""
SLATE = "slate"
"""Several distinct items in one answer: see `itemset.inside.marks.Marker.slate`."""
CHOICE, STRUCTURED, GUIDED = "choice", "structured_outputs", "guided_choice"
"""The inline list, the field that vLLM has it in, and its older word for it."""
FILTER, EXCLUDE, ONLY = SELECTION = ("item_filter", "exclude_keys", "only_keys")
"""What chooses among the items of a registered set: see `itemset.views.view`."""
ELSEWHERE = {"filter": FILTER, "where": FILTER, "exclude": EXCLUDE, "only": ONLY, "candidates": ONLY}
"""What others call these. A server would drop such a field, and answer of all items."""
BEAMS = "use_beam_search"
"""vLLM's word for a ranked list, on OpenAI endpoints of both engines."""
OPTIONS = ("width", "exact", "renormalised", "max_passes", "without_end")
"""What a request for a ranked list may give beside its set: see `itemset.serving.request.ListOptions`."""
DRAWS, DRAW, CANDIDATES, REPLACE, APPROXIMATE = DRAWN = ("draws", "draw", "candidates", "replace", "approximate")
"""What a request for draws gives beside its set, and beside words that ranked lists and samples have too: see
`itemset.serving.drawing`."""
WEIGHT = "return_set_weight"
"""Asks a sampled answer for the probability of its set along the way: see `itemset.serving.answer.Expected`. Inside the
engine the request carries it as it is."""
INDEX, FILTERED, PLACE, LIST, RACES, HOLES, SLATED = INTERNAL = (
    "item_set_index",
    "item_set_filter",
    "item_set_place",
    "item_set_list",
    "item_set_races",
    "item_set_holes",
    "item_set_slate",
)
"""Keys under which a request inside the engine carries an inline set's index file, the filter that its set is or stands
on, its set's place on the devices, the ranked list that it is, the temperature and the keys of the races if draws are
made as that list is, what it carries of the sets in its constraint, and, of a slate that a device can make,
`Constraint.slate`. They are no words of requests."""

WORDS = (REFERENCE, CHOICE, STRUCTURED, GUIDED, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT)
EDITS = 2
"""A key this many edits from a word, after folding case, - and _, is taken for it: a person meant the word."""
COMPARED = 200
"""Keys of a body that are compared so; of those after them only the words themselves count. Requests have fewer."""
LOOKED_AT = 2_000
"""Values of what an endpoint drops that are looked at one by one; more are searched as one text."""
OTHERS = frozenset({"items", "voice", "raw", "rows", "state", "slots", "date", "scale"})
"""Fields of OpenAI's and the engines' own that come as near."""

CUSTOM, PARAMS, XARGS = "custom_params", "sampling_params", "vllm_xargs"
EXTRAS = frozenset(
    {"extra_body", STRUCTURED, CUSTOM, "extra_args", XARGS, "instances", "parameters", "options", PARAMS}
    | {f"{PARAMS}.{inner}" for inner in (CUSTOM, "extra_args", XARGS)}
)
"""Objects of a body, in any engine, that may hold any key, and in which people put our words."""

CONTENTS = frozenset({"messages", "prompt", "input", "documents", "metadata", "stop", "chat_template_kwargs"})
"""Fields that are what a user says, also where an endpoint does not know them."""

SHAPES: Mapping[str, Fields] = {
    "response_format": dict.fromkeys(("type", "json_schema", "format", "structures", "triggers")),
    "response_format.json_schema": dict.fromkeys(("name", "description", "schema", "strict")),
}
"""The fields of objects that an endpoint declares as anything, and reads so."""

Read = Mapping[str, Collection[str]]
"""By place, such as `""` for a body itself, the words that are read there, and constraints that are judged later."""


@dataclass(frozen=True)
class Surface:
    """Where one engine's endpoints read our words.

    served: by path, what is read at each place. elsewhere: what all endpoints read that declare these places. dropped:
    fields that endpoints declare and nothing reads. mends: how a word is said right. inside: where a constraint with
    sets in it belongs.
    """

    served: Mapping[str, Read]
    elsewhere: Read
    dropped: Collection[str]
    mends: Mapping[str, str]
    inside: str

    def check(self, path: str, body: Any, fields: Fields, *, ours: bool) -> None:
        """Raises RefusedError for a word of ours, or a set inside a constraint, that would be lost.

        fields: those that the endpoint declares. ours: whether this server has item sets; else `item_set` alone is
        looked for.
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
        """The members of a body that its endpoint does not declare: place, key, value, and what is read there."""
        for one in _objects(given):
            members = iter(one.items())
            for key, value in itertools.islice(members, LOOKED_AT):
                where, declared = f"{place}.{key}" if place else key, key in fields
                inner = (of_type(fields[key]) or SHAPES.get(where, {})) if declared else {}
                if not (value is None or declared or key in CONTENTS or (where in EXTRAS and _objects(value))):
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
        return RefusedError("wrong type", f"there is no field {key}{where}: {self.mends[word]}")

    @property
    def _send(self) -> str:
        return f"send it to one of {', '.join(sorted(self.served))}"


def at(body: Any, place: str) -> Iterator[dict[str, Any]]:
    """The objects at a place of a body; of a batch, which is a list, each one's."""
    values = [body]
    for name in place.split(".") if place else ():
        values = [one.get(name) for value in values for one in _objects(value)]
    for value in values:
        yield from _objects(value)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def set_in(given: Mapping[str, Any]) -> str | None:
    """Where an item set stands in JSON of any kind, rightly or nearly; None where none does.

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
                if inner is not None and not schema and (means_set(key) or key == GUIDED or _brings(key, inner)):
                    return there
                if names or key not in NO_SCHEMAS:
                    level.append((inner, there, key in NAMED and not names))
        looked += len(value) if isinstance(value, list | dict) else 1
        if looked > LOOKED_AT:
            return "one of its fields" if _says(json.dumps(given, ensure_ascii=False)) else None
    return None


def _says(text: str) -> bool:
    return says_set(text) or GUIDED in text or STRUCTURED[:-1] in text


def _brings(key: str, value: Any) -> bool:
    return chooses(value) and nearest(key, (STRUCTURED,)) is not None


def chooses(structured: Any) -> bool:
    """Whether a value of `structured_outputs` brings an inline list, rightly written or not."""
    return isinstance(structured, dict) and any(
        structured[key] is not None and nearest(key, (CHOICE, GUIDED))
        for key in (*itertools.islice(structured, COMPARED), *structured.keys() & {CHOICE})
    )


def rename_guided(given: dict[str, Any], into: dict[str, Any]) -> None:
    """Take vLLM's older word out of an object for what it means: `choice` of another.

    Raises RefusedError for both words, and if there is no list.
    """
    if GUIDED not in given:
        return
    texts = given.pop(GUIDED)
    if texts is None:
        return
    if not isinstance(texts, list):
        raise RefusedError("wrong type", f"{GUIDED} must be a list of texts, not {shown(texts)}", GUIDED)
    if into.get(CHOICE) is not None:
        raise RefusedError("two constraints", f"{GUIDED} is the older word for {CHOICE}: give one of them")
    into[CHOICE] = texts


def refuse_tools(body: Mapping[str, Any]) -> None:
    """Raises RefusedError where a body with a set asks for an answer that can be no item."""
    tools = body.get("tool_choice")
    if tools == "required" or isinstance(tools, dict):
        raise RefusedError(
            "two constraints",
            "an item set and a tool_choice that forces a tool exclude each other: leave tool_choice out, or send auto",
        )
    for word in ("guided_json", "guided_regex", "guided_grammar"):
        if body.get(word) is not None:
            raise RefusedError("two constraints", f"an item set and {word} exclude each other: give one")


def nearest(key: str, words: tuple[str, ...]) -> str | None:
    """The word that a key is, or is taken for; None where it is none of these."""
    return None if len(key) > 40 else _nearest(key, words)


@functools.lru_cache(4096)
def _nearest(key: str, words: tuple[str, ...]) -> str | None:
    if key in words:
        return key
    folded = _folded(key)
    return None if key in OTHERS else next((word for word in words if _near(folded, _folded(word))), None)


def _folded(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


def _near(given: str, word: str) -> bool:
    """Whether EDITS insertions, deletions and substitutions lead from one to the other."""
    if abs(len(given) - len(word)) > EDITS:
        return False
    row = list(range(len(word) + 1))
    for i, letter in enumerate(given, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(word, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1] <= EDITS
