"""The tiny EAGLE heads of `draft_models`, as SGLang loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from draft_models import cached_tiny_eagle, cached_tiny_eagle3
from models import cached

RECIPE = 1  # as `models.RECIPE`

EVEN = range(0, 1012, 2)
"""The tokens that the EAGLE-3 head knows: the stop token is none of them."""


def cached_sglang_eagle(target: Path) -> Path:
    """An EAGLE head for this tiny Llama. Its embeddings and its output layer are the target's."""
    return _cached(cached_tiny_eagle(target), "LlamaForCausalLMEagle")


def cached_sglang_eagle3(target: Path) -> Path:
    """An EAGLE-3 head for this tiny Llama that knows the tokens in `EVEN`."""
    return _cached(cached_tiny_eagle3(target, draft_vocab_size=len(EVEN)), "LlamaForCausalLMEagle3")


def token_map(path: Path) -> Path:
    """Write a file for `speculative_token_map`, which leaves a head the tokens in `EVEN`."""
    import torch

    torch.save(list(EVEN), path)
    return path


def _cached(head: Path, architecture: str) -> Path:
    return cached(f"sglang-{head.name}", partial(_adapt, head, architecture), recipe=RECIPE)


def _adapt(head: Path, architecture: str, directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig

    # SGLang has a layer's number for what comes out of it: -1 for the embeddings, which vLLM has as 0. It reads no
    # output of a last layer.
    read = {"eagle_aux_hidden_state_layer_ids": [-1, 0]}
    config = LlamaConfig.from_pretrained(head, architectures=[architecture], eagle_config=read)
    # In SGLang this layer has a bias in EAGLE and none in EAGLE-3, and what a checkpoint lacks stays uninitialised.
    weights = load_file(head / "model.safetensors") | {"fc.bias": torch.zeros(config.hidden_size)}
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
