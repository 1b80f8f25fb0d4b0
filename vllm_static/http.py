"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.sampling_params import SamplingParams

from itemset.embedded.rewrite import mentions
from itemset.errors import ItemSetError, shown
from itemset.serving import http_bodies, lost_fields, request_fields
from itemset.serving.catalogue import InlineSet, RefusedError
from itemset.serving.constraint import JSON, TAG
from itemset.serving.lost_fields import constraints_of, holds_sets, refuse_loose_tools, refuse_lost
from itemset.serving.request import ItemRequest, wants_draws, with_beams
from itemset.serving.request_fields import BEAMS, CHOICE, DRAWS, GUIDED, REFERENCE, SELECTION, SLATE, STRUCTURED, XARGS
from vllm_static import compat
from vllm_static.metrics import PATH, refresh
from vllm_static.request import constraint_of, judge, put

_OWN = (REFERENCE, GUIDED, *SELECTION, SLATE, request_fields.WEIGHT, request_fields.LOGPROBS)
_DRAWING = ("/v1/completions", "/v1/chat/completions")
_EXTRA_ARGS = f"{request_fields.PARAMS}.extra_args"
SURFACE = lost_fields.Surface(
    served={path: {"": _OWN} for path in ("/v1/chat/completions/batch", "/v1/responses")}
    | {path: {"": (*_OWN, DRAWS, request_fields.DRAW)} for path in _DRAWING},
    # What vLLM takes for its engine's parameters reaches the engine as it is.
    elsewhere={XARGS: (REFERENCE, *SELECTION), _EXTRA_ARGS: (REFERENCE, *SELECTION, SLATE)},
    mends=lost_fields.mends('structured_outputs: {"choice": [...]}', " or ".join(_DRAWING)),
    inside="name a set in item_set, beside the other fields; state a schema in response_format or structured_outputs: "
    '{"json": ...} (/v1/responses: text.format), a grammar in structured_outputs: {"grammar": ...}',
)

MAKING = {*SURFACE.served, "/v1/messages"}
"""Endpoints whose answers may be streamed."""


class ItemSetWords(http_bodies.BodyMiddleware):
    """vLLM's --middleware. Brings the engine's figures up to date before /metrics shows them."""

    async def begin(self, scope: Any) -> None:
        if scope["path"] == PATH:
            await refresh(scope["app"])

    def check(self, scope: Any, given: Any) -> None:
        """Puts `choice` for vLLM's older word, and draws on the way of beam searches."""
        ours, body = compat.front_end_of(scope["app"].state) is not None, http_bodies.body()
        fields = lost_fields.fields_of_route(scope, given)
        SURFACE.check(body.path, given, fields, ours=ours)
        body.stated = constraints_of(given, fields)
        if ours and isinstance(given, dict):
            _take_choice(given)
            if wants_draws(given) and body.path in _DRAWING:
                with_beams(given)

    async def make(self, request: Any, given: Any) -> None:
        """What is wrong with a set is said as vLLM makes the request's parameters: its answer has not begun either."""
        front_end, body = compat.front_end_of(request.scope["app"].state), http_bodies.body()
        if front_end is None or not isinstance(given, dict) or body.path not in MAKING:
            return
        for kind, spec in body.stated if given.get("stream") else ():
            await http_bodies.while_connected(front_end.constraints.prepare(kind, spec), request)
        fields = {**(xargs if isinstance(xargs := given.get(XARGS), dict) else {}), **given}
        structured = given.get(STRUCTURED)
        choice = structured.get(CHOICE) if isinstance(structured, dict) else None
        name = fields.get(REFERENCE)
        if (choice is None and not isinstance(name, str)) or (choice is not None and name is not None):
            return
        kinds = dict.fromkeys(SELECTION, list) | {request_fields.FILTER: dict}
        selection = {word: fields[word] for word, kind in kinds.items() if isinstance(fields.get(word), kind)}
        try:
            prepared = front_end.checks.prepare(ItemRequest(name, choice, **selection))
            body.made = await http_bodies.while_connected(prepared, request)
        except ItemSetError as error:
            body.made = error


def _take_choice(given: dict[str, Any]) -> None:
    structured = given.get(STRUCTURED)
    if given.get(GUIDED) is not None and structured is not None:
        raise RefusedError("two constraints", f"{GUIDED} is an older word for {STRUCTURED}: give one of them")
    if structured is not None and not isinstance(structured, dict):  # vLLM would answer 500
        raise request_fields.wrong_type(f"{STRUCTURED} must be an object, not {shown(structured)}")
    choice: dict[str, Any] = {}
    request_fields.rename_guided(given, choice)
    if choice:
        given[STRUCTURED] = choice
    named = any(one.get(REFERENCE) is not None for one in (given, *request_fields.objects(given.get(XARGS))))
    brings = lost_fields.chooses(given.get(STRUCTURED))
    has_set = named or brings or given.get(SLATE) is not None
    if wants_draws(given) and not has_set:
        raise request_fields.wrong_type(f"{DRAWS} draws items of a set: name the set as {REFERENCE}", DRAWS)
    http_bodies.body().brings_choice = brings
    if has_set:
        request_fields.refuse_tools(given)


def add_item_set(request: Any, params: SamplingParams) -> SamplingParams:
    """Put what an OpenAI request asks of item sets, judged, into its sampling parameters.

    Raises RefusedError as `ItemRequest.of` does, for a list that the endpoint does not give, and for tools with sets in
    parameters that vLLM leaves free.
    """
    tools, fields = getattr(request, "tools", None), request.model_extra or {}
    if tools and getattr(request, "tool_choice", None) not in (None, "none"):
        given = constraint_of(params)  # vLLM has made one of the tools, or none
        kind = given[0] if given is not None and holds_sets(*given) else None
        choice = request.tool_choice
        refuse_loose_tools(
            [tool.model_dump() for tool in tools],
            choice if isinstance(choice, str) else choice.model_dump(),
            lambda strict: kind == JSON or (kind == TAG and strict),
        )
    elsewhere = bool(fields.get(BEAMS))  # a field that the endpoint does not know
    judged = _judged(request, params.extra_args, params.structured_outputs, k=1 if elsewhere else None)
    if judged is not None and elsewhere:
        message = "there are ranked lists on /v1/completions and /v1/chat/completions alone: send it there"
        raise RefusedError("beam search", message, BEAMS)
    if judged is not None:
        params = put(params, judged)
    elif fields.get(SLATE) is not None:
        params.extra_args = {**(params.extra_args or {}), SLATE: fields[SLATE]}
    given = constraint_of(params)
    reached = given is not None and (given[0] == SLATE or mentions(given[1]))
    refuse_lost(http_bodies.body().stated, reached=reached)
    return params


def rank_item_set(request: Any, params: Any) -> Any:
    """The same for an OpenAI request with `use_beam_search`, and vLLM's BeamSearchParams.

    Raises RefusedError as `add_item_set` does, and if log-probabilities, a stream or another constraint are asked for.
    """
    judged = _judged(request, request.vllm_xargs, request.structured_outputs, k=params.beam_width, draws=True)
    if judged is None:
        refuse_lost(http_bodies.body().stated, reached=0)
        return params
    if request.logprobs is not None and request.logprobs is not False:  # 0 asks for the sampled tokens' own
        message = "a ranked list has no logprobs of single tokens: leave logprobs out"
        raise RefusedError("beam search", message, "logprobs")
    if request.stream:
        raise RefusedError("beam search", "a ranked list is not streamed: leave stream out", "stream")
    if request.response_format is not None and request.response_format.type != "text":
        message = "a ranked list and response_format exclude each other: leave response_format out"
        raise RefusedError("two constraints", message, "response_format")
    return put(params, judged)


def _judged(
    request: Any, extra_args: dict[str, Any] | None, structured: Any, *, k: int | None, draws: bool = False
) -> ItemRequest | None:
    own, fields, body = getattr(request, STRUCTURED, None), request.model_extra or {}, http_bodies.body()
    if draws and wants_draws(fields):  # fields that vLLM knows, and that mean something for draws
        fields = fields | {name: getattr(request, name) for name in ("seed", "temperature")}
    brings = compat.hook.chosen and own is not None and own.choice is not None  # else it is for another backend
    if body.brings_choice and not brings:
        raise RefusedError(
            "two constraints",
            "the inline set would be lost: either this endpoint takes none, or vLLM makes a constraint of the tools in "
            "its place; leave the tools out, or send it to /v1/chat/completions",
            STRUCTURED,
        )
    ours = (REFERENCE, *SELECTION, SLATE, request_fields.WEIGHT, request_fields.LOGPROBS)
    if not brings and not any((place or {}).get(word) is not None for place in (fields, extra_args) for word in ours):
        return None
    judged = judge(extra_args, structured, fields, k=k, draws=draws)
    if fields.get("beam_width") is not None:
        message = f"there is no field beam_width: a ranked list takes {BEAMS}, n, and width for the beams of its search"
        raise RefusedError("beam search", message, "beam_width")
    if judged is not None and isinstance(body.made, ItemSetError):
        raise body.made
    return replace(judged, made=body.made) if judged is not None and isinstance(body.made, InlineSet) else judged
