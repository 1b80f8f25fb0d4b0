"""A trained EAGLE-3 head for the retrieval example's model, as vLLM loads it: what `paper_tensorrt.py` drafts with.

One decoder layer that sees the token just chosen and what the target's layers made of the tokens before it. It learns
with its own outputs in place of the target's, too, as many passes as it will draft ("training-time test").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from draft_models import head_config, save
from torch import Tensor, nn
from torch.nn.functional import kl_div, scaled_dot_product_attention

STEPS, BATCH, RATE = 400, 32, 3e-3


class Head(nn.Module):
    """The parameters have the names that vLLM's `Eagle3LlamaForCausalLM` loads."""

    def __init__(self, target: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        config, self.layers = target.config, target.config.num_hidden_layers
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.midlayer = LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * hidden, hidden, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.norm, self.fc = LlamaRMSNorm(hidden, eps), nn.Linear(self.layers * hidden, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight.data)
        self._rotary, self._embed, self._heads = LlamaRotaryEmbedding(config), [target.model.embed_tokens], hidden // 32

    def forward(self, tokens: Tensor, hidden: Tensor, keys: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of all places. tokens, hidden: [rows, places], [rows, places, d], of the place after
        and up to it. keys: of the passes before this one; of each, a place sees itself alone but for the first."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        layer, attention, places = self.midlayer, self.midlayer.self_attn, tokens.shape[1]
        states = torch.cat((layer.input_layernorm(self._embed[0](tokens)), layer.hidden_norm(hidden)), -1)
        shape = (*tokens.shape, self._heads, -1)
        q, k, v = (getattr(attention, f"{n}_proj")(states).view(shape).transpose(1, 2) for n in "qkv")
        shifted = torch.arange(places)[None] + len(keys) // 2  # each pass drafts for the place after
        q, k = apply_rotary_pos_emb(q, k, *self._rotary(states, shifted))
        keys += [k, v]
        sees = torch.cat([torch.ones(places, places).tril(), *[torch.eye(places)] * (len(keys) // 2 - 1)], 1).bool()
        mixed = scaled_dot_product_attention(q, torch.cat(keys[::2], 2), torch.cat(keys[1::2], 2), attn_mask=sees)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden)), hidden


def train(target_folder: Path, windows: Sequence[Sequence[int]], folder: Path, drafted: int, steps: int = STEPS) -> str:
    """Teach a head what the target says of windows of tokens, all as long; return its folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    chance, target = random.Random(0), AutoModelForCausalLM.from_pretrained(target_folder).eval().requires_grad_(False)
    outputs: dict[int, Tensor] = {}
    for i, layer in enumerate(target.model.layers):  # before the last norm
        layer.register_forward_hook(
            lambda _, __, out, i=i: outputs.update({i: out[0] if isinstance(out, tuple) else out})
        )
    head = Head(target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        tokens = torch.tensor(chance.choices(windows, k=BATCH))
        said = target(tokens).logits.log_softmax(-1)
        hidden, keys, loss = head.fc(torch.cat([outputs[i] for i in range(head.layers)], -1)), list[Tensor](), 0.0
        for ahead in range(1, drafted + 1):  # a place's first draft is two tokens after it
            following = tokens.roll(-ahead, 1)
            logits, hidden = head(following, hidden, keys)
            kept = slice(0, tokens.shape[1] - ahead - 1)
            truth = said.roll(-ahead, 1)[:, kept]
            loss = (
                loss
                + 0.8 ** (ahead - 1)
                * kl_div(logits[:, kept].log_softmax(-1), truth, reduction="batchmean", log_target=True)
                / truth.shape[1]
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    config = head_config(target_folder)
    config.draft_vocab_size, config.num_aux_hidden_states = config.vocab_size, head.layers
    config.eagle_aux_hidden_state_layer_ids, config.tie_word_embeddings = list(range(1, head.layers + 1)), False
    save(folder, config, {name: value.contiguous() for name, value in head.state_dict().items()})
    return str(folder)
