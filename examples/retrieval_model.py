"""The retrieval example's model: a small Llama that has learnt which film's semantic ID comes next."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from films_data import emptied
from numpy.typing import NDArray

MEMORY = 20  # films of a user that the model looks back on
STEPS, BATCH = 1_500, 48
TOLD_SECONDS = 5
# 0.9 MB: weights in float16, semantic IDs. `bootstrap.py retrieval --train` leaves one in .cache/retrieval-trained.
SHIPPED = Path(__file__).with_name("retrieval.safetensors")


def text_of(code: Sequence[int]) -> str:
    """Return a semantic ID as the tokenizer reads it: "<a_17><b_3><c_60><d_0>"."""
    return "".join(f"<{level}_{value}>" for level, value in zip("abcd", code, strict=True))


def make_tokenizer(codes: NDArray[Any]) -> Any:
    """Make a tokenizer with one token for each code of each level, and an end token."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = Tokenizer(WordLevel(special, unk_token="<unk>"))
    words.decoder = decoders.Fuse()  # no space between codes: what a server answers is the item's text again
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
    codewords = [
        f"<{level}_{value}>" for level, top in zip("abcd", codes.max(0), strict=True) for value in range(top + 1)
    ]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in codewords])
    return tokenizer


def tokens_of(watched: Sequence[int], encoded: dict[int, list[int]], end: int) -> list[int]:
    """Return a user's films as the model reads them: an end token after each."""
    return [token for film in watched for token in (*encoded[film], end)]


def train(
    histories: Sequence[Sequence[int]], encoded: dict[int, list[int]], tokenizer: Any, folder: Path, **shape: int
) -> None:
    """Teach a fresh model the films of `histories` in their order, and save it with its tokenizer.

    encoded: each film's tokens by its key. shape: another `size` of the model, or number of `layers`.
    """
    import torch

    torch.manual_seed(0)
    chance = random.Random(0)
    model = _fresh(tokenizer, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    long_enough = [watched for watched in histories if len(watched) > MEMORY]
    started = told = time.monotonic()
    for step in range(STEPS):
        windows = []
        for watched in chance.choices(long_enough, weights=list(map(len, long_enough)), k=BATCH):
            first = chance.randrange(len(watched) - MEMORY)
            windows.append(tokens_of(watched[first : first + MEMORY + 1], encoded, tokenizer.eos_token_id))
        batch = torch.tensor(windows)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if time.monotonic() - told >= TOLD_SECONDS or step + 1 == STEPS:
            told = time.monotonic()
            left = (told - started) * (STEPS / (step + 1) - 1)
            print(f"  step {step + 1} of {STEPS}: loss {loss.item():.2f}, about {left:.0f} s left", flush=True)
    _save(model, tokenizer, folder)


def pack(folder: Path, codes: NDArray[Any], path: Path) -> None:
    """Write a model that `train` has saved, and the semantic IDs that it has learnt, into a file such as `SHIPPED`."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({"semantic_ids": codes.astype(np.uint8)} | {k: v.astype(np.float16) for k, v in weights.items()}, path)


def shipped_ids() -> NDArray[Any]:
    """Return the films' semantic IDs that the model in `SHIPPED` knows: [films, codes], in the order of the titles."""
    from safetensors import safe_open

    with safe_open(SHIPPED, "numpy") as file:
        codes: NDArray[Any] = file.get_tensor("semantic_ids")
    return codes.astype(np.int64)


def unpack(tokenizer: Any, folder: Path) -> None:
    """Save the model in `SHIPPED` with its tokenizer, as `train` does."""
    from safetensors.torch import load_file

    model, weights = _fresh(tokenizer), load_file(SHIPPED)
    del weights["semantic_ids"]
    model.load_state_dict({"lm_head.weight": weights["model.embed_tokens.weight"], **weights})  # tied
    _save(model, tokenizer, folder)


def _fresh(tokenizer: Any, size: int = 128, layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=layers,
        num_attention_heads=size // 32,
        num_key_value_heads=size // 32,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    unfinished = emptied(folder.with_suffix(".unfinished"))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
