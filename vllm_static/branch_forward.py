"""Forward passes of the target model inside a step, whose rows branch off prompts that are complete.

They run between a step's sampling and its end, on model runner V2 (v1/worker/gpu/model_runner.py): its own buffers are
free then, but for what `borrowed` puts back. All shapes are known to the host, and nothing is read back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_static import shared_prefix
from vllm_static.kv_branches import MOST_LOGITS, Branches, Places, Prompt
from vllm_static.shared_prefix import SharedPrefix

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

QUEUED = frozenset(("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"))
"""Attention backends that keep nothing on the host from one pass to the next."""

ran: Counter[str] = Counter()
"""Passes of this process, by the CUDA graphs that they ran in: FULL, PIECEWISE or NONE."""

_UNUSED: dict[str, Any] = dict.fromkeys([
    "idx_mapping", "expanded_idx_mapping", "expanded_local_pos", "num_draft_tokens_per_req", "dcp_local_seq_lens",
    "logits_indices", "cu_num_logits", "cu_num_logits_np", "prompt_lens",
])  # fmt: skip
"""Fields of an InputBatch that sampling reads, and no pass."""

TOLERANCE = 0.05  # of the largest logit: what 16 bits may make of two orders of adding


@contextlib.contextmanager
def borrowed(runner: Any) -> Iterator[None]:
    """Keep what the rest of the step still reads of the runner's buffers: `postprocess_sampled` counts by them."""
    buffers = runner.input_buffers
    kept = [(buffer, buffer.clone()) for buffer in (buffers.query_start_loc, buffers.seq_lens)]
    _wait(runner)
    try:
        yield
    finally:
        for buffer, content in kept:
            buffer.copy_(content)


def try_out(runner: Any, scratch: range) -> str | None:
    """Run two passes of a row or two, before other requests can share a step with them, and return why lists cannot be
    made in this engine; None if they can. scratch: at least two blocks."""
    if "FLEX_ATTENTION" in backends(runner):
        return "FlexAttention looks for keys only in blocks that the scheduler knows"
    try:
        _two_passes(runner, scratch)
    except Exception as error:
        logger.warning("Passes for ranked lists do not run here.", exc_info=True)
        return f"a first pass failed: {error!r}"
    return None


def try_out_apart(runner: Any, scratch: range) -> str | None:
    """Let the model's layers read prompts once for all rows, and return why passes cannot; None if they can, and give
    the other passes' logits: kernels and versions of vLLM are many."""
    if reason := shared_prefix.why_not(runner):
        return reason
    shared_prefix.install(runner)
    try:
        expected, logits = (_two_passes(runner, scratch, apart=apart) for apart in (False, True))
    except Exception as error:
        logger.warning("Passes with a shared prefix do not run here.", exc_info=True)
        return f"a first pass failed: {error!r}"
    if not (logits - expected).abs().max() <= TOLERANCE * expected.abs().max():  # neither if one is not a number
        return "a first pass gave other logits"
    return None


def _two_passes(runner: Any, scratch: range, *, apart: bool = False) -> Tensor:
    """The logits of a pass with one token a row and one with two: [rows, 3, vocabulary] float32. Other kernels take one
    row than two, for which four blocks are needed."""
    rows = min(2, len(scratch) // 2)
    with torch.inference_mode(), borrowed(runner):
        branches = Branches(runner, [Prompt("", 0, 1)], rows, 3, scratch, apart=apart)
        tokens = torch.zeros(rows, 2, dtype=torch.int64, device=runner.device)
        branches.begin()
        first = logits_after(runner, branches, tokens[:, :1], 0).clone()
        branches.fork(tokens[None, :, 0], 1)
        return torch.cat((first, logits_after(runner, branches, tokens, 1)), 1).float()


SEARCH = 1 << 29  # bytes: of a search besides, most of them the keys of children and what sorts them


def logits_room(runner: Any) -> int:
    """Return for how many tokens a pass may have logits: those of MOST_LOGITS, or what half of an accelerator's free
    memory has room for. Tensor parallelism gathers them, and copies what it has gathered: what that takes is measured.
    """
    most: int = MOST_LOGITS // (runner.vocab_size * runner.model_config.head_dtype.itemsize)
    if runner.device.type == "cpu":
        return most
    memory = torch.get_device_module(runner.device)
    before = memory.memory_allocated(runner.device)
    memory.reset_peak_memory_stats(runner.device)
    tokens = len(run_logits(runner, 64))
    each = (memory.max_memory_allocated(runner.device) - before) // tokens
    if runner.lora_config is not None:
        each *= 2  # those of one pass beside those of all
    free = memory.mem_get_info(runner.device)[0] + memory.memory_reserved(runner.device) - before
    room: int = max(0, free // 2 - SEARCH) // max(1, each)
    return min(most, room)


@torch.inference_mode()
def run_logits(runner: Any, tokens: int) -> Tensor:
    """Return logits of this many tokens, of no meaning: [tokens, vocabulary]. PyTorch keeps their memory for others.

    With adapters, of no more than a pass has: see `logits_after`.
    """
    if runner.lora_config is not None:
        tokens = min(tokens, runner.max_num_tokens)
    use_adapters(runner, [], np.zeros(tokens, np.intp))
    size = runner.model_config.get_hidden_size()
    hidden = torch.zeros(tokens, size, dtype=runner.dtype, device=runner.device)
    logits: Tensor = runner.model.compute_logits(hidden)
    return logits


def logits_after(
    runner: Any, branches: Branches, tokens: Tensor, known: int, head: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Run the model over the next tokens of all rows, after `known` that they have: [rows, more, vocabulary].

    tokens: [rows, more] integers, prompt by prompt. As many rows go into one pass as the runner's buffers hold. head:
    what makes logits, or anything else, of hidden states, in place of the model's.
    """
    head = head or runner.model.compute_logits
    buffers, (rows, more) = runner.input_buffers, tokens.shape
    each = rows // len(branches.prompts)
    places = branches.at(each, known, more)
    most = min(buffers.max_num_reqs, buffers.max_num_tokens // more)
    adapters = np.repeat([one.slot for one in branches.prompts], each)
    requests = [one.request for one in branches.prompts]
    adapted = runner.lora_config is not None  # the adapters' buffers hold no more tokens than a pass
    outputs = []
    for start in range(0, rows, most):
        part = slice(start, min(start + most, rows))
        use_adapters(runner, requests, adapters[part].repeat(more))
        here = places.of(part)
        shared = shared_prefix.shared_prefix(branches, each, part, here) if branches.apart else None
        output = _run(runner, tokens[part], here, shared, requests)
        if adapted:
            output = head(output)
        outputs.append(output if rows <= most else output.clone())  # the next pass overwrites it
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    logits = output if adapted else head(output)
    return logits.view(rows, more, -1)


def use_adapters(runner: Any, requests: list[str], slots: np.ndarray) -> None:
    """Set the LoRA adapters of the tokens of the next pass, each by its request's slot."""
    if runner.lora_config:
        state = runner.lora_state
        each = tuple(state.lora_ids[slots])
        runner._set_active_loras(each, each, state.get_activate_loras(requests))


def _run(runner: Any, tokens: Tensor, places: Places, shared: SharedPrefix | None, requests: list[str]) -> Tensor:
    """One pass: the hidden states of all tokens, valid until the next one. places: where the tokens are."""
    rows, more = tokens.shape
    shape = _shape(runner, rows, more, requests, graphs=shared is None)
    ran[shape.cg_mode.name] += 1
    batch, table, mapping = _inputs(runner, tokens, places, max(rows * more, shape.num_tokens), shape.num_reqs or rows)
    if shared is None:
        metadata = runner.model_state.prepare_attn(
            batch, shape.cg_mode, (table,), mapping, runner.attn_groups, runner.kv_cache_config
        )
    else:
        metadata = dict.fromkeys(shared_prefix.layer_names(runner), shared)
    _wait(runner)
    count = batch.num_tokens
    if shape.cg_mode == CUDAGraphMode.FULL:
        return runner.cudagraph_manager.run_fullgraph(shape)[:count]
    inputs = {"input_ids": batch.input_ids, "positions": batch.positions}
    inputs |= dict.fromkeys(("inputs_embeds", "intermediate_tensors"))
    padded, lora = batch.num_tokens_after_padding, runner.lora_config is not None
    with set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=padded,
        cudagraph_runtime_mode=shape.cg_mode,
        batch_descriptor=BatchDescriptor(padded, has_lora=lora, num_active_loras=shape.num_active_loras),
        slot_mapping=build_slot_mappings_by_layer(mapping, runner.kv_cache_config),
        is_padding=batch.is_padding,
    ):
        if shape.cg_mode == CUDAGraphMode.PIECEWISE:
            return runner.cudagraph_manager.run_pw_graph(runner.model, inputs)[:count]
        return runner.model(**inputs)[:count]


def _inputs(
    runner: Any, tokens: Tensor, places: Places, padded: int, padded_rows: int
) -> tuple[InputBatch, Tensor, Tensor]:
    """Fill the runner's buffers for a pass. Returns its batch, its block table and its slot mapping.

    padded, padded_rows: tokens and rows with those that fill up a CUDA graph.
    """
    buffers, (rows, more) = runner.input_buffers, tokens.shape
    count = rows * more
    buffers.input_ids[:count].copy_(tokens.reshape(-1))
    buffers.positions[:count].copy_(places.positions.reshape(-1))
    torch.arange(0, count + 1, more, out=buffers.query_start_loc[: rows + 1])
    buffers.query_start_loc[rows + 1 : padded_rows + 1] = count
    buffers.seq_lens[:rows].copy_(places.ends)
    buffers.seq_lens[rows:padded_rows] = 0
    buffers.is_padding[:count] = False
    buffers.is_padding[count:padded] = True
    table = runner.block_tables.input_block_tables[0][:padded_rows]
    columns = min(places.tables.shape[1], table.shape[1])  # no row has tokens in a block after that
    table[:rows, :columns].copy_(places.tables[:, :columns])
    table[rows:] = 0
    mapping = runner.block_tables.slot_mappings[:, :padded]
    mapping[0, :count].copy_(places.slots.reshape(-1))
    mapping[0, count:] = PAD_SLOT_ID
    lengths = np.zeros(padded_rows, np.int32)
    lengths[:rows] = places.before + more
    known = places.before.astype(np.int32)
    batch = InputBatch(
        **_UNUSED,
        req_ids=[""] * rows,
        num_reqs=rows,
        num_reqs_after_padding=padded_rows,
        idx_mapping_np=np.zeros(rows, np.intp),
        num_scheduled_tokens=np.full(rows, more, np.int32),
        num_tokens=count,
        num_tokens_after_padding=padded,
        num_draft_tokens=0,
        query_start_loc=buffers.query_start_loc[: padded_rows + 1],
        query_start_loc_np=np.minimum(np.arange(padded_rows + 1, dtype=np.int32) * more, count),
        seq_lens=buffers.seq_lens[:padded_rows],
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        num_computed_tokens_np=known,
        prefill_len_np=known,
        num_computed_prefill_tokens_np=known,
        is_prefilling_np=np.zeros(rows, np.bool_),
        has_prefill=False,
        decode_graph_eligible=True,
        input_ids=buffers.input_ids[:padded],
        positions=buffers.positions[:padded],
        is_padding=buffers.is_padding[:padded],
        has_structured_output_reqs=False,
    )
    return batch, table, mapping


def _shape(runner: Any, rows: int, more: int, requests: list[str], *, graphs: bool) -> Any:
    """What vLLM has recorded for such a pass. graphs: whether a full CUDA graph will do, with its layers' attention."""
    adapters = len(runner.lora_state.get_activate_loras(requests)) if runner.lora_config else 0
    dispatch, count = runner.cudagraph_manager.dispatch, rows * more
    if graphs:
        return dispatch(rows, count, more, adapters, max_query_len=more)
    shape = dispatch(rows, count, None, adapters)
    if shape.cg_mode != CUDAGraphMode.FULL:
        return shape
    return dataclasses.replace(shape, cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=rows)


def _wait(runner: Any) -> None:
    """Let the device catch up if a backend plans passes in memory that the device copies later, as FlashInfer does, or
    may: the next plan would overwrite one that is not copied yet."""
    if not backends(runner) <= QUEUED:
        runner.main_stream.synchronize()


def backends(runner: Any) -> set[str]:
    """Return the names of the attention backends of the runner's model."""
    return {group.backend.get_name() for groups in runner.attn_groups for group in groups}
