"""The hooks into vLLM's workers that every engine on the device path has: its masks, and what follows new weights."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from itemset.serving.config import StaticConfig
from itemset.serving.hooks import IMPORTED
from vllm_static import compat
from vllm_static.compat import hook, logger


@hook("vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params", when=IMPORTED)
def apply_sampling_params(
    original: Callable[..., Tensor], self: Any, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any,
    pos: Tensor, input_ids: Tensor, expanded_local_pos: Tensor,
) -> Tensor:  # fmt: skip
    """Masks logits as the model gave them: for a processor, vLLM copies the whole batch's to float32."""
    if not self.needs_logits_processing[idx_mapping_np].any():
        raw = self.logprobs_mode.startswith("raw") and self.get_logprobs_dims(idx_mapping_np) is not None
        layout = {"above": expanded_local_pos, "tokens": input_ids, "positions": pos}
        for processor in self.logits_processors:
            if hasattr(processor, "mask_rows"):
                logits = processor.mask_rows(logits, expanded_idx_mapping, idx_mapping_np, raw=raw, **layout)
    return original(logits=logits)


@hook("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state", when=IMPORTED)
def follow(original: Callable[..., Any], self: Any) -> None:
    """The model has new weights, reloaded or transferred: what is made of them is made again. The draft head is read
    again, into the memory where it lies: a trainer saves it before it updates the model."""
    original()
    try:
        path = StaticConfig.of(self.vllm_config.additional_config).item_set_draft_head
        if (processor := compat.item_sets(self)) is not None:
            processor.narrow.refresh()
            if path is not None and processor.head is not None:
                from itemset.draft_head.head import DraftHead

                processor.head.load_state_dict(DraftHead.load(path, processor.arena.device).state_dict())
    except Exception:  # a worker that raises ends the engine
        logger.exception(
            "What item sets take of the weights stays as it was: check the draft head's file, update again"
        )
