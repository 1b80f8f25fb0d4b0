"""Layers with states in passes whose rows branch off prompts: all rows read a prompt's states, and none has its own.

A head's state is a matrix S. Each token scales it by a decay and adds u k^T, and a query q reads S q. So what a row
reads is S q of its prompt, scaled, and u (k q) of each of its own tokens, scaled. These leave entries, as in attention
(`beam_kv`). In Mamba 2 u is a value times its step. By the delta rule it is what a value has more than a read with k.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from vllm_static.worker.beam_attention import TOLERANCE, layers_of
from vllm_static.worker.beam_kv import BeamMetadata, entry_parts, memory_of


def install(runner: Any) -> str | None:
    """Let the layers of the runner's model that have states understand `BeamMetadata`, or return why they cannot.
    Raises NotImplementedError for one of the reasons."""
    layers = list(layers_of(runner, states=True).values())
    for layer in layers:
        if (name := type(layer).__name__) not in _KINDS:
            return f"states of {name}"
        if runner.num_speculative_steps or getattr(layer, "use_replayssm", False):
            return "states that are not up to date, as beside speculation"
        page = layer.get_kv_cache_spec(runner.vllm_config).page_size_bytes
        if any(state.stride(0) * state.itemsize != page for state in layer.kv_cache):
            raise NotImplementedError("states between those of other layers")
        method, fill = _KINDS[name]
        setattr(layer, method, _with_beams(layer, getattr(layer, method), fill))
        if name == _DELTA and runner.device.type == "cpu":  # whose operation would not call it
            layer._forward_method = _by_cuda(layer, layer._forward_method)
    differences = [largest_difference(runner, layer) for layer in layers]  # of all: ranks add up what each has
    if not all(one <= TOLERANCE for one in differences):  # nor if one is not a number
        return "states that are read once for all beams give other numbers"
    return None


def _beams_of(layer: Any) -> BeamMetadata | None:
    metadata = get_forward_context().attn_metadata
    beams = metadata.get(layer.prefix) if isinstance(metadata, dict) else None
    return beams if type(beams) is BeamMetadata else None


def _with_beams(layer: Any, original: Callable[..., None], fill: Callable[..., None]) -> Callable[..., None]:
    """Return what takes the place of the method that a layer's operation calls."""

    def forward(**tensors: Tensor) -> None:
        if (beams := _beams_of(layer)) is None:
            original(**tensors)
        else:
            fill(layer, beams, **tensors)

    return forward


def _by_cuda(layer: Any, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda hidden: (layer.forward_cuda if _beams_of(layer) else original)(hidden)


class States:
    """A layer's states after the prompts, and the entries of rows' own tokens since."""

    def __init__(self, layer: Any, beams: BeamMetadata) -> None:
        self._beams = beams
        self._convolved, self._states = layer.kv_cache
        self._transposed = type(layer).__name__ == _DELTA and self._states.device.type == "cpu"
        memory = memory_of(self._convolved, beams.first_block, torch.float32)
        parts = entry_parts(layer.get_state_shape())
        self._entries = memory[: len(memory) // sum(parts) * sum(parts)].view(-1, sum(parts))
        self._inputs_before, self._keys, self._added, self._sums = self._entries[beams.ancestors].split(parts, -1)

    def _after_prompts(self, asked: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return what `read` makes of what the tokens of each prompt ask, and its block."""
        spans = zip(self._beams.spans, self._beams.tables, strict=True)
        return torch.cat([read(asked[start:end], block) for (start, end, _), block in spans])

    def convolve(self, inputs: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the layer's convolution makes of its inputs, [tokens, channels]. weights: [channels, width]."""
        known, more, past = self._beams.ancestors.shape[1], self._beams.positions.shape[1], weights.shape[1] - 1
        states = self._convolved if is_conv_state_dim_first() else self._convolved.mT
        self._inputs = inputs.float().unflatten(0, (-1, more))

        def last(asked: Tensor, block: Tensor) -> Tensor:
            return states.index_select(0, block)[:, :, :past].float().mT.expand(len(asked), -1, -1)

        prompts = self._after_prompts(inputs, last)[::more]
        windows = torch.cat((prompts, self._inputs_before, self._inputs), 1)[:, known:].unfold(1, past + 1, 1)
        sums = (windows * weights.float()).sum(-1).flatten(0, 1)
        return silu(sums if bias is None else sums + bias.float()).to(inputs.dtype)

    def _read(self, asked: Tensor, block: Tensor) -> Tensor:
        state = self._states.index_select(0, block)[0].float()
        state = state.view(len(state), *state.shape[:0:-1]).mT if self._transposed else state
        return torch.einsum("tgk,ghvk->tghv", asked, state.unflatten(0, (asked.shape[1], -1))).flatten(1, 2)

    def read(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor | None) -> Tensor:
        """Return what each token reads, [tokens, heads, size] float32, and keep the entry of each row's first one.

        queries, keys: [tokens, groups of heads, any]. values: [tokens, heads, size]. decays, the logarithms, and rates
        of the delta rule: [tokens, heads]. All are float32.
        """
        known, rows = self._beams.ancestors.shape[1], (-1, self._beams.positions.shape[1])
        share = values.shape[1] // keys.shape[1]
        sums = decays.unflatten(0, rows).cumsum(1) + (self._sums[:, -1:] if known else 0)
        sums = torch.cat((self._sums, sums), 1)
        added = torch.cat((self._added.unflatten(-1, values.shape[1:]), values.unflatten(0, rows)), 1)
        all_keys = torch.cat((self._keys.unflatten(-1, keys.shape[1:]), keys.unflatten(0, rows)), 1)

        def found(asked: Tensor, now: int, count: int) -> Tensor:
            """Return what a token reads of the first `count` tokens of its row. asked: [rows, groups of heads, any]."""
            left = (sums[:, now, None] - sums[:, :count]).exp()
            fit = torch.einsum("rgk,rsgk->rsg", asked, all_keys[:, :count]).repeat_interleave(share, 2)
            return torch.einsum("rsh,rshv->rhv", left * fit, added[:, :count])

        by_queries = self._after_prompts(queries, self._read).unflatten(0, rows)
        by_keys = None if rates is None else self._after_prompts(keys, self._read).unflatten(0, rows)
        outputs = list[Tensor]()
        for now in range(known, known + rows[1]):
            i, left = now - known, sums[:, now, :, None].exp()
            if rates is not None and by_keys is not None:
                read = left * by_keys[:, i] + found(all_keys[:, now], now, now)
                added[:, now] = rates.unflatten(0, rows)[:, i, :, None] * (added[:, now] - read)
            outputs.append(left * by_queries[:, i] + found(queries.unflatten(0, rows)[:, i], now, now + 1))
        entry = self._inputs[:, 0], all_keys[:, known].flatten(1), added[:, known].flatten(1), sums[:, known]
        self._entries.index_copy_(0, self._beams.entries, torch.cat(entry, 1))
        return torch.stack(outputs, 1).flatten(0, 1)


def _of_mamba2(layer: Any, beams: BeamMetadata, projected_states: Tensor, output: Tensor) -> None:
    """Do what `MambaMixer2.conv_ssm_forward` does."""
    states, given = States(layer, beams), projected_states[: beams.tokens, layer.tped_intermediate_size :]
    inputs, steps = given.split([layer.tped_conv_size, layer.tped_dt_size], -1)
    mixed = layer.split_hidden_states_B_C_fn(states.convolve(inputs, layer.conv_weights, layer.conv1d.bias).float())
    sizes = layer.head_dim, layer.ssm_state_size, layer.ssm_state_size
    values, keys, queries = (one.unflatten(1, (-1, size)) for one, size in zip(mixed, sizes, strict=True))
    steps = softplus(steps.float() + layer.dt_bias.float())
    found = states.read(queries, keys, values * steps[..., None], steps * layer.A, None)
    output[: beams.tokens] = (found + values * layer.D.float()[:, None]).flatten(1)


def _of_delta_rule(
    layer: Any, beams: BeamMetadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
) -> None:
    """Do what `QwenGatedDeltaNetAttention._forward_core` does."""
    states, (inputs, rates, steps) = States(layer, beams), (one[: beams.tokens] for one in (mixed_qkv, b, a))
    weights = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight).view(inputs.shape[1], -1)
    mixed = layer.rearrange_mixed_qkv(states.convolve(inputs, weights, layer.conv1d.bias))
    queries, keys, values = (one[0].float() for one in mixed)
    queries, keys = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (queries, keys))
    decays = -layer.A_log.float().exp() * softplus(steps.float() + layer.dt_bias.float())
    found = states.read(queries * layer.head_k_dim**-0.5, keys, values, decays, rates.float().sigmoid())
    core_attn_out[: beams.tokens] = found


_DELTA = "QwenGatedDeltaNetAttention"
_KINDS: dict[str, tuple[str, Callable[..., None]]] = {
    "MambaMixer2": ("conv_ssm_forward", _of_mamba2),
    _DELTA: ("_forward_core", _of_delta_rule),
}


@torch.inference_mode()
def largest_difference(runner: Any, layer: Any) -> float:
    """Return how far two tokens after states are from what the engine's own kernels make of them, as a part of the
    largest number. The cache's last two blocks have to be nobody's."""
    random, last = torch.Generator(runner.device).manual_seed(1), runner.kv_cache_config.num_blocks - 1
    hidden = torch.randn(2, 1, runner.model_config.get_hidden_size(), generator=random, device=runner.device)
    for state in layer.kv_cache:
        state[last].copy_(torch.randn(state[last].shape, generator=random, device=runner.device))
    numbers = torch.arange(2, device=runner.device)
    starts, block, one = numbers.int(), numbers[:1].int() + last, numbers[1:].int()
    prompt = starts, one, block[None], [(0, 1, 1)], 1, 1
    beams = [BeamMetadata(numbers[:1, None], numbers[None, :i], numbers[i : i + 1], last - 1, *prompt) for i in (0, 1)]
    own = {"num_prefills": 0, "num_prefill_tokens": 0, "num_decodes": 1, "num_decode_tokens": 1}
    if type(layer).__name__ == _DELTA:
        own |= {"num_spec_decodes": 0, "num_spec_decode_tokens": 0, "num_actual_tokens": 1}
        metadata: Any = GDNAttentionMetadata(
            **own, non_spec_query_start_loc=starts, non_spec_state_indices_tensor=block
        )
    else:
        none = "has_initial_states_p", "query_start_loc_p", "state_indices_tensor_p", "query_start_loc_d"
        given = dict.fromkeys((*none, "num_accepted_tokens"))
        metadata = Mamba2AttentionMetadata(**own, **given, num_reqs=1, seq_lens=one, state_indices_tensor_d=block[None])

    def run(metadata: Any, token: Tensor) -> Tensor:
        with set_forward_context({layer.prefix: metadata}, runner.vllm_config, num_tokens=1):
            return layer(token.to(runner.dtype)).float()

    ways = zip(beams, hidden, strict=True), zip([metadata] * 2, hidden, strict=True)
    found, expected = (torch.cat([run(*one) for one in way]) for way in ways)
    return float((found - expected).abs().max() / expected.abs().max())
