"""log p and log q of sampled tokens: by the model over its vocabulary, and among the legal tokens."""

import torch
from torch import Tensor


def log_probs_of(legal: Tensor, whole: Tensor, tokens: Tensor) -> Tensor:
    """Return log p and log q of a token a row, [rows, 2] of the logits' dtype.

    legal: [rows, vocabulary], logits of which those that may not follow are -inf. whole: [rows], the log-sum-exp of all
    as they were. tokens: [rows] integers, legal ones; a negative one stands for none.
    """
    chosen = legal.gather(1, tokens.long().clamp(min=0)[:, None])
    return chosen - torch.stack((whole, legal.logsumexp(-1)), 1)
