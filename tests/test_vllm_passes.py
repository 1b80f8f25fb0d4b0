"""Passes of ranked lists inside a step: what a GPU's attention backends and memory ask of them, as counts show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_vllm_wide_lists import ROOMY, as_accelerators, asked, by_rounds, prompt_of, same, ways

from itemset.serving.list_runner import best_of
from itemset.serving.wire import REASONS, WIRE, ListResult, NoList

LENGTHS = [20, 20, 20]


@pytest.fixture
def engine(engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
    options = static["additional_config"] | {"ranked_list_beams": 160}
    return engines("v2", tiny_model, **static | {"additional_config": options}, **ROOMY)


def waits(llm: Any, queued: frozenset[str] | None) -> tuple[int, int]:
    """Passes of a list, and how often they wait for the device."""
    from vllm_static import branch_forward

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    own_names, own_run, own_wait, counts = (
        branch_forward.QUEUED,
        branch_forward._run,
        runner.main_stream.synchronize,
        [0, 0],
    )

    def counted(which: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            counts[which] += 1
            return call(*args)

        return count

    branch_forward._run, runner.main_stream.synchronize = counted(0, own_run), counted(1, own_wait)
    if queued is not None:
        branch_forward.QUEUED = queued
    try:
        (found,) = as_accelerators(llm, "fixed", 4, 4, False, [40])
    finally:
        branch_forward.QUEUED, branch_forward._run, runner.main_stream.synchronize = own_names, own_run, own_wait
    assert len(found) == 4
    return counts[0], counts[1]


def test_a_backend_that_plans_on_the_host_is_waited_for(engine):
    """Before the first plan, and after each: the next one goes into the same memory."""
    assert engine.call(waits, None) == (4, 0)
    assert engine.call(waits, frozenset()) == (4, 5)


def with_logits_of(llm: Any, tokens: int, races: int = 0) -> tuple[list[int], list[Any]]:
    """Three lists, or draws of so many races each, when a pass may have the logits of so many tokens: the lists of each
    group, and the answers."""
    from vllm_static import step_lists

    lists = llm.llm_engine.model_executor.driver_worker.worker.model_runner.prompt_logprobs_worker.static_lists
    own_room, own_make, groups = lists._room, step_lists.WideLists._make, []

    def make(self: Any, group: list[Any], logits: Any) -> Any:
        assert len(group) == len(logits) <= tokens
        groups.append(len(group))
        return own_make(self, group, logits)

    lists._room = own_room._replace(tokens=tokens)
    step_lists.WideLists._make = make  # type: ignore[method-assign]
    try:
        prompts = [{"prompt_token_ids": prompt_of(length)} for length in LENGTHS]
        params = asked("fixed", 6, 3, False)
        if races:
            carried = params.extra_args[WIRE]
            params.extra_args[WIRE] = carried.but(ranked=replace(carried.ranked, races=tuple(range(races))))
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        lists._room, step_lists.WideLists._make = own_room, own_make  # type: ignore[method-assign]
    return groups, [output.prompt_token_id_logprobs for output in outputs]


def test_logits_of_a_pass_have_a_limit(engine):
    """Each of six beams has one token, and three of a tail at most. Lists go apart if they are too large together."""
    expected = engine.call(by_rounds, "fixed", 6, 3, False, LENGTHS[0])
    for tokens, groups in ((72, [3]), (48, [2, 1]), (24, [1, 1, 1])):
        made, tables = engine.call(with_logits_of, tokens)
        assert made == groups
        for table in tables:
            same([tuple(one) for one in best_of(ListResult.of_table(table)).items], expected)
    made, _ = engine.call(with_logits_of, 50, 5)
    assert made == [2] * 7 + [1]  # races count as lists do
    made, tables = engine.call(with_logits_of, 23)
    assert not made
    assert [table.tolist() for table in tables] == [[[float(REASONS.index(NoList.TOO_LARGE))]]] * 3


def test_the_largest_pass_runs_at_the_start(engine):
    """So that memory that is not there is missed there, on all ranks alike, and not in a step of others."""
    tokens, beams, sizes = engine.call(largest)
    assert max(sizes) == min(tokens, 2 * beams) >= 160


def largest(llm: Any) -> tuple[int, int, list[int]]:
    """Tokens that a pass may have logits of, beams that have room, and of how many tokens a start takes the logits."""
    from vllm_static.step_lists import WideLists

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    room, own, sizes = runner.prompt_logprobs_worker.static_lists._room, runner.model.compute_logits, []

    def counted(hidden: Any, *args: Any) -> Any:
        sizes.append(len(hidden))
        return own(hidden, *args)

    runner.model.compute_logits = counted
    try:
        WideLists(runner, room)
    finally:
        runner.model.compute_logits = own
    return room.tokens, room.beams, sizes


def break_passes() -> None:
    from vllm_static import branch_forward

    def broken(*args: Any) -> Any:
        raise TypeError("InputBatch has another field")

    branch_forward._run = broken


def blocks_of(llm: Any) -> tuple[int, int]:
    """The worker's and the scheduler's."""
    engine = llm.llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    return runner.kv_cache_config.num_blocks, engine.vllm_config.cache_config.num_gpu_blocks


def test_passes_that_do_not_run_are_found_at_the_start(engines, tiny_model, static, engine):
    """A vLLM whose runner has changed: lists take rounds, and the scheduler keeps all blocks."""
    worker, scheduler = engine.call(blocks_of)
    assert scheduler < worker
    broken = engines("v2", tiny_model, **static, prepare=break_passes)
    added, counted = broken.call(ways, [{"extra_args": {"item_set": "prefixes"}}] * 2)
    assert added > 4
    assert counted == {"the KV cache has no blocks for beams": 2}
    assert "Ranked lists take rounds of requests: a first pass failed: TypeError('InputBatch" in broken.log()
    worker, scheduler = broken.call(blocks_of)
    assert scheduler == worker
