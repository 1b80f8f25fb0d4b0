"""The log-probabilities of chosen tokens on model runner V1, whose samplers mishandle them beside other requests.

`RejectionSampler.forward`, with speculation, takes their few columns for whole rows of logits, and the error ends the
engine. `Sampler.forward` gives such columns to the whole batch, also to requests that ask for their most likely tokens.
Both are told of no chosen tokens here; their columns are added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from itemset.serving.hooks import IMPORTED
from vllm_static.compat import hook
from vllm_static.kv_branches import to_device

LOGITS_MODES = ("raw_logits", "processed_logits")
"""Of `--logprobs-mode`: those in which vLLM gives logits where it is asked for log-probabilities."""


@hook("vllm.v1.sample.sampler:Sampler.forward", when=IMPORTED)
def sample(forward: Callable[..., Any], self: Any, logits: Tensor, sampling_metadata: Any) -> Any:
    """V1: scores of chosen tokens, for ranked lists, take other requests' most likely tokens away."""
    chosen = sampling_metadata.logprob_token_ids
    if not chosen:
        return forward()
    scores = _scores(self, logits, list(chosen), list(chosen.values()))  # `forward` changes the logits in place
    output = forward(sampling_metadata=_without(sampling_metadata))
    return _with(output, list(chosen), *scores)


@hook("vllm.v1.sample.rejection_sampler:RejectionSampler.forward", when=IMPORTED)
def verify(forward: Callable[..., Any], self: Any, metadata: Any, logits: Tensor, sampling_metadata: Any) -> Any:
    """V1: with speculation, chosen tokens end the engine."""
    chosen = sampling_metadata.logprob_token_ids
    if not chosen:
        return forward()
    counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
    first = [0, *accumulate(counts)]
    rows = [(request, i) for request in chosen for i in range(counts[request])]
    tokens = [chosen[request] for request, _ in rows]
    scores = _scores(self.sampler, logits, [first[request] + i for request, i in rows], tokens)
    output = forward(sampling_metadata=_without(sampling_metadata))
    width = output.sampled_token_ids.shape[1]
    return _with(output, [request * width + i for request, i in rows], *scores)


def _without(sampling_metadata: Any) -> Any:
    """The same without chosen tokens, but with a column for the sampled token."""
    width = sampling_metadata.max_num_logprobs or 0
    return dataclasses.replace(sampling_metadata, logprob_token_ids=None, max_num_logprobs=width)


def _scores(sampler: Any, logits: Tensor, rows: list[int], tokens: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Of these rows' tokens: [rows, most tokens] ids, int32, and scores, float32. Shorter rows end with 0 and -inf."""
    table = np.full((len(rows), max(map(len, tokens))), -1, np.int64)
    for row, chosen in zip(table, tokens, strict=True):
        row[: len(chosen)] = chosen
    ids = to_device(table, logits.device)
    scored = logits[to_device(rows, logits.device)].float()
    if sampler.logprobs_mode not in LOGITS_MODES:
        scored = scored.log_softmax(-1)
    scores = scored.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    return ids.clamp(min=0).int(), scores


def _with(output: Any, rows: list[int], ids: Tensor, scores: Tensor) -> Any:
    """The sampler's output with these columns in its rows, after that of the sampled token."""
    tensors = output.logprobs_tensors
    width = ids.shape[1]
    more = (0, max(0, 1 + width - tensors.logprobs.shape[1]))
    all_ids, all_scores = pad(tensors.logprob_token_ids, more), pad(tensors.logprobs, more, value=-torch.inf)
    index = to_device(rows, ids.device)
    all_ids[index, 1 : 1 + width] = ids
    all_scores[index, 1 : 1 + width] = scores
    output.logprobs_tensors = tensors._replace(logprob_token_ids=all_ids, logprobs=all_scores)
    return output
