"""Attention of rows that branch off prompts, held against a plain softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from devices import DEVICE
from torch import Tensor

BLOCK, HEADS, KV_HEADS, SIZE = 32, 4, 2, 64
ROWS, AT_ONCE, LENGTHS = 2, 3, (5, 64, 71)  # rows of each prompt; of all prompts in a pass; tokens of each prompt
PARENTS = [[0, 0], [1, 0], [1, 1]]
GIVEN, OURS = 12, 4  # blocks of the prompts, and those of beams' entries


def implementation(backend: str, **options: Any) -> Any:
    """An attention implementation of vLLM's, as it stands in a layer."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float32)  # which a CPU's asks for
    with set_current_vllm_config(config):
        return (
            AttentionBackendEnum[backend]
            .get_class()
            .get_impl_cls()(HEADS, SIZE, 1 / math.sqrt(SIZE), KV_HEADS, **given)
        )


def layer_of(impl: Any) -> Any:
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    one = torch.nn.Module()
    set_default_quant_scales(one, register_buffer=True)
    one.impl, one.isa = impl, "vec"
    return one.to(DEVICE)


def softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, cap: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """In float64: queries [tokens, heads, size] that are the last of the keys, [length, KV heads, size]."""
    more, length = len(query), len(keys)
    keys, values = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / math.sqrt(SIZE)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    before = torch.arange(length - more, length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
    scores = scores.masked_fill((before < 0) | (before >= (window or length)), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, more, -1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values)


class Beams:
    """Rows of random keys and values after prompts of such, and what each row has seen, in order."""

    def __init__(self, layer: Any, dtype: torch.dtype, heads_first: bool) -> None:
        from vllm_static.worker.beam_kv import BeamKV, Prompt

        self.random, self.dtype = torch.Generator(DEVICE).manual_seed(3), dtype
        shape = (GIVEN + OURS, KV_HEADS, BLOCK) if heads_first else (GIVEN + OURS, BLOCK, KV_HEADS)
        kept = torch.float8_e4m3fn if layer.impl.kv_cache_dtype == "fp8" else dtype
        cache = torch.full((*shape, 2 * SIZE), 400, device=DEVICE).to(kept)
        self.cache = cache if heads_first else cache.transpose(1, 2)
        blocks = torch.randperm(GIVEN, generator=torch.Generator().manual_seed(1)).int().view(len(LENGTHS), -1)
        tables = SimpleNamespace(block_sizes=[BLOCK], block_tables=[SimpleNamespace(gpu=blocks.to(DEVICE))])
        cache_config = SimpleNamespace(num_blocks=GIVEN + OURS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
        runner = SimpleNamespace(block_tables=tables, kv_cache_config=cache_config, device=torch.device(DEVICE))
        runner.model_state = SimpleNamespace(rope_state=None)
        self.seen = []
        for table, length in zip(blocks.long().to(DEVICE), LENGTHS, strict=True):
            at, content = torch.arange(length, device=DEVICE), self.draw(length, KV_HEADS, 2 * SIZE).to(kept)
            slots = table[at // BLOCK] * BLOCK + at % BLOCK
            if type(layer.impl).__name__.startswith("CPU"):  # whose cache is packed
                layer.impl.do_kv_cache_update(layer, *self.halves(content), self.cache, slots)
            else:
                self.cache[slots // BLOCK, :, slots % BLOCK] = content
            self.seen += [content.to(dtype)] * ROWS
        prompts = [Prompt(str(i), i, length) for i, length in enumerate(LENGTHS)]
        self.kv = BeamKV(runner, prompts, GIVEN)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=DEVICE).to(self.dtype)

    def halves(self, content: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = content.split(SIZE, -1)
        return keys.contiguous(), values.contiguous()

    def fork(self, parents: Tensor, known: int) -> None:
        """Of what rows have seen, `known` tokens after the prompt stay."""
        self.kv.fork(parents, known)
        rows = (torch.arange(len(LENGTHS), device=DEVICE)[:, None] * ROWS + parents).flatten().tolist()
        self.seen = [self.seen[row][: LENGTHS[row // ROWS] + known] for row in rows]

    def passes(self, more: int) -> Iterator[tuple[Any, Tensor, Tensor, list[Tensor]]]:
        """Of each pass over some rows its metadata, its queries, its own keys and values, and all that each row has
        seen."""
        for start in range(0, len(self.seen), AT_ONCE):
            rows = slice(start, min(start + AT_ONCE, len(self.seen)))
            content = self.draw((rows.stop - rows.start) * more, KV_HEADS, 2 * SIZE)
            for row, own in zip(range(rows.start, rows.stop), content.split(more), strict=True):
                self.seen[row] = torch.cat((self.seen[row], own))
            (metadata,) = self.kv.metadata(rows, more)
            yield metadata, self.draw(len(content), HEADS, SIZE), content, self.seen[rows]
        self.kv.grow()


def largest_difference(
    backend: str,
    dtype: torch.dtype,
    *,
    cap: float = 0.0,
    heads_first: bool = False,
    cache: str = "auto",
    window: int | None = None,
    sinks: Tensor | None = None,
) -> float:
    """Of any number of all passes, from one in float64. Some begin in the middle of a prompt's rows, and of the second
    one's tokens only the first has heirs."""
    from vllm_static.worker.beam_attention import attend

    given = {"kv_cache_dtype": cache, "sliding_window": window, "sinks": sinks}
    layer = layer_of(implementation(backend, logits_soft_cap=cap or None, **given))
    beams = Beams(layer, dtype, heads_first)
    known, largest = 0, 0.0
    for more in (1, 20, 2, 1):
        beams.fork(torch.tensor(PARENTS, device=DEVICE), known)
        for metadata, query, content, seen in beams.passes(more):
            output = torch.full_like(query, torch.nan)
            attend(layer, query, beams.halves(content), beams.cache, metadata, output)
            for found, asked, both in zip(output.split(more), query.split(more), seen, strict=True):
                apart = (found - softmax_attention(asked, *both.split(SIZE, -1), cap, window, sinks)).abs().max().item()
                largest = apart if math.isnan(apart) else max(largest, apart)
        known += 1
    assert beams.kv.used == len(LENGTHS) * ROWS * known
    return largest
