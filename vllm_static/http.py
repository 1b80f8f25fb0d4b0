"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.sampling_params import SamplingParams

from itemset import asgi
from itemset.config import REFERENCE
from itemset.lists import RANKING
from vllm_static import metrics

BEAMS = "use_beam_search"


def add_item_set(request: Any, params: SamplingParams) -> SamplingParams:
    """Carry the field `item_set` of an OpenAI request over to its sampling parameters.

    Raises VLLMValidationError (HTTP 400) where it is no string, or what stands beside it is of no use.
    """
    extra = request.model_extra or {}
    for field in asgi.MISSPELLED:
        if field in extra:
            raise metrics.refusal("wrong type", f"there is no field {field}: name the item set in item_set", field)
    name = extra.get(REFERENCE)
    structured = getattr(request, "structured_outputs", None)
    if name is not None or (structured is not None and structured.choice is not None):
        _refuse_what_is_ignored(request, extra)
    if name is None:
        return params
    if not isinstance(name, str):
        raise metrics.refusal("wrong type", f"item_set must be the name of an item set, a string, not {name!r:.60}")
    if (params.extra_args or {}).get(REFERENCE, name) != name:
        raise metrics.refusal("two constraints", "item_set and vllm_xargs name different item sets: give one")
    params.extra_args = {**(params.extra_args or {}), REFERENCE: name}
    return params


def _refuse_what_is_ignored(request: Any, extra: dict[str, Any]) -> None:
    """Words of a ranked list, where none would come."""
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


def add_ranks(choices: list[Any], outputs: list[Any]) -> None:
    """Put each item's rank, score and key, and what its list took, into its choice of an OpenAI response: `item`."""
    for choice, output in zip(choices, outputs, strict=False):
        if hasattr(output, "ranked"):
            choice.item = output.ranked


SERVED = {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses"}


class RefuseItemSetElsewhere:
    """ASGI middleware (vLLM's --middleware): HTTP 400 for the field `item_set` at an endpoint that would ignore it.

    It also brings the engine's figures up to date before /metrics shows them.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == metrics.PATH:
            await metrics.refresh(scope["app"])
        if scope.get("path") in SERVED or not asgi.has_json(scope):
            await self._app(scope, receive, send)
            return
        body = await asgi.read(receive)
        if asgi.fields(body, [REFERENCE]).get(REFERENCE) is not None:
            served = ", ".join(sorted(SERVED))
            await asgi.refuse(send, f"{scope['path']} takes no item_set: send it to one of {served}")
            return
        await self._app(scope, asgi.replay(body, receive), send)
