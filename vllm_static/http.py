"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_static import metrics
from vllm_static.config import REFERENCE

MISSPELLED = ("item_sets", "itemset", "item-set", "itemSet")  # vLLM would ignore them, and answer with anything


def add_item_set(request: Any, params: SamplingParams) -> SamplingParams:
    """Carry the field `item_set` of an OpenAI request over to its sampling parameters.

    Raises VLLMValidationError (HTTP 400) where it is no string.
    """
    extra = request.model_extra or {}
    for field in MISSPELLED:
        if field in extra:
            raise metrics.refusal("wrong type", f"there is no field {field}: name the item set in item_set", field)
    name = extra.get(REFERENCE)
    if name is None:
        return params
    if not isinstance(name, str):
        raise metrics.refusal("wrong type", f"item_set must be the name of an item set, a string, not {name!r:.60}")
    if (params.extra_args or {}).get(REFERENCE, name) != name:
        raise metrics.refusal("two constraints", "item_set and vllm_xargs name different item sets: give one")
    params.extra_args = {**(params.extra_args or {}), REFERENCE: name}
    return params


def refuse_beam_search(request: Any) -> None:
    """vLLM's beam search over HTTP ignores constraints: VLLMValidationError (HTTP 400) where one is an item set."""
    named = (request.model_extra or {}).get(REFERENCE) or (request.vllm_xargs or {}).get(REFERENCE)
    structured = request.structured_outputs
    if named is not None or (structured is not None and structured.choice is not None):
        raise metrics.refusal(
            "beam search",
            "use_beam_search would ignore the item set: leave use_beam_search out, and use n for several answers",
            "use_beam_search",
        )


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
        kind = dict(scope.get("headers", ())).get(b"content-type", b"")
        if scope["type"] != "http" or scope["path"] in SERVED or not kind.startswith(b"application/json"):
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        if _names_item_set(b"".join(message.get("body", b"") for message in messages)):
            await _refuse(send, f"{scope['path']} takes no item_set: send it to one of {', '.join(sorted(SERVED))}")
            return
        read = iter(messages)

        async def replay() -> Any:
            return next(read, None) or await receive()

        await self._app(scope, replay, send)


def _names_item_set(body: bytes) -> bool:
    if REFERENCE.encode() not in body:
        return False
    try:
        fields = json.loads(body)
    except ValueError:
        return False  # the endpoint itself says what is wrong with it
    return isinstance(fields, dict) and fields.get(REFERENCE) is not None


async def _refuse(send: Any, message: str) -> None:
    code = HTTPStatus.BAD_REQUEST
    error = {"message": message, "type": code.phrase, "param": REFERENCE, "code": code.value}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
