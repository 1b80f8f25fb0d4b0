"""Masked logits on the device path.

A processor that asks to change one request's logits makes model runner V2 copy those of the whole batch to float32, so
ours does not ask. If a request asks for something else, vLLM makes its copy and calls `ItemSetProcessor.apply` on that.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from itemset.serving.hooks import IMPORTED
from vllm_static.compat import hook


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
