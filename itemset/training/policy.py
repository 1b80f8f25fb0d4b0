"""A model's own distribution over the legal tokens at each place of a batch, and the mass that it gives them.

A rollout inside a set draws token t with q(t) = p(t) / m: p is the model's probability and m that of all legal tokens.
So log p = log q + log m.
"""

import torch
from torch import Tensor

from itemset.errors import ItemSetError
from itemset.training.legal_tokens import LegalTokens
from itemset.training.logits import OfHidden, OfLogits


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
        return self._spread(-self._sum(self._log_q.exp() * self._log_q))

    def kl(self, reference: "LegalPolicy") -> Tensor:
        """Return KL(q || reference's q), exact. Both must be of the same `LegalTokens`."""
        if reference._legal is not self._legal:
            raise ItemSetError("the reference has other legal tokens: make both policies of the same LegalTokens")
        return self._spread(self._sum(self._log_q.exp() * (self._log_q - reference._log_q)))

    def _sum(self, values: Tensor) -> Tensor:
        """[N] to [R]."""
        return torch.segment_reduce(values, "sum", lengths=self._counts, unsafe=True)

    def _spread(self, values: Tensor) -> Tensor:
        """[R] to [B, T]."""
        size, steps = self._legal.shape
        return values.new_zeros(size * steps).index_copy(0, self._places, values).view(size, steps)


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
