"""Part `grid` of `gpu.py`: ranked lists with models of Qwen3's shapes and random weights, by transformers.

The cells are those of NVIDIA's and FlashRec's tables: width by context, three codes an item. A list is the prompt's
pass and two more, in which the prompt's keys and values are read once for all beams. Each is timed
eager, and as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpu_peers import capture, loaded
from gpu_steps import Bench, Emit, note
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import itemset
from itemset.ranking.beams import Beams

CODES, LEVELS, ITEMS = 8_192, 3, 1_000_000
WORDS = 151_936  # the codes come after them
SHAPES = {"0.6B": (1_024, 3_072, 28), "1.7B": (2_048, 6_144, 28), "4B": (2_560, 9_728, 36)}  # hidden, inner, layers
CELLS = [("1.7B", 1_000, 256), ("0.6B", 1_000, 256), ("4B", 1_000, 256)]  # those with published figures come first
CELLS += [(name, context, width) for name in SHAPES for context in (100, 1_000, 4_000) for width in (64, 128, 512)]
TINY = [("tiny", 20, 4)]


def grid(bench: Bench, emit: Emit) -> None:
    """Emit a row for each cell: milliseconds of a list, its passes and rows."""
    words = WORDS if bench.cuda else 1_000
    tokens = np.random.default_rng(0).integers(0, CODES, (ITEMS if bench.cuda else 1_000, LEVELS))
    item_set = itemset.build(tokens + words + np.arange(LEVELS) * CODES)
    (arena, number), models = loaded(item_set, bench.device), dict[str, Any]()
    for name, context, width in CELLS if bench.cuda else TINY:
        if bench.is_late("grid", f"{name}, {context} tokens, width {width}", emit):
            return
        if name not in models:
            models = {name: model_of(name, words + LEVELS * CODES, bench.device)}
        prompt = torch.randint(words, (1, context), device=bench.device)
        passes: list[int] = []

        def search(
            model: Any = models[name], prompt: Tensor = prompt, width: int = width, seen: Any = passes
        ) -> Tensor:
            seen[:] = []
            beams = Beams(
                arena, [number], item_set.level_plan, width=width, k=width, end_token=None, stepwise=True,
                kernels="triton",
            )  # fmt: skip
            for logits in passes_of(model, prompt, beams):
                seen.append(logits.shape[0])
                beams.round(logits)
            return beams.result

        with torch.inference_mode():
            items = search()[0]
            assert (items[:, 1] == LEVELS).all()
            record = {"model": name, "context": context, "width": width, "rows of passes": list(passes)}
            record["eager, ms"] = bench.step([search], graph=False, replays=5) / 1e3
            if bench.cuda:
                try:
                    record["one graph, ms"] = bench.step([search], replays=10) / 1e3
                    assert torch.equal(replayed(search), items)
                except RuntimeError as error:
                    record["one graph, ms"] = str(error).partition("\n")[0]
        note(str(record))
        emit("grid", record)


def model_of(name: str, vocabulary: int, device: str) -> Any:
    hidden, inner, layers = SHAPES.get(name, (64, 128, 2))
    heads = {"heads": 32, "kv": 8} if name == "4B" else {"heads": 16, "kv": 8}
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads["heads"], num_key_value_heads=heads["kv"], head_dim=128 if name in SHAPES else 16,
        tie_word_embeddings=True, max_position_embeddings=8_192, attn_implementation="sdpa",
    )  # fmt: skip
    dtype, torch_device = (torch.bfloat16 if name in SHAPES else torch.float32), torch.device(device)
    torch.set_default_dtype(dtype)
    try:
        with torch_device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def passes_of(model: Any, prompt: Tensor, beams: Beams) -> Iterator[Tensor]:
    """The logits that each round of beams takes, [rows, 1, vocabulary].

    A pass has the own tokens of all beams, one beam after the other in a single row: a mask lets each see the prompt
    and itself. So nothing is copied when beams fork, and the prompt's keys and values are read once.
    """
    out = model(prompt, use_cache=True, logits_to_keep=1)
    cache, context = out.past_key_values, prompt.shape[1]
    yield out.logits
    while beams.passes_left:
        own = beams.tokens[0, : beams.rows, : beams.taken]
        rows, length = own.shape
        at = torch.arange(rows * length, device=own.device)
        sees = (at[:, None] // length == at // length) & (at <= at[:, None])
        mask = torch.nn.functional.pad(sees, (context, 0), value=True)[None, None]
        if kept := cache.get_seq_length() - context:
            cache.crop(-kept)
        hidden = model.model(
            own.reshape(1, -1).clamp(min=0), attention_mask=torch.where(mask, 0.0, -torch.inf).to(out.logits.dtype),
            position_ids=(context + at % length)[None], past_key_values=cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
        yield model.lm_head(hidden.view(rows, length, -1)[:, -1:])


def replayed(search: Any) -> Tensor:
    """What a replay of one graph finds."""
    found: list[Tensor] = []
    replay = capture([lambda: found.append(search())])
    replay()
    return found[-1][0]
