"""Ranked lists in the worker: a request for one is answered in the step that completes its prompt.

All rounds of a list run there, after the step's sampling, so that nothing of it is left when the step ends: neither
blocks of the KV cache nor anything that an abort would have to free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itemset.ranking.beams import Beams, LevelPlan, table_of
from itemset.ranking.races import Races, warm_up
from itemset.serving.words import LIST, PLACE, RACES
from vllm_static.branches import Branches, Prompt, scratch_needed, to_device
from vllm_static.drafted_lists import MOST_LOGITS, Asked, DraftedLists
from vllm_static.one_request import NO_BLOCKS, NO_ROOM, TOO_DEEP, TOO_LARGE, TOO_LONG
from vllm_static.passes import borrowed, logits_after, use_adapters
from vllm_static.processor import item_sets

MOST_ROUNDS = 16  # of a list: its neighbours in the step wait for all of them
MOST_STEPS = 4  # so many full steps a list may take


class WideLists:
    """The lists of a worker's steps.

    asked: those whose prompts are not complete, by request.
    drafted: the lists that a draft head makes; None without one.
    narrow: whether a pass has only the rows that can lead to something better. The host must read how many they are: on
    a CPU it waits for nothing. On an accelerator shapes stay as the set's levels bound them, and nothing is read.
    """

    def __init__(self, runner: Any, blocks: int, *, apart: bool = False) -> None:
        """blocks: the KV cache's last ones, which no request has. apart: whether prompts are read once for all rows."""
        self._runner, count, self._apart = runner, runner.kv_cache_config.num_blocks, apart
        self._scratch = range(count - blocks, count)
        self._block = runner.block_tables.block_sizes[0]
        self._token_bytes: int = runner.vocab_size * runner.model_config.head_dtype.itemsize  # logits of a token
        self._sets = item_sets(runner)
        self.asked: dict[str, Asked] = {}
        self.narrow = runner.device.type == "cpu"
        self.drafted = None if self._sets.head is None else DraftedLists(runner, self._sets)
        if blocks:
            self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        runner = self._runner
        use_adapters(runner, [], np.zeros(1, np.intp))
        hidden = torch.zeros(1, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
        warm_up(self._sets.arena, runner.model.compute_logits(hidden)[:, None], kernels=self._sets.kernels)

    def add(self, request: str, slot: int, extra: dict[str, Any]) -> None:
        """Note that a request asks for a list. On the host path it has no place in the arena, and gets none."""
        wanted, place = extra.get(LIST), extra.get(PLACE)
        self.remove(request)
        if wanted is not None and place is not None:
            k, width, end_token, renormalised, placeholders = wanted
            length = int(self._runner.req_states.prompt_len.np[slot])
            temperature, *races = extra.get(RACES) or [0.0]
            prompt = Prompt(request, slot, length)
            one = Asked(place[0], width, end_token, renormalised, k, prompt, temperature, tuple(races))
            if placeholders:
                assert self.drafted is not None  # the front end has the same configuration
                self.drafted.add(one)
            else:
                self.asked[request] = one

    @property
    def waiting(self) -> bool:
        """Whether any list is still to be made."""
        return bool(self.asked) or (self.drafted is not None and bool(self.drafted.asked))

    def remove(self, request: str) -> None:
        """Forget a request that has ended, or was aborted."""
        self.asked.pop(request, None)
        if self.drafted is not None:
            self.drafted.asked.pop(request, None)

    def answer(self, hidden_states: Tensor, batch: Any) -> dict[str, Tensor]:
        """Make the lists whose prompts this step completes: of each request a table, [1 + k, 2 + longest] float64.

        Its first row begins with 1 if the list is proven, the passes and the rounds that it took. Then a row is an
        item's score, how many tokens it has, and these; a score of -inf says that there are no more. Of draws the table
        has the items of each race, one race after another; -inf stands for those that are not decided, too, and the
        first number is 1 if all are. A list that cannot be made has a table of one number instead, of
        `one_request.REASONS`.
        """
        drafted = {} if self.drafted is None else self.drafted.answer(hidden_states, batch)
        if not self.asked:
            return drafted
        complete = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        rows = [i for i, request in enumerate(batch.req_ids) if complete[i] and request in self.asked]
        ready = [self.asked.pop(batch.req_ids[i]) for i in rows]
        reasons = [self._reason(one) for one in ready]
        tables = {
            one.prompt.request: torch.tensor([[reason]], dtype=torch.float64)
            for one, reason in zip(ready, reasons, strict=True)
            if reason is not None
        }
        kept = [(i, one) for i, one, reason in zip(rows, ready, reasons, strict=True) if reason is None]
        tables |= drafted
        if not kept:
            return tables
        kept.sort(key=lambda pair: pair[1].kind)
        self._sets.arena.use([one.number for _, one in kept])
        at = batch.logits_indices[to_device([i for i, _ in kept], hidden_states.device)]
        lists = [one for _, one in kept]
        use_adapters(self._runner, [one.prompt.request for one in lists], np.array([one.prompt.slot for one in lists]))
        logits = self._runner.model.compute_logits(hidden_states[at])
        apart = [(row, each) for row, one in enumerate(lists) for each in one.apart]
        if len(apart) > len(lists):
            logits = logits[to_device([row for row, _ in apart], logits.device)]
        parts: dict[str, list[Tensor]] = {one.prompt.request: [] for one in lists}
        with borrowed(self._runner):
            first = 0
            for group in self._groups([one for _, one in apart]):
                made = self._make(group, logits[first : first + len(group)])
                for one, table in zip(group, made, strict=True):
                    parts[one.prompt.request].append(table)
                first += len(group)
        return tables | {request: _joined(some) for request, some in parts.items()}

    def _reason(self, one: Asked) -> int | None:
        """Why a list cannot be made here; a number of `one_request.REASONS`."""
        if not self._scratch:
            return NO_BLOCKS
        plan, most = self._sets.arena.level_plan(one.number), self._runner.max_num_tokens
        if plan.levels > MOST_ROUNDS:
            return TOO_DEEP
        shapes = _shapes(plan, one)
        tokens = len(one.apart) * sum(rows * more for rows, more in shapes)
        if max(more for _, more in shapes) > most or tokens > MOST_STEPS * most:
            return TOO_LONG
        if self._largest([one]) > MOST_LOGITS:
            return TOO_LARGE
        return None if self._fit([one]) else NO_ROOM

    def _largest(self, lists: Sequence[Asked]) -> int:
        """Bytes of the logits of these lists' largest pass."""
        shapes = _shapes(self._sets.arena.level_plan(lists[0].number), lists[0])
        tokens: int = len(lists) * max(rows * more for rows, more in shapes)
        return tokens * self._token_bytes

    def _fit(self, lists: Sequence[Asked]) -> bool:
        """Whether there is room for these lists, which are of one set and as wide: blocks and logits."""
        plan = self._sets.arena.level_plan(lists[0].number)
        rows = max(rows for rows, _ in _shapes(plan, lists[0]))
        needed = scratch_needed([one.prompt for one in lists], rows, plan.longest, self._block)
        return needed <= len(self._scratch) and self._largest(lists) <= MOST_LOGITS

    def _groups(self, lists: Sequence[Asked]) -> Iterator[list[Asked]]:
        """Lists that go through their passes together: of one set, as wide, and no more than have room."""
        for _, alike in groupby(lists, key=lambda one: one.kind):
            group: list[Asked] = []
            for one in alike:
                if not self._fit([*group, one]):
                    yield group
                    group = []
                group.append(one)
            yield group

    def _beams(self, group: list[Asked], plan: LevelPlan) -> Beams:
        """The beams of some lists that have the same kind, or of some races."""
        one, arena = group[0], self._sets.arena
        options: dict[str, Any] = {"width": one.width, "k": one.k, "end_token": one.end_token}
        options["kernels"] = self._sets.kernels
        numbers = [one.number] * len(group)
        if not one.races:
            return Beams(arena, numbers, plan, renormalised=bool(one.renormalised), **options)
        keys = to_device([key for race in group for key in race.races], arena.device)
        return Races(arena, numbers, plan, keys, temperature=one.temperature, **options)

    def _make(self, group: list[Asked], logits: Tensor) -> Tensor:
        """The tables of some lists that have the same kind, or of some races: [lists, 1 + k, 2 + longest]."""
        one, runner = group[0], self._runner
        plan = self._sets.arena.level_plan(one.number)
        beams = self._beams(group, plan)
        rows = max(rows for rows, _ in _shapes(plan, one))
        prompts = [other.prompt for other in group]
        branches = Branches(runner, prompts, rows, plan.longest, self._scratch, apart=self._apart)
        beams.round(logits[:, None])
        while self._go_on(beams):
            known = beams.taken - 1
            if known == 0:
                branches.begin()
            else:
                branches.fork(beams.parents[:, : beams.rows if self.narrow else rows], known)
            tokens = beams.next_inputs[:, : beams.rows].flatten(0, 1)
            beams.round(logits_after(runner, branches, tokens, known))
        result = table_of(beams.decided)
        head = torch.zeros_like(result[:, :1])
        head[:, 0, 0] = beams.proven
        head[:, 0, 1:3] = beams.took
        return torch.cat((head, result), 1)

    def _go_on(self, beams: Beams) -> bool:
        """Whether another pass is needed, of the rows that can lead to something better if they can be counted."""
        if self.narrow:
            beams.narrow()
        return beams.passes_left > 0


def _joined(tables: list[Tensor]) -> Tensor:
    """One table of those of the races of a request, or of its list. All of them begin with the pass of the prompt."""
    if len(tables) == 1:
        return tables[0]
    heads = torch.stack([table[0] for table in tables])
    head = heads.amax(0)
    head[0], head[1] = heads[:, 0].amin(), heads[:, 1].sum() - (len(tables) - 1)
    return torch.cat((head[None], *(table[1:] for table in tables)))


def _shapes(plan: LevelPlan, one: Asked) -> list[tuple[int, int]]:
    """Of each pass of a list: how many rows it has, and how many tokens each of them."""
    shapes, rows = [], 1
    for level, tail in enumerate(plan.tails):
        rows = min(one.width, plan.children(level, rows))
        shapes.append((rows, 1 if one.renormalised else 1 + tail))
    return shapes
