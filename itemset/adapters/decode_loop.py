"""The best items of a set by beam search, for those who own their decode loop.

STATIC's Algorithms 1 and 2 (arXiv 2602.22647, section 4) for items of any lengths, without a mask, by `ranking.beams`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from itemset.draft_head.head import DraftHead
from itemset.masking.arena import Arena
from itemset.ranking.beams import Beams


class Ranking(NamedTuple):
    """The distinct items found for each row, best first.

    tokens: [batch, width, longest] int64, -1 after an item's end and in rows from `found` on. scores: [batch, width]
    float32, the sum of the log-probabilities of an item's tokens; -inf from `found` on. found: [batch] int64.
    """

    tokens: Tensor
    scores: Tensor
    found: Tensor


def beam_search(
    arena: Arena, number: int, logits_fn: Callable[[Tensor, Tensor], Tensor], *, batch: int, width: int, longest: int,
    end_token: int | None = None,
) -> Ranking:  # fmt: skip
    """Return the `width` best items, of set `number` of the arena, that a beam of this width finds.

    Scores are the model's own log-probabilities over the whole vocabulary. With a beam at least as wide as the set, the
    answer is the set's exact ranking, except that items of probability zero are never found. Nothing is read back.

    logits_fn: takes the tokens so far, [batch, width, t] int64, and the beam of the step before that each of them
    continues, [batch, width] int64 (to reorder cached keys and values by); returns logits [batch, width, vocabulary] of
    any floating dtype, on the arena's device. Logits of rows without a beam, at first of all but each row's first, are
    not used. longest: `ItemSet.longest`, the most steps that are taken (one more with end_token). Longer items are not
    found, nor those with tokens outside the vocabulary. end_token: if given, the end of an item counts in the score.

    Raises ValueError if batch, width or longest is less than 1, KeyError if the arena has no such set.
    """
    options: dict[str, Any] = {"width": width, "k": width, "end_token": end_token, "stepwise": True, "longest": longest}
    beams = Beams(arena, [number] * batch, arena.level_plan(number), **options)
    parents = torch.arange(width, device=arena.device).expand(batch, width)
    while beams.passes_left:
        logits = logits_fn(beams.tokens[:, :, : beams.taken].clamp(min=0), parents)
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        if not beams.taken:
            logits = logits[:, :1]
        beams.round(logits.flatten(0, 1)[:, None])
        parents = beams.parents
    return _ranking(beams, longest)


def draft_search(arena: Arena, number: int, head: DraftHead, hidden: Tensor, *, width: int) -> Ranking:
    """Return the `width` best items, of set `number` of the arena, that a draft head finds by a beam of this width.

    No pass of the model is needed but the one that gave `hidden`: [batch, L + 1, d], the states of its last layer at
    each prompt's last token and at the L placeholders after it (`huggingface.draft_states`). Scores are the head's
    log-probabilities, and an item's end is none of its tokens; otherwise as `beam_search`, of items of up to L tokens.

    Raises ValueError for another shape, or a width below 1; KeyError for no such set.
    """
    plan = arena.level_plan(number)
    beams = head.beams(arena, [number] * len(hidden), plan, hidden, width=width, k=width)
    return _ranking(beams, head.levels)


def _ranking(beams: Beams, longest: int) -> Ranking:
    found = beams.found
    tokens = pad(found.tokens, (0, longest - found.tokens.shape[2]), value=-1)
    return Ranking(tokens, found.scores.float(), found.scores.isfinite().sum(1))
