"""Item sets inside vLLM's other structured outputs: JSON schemas, structural tags and grammars with holes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from itemset.embedded.vocabulary import Vocabulary
from itemset.serving import request_fields
from itemset.serving.constraint import EBNF, JSON, LARK, SLATE, TAG, Constraint
from itemset.serving.embedded_grammars import SharedGrammar
from itemset.serving.request_fields import STRUCTURED
from vllm_static import compat

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def constraint_of(params: Any) -> tuple[str, Any] | None:
    """The kind and the text of a request's constraint, if item sets can stand in such; None if there is none."""
    slate, structured = (
        (getattr(params, "extra_args", None) or {}).get(request_fields.SLATE),
        getattr(params, STRUCTURED, None),
    )
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


def engine_constraint(constraint: Constraint) -> StructuredOutputsParams:
    """What the engine core gets: `StaticBackend.compile_grammar` reads it."""
    return compat.of_our_backend(StructuredOutputsParams(grammar=constraint.spec()))


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


class HoleGrammar(StructuredOutputGrammar):
    """One request's grammar with holes as vLLM's contract wants it (v1/structured_output/backend_types.py)."""

    def __init__(self, shared: SharedGrammar, stop_token_ids: set[int]) -> None:
        self._shared, self._composite = shared, shared.begin(stop_token_ids)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if not self._composite.accept(token):
                logger.error("Request %s: the token %s leaves its grammar.", request_id, token)
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return self._composite.allowed_prefix(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._composite.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        self._composite.fill_bitmask(bitmask[batch_index].numpy())

    def is_terminated(self) -> bool:
        """Never: see `backend.StaticGrammar`."""
        return False

    def reset(self) -> None:
        self._composite.reset()
