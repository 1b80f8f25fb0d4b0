"""Triton's kernel of `child_sampling`: in one launch what may follow each row, its logits, the noise, and the best."""

import torch
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax, gumbel_sample

import itemset
from itemset.masking import triton_tables as tables
from itemset.masking.arena import Arena, ArenaFullError
from itemset.masking.batch import refuse_strides
from itemset.masking.triton_kernels import LANES, stop_lanes
from itemset.trie.walk import STATE_BITS

WARPS = 4
TRIED = 500  # tokens of the trial


def sample(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, temperatures: Tensor, seeds: Tensor,
    positions: Tensor, fp64: bool,
) -> Tensor:  # fmt: skip
    """Return the token of each row, [rows] int64: of what may follow its state; of all tokens if nothing constrains it.

    logits: [rows, vocabulary], which are not changed. states: [rows] int64, as of `Slots`. slots: [rows] integers, of
    marks, temperatures and seeds, each [slots]. positions: [rows] int64, which with its seed place a row's noise. fp64:
    whether the noise is drawn in float64. Among equal values the lowest token is taken.
    """
    refuse_strides(logits=logits, states=states, marks=marks, slots=slots)
    sampled = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    sample_kernel[(len(states),)](
        arena.words, arena.sets, states, slots, marks, marks.stride(0), logits, logits.stride(0), logits.shape[1],
        temperatures, seeds, positions.contiguous(), sampled, **stop_lanes(marks), LANES=LANES, FP64=fp64,
        num_warps=WARPS,
    )  # fmt: skip
    return sampled


def is_as_masked(arena: Arena, marks: Tensor, like: Tensor, *, fp64: bool) -> bool:
    """Try it on this device: return whether the same noise samples the same tokens as from masked logits.

    marks: of all slots, of which the first is free. like: [1, vocabulary], of the model's dtype. fp64: as of `sample`.
    """
    items = itemset.build([[token] for token in range(0, like.shape[1], 1 + like.shape[1] // TRIED)])
    rows, seeds = torch.arange(4, device=like.device), torch.full((1,), 7, device=like.device)
    try:
        number = arena.acquire(items)
    except ArenaFullError:
        return False
    states, slots = torch.full_like(rows, number) << STATE_BITS, torch.zeros_like(rows)
    generator = torch.Generator().manual_seed(0)  # of the host: all ranks try the same
    logits = torch.randn(len(rows), like.shape[1], generator=generator).to(like.device, like.dtype)
    masked = arena.kernels.mask(arena, logits.clone(), states, marks, slots).float()
    same, how = True, {"apply_temperature": True, "is_drafting": False, "use_fp64": fp64}
    for temperature in (0.7, 1.0):
        temperatures = torch.full((1,), temperature, device=like.device)
        sampled = sample(arena, logits, states, marks, slots, temperatures, seeds, rows, fp64)
        same &= torch.equal(sampled, gumbel_sample(masked, slots, temperatures, seeds, rows, **how))
    arena.release(number)
    return same


@tables.jit
def sample_kernel(
    words, sets, states, slots, marks, marks_stride, logits, logits_stride, vocabulary, temperatures, seeds, positions,
    sampled, STOPS: tl.constexpr, STOP_LANES: tl.constexpr, LANES: tl.constexpr, FP64: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    state = tl.load(states + row)
    local = state & tables.LOCAL
    fields = tables.set_fields(sets, state)
    temperature = tl.load(temperatures + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    seed = tl.load(seeds + slot, mask=slot >= 0, other=0)
    position = tl.load(positions + row)
    mine = logits + row * logits_stride

    is_free = ~((local < tables.WAITING) | (local >= tables.END)) | (slot < 0)
    ended = (local == tables.END) & ~is_free
    first, count, tail_token, may_end = local * 0, local * 0, local * 0 - 1, ended
    if is_free:
        count += vocabulary
    elif local >= tables.TAIL:
        tail_token, _ = tables.tail_entry(words, fields, local, True)
        count += 1
    elif local < tables.WAITING:
        may_end = tables.ends_here(words, fields, local)
        first, end = tables.row_bounds(words, fields, local)
        count = end - first

    best = tl.full((), -float("inf"), tl.float64 if FP64 else tl.float32)
    token = tl.full((), -1, tl.int64)
    in_tail = tail_token >= 0
    for low in range(0, count, LANES):
        lane = low + tl.arange(0, LANES)
        is_edge = (lane < count) & ~is_free & ~in_tail
        label = tables.element(words, fields, tables.LABELS, first + lane, tables.NARROW_LABELS, is_edge)
        label = tl.where(is_free, lane.to(tl.int64), tl.where(in_tail, tail_token, label.to(tl.int64)))
        stays = (lane < count) & (label < vocabulary)
        stays = stays & (~is_edge | tables.is_alive(words, fields, first + lane, is_edge, fields[tables.DEAD_COUNT]))
        logit = tl.load(mine + label, mask=stays, other=-float("inf")).to(tl.float32)
        value, at = gumbel_noised_argmax(logit, label, stays, seed, position, temperature, False, FP64)
        any_stays = tl.max(stays.to(tl.int32), 0) > 0
        found = tl.sum(tl.where(tl.arange(0, LANES) == at, label, 0), 0)
        better = any_stays & ((value > best) | (token < 0))
        best, token = tl.where(better, value, best), tl.where(better, found, token)
    if may_end & (slot >= 0):
        lane = tl.arange(0, STOP_LANES)
        stop = tl.load(marks + slot * marks_stride + 1 + lane, mask=lane < STOPS, other=-1).to(tl.int64)
        stays = (stop >= 0) & (stop < vocabulary)
        logit = tl.load(mine + stop, mask=stays, other=-float("inf")).to(tl.float32)
        logit = tl.where(ended & stays & (logit == -float("inf")), 0.0, logit)
        value, at = gumbel_noised_argmax(logit, stop, stays, seed, position, temperature, False, FP64)
        found = tl.sum(tl.where(lane == at, stop, 0), 0)
        better = (value > best) | ((value == best) & (found < token)) | (token < 0)
        better = better & (tl.max(stays.to(tl.int32), 0) > 0)
        token = tl.where(better, found, token)
    tl.store(sampled + row, tl.maximum(token, 0))
