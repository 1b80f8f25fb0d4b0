"""Masked logits on the device path, and what answers say of their tokens: log p, the model's, and log q, that among the
legal tokens. Their difference is the logarithm of the legal mass, the model's probability of all legal tokens.

A processor that asks to change one request's logits makes model runner V2 copy those of the whole batch to float32, so
ours does not ask. If a request asks for something else, vLLM makes its copy and calls `ItemSetProcessor.apply` on that.

They leave the engine in the places of the log-probabilities of each sampled token and of the most likely one, and take
part in all that vLLM does with these: asynchronous copies, accepted and rejected drafts, tokens cut after an end. The
front end asks for no columns but these two, and reads them there (`answers`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from itemset.masking.log_probs import log_probs_of
from itemset.serving.hooks import IMPORTED
from itemset.serving.request_fields import LOGPROBS
from itemset.serving.wire import read
from vllm_static.compat import hook
from vllm_static.kv_branches import to_device

_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WEIGHED = "static_weighed"
"""Attribute of model runner V1 within a step: the rows that ask, their temperatures, and the mass of all tokens."""


@hook(f"{_V1}.sample_tokens", why="V1: an answer's weight needs its logits as they were before the mask", when=IMPORTED)
def sample_tokens(original: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
    """Around `sample_tokens` (v1/worker/gpu_model_runner.py), which applies the mask and then samples."""
    state = self.execute_model_state
    if grammar_output is not None and state is not None and state.logits is not None:
        drafts = state.scheduler_output.scheduled_spec_decode_tokens
        counts = [1 + len(drafts.get(request, ())) for request in self.input_batch.req_ids]
        first = [0, *accumulate(counts)]
        constrained = set(grammar_output.structured_output_request_ids)
        rows = [
            (i, place, first[i] + place)
            for i, request in enumerate(self.input_batch.req_ids)
            if request in constrained and temperature(self.requests[request].sampling_params)
            for place in range(counts[i])
        ]
        if rows:
            names = self.input_batch.req_ids
            each = [temperature(self.requests[names[i]].sampling_params) for i, *_ in rows]
            temperatures = to_device(each, state.logits.device, np.float32)[:, None]
            setattr(self, _WEIGHED, (rows, temperatures, _scaled(state.logits, rows, temperatures).logsumexp(-1)))
    return original()


@hook(f"{_V1}._sample", why="V1: an answer's weight", when=IMPORTED)
def sample(original: Callable[..., Any], self: Any, logits: Any) -> Any:
    """Around `_sample`, whose logits are masked, and then changed in place."""
    weighed = vars(self).pop(_WEIGHED, None)
    if weighed is None:
        return original()
    rows, temperatures, whole = weighed
    legal = _scaled(logits, rows, temperatures)
    output = original()
    width, tensors = output.sampled_token_ids.shape[1], output.logprobs_tensors  # a column a draft, and one more
    places = to_device([request * width + place for request, place, _ in rows], legal.device)
    tensors.logprobs[places, :2] = log_probs_of(legal, whole, tensors.logprob_token_ids[places, 0])
    return output


@hook(
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
    when=IMPORTED,
)
def sample_on_device(original: Callable[..., Any], self: Any, logits: Tensor, input_batch: Any) -> Any:
    """V2: an answer's weight. Both samplers leave the logits as they are."""
    output = original()
    for processor in getattr(self, "sampler", self).logits_processors:
        if hasattr(processor, "weigh"):
            processor.weigh(logits, input_batch, output.logprobs_tensors)
    return output


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


def _scaled(logits: Tensor, rows: list[tuple[int, int, int]], temperatures: Tensor) -> Tensor:
    """The logits of these rows, by their temperatures: [rows, vocabulary] float32."""
    return logits[to_device([row for *_, row in rows], logits.device)].float() / temperatures
