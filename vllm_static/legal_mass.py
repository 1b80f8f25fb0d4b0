"""Masked logits on the device path, and what answers say of their tokens: log p, the model's, and log q, that among the
legal tokens. Their difference is the logarithm of the legal mass, the model's probability of all legal tokens.

A processor that asks to change one request's logits makes model runner V2 copy those of the whole batch to float32, so
ours does not ask. If a request asks for something else, vLLM makes its copy and calls `ItemSetProcessor.apply` on that.

They leave the engine in the places of the log-probabilities of each sampled token and of the most likely one, and take
part in all that vLLM does with these: asynchronous copies, accepted and rejected drafts, tokens cut after an end. The
front end asks for no columns but these two, and reads them there (`answers`).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from itemset.serving.hooks import IMPORTED
from itemset.serving.request_fields import LOGPROBS
from itemset.serving.wire import read
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


def temperature(sampling_params: Any) -> float:
    """The temperature at which a request in the engine wants log p and log q; 0 if it wants none.

    Its own, and 1 for weights and for greedy answers.
    """
    carried = read(getattr(sampling_params, "extra_args", None))
    if carried is None or not carried.weighed:
        return 0.0
    return float(carried.weighed == LOGPROBS and sampling_params.temperature) or 1.0
