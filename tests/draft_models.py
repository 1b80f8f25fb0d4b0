"""Tiny random draft models for the tiny Llama, and a target with a draft layer of its own, as vLLM loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from models import SMALL, cached, marks_of, tiny_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    Weights = dict[str, Tensor]
    Shapes = dict[str, tuple[int, ...]]

RECIPE = 1  # as `models.RECIPE`


def cached_tiny_eagle(target: Path) -> Path:
    """An EAGLE head for this tiny Llama. Its embeddings and its output layer are the target's."""
    return cached("tiny-eagle", partial(_write_eagle, target), recipe=RECIPE, target=target.name)


def cached_tiny_eagle3(target: Path, draft_vocab_size: int = 506) -> Path:
    """An EAGLE-3 head for this tiny Llama that knows the first so many even tokens.

    It lacks every other token of an item, and the stop token.
    """
    ingredients = {"recipe": RECIPE, "target": target.name, "draft_vocab_size": draft_vocab_size}
    return cached("tiny-eagle3", partial(_write_eagle3, target, draft_vocab_size), **ingredients)


def cached_tiny_mimo(vocab_size: int = 2112) -> Path:
    """A two-layer MiMo, which is a Qwen2 with an MTP layer behind it. Its tokenizer is the tiny Llama's."""
    return cached("tiny-mimo", partial(_write_mimo, vocab_size), recipe=RECIPE, vocab_size=vocab_size)


def _write_eagle(target: Path, directory: Path) -> None:
    config = head_config(target)
    hidden = config.hidden_size
    shapes = _layer("layers.0", config) | {"fc.weight": (hidden, 2 * hidden)}
    del shapes["layers.0.input_layernorm.weight"]  # vLLM leaves it out of an EAGLE head
    save(directory, config, _random(shapes))


def _write_eagle3(target: Path, draft_vocab_size: int, directory: Path) -> None:
    import torch

    # vLLM's default for the layers that the head reads, up to the third from the end, is meant for deeper targets.
    read = [1, 2]
    config = head_config(target)
    config.draft_vocab_size, config.eagle_aux_hidden_state_layer_ids = draft_vocab_size, read
    config.num_aux_hidden_states = len(read)
    hidden = config.hidden_size
    shapes = _layer("midlayer", config, attended=2 * hidden) | {
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "fc.weight": (hidden, len(read) * hidden),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    # What to add to a draft token for the target's.
    save(directory, config, _random(shapes) | {"d2t": torch.arange(draft_vocab_size)})


def _write_mimo(vocab_size: int, directory: Path) -> None:
    from transformers import Qwen2Config

    tokenizer = tiny_tokenizer()
    own = {"architectures": ["MiMoForCausalLM"], "vocab_size": vocab_size, "num_nextn_predict_layers": 1}
    config = Qwen2Config(**own, **SMALL, **marks_of(tokenizer))
    hidden, mtp = config.hidden_size, "model.mtp_layers.0"
    shapes: Shapes = {f"{name}.weight": (vocab_size, hidden) for name in ("model.embed_tokens", "lm_head")}
    for layer in ("model.layers.0", "model.layers.1", mtp):
        shapes |= _layer(layer, config)
        shapes |= {f"{layer}.self_attn.{name}_proj.bias": (width,) for name, width in _attention(config).items()}
    shapes |= {f"{mtp}.{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
    shapes |= {f"{mtp}.input_proj.weight": (hidden, 2 * hidden), "model.norm.weight": (hidden,)}
    save(directory, config, _random(shapes))
    tokenizer.save_pretrained(directory)


def head_config(target: Path) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(target, num_hidden_layers=1)


def _layer(name: str, config: PretrainedConfig, attended: int | None = None) -> Shapes:
    """A decoder layer's weights. attended: the width of what its attention reads."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = _attention(config)
    shapes: Shapes = {
        f"{name}.self_attn.{projection}_proj.weight": (width, attended or hidden)
        for projection, width in attention.items()
    }
    return shapes | {
        f"{name}.self_attn.o_proj.weight": (hidden, attention["q"]),
        f"{name}.mlp.gate_proj.weight": (inner, hidden),
        f"{name}.mlp.up_proj.weight": (inner, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, inner),
        f"{name}.input_layernorm.weight": (hidden,),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def _attention(config: PretrainedConfig) -> dict[str, int]:
    key = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return {"q": config.hidden_size, "k": key, "v": key}


def _random(shapes: Shapes) -> Weights:
    """Small random weights, as transformers would choose them; norms are 1 and biases 0."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weights: Weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 0.02
    return weights


def save(directory: Path, config: PretrainedConfig, weights: Weights) -> None:
    from safetensors.torch import save_file

    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
