"""What an HTTP body says of item sets: our words where an endpoint reads them; elsewhere, and nearly ours, refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from itemset.errors import shown
from itemset.serving.catalogue import RefusedError

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
OPTIONS = ("width", "exact", "renormalised", "max_passes")
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
OTHERS = frozenset({"items", "voice", "raw", "rows", "state", "slots", "date", "scale"})
"""Fields of OpenAI's and the engines' own that come as near."""

PLACES: Mapping[str, tuple[str, ...]] = {
    "": WORDS,
    "extra_body": WORDS,  # the openai client's word, which it takes off
    STRUCTURED: (REFERENCE, CHOICE, GUIDED, SLATE, DRAWS, DRAW, WEIGHT),
    "sampling_params": WORDS,
    f"sampling_params.{STRUCTURED}": (CHOICE, GUIDED),
    "sampling_params.custom_params": (REFERENCE, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT),
    "sampling_params.extra_args": (REFERENCE, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT),
    "custom_params": (REFERENCE, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT),
    "extra_args": (REFERENCE, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT),
    "vllm_xargs": (REFERENCE, SLATE, DRAWS, DRAW, WEIGHT),
    "instances": WORDS,
    "parameters": WORDS,
}
"""Where people put our words, in any engine, and which are looked for there. Everything else of a body is free text,
such as messages, tools and schemas, and may hold any key."""

Read = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Surface:
    """Where one engine's endpoints read our words.

    served: by path, the words that are read at each place. elsewhere: the same for all other endpoints, of which
    `watched` words are looked for. mends: how a word is said right.
    """

    served: Mapping[str, Read]
    elsewhere: Read
    watched: Collection[str]
    mends: Mapping[str, str]

    def check(self, path: str, body: Any, *, ours: bool) -> None:
        """Raises RefusedError for a word of ours that would be lost.

        ours: whether this server has item sets; else `item_set` alone is looked for.
        """
        read = self.served.get(path, self.elsewhere)
        watched = (WORDS if path in self.served else self.watched) if ours else (REFERENCE,)
        compared = 0
        for place, words in PLACES.items():
            if place and isinstance(body, dict) and place.partition(".")[0] not in body:
                continue
            here = read.get(place, ())
            looked_for = tuple(word for word in WORDS if word in watched and (word in words or word in here))
            for given in at(body, place):
                keys = list(itertools.islice(given, COMPARED - compared))
                compared += len(keys)
                for key in (*looked_for, *keys):
                    value = None if key in here else given.get(key)
                    word = None if value is None else nearest(key, looked_for)
                    if word is not None and (word != STRUCTURED or chooses(value)):
                        raise self._lost(path, place, key, word)

    def _lost(self, path: str, place: str, key: str, word: str) -> RefusedError:
        if path not in self.served and word not in self.elsewhere.get(place, ()):
            served = ", ".join(sorted(self.served))
            return RefusedError("wrong endpoint", f"{path:.60} takes no {key}: send it to one of {served}")
        where = f" in {place}" if place else ""
        return RefusedError("wrong type", f"there is no field {key}{where}: {self.mends[word]}")


def at(body: Any, place: str) -> Iterator[dict[str, Any]]:
    """The objects at a place of a body; of a batch, which is a list, each one's."""
    values = [body]
    for name in place.split(".") if place else ():
        values = [one.get(name) for value in values for one in _objects(value)]
    for value in values:
        yield from _objects(value)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


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
