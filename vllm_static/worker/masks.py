"""The device path in the worker: one logits processor that keeps every slot's state and masks the whole batch."""

import contextlib
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor, LogitsProcRequestState

import itemset
from itemset.masking.arena import Arena, ArenaFullError, check_tables
from itemset.masking.batch import COLUMNS, LOCAL, Batch
from itemset.masking.slots import MAX_STOP_TOKENS, NO_SET, Slots, as_table, log_probs_of
from itemset.serving.catalogue import Catalogue
from itemset.serving.config import StaticConfig
from itemset.serving.wire import EngineRequest, read
from itemset.trie.walk import FREE
from vllm_static import compat
from vllm_static.compat import logger
from vllm_static.worker.narrow_head import NarrowHead

_PADDING = 64  # columns of a model's head are a multiple of this (model_executor/layers/vocab_parallel_embedding.py)
_NO_SET = "requests without a set"


class ItemSetProcessor(LogitsProcessor):
    """Model runner V2's interface (v1/worker/gpu/sample/logits_processor/interface.py) over `Slots`.

    Made while the model is loaded, so that vLLM sizes its KV cache with what the arena leaves. Only the last pipeline
    rank samples; on the others there is no arena, and no request arrives.
    """

    lists: Any = None  # the WideLists that makes ranked lists in this worker's steps, if they are made there
    child_sampling = False  # whether answers are sampled from what may follow, if nothing else is asked of them

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        compat.is_ours(vllm_config)  # as this process has not known yet
        self._req_states = req_states
        # [max_num_reqs] the set of the slot's request, the temperature at which its answer's tokens have
        # log-probabilities, 0 if nobody asks for them, and whether it is for a list, whose own tokens do not matter.
        self._numbers = np.full(req_states.max_num_reqs, NO_SET, np.int64)
        self.temperatures = np.zeros(req_states.max_num_reqs, np.float32)
        self.are_lists = np.zeros(req_states.max_num_reqs, np.bool_)
        self._plain = np.zeros(req_states.max_num_reqs, np.bool_)  # whether nothing but a temperature is asked for
        # Of each slot the tokens of its set, as `Arena.alphabet` gives them, or why logits of all tokens are needed.
        self._alphabets: list[bytes | str] = [_NO_SET] * req_states.max_num_reqs
        self._staged: dict[int, list[int]] = {}  # slot -> length of its prompt, its set, its marks but for the padding
        if get_pp_group().is_last_rank:
            with compat.kept_through_sleep(vllm_config):
                self._load(StaticConfig.of(vllm_config.additional_config), vllm_config)

    def _load(self, config: StaticConfig, vllm_config: VllmConfig) -> None:
        speculative, device = vllm_config.speculative_config, self._req_states.device
        slots, count = self._req_states.max_num_reqs, 0 if speculative is None else speculative.num_speculative_tokens
        self.catalogue = Catalogue(config)
        self.child_sampling = compat.is_on(config.item_set_child_sampling, device)
        self.arena = Arena(self.catalogue.arena_bytes(), device, kernels=config.item_set_kernels)
        self.narrow = NarrowHead(config, device)
        for item_set in self.catalogue.registered.values():
            check_tables(item_set)
            self.arena.acquire(item_set)
        rows = vllm_config.scheduler_config.max_num_seqs * (1 + count)
        self._slots = Slots(self.arena, slots, max_rows=rows, max_stop_tokens=MAX_STOP_TOKENS)
        self.head: Any = None  # a DraftHead
        if config.item_set_draft_head is not None:
            from itemset.draft_head.head import DraftHead

            self.head = DraftHead.load(config.item_set_draft_head, device)
        # [max_num_reqs] each slot's prompt length; vLLM's own moves to another address, which no CUDA graph would see.
        self._begin = torch.zeros(slots, dtype=torch.int32, device=device)
        if speculative is not None:
            from vllm_static.worker import drafts

            drafts.install(self, speculative, forced=config.forced_drafts)
        self._warm_up(vllm_config.model_config, count)
        sizes = (f"{count:,}" for count in (self.arena.plan.nbytes, self.arena.plan.used))
        logger.info("Item sets on %s: %s bytes, of which the registered sets take %s", device, *sizes)

    def constrained(self, slots: np.ndarray) -> bool:
        return bool((self.are_lists[slots] | (self._numbers[slots] != NO_SET)).any())

    def alphabet_of(self, slots: np.ndarray) -> bytes | str:
        """Return the one alphabet of these requests, but for lists; or why there is none."""
        given = [self._alphabets[slot] for slot in slots[~self.are_lists[slots]].tolist()]
        if given.count(given[0]) == len(given):  # as nearly ever, and counted without Python's own loop
            return given[0]
        return next((one for one in given if isinstance(one, str)), "sets with other tokens")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Stage the request's set. Also called when it comes back after preemption: its output is walked again.

        Returns False: `hooks.apply_sampling_params` masks without a copy of the batch's logits.
        """
        carried = read(sampling_params.extra_args) or EngineRequest()
        self.temperatures[req_idx] = carried.weighs_at(sampling_params.temperature)
        self.are_lists[req_idx] = carried.ranked is not None
        if self.child_sampling:
            from vllm_static.worker.child_sampling import is_plain

            self._plain[req_idx] = is_plain(sampling_params) and not carried.weighed
        if self.lists is not None:
            self.lists.add(req_idx, carried)
        place, ref = carried.place, carried.item_set
        if place and ref and not self.arena.holds(place.digest, place.number, place.start):
            below = self.arena.view(place.below[-1][0]) if place.below else None
            item_set = self.catalogue.receive(ref, below, keep=False).item_set
            self.arena.place(item_set, place.number, place.start, place.below)
        if place is None or carried.ranked is not None:  # the one token of a list's request does not matter
            if self._numbers[req_idx] != NO_SET:
                self._staged[req_idx] = [0, NO_SET]
            self._numbers[req_idx], self._alphabets[req_idx] = NO_SET, _NO_SET
            return False
        prompt, stops = int(self._req_states.prompt_len.np[req_idx]), sorted(sampling_params.all_stop_token_ids)
        self._staged[req_idx] = [prompt, place.number, place.begins_after, *stops]
        self._numbers[req_idx] = place.number
        self._plain[req_idx] &= place.begins_after == -1  # until then any token may follow
        why_not = self.narrow.why_not or ("constraints that begin later" if place.begins_after != -1 else None)
        self._alphabets[req_idx] = why_not or self.arena.alphabet(place.number, tuple(stops))
        return False

    def apply_staged_writes(self) -> None:
        """Bring what requests have staged to the device. vLLM calls it as a step begins."""
        if self.lists is not None:
            self.lists.start_step()
        if not self._staged:
            return
        table = as_table([[slot, *row] for slot, row in self._staged.items()], 4 + MAX_STOP_TOKENS)
        rows = compat.to_device(table, self._req_states.device, np.int32)
        self._begin.index_copy_(0, rows[:, 0].long(), rows[:, 1])
        self._slots.assign(rows[:, 0], rows[:, 2], rows[:, 3:])
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Mask a copy of the logits, which vLLM has made because a request of the batch asks for more than a set."""
        layout = {"above": ctx.expanded_local_pos, "tokens": ctx.input_ids, "positions": ctx.pos}
        return self.mask_rows(logits, ctx.expanded_idx_mapping, ctx.idx_mapping_np, **layout)

    def mask_rows(
        self, logits: torch.Tensor, slots: torch.Tensor, requests: np.ndarray, *, raw: bool = False, **layout: Any
    ) -> torch.Tensor:
        """Launch `Slots.step` for all rows, in place: those without a set, padding and drafts included.

        logits: [rows, vocabulary], any floating type. slots: [rows]. requests: [requests], their slots. raw: whether
            somebody reads the logits as they were: a copy is masked then. layout: of the drafts, as in `Batch`.
        """
        numbers = self._numbers[requests]
        if (numbers == NO_SET).all():
            return logits
        self.arena.use(numbers)
        batch = self._batch(slots, **layout)
        logits = logits.clone() if raw or self.temperatures[requests].any() else logits
        self._slots.step(batch, logits)
        return logits

    def weigh(self, logits: torch.Tensor, input_batch: Any, logprobs: Any) -> None:
        """Write the log p and log q that requests ask for into the first of their columns, after the sampling.

        logits: [rows, vocabulary], as the model gave them. logprobs: LogprobsTensors, a row each; NaN for a request on
        the host path, whose logits were masked before.
        """
        each = self.temperatures[input_batch.idx_mapping_np].repeat(np.diff(input_batch.cu_num_logits_np))
        if not each.any():
            return
        rows = compat.to_device(np.flatnonzero(each), logits.device)
        at, slots = input_batch.logits_indices, input_batch.expanded_idx_mapping
        tokens, positions = input_batch.input_ids[at], input_batch.positions[at]
        batch = self._batch(slots, above=input_batch.expanded_local_pos, tokens=tokens, positions=positions)
        states = self._slots.walk(batch)[rows]  # again: long batches of drafts are masked in several pieces
        legal = logits[rows].float() / compat.to_device(each[each > 0], logits.device, np.float32)[:, None]
        whole = legal.logsumexp(-1)
        self._slots.mask(states, slots[rows], legal)
        logs = log_probs_of(legal, whole, logprobs.logprob_token_ids[rows, 0])
        logprobs.logprobs[rows, :2] = logs.masked_fill_((states & LOCAL == FREE)[:, None], torch.nan)

    def samples_children(self, slots: np.ndarray) -> bool:
        """Return whether all of these requests are answers of sets that ask for nothing but a temperature."""
        return bool((self._plain[slots] & (self._numbers[slots] != NO_SET)).all())

    def sample_children(
        self, logits: torch.Tensor, slots: torch.Tensor, requests: np.ndarray, temperatures: torch.Tensor,
        seeds: torch.Tensor, positions: torch.Tensor, *, fp64: bool, **layout: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Walk all rows and sample each from what may follow it, [rows] int64: `triton_child_sampling.sample`."""
        from vllm_static.worker.triton_child_sampling import sample

        self.arena.use(self._numbers[requests])
        states = self._slots.walk(self._batch(slots, positions=positions, **layout))
        return sample(self.arena, logits, states, self._slots.marks, slots, temperatures, seeds, positions, fp64)

    def mask_drafts(
        self, logits: torch.Tensor, slots: torch.Tensor, draft_step: torch.Tensor, draft_tokens: torch.Tensor
    ) -> None:
        """Mask a draft model's logits, [rows, vocabulary], in place: a draft continues an item, or ends it.

        slots: [rows], -1 for padding. draft_step: one integer on the device, how many drafts each row has.
        draft_tokens: [at least rows, drafts], the drafts so far.
        """
        batch = self._batch(slots, above=draft_step.view(1), tokens=draft_tokens[: len(slots)], layout=COLUMNS)
        self._slots.step(batch, logits)

    def force_drafts(self, drafts: torch.Tensor, slots: torch.Tensor, slots_np: np.ndarray) -> None:
        """Overwrite drafts, [rows, k], of requests with a set by what the set forces, and then by guesses within it."""
        if (self._numbers[slots_np] == NO_SET).all():
            return
        states = self._slots.walk(self._batch(slots))
        self._slots.forced(states, slots, drafts, guess=True)

    def _batch(self, slots: torch.Tensor, **layout: Any) -> Batch:
        states = self._req_states
        return Batch(slots, states.all_token_ids.gpu, self._begin, states.total_len.gpu, **layout)

    def _warm_up(self, model_config: Any, drafts: int) -> None:
        """Compile the kernels now, and the check of a set's tables: a first request should not wait for them."""
        device, vocabulary = self._req_states.device, self._req_states.vocab_size
        with contextlib.suppress(ArenaFullError):
            self.arena.release(self.arena.acquire(itemset.build([[0, 0, 1], [0, 1]])))
        slot = torch.zeros(1, dtype=torch.int64, device=device)  # and whatever else is one integer
        batch = self._batch(slot, above=slot.int(), tokens=slot.int(), positions=slot)
        for dtype in {model_config.dtype, torch.float32}:  # the model's logits, and copies of them
            for stride in {vocabulary, vocabulary + -vocabulary % _PADDING}:
                logits = torch.zeros(1, stride, dtype=dtype, device=device)[:, :vocabulary]
                self._slots.step(batch, logits)
                self._slots.mask(self._slots.walk(batch), slot, logits)  # as `weigh`
        logits = torch.zeros(1, vocabulary, dtype=model_config.dtype, device=device)
        if self.child_sampling:
            from vllm_static.worker.triton_child_sampling import is_as_masked

            given = self.arena, self._slots.marks, logits
            self.child_sampling = is_as_masked(*given, fp64=model_config.use_fp64_gumbel)
            if not self.child_sampling:
                logger.warning("Answers are sampled from masked logits: without a mask other tokens were sampled")
        if drafts:  # as `force_drafts` and `mask_drafts`
            states = self._slots.walk(self._batch(slot))
            proposed = torch.zeros(1, drafts, dtype=torch.int64, device=device)
            self._slots.forced(states, slot, proposed, guess=True)
            self.mask_drafts(logits, slot, slot, proposed)
