"""The HTTP surface: the request fields `item_set` and `choice`, and refusals where SGLang would drop them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from itemset import asgi
from itemset.config import REFERENCE
from itemset.lists import RANKING

SERVED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"}
RANKED = SERVED - {"/v1/responses"}
CHOICE, STRUCTURED = "choice", "structured_outputs"
NEARLY_CHOICE = ("choices", "guided_choice")
WORDS = (REFERENCE, CHOICE, STRUCTURED, *NEARLY_CHOICE, *asgi.MISSPELLED)
BEAMS = "use_beam_search"
"""vLLM's word for a ranked list of `n`, on the OpenAI endpoints."""

_fields: ContextVar[dict[str, Any] | None] = ContextVar("item_set_fields", default=None)


def fields() -> dict[str, Any]:
    """What the HTTP request that is being served says of item sets: nothing outside of one."""
    return _fields.get() or {}


class ItemSetFields:
    """ASGI middleware. Fields that SGLang does not know are lost when it parses a body, so they are read here, and
    found by `FrontEnd.take` in the context of the request.

    HTTP 400 where they are of no use: misspelled, of another type, or at an endpoint that would ignore them.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not asgi.has_json(scope):
            await self._app(scope, receive, send)
            return
        body = await asgi.read(receive)
        given = asgi.fields(body, WORDS)
        found = _find(given)
        if refusal := _refusal(scope["path"], found, given):
            await asgi.refuse(send, refusal)
            return
        if _within_the_contract(given):
            body = json.dumps(given).encode()
        token = _fields.set(found)
        try:
            await self._app(scope, asgi.replay(body, receive), send)
        finally:
            _fields.reset(token)


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """For the requests that are made on behalf of one: theirs are no fields of its body."""
    token = _fields.set(None)
    try:
        yield
    finally:
        _fields.reset(token)


def _find(given: dict[str, Any]) -> dict[str, Any] | None:
    found = {word: given[word] for word in (REFERENCE, CHOICE) if given.get(word) is not None}
    structured = given.get(STRUCTURED)
    if isinstance(structured, dict) and structured.get(CHOICE) is not None:
        found.setdefault(CHOICE, structured[CHOICE])
    if found:
        found |= {word: given[word] for word in (BEAMS, *RANKING) if word in given}
    return found or None


def _params(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The `sampling_params` of each prompt."""
    params = given.get("sampling_params")
    return [one for one in (params if isinstance(params, list) else [params]) if isinstance(one, dict)]


def _within_the_contract(given: dict[str, Any]) -> bool:
    """`/generate` refuses words it does not know in `sampling_params`, but lets everything pass in `custom_params`:
    put ours there. Whether there were any."""
    moved = False
    for one in _params(given):
        if words := [word for word in (REFERENCE, CHOICE, *RANKING) if word in one]:
            one["custom_params"] = {**(one.get("custom_params") or {}), **{word: one.pop(word) for word in words}}
            moved = True
    return moved


def _refusal(path: str, found: dict[str, Any] | None, given: dict[str, Any]) -> str | None:
    """What is wrong with the fields of a body, which SGLang would ignore."""
    for word in asgi.MISSPELLED:
        if word in given:
            return f"there is no field {word}: name the item set in {REFERENCE}"
    if found and path not in SERVED:
        return f"{path} takes no {next(iter(found))}: send it to one of {', '.join(sorted(SERVED))}"
    if path not in SERVED or not _serves_sets():
        return None
    for word in NEARLY_CHOICE:
        if word in given:
            return f"there is no field {word}: send the texts as {CHOICE}"
    structured = given.get(STRUCTURED)
    if isinstance(structured, dict) and set(structured) - {CHOICE}:
        return (
            f"of {STRUCTURED} SGLang knows {CHOICE} alone: send item_set, regex, ebnf or response_format beside it, as "
            "fields of their own"
        )
    each = _params(given)
    named = found or any(REFERENCE in one or CHOICE in one for one in each)
    if found and "beam_width" in given:
        return "beam_width belongs into the sampling_params of /generate: elsewhere ask with use_beam_search and n"
    if named and given.get(BEAMS) and path not in RANKED:
        return f"{path} has no ranked lists: send it to one of {', '.join(sorted(RANKED))}"
    ranked = given.get(BEAMS) or any("beam_width" in one for one in each)
    if named and ranked and given.get("stream"):
        return "a ranked list is not streamed: leave stream out"
    if named and not ranked:
        for word in RANKING:
            if any(one.get(word) is not None for one in (given, *each)):
                how = "add use_beam_search and n, or beam_width on /generate, or leave it out"
                return f"{word} is for ranked lists: {how}"
    return None


def _serves_sets() -> bool:
    """Whether this server uses our backend: the plugin may be installed and another one chosen."""
    state = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "_global_state", None)
    return getattr(getattr(state, "tokenizer_manager", None), "static_front_end", None) is not None
