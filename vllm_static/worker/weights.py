"""Log p and log q of the tokens of answers: the model's, and that among the legal tokens.

They leave the engine in the places of the log-probabilities of each sampled token and of the most likely one, and take
part in all that vLLM does with these. The front end asks for these two columns alone, and reads them (`front.answers`).
"""

from collections.abc import Callable
from typing import Any

from itemset.serving.hooks import IMPORTED
from vllm_static import compat
from vllm_static.compat import hook


@hook("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample", order=-1, when=IMPORTED)
def sample(original: Callable[..., Any], self: Any, input_batch: Any) -> Any:
    """An answer's weight, after the sampling."""
    sets = compat.item_sets(self)
    if sets is None or not sets.temperatures[input_batch.idx_mapping_np].any():
        return original()
    # Both samplers leave the logits as they are.
    samplers = {name: getattr(self, name) for name in ("sampler", "rejection_sampler") if getattr(self, name)}
    for name, sampler in samplers.items():
        setattr(self, name, _Weighing(sampler, sets))
    try:
        return original()
    finally:
        vars(self).update(samplers)


class _Weighing:
    """A sampler that weighs what it samples."""

    def __init__(self, sampler: Any, sets: Any) -> None:
        self._sampler, self._sets = sampler, sets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._sampler(logits, input_batch, *args, **kwargs)
        self._sets.weigh(logits, input_batch, output.logprobs_tensors)
        return output
