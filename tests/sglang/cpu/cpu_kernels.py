"""What SGLang's kernels do, in torch, for the few that a tiny model on a CPU needs.

`sitecustomize` puts them where SGLang looks them up: those whose names end in `_cpu`, and
`reconstruct_indices_from_tree_mask`, are imported from `sgl_kernel`, the others replace names in SGLang's modules.
In a draft tree, node 0 of a request is its last token; `retrive_next_token` holds a node's first child and
`retrive_next_sibling` the next child of the same parent, -1 where there is none.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NONE = -1
QLEN_ONLY = 1  # TreeMaskMode


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read the cache slots of every request's positions from `start` to `end`, one request after the other."""
    rows = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, first:last] for row, first, last in rows])
    out_cache_loc[: len(slots)] = slots


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write cache slots to every request's positions from `start` to `end`, one request after the other."""
    used = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[used : used + last - first]
        used += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Read the `topk * num_cols` cache slots behind every request's text."""
    end = seq_lens + topk * num_cols
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, pool_len)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Take every request's last token of those it accepted."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the cache slots of the accepted nodes to the front."""
    accepted = accept_index[accept_index != NONE].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy slots within the cache: row by row in every buffer, given by its address and the bytes of a row."""
    rows = int(torch.stack([target, source]).max()) + 1
    for address, width in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * width)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, width)
        buffer[target] = buffer[source]


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Derive positions and links of draft trees from the masks that tell which nodes are ancestors of which."""
    nodes = draft_token_num
    ancestors = tree_mask[: batch_size * nodes * nodes].view(batch_size, nodes, nodes).bool().tril(-1)
    positions.copy_((ancestors.sum(-1) + verified_seq_len[:, None]).flatten())
    retrive_index.copy_(torch.arange(batch_size * nodes).view(batch_size, nodes))
    retrive_next_token.fill_(NONE)
    retrive_next_sibling.fill_(NONE)
    for i, tree in enumerate(ancestors):
        for node in reversed(range(1, nodes)):
            parents = tree[node].nonzero()
            if len(parents):
                parent = int(parents[-1])
                retrive_next_sibling[i, node] = retrive_next_token[i, parent]
                retrive_next_token[i, parent] = node


def gather_spec_extras(indices: Tensor, *buffers: Tensor | None) -> tuple[Tensor | None, ...]:
    """The rows of each buffer."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Make trees of what a draft model proposed: their masks, positions and links.

    `selected_index` holds the candidates that became nodes. Candidate c was drawn behind candidate
    `parent_list[c // topk]`, the first ones behind the last token.
    """
    if tree_mask_mode != QLEN_ONLY:
        raise NotImplementedError("masks with more than the draft tokens")
    requests, nodes = len(verified_seq_len), draft_token_num
    masks = torch.eye(nodes, dtype=torch.bool).repeat(requests, 1, 1)
    for i, selected in enumerate(selected_index.tolist()):
        for node, candidate in enumerate(selected, start=1):
            behind = candidate // topk
            parent = selected.index(int(parent_list[i, behind])) + 1 if behind else 0
            masks[i, node] |= masks[i, parent]
    tree_mask[: masks.numel()] = masks.flatten()
    links = retrive_index, retrive_next_token, retrive_next_sibling
    reconstruct_indices_from_tree_mask(tree_mask, verified_seq_len, positions, *links, requests, nodes)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's choices down each tree as far as it has them, and add the target's next one."""
    for i in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[i, 0] = retrive_index[i, 0]
        while accepted < accept_index.shape[1] - 1:
            child = _child(candidates[i], retrive_next_token[i], retrive_next_sibling[i], node, target_predict[i, node])
            if child == NONE:
                break
            predicts[retrive_index[i, node]] = target_predict[i, node]
            node, accepted = child, accepted + 1
            accept_index[i, accepted] = retrive_index[i, node]
        accept_token_num[i] = accepted
        predicts[retrive_index[i, node]] = target_predict[i, node]


def _child(tokens: Tensor, next_token: Tensor, next_sibling: Tensor, node: int, token: Tensor) -> int:
    child = int(next_token[node])
    while child != NONE and tokens[child] != token:
        child = int(next_sibling[child])
    return child


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafts so that what comes out is distributed as the target's own samples.

    One coin for each level is tested against the probabilities of the children so far, added up. Behind the last
    accepted node, a token is drawn from what probability the rejected children have left.
    """
    threshold_acc = max(threshold_acc, 1e-9)
    for i in range(len(candidates)):
        node, accepted, added = 0, 0, 0.0
        accept_index[i, 0] = retrive_index[i, 0]
        while accepted < accept_index.shape[1] - 1:
            child = int(retrive_next_token[i, node])
            while child != NONE:
                token = candidates[i, child]
                probability = float(target_probs[i, node, token])
                added += probability
                passes = uniform_samples[i, node] < added / threshold_acc or probability >= threshold_single
                if probability > 0 and passes:
                    break
                draft_probs[i, node, token] = target_probs[i, node, token]
                child = int(retrive_next_sibling[i, child])
            if child == NONE:
                break
            predicts[retrive_index[i, node]] = token
            node, accepted, added = child, accepted + 1, 0.0
            accept_index[i, accepted] = retrive_index[i, node]
        accept_token_num[i] = accepted
        left = target_probs[i, node]
        if accepted < accept_index.shape[1] - 1:
            left = (left - draft_probs[i, node]).clamp(min=0)
        predicts[retrive_index[i, node]] = _draw(left, uniform_samples_for_final_sampling[i])


def _draw(weights: Tensor, coin: Tensor) -> int:
    """The first token at which the weights, added up, exceed this share of their sum; never one without weight."""
    above = (weights.cumsum(0) > coin * weights.sum()) & (weights > 0)
    if above.any():
        return int(above.to(torch.uint8).argmax())
    possible = weights.nonzero()
    return int(possible[-1]) if len(possible) else len(weights) - 1


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keep the `top_ks` largest probabilities of each row, and those equal to the last of them."""
    ranks = top_ks.long().clamp(1, probs.shape[-1])[:, None] - 1
    pivots = probs.sort(descending=True).values.gather(-1, ranks)
    return _normalised(probs.where(probs >= pivots, 0))


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the largest probabilities of each row until they reach `top_ps`, and those equal to the last of them."""
    ordered = probs.sort(descending=True).values
    before = ordered.cumsum(-1) - ordered
    pivots = ordered.where(before < top_ps[:, None], torch.inf).min(-1, keepdim=True).values
    return _normalised(probs.where(probs >= pivots, 0))


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """A hash of every row's seed and position with every column, as SGLang samples with seeds."""

    def rotated(x: Tensor, bits: int) -> Tensor:
        return (x << bits | x >> 32 - bits) & low

    low = 0xFFFFFFFF
    seed, positions, columns = seed.view(torch.int64), positions.view(torch.int64), columns.to(torch.int64)
    h = torch.zeros(len(seed), len(columns), dtype=torch.int64)
    for block in (seed[:, None] & low, seed[:, None] >> 32 & low, positions[:, None] & low, columns[None] & low):
        h = h ^ rotated(block * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        h = rotated(h, 13) * 5 + 0xE6546B64 & low
    h = h ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & low
    h = (h ^ h >> 13) * 0xC2B2AE35 & low
    return (h ^ h >> 16).to(torch.uint32)


def add_tree_masks(backend: Any) -> None:
    """Let SGLang's plainest attention verify draft trees: each node sees the text so far and its ancestors."""
    forward_extend = backend.forward_extend

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        if not batch.forward_mode.is_target_verify():
            return forward_extend(self, q, k, v, layer, batch, save_kv_cache)
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        pool, nodes = self.token_to_kv_pool, batch.spec_info.draft_token_num
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        requests = len(batch.req_pool_indices)
        trees = batch.spec_info.custom_mask[: requests * nodes * nodes].view(requests, nodes, nodes).bool()
        queries = q.view(requests, nodes, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        out = q.new_empty(requests, nodes, layer.tp_q_head_num, layer.v_head_dim)
        for i, (row, length) in enumerate(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)):
            slots = self.req_to_token_pool.req_to_token[row, : length + nodes]
            mask = torch.cat([torch.ones(nodes, length, dtype=torch.bool), trees[i]], dim=1)
            out[i] = scaled_dot_product_attention(
                queries[i],
                keys[slots].transpose(0, 1).to(q.dtype),
                values[slots].transpose(0, 1).to(q.dtype),
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            ).transpose(0, 1)
        return out.view(requests * nodes, -1)

    backend.forward_extend = forward


def add_draft_models(factory: Any) -> None:
    """Let draft models use SGLang's plainest attention too."""
    create_backend = factory._create_backend

    def create(self: Any, name: str, backends: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        if "stamps_children" in kwargs:
            backend = DraftSteps(TorchNativeAttnBackend, self.draft_model_runner, self.topk, self.speculative_num_steps)
        else:
            backend = TorchNativeAttnBackend(self.draft_model_runner)
        backends["torch_native"] = lambda: ("torch_native", backend)
        return create_backend(self, name, backends, *args, **kwargs)

    factory._create_backend = create


class DraftSteps:
    """The attention of a draft model's steps behind the first: each candidate sees the text and its own line."""

    def __init__(self, backend: Any, runner: Any, topk: int, steps: int) -> None:
        self.topk, self.steps = topk, steps
        self.req_to_token = runner.req_to_token_pool.req_to_token

        class Step(backend):
            lines: dict[str, Any]

            def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
                lines = SimpleNamespace(out_cache_loc=batch.out_cache_loc, encoder_lens=None, **self.lines)
                return super().forward_decode(q, k, v, layer, lines, save_kv_cache)

        self.attn_backends = [Step(runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        slots = []
        for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            text, drafts = self.req_to_token[row, : length + self.topk * self.steps].tensor_split([length])
            slots += [torch.cat([text, line]) for line in drafts.view(self.topk, self.steps)]
        pool = SimpleNamespace(req_to_token=torch.nn.utils.rnn.pad_sequence(slots, batch_first=True))
        lengths = batch.seq_lens.repeat_interleave(self.topk)
        for step, backend in enumerate(self.attn_backends, start=1):
            backend.req_to_token_pool = pool
            backend.lines = {"req_pool_indices": torch.arange(len(slots)), "seq_lens": lengths + step}
