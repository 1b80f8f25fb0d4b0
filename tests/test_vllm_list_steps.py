"""Ranked lists whose rounds take several engine steps: those of one step; others have their tokens in between."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_vllm_thoughts as thoughts
import torch
from engines import force_asynchronous_scheduling
from live import Films
from msgspec.structs import replace
from samples import CHURNED
from test_vllm_wide_lists import (
    PLAIN,
    ROOMY,
    asked,
    beside,
    fixed_shapes,
    given,
    inside,
    prompt_of,
    runner_of,
    same,
)

from itemset.ranking.search import ordered
from itemset.serving.wire import WIRE, ListResult, NoList
from vllm_static.front.list_requests import RankingParams
from vllm_static.worker.step_share import KINDS as PIECES
from vllm_static.worker.step_share import StepShare

ROWS = 8  # of a step, if it has more than one pass
PREPARED = [None, force_asynchronous_scheduling]


@pytest.fixture(params=PREPARED, ids=["synchronous", "asynchronous"])
def engine(request: Any, engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
    options = given(static, ranked_list_beams=160, max_list_rows_per_step=ROWS)
    return engines("v2", tiny_model, prepare=request.param, **options, **ROOMY)


def lists_of(llm: Any) -> Any:
    return runner_of(llm).prompt_logprobs_worker.static_lists


def in_one_step(llm: Any) -> Any:
    """In the engine's process, while this is entered: no step has had its rows before a list is complete."""
    return mock.patch.multiple(lists_of(llm).share, rows=10_000, timed=False)


def by_time(llm: Any, rest: float = 4.0) -> Any:
    """In the engine's process, while this is entered: others were just there, and these are the measurements: of a row
    1 ms, of the rest of a step `rest` ms."""
    share = StepShare(torch.device("cpu"), 10_000, timed=True)
    for kind in range(len(PIECES)):
        share.note(kind, 1, 1.0)
    share.note(len(PIECES), 1, rest)
    share.step(others=True)
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(share, "note"))  # nothing else is measured
    stack.enter_context(mock.patch.object(lists_of(llm), "share", share))
    return stack


def left(llm: Any) -> tuple[int, ...]:
    """Of lists that have come and gone, when another step has been."""
    llm.generate({"prompt_token_ids": [5]}, asked("one", 1, 1, False), use_tqdm=False)
    lists, pool = lists_of(llm), llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert llm.reset_prefix_cache()
    taken = runner_of(llm).kv_cache_config.num_blocks - lists._room.blocks - 1 - pool.get_num_free_blocks()
    return len(lists.asked), len(lists.begun), len(lists._making), taken


def made(llm: Any, names: list[tuple[str, Any, bool, int]], lengths: list[int]) -> tuple[list[Any], list[list[int]]]:
    """In the engine's process: the tables of lists that are asked for together, and the rows of each pass of each step.
    names: sets, widths, whether scores are renormalised, races."""
    from vllm_static.worker import beam_forward

    lists, rows = lists_of(llm), list[list[int]]()
    own_step, own_run = lists.answer, beam_forward._run

    def step(*arguments: Any) -> Any:
        rows.append([])
        return own_step(*arguments)

    def run(runner: Any, tokens: Any, *arguments: Any) -> Any:
        rows[-1].append(len(tokens))
        return own_run(runner, tokens, *arguments)

    prompts, params = [], []
    for name, width, renormalised, races in names:
        for length in lengths:
            one = asked(name, width, 4, renormalised)
            carried = one.extra_args[WIRE]
            one.extra_args[WIRE] = carried.but(ranked=replace(carried.ranked, races=tuple(range(races))))
            prompts.append({"prompt_token_ids": prompt_of(length)})
            params.append(one)
    with mock.patch.object(lists, "answer", step), mock.patch.object(beam_forward, "_run", run):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [one.prompt_token_id_logprobs for one in outputs], rows


KINDS = [
    [("large", 24, False, 0)],
    [("fixed", 30, True, 0), ("prefixes", 7, False, 0)],
    [("ragged", 20, False, 0), ("large", (2, 9, 30), False, 0)],
    [("prefixes", 9, False, 3), ("fixed", 6, False, 0), ("fixed", 6, False, 2)],
]


def as_in_one_step(engine: Any, names: Any, fixed: bool, spread: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of each pass of each step, of lists that several steps make and of the same in one step: their tables
    are equal. spread: what of the engine's process is entered for the former."""

    def each(llm: Any) -> Any:
        patched = fixed_shapes(llm) if fixed else mock.patch.object(lists_of(llm), "narrow", True)
        with patched:
            with spread(llm):
                several = made(llm, names, [31, 40])
            with in_one_step(llm):
                return several, made(llm, names, [31, 40]), left(llm)

    (tables, rows), (others, at_once), remaining = engine.call(each)
    for table, other in zip(tables, others, strict=True):
        assert_same_up_to_rounding(table, other)
        assert ListResult.of_table(table).reason is None
    assert not any(remaining)
    return rows, at_once


@pytest.mark.parametrize("fixed", [False, True], ids=["narrow", "fixed"])
@pytest.mark.parametrize("names", KINDS)
def test_lists_of_several_steps_are_those_of_one(engine, names, fixed):
    """Draws too; of both forms of passes."""
    rows, at_once = as_in_one_step(engine, names, fixed, contextlib.nullcontext)
    assert all(len(passes) < 2 or sum(passes) <= ROWS for passes in rows)
    assert len(at_once) < len(rows)
    assert [*chain(*rows)] == [*chain(*at_once)]


@pytest.mark.parametrize("fixed", [False, True], ids=["narrow", "fixed"])
@pytest.mark.parametrize("names", KINDS)
def test_lists_whose_passes_are_cut_are_those_of_one_step(engine, names, fixed):
    """Rows of passes and of logits, in parts that others leave time for."""
    rows, at_once = as_in_one_step(engine, names, fixed, partial(by_time, rest=1.0))
    cut, whole = [*chain(*rows)], [*chain(*at_once)]
    assert len(cut) > len(whole)
    assert sum(cut) == sum(whole)


def between_steps(llm: Any, others: bool) -> tuple[list[int], int]:
    """In the engine's process, of a list that goes on by time: how many passes each step had run when its tokens came
    from the worker, and how many it took altogether."""
    from vllm_static.worker import beam_forward

    lists, engine = lists_of(llm), llm.llm_engine
    in_steps, passes, own_step, own_run = list[int](), 0, lists.answer, beam_forward._run

    def step(*arguments: Any) -> Any:
        before = passes
        tables = own_step(*arguments)
        in_steps.append(passes - before)
        return tables

    def run(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return own_run(*arguments)

    if others:
        engine.add_request("other", {"prompt_token_ids": prompt_of(9)}, PLAIN)
        engine.step()
    engine.add_request("list", {"prompt_token_ids": prompt_of(40)}, asked("large", 24, 5, False))
    with by_time(llm), mock.patch.object(lists, "answer", step), mock.patch.object(beam_forward, "_run", run):
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == "list" and output.finished:
                    assert ListResult.of_table(output.prompt_token_id_logprobs).items
    return in_steps, passes


def test_others_tokens_do_not_wait_for_passes(engine):
    """These run when the tokens of their step are on their way."""
    in_steps, passes = engine.call(between_steps, True)
    assert passes > 4
    assert not any(in_steps)


def test_a_list_goes_on_without_steps_while_there_is_nothing_else(engine):
    in_steps, passes = engine.call(between_steps, False)
    assert passes > 4
    assert len(in_steps) <= 4


def while_one_arrives(llm: Any) -> tuple[list[int], int]:
    """`between_steps`, if the engine's process has been sent something all the time."""
    arriving: SimpleQueue[int] = SimpleQueue()
    arriving.put(0)
    core = llm.llm_engine.engine_core.engine_core
    with mock.patch.object(core, "input_queue", arriving, create=True):
        return between_steps(llm, False)


def test_what_arrives_is_looked_at_after_each_part(engine):
    in_steps, passes = engine.call(while_one_arrives)
    assert len(in_steps) > 4
    assert passes > 4


def steps_of_two(llm: Any) -> list[int]:
    """In the engine's process: of two lists of other widths, how many are answered in each step that answers some."""
    engine, answered = llm.llm_engine, list[int]()
    for name, width in (("first", 24), ("second", 120)):
        engine.add_request(name, {"prompt_token_ids": prompt_of(40)}, asked("large", width, 5, False))
    with by_time(llm):
        while engine.has_unfinished_requests():
            answered.append(sum(output.finished for output in engine.step()))
    return [count for count in answered if count]


def test_a_complete_list_does_not_wait_for_others(engine):
    assert engine.call(steps_of_two) == [1, 1]


def assert_same_up_to_rounding(table: Any, other: Any) -> None:
    """The same tokens in the same order. Some CPUs' matrix products round a row by its place among the others, which
    several steps change: scores may differ in the last bit of a logit."""
    scores, others = (np.asarray(one)[:, 0] for one in (table, other))
    np.testing.assert_array_equal(np.asarray(table)[:, 1:], np.asarray(other)[:, 1:])
    np.testing.assert_allclose(scores, others, rtol=1e-7)


def tokens_between(llm: Any) -> list[int]:
    """In the engine's process: how many tokens another request has had before each step of a list."""
    lists, had = lists_of(llm), list[int]()
    own_step, engine = lists.answer, llm.llm_engine

    def step(*arguments: Any) -> Any:
        had.append(llm.llm_engine.engine_core.engine_core.scheduler.requests[other].num_output_tokens)
        return own_step(*arguments)

    engine.add_request("other", {"prompt_token_ids": prompt_of(9)}, PLAIN)
    other = next(iter(engine.engine_core.engine_core.scheduler.requests))
    engine.step()
    engine.add_request("list", {"prompt_token_ids": prompt_of(40)}, asked("large", 120, 5, False))
    with mock.patch.object(lists, "answer", step):
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == "list" and output.finished:
                    assert ListResult.of_table(output.prompt_token_id_logprobs).items
    return had


def test_others_have_their_tokens_in_between(engine):
    had = engine.call(tokens_between)
    assert len(had) > 2
    assert all(after > before for before, after in pairwise(had))


def test_neighbours_stay_as_they_are(engine):
    assert engine.call(beside, 5) == engine.call(beside, 0)


def churned(llm: Any, count: int) -> tuple[list[Any], int, tuple[int, ...]]:
    """In the engine's process: lists that come while others are made, of which every third is aborted, and all that run
    are preempted now and then. Their tables, how many were preempted in mid-list, and what is left."""
    engine, lists = llm.llm_engine, lists_of(llm)
    scheduler, tables, steps, preempted = engine.engine_core.engine_core.scheduler, [], 0, 0
    added = list[str]()
    while len(added) < count or engine.has_unfinished_requests():
        for i in range(len(added), min(len(added) + 2, count)):
            params = asked(("large", "ragged", "fixed")[i % 3], (60, 20, 40)[i % 3], 4, False)
            engine.add_request(str(i), {"prompt_token_ids": prompt_of(20 + 13 * (i % 11))}, params)
            added.append(str(i))
        for output in engine.step():
            if output.finished:
                tables.append((int(output.request_id), output.prompt_token_id_logprobs))
        steps += 1
        if steps % 3 == 0:
            gone = [one.prompt.request for one in lists.begun.values()][::3]
            engine.abort_request(gone, internal=True)
        if steps % 11 == 0 and scheduler.running:
            preempted += len(lists.begun)
            scheduler.reset_prefix_cache(reset_running_requests=True)
    return tables, preempted, left(llm)


def test_nothing_is_left_in_mid_list(engine):
    """Whoever stays has the list of others' absence; who was preempted has it, or takes rounds."""
    tables, preempted, remaining = engine.call(churned, CHURNED)
    assert not any(remaining)
    assert preempted
    assert CHURNED // 4 < len(tables) < CHURNED
    whole = 0
    for i, table in tables:
        result = ListResult.of_table(table)
        assert result.reason in (None, NoList.NO_ROOM_NOW)
        if result.reason is None:
            name, width = (("large", 60), ("ragged", 20), ("fixed", 40))[i % 3]
            (alone,) = engine.call(inside, name, width, 4, False, [20 + 13 * (i % 11)])
            same([one[:2] for one in ordered(result.items[0])], alone)
            whole += 1
    assert 0 < whole < len(tables)


def test_at_the_end_of_the_context(engine):
    """A request has no more tokens than the context: its list ends in the step before."""

    def each(llm: Any) -> Any:
        return [inside(llm, "large", 60, 4, False, [length]) for length in (254, 255)], left(llm)

    with mock.patch.object(engine, "timeout", 60):
        found, remaining = engine.call(each)
    assert [len(items) for (items,) in found] == [4, 4]
    assert not any(remaining)


def test_a_list_after_a_thought(engine):
    extra, lengths, n = thoughts.asked("large", thoughts.TWO, width=40), [3, 31], 2
    made, *_ = engine.call(thoughts.think, extra, lengths, n)
    thoughts.same(made, engine.call(thoughts.in_two, extra, lengths, n))
    assert not any(engine.call(left))


def swapped(llm: Any) -> list[set[str]]:
    """In the engine's process: the versions of two lists, during the first of which the set's next one is taken up."""
    import vllm_static

    engine, lists, found = llm.llm_engine, lists_of(llm), list[set[str]]()
    params = RankingParams(beam_width=30, max_tokens=9, extra_args={"item_set": "films"})
    own_step, versions = engine.step, list[str]()

    def step() -> Any:
        outputs = own_step()
        if lists.begun and not versions:
            versions.extend(entry["version"] for entry in vllm_static.refresh(llm, "films"))
        return outputs

    with mock.patch.object(engine, "step", step):
        for _ in range(2):
            (output,) = llm.beam_search([{"prompt_token_ids": prompt_of(20)}], params)
            found.append({one.item_set_version for one in output.sequences})
    assert found[1] == {*versions}
    return found


def test_a_list_keeps_its_version(engines, tiny_model, static, tmp_path):
    films = Films(tmp_path / "sets" / "films")
    options = {"item_sets": {"films": str(films.folder)}, "item_set_cache": str(tmp_path / "cache")}
    options = given(static, max_list_rows_per_step=1, **options)
    engine = engines("v2", tiny_model, **options, **ROOMY)
    before, after = films.versions[0].name, films.publish().name
    assert engine.call(swapped) == [{before}, {after}]
