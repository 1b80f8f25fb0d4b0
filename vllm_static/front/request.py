"""Where vLLM keeps what a request asks of item sets: an ItemRequest at `extra_args["item_set"]`, once it is judged."""

import copy
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

from itemset.embedded.placement import JSON, SLATE, TAG
from itemset.serving.front import request_fields
from itemset.serving.front.lost_fields import holds_sets, undisguised
from itemset.serving.front.request import BENDING, UNSAID, ItemRequest, candidates, wants_candidates
from itemset.serving.front.request_fields import ATTRIBUTES, REFERENCE, STRUCTURED, attributes_asked
from itemset.serving.wire import WIRE, EngineRequest
from vllm_static import compat

_READ = {*request_fields.WORDS, *request_fields.OPTIONS, *request_fields.DRAWN, request_fields.LIST}


def asked(params: SamplingParams | BeamSearchParams) -> ItemRequest | None:
    """Return what a request's parameters ask of item sets, judged unless that was done; None if nothing.

    Of a constraint it is not known yet whether sets stand in it. Raises RefusedError as `ItemRequest.of` does.
    """
    extra, k = getattr(params, "extra_args", None) or {}, getattr(params, "beam_width", None)
    if isinstance(extra.get(WIRE), EngineRequest):  # ours, for the list of another request
        return None
    if isinstance(judged := extra.get(REFERENCE), ItemRequest):
        return judged
    extra = params.merged() if hasattr(params, "merged") else extra  # RankingParams has fields of its own
    judged = judge(extra, params.structured_outputs, k=k, draws=bool(k))
    given = constraint_of(params) if judged is None and k is None else None
    if given is not None:
        return ItemRequest(constraint=given, attributes=attributes_asked(extra))
    if judged is None and attributes_asked(extra):
        raise request_fields.wrong_type(request_fields.NO_ATTRIBUTES, ATTRIBUTES)
    return judged


def asked_of_generate(params: SamplingParams) -> ItemRequest | None:
    """Return the list, or the draws, that `generate` is to make in place of `n` samples; None if it is to sample.

    Raises RefusedError as `ItemRequest.of` does, and for parameters that would be ignored.
    """
    extra = params.extra_args or {}
    if not wants_candidates(extra):
        return None
    beside = {name: getattr(params, name, None) for name in ("n", *BENDING, *UNSAID)}
    fields, k = candidates(extra, beside)
    if k is None:
        fields |= {"seed": params.seed, "temperature": params.temperature}
    return judge(fields, params.structured_outputs, k=k, draws=True)


def judge(
    extra_args: Mapping[str, Any] | None, structured: Any, fields: Mapping[str, Any] | None = None, *, k: int | None,
    draws: bool = False,
) -> ItemRequest | None:  # fmt: skip
    """Judge a request. Raises RefusedError as `ItemRequest.of` does.

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


def put(params: Any, request: ItemRequest | None) -> Any:
    """Return the same parameters with the judged request, if any, in place of what it was read from."""
    if request is None:
        return params
    own, extra = copy.copy(params), getattr(params, "extra_args", None) or {}
    own.extra_args = {**{key: value for key, value in extra.items() if key not in _READ}, REFERENCE: request}
    if own.structured_outputs is not None and (request.choice is not None or not request.after):
        own.structured_outputs = StructuredOutputsParams(choice=[""])  # the texts stay here
    return own


def constraint_of(params: Any) -> tuple[str, Any] | None:
    """Return the kind and the text of a request's constraint, if item sets can stand in such; None if there is none."""
    structured = getattr(params, STRUCTURED, None)
    if structured is None:
        slate = (getattr(params, "extra_args", None) or {}).get(SLATE)
        return None if slate is None else (SLATE, slate)
    if structured.json is not None:
        return JSON, structured.json
    if structured.structural_tag is not None:
        return TAG, undisguised(structured.structural_tag)
    if isinstance(structured.grammar, str):
        return compat.kind_of_grammar(structured.grammar), structured.grammar
    return None


def asks_slate(given: Any) -> bool:
    """Return whether a request, or its parameters, ask for a slate, judged already or not."""
    each = [getattr(given, name, None) or {} for name in ("extra_args", "model_extra")]
    judged = each[0].get(REFERENCE)
    constraint = judged.constraint if isinstance(judged, ItemRequest) else None
    return any(one.get(SLATE) is not None for one in each) or (constraint is not None and constraint[0] == SLATE)


def names_sets(params: SamplingParams) -> bool:
    """Return whether a request names a set, or one stands in its constraint."""
    given = constraint_of(params)
    return (params.extra_args or {}).get(REFERENCE) is not None or (given is not None and holds_sets(*given))
