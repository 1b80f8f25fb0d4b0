"""The HTTP surface: the request field `item_set`, and refusals where vLLM would drop a constraint in silence."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_static.front import REFERENCE


def add_item_set(request: Any, params: SamplingParams) -> SamplingParams:
    """Carry the field `item_set` of an OpenAI request over to its sampling parameters.

    Raises VLLMValidationError (HTTP 400) where it is no string.
    """
    name = (request.model_extra or {}).get(REFERENCE)
    if name is None:
        return params
    if not isinstance(name, str):
        raise VLLMValidationError(
            f"item_set must be the name of an item set, a string, not {name!r:.60}", parameter=REFERENCE
        )
    params.extra_args = {**(params.extra_args or {}), REFERENCE: name}
    return params


def refuse_beam_search(request: Any) -> None:
    """vLLM's beam search over HTTP ignores constraints: VLLMValidationError (HTTP 400) where one is an item set."""
    named = (request.model_extra or {}).get(REFERENCE) or (request.vllm_xargs or {}).get(REFERENCE)
    structured = request.structured_outputs
    if named is not None or (structured is not None and structured.choice is not None):
        raise VLLMValidationError(
            "use_beam_search would ignore the item set: leave use_beam_search out, and use n for several answers",
            parameter="use_beam_search",
        )
