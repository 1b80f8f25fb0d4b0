"""A set by the model's name, `"model": "qwen3:films?list=10"`: for gateways that pass on no other field of ours."""

import contextlib
import json
from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from itemset.errors import shown
from itemset.serving.catalogue import RefusedError, alike

from itemset.serving.front.request_fields import (  # isort: skip
    BEAMS, DRAWN, LIST, LIST_AFTER, OF_ITEMS, OF_SET, OPTIONS, REFERENCE, wrong_type,
)  # fmt: skip

_WORDS = [word for word in dict.fromkeys((LIST, *OF_SET, *OF_ITEMS, *OPTIONS, *DRAWN)) if word != REFERENCE]


def take_set(body: Any, sets: Collection[str]) -> None:
    """Put what a body's model says of one of these sets where it would stand in the body: `item_set`, and its options.

    After the colon stands the set's name, after a question mark options as of a query: `list=10` for the ten best
    items, and any word that may stand beside `item_set`, JSON or a text. What the body says itself counts.
    Raises RefusedError for a body with another set, and for other words.
    """
    if not isinstance(body, dict) or not isinstance(model := body.get("model"), str):
        return
    name, _, query = model.partition("?")
    base, _, name = name.rpartition(":")
    if base and name not in sets and (meant := alike(name, sets)):
        message = f"model {shown(model)}: no item set is called {shown(name)}: did you mean {meant!r}?"
        raise RefusedError("unknown set", message, "model")
    if not base or name not in sets:
        return
    if body.get(REFERENCE) not in (None, name):
        message = (
            f"the model names the set {name!r}, and {REFERENCE} another, {shown(body[REFERENCE])}: give one of them"
        )
        raise RefusedError("two constraints", message, "model")
    said: dict[str, Any] = {REFERENCE: name}
    options = dict(parse_qsl(query, keep_blank_values=True))
    for word, text in options.items():
        if word not in _WORDS:
            raise wrong_type(f"model {shown(model)}: there is no {shown(word)}, only {', '.join(_WORDS)}", "model")
        value: Any = text
        with contextlib.suppress(ValueError):
            value = json.loads(text)
        ranked = word == LIST and LIST_AFTER not in options  # beside which it is a word of its own
        said |= {BEAMS: True, "n": value} if ranked else {word: value}
    body |= said | {word: value for word, value in body.items() if value is not None} | {"model": base}


def with_sets(data: bytes, sets: Collection[str]) -> bytes:
    """Return a server's list of models, with each of them once more for every set."""
    answer = json.loads(data)
    with contextlib.suppress(KeyError, TypeError):  # an error, or a list of another form
        answer["data"] += [{**one, "id": f"{one['id']}:{name}"} for one in answer["data"] for name in sorted(sets)]
    return msgspec.json.encode(answer)
