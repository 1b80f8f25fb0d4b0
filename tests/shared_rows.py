"""Attention in two parts, over prompts and over the rows that branch off them, held against a plain softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from devices import DEVICE
from torch import Tensor

BLOCK, HEADS, KV_HEADS, SIZE = 16, 4, 2, 64
ROWS, AT_ONCE, LENGTHS = 2, 3, (5, 32, 71)  # rows of each prompt, and so many of all in a pass
PARENTS = [[0, 0], [1, 0], [1, 1]]


def implementation(backend: str, **options: Any) -> Any:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    kind = TritonAttentionImpl if backend == "TRITON_ATTN" else FlashAttentionImpl
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
    return kind(HEADS, SIZE, 1 / math.sqrt(SIZE), KV_HEADS, **given)


def layer() -> Any:
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    one = torch.nn.Module()
    set_default_quant_scales(one, register_buffer=True)
    return one.to(DEVICE)


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor, cap: float) -> Tensor:
    """In float64: queries [tokens, heads, size] that are the last of the keys, [length, KV heads, size]."""
    more, length = len(query), len(keys)
    keys, values = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / math.sqrt(SIZE)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    later = torch.arange(length, device=DEVICE) > torch.arange(length - more, length, device=DEVICE)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)


class Beams:
    """Rows of random keys and values after prompts of such, in a paged cache, and what each row has seen, in order."""

    def __init__(self, dtype: torch.dtype, heads_first: bool) -> None:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        from vllm_static.kv_branches import Branches, Prompt, scratch_needed

        self.random = torch.Generator(DEVICE).manual_seed(3)
        prompts = [Prompt(str(i), i, length) for i, length in enumerate(LENGTHS)]
        given, needed = 15, scratch_needed(prompts, ROWS, 20, BLOCK)
        shape = (given + needed, KV_HEADS, BLOCK) if heads_first else (given + needed, BLOCK, KV_HEADS)
        cache = torch.full((*shape, 2 * SIZE), 1_000, dtype=dtype, device=DEVICE)
        self.cache = cache if heads_first else cache.transpose(1, 2)
        blocks = torch.randperm(given, generator=torch.Generator().manual_seed(1)).int().view(len(LENGTHS), -1)
        tables = SimpleNamespace(block_sizes=[BLOCK], block_tables=[SimpleNamespace(gpu=blocks.to(DEVICE))])
        runner = SimpleNamespace(
            block_tables=tables,
            device=torch.device(DEVICE),
            attn_groups=[[SimpleNamespace(backend=TritonAttentionBackend)]],  # FlashAttention's cache is the same
            kv_caches=[self.cache],
            kv_cache_config=SimpleNamespace(num_blocks=given + needed),
        )
        self.seen = []
        for table, length in zip(blocks.long().to(DEVICE), LENGTHS, strict=True):
            at = torch.arange(length, device=DEVICE)
            self.seen += [self.put(table[at // BLOCK] * BLOCK + at % BLOCK)] * ROWS
        self.branches = Branches(runner, prompts, ROWS, 20, range(given, given + needed), apart=True)
        self.branches.begin()

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=DEVICE).to(self.cache.dtype)

    def put(self, slots: Tensor) -> Tensor:
        """Fill these slots, and return what they hold: [slots, KV heads, 2 x size]."""
        content = self.draw(len(slots), KV_HEADS, 2 * SIZE)
        self.cache[slots // BLOCK, :, slots % BLOCK] = content
        return content

    def fork(self, parents: Tensor, known: int) -> None:
        self.branches.fork(parents, known)
        rows = (torch.arange(len(LENGTHS), device=DEVICE)[:, None] * ROWS + parents).flatten().tolist()
        self.seen = [self.seen[row] for row in rows]

    def passes(self, known: int, more: int) -> Iterator[tuple[Any, Tensor, list[Tensor]]]:
        """Of each pass over some rows its metadata, its queries, and all that each row has seen."""
        from vllm_static.shared_prefix import shared_prefix

        places = self.branches.at(ROWS, known, more)
        for start in range(0, len(self.seen), AT_ONCE):
            rows = slice(start, min(start + AT_ONCE, len(self.seen)))
            here = places.of(rows)
            for row, slots in zip(range(rows.start, rows.stop), here.slots, strict=True):
                self.seen[row] = torch.cat((self.seen[row], self.put(slots)))
            metadata = shared_prefix(self.branches, ROWS, rows, here)
            yield metadata, self.draw(here.slots.numel(), HEADS, SIZE), self.seen[rows]


def largest_difference(backend: str, dtype: torch.dtype, *, cap: float = 0.0, heads_first: bool = False) -> float:
    """Of any number of all passes, from one in float64. Some begin in the middle of a prompt's rows, and the rows' own
    tokens take two blocks."""
    from vllm_static.shared_prefix import attend

    beams, impl, one = Beams(dtype, heads_first), implementation(backend, logits_soft_cap=cap or None), layer()
    known, largest = 0, 0.0
    for more in (1, 16, 2):
        if known:
            beams.fork(torch.tensor(PARENTS, device=DEVICE), known)
        for metadata, query, seen in beams.passes(known, more):
            output = torch.full_like(query, torch.nan)
            attend(impl, one, query, beams.cache, metadata, output)
            for found, asked, both in zip(output.split(more), query.split(more), seen, strict=True):
                apart = (found - softmax_attention(asked, *both.split(SIZE, -1), cap)).abs().max().item()
                largest = apart if math.isnan(apart) else max(largest, apart)
        known += more
    return largest
