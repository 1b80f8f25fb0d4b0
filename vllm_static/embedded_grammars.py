"""Item sets inside vLLM's other structured outputs: JSON schemas, structural tags and grammars with holes."""

from __future__ import annotations

import copy
from typing import Any

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from itemset.embedded.vocabulary import Vocabulary
from itemset.serving import request_fields
from itemset.serving.constraint import EBNF, JSON, LARK, SLATE, TAG, Constraint
from itemset.serving.request_fields import STRUCTURED


def constraint_of(params: Any) -> tuple[str, Any] | None:
    """The kind and the text of a request's constraint, if item sets can stand in such; None if there is none."""
    slate = (getattr(params, "extra_args", None) or {}).get(request_fields.SLATE)
    structured = getattr(params, STRUCTURED, None)
    if slate is not None and structured is None:
        return SLATE, slate
    if structured is None or isinstance(structured.grammar, Constraint):
        return None
    if structured.json is not None:
        return JSON, structured.json
    if structured.structural_tag is not None:
        return TAG, structured.structural_tag
    if isinstance(structured.grammar, str):
        from vllm.v1.structured_output.utils import grammar_is_likely_lark

        return LARK if grammar_is_likely_lark(structured.grammar) else EBNF, structured.grammar
    return None


def asks_slate(asked: Any) -> bool:
    """Whether a request, or its parameters, ask for a slate, made already or not."""
    made = getattr(getattr(asked, STRUCTURED, None), "grammar", None)
    given = (getattr(asked, "extra_args", None), getattr(asked, "model_extra", None))
    return (
        any((one or {}).get(request_fields.SLATE) is not None for one in given) or getattr(made, "kind", None) == SLATE
    )


def with_constraint(params: SamplingParams, constraint: Constraint) -> SamplingParams:
    """The same parameters, with the constraint in place of what it was made of."""
    own = copy.copy(params)
    own.structured_outputs = structured = copy.copy(params.structured_outputs) or StructuredOutputsParams(grammar="s")
    structured.json = structured.structural_tag = None
    structured.grammar = constraint
    if constraint.kind == SLATE:
        own.extra_args = {key: value for key, value in params.extra_args.items() if key != request_fields.SLATE}
    return own


def vocabulary_of(vllm_config: Any, tokenizer: Any) -> Vocabulary:
    """The model's vocabulary as vLLM's own backend has xgrammar see it."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    backend = XgrammarBackend(vllm_config, tokenizer, vllm_config.model_config.get_vocab_size())
    return Vocabulary(backend.compiler.compile_grammar('root ::= ""').tokenizer_info)  # which the compiler hides


def json_options(vllm_config: Any) -> dict[str, Any]:
    """How vLLM has xgrammar read schemas (v1/structured_output/backend_xgrammar.py, compile_grammar)."""
    tight = vllm_config.structured_outputs_config.disable_any_whitespace
    return {"any_whitespace": not tight, "separators": (",", ":") if tight else None}


def validate(kind: str, spec: str) -> None:
    """Raises VLLMValidationError for what vLLM refuses with xgrammar."""
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    name = {JSON: "json", TAG: "structural_tag"}.get(kind, "grammar")
    validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(**{name: spec})))
