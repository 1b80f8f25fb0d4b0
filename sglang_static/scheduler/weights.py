"""What answers say of their tokens: log p, the model's, and log q, that among the legal tokens; or their difference,
the weight: the logarithm of the legal mass, the model's probability of all legal tokens.

They leave the scheduler in the place of each sampled token's log-probability, log q in that of the most likely one. So
they take part in all that SGLang does with these: asynchronous copies, drafts accepted or not, cut tokens.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from itemset.masking.slots import log_probs_of
from itemset.serving.wire import LOGPROBS, read
from sglang_static.compat import hook
from sglang_static.scheduler.masks import moved

_ROWS = "weighed_rows"  # attribute of a batch's sampling info: the rows that ask, and whether for log p and log q
_WEIGHTS = "item_set_weights"  # another: what `_weighed` gives, until that is handed on


@hook("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation", order=-1)
def _forward(original: Callable[..., Any], batch: Any) -> Any:
    """Which rows of a step ask for weights."""
    if batch is not None and batch.sampling_info is not None:
        setattr(batch.sampling_info, _ROWS, _asking(batch))
    return original()


@hook("sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits", order=-1)
def _preprocess_logits(original: Callable[..., Any], logits_output: Any, sampling_info: Any) -> Any:
    """An answer's weight needs its logits before and after all that is done to them here."""
    rows, logits = getattr(sampling_info, _ROWS, None), logits_output.next_token_logits
    if not rows:
        return original()
    index, logged = moved(list(rows), logits.device), moved(list(rows.values()), logits.device)
    temperatures = torch.where(logged > 0, sampling_info.temperatures[index, 0], 1.0)
    with _weighed(logits, index, temperatures) as weighed:
        result = original()
    setattr(sampling_info, _WEIGHTS, (rows, logged, index, *weighed))
    return result


@hook("sglang.srt.layers.sampler:Sampler.forward", order=-1, why="an answer's weight is of its sampled token")
def _sample(original: Callable[..., Any], logits_output: Any, sampling_info: Any) -> Any:
    result = original()
    if (weighed := vars(sampling_info).pop(_WEIGHTS, None)) is not None:
        requests, logged, rows, legal, whole = weighed
        log_p, log_q = log_probs_of(legal, whole, result[rows]).unbind(1)
        logits_output.next_token_logprobs[rows] = torch.where(logged > 0, log_p, log_p - log_q)
        for i, (request, asks) in enumerate(requests.items()):
            if asks:
                logits_output.next_token_top_logprobs_val[request] = log_q[i : i + 1]
    return result


@contextlib.contextmanager
def verified(batch: Any, logits: Tensor) -> Iterator[None]:
    """While drafts are verified: weigh the rows of the requests that ask. logits: [requests x drafts, vocabulary]."""
    requests = _asking(batch)
    if not requests:
        yield
        return
    each = len(logits) // len(batch.reqs)
    index = moved([request * each + i for request in requests for i in range(each)], logits.device)
    with _weighed(logits, index) as weighed:
        yield
    legal, whole = weighed
    table = whole.new_zeros(len(logits)).index_copy_(0, index, legal.logsumexp(-1) - whole)
    setattr(batch.sampling_info, _WEIGHTS, (moved(list(requests), logits.device), table))


@hook("sglang.srt.layers.logprob_processor:compute_spec_logprobs")
def accepted(original: Callable[..., Any], batch: Any, logits_output: Any, accept_index: Any) -> None:
    """An answer's weight, with speculation. accept_index: rows of accepted drafts, [requests, any], -1 for none."""
    original()
    if (weighed := vars(batch.sampling_info).pop(_WEIGHTS, None)) is not None:
        requests, table = weighed
        logits_output.next_token_logprobs[requests] = table[accept_index.long()[requests]]


@contextlib.contextmanager
def _weighed(logits: Tensor, index: Tensor, temperatures: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Mask logits meanwhile. Afterwards the result is the masked logits of some rows, [n, vocabulary] float32, and the
    log-sum-exp of all, [n]: whatever else was done to the logits, as they were before, and of the tokens that are
    possible now. index: [n] int64, which rows."""
    result: list[Tensor] = []
    before = logits[index].float()
    if temperatures is not None:
        before /= temperatures[:, None]
    yield result
    whole = before.logsumexp(-1)
    result += [before.masked_fill_(logits[index].isneginf(), -torch.inf), whole]


def _asking(batch: Any) -> dict[int, bool]:
    """Return the requests of a batch that ask, and whether for log p and log q."""
    if not batch.return_logprob:  # nobody asks, see `front.request_hooks`
        return {}
    carried = [read(one.sampling_params.custom_params) for one in batch.reqs or ()]
    return {i: one.weighed == LOGPROBS for i, one in enumerate(carried) if one is not None and one.weighed}
