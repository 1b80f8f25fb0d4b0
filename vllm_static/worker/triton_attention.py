"""Attention over beams' own tokens, added to that over their prompts: Triton's kernel of `beam_attention`.

One form serves every pass: how many tokens a row has differs between lists and draws, and none compiles in a step.
"""

import triton
import triton.language as tl
from torch import Tensor

KEYS, WARPS = 4, 1  # keys that a program reads at a time; one warp waits for no other, and many fit beside it


_CHANGING = ["sums", "entries", "ancestors", "known", "tokens", "more"]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_CHANGING)
def add_own_kernel(
    output, sums, query, keys, values, own, entries, ancestors, known, scale, cap, tokens, more,
    output_stride, query_stride, keys_stride, values_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):
    """One query token of one head: its row's ancestors, then the row's new tokens up to itself, KEYS at a time, by an
    online softmax that begins with the prompt's part. Of each row's first token it keeps the KV."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, own_head, kv_heads = token // more, head // GROUP, HEADS // GROUP
    size = tl.arange(0, PADDED)
    inside = size < SIZE
    if (token % more == 0) & (head % GROUP == 0):  # no program of this launch reads these entries
        kept = own + (tl.load(entries + row) * kv_heads + own_head) * (2 * SIZE) + size
        tl.store(kept, tl.load(keys + token * keys_stride + own_head * SIZE + size, mask=inside), mask=inside)
        value = tl.load(values + token * values_stride + own_head * SIZE + size, mask=inside)
        tl.store(kept + SIZE, value, mask=inside)
    at = output + token * output_stride + head * SIZE + size
    asked = tl.load(query + token * query_stride + head * SIZE + size, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(sums + head * tokens + token)
    total, added = largest * 0 + 1, tl.load(at, mask=inside, other=0.0).to(tl.float32)
    end = known + token % more + 1
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        old, new = key < known, key < end  # in this order
        entry = tl.load(ancestors + row * known + key, mask=old, other=0)
        kept_at = own + (entry * kv_heads + own_head)[:, None] * (2 * SIZE) + size[None]
        place = (row * more + key - known)[:, None]
        column = own_head * SIZE + size[None]
        keys_at = tl.where(old[:, None], kept_at, keys + place * keys_stride + column)
        values_at = tl.where(old[:, None], kept_at + SIZE, values + place * values_stride + column)
        read = new[:, None] & inside[None]
        key_parts, value_parts = tl.load(keys_at, mask=read, other=0.0), tl.load(values_at, mask=read, other=0.0)
        scores = tl.sum(key_parts.to(tl.float32) * asked[None], 1) * scale
        if cap > 0:
            scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))
        scores = tl.where(new, scores, -float("inf"))
        most = tl.maximum(largest, tl.max(scores, 0))
        parts, faded = tl.exp(scores - most), tl.exp(largest - most)
        added = added * faded + tl.sum(value_parts.to(tl.float32) * parts[:, None], 0)
        total, largest = total * faded + tl.sum(parts, 0), most
    tl.store(at, (added / total).to(output.dtype.element_ty), mask=inside)


def add_own(
    output: Tensor, sums: Tensor, query: Tensor, new: tuple[Tensor, Tensor], own: Tensor, entries: Tensor,
    ancestors: Tensor, scale: float, cap: float,
) -> None:
    """As `beam_attention.add_own`. The last two dimensions of output, query and new must be dense."""
    tokens, heads, size = query.shape
    strides = (output.stride(0), query.stride(0), new[0].stride(0), new[1].stride(0))
    rows, known = ancestors.shape
    add_own_kernel[(tokens, heads)](
        output, sums.contiguous(), query, *new, own, entries, ancestors.contiguous(), known, scale, cap, tokens,
        tokens // rows, *strides, GROUP=heads // own.shape[1], HEADS=heads, SIZE=size,
        PADDED=triton.next_power_of_2(size), KEYS=KEYS, num_warps=WARPS,
    )
