"""The HTTP surface: the request fields `item_set` and `choice`, and refusals where SGLang would drop them."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from itemset.serving import asgi, declared, drawing, words
from itemset.serving.body_constraints import constraints_of, refuse_loose_tools
from itemset.serving.catalogue import RefusedError
from itemset.serving.request import check_options
from itemset.serving.words import (
    BEAMS,
    CHOICE,
    CUSTOM,
    DRAW,
    DRAWN,
    DRAWS,
    GUIDED,
    OPTIONS,
    PARAMS,
    REFERENCE,
    SELECTION,
    SLATE,
    STRUCTURED,
    WEIGHT,
)
from sglang_static.inside import KINDS, constraint_of, disguised

_BODY = {"": words.WORDS, STRUCTURED: (CHOICE,)}
_WITHIN = (REFERENCE, CHOICE, GUIDED, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT)
_OPENAI = _BODY | {CUSTOM: _WITHIN, "response_format": ("schema",)}
SERVED = {
    "/v1/completions": _OPENAI,
    "/v1/chat/completions": _OPENAI,
    "/v1/responses": _BODY
    | {"": tuple(word for word in words.WORDS if word not in (DRAWS, DRAW, WEIGHT))},  # no custom_params are read
    "/generate": _BODY | {PARAMS: (*_WITHIN, *KINDS), f"{PARAMS}.{CUSTOM}": _WITHIN},
}
SURFACE = words.Surface(
    served=SERVED,
    elsewhere={},
    dropped=("format",),  # Ollama's
    mends={
        REFERENCE: "name the item set in item_set, beside the other fields",
        **dict.fromkeys((CHOICE, STRUCTURED, GUIDED), f"send the texts as {CHOICE}, beside the other fields"),
        SLATE: "send slate beside the other fields",
        **dict.fromkeys(SELECTION, "send item_filter, exclude_keys and only_keys beside item_set"),
        **dict.fromkeys(
            (DRAWS, DRAW), "send draws beside item_set to /v1/completions, /v1/chat/completions or /generate"
        ),
        WEIGHT: f"send {WEIGHT} beside item_set to /v1/completions, /v1/chat/completions or /generate",
    },
    inside="name a set in item_set, beside the other fields; state a schema in response_format (/generate: "
    "json_schema, /v1/responses: text.format), a grammar in ebnf (not on /v1/responses)",
)
_OPENAI_DRAWS = ("/v1/completions", "/v1/chat/completions")
RANKED = SERVED.keys() - {"/v1/responses"}

UNSEEN = ("/generate", "/v1/responses")
"""Endpoints that begin to stream before a request is judged; the others wait for its first token."""

_fields: ContextVar[dict[str, Any] | None] = ContextVar("item_set_fields", default=None)
_path: ContextVar[str] = ContextVar("item_set_path", default="")
_stated: ContextVar[Sequence[tuple[str, Any]]] = ContextVar("item_set_stated", default=())
_made: ContextVar[Any] = ContextVar("item_set_made", default=None)
"""What `_make` has made, held until the request comes to ask for it."""


def fields() -> dict[str, Any]:
    """What the HTTP request that is being served says of item sets: nothing outside of one."""
    return _fields.get() or {}


def is_translated() -> bool:
    """Whether the answer is made of a chat's, which must stay SGLang's own object for it."""
    return _path.get() == "/v1/messages"


def stated() -> Sequence[tuple[str, Any]]:
    """The constraints of the HTTP request that is being served in which sets may stand."""
    return _stated.get()


class ItemSetFields:
    """ASGI middleware: has every body judged that SGLang parses.

    Fields that SGLang does not know are lost when it makes a request of a body. They are read just before, and found by
    `FrontEnd.prepare` in the context of the HTTP request.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[asgi.JUDGE], scope[asgi.MAKER] = _judge, _make
        token = _fields.set(None)
        _stated.set(())
        _path.set(asgi.path_of(scope) if "path" in scope else "")
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
    """Raises RefusedError, counted, for words that would be lost; keeps the others, and puts `choice` for vLLM's older
    word."""
    from itemset.serving.metrics import refusals

    with refusals():
        _judged(scope, body)


def _judged(scope: Any, body: Any) -> None:
    path, ours = asgi.path_of(scope), _serves_sets()
    fields = declared.of_route(scope, body)
    SURFACE.check(path, body, fields, ours=ours)
    if not isinstance(body, dict):
        return
    if isinstance(tools := body.get("tools"), list) and body.get("tool_choice") != "none":
        forced = body.get("tool_choice") not in (None, "auto")
        refuse_loose_tools(tools, body.get("tool_choice"), lambda strict: path in SERVED and (forced or strict))
    _stated.set(constraints_of(body, fields))
    if path not in SERVED:
        return
    given = body.get("response_format")
    if isinstance(given, dict) and given.get("type") == "structural_tag":
        body["response_format"] = disguised(given)
    structured = body.get(STRUCTURED)
    if ours:
        if isinstance(structured, dict) and set(structured) - {CHOICE}:
            raise RefusedError(
                "wrong type",
                f"of {STRUCTURED} SGLang knows {CHOICE} alone: send item_set, regex, ebnf or response_format beside "
                "it, as fields of their own",
            )
        for place in ("", PARAMS, f"{PARAMS}.{CUSTOM}", CUSTOM):
            for given in words.at(body, place):
                words.rename_guided(given, given)
    if ours and drawing.wants_draws(body) and path in _OPENAI_DRAWS:
        drawing.with_beams(body)
    of_draws = ("seed", "temperature") if drawing.wants_draws(body) else ()
    read = (REFERENCE, CHOICE, BEAMS, *SELECTION, SLATE, WEIGHT, *OPTIONS, *DRAWN, *of_draws)
    found = {word: body[word] for word in read if body.get(word) is not None}
    if isinstance(structured, dict) and structured.get(CHOICE) is not None:
        if CHOICE in found:
            raise RefusedError("two constraints", f"{CHOICE} is given twice, also in {STRUCTURED}: give one of them")
        found[CHOICE] = structured[CHOICE]
    places = [found, *(one for place in (PARAMS, f"{PARAMS}.{CUSTOM}", CUSTOM) for one in words.at(body, place))]
    ask = (REFERENCE, CHOICE, *SELECTION, SLATE, DRAWS, WEIGHT)
    named = any(one.get(word) is not None for one in places for word in ask)
    if named and ours:
        _refuse_what_is_ignored(path, body)
    if named or body.get(BEAMS):  # which a set inside a constraint excludes
        _fields.set(found)
    _move_within_the_contract(body)


async def _make(request: Any, body: Any) -> None:
    """Judge a request that is to be streamed, and make its sets, before its answer begins. Raises as
    `FrontEnd.prepare` does."""
    front_end = _front_end()
    if front_end is None or not isinstance(body, dict) or not body.get("stream"):
        return
    constrained = any(constraint_of(one, {}) for one in words.at(body, PARAMS))
    if asgi.path_of(request.scope) in UNSEEN and (_fields.get() is not None or constrained):
        seen = SimpleNamespace(
            sampling_params=copy.deepcopy(body.get(PARAMS)), custom_logit_processor=body.get("custom_logit_processor")
        )
        from itemset.serving.metrics import refusals

        _made.set(seen)
        with refusals():
            await front_end.prepare(seen, request)


def _move_within_the_contract(body: dict[str, Any]) -> None:
    """`/generate` refuses words it does not know in `sampling_params`, but lets everything pass in `custom_params`."""
    for one in words.at(body, PARAMS):
        seed = ("seed",) if drawing.wants_draws(one) else ()
        ours = [word for word in (REFERENCE, CHOICE, *SELECTION, SLATE, WEIGHT, *OPTIONS, *DRAWN, *seed) if word in one]
        custom = one.get(CUSTOM)
        if ours and (custom is None or isinstance(custom, dict)):
            if twice := [word for word in ours if (custom or {}).get(word) is not None]:
                raise RefusedError("two constraints", f"{twice[0]} is given twice, also in {CUSTOM}: give one of them")
            one[CUSTOM] = {**(custom or {}), **{word: one.pop(word) for word in ours}}


def _refuse_what_is_ignored(path: str, body: dict[str, Any]) -> None:
    """Raises RefusedError for what stands beside a set and would have no effect, or take it away."""
    words.refuse_tools(body)
    each = list(words.at(body, PARAMS))
    drawn = any(map(drawing.wants_draws, (body, *each)))
    ranked = bool(body.get(BEAMS) or any("beam_width" in one for one in each))
    if "beam_width" in body:
        refusal = "beam_width belongs into the sampling_params of /generate: elsewhere ask with use_beam_search and n"
    elif body.get(BEAMS) and path not in RANKED:
        refusal = f"{path} has no ranked lists: send it to one of {', '.join(sorted(RANKED))}"
    elif drawn and body.get("stream"):
        raise RefusedError("draws", "draws have no stream: leave it out", "stream")
    elif ranked and body.get("stream"):
        refusal = "a ranked list is not streamed: leave stream out"
    else:
        for one in (body, *each):
            check_options(one, ranked=ranked and not drawn, drawn=drawn)
        return
    raise RefusedError("beam search", refusal)


def _serves_sets() -> bool:
    """Whether this server uses our backend: the plugin may be installed and another one chosen."""
    return _front_end() is not None


def _front_end() -> Any:
    state = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "_global_state", None)
    return getattr(getattr(state, "tokenizer_manager", None), "static_front_end", None)
