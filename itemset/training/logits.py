"""What a batch's legal tokens need of a model: their own logits, and over the whole vocabulary one log-sum-exp a place.

Read from logits, or made from hidden states and the head's matrix. Either way there is one gradient, written once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from itemset.training.legal_tokens import LegalTokens

_IN_CACHE, _AT_ONCE = 1 << 18, 1 << 26  # logits that are worked on at a time, on a CPU and elsewhere


def wide(tensor: Tensor) -> torch.dtype:
    """Return the type that sums of such logits are made in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class OfLogits(torch.autograd.Function):
    """Reads logits [B, T, V]: (those of the legal tokens [N], the log-sum-exp at each place [R] or None)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, legal: LegalTokens, temperature: float, mass: bool
    ) -> tuple[Tensor, Tensor | None]:
        flat = logits.reshape(-1, logits.shape[-1])
        places, owners, tokens = (one.to(logits.device) for one in (legal.places, legal.owners, legal.tokens))
        cells = places[owners], tokens
        values = _tempered(flat[cells], temperature)
        whole = values.new_empty(len(places)) if mass else None
        if whole is not None:
            for own, at in _parts(legal.places, flat):
                whole[own] = _tempered(flat[at], temperature).logsumexp(1)
        ctx.save_for_backward(logits, *cells)
        ctx.legal, ctx.temperature = legal, temperature
        ctx.set_materialize_grads(False)
        return values, whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_values: Tensor | None, of_whole: Tensor | None) -> Any:
        logits, *cells = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        if flat.device.type == "cpu":  # in pages, large ones if the system has them, that are made where one writes
            grad = torch.from_numpy(np.zeros(flat.nbytes, np.uint8)).view(flat.dtype).view(flat.shape)
        else:
            grad = torch.zeros_like(flat)
        if of_whole is not None:
            factor = of_whole[:, None] / ctx.temperature
            for own, at in _parts(ctx.legal.places, flat):  # `softmax` is one pass where sub and exp are two
                grad[at] = _tempered(flat[at], ctx.temperature).softmax(1).mul_(factor[own])
        if of_values is not None:
            grad[tuple(cells)] += (of_values / ctx.temperature).to(grad.dtype)  # no cell is there twice
        return grad.view_as(logits), None, None, None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(wide(logits))
    return logits if temperature == 1 else logits / temperature


def _parts(places: Tensor, flat: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
    """Yield the places in parts: as numbers among them, and as rows of `flat`, on a CPU without a gap."""
    on_cpu = flat.device.type == "cpu"
    each = max((_IN_CACHE if on_cpu else _AT_ONCE) // flat.shape[1], 1)
    runs = [len(places)]
    if on_cpu:
        runs = torch.unique_consecutive(places - torch.arange(len(places)), return_counts=True)[1].tolist()
    begin = 0
    for run in runs:
        for first in range(begin, begin + run, each):
            own = slice(first, min(first + each, begin + run))
            at = places[own]
            yield own, slice(int(at[0]), int(at[-1]) + 1) if on_cpu else at.to(flat.device)
        begin += run


class OfHidden(torch.autograd.Function):
    """Makes the same from hidden states [B, T, d] and the head's matrix [V, d], without a tensor of B * T rows of V."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, legal: LegalTokens, temperature: float, mass: bool
    ) -> tuple[Tensor, Tensor | None]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        values = torch.empty(len(legal.tokens), dtype=wide(hidden), device=hidden.device)
        for places, tokens, entries, cells in _blocks(legal, hidden.device):
            values[entries] = _tempered((flat[places] @ head[tokens].T).view(-1)[cells], temperature)
        whole = None
        if mass:
            whole = torch.full((len(legal.places),), -torch.inf, dtype=values.dtype, device=hidden.device)
            own = flat[legal.places.to(hidden.device)]
            for rows in _rows_of(head, len(own)):
                whole = torch.logaddexp(whole, _tempered(own @ head[rows].T, temperature).logsumexp(1))
        ctx.save_for_backward(hidden, head, whole)
        ctx.legal, ctx.temperature = legal, temperature
        ctx.set_materialize_grads(False)
        return values, whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_values: Tensor | None, of_whole: Tensor | None) -> Any:
        hidden, head, whole = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[-1])
        of_hidden, of_head = torch.zeros_like(flat), torch.zeros_like(head)
        if of_values is not None:
            for places, tokens, entries, cells in _blocks(ctx.legal, hidden.device):
                grad = flat.new_zeros(len(places) * len(tokens))
                grad[cells] = (of_values[entries] / ctx.temperature).to(grad.dtype)
                grad = grad.view(len(places), len(tokens))
                of_hidden[places] += grad @ head[tokens]
                of_head[tokens] += grad.T @ flat[places]
        if of_whole is not None:
            places = ctx.legal.places.to(hidden.device)
            own, grad_own = flat[places], torch.zeros_like(flat[places])
            factor = of_whole[:, None] / ctx.temperature
            for rows in _rows_of(head, len(own)):
                shares = _tempered(own @ head[rows].T, ctx.temperature).sub_(whole[:, None]).exp_()
                shares = shares.mul_(factor).to(head.dtype)
                grad_own += shares @ head[rows]
                of_head[rows] += shares.T @ own
            of_hidden[places] += grad_own
        return of_hidden.view_as(hidden), of_head, None, None, None


def _blocks(legal: LegalTokens, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    for block in legal.blocks:
        yield tuple(one.to(device) for one in block)


def _rows_of(head: Tensor, places: int) -> Iterator[slice]:
    """Yield the head's rows in parts, each of some thousands."""
    each = max((_IN_CACHE if head.device.type == "cpu" else _AT_ONCE) // max(places, 1), 1024)
    for first in range(0, len(head), each):
        yield slice(first, first + each)
