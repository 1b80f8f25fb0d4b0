"""What answers say of their tokens: log p, the model's, and log q, that among the legal tokens; or their difference,
the weight: the logarithm of the legal mass, the model's probability of all legal tokens.

They leave the scheduler in the place of each sampled token's log-probability, log q in that of the most likely one. So
they take part in all that SGLang does with these: asynchronous copies, accepted and rejected drafts, tokens cut after
an end. The front end asks for log-probabilities where a request asks for these, and takes them out of its answer.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from itemset.masking.slots import log_probs_of
from itemset.serving.answer_fields import Logs
from itemset.serving.request_fields import LOGPROBS
from itemset.serving.wire import read
from sglang_static import processor
from sglang_static.compat import hook

ASKED = "item_set_weight"
"""Attribute of a `GenerateReqInput` for which `ask` has asked: the request's field for that."""
_ROWS, _WEIGHTS = "weighed_rows", "item_set_weights"
"""Attributes of a batch's sampling info: the rows that ask, and whether for log p and log q; and what `_weighed` gives
until that is handed on."""


def ask(request: Any, weighed: str) -> None:
    """Let a `GenerateReqInput` of one prompt get log-probabilities."""
    request.return_logprob, request.top_logprobs_num = True, int(weighed == LOGPROBS)
    setattr(request, ASKED, weighed)


def taken(info: dict[str, Any], state: Any) -> Logs:
    """Take out of an output's `meta_info` what nobody has asked for; return log p and log q of all tokens so far, or
    weights and zeros."""
    for name in [name for name in info if "logprobs" in name]:
        del info[name]
    first = list(state.output_token_logprobs_val)
    return first, [value for (value,) in state.output_top_logprobs_val] or [0.0] * len(first)


def note(batch: Any) -> None:
    """Before a forward pass: note the rows of the requests that ask for weights."""
    if batch.sampling_info is not None:
        setattr(batch.sampling_info, _ROWS, _asking(batch))


@hook("sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits")
def preprocess_logits(original: Callable[..., Any], logits_output: Any, sampling_info: Any) -> Any:
    """The mask of the rows with item sets, after that of grammars; an answer's weight needs its logits before and after
    all that is done to them here."""
    rows, logits = getattr(sampling_info, _ROWS, None), logits_output.next_token_logits
    with _asked_of(sampling_info, logits, rows) if rows else contextlib.nullcontext():
        result = original()
        if (sampler := processor.current()) is not None:
            sampler.mask(sampling_info, logits)
    return result


@contextlib.contextmanager
def _asked_of(info: Any, logits: Tensor, rows: dict[int, int]) -> Iterator[None]:
    logged = _on(logits, list(rows.values()))
    temperatures = torch.where(logged > 0, info.temperatures[_on(logits, list(rows)), 0], 1.0)
    with _weighed(logits, list(rows), temperatures) as weighed:
        yield
    setattr(info, _WEIGHTS, (rows, logged, *weighed))


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
    with _weighed(logits, [request * each + i for request in requests for i in range(each)]) as weighed:
        yield
    rows, legal, whole = weighed
    table = whole.new_zeros(len(logits)).index_copy_(0, rows, legal.logsumexp(-1) - whole)
    setattr(batch.sampling_info, _WEIGHTS, (_on(logits, list(requests)), table))


@hook("sglang.srt.layers.logprob_processor:compute_spec_logprobs")
def accepted(original: Callable[..., Any], batch: Any, logits_output: Any, accept_index: Any) -> None:
    """An answer's weight, with speculation. accept_index: rows of accepted drafts, [requests, any], -1 for none."""
    original()
    if (weighed := vars(batch.sampling_info).pop(_WEIGHTS, None)) is not None:
        requests, table = weighed
        logits_output.next_token_logprobs[requests] = table[accept_index.long()[requests]]


@contextlib.contextmanager
def _weighed(logits: Tensor, rows: Sequence[int], temperatures: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Mask logits meanwhile. Afterwards the result is the rows, [n] int64, their masked logits, [n, vocabulary]
    float32, and the log-sum-exp of all, [n]: whatever else was done to the logits, as they were before, and of the
    tokens that are possible now."""
    result: list[Tensor] = []
    index = _on(logits, rows)
    before = logits[index].float()
    if temperatures is not None:
        before /= temperatures[:, None]
    yield result
    whole = before.logsumexp(-1)
    result += [index, before.masked_fill_(logits[index].isneginf(), -torch.inf), whole]


def _asking(batch: Any) -> dict[int, bool]:
    """The requests of a batch that ask, and whether for log p and log q."""
    if not batch.return_logprob:  # nobody asks, see `ask`
        return {}
    carried = [read(one.sampling_params.custom_params) for one in batch.reqs or ()]
    return {i: one.weighed == LOGPROBS for i, one in enumerate(carried) if one is not None and one.weighed}


def _on(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Integers on the device of the logits, without waiting for it."""
    table = torch.tensor(rows)
    return table.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else table.to(logits.device)
