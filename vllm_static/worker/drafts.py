"""Drafts that stay in their sets, in the worker: draft models are masked, and forced tokens are proposed as they are.

On the device path both look at the same cells as verification does, and walk a request's drafts so far from there: a
draft has no state of its own that could go wrong. What runs here may be recorded in vLLM's CUDA graphs, so it reads
fixed buffers only. On the host path the engine core decides.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from itemset.masking.slots import as_table
from itemset.serving.hooks import IMPORTED
from vllm_static import compat
from vllm_static.compat import hook, logger

SPECULATION = "Checked in workers that speculate on the device path"  # whose modules are too heavy to import elsewhere

NGRAM = ("ngram", "ngram_gpu")
UNMASKED = {
    "dflash": "it draws all drafts of a step at once",
    "dspark": "it has a sampler of its own",
    "extract_hidden_states": "it proposes nothing",
}
LACKED = -100.0
"""The logit of a token that a draft vocabulary lacks. It must still be drawn where nothing else is legal: so it is
finite, and small enough that, divided by a temperature of 0.01, it keeps apart what sampling adds to it."""

_processors: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id of their speculative config


def install(processor: Any, speculative: Any, *, forced: bool) -> None:
    """Let this processor mask the drafts that are proposed under this speculative configuration. Raises RuntimeError if
    vLLM lacks a hook. forced: let forced tokens take the place of what an n-gram drafter proposes."""
    compat.install(SPECULATION)
    if forced or speculative.method not in NGRAM:
        _processors[id(speculative)] = processor
    reduced = "use_local_argmax_reduction makes no draft logits" if speculative.use_local_argmax_reduction else None
    if unmasked := reduced or UNMASKED.get(speculative.method):
        logger.warning(
            "Drafts of %s are not masked by item sets (%s): verification alone masks them, and fewer are accepted.",
            speculative.method,
            unmasked,
        )


@hook("vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft", when=SPECULATION)
def _sample_draft(original: Callable[..., Tensor], self: Any, idx_mapping: Tensor, draft_step: Tensor) -> Tensor:
    """A draft model's logits are masked, whichever of vLLM's speculators computes them. All drafts at once are not:
    what each of them follows is not known yet."""
    processor, compute = _processors.get(id(self.speculative_config)), self.compute_draft_logits
    if processor is None or draft_step.numel() != 1:
        return original()

    def masked(*args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = compute(*args, **kwargs)
        if getattr(self.model, "draft_id_to_target_id", None) is not None:
            logits.clamp_(min=LACKED)
        processor.mask_drafts(logits, idx_mapping, draft_step, self.draft_tokens)
        return logits

    self.compute_draft_logits = masked
    try:
        return original()
    finally:
        del self.compute_draft_logits


@hook("vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator.propose", when=SPECULATION)
def _propose(original: Callable[..., Tensor], self: Any, input_batch: Any, dummy_run: bool) -> Tensor:
    """Forced tokens as drafts."""
    drafts = original()
    processor = _processors.get(id(self.speculative_config))
    if processor is not None and not dummy_run:
        processor.force_drafts(drafts, input_batch.idx_mapping, input_batch.idx_mapping_np)
    return drafts


@hook("vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state", when=IMPORTED)
def _take_drafts(original: Callable[..., Any], self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
    """On the host path, what the engine core has made of the drafts takes the place of those on the device."""
    drafts = {} if dummy_run else scheduler_output.scheduled_spec_decode_tokens
    known = {request: tokens for request, tokens in drafts.items() if tokens and tokens[0] >= 0}
    if known and compat.core_has_drafts(self.vllm_config):
        states = self.req_states
        slots = torch.tensor([states.req_id_to_index[request] for request in known])
        table = as_table(list(known.values()), states.draft_tokens.shape[1])
        states.draft_tokens[slots.to(self.device)] = table.to(states.draft_tokens)
    return original()
