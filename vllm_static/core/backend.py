"""The structured-output backend of the engine core: item sets on the host path, everything else by xgrammar."""

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import backend_types
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from itemset import ItemSetError
from itemset.embedded.composite_grammar import Composite
from itemset.embedded.holes import Once
from itemset.embedded.placement import JSON, REGEX, TAG
from itemset.masking.host import HostState, fill_bitmasks
from itemset.serving.catalogue import Catalogue
from itemset.serving.config import StaticConfig
from itemset.serving.constraint import ENVELOPE
from itemset.serving.engine.grammars import Grammars
from itemset.serving.engine.long_alternations import LongAlternations
from itemset.serving.engine.version_rollout import Preparer
from itemset.serving.warm_up import compile_all
from itemset.serving.wire import WIRE, SetRef, read
from vllm_static import compat
from vllm_static.compat import logger
from vllm_static.core.device_path import RESIDENT, DevicePath

_KINDS = {Options.JSON: JSON, Options.REGEX: REGEX, Options.STRUCTURAL_TAG: TAG}


class StaticGrammar(backend_types.StructuredOutputGrammar):
    """One request's item set, or grammar with sets in it, as vLLM wants it (v1/structured_output/backend_types.py)."""

    def __init__(self, begin: Callable[[], HostState | Composite]) -> None:
        """begin: makes a request's place in its set, or in a grammar with sets in it, and holds what that needs."""
        self._begin, self.host = begin, begin()
        self.of_set = isinstance(self.host, HostState)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        host: Any = self.host
        if not (taken := host.accept(tokens) if self.of_set else all(map(host.accept, tokens))):
            what = "item set" if self.of_set else "grammar"
            logger.error("Request %s: the tokens %s leave the %s.", request_id, tokens, what)
        return bool(taken)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return self.host.allowed_prefix(tokens)

    def rollback(self, num_tokens: int) -> None:
        self.host.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Fill one row; `StaticBackend.fill` fills those of a step."""
        self.host.fill_bitmask(bitmask.numpy()[batch_index])

    def is_terminated(self) -> bool:
        """Never: vLLM lifts the mask of a terminated grammar, and a request may go on after its end (`ignore_eos`)."""
        return False

    def reset(self) -> None:
        self.host.reset()


class StaticBackend(backend_types.StructuredOutputBackend):
    """Compiles item sets itself and hands JSON, regex, grammar and structural tags to xgrammar unchanged."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any, vocab_size: int) -> None:
        """Open the registered sets, once an engine core. Raises ItemSetError as `itemset.load` does."""
        super().__init__(vllm_config, tokenizer, vocab_size)
        config = StaticConfig.of(vllm_config.additional_config)
        self._catalogue = Catalogue(config)
        self._by_path = {"device": 0, "host": 0}
        self._connects = vllm_config.kv_transfer_config is not None
        self.forces_drafts = config.forced_drafts and compat.core_has_drafts(vllm_config)
        self._device = DevicePath(self._catalogue) if compat.on_device_path(vllm_config) else None
        self.preparer = Preparer(self._catalogue, logger, self._device)
        self.thinking: dict[str, Any] = {}  # by request: a `thoughts.Thinking`
        vocabulary = Once(partial(compat.vocabulary_of, vllm_config, tokenizer)).get
        self.grammars = Grammars(vocabulary)
        options = compat.json_options(vllm_config)
        least = config.inline_enum_size
        self._alternations = LongAlternations(vocabulary, tokenizer, least, options, logger, checked=True)
        self._xgrammar = Once(partial(XgrammarBackend, vllm_config, tokenizer, vocab_size))
        self._bitmask: NDArray[np.int32] = self.allocate_token_bitmask(0).numpy()
        self._least_rows = 0  # of a request without drafts, by vLLM's own count; 0 before the first step
        compile_all()

    def admit(self, manager: Any, request: Request) -> bool:
        """Take over the set that came with the request. Return whether the device path takes the request."""
        params = request.sampling_params
        carried = read(params.extra_args) if params is not None else None
        if carried is None:
            return False
        if carried.grammar:
            self._take_holes(request, carried.sets)
            return False
        assert carried.item_set is not None
        constraint: Any = request.structured_output_request
        made = self._catalogue.receive(carried.item_set)
        carried = carried.but(item_set=made.ref)  # requests that run with the same set share its bytes
        on_device = self._device is not None and self._device.claim(manager, request, made.item_set, carried)
        if self._connects and carried.ranked is not None and carried.ranked.placeholders:
            request.skip_reading_prefix_cache = True  # a connector would load KV, and no hidden states for the head
        if carried.after is not None:
            ranked = on_device and carried.ranked is not None
            from vllm_static.core.thoughts import begin

            self.thinking[request.request_id], is_free = begin(request, constraint, *carried.after, ranked=ranked)
            return is_free
        if not on_device:
            vars(request)["item_set_made"] = made  # a part of a closed version lives as long as somebody holds it
            # The index travels on to the workers only there, whose arenas may have forgotten it
            params.extra_args = {**params.extra_args, WIRE: carried.but(item_set=SetRef(made.reference))}
        self._by_path["device" if on_device else "host"] += carried.ranked is None  # a list has no masks
        return on_device

    def _take_holes(self, request: Any, sets: list[SetRef]) -> None:
        """Take over the sets of a constraint, which the request holds. No worker needs them."""
        request.item_set_holes = list(map(self._catalogue.receive, sets))
        request.sampling_params = params = copy.copy(request.sampling_params)
        params.extra_args = {key: value for key, value in params.extra_args.items() if key != WIRE}
        self._by_path["host"] += 1

    def forget(self, request: Request) -> None:
        self.thinking.pop(request.request_id, None)
        if (resident := vars(request).pop(RESIDENT, None)) is not None and self._device is not None:
            self._device.plan.release(resident.number)  # its set may go when another needs the room

    def figures(self) -> dict[str, Any]:
        """Return what is counted, for the metrics: plain values, which travel to the front end."""
        plan = None if self._device is None else self._device.plan
        return {"by_path": dict(self._by_path), "arena": [0, 0] if plan is None else [plan.nbytes, plan.used]}

    def compile_grammar(self, request_type: Options, grammar_spec: str, stop_token_ids: set[int] | None = None) -> Any:
        stops = stop_token_ids or {self.tokenizer.eos_token_id}
        if grammar_spec.startswith(ENVELOPE):
            shared = self.grammars.get(grammar_spec, self._catalogue.__getitem__)
            return StaticGrammar(lambda: Composite(*shared.get(), stops))
        is_grammar = request_type == Options.GRAMMAR
        kind = compat.kind_of_grammar(grammar_spec) if is_grammar else _KINDS.get(request_type, "")
        if (listed := self._alternations.get(kind, grammar_spec)) is not None:
            return StaticGrammar(lambda: Composite(*listed, stops))
        if request_type != Options.CHOICE:
            return self._xgrammar.get().compile_grammar(request_type, grammar_spec, stop_token_ids=stop_token_ids)
        references = json.loads(grammar_spec)
        if len(references) != 1:
            raise ItemSetError("this request did not pass vLLM's input processor, which prepares its item set")
        return StaticGrammar(partial(HostState, self._catalogue[references[0]], stops))

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def fill(
        self, grammar_bitmask: Callable[..., NDArray[np.int32]], manager: Any, requests: dict[str, Request],
        request_ids: list[str], drafts: dict[str, list[int]],
    ) -> NDArray[np.int32]:  # fmt: skip
        """Return a step's bitmask, [rows, words] int32: item sets' rows filled in one call, all others by vLLM itself.

        A request has a row for each of its drafts and one more; since vLLM 0.33 as many rows as if it had the most
        drafts. As vLLM fills them (v1/structured_output/__init__.py, grammar_bitmask). Valid until the next step.
        """
        hosts, states, rows, free = list[HostState](), list[int](), list[int](), list[int]()
        others, other_rows = list[str](), list[int]()
        if not self._least_rows:
            alone = grammar_bitmask(structured_output_request_ids=request_ids[:1], scheduled_spec_decode_tokens={})
            self._least_rows = len(alone)
        may_reason, row = compat.may_reason(manager), 0
        for request_id in request_ids:
            structured: Any = requests[request_id].structured_output_request
            grammar, tokens = structured.grammar, drafts.get(request_id, [])
            count = 1 + len(tokens)
            after = row + max(count, self._least_rows)
            if not getattr(grammar, "of_set", False) or (may_reason and not structured.reasoning_ended):
                others.append(request_id)
                other_rows += range(row, after)
            else:
                hosts += [grammar.host] * count
                states += grammar.host.draft_states(tokens) if tokens else [grammar.host.state]
                rows += range(row, row + count)
                free += range(row + count, after)
            row = after
        if not rows:
            return grammar_bitmask()
        if len(self._bitmask) < row:
            self._bitmask = self.allocate_token_bitmask(2 * row).numpy()
        bitmask = self._bitmask[:row]
        if others:
            bitmask[other_rows] = grammar_bitmask(structured_output_request_ids=others)
        bitmask[free] = -1
        fill_bitmasks(hosts, states, rows, bitmask)
        return bitmask

    def destroy(self) -> None:
        """Nothing is left to do: xgrammar's compiler goes with this object."""
