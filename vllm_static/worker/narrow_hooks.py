"""The hooks by which a step computes logits of some tokens only; `narrow_head` says which."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from itemset.serving.hooks import IMPORTED
from vllm_static import compat
from vllm_static.compat import hook

Product = Callable[[Any, Any, Callable[[Any, Any], Any]], Any]
"""Makes logits of a head, its bias, and a function that multiplies hidden states by rows and a bias; None leaves it to
vLLM."""
NARROW, _SCORED = "narrow", "logprobs or weights"
KNOWN = 4  # logits processors: vLLM's three, and ours
_products: list[Product] = []


def sampled_steps(worker: Any) -> dict[str, int]:
    """Count for the engine core the steps sampled from logits of sets' own tokens, and why the others were not."""
    sets = compat.item_sets(compat.runner_of(worker))
    return {} if sets is None else dict(sets.narrow.steps)


@contextlib.contextmanager
def reading(product: Product) -> Iterator[None]:
    """While this is entered, let a product stand in place of that of hidden states and head."""
    _products.append(product)
    try:
        yield
    finally:
        _products.pop()


@hook("vllm.model_executor.layers.logits_processor:LogitsProcessor._get_logits", when=IMPORTED)
def get_logits(original: Callable[..., Any], lm_head: Any, embedding_bias: Any) -> Any:
    """Logits of a set's own tokens are made of their rows of the head."""
    if not _products:
        return original()
    from torch.nn.functional import linear

    def multiply(weight: Any, bias: Any) -> Any:
        rows = SimpleNamespace(weight=weight, quant_method=lm_head.quant_method, cpu_linear=linear, tp_size=1)
        return original(lm_head=rows, embedding_bias=bias, skip_gather=True)

    logits = _products[-1](lm_head, embedding_bias, multiply)
    return original() if logits is None else logits


@hook("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample", when=IMPORTED)
def sample(original: Callable[..., Any], self: Any, input_batch: Any, grammar_output: Any) -> Any:
    """Answers are sampled from the logits of their sets' own tokens; what nobody reads, a list's token, from a few."""
    sets, slots = compat.item_sets(self), input_batch.idx_mapping_np
    if sets is None or not sets.constrained(slots):
        return original()
    narrow = sets.narrow
    narrow.attach(self)
    reasons = {
        narrow.why_not: narrow.why_not is not None,
        "drafts": bool(input_batch.num_draft_tokens),
        "logits sharded by request": self.batch_sharder is not None,
        "requests on the host path": grammar_output is not None,
        _SCORED: self.sampler.get_logprobs_dims(slots) is not None,
        "other logits processors": len(self.sampler.logits_processors) > KNOWN,
        "counts of NaN": self.sampler.compute_nans,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is None and sets.are_lists[slots].all():
        with narrow.of_nobody():
            output, *counts = original()
        output.sampled_token_ids.zero_()  # the same on all ranks
        return output, *counts
    alphabet = why or narrow.of_answers(sets.alphabet_of(slots))
    if isinstance(alphabet, str):
        narrow.steps[alphabet] += 1
        return original()
    narrow.steps[NARROW] += 1
    with narrow.only(alphabet, spread=True, clear=sets.are_lists[slots].any()):
        return original()
