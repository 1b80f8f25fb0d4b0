"""Whole ranked lists as CUDA graphs of our own: all passes of a list are one replay.

A list's launches follow from its set's level plan, its width and its prompt's bucket, and nothing is read back between
passes. So the second list of a kind is recorded as it is made, and later ones replay that: what differs lies in
buffers. The first replay after another prompt is held against the passes that it stands for.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_static.compat import logger
from vllm_static.worker.beam_forward import result_of
from vllm_static.worker.beam_kv import BeamKV, Prompt, attention_group
from vllm_static.worker.passes import Asked
from vllm_static.worker.step_share import Pieces

MOST = 16  # kinds of lists that are known at a time: what was used longest ago makes room
NEAR, SHARED = 0.1, 0.9  # distance of scores, and share of items, of two lists that only round otherwise
Program = Callable[[], Tensor]


def record(program: Program, pool: Any) -> Program:
    """Return what runs a program again on the buffers that it reads, and gives its result."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads copy sets meanwhile
            result = program()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # torch does not restore it when a capture fails
        raise

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def alike(table: Tensor, expected: Tensor) -> bool:
    """Return whether two tables are of one list, but for rounding. Waits for the device."""
    given, wanted = table.flatten(0, -2)[1:].tolist(), expected.flatten(0, -2)[1:].tolist()
    close = partial(math.isclose, rel_tol=NEAR / 4, abs_tol=NEAR)
    near = all(close(one[0], other[0]) for one, other in zip(given, wanted, strict=True))
    items, last = {tuple(row[1:]) for row in given}, wanted[-1][0]
    sure = [row for row in wanted if not close(row[0], last)]  # which no rounding takes off the list
    return near and sum(tuple(row[1:]) in items for row in sure) >= SHARED * len(sure)


@dataclass
class Recorded:
    """A list as a graph."""

    states: Tensor  # its inputs, with what the next has of its prompt
    kv: BeamKV
    replay: Program
    of: tuple[Any, ...]  # what it was recorded for
    tried: bool = False  # whether a replay after another prompt was held against its passes


class ListGraphs:
    """The recorded lists of a worker. first_block: as of `BeamKV`."""

    def __init__(self, runner: Any, first_block: int) -> None:
        self._runner, self._first_block = runner, first_block
        self._pool = torch.cuda.graph_pool_handle() if runner.device.type == "cuda" else None
        self._seen = dict[Any, Recorded | None]()  # by kind; None of one that was made once
        self.fails = False  # whether one could not be recorded, or was another list

    def _blocks(self, one: Asked) -> int:
        """Return the blocks of a prompt's bucket: a power of 2."""
        tables, group = self._runner.block_tables, attention_group(self._runner)
        block = tables.block_sizes[group]
        most: int = tables.block_tables[group].gpu.shape[1]
        blocks = -(-one.prompt.tokens // block)
        return min(most, 1 << int(blocks - 1).bit_length())

    def takes(self, group: list[Asked], rows: int, most: int) -> bool:
        """Return whether a list is made by a replay, or recorded. rows: of all its passes; most: of a step."""
        runner = self._runner
        alone = len(group) == 1 and not group[0].spec.races and rows <= most and not self.fails
        if not alone or runner.lora_config is not None or runner.vllm_config.parallel_config.world_size > 1:
            return False
        kind = (group[0].kind, self._blocks(group[0]))
        if kind in self._seen:
            return True
        self._keep(kind, None)
        return False

    def make(self, one: Asked, make: Callable[..., Pieces], of: tuple[Any, ...]) -> Tensor:
        """Return a list's table. make: as of `WideLists`. of: the plan of its set's levels, the alphabet of its scores'
        head, and the bound of its boosts, of which a graph keeps those that it was recorded with."""
        kind = (one.kind, self._blocks(one))
        recorded = self._seen.pop(kind, None)
        if recorded is None or not all(map(operator.is_, recorded.of, of)):
            return self._record_as(kind, one, make, of)
        tries = not recorded.tried and not torch.equal(recorded.states, one.states)
        recorded.states.copy_(one.states)
        recorded.kv.move_to(one.prompt)
        self._keep(kind, recorded)
        table = recorded.replay().clone()  # another list's replay may use its memory
        if not tries:
            return table
        recorded.tried, expected = True, self._by_passes(one, make)
        if not self.fails and not alike(table, expected):
            self._give_up("a replay has made another list than its passes do")
        return expected

    def _keep(self, kind: Any, recorded: Recorded | None) -> None:
        """Note a kind as the one used last. Kinds follow from requests, so there is a limit of them."""
        self._seen[kind] = recorded
        while len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]

    def _record_as(self, kind: Any, one: Asked, make: Any, of: tuple[Any, ...]) -> Tensor:
        """Return a list's table, made pass by pass, and record these passes for the next list of its kind."""
        states, device = one.states.clone(), self._runner.device
        block = self._runner.block_tables.block_sizes[attention_group(self._runner)]
        prompt = Prompt(one.prompt.request, one.prompt.slot, self._blocks(one) * block)  # as long as the bucket
        kv = BeamKV(self._runner, [prompt], self._first_block, recorded=True)
        again = one._replace(states=states, prompt=prompt)
        kv.move_to(one.prompt)

        def program() -> Tensor:
            kv.restart()
            return result_of(make([again], kv))

        table = program()  # what is made once, such as constants on the device, is there when it is recorded
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        try:
            self._keep(kind, Recorded(states, kv, record(program, self._pool), of))
        except RuntimeError as error:  # no memory, or a model that does what no graph can record
            self._give_up(error)
        return table

    def _by_passes(self, one: Asked, make: Callable[..., Pieces]) -> Tensor:
        """Make a list as ever; if the graphs' memory leaves too little for it, without them from now on."""
        try:
            return result_of(make([one]))
        except torch.OutOfMemoryError as error:
            self._give_up(error)
        return result_of(make([one]))

    def _give_up(self, why: object) -> None:
        logger.warning("Lists are made without CUDA graphs of their own from now on: %s", why)
        self._seen.clear()
        self.fails = True
        if self._pool is not None:
            torch.cuda.empty_cache()
