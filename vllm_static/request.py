"""Where vLLM keeps what a request asks of item sets: an ItemRequest at `extra_args["item_set"]`, once it is judged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

from itemset.serving.request import ItemRequest
from itemset.serving.request_fields import DRAWN, OPTIONS, REFERENCE, SELECTION, STRUCTURED, WEIGHT
from itemset.serving.wire import WIRE, EngineRequest

_READ = {*SELECTION, *OPTIONS, *DRAWN, WEIGHT}


def asked(params: SamplingParams | BeamSearchParams) -> ItemRequest | None:
    """What a request's parameters ask of item sets, judged unless that was done; None if nothing.

    Raises RefusedError as `ItemRequest.of` does.
    """
    extra, k = getattr(params, "extra_args", None) or {}, getattr(params, "beam_width", None)
    if isinstance(extra.get(WIRE), EngineRequest):  # ours, for the list of another request
        return None
    judged = extra.get(REFERENCE)
    return judged if isinstance(judged, ItemRequest) else judge(extra, params.structured_outputs, k=k, draws=bool(k))


def judge(
    extra_args: Mapping[str, Any] | None,
    structured: Any,
    fields: Mapping[str, Any] | None = None,
    *,
    k: int | None,
    draws: bool = False,
) -> ItemRequest | None:
    """Judge a request.

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


def put(params: Any, wanted: ItemRequest) -> Any:
    """The same parameters with the judged request in place of what it was read from."""
    own, extra = copy.copy(params), getattr(params, "extra_args", None) or {}
    own.extra_args = {**{key: value for key, value in extra.items() if key not in _READ}, REFERENCE: wanted}
    if own.structured_outputs is not None:
        own.structured_outputs = StructuredOutputsParams(choice=[""])  # the texts stay here
    return own


def names_sets(params: SamplingParams) -> bool:
    """Whether a request names a set, or one stands in its constraint."""
    from itemset.serving.body_constraints import holds_sets
    from vllm_static.embedded_grammars import constraint_of

    given = constraint_of(params)
    return (params.extra_args or {}).get(REFERENCE) is not None or (given is not None and holds_sets(*given))
