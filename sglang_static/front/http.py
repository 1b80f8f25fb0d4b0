"""The HTTP surface: the request fields `item_set` and `choice`, and refusals where SGLang would drop them."""

import asyncio
import copy
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from itemset.errors import shown
from itemset.serving.catalogue import RefusedError
from itemset.serving.front import http_bodies, lost_fields, request_fields
from itemset.serving.front.lost_fields import constraints_of, disguised, refuse_loose_tools
from itemset.serving.front.model_names import take_set
from itemset.serving.front.request import DRAWING, check_options, wants_draws, with_beams

from itemset.serving.front.request_fields import (  # isort: skip
    ATTRIBUTES, BEAMS, CHOICE, CUSTOM, DRAWS, GUIDED, LIST, LIST_AFTER, LOGPROBS, OF_SET, PARAMS, REFERENCE, SELECTION,
    SLATE, STRUCTURED, WEIGHT, WORDS,
)  # fmt: skip
from sglang_static import compat
from sglang_static.front.request import KINDS, PROMPTS, constraint_of

_BODY = {"": WORDS, STRUCTURED: (CHOICE,)}
_WITHIN = tuple(word for word in WORDS if word != STRUCTURED)
_ASKING = (*OF_SET, CHOICE, DRAWS, LIST_AFTER)
_OWN = tuple(dict.fromkeys((*_ASKING, LIST, *request_fields.OPTIONS, *request_fields.DRAWN)))
SERVED = dict.fromkeys(DRAWING, _BODY | {CUSTOM: _WITHIN, "response_format": ("schema",)}) | {
    # No custom_params are read.
    "/v1/responses": _BODY | {"": (REFERENCE, *SELECTION, SLATE, ATTRIBUTES, CHOICE, STRUCTURED, GUIDED)},
    "/generate": _BODY | {PARAMS: (*_WITHIN, *KINDS), f"{PARAMS}.{CUSTOM}": _WITHIN},
}
_PLACES = (PARAMS, f"{PARAMS}.{CUSTOM}", CUSTOM)  # where words of ours may stand, beside the body itself
_DRAWING = "/v1/completions, /v1/chat/completions or /generate"
SURFACE = lost_fields.Surface(
    served=SERVED,
    dropped=("format",),  # Ollama's
    mends=lost_fields.mends(f"{CHOICE}, beside the other fields", _DRAWING)
    | {word: f"send {word} beside item_set to {_DRAWING}" for word in (WEIGHT, LOGPROBS)},
    inside="name a set in item_set, beside the other fields; state a schema in response_format (/generate: "
    "json_schema, /v1/responses: text.format), a grammar in ebnf (not on /v1/responses)",
)


class ItemSetFields(http_bodies.BodyMiddleware):
    """Keeps the fields that SGLang does not know, and would drop, in `body()`: `FrontEnd.judge` reads them."""

    async def begin(self, scope: Any) -> None:
        """At the start of a server published sets are followed."""
        if scope["type"] == "lifespan":
            compat.follower_of(compat.server_manager())

    def sets_by_model(self, scope: Any) -> Collection[str]:
        front_end = _front_end()
        return () if front_end is None else front_end.sets_by_model

    def check(self, scope: Any, given: Any) -> None:
        noted, ours = http_bodies.body(), _front_end() is not None
        path, fields = noted.path, lost_fields.fields_of_route(scope, given)
        if path in http_bodies.ANSWERED:
            take_set(given, self.sets_by_model(scope))
        SURFACE.check(path, given, fields, ours=ours)
        if not isinstance(given, dict):
            return
        if isinstance(tools := given.get("tools"), list) and given.get("tool_choice") != "none":
            forced = given.get("tool_choice") not in (None, "auto")
            holds = path in SERVED
            refuse_loose_tools(
                tools, given.get("tool_choice"), lambda strict: holds and (forced or strict), named_holds=holds
            )
        noted.stated = constraints_of(given, fields)
        if path not in SERVED:
            return
        stated = given.get("response_format")
        if ours and not isinstance(stated, dict | None):  # SGLang would answer 500
            raise request_fields.wrong_type(f"response_format must be an object, not {shown(stated)}")
        if isinstance(stated, dict) and stated.get("type") == "structural_tag":
            given["response_format"] = disguised(stated)
        if ours:
            _rename(path, given)
        noted.unlimited = path == "/v1/completions" and given.get("max_tokens") is None
        own, places = _own_fields(given), [one for place in _PLACES for one in request_fields.at(given, place)]
        named = any(one.get(word) is not None for one in (own, *places) for word in _ASKING)
        if named and ours:
            _refuse_what_is_ignored(path, given)
        if named or given.get(BEAMS):  # which a set inside a constraint excludes
            noted.fields = own
        _move_within_the_contract(given)
        if named and ours and path == "/generate":
            _refuse_mistyped(given)

    async def make(self, request: Any, given: Any) -> None:
        """Judge a request that is to be streamed, and make its sets. Raises as `FrontEnd.judge` does."""
        front_end, body = _front_end(), http_bodies.body()
        unseen = body.path in ("/generate", "/v1/responses")  # the others wait for the first token
        if front_end is None or not isinstance(given, dict) or not given.get("stream") or not unseen:
            return
        stated = body.stated if body.path == "/v1/responses" else ()  # of which the judge knows nothing
        making = [front_end.constraints.prepare(*one) for one in stated]
        body.made = await http_bodies.while_connected(asyncio.gather(*making), request)  # held meanwhile
        if body.fields is not None or any(constraint_of(one, {}) for one in request_fields.at(given, PARAMS)):
            names = ("custom_logit_processor", *(PROMPTS if body.path == "/generate" else ()))
            known = {name: given.get(name) for name in names} | {PARAMS: copy.deepcopy(given.get(PARAMS))}
            body.made.append(judged := SimpleNamespace(**known))
            await front_end.judge(judged, request)


def _front_end() -> Any:
    """This server's, None if it does not use our backend: the plugin may be installed and another one chosen."""
    return getattr(compat.server_manager(), "static_front_end", None)


def _rename(path: str, body: dict[str, Any]) -> None:
    """Put `choice` for vLLM's older word, and draws on the way of beam searches."""
    structured = body.get(STRUCTURED)
    if isinstance(structured, dict) and set(structured) - {CHOICE}:
        raise request_fields.wrong_type(
            f"of {STRUCTURED} SGLang knows {CHOICE} alone: send item_set, regex, ebnf or response_format beside it, as "
            "fields of their own"
        )
    for place in ("", *_PLACES):
        for given in request_fields.at(body, place):
            request_fields.rename_guided(given, given)
    with_beams(body, path)


def _own_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that SGLang would drop, and an inline list within `structured_outputs`."""
    of_draws = ("seed", "temperature") if wants_draws(body) else ()
    read, structured = (*_OWN, BEAMS, *of_draws), body.get(STRUCTURED)
    own = {word: body[word] for word in read if body.get(word) is not None}
    if isinstance(structured, dict) and structured.get(CHOICE) is not None:
        if CHOICE in own:
            raise RefusedError("two constraints", f"{CHOICE} is given twice, also in {STRUCTURED}: give one of them")
        own[CHOICE] = structured[CHOICE]
    return own


def _move_within_the_contract(body: dict[str, Any]) -> None:
    """`/generate` refuses words it does not know in `sampling_params`, but lets everything pass in `custom_params`."""
    for one in request_fields.at(body, PARAMS):
        seed = ("seed",) if wants_draws(one) else ()
        ours, custom = [word for word in (*_OWN, *seed) if word in one], one.get(CUSTOM)
        if ours and (custom is None or isinstance(custom, dict)):
            if twice := [word for word in ours if (custom or {}).get(word) is not None]:
                raise RefusedError("two constraints", f"{twice[0]} is given twice, also in {CUSTOM}: give one of them")
            one[CUSTOM] = {**(custom or {}), **{word: one.pop(word) for word in ours}}


def _refuse_mistyped(body: Mapping[str, Any]) -> None:
    """Raises RefusedError, with its name, for a field of /generate that SGLang cannot read: it would name none."""
    from sglang.srt.entrypoints.api_contract import generate_contract_error

    each: dict[str, Any] = {name: {name: value} for name, value in body.items() if name not in (*PROMPTS, PARAMS)}
    for params in request_fields.at(body, PARAMS):
        each |= {f"{PARAMS}.{name}": {PARAMS: {name: value}} for name, value in params.items()}
    for name, alone in each.items():
        if (error := generate_contract_error(alone)) is not None:
            raise request_fields.wrong_type(f"SGLang cannot read {name} ({error}): correct it, or omit it", name)


def _refuse_what_is_ignored(path: str, body: dict[str, Any]) -> None:
    """Raises RefusedError for what stands beside a set and would have no effect, or take it away."""
    request_fields.refuse_tools(body)
    each = list(request_fields.at(body, PARAMS))
    drawn = any(map(wants_draws, (body, *each)))
    ranked = bool(body.get(BEAMS) or any("beam_width" in one for one in each))
    if "beam_width" in body:
        refusal = "beam_width belongs into the sampling_params of /generate: elsewhere ask with use_beam_search and n"
    elif body.get(BEAMS) and path == "/v1/responses":
        refusal = f"{path} has no ranked lists: send it to one of {', '.join(sorted(SERVED.keys() - {path}))}"
    elif drawn and body.get("stream"):
        raise RefusedError("draws", "draws have no stream: leave it out", "stream")
    elif ranked and body.get("stream"):
        refusal = "a ranked list is not streamed: leave stream out"
    else:
        for one in (body, *each):
            check_options(one, ranked=(ranked or bool(one.get(LIST_AFTER))) and not drawn, drawn=drawn)
        return
    raise RefusedError("beam search", refusal)
