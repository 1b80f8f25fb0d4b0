"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.sampling_params import SamplingParams

from itemset.errors import ItemSetError, shown
from itemset.inside.marks import mentions
from itemset.serving import asgi, declared, drawing, metrics, words
from itemset.serving.body_constraints import constraints_of, holds_sets, refuse_loose_tools, refuse_lost
from itemset.serving.catalogue import InlineSet, RefusedError
from itemset.serving.constraint import JSON, TAG
from itemset.serving.request import ItemRequest
from itemset.serving.words import (
    BEAMS,
    CHOICE,
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
    XARGS,
)
from vllm_static.inside import constraint_of
from vllm_static.metrics import PATH, refresh
from vllm_static.request import asked_by

_OWN = (REFERENCE, GUIDED, *SELECTION, SLATE, WEIGHT)
_DRAWING = ("/v1/completions", "/v1/chat/completions")
_TEXTS = 'send the texts as structured_outputs: {"choice": [...]}'
_INSIDE = (
    "name a set in item_set, beside the other fields; state a schema in response_format or structured_outputs: "
    '{"json": ...} (/v1/responses: text.format), a grammar in structured_outputs: {"grammar": ...}'
)
SURFACE = words.Surface(
    served={path: {"": _OWN} for path in ("/v1/chat/completions/batch", "/v1/responses")}
    | {path: {"": (*_OWN, DRAWS, DRAW)} for path in _DRAWING},
    # What vLLM takes for its engine's parameters reaches the engine as it is.
    elsewhere={XARGS: (REFERENCE, *SELECTION), f"{PARAMS}.extra_args": (REFERENCE, *SELECTION, SLATE)},
    dropped=(),
    mends={
        REFERENCE: "name the item set in item_set, beside the other fields",
        CHOICE: _TEXTS,
        STRUCTURED: _TEXTS,
        GUIDED: _TEXTS,
        SLATE: "send slate beside the other fields",
        **dict.fromkeys(SELECTION, "send item_filter, exclude_keys and only_keys beside item_set"),
        **dict.fromkeys((DRAWS, DRAW), f"send draws beside item_set to {' or '.join(_DRAWING)}"),
        WEIGHT: f"send {WEIGHT} beside item_set",
    },
    inside=_INSIDE,
)

MAKING = {*SURFACE.served, "/v1/messages"}
"""Endpoints whose answers may be streamed."""

_brings_choice: ContextVar[bool] = ContextVar("item_set_choice", default=False)
_stated: ContextVar[Sequence[tuple[str, Any]]] = ContextVar("item_set_stated", default=())
"""The body's constraints in which sets may stand."""
"""Whether the body that is being served brought an inline list. vLLM's parsers may put a tool's constraint in its place
(tool_parsers/abstract_tool_parser.py, adjust_request) before its parameters are made."""


_made: ContextVar[InlineSet | ItemSetError | None] = ContextVar("item_set_made", default=None)
"""The set that the body brought or chose, held until the engine's client asks for it; or why there is none."""


class ItemSetWords:
    """ASGI middleware (vLLM's --middleware): has every body judged that vLLM parses, and its set made before an answer
    begins; brings the engine's figures up to date before /metrics shows them."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope[asgi.JUDGE], scope[asgi.MAKER] = _judge, _make
            _brings_choice.set(False)
            _made.set(None)
            _stated.set(())
            if scope["path"] == PATH:
                await refresh(scope["app"])
        await self._app(scope, receive, send)


def _judge(scope: Any, body: Any) -> None:
    """Raises RefusedError, counted, for words that would be lost; puts `choice` for vLLM's older word."""
    ours = _serves_sets(scope["app"])
    try:
        fields = declared.of_route(scope, body)
        SURFACE.check(asgi.path_of(scope), body, fields, ours=ours)
        _stated.set(constraints_of(body, fields))
        if ours and isinstance(body, dict):
            _take_choice(body)
            if drawing.wants_draws(body) and asgi.path_of(scope) in _DRAWING:
                drawing.with_beams(body)
    except RefusedError as error:
        metrics.REFUSED.labels(error.reason).inc()
        raise


async def _make(request: Any, body: Any) -> None:
    """Make the set that a body brings or chooses. What is wrong is said later, in its turn: as vLLM makes the request's
    parameters, where its answer has not begun either."""
    front_end = _front_end(request.scope["app"])
    if front_end is None or not isinstance(body, dict) or asgi.path_of(request.scope) not in MAKING:
        return
    for kind, spec in _stated.get() if body.get("stream") else ():
        try:
            await asgi.while_connected(front_end.constraints.prepare(kind, spec), request)
        except ItemSetError as error:
            raise _refused(error) from error
    given = {**(xargs if isinstance(xargs := body.get(XARGS), dict) else {}), **body}
    structured = body.get(STRUCTURED)
    choice = structured.get(CHOICE) if isinstance(structured, dict) else None
    with contextlib.suppress(RefusedError):
        wanted = ItemRequest.of(
            [given.get(REFERENCE)],
            [choice],
            {word: given[word] for word in SELECTION if word in given},
            where=XARGS,
            constraints=(REFERENCE, STRUCTURED),
        )
        if wanted is None:
            return
        try:
            made = await asgi.while_connected(front_end.checks.prepare(wanted), request)
            front_end.checks.reference(made)  # raises
            _made.set(made.choice if isinstance(made.choice, InlineSet) else None)
        except ItemSetError as error:
            _made.set(error)


def _refused(error: ItemSetError) -> RefusedError:
    """The error, counted, as what a body is refused with."""
    refused = error if isinstance(error, RefusedError) else RefusedError("bad items", str(error))
    metrics.REFUSED.labels(refused.reason).inc()
    return refused


def _take_choice(body: dict[str, Any]) -> None:
    if body.get(GUIDED) is not None and body.get(STRUCTURED) is not None:
        raise RefusedError("two constraints", f"{GUIDED} is an older word for {STRUCTURED}: give one of them")
    if body.get(STRUCTURED) is not None and not isinstance(body[STRUCTURED], dict):  # vLLM would answer 500
        raise RefusedError("wrong type", f"{STRUCTURED} must be an object, not {shown(body[STRUCTURED])}")
    choice: dict[str, Any] = {}
    words.rename_guided(body, choice)
    if choice:
        body[STRUCTURED] = choice
    xargs = body.get(XARGS)
    named = body.get(REFERENCE) is not None or (isinstance(xargs, dict) and xargs.get(REFERENCE) is not None)
    slate = body.get(SLATE) is not None
    brings = words.chooses(body.get(STRUCTURED))
    if drawing.wants_draws(body) and not (named or brings or slate):
        raise RefusedError("wrong type", f"{DRAWS} draws items of a set: name the set as {REFERENCE}", DRAWS)
    _brings_choice.set(brings)
    if named or brings or slate:
        words.refuse_tools(body)


def _serves_sets(app: Any) -> bool:
    """Whether this server uses our backend: the plugin may be installed and another one chosen."""
    return _front_end(app) is not None


def _front_end(app: Any) -> Any:
    client = getattr(app.state, "engine_client", None)
    return getattr(getattr(client, "input_processor", None), "static_front_end", None)


def add_item_set(request: Any, params: SamplingParams) -> SamplingParams:
    """Carry the fields of an OpenAI request over to its sampling parameters.

    Raises RefusedError as `ItemRequest.of` does, for a list that the endpoint does not give, and for tools with sets in
    parameters that vLLM leaves free.
    """
    tools = getattr(request, "tools", None)
    if tools and getattr(request, "tool_choice", None) not in (None, "none"):
        given = constraint_of(params)  # vLLM has made one of the tools, or none
        kind = given[0] if given is not None and holds_sets(*given) else None
        choice = request.tool_choice
        refuse_loose_tools(
            [tool.model_dump() for tool in tools],
            choice if isinstance(choice, str) else choice.model_dump(),
            lambda strict: kind == JSON or (kind == TAG and strict),
        )
    elsewhere = bool((request.model_extra or {}).get(BEAMS))  # a field that the endpoint does not know
    asked = _asked(request, params.extra_args, params.structured_outputs, k=1 if elsewhere else None) is not None
    if asked and elsewhere:
        message = "there are ranked lists on /v1/completions and /v1/chat/completions alone: send it there"
        raise RefusedError("beam search", message, BEAMS)
    if asked or (request.model_extra or {}).get(SLATE) is not None:
        params.extra_args = _carried(request, params.extra_args)
    given = constraint_of(params)
    refuse_lost(_stated.get(), reached=given is not None and (given[0] == SLATE or mentions(given[1])))
    return params


def rank_item_set(request: Any, params: Any) -> Any:
    """Carry an item set, named or inline, from an OpenAI request with `use_beam_search` to vLLM's BeamSearchParams,
    with the options of its list.

    Raises RefusedError as `add_item_set` does, and if log-probabilities, a stream or another constraint are asked for.
    """
    structured = request.structured_outputs
    wanted = _asked(request, request.vllm_xargs, structured, k=params.beam_width, draws=True)
    if wanted is None:
        refuse_lost(_stated.get(), reached=0)
        return params
    if request.logprobs is not None and request.logprobs is not False:  # 0 asks for the sampled tokens' own
        message = "a ranked list has no logprobs of single tokens: leave logprobs out"
        raise RefusedError("beam search", message, "logprobs")
    if request.stream:
        raise RefusedError("beam search", "a ranked list is not streamed: leave stream out", "stream")
    if request.response_format is not None and request.response_format.type != "text":
        message = "a ranked list and response_format exclude each other: leave response_format out"
        raise RefusedError("two constraints", message, "response_format")
    params.extra_args = _carried(request, request.vllm_xargs) | (_of_draws(request) if wanted.drawn else {})
    params.structured_outputs = structured
    return params


def _of_draws(request: Any) -> dict[str, Any]:
    """Fields that vLLM knows, and that mean something for draws."""
    return {name: value for name in ("seed", "temperature") if (value := getattr(request, name)) is not None}


def _asked(
    request: Any, extra_args: dict[str, Any] | None, structured: Any, *, k: int | None, draws: bool = False
) -> ItemRequest | None:
    own, fields = getattr(request, STRUCTURED, None), request.model_extra or {}
    if draws and drawing.wants_draws(fields):
        fields = fields | _of_draws(request)
    brings = own is not None and own.choice is not None
    if _brings_choice.get() and not brings:
        raise RefusedError(
            "two constraints",
            "the inline set would be lost: either this endpoint takes none, or vLLM makes a constraint of the tools in "
            "its place; leave the tools out, or send it to /v1/chat/completions",
            STRUCTURED,
        )
    ours = (REFERENCE, *SELECTION, SLATE, WEIGHT)
    if not brings and not any((place or {}).get(word) is not None for place in (fields, extra_args) for word in ours):
        return None
    wanted = asked_by(extra_args, structured, fields, k=k, draws=draws)
    if fields.get("beam_width") is not None:
        message = f"there is no field beam_width: a ranked list takes {BEAMS}, n, and width for the beams of its search"
        raise RefusedError("beam search", message, "beam_width")
    if isinstance(refused := _made.get(), ItemSetError):
        raise refused
    return wanted


def _carried(request: Any, extra_args: dict[str, Any] | None) -> dict[str, Any]:
    fields, ours = request.model_extra or {}, (REFERENCE, *SELECTION, SLATE, WEIGHT, *OPTIONS, *DRAWN)
    return {**(extra_args or {}), **{key: fields[key] for key in ours if fields.get(key) is not None}}
