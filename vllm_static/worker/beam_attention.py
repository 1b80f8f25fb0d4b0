"""Attention of passes whose rows branch off prompts: each prompt's KV is read once for all of its rows.

A layer's attention runs in two parts: all rows of a prompt as one sequence over the prompt, without a causal mask, with
its log-sum-exp; then each row over its own tokens, which lie apart (`beam_kv`). The layers know such a pass by its
metadata, of a type of its own. Any other step, and so a full CUDA graph, has the backend's own `forward`, untouched.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform

from itemset.serving.config import StaticConfig
from vllm_static.worker.beam_kv import BeamMetadata, memory_of

SEGMENTS = 8  # in which programs of Triton's kernel go through a prompt, if there are few queries
MANY = 1 << 13  # queries times heads: this many fill a GPU with programs as they are
TOLERANCE = 0.05  # of an attention of numbers around 1: what 16 bits may make of another order of adding
FP8 = ("fp8", "fp8_e4m3")  # types of a KV cache whose prompts the engine's kernels read with its scales
CAPPED = 256  # queries whose scores a CPU has at a time, if they have a soft cap
FP8_TOLERANCE = 0.25  # where kernels round probabilities to 8 bits


def install(runner: Any) -> str | None:
    """Let the layers of the runner's model understand `BeamMetadata`, or return why they cannot. Raises
    NotImplementedError for some of the reasons."""
    groups, layers = layer_groups(runner), layers_of(runner)
    impls = [layer.impl for layer in layers.values()]
    fast_prefill = runner.vllm_config.cache_config.kv_sharing_fast_prefill
    reasons = {
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        "fast prefill, whose models look into the metadata": fast_prefill,
        "a window after the prompt": getattr(runner.model_config, "rswa_window", None) is not None,
    }
    of_layers = filter(None, map(why_not, impls))
    if reason := next(filter(reasons.get, reasons), None) or next(of_layers, None) or _untried(runner, impls):
        return f"attention cannot read prompts once for all beams: {reason}"
    for name, layer in layers.items():
        blocks, _, tokens, _ = layer.kv_cache.shape
        if (blocks, tokens) != (runner.kv_cache_config.num_blocks, runner.block_tables.block_sizes[groups[name]]):
            raise NotImplementedError("a KV cache whose blocks are split for attention")
        fp8 = layer.impl.kv_cache_dtype in FP8
        if layer.kv_cache.itemsize != 1 if fp8 else layer.kv_cache.dtype != runner.dtype:
            raise NotImplementedError(f"a KV cache of {layer.kv_cache.dtype}")
        if fp8 and max(layer._q_scale.numel(), layer._k_scale.numel(), layer._v_scale.numel()) > 1:
            raise NotImplementedError("a KV cache with a scale for each head")
        most = FP8_TOLERANCE if fp8 else TOLERANCE
        for segments in (SEGMENTS, 1) if _PROMPT[type(layer.impl).__name__] is _by_triton else (0,):
            if not largest_difference(layer, runner.dtype, segments) <= most:  # nor if it is not a number
                return f"attention that reads prompts once for all beams gives other numbers: {type(layer.impl)}"
        layer.impl.forward = _with_beams(layer.impl)
    return None


def _untried(runner: Any, impls: list[Any]) -> str | None:
    """Return with what this has run on no GPU yet, None if `ranked_list_beams` asks for it all the same."""
    untried = {
        "a KV cache of 8 bits": any(impl.kv_cache_dtype in FP8 for impl in impls),
        "FlashInfer": any(type(impl).__name__ == "FlashInferImpl" for impl in impls),
        "sliding windows": any(map(window_of, impls)),
        "attention sinks": any(impl.sinks is not None for impl in impls),
        "layers with states": len(impls) < len(layer_groups(runner)),
    }
    if StaticConfig.of(runner.vllm_config.additional_config).ranked_list_beams is not None:
        return None
    return next((f"{what}, with which this has run on no GPU yet" for what, holds in untried.items() if holds), None)


def layer_groups(runner: Any) -> dict[str, int]:
    """Return the group of the KV cache that each attention layer belongs to."""
    groups = enumerate(runner.attn_groups)
    return {name: i for i, group in groups for each in group for name in each.layer_names}


def layers_of(runner: Any, *, states: bool = False) -> dict[str, Any]:
    """Return the layers with keys and values, or those with states."""
    layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase, list(layer_groups(runner)))
    return {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase) is states}


def window_of(impl: Any) -> int:
    """Return how many tokens a query sees, its own among them, in a layer with a sliding window; 0 without one."""
    window = impl.sliding_window
    return window[0] + 1 if isinstance(window, tuple) else max(0, window)


def why_not(impl: Any) -> str | None:
    """Return what keeps an attention implementation from the two parts; None if nothing is known to."""
    name = type(impl).__name__
    if name not in _PROMPT:
        return f"layers of {name}"
    types = ("auto", "float16", "bfloat16", *(() if name == "CPUAttentionBackendImpl" else FP8))
    reasons = {
        "ALiBi, which goes by the distance of query and key": impl.alibi_slopes is not None,
        f"a KV cache of {impl.kv_cache_dtype}": impl.kv_cache_dtype not in types,
        "attention that is not a decoder's": getattr(impl, "attn_type", "decoder") != "decoder",
        "attention in chunks": getattr(impl, "chunk_lookback", -1) >= 0,  # which has a sliding window, too
        "layers that share KV": impl.kv_sharing_target_layer_name is not None,
        "FlashAttention's kernel for heads of 256": getattr(impl, "fa4_hd256", False),
        "an unknown version of FlashAttention": getattr(impl, "vllm_flash_attn_version", 0) is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _with_beams(impl: Any) -> Callable[..., Tensor]:
    """Return what takes the place of an attention implementation's `forward`."""
    original: Callable[..., Tensor] = impl.forward

    def forward(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if type(attn_metadata) is not BeamMetadata:
            return original(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if any(scale is not None for scale in (*args, *kwargs.values())):
            raise NotImplementedError("attention that quantises its output")
        tokens = attn_metadata.tokens
        attend(layer, query[:tokens], (key[:tokens], value[:tokens]), kv_cache, attn_metadata, output[:tokens])
        return output

    return forward


def attend(
    layer: Any, query: Tensor, new: tuple[Tensor, Tensor], kv_cache: Tensor, beams: BeamMetadata, output: Tensor
) -> None:
    """Fill `output` with the attention of `query` over the prompts and the rows' own tokens, and keep the KV of each
    row's first token.

    query, output: [tokens, heads, size]; with a cache of 8 bits the layer has quantised the queries. new: keys and
    values of these tokens, each [tokens, KV heads, size]. kv_cache: [blocks, KV heads, tokens of a block, 2 x size].
    """
    impl, own = layer.impl, own_entries(kv_cache, beams.first_block, output.dtype)
    window, known, more = window_of(impl), beams.ancestors.shape[1], beams.positions.shape[1]
    scale = impl.scale if query.dtype == output.dtype else impl.scale * layer._q_scale_float
    over_prompts, add = _PROMPT[type(impl).__name__], add_own
    if over_prompts is not _on_cpu:
        from vllm_static.worker import triton_attention

        add = triton_attention.add_own
    if window:  # which moves by a token with each query, and has room for the row's own tokens
        parts = [beams.of_last(window - 1 - known - i, kv_cache.shape[2]) for i in range(more)]
        each = [over_prompts(layer, query[i::more], kv_cache, one, output[i::more]) for i, one in enumerate(parts)]
        sums = torch.stack(each, 2).flatten(1) if more > 1 else each[0]
    else:
        sums = over_prompts(layer, query, kv_cache, beams, output)
    if impl.sinks is not None:
        sums = with_sinks(output, sums, impl.sinks)
    add(output, sums, query, new, own, beams.entries, beams.ancestors, scale, impl.logits_soft_cap or 0.0)


def with_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Count each head's sink, [heads], once, as a key of the prompts that has no value. output, which is overwritten,
    and sums, which are returned anew: as of `add_own`."""
    counted = torch.logaddexp(sums, sinks.float()[:, None])
    output.mul_((sums - counted).exp().t()[:, :, None])
    return counted


def add_own(
    output: Tensor, sums: Tensor, query: Tensor, new: tuple[Tensor, Tensor], own: Tensor, entries: Tensor,
    ancestors: Tensor, scale: float, cap: float,
) -> None:  # fmt: skip
    """Add what each row's own tokens are to its queries, and keep the KV of each row's first token.

    output: [tokens, heads, size], the attention over the prompts, which is overwritten. sums: [heads, tokens] float32,
    its log-sum-exp. query, new: as of `attend`. own: [any, KV heads, 2 x size], keys first. entries: [rows] int64,
    where in it the first tokens' go. ancestors: [rows, known] int64. cap: of scores, 0 for none.
    """
    (tokens, heads, size), (rows, known) = query.shape, ancestors.shape
    kv_heads, more = own.shape[1], tokens // rows
    both = torch.cat(new, -1).view(rows, more, kv_heads, 2 * size)
    own.index_copy_(0, entries, both[:, 0])
    keys, values = torch.cat((own[ancestors], both), 1).float().split(size, -1)
    queries = query.view(rows, more, kv_heads, heads // kv_heads, size).float()
    scores = torch.einsum("rmhgd,rkhd->rmhgk", queries, keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if more > 1:
        order = torch.arange(known + more, device=query.device)
        later = order > order[known:, None]  # [more, known + more]
        scores = scores.masked_fill(later[:, None, None], -torch.inf)
    own_sums = scores.logsumexp(-1).view(tokens, heads, 1)
    added = torch.einsum("rmhgk,rkhd->rmhgd", scores.softmax(-1), values).reshape(tokens, heads, size)
    output.copy_(output.float().lerp(added, torch.sigmoid(own_sums - sums.t()[:, :, None])))


def own_entries(kv_cache: Tensor, first_block: int, dtype: torch.dtype) -> Tensor:
    """Return the memory of a layer's last blocks as entries of beams: [entries, KV heads, 2 x size] of the model's
    dtype, of which blocks of 8 bits hold half as many. Raises NotImplementedError if a block's memory is not dense."""
    _, kv_heads, tokens, both = kv_cache.shape
    if kv_cache.stride(0) != kv_heads * tokens * both:
        raise NotImplementedError(f"a KV cache with strides of {kv_cache.stride()}")
    return memory_of(kv_cache, first_block, dtype).view(-1, kv_heads, both)


def _by_flash(layer: Any, query: Tensor, kv_cache: Tensor, beams: BeamMetadata, output: Tensor) -> Tensor:
    """Fill `output`, [tokens, heads, size], with the attention over the prompts, and return its log-sum-exp, [heads,
    tokens]: as in `FlashAttentionImpl.forward`."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    impl, scales = layer.impl, dict[str, Any]()
    keys, values = _keys_and_values(kv_cache, impl, beams)
    if impl.kv_cache_dtype in FP8:
        given = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        given |= {"q_descale": layer._q_scale} if impl.supports_quant_query_input else {}
        scales = {name: scale.expand(len(beams.lengths), keys.shape[2]) for name, scale in given.items()}
    _, sums = flash_attn_varlen_func(
        q=query, k=canonicalize_singleton_dim_strides(keys), v=canonicalize_singleton_dim_strides(values), out=output,
        max_seqlen_q=beams.most_queries, window_size=[-1, -1], **_of_prompts(impl, beams),
        return_softmax_lse=True, fa_version=impl.vllm_flash_attn_version, **scales,
    )  # fmt: skip
    return sums


def _by_triton(layer: Any, query: Tensor, kv_cache: Tensor, beams: BeamMetadata, output: Tensor) -> Tensor:
    """Return the same, as in `TritonAttentionImpl.forward`. The kernel that goes through the keys in segments leaves
    the largest score of each, and the sum of exponentials. It reads FlashInfer's cache too, which is laid out alike."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    keys, values = _keys_and_values(kv_cache, layer.impl, beams)
    sums, largest, exponentials = _segments(query, beams)
    unified_attention(
        q=query,
        k=keys,
        v=values,
        out=output,
        max_seqlen_q=1,  # by which that kernel is chosen; it takes any number of queries
        window_size=(-1, -1),
        **_of_prompts(layer.impl, beams),
        q_descale=None if query.dtype == output.dtype else layer._q_scale,
        k_descale=layer._k_scale,
        v_descale=layer._v_scale,
        kv_quant_mode=get_kv_quant_mode(layer.impl.kv_cache_dtype),
        seq_threshold_3D=len(beams.lengths),
        num_par_softmax_segments=largest.shape[-1],
        softmax_segm_output=sums,
        softmax_segm_max=largest,
        softmax_segm_expsum=exponentials,
    )
    return (exponentials.log() + largest).logsumexp(-1).t().contiguous()


def _keys_and_values(kv_cache: Tensor, impl: Any, beams: BeamMetadata) -> tuple[Tensor, Tensor]:
    if kv_cache.ndim != 4 or kv_cache.shape[-1] != 2 * impl.head_size:
        raise NotImplementedError(f"a KV cache of the shape {tuple(kv_cache.shape)}")
    by_tokens = kv_cache.transpose(1, 2)
    by_tokens = by_tokens[beams.copied[:2]] if beams.seen else by_tokens
    by_tokens = by_tokens.view(current_platform.fp8_dtype()) if impl.kv_cache_dtype in FP8 else by_tokens
    keys, values = by_tokens.split(impl.head_size, dim=-1)
    return keys, values


def _of_prompts(impl: Any, beams: BeamMetadata) -> dict[str, Any]:
    """Arguments that both kernels call alike."""
    lengths = {"cu_seqlens_q": beams.starts, "seqused_k": beams.lengths, "max_seqlen_k": beams.most_keys}
    options = {"softmax_scale": impl.scale, "softcap": impl.logits_soft_cap or 0.0, "causal": False}
    return {**lengths, **options, "block_table": beams.copied[2] if beams.seen else beams.tables}


def _segments(query: Tensor, beams: BeamMetadata) -> tuple[Tensor, ...]:
    """Return what that kernel writes of each segment, float32: the values' sums, [tokens, heads, segments, padded
    size], and twice [tokens, heads, segments]. It leaves those after the last key as they are, in all layers of a
    pass."""
    tokens, heads, size = query.shape
    count = beams.segments or (SEGMENTS if tokens * heads < MANY else 1)
    shape = (tokens, heads, count)
    if (kind := (heads, size, count, beams.seen)) not in beams.scratch:
        beams.scratch[kind] = (
            query.new_empty((*shape, 1 << (size - 1).bit_length()), dtype=torch.float32),
            query.new_full(shape, -torch.inf, dtype=torch.float32),
            query.new_zeros(shape, dtype=torch.float32),
        )
    return beams.scratch[kind]


def _on_cpu(layer: Any, query: Tensor, kv_cache: Tensor, beams: BeamMetadata, output: Tensor) -> Tensor:
    """Return the same by PyTorch's own kernel, which knows no soft cap, over a copy of a prompt's KV: vLLM's packs
    tokens as its instructions like them, and keeps the log-sum-exp to itself."""
    (_, heads, size), (_, kv_heads, block, _) = query.shape, kv_cache.shape
    if (layouts := getattr(layer.impl, _LAYOUTS, None)) is None:
        setattr(layer.impl, _LAYOUTS, layouts := _cpu_layouts(layer, query.dtype, block))
    outputs, sums = list[Tensor](), list[Tensor]()
    for (start, end, tokens), table in zip(beams.spans, beams.tables, strict=True):
        read = kv_cache.flatten(2).index_select(0, table[: -(-tokens // block)])  # along another axis it copies all
        keys, values = (_unpacked(read, i, *layout)[:, :tokens][:, -beams.seen :] for i, layout in enumerate(layouts))
        asked = query[start:end].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [KV heads, group, queries, size]
        attend_to = _capped if layer.impl.logits_soft_cap else _by_torch
        found, found_sums = attend_to(layer.impl, asked.flatten(1, 2)[None], keys[None], values[None])
        outputs.append(found[0].unflatten(1, (-1, end - start)).permute(2, 0, 1, 3).reshape(end - start, heads, size))
        sums.append(found_sums.reshape(heads, end - start))
    output.copy_(torch.cat(outputs))
    return torch.cat(sums, 1)


def _by_torch(impl: Any, asked: Tensor, keys: Tensor, values: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(asked, keys, values, scale=impl.scale)


def _capped(impl: Any, asked: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Return attention and log-sum-exp of queries, [1, KV heads, queries, size], with a soft cap of scores."""
    cap, keys, values, each = impl.logits_soft_cap, keys.float().mT * impl.scale, values.float(), []
    for some in asked.float().split(CAPPED, 2):
        scores = cap * torch.tanh(some @ keys / cap)
        each.append((scores.softmax(-1) @ values, scores.logsumexp(-1)))
    return [torch.cat(parts, 2) for parts in zip(*each, strict=True)]


_LAYOUTS = "beam_layouts"


def _unpacked(read: Tensor, half: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Keys (half 0) or values (1) of some blocks, [blocks, KV heads, block x 2 x size], as [KV heads, tokens, size]."""
    blocks, kv_heads, each = read.shape
    view = read.as_strided((kv_heads, blocks, *shape), (each, kv_heads * each, *strides), half * each // 2)
    return view.reshape(kv_heads, blocks * shape[0] * 32, -1).contiguous()


def _cpu_layouts(layer: Any, dtype: torch.dtype, block: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return where a CPU's cache has a block's keys, and its values: shapes and strides of [tokens, size], each of the
    two as [n, 2, 2, ...]. The kernel that writes the cache tells, whatever instructions it packs for."""
    impl = layer.impl
    size, places = impl.head_size, torch.zeros(2, block * impl.head_size, dtype=torch.int64)
    numbers = torch.arange(block * size)
    for bit in range((block * size - 1).bit_length()):
        digits = (numbers >> bit & 1).to(dtype).view(block, 1, size)
        cache = torch.zeros(1, 1, block, 2 * size, dtype=dtype)
        impl.do_kv_cache_update(layer, digits, digits, cache, torch.arange(block))
        places += cache.view(2, -1).long() << bit
    shape = (block // 32, *[2] * 5, size // 16, *[2] * 4)
    units = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    layouts = []
    for half in places:
        positions = half.argsort()
        strides = tuple(int(positions[unit]) if count > 1 else 0 for unit, count in zip(units, shape, strict=True))
        if not torch.equal(numbers.as_strided(shape, strides).flatten(), positions):
            raise NotImplementedError(f"a KV cache packed for {layer.isa}")
        layouts.append((shape, strides))
    return layouts


_PROMPT = {"FlashAttentionImpl": _by_flash, "CPUAttentionBackendImpl": _on_cpu}
_PROMPT |= dict.fromkeys(("TritonAttentionImpl", "FlashInferImpl"), _by_triton)


@torch.inference_mode()
def largest_difference(layer: Any, dtype: torch.dtype, segments: int) -> float:
    """Return how far the two parts are from a softmax in float64: kernels and versions of vLLM are many.

    Two rows come after a prompt of three tokens. The cache's last two blocks have to be nobody's. dtype: the model's.
    segments: as of `BeamMetadata`. Triton compiles a form for each, which then is there before the first list.
    """
    impl, kv_cache, device = layer.impl, layer.kv_cache, layer.kv_cache.device
    blocks, kv_heads, block, _ = kv_cache.shape
    random = torch.Generator(device).manual_seed(1)

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn(tokens, heads, impl.head_size, generator=random, device=device).to(dtype)

    keys, values, query = draw(kv_heads, 3), draw(kv_heads, 3), draw(impl.num_heads, 2)
    slots = torch.arange(3, device=device) + (blocks - 2) * block
    impl.do_kv_cache_update(layer, keys, values, kv_cache, slots)
    new = (draw(kv_heads, 2), draw(kv_heads, 2))
    numbers = torch.arange(3, device=device)
    table = torch.full((1, 1), blocks - 2, dtype=torch.int32, device=device)
    prompt = numbers[:2].int() * 2, numbers[2:].int() + 1, table, [(0, 2, 3)], 2, 3
    beams = BeamMetadata(numbers[:2, None], numbers.new_empty(2, 0), numbers[:2], blocks - 1, *prompt, segments)
    output = torch.empty_like(query)
    if impl.kv_cache_dtype in FP8:  # what the cache keeps, and what the layer asks
        keys, values = (_rounded(one, scale) for one, scale in ((keys, layer._k_scale), (values, layer._v_scale)))
    asked = query
    if (quantise := getattr(layer, "query_quant", None)) is not None:
        asked = quantise(query.flatten(1), layer._q_scale)[0].view_as(query)
        query = _rounded(query, layer._q_scale)
    attend(layer, asked, new, kv_cache, beams, output)
    group, seen = impl.num_heads // kv_heads, max(0, window_of(impl) - 1)
    all_keys, all_values = (
        torch.cat((old[-seen:].expand(2, -1, -1, -1), own[:, None]), 1).double().repeat_interleave(group, 2)
        for old, own in zip((keys, values), new, strict=True)
    )
    scores = torch.einsum("rhd,rkhd->rhk", query.double(), all_keys) * impl.scale
    if cap := impl.logits_soft_cap:
        scores = cap * torch.tanh(scores / cap)
    sums = scores.logsumexp(-1)
    if impl.sinks is not None:
        sums = torch.logaddexp(sums, impl.sinks.double())
    expected = torch.einsum("rhk,rkhd->rhd", (scores - sums[:, :, None]).exp(), all_values)
    return float((output - expected).abs().max())


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    """Return what 8 bits keep of values; the engine's kernels, other than torch, keep the largest of larger ones."""
    kind = current_platform.fp8_dtype()
    most = torch.finfo(kind).max
    return (values / scale).clamp(-most, most).to(kind).to(values.dtype) * scale
