"""Ranked lists that a draft head makes, in the worker: in the step that completes their prompts and placeholders.

The step's own pass gives the hidden states, also if the prompt takes several steps; no other pass of the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from itemset.serving.wire import ListSpec
from vllm_static.kv_branches import MOST_LOGITS, Prompt

if TYPE_CHECKING:
    from vllm_static.processor import ItemSetProcessor


Key = TypeVar("Key")


class Asked(NamedTuple):
    """A list to be made. number: its set's, in the arena. prompt: with its placeholders; its request has no name yet,
    until a step has it (`of`)."""

    number: int
    prompt: Prompt
    spec: ListSpec

    @property
    def kind(self) -> tuple[float, ...]:
        """What lists that are made together have in common."""
        spec = self.spec
        end = -1 if spec.scored_end is None else spec.scored_end
        return (self.number, spec.width, end, spec.renormalised, spec.k, spec.temperature)

    def of(self, request: str) -> Asked:
        return self._replace(prompt=self.prompt._replace(request=request))

    @property
    def apart(self) -> list[Asked]:
        """Each race by itself; a list as it is."""
        return [self._replace(spec=replace(self.spec, races=(key,))) for key in self.spec.races] or [self]


def grouped(
    lists: Sequence[tuple[Key, Asked]], fit: Callable[[list[Asked]], bool]
) -> Iterator[list[tuple[Key, Asked]]]:
    """Lists to be made together, each with something of its own: alike, and no more than fit."""
    for _, alike in groupby(sorted(lists, key=lambda pair: pair[1].kind), key=lambda pair: pair[1].kind):
        group: list[tuple[Key, Asked]] = []
        for pair in alike:
            if group and not fit([one for _, one in [*group, pair]]):
                yield group
                group = []
            group.append(pair)
        yield group


class DraftedLists:
    """The drafted lists of a worker's steps.

    asked: those that are not made yet, by slot, each with the hidden states of its prompt's last token and its
        placeholders, as far as they have been computed: [L + 1, hidden size].
    """

    def __init__(self, runner: Any, sets: ItemSetProcessor) -> None:
        assert sets.head is not None
        self._runner, self._sets, self._head = runner, sets, sets.head
        self.asked: dict[int, tuple[Tensor, Asked]] = {}
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what a list launches, with some set that is there."""
        arena, head = self._sets.arena, self._head
        for item_set in self._sets.registered:
            if item_set.longest <= head.levels:
                number = arena.acquire(item_set)
                for renormalised in (False, True):
                    self._beams([number], self._empty()[None], width=2, k=2, renormalised=renormalised)
                arena.release(number)
                return

    def _empty(self) -> Tensor:
        size = self._runner.model_config.get_hidden_size()
        return torch.zeros(self._head.levels + 1, size, dtype=self._runner.dtype, device=self._runner.device)

    def add(self, one: Asked) -> None:
        """Note a list, whose prompt begins, or begins again."""
        self.asked[one.prompt.slot] = self._empty(), one

    def answer(self, hidden_states: Tensor, batch: Any) -> dict[str, Tensor]:
        """Make the lists whose prompts this step completes; of each a table as `ListResult.of_table` reads."""
        ready = []
        for i, slot in enumerate(batch.idx_mapping_np.tolist()):
            if slot not in self.asked:
                continue
            states, one = self.asked[slot]
            start = int(batch.num_computed_prefill_tokens_np[i])
            end = min(start + int(batch.num_scheduled_tokens[i]), one.prompt.tokens)
            last = one.prompt.tokens - len(states)  # the position of the prompt's last token
            first = max(last, start)
            if first < end:
                row = int(batch.query_start_loc_np[i]) - start
                states[first - last : end - last] = hidden_states[row + first : row + end]
            if end == one.prompt.tokens:
                del self.asked[slot]
                ready.append((states, one.of(batch.req_ids[i])))
        if not ready:
            return {}
        self._sets.arena.use([one.number for _, one in ready])
        tables: dict[str, Tensor] = {}
        for group in grouped(ready, self._fit):
            one = group[0][1]
            hidden = torch.stack([states for states, _ in group])
            options = {"width": one.spec.width, "k": one.spec.k, "renormalised": one.spec.renormalised}
            made = self._beams([one.number] * len(group), hidden, **options)
            tables |= {other.prompt.request: table for (_, other), table in zip(group, made, strict=True)}
        return tables

    def _fit(self, lists: Sequence[Asked]) -> bool:
        """Whether there is room for the logits of these lists."""
        each = 4 * self._head.width_of_logits * lists[0].spec.width
        return len(lists) == 1 or len(lists) * each <= MOST_LOGITS

    def _beams(self, numbers: Sequence[int], hidden: Tensor, **options: Any) -> Tensor:
        """The tables of some lists of one set: [lists, 1 + k, 2 + longest] float64."""
        arena = self._sets.arena
        plan = arena.level_plan(numbers[0])
        beams = self._head.beams(arena, numbers, plan, hidden, kernels=self._sets.kernels, **options)
        head = torch.zeros_like(beams.result[:, :1])
        head[:, 0, 0], head[:, 0, 1:3] = beams.proven, 1  # one pass, in one round
        return torch.cat((head, beams.result), 1)
