"""What trainers ask of the legal policy, in one call each.

`ids` are those that `legal_tokens` takes, with the set and all else that it takes; or what it has returned, so that a
batch is walked once, however often it is used.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from torch import Tensor

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.training.legal_tokens import LegalTokens, legal_tokens
from itemset.training.policy import LegalPolicy

Sets = ItemSet | Sequence[ItemSet] | None


class Walked(TypedDict, total=False):
    """What `legal_tokens` takes beside ids and set."""

    stop_tokens: int | Sequence[int]
    starts: Any
    lengths: Any


def legal_log_probs(
    logits: Tensor, ids: Tensor | LegalTokens, item_set: Sets = None, *, temperature: float = 1.0, mass: bool = True,
    **walked: Unpack[Walked],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return log q and log m of the ids, [B, T] each; 0 where there is no constraint. Their sum is log p.

    logits: [B, T, V]; those at [b, t] predict id t. temperature: the rollout's.
    mass: if False, log m is None, and only the legal tokens' logits are read.
    """
    policy = LegalPolicy.of_logits(logits, _legal(ids, item_set, walked), temperature=temperature, mass=mass)
    return policy.log_probs, policy.log_mass if mass else None


def legal_log_probs_of_hidden(
    hidden: Tensor, head_weight: Tensor, ids: Tensor | LegalTokens, item_set: Sets = None, *, temperature: float = 1.0,
    mass: bool = True, **walked: Unpack[Walked],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Do `legal_log_probs` from hidden states [B, T, d] and the head's matrix [V, d], without any [B, T, V].

    mass: if False, the other tokens' rows of the head are not used at all.
    """
    legal = _legal(ids, item_set, walked)
    policy = LegalPolicy.of_hidden(hidden, head_weight, legal, temperature=temperature, mass=mass)
    return policy.log_probs, policy.log_mass if mass else None


def legal_cross_entropy(
    logits: Tensor, ids: Tensor | LegalTokens, item_set: Sets = None, *, mass_weight: float = 0.1,
    **walked: Unpack[Walked],
) -> Tensor:  # fmt: skip
    """Return the mean over the places with a constraint of -(log q + mass_weight * log m), for supervised training.

    mass_weight: 0 teaches the choice among the items alone, and the model may forget the set; 1 is the ordinary
    cross-entropy.
    """
    legal = _legal(ids, item_set, walked)
    log_q, log_mass = legal_log_probs(logits, legal, mass=mass_weight != 0)
    total = log_q.sum() if log_mass is None else log_q.sum() + mass_weight * log_mass.sum()
    return -total / max(len(legal.places), 1)


def _legal(ids: Tensor | LegalTokens, item_set: Sets, walked: Walked) -> LegalTokens:
    if isinstance(ids, LegalTokens):
        if item_set is not None or walked:
            raise ItemSetError("the ids are walked already: give the set, starts and lengths to legal_tokens")
        return ids
    if item_set is None or "stop_tokens" not in walked:
        raise ItemSetError("the set and its stop tokens are missing: give item_set and stop_tokens, or LegalTokens")
    return legal_tokens(ids, item_set, **walked)
