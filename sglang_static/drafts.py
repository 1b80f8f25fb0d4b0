"""Verification of draft trees: masked in one walk over the tree on the device, and walked by what it accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_static import processor


def eagle_sample(
    original: Callable[..., Any], verify: Any, batch: Any, output: Any, grammar_mask: Any = None, *args: Any, **kw: Any
) -> Any:
    """EAGLE, STANDALONE, NGRAM and their kin verify here. Nothing has to be rolled back: rejected drafts were never
    taken."""
    sampler = processor.current()
    if sampler is None or batch.forward_mode.is_idle() or not sampler.constrains(batch):
        return original(verify, batch, output, grammar_mask, *args, **kw)
    mask = sampler.tree_mask(verify, batch, grammar_mask)
    predict, lengths, indices = original(verify, batch, output, mask, *args, **kw)
    sampler.accept(batch, predict[indices.long()], lengths)
    return predict, lengths, indices


def verify_coins(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A draft is accepted where its coin is not above its probability: for one outside the set that is zero, and so
    may be a coin, once in 2^24 times."""
    coins, final = original(*args, **kwargs)
    return coins.clamp(min=1e-9), final
