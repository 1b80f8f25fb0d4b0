"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from vllm.sampling_params import SamplingParams

from itemset import asgi
from itemset.catalogue import RefusedError
from itemset.config import REFERENCE
from itemset.errors import shown
from itemset.lists import RANKING
from itemset.words import CHOICE, GUIDED, STRUCTURED, Surface, chooses, nearest, refuse_tools, rename_guided
from vllm_static import metrics

BEAMS = "use_beam_search"
XARGS = "vllm_xargs"

_READ = {"": (REFERENCE, GUIDED, STRUCTURED), STRUCTURED: (CHOICE,), XARGS: (REFERENCE,)}
_TEXTS = 'send the texts as structured_outputs: {"choice": [...]}'
SURFACE = Surface(
    served=dict.fromkeys(
        ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses"), _READ
    ),
    # vllm_xargs of other endpoints, and the parameters of /inference/v1/generate, reach the engine as they are.
    elsewhere={
        XARGS: (REFERENCE,),
        "sampling_params.extra_args": (REFERENCE,),
        f"sampling_params.{STRUCTURED}": (CHOICE,),
    },
    watched=(REFERENCE, GUIDED),
    mends={
        REFERENCE: "name the item set in item_set, beside the other fields",
        CHOICE: _TEXTS,
        STRUCTURED: _TEXTS,
        GUIDED: _TEXTS,
    },
)

_brings_choice: ContextVar[bool] = ContextVar("item_set_choice", default=False)
"""Whether the body that is being served brought an inline list. vLLM's parsers may put a tool's constraint in its place
(tool_parsers/abstract_tool_parser.py, adjust_request) before its parameters are made."""


class ItemSetWords:
    """ASGI middleware (vLLM's --middleware): has every body judged that vLLM parses, and brings the engine's figures up
    to date before /metrics shows them."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope[asgi.JUDGE] = _judge
            _brings_choice.set(False)
            if scope["path"] == metrics.PATH:
                await metrics.refresh(scope["app"])
        await self._app(scope, receive, send)


def _judge(scope: Any, body: Any) -> None:
    """Raises RefusedError, counted, for words that would be lost; puts `choice` for vLLM's older word."""
    ours = _serves_sets(scope["app"])
    try:
        SURFACE.check(asgi.path_of(scope), body, ours=ours)
        if ours and isinstance(body, dict):
            _take_choice(body)
    except RefusedError as error:
        metrics.REFUSED.labels(error.reason).inc()
        raise


def _take_choice(body: dict[str, Any]) -> None:
    if body.get(GUIDED) is not None and body.get(STRUCTURED) is not None:
        raise RefusedError("two constraints", f"{GUIDED} is an older word for {STRUCTURED}: give one of them")
    if body.get(STRUCTURED) is not None and not isinstance(body[STRUCTURED], dict):  # vLLM would answer 500
        raise RefusedError("wrong type", f"{STRUCTURED} must be an object, not {shown(body[STRUCTURED])}")
    choice: dict[str, Any] = {}
    rename_guided(body, choice)
    if choice:
        body[STRUCTURED] = choice
    xargs = body.get(XARGS)
    named = body.get(REFERENCE) is not None or (isinstance(xargs, dict) and xargs.get(REFERENCE) is not None)
    brings = chooses(body.get(STRUCTURED))
    _brings_choice.set(brings)
    if named or brings:
        refuse_tools(body)


def _serves_sets(app: Any) -> bool:
    """Whether this server uses our backend: the plugin may be installed and another one chosen."""
    client = getattr(app.state, "engine_client", None)
    return getattr(getattr(client, "input_processor", None), "static_front_end", None) is not None


def add_item_set(request: Any, params: SamplingParams) -> SamplingParams:
    """Carry the field `item_set` of an OpenAI request over to its sampling parameters.

    Raises VLLMValidationError (HTTP 400) where it is no string, or what stands beside it is of no use.
    """
    extra = request.model_extra or {}
    name = extra.get(REFERENCE)
    structured = getattr(request, "structured_outputs", None)
    brings = structured is not None and structured.choice is not None
    if _brings_choice.get() and not brings:
        message = (
            "the inline set would be lost: either this endpoint takes none, or vLLM makes a constraint of the tools in "
            "its place; leave the tools out, or send it to /v1/chat/completions"
        )
        raise metrics.refusal("two constraints", message, "structured_outputs")
    if name is not None or brings:
        _refuse_what_is_ignored(request, extra)
    if name is None:
        return params
    if not isinstance(name, str):
        raise metrics.refusal("wrong type", f"item_set must be the name of an item set, a string, not {shown(name)}")
    if (params.extra_args or {}).get(REFERENCE, name) != name:
        raise metrics.refusal("two constraints", "item_set and vllm_xargs name different item sets: give one")
    params.extra_args = {**(params.extra_args or {}), REFERENCE: name}
    return params


def _refuse_what_is_ignored(request: Any, extra: dict[str, Any]) -> None:
    """Words of a ranked list, where none would come or nearly written."""
    for key in extra:
        word = nearest(key, (*RANKING, BEAMS))
        if word not in (None, key):
            raise metrics.refusal("wrong type", f"there is no field {shown(key)}: did you mean {word}?", key)
    if extra.get(BEAMS):  # a field that the endpoint does not know
        message = "there are ranked lists on /v1/completions and /v1/chat/completions alone: send it there"
        raise metrics.refusal("beam search", message, BEAMS)
    if not getattr(request, BEAMS, False):
        for word in RANKING:
            if extra.get(word) is not None:
                message = f"{word} is for ranked lists: add use_beam_search and n, or leave it out"
                raise metrics.refusal("beam search", message, word)


def rank_item_set(request: Any, params: Any) -> Any:
    """Carry an item set, named or inline, from an OpenAI request with `use_beam_search` to vLLM's BeamSearchParams,
    which drop constraints: `ranking` finds it there.

    Raises VLLMValidationError (HTTP 400) as `add_item_set` does, and if log-probabilities, a stream or another
    constraint are asked for. The options of the list are checked with its set.
    """
    carried = add_item_set(request, SamplingParams(extra_args=dict(request.vllm_xargs or {})))
    extra = dict(carried.extra_args or {})
    structured = request.structured_outputs
    if extra.get(REFERENCE) is None and (structured is None or structured.choice is None):
        return params
    if request.logprobs is not None and request.logprobs is not False:  # 0 asks for the sampled tokens' own
        raise metrics.refusal(
            "beam search", "a ranked list has no logprobs of single tokens: leave logprobs out", "logprobs"
        )
    if request.stream:
        raise metrics.refusal("beam search", "a ranked list is not streamed: leave stream out", "stream")
    if request.response_format is not None and request.response_format.type != "text":
        raise metrics.refusal(
            "two constraints",
            "a ranked list and response_format exclude each other: leave response_format out",
            "response_format",
        )
    given = request.model_extra or {}
    params.extra_args = extra | {word: given[word] for word in RANKING if given.get(word) is not None}
    params.structured_outputs = structured
    return params
