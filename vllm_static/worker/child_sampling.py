"""Sampling of answers from their children alone: no mask is written, and no logit outside the set is read.

If all of a step's rows are answers of sets that ask for nothing but a temperature, one launch reads the logits of what
may follow and takes the best, with the noise of vLLM's own sampler: the same seeds give the same answers.
"""

from collections.abc import Callable
from typing import Any

from itemset.serving.hooks import IMPORTED
from vllm_static.compat import hook
from vllm_static.worker.narrow_hooks import KNOWN

_PLAIN = {
    "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "logprobs": None, "logprob_token_ids": None, "logit_bias": None, "allowed_token_ids": None, "bad_words": None,
    "min_tokens": 0, "thinking_token_budget": None,
}  # fmt: skip
"""Sampling parameters that read or change more than the legal logits, and their values of no effect."""


def is_plain(sampling_params: Any) -> bool:
    """Return whether a request asks for nothing but a temperature."""
    given = ((getattr(sampling_params, name, none), none) for name, none in _PLAIN.items())
    return sampling_params.top_k in (-1, 0) and all(value == none or (not value and not none) for value, none in given)


@hook("vllm.v1.worker.gpu.sample.sampler:Sampler.sample", when=IMPORTED)
def sample(
    original: Callable[..., Any], self: Any, logits: Any, expanded_idx_mapping: Any, idx_mapping_np: Any, pos: Any,
    input_ids: Any, expanded_local_pos: Any, return_logprobs: bool,
) -> Any:  # fmt: skip
    """Answers of sets are sampled from what may follow, without a mask, if nothing else is asked of them."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sets = next((one for one in self.logits_processors if hasattr(one, "samples_children")), None)
    reads_all = return_logprobs or self.return_sampling_mask or self.trace_replay_state is not None
    # A processor of the user's, or a watermark, has a say in every token.
    reads_all |= len(self.logits_processors) > KNOWN or type(self)._sample_random is not Sampler._sample_random
    if sets is None or reads_all or len(logits) != len(idx_mapping_np) or not sets.samples_children(idx_mapping_np):
        return original()
    states = self.sampling_states
    sampled = sets.sample_children(
        logits, expanded_idx_mapping, idx_mapping_np, states.temperature.gpu, states.seeds.gpu, pos,
        fp64=self.use_fp64_gumbel, above=expanded_local_pos, tokens=input_ids,
    )  # fmt: skip
    return sampled, logits
