"""The weights of answers: at each token the logarithm of the legal mass, the model's probability of all legal tokens.

They leave the scheduler in the place of each sampled token's log-probability, and so they take part in all that SGLang
does with these: asynchronous copies, accepted and rejected drafts, tokens cut after an end. The front end asks for
log-probabilities where a request asks for its weight, and takes them out of its answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from itemset.serving.wire import read
from sglang_static import processor
from sglang_static.compat import hook

ASKED = "item_set_weight"
"""Attribute of a `GenerateReqInput` for which `ask` has asked."""
_ROWS, _WEIGHTS = "weighed_rows", "item_set_weights"
"""Attributes of a batch's sampling info: the rows that are weighed, and their weights until they are handed on."""


def ask(request: Any) -> None:
    """Let a `GenerateReqInput` of one prompt get log-probabilities."""
    request.return_logprob = True
    setattr(request, ASKED, True)


def taken(info: dict[str, Any], state: Any) -> float:
    """Take out of an output's `meta_info` what nobody has asked for; return the weight of all tokens so far."""
    for name in [name for name in info if "logprobs" in name]:
        del info[name]
    return float(sum(state.output_token_logprobs_val))


def note(batch: Any) -> None:
    """Before a forward pass: note the rows of the requests that ask for weights."""
    if batch.sampling_info is not None:
        setattr(batch.sampling_info, _ROWS, _asking(batch))


@hook("sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits")
def preprocess_logits(original: Callable[..., Any], logits_output: Any, sampling_info: Any) -> Any:
    """The mask of the rows with item sets, after that of grammars; an answer's weight needs its logits before and after
    all that is done to them here."""
    rows, logits = getattr(sampling_info, _ROWS, None), logits_output.next_token_logits
    weighing = _weighed(logits, rows) if rows else contextlib.nullcontext()
    with weighing as weighed:
        result = original()
        if (sampler := processor.current()) is not None:
            sampler.mask(sampling_info, logits)
    if weighed is not None:
        setattr(sampling_info, _WEIGHTS, weighed)
    return result


class _Synchronised:
    """Sampling info by which all ranks must sample the same token, as with grammars: masked rows have more near
    ties."""

    def __init__(self, info: Any) -> None:
        self._info, self.grammars = info, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


@hook("sglang.srt.layers.sampler:Sampler.forward", why="all ranks sample the same token; an answer's weight")
def sample(original: Callable[..., Any], logits_output: Any, sampling_info: Any) -> Any:
    has_sets = getattr(sampling_info, "item_sets", None) is not None
    result = original(sampling_info=_Synchronised(sampling_info) if has_sets else sampling_info)
    if (weighed := vars(sampling_info).pop(_WEIGHTS, None)) is not None:
        rows, weights = weighed
        logits_output.next_token_logprobs[rows] = weights
    return result


@contextlib.contextmanager
def verified(batch: Any, logits: Tensor) -> Iterator[None]:
    """While drafts are verified: weigh the rows of the requests that ask. logits: [requests x drafts, vocabulary]."""
    requests = _asking(batch)
    if not requests:
        yield
        return
    each = len(logits) // len(batch.reqs)
    with _weighed(logits, [request * each + i for request in requests for i in range(each)]) as weighed:
        yield
    rows, weights = weighed
    table = weights.new_zeros(len(logits)).index_copy_(0, rows, weights)
    setattr(batch.sampling_info, _WEIGHTS, (_on(logits, requests), table))


@hook("sglang.srt.layers.logprob_processor:compute_spec_logprobs")
def accepted(original: Callable[..., Any], batch: Any, logits_output: Any, accept_index: Any) -> None:
    """An answer's weight, with speculation. accept_index: rows of accepted drafts, [requests, any], -1 for none."""
    original()
    if (weighed := vars(batch.sampling_info).pop(_WEIGHTS, None)) is not None:
        requests, table = weighed
        logits_output.next_token_logprobs[requests] = table[accept_index.long()[requests]]


@contextlib.contextmanager
def _weighed(logits: Tensor, rows: Sequence[int]) -> Iterator[list[Tensor]]:
    """Mask logits meanwhile. Afterwards the result is the rows, [n] int64, and their weights, [n] float32: whatever
    else was done to the logits, the weights are of those before, and of the tokens that are possible now."""
    result: list[Tensor] = []
    index = _on(logits, rows)
    before = logits[index].float()
    yield result
    whole = before.logsumexp(-1)
    legal = before.masked_fill_(logits[index].isneginf(), -torch.inf)
    result += [index, legal.logsumexp(-1) - whole]


def _asking(batch: Any) -> list[int]:
    if not batch.return_logprob:  # nobody asks, see `ask`
        return []
    carried = [read(one.sampling_params.custom_params) for one in batch.reqs or ()]
    return [i for i, one in enumerate(carried) if one is not None and one.weighed]


def _on(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Integers on the device of the logits, without waiting for it."""
    table = torch.tensor(rows)
    return table.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else table.to(logits.device)
