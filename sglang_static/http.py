"""The HTTP surface: the request fields `item_set` and `choice`, and refusals where SGLang would drop them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from itemset import asgi
from itemset.catalogue import RefusedError
from itemset.config import REFERENCE
from itemset.lists import RANKING
from itemset.words import CHOICE, GUIDED, STRUCTURED, WORDS, Surface, at, refuse_tools, rename_guided

PARAMS, CUSTOM = "sampling_params", "custom_params"
_BODY = {"": WORDS, STRUCTURED: (CHOICE,)}
_WITHIN = (REFERENCE, CHOICE, GUIDED)
_OPENAI = _BODY | {CUSTOM: _WITHIN}
SERVED = {
    "/v1/completions": _OPENAI,
    "/v1/chat/completions": _OPENAI,
    "/v1/responses": _BODY,  # SGLang reads no custom_params there
    "/generate": _BODY | {PARAMS: _WITHIN, f"{PARAMS}.{CUSTOM}": _WITHIN},
}
SURFACE = Surface(
    served=SERVED,
    elsewhere={},
    watched=WORDS,
    mends={
        REFERENCE: "name the item set in item_set, beside the other fields",
        **dict.fromkeys((CHOICE, STRUCTURED, GUIDED), f"send the texts as {CHOICE}, beside the other fields"),
    },
)
RANKED = SERVED.keys() - {"/v1/responses"}
BEAMS = "use_beam_search"
"""vLLM's word for a ranked list of `n`, on the OpenAI endpoints."""

_fields: ContextVar[dict[str, Any] | None] = ContextVar("item_set_fields", default=None)


def fields() -> dict[str, Any]:
    """What the HTTP request that is being served says of item sets: nothing outside of one."""
    return _fields.get() or {}


class ItemSetFields:
    """ASGI middleware: has every body judged that SGLang parses.

    Fields that SGLang does not know are lost when it makes a request of a body. They are read just before, and found by
    `FrontEnd.take` in the context of the HTTP request.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[asgi.JUDGE] = _judge
        token = _fields.set(None)
        try:
            await self._app(scope, receive, send)
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


def _judge(scope: Any, body: Any) -> None:
    """Raises RefusedError for words that would be lost; keeps the others, and puts `choice` for vLLM's older word."""
    path, ours = asgi.path_of(scope), _serves_sets()
    SURFACE.check(path, body, ours=ours)
    if path not in SERVED or not isinstance(body, dict):
        return
    if ours:
        for place in ("", PARAMS, f"{PARAMS}.{CUSTOM}", CUSTOM):
            for given in at(body, place):
                rename_guided(given, given)
    found = _find(body)
    if ours:
        _refuse_what_is_ignored(path, found, body)
    _move_within_the_contract(body)
    _fields.set(found)


def _find(body: dict[str, Any]) -> dict[str, Any] | None:
    found = {word: body[word] for word in (REFERENCE, CHOICE) if body.get(word) is not None}
    structured = body.get(STRUCTURED)
    if isinstance(structured, dict) and structured.get(CHOICE) is not None:
        if CHOICE in found:
            raise RefusedError("two constraints", f"{CHOICE} is given twice, also in {STRUCTURED}: give one of them")
        found[CHOICE] = structured[CHOICE]
    if found:
        found |= {word: body[word] for word in (BEAMS, *RANKING) if word in body}
    return found or None


def _move_within_the_contract(body: dict[str, Any]) -> None:
    """`/generate` refuses words it does not know in `sampling_params`, but lets everything pass in `custom_params`."""
    for one in at(body, PARAMS):
        words = [word for word in (REFERENCE, CHOICE, *RANKING) if word in one]
        custom = one.get(CUSTOM)
        if words and (custom is None or isinstance(custom, dict)):
            if twice := [word for word in words if (custom or {}).get(word) is not None]:
                raise RefusedError("two constraints", f"{twice[0]} is given twice, also in {CUSTOM}: give one of them")
            one[CUSTOM] = {**(custom or {}), **{word: one.pop(word) for word in words}}


def _refuse_what_is_ignored(path: str, found: dict[str, Any] | None, body: dict[str, Any]) -> None:
    """Raises RefusedError for what stands beside a set and would have no effect, or take it away."""
    structured = body.get(STRUCTURED)
    if isinstance(structured, dict) and set(structured) - {CHOICE}:
        raise RefusedError(
            "wrong type",
            f"of {STRUCTURED} SGLang knows {CHOICE} alone: send item_set, regex, ebnf or response_format beside it, as "
            "fields of their own",
        )
    each = list(at(body, PARAMS))
    places = (*each, *at(body, f"{PARAMS}.{CUSTOM}"), *at(body, CUSTOM))
    named = found or any(REFERENCE in one or CHOICE in one for one in places)
    if not named:
        return
    refuse_tools(body)
    ranked = body.get(BEAMS) or any("beam_width" in one for one in each)
    if found and "beam_width" in body:
        refusal = "beam_width belongs into the sampling_params of /generate: elsewhere ask with use_beam_search and n"
    elif body.get(BEAMS) and path not in RANKED:
        refusal = f"{path} has no ranked lists: send it to one of {', '.join(sorted(RANKED))}"
    elif ranked and body.get("stream"):
        refusal = "a ranked list is not streamed: leave stream out"
    elif words := [word for word in RANKING if any(one.get(word) is not None for one in (body, *each)) and not ranked]:
        how = "add use_beam_search and n, or beam_width on /generate, or leave it out"
        refusal = f"{words[0]} is for ranked lists: {how}"
    else:
        return
    raise RefusedError("beam search", refusal)


def _serves_sets() -> bool:
    """Whether this server uses our backend: the plugin may be installed and another one chosen."""
    state = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "_global_state", None)
    return getattr(getattr(state, "tokenizer_manager", None), "static_front_end", None) is not None
