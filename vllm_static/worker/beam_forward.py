"""Forward passes of the target model inside a step, whose rows branch off prompts that are complete.

They run between a step's sampling and its end, on model runner V2 (v1/worker/gpu/model_runner.py), where nothing but a
draft model reads the buffers that they fill any more (tokens, positions, slots). The host knows all shapes, and nothing
is read back.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from itemset.serving.wire import MOST_LOGITS
from vllm_static.compat import logger
from vllm_static.worker import beam_attention, beam_states
from vllm_static.worker.beam_kv import BeamKV, BeamMetadata, Prompt
from vllm_static.worker.step_share import Piece, Pieces


def try_out(runner: Any, first_block: int) -> str | None:
    """Run two passes of two rows, before there are other requests, and return why lists cannot be made in this engine;
    None if they can. first_block: as of `BeamKV`."""
    if type(runner.model_state).prepare_inputs is not DefaultModelState.prepare_inputs:
        return "the model has inputs of its own"
    try:
        if reason := beam_attention.install(runner) or beam_states.install(runner):
            return reason
        with torch.inference_mode():
            kv = BeamKV(runner, [Prompt("", 0, 1)], first_block)
            tokens = torch.zeros(2, 2, dtype=torch.int64, device=runner.device)
            for known in (0, 1):
                kv.fork(tokens[None, :, 0], known)
                runner.model.compute_logits(result_of(states_after(runner, kv, tokens)).flatten(0, 1))
    except Exception as error:
        logger.warning("Passes for ranked lists do not run here.", exc_info=True)
        return f"a first pass failed: {error!r}"
    return None


def result_of(pieces: Pieces) -> Tensor:
    """Run pieces at once, each whole, and return what comes of them."""
    try:
        piece = next(pieces)
        while True:
            piece = pieces.send(piece.rows)
    except StopIteration as end:
        return end.value


SEARCH = 1 << 29  # bytes: of a search besides, most of them the keys of children and what sorts them


def logits_room(runner: Any) -> int:
    """Return of how many tokens logits may stand in memory: those of MOST_LOGITS, or what a quarter of an accelerator's
    free memory has room for: graphs of lists take as much again, beside what others need. Tensor parallelism gathers
    them, and copies what it has gathered: what that takes is measured.
    """
    most: int = MOST_LOGITS // (runner.vocab_size * runner.model_config.head_dtype.itemsize)
    if runner.device.type == "cpu":
        return most
    memory = torch.get_device_module(runner.device)
    before = memory.memory_allocated(runner.device)
    memory.reset_peak_memory_stats(runner.device)
    tokens = len(run_logits(runner, 64))
    each = (memory.max_memory_allocated(runner.device) - before) // tokens
    free = memory.mem_get_info(runner.device)[0] + memory.memory_reserved(runner.device) - before
    return min(most, max(0, free // 4 - SEARCH) // max(1, each))


def most_at_once(runner: Any, tokens: int) -> int:
    """Return how many of these tokens' logits can be made at once: adapters' buffers hold no more than a step has."""
    return tokens if runner.lora_config is None else min(tokens, runner.max_num_tokens)


@torch.inference_mode()
def run_logits(runner: Any, tokens: int) -> Tensor:
    """Return logits of no meaning, of as many tokens at once: [tokens, vocabulary]. PyTorch keeps their memory."""
    tokens = most_at_once(runner, tokens)
    use_adapters(runner, [], np.zeros(tokens, np.intp))
    size = runner.model_config.get_hidden_size()
    hidden = torch.zeros(tokens, size, dtype=runner.dtype, device=runner.device)
    return runner.model.compute_logits(hidden)


def states_after(runner: Any, kv: BeamKV, tokens: Tensor) -> Pieces:
    """Run the model over the next tokens of all rows, and return hidden states, [rows, more, hidden size]. No pass has
    more rows than the runner's buffers hold. The caller says how many, and may let the rest wait for a later step.

    kv: forked as the rows are. tokens: [rows, more] integers, prompt by prompt.
    """
    (rows, more), requests = tokens.shape, [one.request for one in kv.prompts]
    most = min(kv.most_rows, runner.input_buffers.max_num_tokens // more)
    adapters = np.repeat([one.slot for one in kv.prompts], rows // len(kv.prompts))
    outputs, start = list[Tensor](), 0
    while start < rows:
        part = slice(start, start + (yield Piece("pass", min(most, rows - start), more)))
        start = part.stop
        use_adapters(runner, requests, adapters[part].repeat(more))
        runner.kv_connector.set_disabled(True)  # it would take the layers of a pass for those of the step that it saves
        try:
            output = _run(runner, tokens[part], kv.metadata(part, more), requests, kv.recorded)
        finally:
            runner.kv_connector.set_disabled(False)
        outputs.append(output if kv.recorded else output.clone())  # the next pass, or step, overwrites it
    kv.grow()
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output.view(rows, more, -1)


def use_adapters(runner: Any, requests: list[str], slots: np.ndarray) -> None:
    """Set the LoRA adapters of the next pass's tokens by slot; none for an ended request, whose slot may be reused."""
    if runner.lora_config:
        active, ids = runner.lora_state.get_activate_loras(requests), runner.lora_state.lora_ids[slots]
        each = tuple(np.where(np.isin(ids, [one.lora_int_id for one in active]), ids, 0))
        runner._set_active_loras(each, each, active)


def _run(runner: Any, tokens: Tensor, beams: list[BeamMetadata], requests: list[str], recorded: bool) -> Tensor:
    """Return a pass's hidden states of all tokens, valid until the next one. beams: of each group of the KV cache.
    recorded: a graph may hold no other."""
    count, buffers = beams[0].tokens, runner.input_buffers
    shape = _shape(runner, len(tokens), count, requests, recorded)
    padded = max(count, shape.num_tokens)
    buffers.input_ids[:count].copy_(tokens.reshape(-1))
    buffers.is_padding[:count] = False
    buffers.is_padding[count:padded] = True
    mapping = runner.block_tables.slot_mappings[:, :padded]
    mapping.fill_(PAD_SLOT_ID)  # the tokens' KV goes to entries of their own
    inputs = {"input_ids": buffers.input_ids[:padded], "positions": buffers.positions[:padded]}
    inputs |= dict.fromkeys(("inputs_embeds", "intermediate_tensors"))
    inputs |= runner.model_state.prepare_dummy_inputs(len(tokens), padded)  # the buffers of a step's own
    inputs["positions"][..., :count] = beams[0].positions.reshape(-1)  # alike in all dimensions, as of any text
    if inputs["inputs_embeds"] is not None:
        inputs["inputs_embeds"][:count] = runner.model.embed_input_ids(buffers.input_ids[:count])
        if not requires_raw_input_tokens(runner.model):
            inputs["input_ids"] = None
    lora = runner.lora_config is not None
    with set_forward_context(
        {name: beams[group] for name, group in beam_attention.layer_groups(runner).items()},
        runner.vllm_config,
        num_tokens=padded,
        cudagraph_runtime_mode=shape.cg_mode,
        batch_descriptor=BatchDescriptor(padded, has_lora=lora, num_active_loras=shape.num_active_loras),
        slot_mapping=build_slot_mappings_by_layer(mapping, runner.kv_cache_config),
        is_padding=buffers.is_padding[:padded],
    ):
        if shape.cg_mode == CUDAGraphMode.PIECEWISE:
            return runner.cudagraph_manager.run_pw_graph(runner.model, inputs)[:count]
        output = runner.model(**inputs)
    return (output[0] if isinstance(output, tuple) else output)[:count]  # beside what a draft model reads


@contextlib.contextmanager
def kept_for_drafts(runner: Any) -> Iterator[None]:
    """Give a draft model, which reads them after the passes, the step's buffers as they were before."""
    own = runner.input_buffers
    buffers = own.input_ids, own.positions, own.is_padding, runner.block_tables.slot_mappings
    kept = [one.clone() for one in buffers] if runner.speculator is not None else []
    yield
    for buffer, before in zip(buffers, kept, strict=False):
        buffer.copy_(before)


def _shape(runner: Any, rows: int, count: int, requests: list[str], recorded: bool = False) -> Any:
    """Return what vLLM has recorded for a pass: the pieces between layers' attention, or nothing. A full CUDA graph
    holds another attention, and the step's own hidden states, which a draft model reads after the passes, may lie in
    the pieces' memory. count: tokens of all rows."""
    adapters = len(runner.lora_state.get_activate_loras(requests)) if runner.lora_config else 0
    shape = runner.cudagraph_manager.dispatch(rows, count, None, adapters)
    if shape.cg_mode != CUDAGraphMode.FULL and not recorded and runner.speculator is None:
        return shape
    return dataclasses.replace(shape, cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=rows)
