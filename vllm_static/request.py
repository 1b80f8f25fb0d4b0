"""Where vLLM keeps what a request says of item sets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

from itemset.serving.request import ItemRequest
from itemset.serving.words import REFERENCE, SELECTION, STRUCTURED
from vllm_static.one_request import ListParams


def asked(params: SamplingParams | BeamSearchParams) -> ItemRequest | None:
    """What a request's parameters say of item sets; None if nothing. Raises RefusedError as `ItemRequest.of` does."""
    if isinstance(params, ListParams):  # it was judged when it was made
        return None
    extra, k = getattr(params, "extra_args", None), getattr(params, "beam_width", None)
    return asked_by(extra, params.structured_outputs, k=k, draws=k is not None)


def asked_by(
    extra_args: Mapping[str, Any] | None,
    structured: Any,
    fields: Mapping[str, Any] | None = None,
    *,
    k: int | None,
    draws: bool = False,
) -> ItemRequest | None:
    """The same of a request whose parameters are still to be made.

    structured: vLLM's StructuredOutputsParams. fields: those of a body that vLLM does not know. k: its beams, if any.
    draws: whether it takes the way of a beam search, by which draws are made too.
    """
    extra, fields = extra_args or {}, fields or {}
    choice = structured.choice if structured is not None else None
    return ItemRequest.of(
        [fields.get(REFERENCE), extra.get(REFERENCE)],
        [choice],
        {**extra, **fields},
        k=k,
        draws=draws,
        where="extra_args",
        constraints=(REFERENCE, STRUCTURED),
        other=structured is not None and choice is None,
    )


def names_sets(params: SamplingParams) -> bool:
    """Whether a request names a set, or one stands in its constraint."""
    from itemset.serving.body_constraints import holds_sets
    from vllm_static.inside import constraint_of

    given = constraint_of(params)
    return (params.extra_args or {}).get(REFERENCE) is not None or (given is not None and holds_sets(*given))


def with_set(params: SamplingParams, wanted: ItemRequest) -> SamplingParams:
    """The same parameters, in which a request's set, made, stands in place of what it was made of."""
    own, extra = copy.copy(params), dict(params.extra_args or {})
    own.structured_outputs = structured = copy.copy(params.structured_outputs) or StructuredOutputsParams(choice=[""])
    structured.choice = wanted.choice
    own.extra_args = {key: value for key, value in extra.items() if key not in (REFERENCE, *SELECTION)}
    return own
