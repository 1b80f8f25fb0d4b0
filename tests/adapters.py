"""LoRA adapters of random weights for the tests with real engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8


def make_adapter(model: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """Write an adapter of a tiny model, and the model with its weights in it, into a folder. Returns both paths."""
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    shutil.copytree(model, merged)
    weights, random, whole = {}, torch.Generator().manual_seed(seed), load_file(merged / "model.safetensors")
    for layer in range(2):
        for name, columns in (("q_proj", 128), ("v_proj", 64)):
            key = f"model.layers.{layer}.self_attn.{name}"
            down, up = (torch.randn(shape, generator=random) / 8 for shape in ((RANK, 128), (columns, RANK)))
            weights |= {f"base_model.model.{key}.{x}.weight": w for x, w in (("lora_A", down), ("lora_B", up))}
            whole[f"{key}.weight"] += up @ down
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    save_file(whole, merged / "model.safetensors", metadata={"format": "pt"})
    return adapter, merged
