"""Training inside an item set: a model's log-probabilities over the legal tokens alone, and losses made of them."""

from itemset.training.legal_tokens import LegalTokens, legal_tokens
from itemset.training.losses import (
    LegalPolicy,
    boosted_log_probs,
    legal_cross_entropy,
    legal_log_probs,
    legal_log_probs_of_hidden,
)

__all__ = [
    "LegalPolicy", "LegalTokens", "boosted_log_probs", "legal_cross_entropy", "legal_log_probs",
    "legal_log_probs_of_hidden", "legal_tokens",
]  # fmt: skip
