"""The oracle of ranked lists: every item scored by the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

EOS = 1
PROMPT = [7, 8, 9]
Ranked = list[tuple[float, tuple[int, ...]]]


def oracle_of(checkpoint: Path, prompt: Sequence[int] = PROMPT) -> Callable[[Iterable[tuple[int, ...]]], Ranked]:
    """A function of items: each with its score behind the prompt, its end token included, best first."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # idle engines keep the other cores busy, and a pair of threads would wait for each other
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    @torch.inference_mode()
    def ranked(items: Iterable[tuple[int, ...]]) -> Ranked:
        scored = []
        for item in items:
            tokens = torch.tensor([[*prompt, *item, EOS]])
            log_probs = model(tokens).logits[0].double().log_softmax(-1)
            wanted = tokens[0, len(prompt) :]
            scored.append((float(log_probs[len(prompt) - 1 : -1].gather(1, wanted[:, None]).sum()), tuple(item)))
        return sorted(scored, reverse=True)

    return ranked
