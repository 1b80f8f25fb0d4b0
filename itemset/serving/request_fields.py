"""The fields of a request that this plugin reads, and which misspelled ones mean them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from itemset.errors import shown
from itemset.serving.catalogue import RefusedError

REFERENCE = "item_set"
"""The name of a registered set. Inside the front end an ItemRequest takes its place."""
SLATE = "slate"
"""Several distinct items in one answer: see `itemset.embedded.rewrite.Marker.slate`."""
CHOICE, STRUCTURED, GUIDED = "choice", "structured_outputs", "guided_choice"
"""The inline list, the field that vLLM has it in, and its older word for it."""
FILTER, EXCLUDE, ONLY = SELECTION = ("item_filter", "exclude_keys", "only_keys")
"""What chooses among the items of a registered set: see `itemset.select.views.view`."""
ELSEWHERE = {"filter": FILTER, "where": FILTER, "exclude": EXCLUDE, "only": ONLY, "candidates": ONLY}
"""What others call these. A server would drop such a field, and answer of all items."""
BEAMS = "use_beam_search"
"""vLLM's word for a ranked list, on OpenAI endpoints of both engines."""
OPTIONS = ("width", "exact", "renormalised", "max_passes", "without_end")
"""What a request for a ranked list may give beside its set: see `itemset.serving.request.ListOptions`."""
DRAWS, DRAW, CANDIDATES, REPLACE, APPROXIMATE = DRAWN = ("draws", "draw", "candidates", "replace", "approximate")
"""What a request for draws gives beside its set, and beside words that ranked lists and samples have too: see
`itemset.serving.draw_options`."""
WEIGHT = "return_set_weight"
"""Asks a sampled answer for the probability of its set along the way: see `itemset.serving.answer_fields.Expected`."""

LOGPROBS = "item_logprobs"
"""Asks every candidate for log q and log p of each of its tokens: see `itemset.serving.answer_fields.item_logprobs`."""
LIST = "list"
"""In the parameters of `generate`: its `n` candidates are the n best items. DRAWS there may be true: n draws."""

WORDS = (REFERENCE, CHOICE, STRUCTURED, GUIDED, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT, LOGPROBS)
EDITS = 2
"""A key this many edits from a word, after folding case, - and _, is taken for it: a person meant the word."""
COMPARED = 200
"""Keys of a body that are compared so; of those after them only the words themselves count. Requests have fewer."""
OTHERS = frozenset({"items", "voice", "raw", "rows", "state", "slots", "date", "scale"})
"""Fields of OpenAI's and the engines' own that come as near."""

CUSTOM, PARAMS, XARGS = "custom_params", "sampling_params", "vllm_xargs"
EXTRAS = frozenset(
    {"extra_body", STRUCTURED, CUSTOM, "extra_args", XARGS, "instances", "parameters", "options", PARAMS}
    | {f"{PARAMS}.{inner}" for inner in (CUSTOM, "extra_args", XARGS)}
)
"""Objects of a body, in any engine, that may hold any key, and in which people put our words."""


def at(body: Any, place: str) -> Iterator[dict[str, Any]]:
    """The objects at a place of a body; of a batch, which is a list, each one's."""
    values = [body]
    for name in place.split(".") if place else ():
        values = [one.get(name) for value in values for one in objects(value)]
    for value in values:
        yield from objects(value)


def objects(value: Any) -> list[dict[str, Any]]:
    """The object that a value is, or those in a list."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def rename_guided(given: dict[str, Any], into: dict[str, Any]) -> None:
    """Take vLLM's older word out of an object for what it means: `choice` of another.

    Raises RefusedError for both words, and if there is no list.
    """
    if (texts := given.pop(GUIDED, None)) is None:
        return
    if not isinstance(texts, list):
        raise wrong_type(f"{GUIDED} must be a list of texts, not {shown(texts)}", GUIDED)
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


def wrong_type(message: str, param: str | None = None) -> RefusedError:
    """The error for a field of another type or name."""
    return RefusedError("wrong type", message, param)


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
