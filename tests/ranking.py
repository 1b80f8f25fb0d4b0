"""The oracles of ranked lists and of weights: every item scored by the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch
from engine_words import EOS, PROMPT, Item, Ranked


def oracle_of(checkpoint: Path, prompt: Sequence[int] = PROMPT) -> Callable[[Iterable[Item]], Ranked]:
    """A function of items: each with its score behind the prompt, its end token included, best first."""
    log_probs_of = _log_probs_of(checkpoint, prompt)

    def ranked(items: Iterable[Item]) -> Ranked:
        scored = []
        for item in items:
            wanted = torch.tensor([*item, EOS])
            scored.append((float(log_probs_of(item).gather(1, wanted[:, None]).sum()), tuple(item)))
        return sorted(scored, reverse=True)

    return ranked


def weights_of(
    checkpoint: Path, prompt: Sequence[int] = PROMPT
) -> Callable[[Collection[Item], Item], tuple[float, float]]:
    """A function of a set and one of its items: the item's weight, the sum of the logarithms of the legal mass along
    it, and its log-probability, the end token's step included in both."""
    log_probs_of = _log_probs_of(checkpoint, prompt)

    def weighed(items: Collection[Item], item: Item) -> tuple[float, float]:
        weight = score = 0.0
        for i, log_probs in enumerate(log_probs_of(item)):
            before = item[:i]
            legal = {(*other, EOS)[i] for other in items if other[:i] == before}
            weight += float(log_probs[sorted(legal)].logsumexp(0))
            score += float(log_probs[(*item, EOS)[i]])
        return weight, score

    return weighed


def _log_probs_of(checkpoint: Path, prompt: Sequence[int]) -> Callable[[Item], torch.Tensor]:
    """A function of an item: the log-probabilities of all tokens at its tokens and after them, float64."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # idle engines keep the other cores busy, and a pair of threads would wait for each other
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    @torch.inference_mode()
    def log_probs(item: Item) -> torch.Tensor:
        rows = model(torch.tensor([[*prompt, *item]])).logits[0, len(prompt) - 1 :]
        return rows.double().log_softmax(-1)

    return log_probs
