"""The tiny EAGLE heads of `draft_models`, as SGLang loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from draft_models import cached_tiny_eagle, cached_tiny_eagle3
from models import cached

RECIPE = 1  # as `models.RECIPE`


def cached_sglang_eagle(target: Path) -> Path:
    """An EAGLE head for this tiny Llama. Its embeddings and its output layer are the target's."""
    return _adapted(cached_tiny_eagle(target), "LlamaForCausalLMEagle")


def cached_sglang_eagle3(target: Path) -> Path:
    """An EAGLE-3 head for this tiny Llama that knows the even tokens up to 1010: no other, and no stop token."""
    return _adapted(cached_tiny_eagle3(target), "LlamaForCausalLMEagle3")


def _adapted(head: Path, architecture: str) -> Path:
    return cached(f"sglang-{head.name}", partial(_adapt, head, architecture), recipe=RECIPE)


def _adapt(head: Path, architecture: str, directory: Path) -> None:
    """Name SGLang's class, the layers that the head reads as SGLang counts them, and a bias that it expects."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig

    # A target's layer is named by what comes out of it: of layer 0, and, as -1, of the embeddings.
    read = {"eagle_aux_hidden_state_layer_ids": [-1, 0]}
    config = LlamaConfig.from_pretrained(head, architectures=[architecture], eagle_config=read)
    weights = load_file(head / "model.safetensors")
    weights["fc.bias"] = torch.zeros(config.hidden_size)  # SGLang's EAGLE has one, its EAGLE-3 leaves it out
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
