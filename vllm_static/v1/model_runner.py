"""All that model runner V1 needs. It stays as long as a supported vLLM may choose V1: vLLM deprecates it in 0.33.

V1 has no device path. Ranked lists take rounds of requests there, which score chosen tokens, and V1's samplers
mishandle these beside other requests: `RejectionSampler`, with speculation, takes their few columns for whole rows of
logits, and the error ends the engine; `Sampler` gives such columns to the whole batch, also to requests that ask for
their most likely tokens. Both are told of no chosen tokens here; their columns are added.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from itemset.masking.slots import as_table, log_probs_of
from itemset.ranking.scored_tree import Answer, Pass
from itemset.serving.hooks import IMPORTED
from itemset.serving.wire import read
from vllm_static import compat
from vllm_static.compat import hook

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WEIGHED = "static_weighed"  # attribute of the runner in a step: rows that ask, their temperatures, all tokens' mass


@hook("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", when=IMPORTED, why="drafts on CPUs lose temperatures")
def expand(
    original: Callable[..., Tensor], x: Tensor, cu_num_tokens: Tensor, replace_from: Any, replace_to: Any
) -> Tensor:
    """V1 on a CPU: vLLM's kernel writes into a copy (utils/cpu_triton_utils.py, _expand_kernel_impl)."""
    if x.device.type != "cpu":
        return original()
    drafts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.where(x != replace_from, replace_to).repeat_interleave(drafts)


@hook(f"{_RUNNER}.sample_tokens", when=IMPORTED, always=True)
def sample_tokens(original: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
    """V1: an answer's weight needs its logits as they were before the mask."""
    state = self.execute_model_state
    has_logits = getattr(state, "logits", None) is not None
    if grammar_output is not None and has_logits and compat.is_ours(self.vllm_config):
        constrained = set(grammar_output.structured_output_request_ids)
        each = dict[int, float]()
        for i, request in enumerate(self.input_batch.req_ids):
            params = self.requests[request].sampling_params
            if request in constrained and (carried := read(params.extra_args)) is not None and carried.weighed:
                each[i] = carried.weighs_at(params.temperature)
        if each:
            rows = _rows([*each], state.spec_decode_metadata)
            temperatures = compat.to_device([each[i] for i, *_ in rows], state.logits.device, np.float32)[:, None]
            setattr(self, _WEIGHED, (rows, temperatures, _scaled(state.logits, rows, temperatures).logsumexp(-1)))
    return original()


@hook(f"{_RUNNER}._sample", when=IMPORTED, always=True)
def sample(original: Callable[..., Any], self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """V1: an answer's weight; scores of chosen tokens take others' most likely tokens away, or end the engine."""
    weighed, temperatures, whole = vars(self).pop(_WEIGHED, ([], None, None))
    given = self.input_batch.sampling_metadata
    chosen: dict[int, list[int]] = (compat.is_ours(self.vllm_config) and given.logprob_token_ids) or {}
    if not weighed and not chosen:
        return original()
    # The samplers change the logits in place, which are masked by now.
    legal = _scaled(logits, weighed, temperatures) if weighed else None
    rows = _rows([*chosen], spec_decode_metadata)
    scores = _scores(self.sampler, logits, rows, [chosen[request] for request, *_ in rows]) if rows else None
    if chosen:  # for the samplers none is, but there is a column for the sampled token
        width = given.max_num_logprobs or 0
        self.input_batch.sampling_metadata = dataclasses.replace(given, logprob_token_ids=None, max_num_logprobs=width)
    try:
        output = original()
    finally:
        self.input_batch.sampling_metadata = given
    width = output.sampled_token_ids.shape[1]  # a column a draft, and one more
    if scores is not None:
        output = _with(output, [request * width + place for request, place, _ in rows], *scores)
    if legal is not None:
        places = compat.to_device([request * width + place for request, place, _ in weighed], legal.device)
        tensors = output.logprobs_tensors
        tensors.logprobs[places, :2] = log_probs_of(legal, whole, tensors.logprob_token_ids[places, 0])
    return output


def _rows(requests: Sequence[int], drafts: Any) -> list[tuple[int, int, int]]:
    """Return each row of these requests: the request's place in the batch, the row's among its own, and among all.
    drafts: SpecDecodeMetadata, None without speculation, when each request has one row."""
    if drafts is None:
        return [(request, 0, request) for request in requests]
    first = [0, *accumulate(count + 1 for count in drafts.num_draft_tokens)]
    return [(one, place, first[one] + place) for one in requests for place in range(drafts.num_draft_tokens[one] + 1)]


def _scaled(logits: Tensor, rows: Sequence[tuple[int, int, int]], temperatures: Tensor) -> Tensor:
    """Return the logits of these rows, by their temperatures: [rows, vocabulary] float32."""
    return logits[compat.to_device([row for *_, row in rows], logits.device)].float() / temperatures


def _scores(sampler: Any, logits: Tensor, rows: Sequence[Any], tokens: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Of these rows' tokens: [rows, most tokens] ids, int32, and scores, float32. Shorter rows end with 0 and -inf."""
    ids = compat.to_device(as_table(tokens, max(map(len, tokens))), logits.device)
    scored = logits[compat.to_device([row for *_, row in rows], logits.device)].float()
    if not sampler.logprobs_mode.endswith("logits"):  # of `--logprobs-mode`: raw_logits, processed_logits
        scored = scored.log_softmax(-1)
    scores = scored.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    return ids.clamp(min=0).int(), scores


def _with(output: Any, rows: list[int], ids: Tensor, scores: Tensor) -> Any:
    """Return the sampler's output with these columns in its rows, after that of the sampled token."""
    tensors = output.logprobs_tensors
    width = ids.shape[1]
    more = (0, max(0, 1 + width - tensors.logprobs.shape[1]))
    all_ids, all_scores = pad(tensors.logprob_token_ids, more), pad(tensors.logprobs, more, value=-torch.inf)
    index = compat.to_device(rows, ids.device)
    all_ids[index, 1 : 1 + width] = ids
    all_scores[index, 1 : 1 + width] = scores
    output.logprobs_tensors = tensors._replace(logprob_token_ids=all_ids, logprobs=all_scores)
    return output


def scoring(one: Pass, *, cached: bool) -> dict[str, Any]:
    """Return what the parameters of a request that scores a pass of a ranked list have on V1, which scores chosen
    tokens that may follow a prompt, and the prompt's own. cached: whether it may use the prefix cache."""
    own: dict[str, Any] = {}
    if one.known < len(one.tokens):
        own = {"prompt_logprobs": 0, "skip_reading_prefix_cache": not cached}
    after = one.after.tolist()
    # Without `logprobs`: vLLM would look for as many most likely tokens besides.
    return own | ({"logprob_token_ids": after} if after else {"logprobs": 0})


def lacks_scores(one: Pass, prompt_tokens: int, output: Any) -> bool:
    """Return whether V1 has filled in only the rows that it computed: the others are whatever was in memory."""
    return len(one.tokens) > one.known and (output.num_cached_tokens or 0) >= prompt_tokens + one.known


def scored(one: Pass, prompt_tokens: int, output: Any) -> Answer:
    """Return what V1 has scored of a pass."""
    own, (after,) = output.prompt_logprobs, [output.outputs[0].logprobs]
    first = prompt_tokens + one.known
    scores = [own.logprobs[own.start_indices[i]] for i in range(first, prompt_tokens + len(one.tokens))]
    return np.array(scores), np.array(after.logprobs[1:])  # the first is the sampled token's
