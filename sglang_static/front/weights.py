"""Weights, log p and log q of answers, in the front end: it asks for log-probabilities where a request asks for these,
and takes them out of its answer (`scheduler.weights`)."""

from typing import Any

from itemset.serving.front.answer_fields import Logs
from itemset.serving.wire import LOGPROBS

ASKED = "item_set_weight"
"""Attribute of a `GenerateReqInput` for which `ask` has asked: the request's field for that."""


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
