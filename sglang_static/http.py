"""The HTTP surface: the request fields `item_set` and `choice`, and refusals where SGLang would drop them."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

from itemset.serving import draw_options, http_bodies, lost_fields, request_fields
from itemset.serving.body_constraints import constraints_of, refuse_loose_tools
from itemset.serving.catalogue import RefusedError
from itemset.serving.request import check_options
from itemset.serving.request_fields import (
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
from sglang_static.embedded_grammars import KINDS, constraint_of, disguised

_BODY = {"": request_fields.WORDS, STRUCTURED: (CHOICE,)}
_WITHIN = (REFERENCE, CHOICE, GUIDED, *SELECTION, SLATE, DRAWS, DRAW, WEIGHT)
_OPENAI = _BODY | {CUSTOM: _WITHIN, "response_format": ("schema",)}
SERVED = {
    "/v1/completions": _OPENAI,
    "/v1/chat/completions": _OPENAI,
    "/v1/responses": _BODY
    | {
        "": tuple(word for word in request_fields.WORDS if word not in (DRAWS, DRAW, WEIGHT))
    },  # no custom_params are read
    "/generate": _BODY | {PARAMS: (*_WITHIN, *KINDS), f"{PARAMS}.{CUSTOM}": _WITHIN},
}
SURFACE = lost_fields.Surface(
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


def is_translated() -> bool:
    """Whether the answer is made of a chat's, which must stay SGLang's own object for it."""
    return http_bodies.body().path == "/v1/messages"


class ItemSetFields(http_bodies.BodyMiddleware):
    """Keeps the fields that SGLang does not know, and would drop, in `asgi.body()`: `FrontEnd.prepare` reads them."""

    def check(self, scope: Any, given: Any) -> None:
        """Puts `choice` for vLLM's older word, and draws on the way of beam searches."""
        _check(scope, given)

    async def make(self, request: Any, given: Any) -> None:
        """Judge a request that is to be streamed, and make its sets. Raises as `FrontEnd.prepare` does."""
        front_end, body = _front_end(), http_bodies.body()
        if front_end is None or not isinstance(given, dict) or not given.get("stream") or body.path not in UNSEEN:
            return
        if body.fields is not None or any(constraint_of(one, {}) for one in request_fields.at(given, PARAMS)):
            processor = given.get("custom_logit_processor")
            params = copy.deepcopy(given.get(PARAMS))
            body.made = SimpleNamespace(sampling_params=params, custom_logit_processor=processor)  # held meanwhile
            await front_end.prepare(body.made, request)


def _check(scope: Any, body: Any) -> None:
    path, ours = http_bodies.body().path, _front_end() is not None
    fields = lost_fields.fields_of_route(scope, body)
    SURFACE.check(path, body, fields, ours=ours)
    if not isinstance(body, dict):
        return
    if isinstance(tools := body.get("tools"), list) and body.get("tool_choice") != "none":
        forced = body.get("tool_choice") not in (None, "auto")
        refuse_loose_tools(tools, body.get("tool_choice"), lambda strict: path in SERVED and (forced or strict))
    http_bodies.body().stated = constraints_of(body, fields)
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
            for given in request_fields.at(body, place):
                request_fields.rename_guided(given, given)
    if ours and draw_options.wants_draws(body) and path in _OPENAI_DRAWS:
        draw_options.with_beams(body)
    of_draws = ("seed", "temperature") if draw_options.wants_draws(body) else ()
    read = (REFERENCE, CHOICE, BEAMS, *SELECTION, SLATE, WEIGHT, *OPTIONS, *DRAWN, *of_draws)
    found = {word: body[word] for word in read if body.get(word) is not None}
    if isinstance(structured, dict) and structured.get(CHOICE) is not None:
        if CHOICE in found:
            raise RefusedError("two constraints", f"{CHOICE} is given twice, also in {STRUCTURED}: give one of them")
        found[CHOICE] = structured[CHOICE]
    places = [
        found,
        *(one for place in (PARAMS, f"{PARAMS}.{CUSTOM}", CUSTOM) for one in request_fields.at(body, place)),
    ]
    ask = (REFERENCE, CHOICE, *SELECTION, SLATE, DRAWS, WEIGHT)
    named = any(one.get(word) is not None for one in places for word in ask)
    if named and ours:
        _refuse_what_is_ignored(path, body)
    if named or body.get(BEAMS):  # which a set inside a constraint excludes
        http_bodies.body().fields = found
    _move_within_the_contract(body)


def _move_within_the_contract(body: dict[str, Any]) -> None:
    """`/generate` refuses words it does not know in `sampling_params`, but lets everything pass in `custom_params`."""
    for one in request_fields.at(body, PARAMS):
        seed = ("seed",) if draw_options.wants_draws(one) else ()
        ours = [word for word in (REFERENCE, CHOICE, *SELECTION, SLATE, WEIGHT, *OPTIONS, *DRAWN, *seed) if word in one]
        custom = one.get(CUSTOM)
        if ours and (custom is None or isinstance(custom, dict)):
            if twice := [word for word in ours if (custom or {}).get(word) is not None]:
                raise RefusedError("two constraints", f"{twice[0]} is given twice, also in {CUSTOM}: give one of them")
            one[CUSTOM] = {**(custom or {}), **{word: one.pop(word) for word in ours}}


def _refuse_what_is_ignored(path: str, body: dict[str, Any]) -> None:
    """Raises RefusedError for what stands beside a set and would have no effect, or take it away."""
    request_fields.refuse_tools(body)
    each = list(request_fields.at(body, PARAMS))
    drawn = any(map(draw_options.wants_draws, (body, *each)))
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


def _front_end() -> Any:
    """This server's, None if it does not use our backend: the plugin may be installed and another one chosen."""
    state = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "_global_state", None)
    return getattr(getattr(state, "tokenizer_manager", None), "static_front_end", None)
