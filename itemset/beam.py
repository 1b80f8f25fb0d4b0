"""The best items of a set by beam search, for those who own their decode loop.

STATIC's Algorithms 1 and 2 (arXiv 2602.22647, section 4) on our tables: static shapes, nothing read back, items of any
lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from itemset.arena import Arena
from itemset.slots import Kernels, kernels_for
from itemset.torch_kernels import may_end
from itemset.walk import DEAD

LogitsFunction = Callable[[Tensor, Tensor], Tensor]


class Ranking(NamedTuple):
    """The items found for each row of the batch, best first.

    tokens: [batch, width, longest] int64, -1 behind an item's end and where `found` is less than the width.
    scores: [batch, width] float32, the sum of the log-probabilities of an item's tokens; -inf where there is no item.
    found: [batch] int64, how many items there are. No item stands there twice.
    """

    tokens: Tensor
    scores: Tensor
    found: Tensor


def beam_search(
    arena: Arena,
    number: int,
    logits_fn: LogitsFunction,
    *,
    batch: int,
    width: int,
    longest: int,
    end_token: int | None = None,
    kernels: Kernels = "auto",
) -> Ranking:
    """The `width` best items of set `number` of the arena that a beam of this width finds.

    Scores are the model's own log-probabilities over the whole vocabulary. With a beam at least as wide as the set, the
    answer is the set's exact ranking, but for items whose probability is zero: those are never found.

    logits_fn: takes the tokens so far, [batch, width, t] int64, and the beam of the step before that each of them
        continues, [batch, width] int64 (to reorder cached keys and values by); returns logits [batch, width,
        vocabulary], on the arena's device, of which a few copies in float32 are made. Rows that hold no beam any more
        hold any tokens; their logits are not used.
    longest: `ItemSet.longest`, the most steps that are taken (one more with end_token). Longer items are not found, nor
        are items with tokens outside the vocabulary.
    end_token: where given, the end of an item is a token of the model's as well, and counts in the score.
    """
    if width < 1:
        raise ValueError(f"a beam of width {width} finds nothing: make it at least 1")
    module = kernels_for(arena.device, kernels)

    def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=arena.device)

    tokens = full((batch, width, longest), -1, torch.int64)
    scores = full((batch, width), -torch.inf, torch.float32)
    scores[:, 0] = 0
    states = torch.where(scores == 0, number << 32, DEAD)
    parents = torch.arange(width, device=arena.device).expand(batch, width)
    best = Ranking(tokens, full((batch, width), -torch.inf, torch.float32), full((batch,), 0, torch.int64))
    no_marks, no_slots = full((1, 1), -1, torch.int32), full((batch * width,), -1, torch.int32)
    for t in range(longest + 1):
        if t == longest and end_token is None:
            best = _merge(best, tokens, torch.where(may_end(arena, states), scores, -torch.inf))
            break
        log_probs = torch.log_softmax(logits_fn(tokens[:, :, :t], parents).float(), -1)
        ends = scores if end_token is None else scores + log_probs[:, :, end_token]
        best = _merge(best, tokens, torch.where(may_end(arena, states), ends, -torch.inf))
        if t == longest:
            break
        vocabulary = log_probs.shape[-1]
        module.mask(arena, log_probs.view(-1, vocabulary), states.view(-1), no_marks, no_slots)
        candidates = (scores[:, :, None] + log_probs).flatten(1)
        scores, picked = candidates.topk(width)
        parents, token = picked // vocabulary, picked % vocabulary
        tokens = tokens.gather(1, parents[:, :, None].expand(-1, -1, longest)).clone()
        tokens[:, :, t] = token
        states = states.gather(1, parents).view(-1)
        module.advance(arena, states, token.view(-1), None, states)
        states = torch.where(scores.isneginf(), DEAD, states.view(batch, width))
    return best


def _merge(best: Ranking, tokens: Tensor, scores: Tensor) -> Ranking:
    """The best of those found before and of these beams, which end here where their score is finite."""
    scores, picked = torch.cat((best.scores, scores), 1).topk(scores.shape[1])
    both = torch.cat((best.tokens, tokens), 1)
    kept = both.gather(1, picked[:, :, None].expand(-1, -1, both.shape[2]))
    exists = ~scores.isneginf()
    return Ranking(torch.where(exists[:, :, None], kept, -1), scores, exists.sum(1))
