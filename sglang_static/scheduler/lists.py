"""Ranked lists and draws in the scheduler: each is one request, whose beams are rows of SGLang's own beam search.

SGLang (srt/beam_search) makes the rows, decodes them in lockstep, shares their KV and frees it. Here the candidates
come from a set's children, and an item that stands alone gets a row of its own for its tail (`ranking.lockstep`). The
races of all draws of a request are rows of one group.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from sglang.srt.beam_search.beam_group import BeamGroup, BeamGroupState, BeamResult
from sglang.srt.beam_search.coordinator import BeamCoordinator
from sglang.srt.beam_search.fork import MEMBER_LENGTH_MARGIN
from torch import Tensor

from itemset import ItemSet, ItemSetError
from itemset.masking.arena import ArenaFullError, Resident
from itemset.ranking.lockstep import Lockstep, rows_of_passes
from itemset.serving.wire import ListResult, ListSpec, NoList, read
from sglang_static.compat import runtime
from sglang_static.scheduler import masks
from sglang_static.scheduler.masks import ItemSetSampler, moved, receive_sets
from sglang_static.scheduler.turns import WHOLE, is_list, promised_rows

MOST_PASSES = 32  # of a list: rounds read a long tail in one request


def _of_next_pass(name: str) -> Any:
    """Return a property of the rows but the leader's in the next pass; at the end of all of them."""

    def first(group: "ItemGroup") -> Tensor | None:
        rows: Tensor | None = getattr(group, name)
        return None if rows is None else rows[: group._active(group.num_generated - 1) - 1]

    return property(first, lambda group, rows: setattr(group, name, rows))


class ItemGroup(BeamGroup):
    """The beams of one list, and the tails that ride along; or those of the races of some draws.

    beam_width: rows, as many as a pass may ever have. Most passes have only the first of them. At the position that
    such a pass has filled, each other row has the leader's slot, so that all can be re-parented and freed alike. How
    many rows a pass has is settled before the engine prepares it, by the selections that have been read until then.
    """

    state: BeamGroupState
    let_go: Callable[[], Any]  # gives the set's place in the arena back
    member_rows, member_rows_cpu = _of_next_pass("_members"), _of_next_pass("_members_cpu")

    def __init__(
        self, sampler: ItemSetSampler, item_set: ItemSet, resident: Resident, spec: ListSpec, counts: tuple[int, ...],
        group: BeamGroup,
    ) -> None:  # fmt: skip
        """counts: the most rows of each pass after the prompt's. group: SGLang's own, which this one replaces."""
        options = {"max_new_tokens": group.max_new_tokens, "num_return": 1 << 30}  # all of `finalize`
        super().__init__(beam_width=rows_in(counts), device=sampler.arena.device, **options)
        self.leader, self.prompt_len = group.leader, group.prompt_len
        self._most, self._counts, self._released = counts, list(counts), False
        self.slots = self.prompt_len + sum(counts)  # of KV, that it takes at most
        self.num_candidates, self._spec = WHOLE, spec
        self._sampler, self._resident, self._device = sampler, resident, sampler.arena.device
        self._item_set: ItemSet | None = item_set  # until it has ended: the request and its group hold each other
        self._beams: Lockstep | None = None
        self._aligned = 0  # positions after the prompt at which every row has a slot
        self._ending = False  # what was read says that no pass could change the list
        self._stream: Any = None  # on which beams are chosen: the scheduler's is another one
        self._open = (-1, 1)  # the last selection that was read, and how many open beams it has left; at first the root

    def again(self) -> "ItemGroup":
        """Return a group for the same list from its beginning."""
        assert self._item_set is not None  # it has not ended
        again = ItemGroup(self._sampler, self._item_set, self._resident, self._spec, self._most, self)
        again.let_go = self.let_go
        return again

    def fits(self, adder: Any, promised: int, others: "Sequence[ItemGroup]") -> bool:
        """Return whether there are rows and KV slots for all of this list now; alone, it fits. promised: rows that
        others will take. others: lists that have begun."""
        pool = adder.tree_cache.req_to_token_pool
        if self.beam_width > pool.available_size() - promised:
            return False
        needed = sum(sum(one._counts[max(0, one.num_generated - 1) :]) for one in others)  # by the passes to come
        room = adder.token_to_kv_pool_allocator.available_size() + adder.tree_cache.evictable_size()
        return not needed or needed + self.slots <= room

    def extra_uncached_tokens(self) -> int:
        """Return what the group holds beyond its leader."""
        if self.all_rows is None:
            return 0
        positions = self.leader.kv.kv_allocated_len - self.prompt_len
        return sum(self._active(i) - 1 for i in range(positions)) - int(self.slots_freed)

    def await_selections(self) -> None:
        """Let the current stream wait, before slots are reclaimed, for unread selections, which move slots of rows."""
        if self._pending_steps:
            torch.get_device_module(self._device).current_stream().wait_stream(self._stream)

    def release(self, table: Tensor) -> None:
        """Before the rows are freed. table: SGLang's `req_to_token`."""
        self.await_selections()
        if self.all_rows is not None:
            self._align(table, self.leader.kv.kv_allocated_len - self.prompt_len)
            self._released = True

    def select(self, pieces: Sequence[Tensor], tick: int, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose the next beams by a pass's logits. Return tokens and parents' rows, None at the end: [rows] int64."""
        nothing = torch.zeros(self.beam_width, dtype=torch.int64, device=self._device)
        if self._item_set is None or self._ending:
            return nothing, None  # the list has ended, or does once the selection before this one is read
        beams = self._beams or self._begin(self._item_set)
        if not beams.passes_left:
            return nothing, None  # the step after the last, which the overlap scheduler has begun
        beams.arena.use([self._resident.number], begins=False)
        with _joined(pieces) as logits:
            beams.round(logits)
        self._align(table, self.num_generated)
        self.num_generated += 1
        last, state = not beams.passes_left, torch.stack((beams.all_over.long(), beams.open_beams))
        self._pending_steps.append((tick, last, state, (beams.decided, beams.proven, beams.took)))
        self._stream = torch.get_device_module(self._device).current_stream()
        if last:
            return nothing, None
        self._counts[self.num_generated - 1] = max(1, beams.row_count)
        self._narrow()
        return self._padded(beams.next_inputs), self._padded(beams.parents)

    def commit_pending(self, up_to_tick: int | None = None) -> bool:
        """SGLang's deferred half: read what the launched selections up to this tick have found. True at the end."""
        if self.state == BeamGroupState.FINISHED:
            self._pending_steps.clear()
        while self._pending_steps and (up_to_tick is None or self._pending_steps[0][0] <= up_to_tick):
            _, last, state, found = self._pending_steps.pop(0)
            over, open_beams = state.tolist()
            if last or (over and not self._pending_steps):
                self._result, self._beams, self._item_set = found, None, None
                self._pending_steps.clear()
                self.state = BeamGroupState.FINISHED
                return True
            # A selection that is launched has moved KV slots, or will: the list ends once that is read.
            self._ending = bool(over)
            self._open = (self.num_committed, open_beams)
            self.num_committed += 1
            self._narrow()
        return False

    def finalize(self) -> list[BeamResult]:
        """Return the items, best first, each with its end token; then the end token with each number of the totals:
        whether all are proven, passes, rounds, and how many items each race has."""
        (items, proven, took), end = self._result, self._spec.end_token
        races = [  # without what fills up their rows
            [([token for token in row if token >= 0], score) for row, score in table if score != -torch.inf]
            for table in map(zip, items.tokens.tolist(), items.scores.tolist())
        ]
        passes, rounds = zip(*took.tolist(), strict=True)
        taken = sum(passes) - len(races) + 1  # all begin with the prompt's pass
        totals = bool(proven.all()), taken, max(rounds), *map(len, races)
        return [
            BeamResult(tokens=[*tokens, end], cum_logprob=score, beam_score=score, matched_token=end)
            for tokens, score in [*(item for race in races for item in race), *(([], float(one)) for one in totals)]
        ]

    def _begin(self, item_set: ItemSet) -> Lockstep:
        spec, place, arena = self._spec, self._resident, self._sampler.arena
        arena.place(item_set, place.number, place.start, place.below)
        names = ("width", "k", "renormalised", "boost", "normalise_length")
        options: dict[str, Any] = {name: getattr(spec, name) for name in names} | {"end_token": spec.scored_end}
        if spec.races:
            options |= {"keys": moved(spec.races, self._device), "temperature": spec.temperature}
        self._beams = Lockstep(arena, [place.number] * max(1, len(spec.races)), item_set.level_plan, **options)
        return self._beams

    def _narrow(self) -> None:
        """Leave rows out of the next pass, unless the engine has begun to prepare it, if the selection before the last
        one was read and says that there are fewer beams."""
        step = self.num_generated - 1
        read, open_beams = self._open
        begun = self.leader.kv.kv_allocated_len - self.prompt_len > step
        if self._beams is not None and read == step - 1 and step < len(self._counts) and not begun:
            self._counts[step] = 1 if self._ending else max(1, self._beams.rows_after(open_beams))

    def _active(self, step: int) -> int:
        """Return how many rows decode in a step after the prompt's: after the last one, the leader alone."""
        return self.beam_width if self._released else self._counts[step] if step < len(self._counts) else 1

    def _align(self, table: Tensor, positions: int) -> None:
        """Give the rows that had no part in a pass the leader's slot there, up to this many positions."""
        rows = self.all_rows
        for i in range(self._aligned, positions):
            if (active := self._active(i)) < self.beam_width:
                table[rows[active:], self.prompt_len + i] = table[rows[:1], self.prompt_len + i]
        self._aligned = max(self._aligned, positions)

    def _padded(self, column: Tensor) -> Tensor:
        return torch.cat((column, column.new_zeros(self.beam_width - len(column))))


@contextmanager
def _joined(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """The rows of a pass as one tensor, without a copy of them all: [rows, vocabulary]. pieces: the leader's row, and
    those of the members within the step's logits, where the leader's takes the place of the row before them."""
    if len(pieces) == 1 or not len(pieces[1]):
        yield pieces[0]
        return
    leader, members = pieces
    first = members.storage_offset() - members.stride(0)
    whole = members.as_strided((1 + len(members), members.shape[1]), members.stride(), first)
    other = whole[:1].clone()
    whole[:1] = leader
    yield whole
    whole[:1] = other


def rows_in(counts: Sequence[int]) -> int:
    """Return how many rows a group needs: two at least, for SGLang."""
    return max(2, *counts, 0)


class ItemCoordinator(BeamCoordinator, kw_only=True):  # type: ignore[call-arg]
    """SGLang's, for its own beam searches and for lists, which are beam searches inside a set."""

    def validate_and_init(self, req: Any, recv_req: Any, **later: Any) -> str | None:
        """Give a request its group; return why it gets none: of a list, why rounds must make it."""
        params, sampler = req.sampling_params, masks.current()
        carried = read(params.custom_params)
        if carried is None or (spec := carried.ranked) is None:
            return super().validate_and_init(req, recv_req, **later)
        if sampler is None:
            return _refusal(NoList.NOT_HERE, "item sets are on the host path")
        if sampler.runner.lora_manager is not None:
            return _refusal(NoList.NOT_HERE, "with LoRA adapters each row of a pass needs its request")
        schedule = runtime.get_schedule()
        if schedule.enable_priority_scheduling and not schedule.disable_priority_preemption:
            return _refusal(NoList.NOT_HERE, "SGLang's preemption by priority knows no beams")
        try:
            (item_set,) = receive_sets(sampler.catalogue, carried, params.custom_params)
        except ItemSetError as failure:
            return _refusal(NoList.NO_ROOM_NOW, str(failure))
        options: dict[str, Any] = {"renormalised": spec.renormalised, "end_token": spec.scored_end}
        counts = rows_of_passes(item_set.level_plan, spec.width, races=len(spec.races), **options)
        if reason := _why_not(self, counts, len(req.origin_input_ids), sampler.list_rows):
            return _refusal(*reason)
        # SGLang's own group takes twice as many candidates from the vocabulary as it has beams; ours takes none.
        params.beam_width, params.n = min(rows_in(counts), self.model_config.vocab_size // 2), 1
        params.max_new_tokens = 1 + len(counts)
        if error := super().validate_and_init(req, recv_req, **later):
            return _refusal(NoList.NOT_HERE, error)
        try:
            resident = sampler.arena.plan.acquire(item_set)
        except ArenaFullError as full:
            self.retire_group(req)
            req.beam_group = None
            return _refusal(NoList.NO_ROOM_NOW, str(full))
        req.beam_group = ItemGroup(sampler, item_set, resident, spec, counts, req.beam_group)
        req.beam_group.let_go = weakref.finalize(req, sampler.arena.plan.release, resident.number)
        return None

    def _retire_group(self, group: Any) -> None:
        """A list's set may go. Request and group hold each other, so that it would stay until Python looks for such."""
        super()._retire_group(group)
        if is_list(group):
            group.let_go()

    def pending_member_rows(self, *args: Any, **kwargs: Any) -> int:
        """Return the rows also of groups that are admitted in the same step, or whose prompts are in pieces."""
        return max(super().pending_member_rows(*args, **kwargs), promised_rows())

    def _select_group(self, group: Any, top_logprobs: Any, top_tokens: Any, tick: int, **later: Any) -> Any:
        """top_logprobs: of a list, the pieces of its logits."""
        if is_list(group):
            return group.select(top_logprobs, tick, self.req_to_token_pool.req_to_token)
        return super()._select_group(group, top_logprobs, top_tokens, tick, **later)

    def _reclaim_orphans(self, group: Any, up_to_tick: int | None = None, **later: Any) -> None:
        """What is reclaimed of an aborted list was written on another stream, and perhaps not yet."""
        if up_to_tick is None and is_list(group):
            group.await_selections()
        super()._reclaim_orphans(group, up_to_tick, **later)


def _refusal(reason: NoList, detail: str) -> str:
    """Return the error of the scheduler, which the front end reads."""
    return msgspec.json.encode(ListResult(reason=reason, detail=detail)).decode()


def _why_not(coordinator: Any, counts: Sequence[int], prompt: int, room: int) -> tuple[NoList, str] | None:
    """Return why the list of a prompt of this many tokens cannot be made, if so. counts: rows of each pass. room: rows
    of a pass that have memory."""
    rows, most = rows_in(counts), coordinator.req_to_token_pool.size
    many, now = NoList.TOO_MANY_ROWS, NoList.NO_ROOM_NOW
    if rows > most:
        return many, f"its {rows:,} rows are more than the engine's {most:,} requests: raise --max-running-requests"
    if rows > room:
        return many, f"its {rows:,} rows are more than the {room:,} that have memory: lower --mem-fraction-static"
    if len(counts) > MOST_PASSES:
        return many, f"the set's longest item takes {len(counts)} passes one after another, of at most {MOST_PASSES}"
    if prompt + len(counts) + MEMBER_LENGTH_MARGIN + 2 > coordinator.max_req_len:
        return now, f"a prompt of {prompt:,} tokens leaves no room for beams in the context"
    if prompt + sum(counts) > coordinator.token_to_kv_pool_allocator.size:
        return now, f"{sum(counts):,} tokens after a prompt of {prompt:,} are more than the KV cache has room for"
    return None
