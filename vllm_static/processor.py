"""The device path in the worker: one logits processor that keeps every slot's state and masks the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

import itemset
from itemset.arena import Arena
from itemset.batch import Batch
from itemset.slots import NO_SET, Slots
from vllm_static.catalogue import Catalogue
from vllm_static.config import StaticConfig
from vllm_static.device import MAX_STOP_TOKENS, plan_for
from vllm_static.front import INDEX, PLACE, REFERENCE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


class ItemSetProcessor(LogitsProcessor):
    """Model runner V2's interface (v1/worker/gpu/sample/logits_processor/interface.py) over `itemset.slots`.

    Made while the model is loaded, so that vLLM sizes its KV cache with what the arena leaves. Only the last pipeline
    rank samples; on the others there is no arena, and no request arrives.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._req_states = req_states
        # [max_num_reqs] whether the slot's request has a set, and the committed tokens its slot has yet to walk.
        self._constrained = np.zeros(req_states.max_num_reqs, np.bool_)
        self._behind = np.zeros(req_states.max_num_reqs, np.int64)
        self._staged: dict[int, list[int]] = {}  # slot -> its set and marks, as `Slots.assign` takes them
        self._drafts = 0
        if vllm_config.speculative_config is not None:
            self._drafts = vllm_config.speculative_config.num_speculative_tokens
        if get_pp_group().is_last_rank:
            self._load(StaticConfig.of(vllm_config.additional_config), vllm_config)

    def _load(self, config: StaticConfig, vllm_config: VllmConfig) -> None:
        registered = Catalogue(config).registered
        plan = plan_for(config, registered.values())
        self._arena = Arena(plan.nbytes, self._req_states.device)
        for item_set in registered.values():
            self._arena.acquire(item_set)
        rows = vllm_config.scheduler_config.max_num_seqs * (1 + self._drafts)
        self._slots = Slots(
            self._arena,
            self._req_states.max_num_reqs,
            max_rows=rows,
            max_stop_tokens=MAX_STOP_TOKENS,
            kernels=config.item_set_kernels,  # type: ignore[arg-type]
        )
        self._registered = registered
        self._warm_up()
        logger.info(
            "Item sets on %s: %s bytes, of which the registered sets take %s",
            self._arena.device,
            f"{plan.nbytes:,}",
            f"{plan.used:,}",
        )

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Stage the request's set. Also called when it comes back after preemption: its output is walked again."""
        extra = sampling_params.extra_args or {}
        place = extra.get(PLACE)
        if place is None:
            if self._constrained[req_idx]:
                self._staged[req_idx] = [NO_SET] + [-1] * (1 + MAX_STOP_TOKENS)
            self._constrained[req_idx] = False
            return False
        number, start, begins_behind = place
        item_set = self._registered.get(extra[REFERENCE])
        self._arena.place(item_set or itemset.from_bytes(extra[INDEX]), number, start)
        stops = sorted(sampling_params.all_stop_token_ids)
        self._staged[req_idx] = [number, begins_behind, *stops, *[-1] * (MAX_STOP_TOKENS - len(stops))]
        self._constrained[req_idx] = True
        self._behind[req_idx] = self._req_states.prefill_len.np[req_idx] - self._req_states.prompt_len.np[req_idx]
        return True

    def apply_staged_writes(self) -> None:
        if not self._staged:
            return
        rows = torch.tensor([[slot, *row] for slot, row in self._staged.items()], dtype=torch.int32)
        device = self._req_states.device
        rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows
        self._slots.assign(rows[:, 0], rows[:, 1], rows[:, 2:])
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Launch `Slots.step` for all rows: those without a set, padding and drafts included."""
        slots = ctx.idx_mapping_np
        if not self._constrained[slots].any():
            return logits
        # What the host knows: one token and the accepted drafts a step, and the output so far of one that comes back.
        most = int(self._behind[slots].max()) + 1 + self._drafts
        self._behind[slots] = 0
        self._slots.step(
            self._batch(ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.input_ids), logits, most=most
        )
        return logits

    def _batch(self, slots: torch.Tensor, above: torch.Tensor, tokens: torch.Tensor) -> Batch:
        states = self._req_states
        return Batch(
            slots=slots,
            history=states.all_token_ids.gpu,
            begin=states.prompt_len.gpu,
            end=states.total_len.gpu,
            above=above,
            tokens=tokens,
            max_drafts=self._drafts,
        )

    def _warm_up(self) -> None:
        """Compile the kernels now: a first request should not wait for them."""
        device = self._req_states.device

        def zeros(dtype: torch.dtype) -> Any:
            return torch.zeros(1, dtype=dtype, device=device)

        logits = torch.zeros(1, self._req_states.vocab_size, device=device)
        self._slots.step(self._batch(zeros(torch.int64), zeros(torch.int32), zeros(torch.int32)), logits, most=1)
