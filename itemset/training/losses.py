"""A model's own distribution over the legal tokens of a batch, and what trainers ask of it, in one call each.

A rollout inside a set draws token t with q(t) = p(t) / m: p is the model's probability and m that of all legal tokens.
So log p = log q + log m. `ids` are what `legal_tokens` takes, or what it has returned: then a batch is walked once.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.training.legal_tokens import LegalTokens, legal_tokens
from itemset.training.logits import OfHidden, OfLogits

Sets = ItemSet | Sequence[ItemSet] | None


class Walked(TypedDict, total=False):
    """What `legal_tokens` takes beside ids and set."""

    stop_tokens: int | Sequence[int]
    starts: Any
    lengths: Any


class LegalPolicy:
    """log q and log m at the places of a batch that have a constraint; 0 at all others. Gradients flow through all.

    Made by `of_logits` or `of_hidden`. What follows is [B, T], in float32, or float64 if the model's numbers are.
    """

    def __init__(self, legal: LegalTokens, values: Tensor, whole: Tensor | None) -> None:
        """values: [N], the legal tokens' logits. whole: [R], the log-sum-exp of all logits, or None."""
        device = values.device
        self._legal, self._whole = legal, whole
        self._places, self._owners, self._counts, self._chosen = (
            one.to(device) for one in (legal.places, legal.owners, legal.counts, legal.chosen)
        )
        most = torch.segment_reduce(values.detach(), "max", lengths=self._counts, unsafe=True)
        self._inside = self._sum((values - most[self._owners]).exp()).log() + most
        self._log_q = values - self._inside[self._owners]

    @classmethod
    def of_logits(
        cls, logits: Tensor, legal: LegalTokens, *, temperature: float = 1.0, mass: bool = True
    ) -> "LegalPolicy":
        """logits: [B, T, V]; those at [b, t] predict token t. mass: if False, no other logits are read."""
        _check(logits.shape[:2], legal, logits.shape[-1], temperature)
        return cls(legal, *OfLogits.apply(logits, legal, temperature, mass))

    @classmethod
    def of_hidden(
        cls, hidden: Tensor, head_weight: Tensor, legal: LegalTokens, *, temperature: float = 1.0, mass: bool = True
    ) -> "LegalPolicy":
        """hidden: [B, T, d], the states that the head reads. head_weight: [V, d]; a head with a bias needs its logits.

        Only the legal tokens' rows of the head are used. With `mass` all of them are, a part at a time, twice.
        """
        _check(hidden.shape[:2], legal, len(head_weight), temperature)
        return cls(legal, *OfHidden.apply(hidden, head_weight, legal, temperature, mass))

    @property
    def log_probs(self) -> Tensor:
        """log q of the batch's own tokens."""
        return self._spread(self._log_q[self._chosen])

    @property
    def log_mass(self) -> Tensor:
        """log m, the log-probability of all legal tokens together. Raises ValueError if made without `mass`."""
        if self._whole is None:
            raise ItemSetError("the legal mass was not asked for: make the policy with mass=True")
        return self._spread(self._inside - self._whole)

    @property
    def entropy(self) -> Tensor:
        """Return the entropy of q."""
        return self._spread(-self._mean(self._log_q))

    def kl(self, reference: "LegalPolicy") -> Tensor:
        """Return KL(q || reference's q), exact. Both must be of the same `LegalTokens`."""
        if reference._legal is not self._legal:
            raise ItemSetError("the reference has other legal tokens: make both policies of the same LegalTokens")
        return self._spread(self._mean(self._log_q - reference._log_q))

    def _mean(self, values: Tensor) -> Tensor:
        """[N] to [R], weighted by q. A token of probability zero counts nothing, whatever its value."""
        q = self._log_q.exp()
        return self._sum(q * torch.where(q > 0, values, 0))

    def _sum(self, values: Tensor) -> Tensor:
        """[N] to [R]."""
        return torch.segment_reduce(values, "sum", lengths=self._counts, unsafe=True)

    def _spread(self, values: Tensor) -> Tensor:
        """[R] to [B, T]."""
        size, steps = self._legal.shape
        return values.new_zeros(size * steps).index_copy(0, self._places, values).view(size, steps)


def legal_log_probs(
    logits: Tensor, ids: Tensor | LegalTokens, item_set: Sets = None, *, temperature: float = 1.0, mass: bool = True,
    **walked: Unpack[Walked],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return log q and log m of the ids, [B, T] each; 0 where there is no constraint. Their sum is log p.

    logits, mass: as of `LegalPolicy.of_logits`; without `mass` log m is None. temperature: the rollout's.
    """
    policy = LegalPolicy.of_logits(logits, _legal(ids, item_set, walked), temperature=temperature, mass=mass)
    return policy.log_probs, policy.log_mass if mass else None


def legal_log_probs_of_hidden(
    hidden: Tensor, head_weight: Tensor, ids: Tensor | LegalTokens, item_set: Sets = None, *, temperature: float = 1.0,
    mass: bool = True, **walked: Unpack[Walked],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Do `legal_log_probs` from hidden states [B, T, d] and the head's matrix [V, d], as `LegalPolicy.of_hidden`."""
    legal = _legal(ids, item_set, walked)
    policy = LegalPolicy.of_hidden(hidden, head_weight, legal, temperature=temperature, mass=mass)
    return policy.log_probs, policy.log_mass if mass else None


def legal_cross_entropy(
    logits: Tensor, ids: Tensor | LegalTokens, item_set: Sets = None, *, mass_weight: float = 0.1,
    **walked: Unpack[Walked],
) -> Tensor:  # fmt: skip
    """Return the mean over the places with a constraint of -(log q + mass_weight * log m), for supervised training.

    mass_weight: 0 teaches the choice among items alone, and the model may forget the set; 1 is the usual cross-entropy.
    """
    legal = _legal(ids, item_set, walked)
    log_q, log_mass = legal_log_probs(logits, legal, mass=mass_weight != 0)
    total = log_q.sum() if log_mass is None else log_q.sum() + mass_weight * log_mass.sum()
    return -total / max(len(legal.places), 1)


def boosted_log_probs(log_probs: Tensor, boosts: Any) -> Tensor:
    """Return the log-probabilities of a boosted policy among the candidates of each prompt: [P, K].

    log_probs: [P, K], the model's of whole items, of which no prompt has one twice. boosts: [P, K], or [K] if all
    prompts have the same candidates, as `ItemSet.boosts_of` of a steered view returns them. With all of a set's items
    it is the distribution that draws with these boosts follow.
    """
    added = torch.as_tensor(boosts, dtype=log_probs.dtype, device=log_probs.device)
    if added.shape not in (log_probs.shape, log_probs.shape[-1:]):
        raise ItemSetError(
            f"boosts of shape {tuple(added.shape)} for log-probabilities of {tuple(log_probs.shape)}: give one for each"
        )
    return (log_probs + added).log_softmax(-1)


def _legal(ids: Tensor | LegalTokens, item_set: Sets, walked: Walked) -> LegalTokens:
    if isinstance(ids, LegalTokens):
        if item_set is not None or walked:
            raise ItemSetError("the ids are walked already: give the set, starts and lengths to legal_tokens")
        return ids
    if item_set is None or "stop_tokens" not in walked:
        raise ItemSetError("the set and its stop tokens are missing: give item_set and stop_tokens, or LegalTokens")
    return legal_tokens(ids, item_set, **walked)


def _check(shape: torch.Size, legal: LegalTokens, vocabulary: int, temperature: float) -> None:
    if tuple(shape) != legal.shape:
        raise ItemSetError(
            f"the model's numbers are of {tuple(shape)} places, the ids of {legal.shape}: "
            "give those that predict each id, one place before it in the sequence"
        )
    if legal.largest >= vocabulary:
        raise ItemSetError(
            f"token {legal.largest} is legal, but the model has {vocabulary} tokens: "
            "build the set with its own tokenizer, and give its own stop tokens"
        )
    if not temperature > 0:
        raise ItemSetError(f"temperature must be more than 0, not {temperature}: give that of the rollout")
