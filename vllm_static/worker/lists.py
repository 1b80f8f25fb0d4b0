"""Ranked lists in the worker, made after the sampling of the step that completes their prompts.

They go on in later steps when one has had its rows. Meanwhile a list's request takes a token a step, which nobody
reads. A list has neither blocks of the KV cache nor anything else that an abort would have to free. A draft head needs
no passes of ours: the steps that compute the prompt give the hidden states.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from itemset.ranking.beams import Beams, warm_up
from itemset.ranking.lockstep import Lockstep, rows_of_passes
from itemset.ranking.search import width_at
from itemset.serving.config import StaticConfig
from itemset.serving.wire import MOST_LOGITS, REASONS, EngineRequest, ListSpec, NoList
from vllm_static import compat
from vllm_static.worker.beam_attention import layers_of, window_of
from vllm_static.worker.beam_forward import kept_for_drafts, most_at_once, run_logits, states_after, use_adapters
from vllm_static.worker.beam_kv import BeamKV, Prompt, Room, entries_of_block
from vllm_static.worker.list_graphs import ListGraphs
from vllm_static.worker.masks import ItemSetProcessor
from vllm_static.worker.passes import Asked, Passes, columns_of, joined, states_at_ends, table_with_head
from vllm_static.worker.step_share import Piece, Pieces, StepShare

MOST_ROUNDS = 16  # of a list that is made here
MOST_STEPS = 4  # full steps that a list may take, or twice as many tokens as `ranked_list_beams` has room for
MOST_COPIED = 1 << 28  # bytes that a layer's window copies of prompts before a pass of several lists
PARTS = 4  # of the memory of logits: if those of all rows do not fit, a part has those of some rows


@dataclass
class Making:
    """Lists, or races, that are made together."""

    group: list[Asked]
    tokens: list[int]  # of each pass, all lists together
    pieces: Generator[Piece, int, None]
    next: Piece | None = None  # before which it waits; None at first


class WideLists:
    """The lists of a worker's steps.

    asked: those whose prompts are not complete, by slot. begun: those that are being made, by slot.
    narrow: whether a pass has only the rows that can lead to something better, which the host must read: on a CPU. On
        an accelerator shapes stay as the set's levels bound them.
    """

    def __init__(self, runner: Any, room: Room) -> None:
        """room: its blocks are the KV cache's last ones."""
        self._runner, self._room = runner, room
        self._first_block = runner.kv_cache_config.num_blocks - room.blocks
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        of_blocks = [entries_of_block(spec, runner.dtype) for spec in specs if room.blocks]
        self._entries = room.blocks // len(specs) * min(of_blocks, default=0)
        layers = [*layers_of(runner).values()] if room.blocks else []
        self._window = min(filter(None, (window_of(layer.impl) for layer in layers)), default=1 << 31)
        each = [2 * layer.impl.num_kv_heads * layer.impl.head_size * layer.kv_cache.element_size() for layer in layers]
        windows = [window_of(layer.impl) * size for layer, size in zip(layers, each, strict=True)]
        self._copied = max(windows, default=0)  # bytes of a prompt, before a pass
        self._passing = any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs)  # the next step's
        self._sets: ItemSetProcessor = compat.item_sets(runner)
        config = StaticConfig.of(runner.vllm_config.additional_config)
        given, ranks = config.max_list_rows_per_step, get_tp_group()
        group = ranks.cpu_group if ranks.world_size > 1 else None
        # With Ray, what runs between steps may run beside one.
        timed = given is None and runner.vllm_config.parallel_config.distributed_executor_backend != "ray"
        self.share = StepShare(runner.device, given or runner.max_num_tokens, timed=timed, group=group)
        recorded = runner.device.type == "cuda" and compat.is_on(config.item_set_list_graphs, runner.device)
        recorded &= config.item_set_list_graphs == "on" or not runner.vllm_config.model_config.enforce_eager
        self.graphs = ListGraphs(runner, self._first_block) if recorded else None
        self.asked, self.begun = dict[int, Asked](), dict[int, Asked]()
        self._making: list[Making] = []  # in turn: the entries are the first one's
        self.narrow = runner.device.type == "cpu"
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run what lists run: without memory it fails here, on all ranks alike, and not in a step."""
        sets, head = self._sets, self._sets.head
        registered = sets.catalogue.registered.values()
        drafted = [one for one in registered if head is not None and one.longest <= head.levels]
        for item_set in drafted[:1]:
            number = sets.arena.acquire(item_set)
            for renormalised in (False, True):
                spec = ListSpec(2, 2, 0, renormalised=renormalised)
                self._draft([Asked(number, Prompt("", 0, 0), spec, [], self._no_states())])
            sets.arena.release(number)
        if not self._room.blocks:
            return
        most = min(self._room.tokens, 2 * self._room.beams) if self.narrow else self._room.tokens
        logits = run_logits(self._runner, most)[:1, None]
        sets.narrow.attach(self._runner)
        for columns in (None, torch.zeros(logits.shape[2], dtype=torch.int32, device=logits.device)):
            warm_up(sets.arena, logits, columns=columns)

    def _no_states(self) -> Tensor:
        size = self._runner.model_config.get_hidden_size()
        return torch.zeros(self._sets.head.levels + 1, size, dtype=self._runner.dtype, device=self._runner.device)

    def add(self, slot: int, carried: EngineRequest) -> None:
        """Note whether a slot's new request asks for a list; on the host path it gets none. A list whose request has
        ended is forgotten with the slot's next request, or with the next step."""
        self.asked.pop(slot, None)
        self.begun.pop(slot, None)
        if carried.ranked is not None and carried.place is not None:
            prompt = Prompt("", slot, int(self._runner.req_states.prompt_len.np[slot]))
            states = self._no_states() if carried.ranked.placeholders else None
            self.asked[slot] = Asked(carried.place.number, prompt, carried.ranked, [], states)

    def start_step(self) -> None:
        if self.asked or self.begun:
            self.share.start_step()

    def answer(self, hidden_states: Tensor, batch: Any) -> dict[str, Tensor]:
        """Go on with the lists, and begin those whose prompts this step completes. Return each request's table, as
        `ListResult.of_table` reads it; an empty one if the list needs another step."""
        self._forget_ended()
        asked = {*self.asked}
        computed, tables = batch.num_computed_prefill_tokens_np, dict[str, Tensor]()
        lists, rows = list[Asked](), list[int]()
        for i, slot in enumerate(batch.idx_mapping_np.tolist()):
            if (one := self.asked.get(slot)) is None:
                continue
            start, end = int(computed[i]), int(computed[i] + batch.num_scheduled_tokens[i])
            if one.spec.placeholders:
                last = one.prompt.tokens - len(one.states)  # the position of the prompt's last token
                first, after = max(last, start), min(end, one.prompt.tokens)
                if first < after:
                    row = int(batch.query_start_loc_np[i]) - start
                    one.states[first - last : after - last] = hidden_states[row + first : row + after]
            if end < batch.prefill_len_np[i]:
                continue
            del self.asked[slot]
            one = one._replace(prompt=one.prompt._replace(request=batch.req_ids[i]))
            # One that was preempted after its prompt: the tokens that nobody reads now stand between it and the list.
            resumed = batch.prefill_len_np[i] > one.prompt.tokens
            if (reason := NoList.NO_ROOM_NOW if resumed else self._reason(one)) is None:
                lists.append(one)
                rows.append(i)
            else:
                tables[one.prompt.request] = torch.tensor([[REASONS.index(reason)]], dtype=torch.float64)
        if lists:
            # A prompt's end has one row. On the host its place is not known where verification is adaptive.
            places = batch.cu_num_logits[compat.to_device(rows, hidden_states.device)].long()
            ends = hidden_states[batch.logits_indices[places]]
            lists = [one._replace(states=ends[n : n + 1]) if one.states is None else one for n, one in enumerate(lists)]
        self.begun |= {one.prompt.slot: one for one in lists}
        groups = self._grouped([each for one in lists for each in one.apart])
        self._making += [Making(group, self._tokens(group), self._pieces_of(group)) for group in groups]
        others = bool(set(batch.idx_mapping_np.tolist()) - self.begun.keys() - asked)
        whole = self._passing or self._is_last_step(batch)
        self.share.step(others=others)
        if self._making and (not others or not self.share.timed or whole):
            with kept_for_drafts(self._runner):
                self.go_on(whole=whole)
        for slot in self.begun.keys() & batch.idx_mapping_np.tolist():
            one = self.begun[slot]
            if done := len(one.tables) == len(one.apart):
                del self.begun[slot]
            tables[one.prompt.request] = joined(one.tables) if done else hidden_states.new_empty(0)
        return tables

    def _forget_ended(self) -> None:
        index = self._runner.req_states.req_id_to_index
        self.begun = {slot: one for slot, one in self.begun.items() if index.get(one.prompt.request) == slot}
        alive = {id(one.tables) for one in self.begun.values()}
        self._making = [one for one in self._making if alive.intersection(id(each.tables) for each in one.group)]

    def _is_last_step(self, batch: Any) -> bool:
        """Return whether the next token of a list's request would be its last in the context."""
        runner, slots = self._runner, batch.idx_mapping_np
        ends = runner.req_states.num_computed_tokens_np[slots] + batch.num_scheduled_tokens
        longest = runner.max_model_len - runner.num_speculative_steps
        return any(end + 1 >= longest for slot, end in zip(slots, ends, strict=True) if slot in self.begun)

    @property
    def can_go_on(self) -> bool:
        """Return whether there is more to do, and no list that is complete waits for a step."""
        return bool(self._making) and all(len(one.tables) < len(one.apart) for one in self.begun.values())

    @torch.inference_mode()
    def go_on(self, *, whole: bool = False) -> None:
        """Run the next pieces of the lists that have begun, as far as their share lets a step have them; or the whole.
        The engine core calls it, too, when a step's tokens are on their way (`core.lists`)."""
        self._forget_ended()
        self._sets.arena.use([one.group[0].number for one in self._making], begins=False)  # this step's drafts follow
        self.share.begin()
        while self._making:
            first = self._making[0]
            first.next = first.next or next(first.pieces)
            if not (rows := first.next.rows if whole else self.share.grant(first.next, first.tokens)):
                break
            try:
                with self.share.measured(first.next, rows):
                    first.next = first.pieces.send(rows)
            except StopIteration:
                del self._making[0]

    def _tokens(self, group: list[Asked]) -> list[int]:
        drafted = bool(group[0].spec.placeholders)
        return [] if drafted else [len(group) * rows * more for rows, more in self._passes(group[0]).shapes]

    def _pieces_of(self, group: list[Asked]) -> Generator[Piece, int, None]:
        if group[0].spec.placeholders:
            yield Piece("draft", len(group))
            made = self._draft(group)
        elif self.graphs is not None and self._is_recorded(group):
            yield Piece("graph", self._passes(group[0]).rows)
            (one,) = group
            alphabet = self._sets.narrow.of_list(self._key(one)) if one.spec.renormalised else None
            arena = self._sets.arena
            of = arena.level_plan(one.number), alphabet, arena.most_boost(one.number)
            made = self.graphs.make(one, self._make, of)
        else:
            made = yield from self._make(group)
        for one, table in zip(group, made, strict=True):
            one.tables.append(table)

    def _is_recorded(self, group: list[Asked]) -> bool:
        """Return whether a graph makes this list: in one step, with the logits of each pass at once."""
        assert self.graphs is not None
        passes = self._passes(group[0])
        at_once = not self.narrow and passes.tokens <= min(self._most_logits, self._runner.max_num_tokens)
        return at_once and self.graphs.takes(group, passes.rows, self.share.rows)

    def _grouped(self, lists: Sequence[Asked]) -> Iterator[list[Asked]]:
        """Lists to be made together: alike, and no more than fit."""
        kinds = dict[Any, list[Asked]]()
        for one in lists:
            kinds.setdefault(one.kind, []).append(one)
        for kind in sorted(kinds, key=repr):  # in an order that does not depend on which step has brought them
            group: list[Asked] = []
            for one in kinds[kind]:
                if group and not self._fit([*group, one]):
                    yield group
                    group = []
                group.append(one)
            yield group

    def _reason(self, one: Asked) -> NoList | None:
        if one.spec.placeholders:
            return None
        if not self._entries:
            return NoList.NO_BLOCKS
        plan = self._sets.arena.level_plan(one.number)
        if plan.levels > MOST_ROUNDS:
            return NoList.TOO_DEEP
        passes, most = self._passes(one), self._runner.max_num_tokens
        tokens = len(one.apart) * sum(rows * more for rows, more in passes.shapes)
        if plan.longest >= self._window or passes.queries > most or tokens > max(MOST_STEPS * most, 2 * self._entries):
            return NoList.TOO_LONG
        if not self._logits_fit(one, 1):
            return NoList.TOO_LARGE
        return None if self._fit([one]) else NoList.NO_ROOM

    def _fit(self, lists: Sequence[Asked]) -> bool:
        """Return whether there is room for these lists, which are of one kind: entries and logits."""
        if lists[0].spec.placeholders:
            each = 4 * self._sets.head.row_size * lists[0].spec.beams
            return len(lists) == 1 or len(lists) * each <= MOST_LOGITS
        entries = len(lists) * self._passes(lists[0]).rows
        if len(lists) > 1 and len(lists) * self._copied > MOST_COPIED:
            return False
        return entries <= self._entries and self._logits_fit(lists[0], len(lists))

    def _logits_fit(self, one: Asked, lists: int) -> bool:
        """Return whether a pass of this many lists has room for all logits, or for some rows' and the set's own."""
        passes, most = self._passes(one), self._most_logits
        own = lists * passes.tokens * len(self._key(one)) // 8
        in_parts = lists * passes.queries <= most // PARTS and 2 * own <= self._room.tokens * self._runner.vocab_size
        return lists * passes.tokens <= most or in_parts

    @property
    def _most_logits(self) -> int:
        return most_at_once(self._runner, self._room.tokens)

    def _passes(self, one: Asked) -> Passes:
        """Return the passes of a list, or of a race. Tails take a token a pass, too, if these are not many, and there
        are entries for their rows. Not those of draws: in its tail an item would compete with beams, and fewer draws
        would be decided."""
        plan, spec = self._sets.arena.level_plan(one.number), one.spec
        if not (self.narrow or spec.races or (plan.levels if spec.renormalised else plan.longest) > MOST_ROUNDS):
            counts = rows_of_passes(plan, spec.width, renormalised=spec.renormalised, end_token=spec.scored_end) or (1,)
            if sum(counts) <= self._entries:
                return Passes([(rows, 1) for rows in counts], stepwise=True)
        shapes, rows = [], 1
        for level, tail in enumerate(plan.tails):
            rows = min(width_at(spec.width, level + 1), plan.children(level, rows))
            shapes.append((rows, 1 if spec.renormalised else 1 + tail))
        return Passes(shapes, stepwise=False)

    def _key(self, one: Asked) -> bytes:
        """Return the set's own tokens, and the end token if it counts: see `Arena.alphabet`."""
        end = one.spec.scored_end
        return self._sets.arena.alphabet(one.number, () if end is None else (end,))

    def _draft(self, group: list[Asked]) -> Tensor:
        """Return the tables of some lists of one kind that the draft head makes, as those of `_make`."""
        one, sets, spec = group[0], self._sets, group[0].spec
        options = {"width": spec.width, "k": spec.k, "renormalised": spec.renormalised, "boost": spec.boost}
        plan, numbers = sets.arena.level_plan(one.number), [one.number] * len(group)
        table = table_with_head(sets.head.beams(sets.arena, numbers, plan, states_at_ends(group), **options))
        table[:, 0, 1:3] = 1  # one pass, in one round
        return table

    def _make(self, group: list[Asked], kv: BeamKV | None = None) -> Pieces:
        """Return the tables of some lists of one kind, or of some races: [lists, 1 + k, 2 + longest or more]. kv: of
        their beams, if a graph holds them."""
        one, runner, arena = group[0], self._runner, self._sets.arena
        plan, passes, spec = arena.level_plan(one.number), self._passes(one), one.spec
        options: dict[str, Any] = {"width": spec.width, "k": spec.k, "end_token": spec.scored_end}
        options |= {"renormalised": spec.renormalised, "boost": spec.boost, "normalise_length": spec.normalise_length}
        if spec.races:
            options["temperature"] = spec.temperature
            options["keys"] = compat.to_device([key for race in group for key in race.spec.races], arena.device)
        beams = (Lockstep if passes.stepwise else Beams)(arena, [one.number] * len(group), plan, **options)
        prompts = [other.prompt for other in group]
        kv = kv or BeamKV(runner, prompts, self._first_block)
        yield from self._round(beams, group, states_at_ends(group))
        while True:
            if self.narrow:
                beams.narrow()
            if not beams.passes_left:
                break
            count = beams.row_count
            kv.fork(beams.parents.view(len(group), -1)[:, :count], beams.taken - 1)
            tokens = beams.next_inputs.view(len(group), -1, beams.queries)[:, :count].flatten(0, 1)
            yield from self._round(beams, group, (yield from states_after(runner, kv, tokens)))
        table = table_with_head(beams)
        table[:, 0, 3] = self._room.beams
        return table

    def _round(self, beams: Beams, group: list[Asked], states: Tensor) -> Generator[Piece, int, None]:
        """Let beams take a pass. states: hidden ones, [lists * rows, queries, hidden size]. If logits of all rows are
        too many, or take too long, rows take turns, and only the logits of the set's own tokens stay."""
        one, runner = group[0], self._runner
        by_list = states.unflatten(0, (len(group), -1))
        lists, rows, queries, _ = by_list.shape
        each = lists * queries
        if one.spec.renormalised and self._sets.narrow.of_list(self._key(one)) is not None:
            yield Piece("choice", rows, each)
            # Asked again: meanwhile a step may have given its memory to another alphabet.
            if (alphabet := self._sets.narrow.of_list(self._key(one))) is not None:
                self._sets.narrow.round(beams, states, alphabet)
                return
        requests, slots = [other.prompt.request for other in group], [other.prompt.slot for other in group]

        def logits_of(first: int, count: int) -> Tensor:
            use_adapters(runner, requests, np.repeat(slots, count * queries))
            logits: Tensor = runner.model.compute_logits(by_list[:, first : first + count].flatten(0, 2))
            return logits.unflatten(0, (-1, queries))

        most = rows if rows * each <= self._most_logits else self._most_logits // (PARTS * each)
        count = yield Piece("logits", min(rows, most), each)
        if count == rows:
            beams.round(logits_of(0, rows))
            return
        tokens, columns = columns_of(self._key(one), beams.span, runner.vocab_size, states.device)
        own: Tensor | None = None
        sums, first = list[Tensor](), 0
        while first < rows:
            logits = logits_of(first, count)
            if not one.spec.renormalised:
                sums.append(beams.log_sums(logits, first))
            own = logits.new_empty(lists, rows, queries, len(tokens)) if own is None else own
            own[:, first : first + count] = logits.index_select(2, tokens).unflatten(0, (lists, -1))
            del logits  # before there are the next ones
            first += count
            last = first == rows
            count = yield Piece("choice" if last else "logits", rows if last else min(rows - first, most), each)
        assert own is not None
        beams.round(own.flatten(0, 1), columns=columns, sums=torch.cat(sums, 1) if sums else None)
