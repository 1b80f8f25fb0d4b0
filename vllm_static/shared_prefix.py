"""Passes that read each prompt's KV once for all rows that branch off it, not once a row.

A layer's attention runs in two parts, each with its log-sum-exp: all rows of a prompt as one sequence over the prompt,
without a causal mask, since every row comes after it; and each row over its own tokens. vLLM's `merge_attn_states` adds
them up, as for its former cascade attention. The layers know such a pass by its metadata, of a type of its own: any
other step goes to the backend's own `forward`, untouched. Recorded full CUDA graphs hold that one, so such a pass is in
none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_static.kv_branches import Branches, Places

SEGMENTS = 8  # in which programs of Triton's kernel go through a prompt, if there are few queries
MANY = 1 << 13  # queries times heads: this many fill a GPU with programs as they are

Scratch = dict[tuple[int, ...], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Part:
    """Sequences of query tokens, one after another, and the paged KV that each of them reads.

    starts: [sequences + 1] int32, each one's first query token, and the end. lengths: [sequences] int32, keys of each.
    tables: [sequences, blocks] int32. most_queries, most_keys: of any sequence. causal: the queries are the last of the
    keys. long: whether the keys may be worth several programs; of one part of a pass at most.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    most_queries: int
    most_keys: int
    causal: bool
    long: bool


@dataclass(frozen=True)
class SharedPrefix:
    """A pass's attention metadata. tokens: of all rows, without padding. scratch: of `_segments`, for all layers."""

    tokens: int
    prompts: Part
    rows: Part
    scratch: Scratch = field(default_factory=dict)


def shared_prefix(branches: Branches, each: int, rows: slice, places: Places) -> SharedPrefix:
    """Return what a pass over some rows of `branches` tells its layers. Reads nothing back.

    branches: with their prompts apart. each: rows of a prompt. rows: those of the pass, counted over all prompts.
    places: of their next tokens.
    """
    count, more = places.positions.shape
    first, last = rows.start // each, -(-rows.stop // each)  # prompts
    device, some = places.slots.device, slice(first, last)
    starts = torch.arange(first, last + 1, device=device).mul_(each).sub_(rows.start).clamp_(0, count).mul_(more)
    prompts = Part(
        starts.int(),
        branches.prompt_lengths[some].int(),
        branches.prompt_tables[some],
        min(each, count) * more,
        int(branches.lengths[some].max()),
        causal=False,
        long=True,
    )
    own = Part(
        torch.arange(0, count * more + 1, more, dtype=torch.int32, device=device),
        places.ends.int(),
        places.tables,
        more,
        int(places.before.max()) + more,
        causal=more > 1,
        long=False,
    )
    return SharedPrefix(count * more, prompts, own)


def why_not(runner: Any) -> str | None:
    """Return what keeps this engine's attention from the two parts; None if nothing is known to."""
    fast_prefill = runner.vllm_config.cache_config.kv_sharing_fast_prefill
    reasons = {
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        "fast prefill, whose models look into the metadata": fast_prefill,
        "a window after the prompt": getattr(runner.model_config, "rswa_window", None) is not None,
    }
    of_layers = filter(None, (_why_not(layer.impl) for layer in _layers(runner)))
    return next(filter(reasons.get, reasons), None) or next(of_layers, None)


def _why_not(impl: Any) -> str | None:
    name = type(impl).__name__
    if name not in _ATTEND:
        return f"layers of {name}"
    reasons = {
        "a sliding window": impl.sliding_window != (-1, -1),
        "ALiBi, which goes by the distance of query and key": impl.alibi_slopes is not None,
        "attention sinks, which both parts would count": impl.sinks is not None,
        f"a KV cache of {impl.kv_cache_dtype}": impl.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
        "attention that is not a decoder's": impl.attn_type != "decoder",
        "FlashAttention's kernel for heads of 256": getattr(impl, "fa4_hd256", False),
        "an unknown version of FlashAttention": getattr(impl, "vllm_flash_attn_version", 0) is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def install(runner: Any) -> None:
    """Let the layers of the runner's model understand `SharedPrefix`. To be called if `why_not` returns None."""
    for layer in _layers(runner):
        layer.impl.forward = _with_shared_prefix(layer.impl)


def layer_names(runner: Any) -> list[str]:
    return [name for groups in runner.attn_groups for group in groups for name in group.layer_names]


def _layers(runner: Any) -> list[Any]:
    return list(get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase, layer_names(runner)).values())


def _with_shared_prefix(impl: Any) -> Callable[..., Tensor]:
    """What takes the place of an attention implementation's `forward`. The tokens' own KV is in the cache already."""
    original: Callable[..., Tensor] = impl.forward

    def forward(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if type(attn_metadata) is not SharedPrefix:
            return original(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if any(scale is not None for scale in (*args, *kwargs.values())):
            raise NotImplementedError("attention that quantises its output")
        attend(impl, layer, query[: attn_metadata.tokens], kv_cache, attn_metadata, output[: attn_metadata.tokens])
        return output

    return forward


def attend(impl: Any, layer: Any, query: Tensor, kv_cache: Tensor, shared: SharedPrefix, output: Tensor) -> None:
    """Fill `output` with the attention of `query` over both parts.

    impl, layer: an attention layer's implementation, and itself. query, output: [tokens, heads, size]. kv_cache:
    [blocks, KV heads, tokens of a block, 2 x size], keys first.
    """
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    if kv_cache.ndim != 4 or kv_cache.shape[-1] != 2 * impl.head_size:
        raise NotImplementedError(f"a KV cache of the shape {tuple(kv_cache.shape)}")
    keys, values = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    one = _ATTEND[type(impl).__name__]
    prompts, prompt_sums = one(impl, layer, query, keys, values, shared.prompts, shared.scratch)
    rows, row_sums = one(impl, layer, query, keys, values, shared.rows, shared.scratch)
    merge_attn_states(output, prompts, prompt_sums, rows, row_sums)


def _of_part(impl: Any, part: Part) -> dict[str, Any]:
    """Arguments that both kernels call alike."""
    lengths = {"cu_seqlens_q": part.starts, "seqused_k": part.lengths, "max_seqlen_k": part.most_keys}
    options = {"softmax_scale": impl.scale, "softcap": impl.logits_soft_cap, "causal": part.causal}
    return {**lengths, **options, "block_table": part.tables}


def _by_flash(
    impl: Any, layer: Any, query: Tensor, keys: Tensor, values: Tensor, part: Part, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Attention [tokens, heads, size] and its log-sum-exp [heads, tokens], as in `FlashAttentionImpl.forward`."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    result: tuple[Tensor, Tensor] = flash_attn_varlen_func(
        q=query,
        k=canonicalize_singleton_dim_strides(keys),
        v=canonicalize_singleton_dim_strides(values),
        max_seqlen_q=part.most_queries,
        window_size=[-1, -1],
        **_of_part(impl, part),
        return_softmax_lse=True,
        fa_version=impl.vllm_flash_attn_version,
    )
    return result


def _by_triton(
    impl: Any, layer: Any, query: Tensor, keys: Tensor, values: Tensor, part: Part, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """The same, as in `TritonAttentionImpl.forward`. The kernel that goes through the keys in segments leaves the
    largest score of each, and the sum of exponentials."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    output, (sums, largest, exponentials) = torch.empty_like(query), _segments(query, part, scratch)
    unified_attention(
        q=query,
        k=keys,
        v=values,
        out=output,
        max_seqlen_q=1,  # by which that kernel is chosen; it takes any number of queries
        window_size=(-1, -1),
        **_of_part(impl, part),
        q_descale=None,
        k_descale=layer._k_scale,
        v_descale=layer._v_scale,
        seq_threshold_3D=len(part.lengths),
        num_par_softmax_segments=largest.shape[-1],
        softmax_segm_output=sums,
        softmax_segm_max=largest,
        softmax_segm_expsum=exponentials,
    )
    return output, (exponentials.log() + largest).logsumexp(-1).t().contiguous()


_ATTEND = {"FlashAttentionImpl": _by_flash, "TritonAttentionImpl": _by_triton}


def _segments(query: Tensor, part: Part, scratch: Scratch) -> tuple[Tensor, ...]:
    """What that kernel writes of each segment, float32: the values' sums, [tokens, heads, segments, padded size], and
    twice [tokens, heads, segments]. It leaves those after the last key as they are, in all layers of a pass."""
    tokens, heads, size = query.shape
    count = SEGMENTS if part.long and tokens * heads < MANY else 1
    shape = (tokens, heads, count)
    if (heads, size, count) not in scratch:
        scratch[heads, size, count] = (
            query.new_empty((*shape, 1 << (size - 1).bit_length()), dtype=torch.float32),
            query.new_full(shape, -torch.inf, dtype=torch.float32),
            query.new_zeros(shape, dtype=torch.float32),
        )
    return scratch[heads, size, count]
