"""Ranked lists in the worker: a request for one is answered in the step that completes its prompt.

All rounds of a list run there, after the step's sampling, so that nothing of it is left when the step ends: neither
blocks of the KV cache nor anything that an abort would have to free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itemset.ranking.beams import Beams, LevelPlan, table_of, warm_up
from itemset.ranking.lockstep import Lockstep, rows_of_passes
from itemset.serving.wire import GRAPHS, HEAD, REASONS, EngineRequest, NoList
from vllm_static.branch_forward import borrowed, logits_after, ran, run_logits, use_adapters
from vllm_static.draft_head_lists import Asked, DraftedLists, grouped
from vllm_static.kv_branches import Branches, Prompt, scratch_needed, to_device
from vllm_static.narrow_head import Alphabet
from vllm_static.processor import item_sets
from vllm_static.step_list_hooks import Room

MOST_ROUNDS = 16  # of a list: its neighbours in the step wait for all of them
MOST_STEPS = 4  # full steps that a list may take


class WideLists:
    """The lists of a worker's steps.

    asked: those whose prompts are not complete, by slot. drafted: the lists of a draft head; None without one.
    narrow: whether a pass has only the rows that can lead to something better, which the host must read: on a CPU,
        where a pass reads tails whole. On an accelerator shapes stay as the set's levels bound them, and a row has one
        token a pass, as in the CUDA graphs of the engine's own decoding; but for draws and long items, see `_stepwise`.
    """

    def __init__(self, runner: Any, room: Room) -> None:
        """room: its blocks are the KV cache's last ones."""
        self._runner, self._room, count = runner, room, runner.kv_cache_config.num_blocks
        self._scratch = range(count - room.blocks, count)
        self._block = runner.block_tables.block_sizes[0]
        self._sets = item_sets(runner)
        self.asked: dict[int, Asked] = {}
        self.narrow = runner.device.type == "cpu"
        self.drafted = None if self._sets.head is None else DraftedLists(runner, self._sets)
        if room.blocks:
            self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run what passes run: without memory it fails here, on all ranks alike, and not in a step."""
        most = min(self._room.tokens, 2 * self._room.beams) if self.narrow else self._room.tokens
        logits = run_logits(self._runner, most)[:1, None]
        warm_up(self._sets.arena, logits, kernels=self._sets.kernels)
        self._sets.narrow.attach(self._runner)
        if self._sets.narrow.why_not is None:
            columns = torch.zeros(logits.shape[2], dtype=torch.int32, device=logits.device)
            warm_up(self._sets.arena, logits, kernels=self._sets.kernels, columns=columns)

    def add(self, slot: int, carried: EngineRequest | None) -> None:
        """Note whether the request in a slot asks for a list. On the host path it has no place in the arena, and gets
        none. A list whose request has ended, or was aborted, is forgotten with the slot's next request."""
        self.asked.pop(slot, None)
        if self.drafted is not None:
            self.drafted.asked.pop(slot, None)
        if carried is not None and carried.ranked is not None and carried.place is not None:
            prompt = Prompt("", slot, int(self._runner.req_states.prompt_len.np[slot]))
            one = Asked(carried.place[0], prompt, carried.ranked)
            if one.spec.placeholders:
                assert self.drafted is not None  # the front end has the same configuration
                self.drafted.add(one)
            else:
                self.asked[slot] = one

    @property
    def waiting(self) -> bool:
        """Whether any list is still to be made."""
        return bool(self.asked) or (self.drafted is not None and bool(self.drafted.asked))

    def answer(self, hidden_states: Tensor, batch: Any) -> dict[str, Tensor]:
        """Make the lists whose prompts this step completes: of each request a table, as `ListResult.of_table` reads."""
        drafted = {} if self.drafted is None else self.drafted.answer(hidden_states, batch)
        if not self.asked:
            return drafted
        complete = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        slots = batch.idx_mapping_np.tolist()
        rows = [i for i, slot in enumerate(slots) if complete[i] and slot in self.asked]
        ready = [self.asked.pop(slots[i]).of(batch.req_ids[i]) for i in rows]
        tables, kept = drafted, list[tuple[int, Asked]]()
        for i, one in zip(rows, ready, strict=True):
            if (reason := self._reason(one)) is None:
                kept.append((i, one))
            else:
                tables[one.prompt.request] = torch.tensor([[REASONS.index(reason)]], dtype=torch.float64)
        if not kept:
            return tables
        self._sets.arena.use([one.number for _, one in kept])
        at = batch.logits_indices[to_device([i for i, _ in kept], hidden_states.device)]
        lists = [one for _, one in kept]
        use_adapters(self._runner, [one.prompt.request for one in lists], np.array([one.prompt.slot for one in lists]))
        hidden = hidden_states[at][:, None]
        logits = None
        if any(self._alphabet(one) is None or not one.spec.renormalised for one in lists):
            logits = self._runner.model.compute_logits(hidden[:, 0])[:, None]
        parts: dict[str, list[Tensor]] = {one.prompt.request: [] for one in lists}
        with borrowed(self._runner):
            for group in grouped([(row, each) for row, one in enumerate(lists) for each in one.apart], self._fit):
                at = to_device([row for row, _ in group], hidden.device)
                made = self._make([one for _, one in group], hidden[at], None if logits is None else logits[at])
                for (_, one), table in zip(group, made, strict=True):
                    parts[one.prompt.request].append(table)
        return tables | {request: _joined(some) for request, some in parts.items()}

    def _reason(self, one: Asked) -> NoList | None:
        """Why a list cannot be made here."""
        if not self._scratch:
            return NoList.NO_BLOCKS
        plan, most = self._sets.arena.level_plan(one.number), self._runner.max_num_tokens
        if plan.levels > MOST_ROUNDS:
            return NoList.TOO_DEEP
        shapes = self._shapes(plan, one)
        tokens = len(one.apart) * sum(rows * more for rows, more in shapes)
        if max(more for _, more in shapes) > most or tokens > MOST_STEPS * most:
            return NoList.TOO_LONG
        if self._largest([one]) > self._room.tokens:
            return NoList.TOO_LARGE
        return None if self._fit([one]) else NoList.NO_ROOM

    def _largest(self, lists: Sequence[Asked]) -> int:
        """Tokens of these lists' largest pass, each of which has a row of logits."""
        shapes = self._shapes(self._sets.arena.level_plan(lists[0].number), lists[0])
        return len(lists) * max(rows * more for rows, more in shapes)

    def _fit(self, lists: Sequence[Asked]) -> bool:
        """Whether there is room for these lists, which are of one set and as wide: blocks and logits."""
        plan = self._sets.arena.level_plan(lists[0].number)
        rows = max(rows for rows, _ in self._shapes(plan, lists[0]))
        needed = scratch_needed([one.prompt for one in lists], rows, plan.longest, self._block)
        return needed <= len(self._scratch) and self._largest(lists) <= self._room.tokens

    def _shapes(self, plan: LevelPlan, one: Asked) -> list[tuple[int, int]]:
        """Of each pass of a list, or of a race: how many rows it has, and how many tokens each of them."""
        if self._stepwise(plan, one):
            return [(rows, 1) for rows in _rows_of_tokens(plan, one)]
        shapes, rows = [], 1
        for level, tail in enumerate(plan.tails):
            rows = min(one.spec.width, plan.children(level, rows))
            shapes.append((rows, 1 if one.spec.renormalised else 1 + tail))
        return shapes

    def _stepwise(self, plan: LevelPlan, one: Asked) -> bool:
        """Whether tails take a token a pass, too: if these are not many, and there are blocks for their rows. Not those
        of draws: in its tail an item would compete with beams, and fewer draws would be decided."""
        if self.narrow or one.spec.races or (plan.levels if one.spec.renormalised else plan.longest) > MOST_ROUNDS:
            return False
        needed = scratch_needed([one.prompt], max(_rows_of_tokens(plan, one)), plan.longest, self._block)
        return needed <= len(self._scratch)

    def _beams(self, group: list[Asked], plan: LevelPlan) -> Beams:
        """The beams of some lists that have the same kind, or of some races."""
        one, arena = group[0], self._sets.arena
        options: dict[str, Any] = {"width": one.spec.width, "k": one.spec.k, "end_token": one.spec.scored_end}
        options["kernels"] = self._sets.kernels
        if one.spec.races:
            options["temperature"] = one.spec.temperature
            options["keys"] = to_device([key for race in group for key in race.spec.races], arena.device)
        kind = Lockstep if self._stepwise(plan, one) else Beams
        return kind(arena, [one.number] * len(group), plan, renormalised=one.spec.renormalised, **options)

    def _alphabet(self, one: Asked) -> Alphabet | None:
        """The set's own tokens, if logits of these will do."""
        end = one.spec.scored_end
        key = self._sets.arena.alphabet(one.number, () if end is None else (end,))
        return self._sets.narrow.of_list(key, renormalised=one.spec.renormalised)

    def _make(self, group: list[Asked], hidden: Tensor, logits: Tensor | None) -> Tensor:
        """The tables of some lists that have the same kind, or of some races: [lists, 1 + k, 2 + longest or more].

        hidden, logits: of their prompts, [lists, 1, any]; the logits of all tokens, unless the set's own will do.
        """
        one, runner, before = group[0], self._runner, Counter(ran)
        plan = self._sets.arena.level_plan(one.number)
        beams = self._beams(group, plan)
        rows = max(rows for rows, _ in self._shapes(plan, one))
        prompts = [other.prompt for other in group]
        branches = Branches(runner, prompts, rows, plan.longest, self._scratch, apart=self._room.apart)
        alphabet, narrow, renormalised = self._alphabet(one), self._sets.narrow, one.spec.renormalised
        if logits is not None:
            beams.round(logits)
        elif alphabet is not None:
            narrow.round(beams, hidden, alphabet, renormalised=renormalised)
        while True:
            if self.narrow:
                beams.narrow()
            if not beams.passes_left:
                break
            known, count = beams.taken - 1, beams.row_count
            if known == 0:
                branches.begin()
            else:
                branches.fork(beams.parents.view(len(group), -1)[:, :count], known)
            tokens = beams.next_inputs.view(len(group), -1, beams.queries)[:, :count]
            if alphabet is None:
                beams.round(logits_after(runner, branches, tokens.flatten(0, 1), known))
            else:
                states = logits_after(runner, branches, tokens.flatten(0, 1), known, head=lambda states: states)
                narrow.round(beams, states, alphabet, renormalised=renormalised)
        result = table_of(beams.decided)
        result = torch.nn.functional.pad(result, (0, max(0, HEAD - result.shape[2])), value=-1)
        head = torch.zeros_like(result[:, :1])
        head[:, 0, 0] = beams.proven
        head[:, 0, 1:3] = beams.took
        for column, graph in enumerate(GRAPHS, 3):
            head[0, 0, column] = ran[graph] - before[graph]
        head[:, 0, 3 + len(GRAPHS)] = self._room.beams
        return torch.cat((head, result), 1)


def _rows_of_tokens(plan: LevelPlan, one: Asked) -> tuple[int, ...]:
    """How many rows each pass of a list has with one token each."""
    renormalised, end = one.spec.renormalised, one.spec.scored_end
    return rows_of_passes(plan, one.spec.width, renormalised=renormalised, end_token=end) or (1,)


def _joined(tables: list[Tensor]) -> Tensor:
    """One table of those of the races of a request, or of its list. All of them begin with the pass of the prompt."""
    if len(tables) == 1:
        return tables[0]
    heads = torch.stack([table[0] for table in tables])
    head = heads.amax(0)
    head[0], head[1] = heads[:, 0].amin(), heads[:, 1].sum() - (len(tables) - 1)
    head[3 : 3 + len(GRAPHS)] = heads[:, 3 : 3 + len(GRAPHS)].sum(0)
    return torch.cat((head[None], *(table[1:] for table in tables)))
