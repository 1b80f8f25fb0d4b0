"""Passes of ranked lists inside a step: what a GPU's attention backends and memory ask of them, as counts show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace
from test_vllm_wide_lists import ROOMY, asked, by_rounds, given, off, prompt_of, runner_of, same, ways

from itemset.ranking.search import ordered
from itemset.serving.wire import REASONS, WIRE, ListResult, NoList

LENGTHS = [20, 20, 20]


@pytest.fixture
def engine(engines, tiny_model, static):
    return engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY)


def with_logits_of(llm: Any, tokens: int, races: int = 0, renormalised: bool = False) -> Any:
    """Three lists, or draws of so many races each, when there is room for the logits of so many tokens: the lists of
    each group, the answers, and of how many tokens logits were made at once at most."""
    from vllm_static.worker.lists import WideLists

    runner = runner_of(llm)
    lists, own_make, groups = runner.prompt_logprobs_worker.static_lists, WideLists._make, []

    def make(self: Any, group: list[Any]) -> Any:
        groups.append(len(group))
        return own_make(self, group)

    prompts = [{"prompt_token_ids": prompt_of(length)} for length in LENGTHS]
    params, room = asked("fixed", 6, 3, renormalised), lists._room._replace(tokens=tokens)
    if races:
        carried = params.extra_args[WIRE]
        params.extra_args[WIRE] = carried.but(ranked=replace(carried.ranked, races=tuple(range(races))))
    with (
        off(llm),
        mock.patch.object(lists, "_room", room),
        mock.patch.object(WideLists, "_make", make),
        mock.patch.object(runner.model, "compute_logits", wraps=runner.model.compute_logits) as logits,
    ):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    tables = [output.prompt_token_id_logprobs for output in outputs]
    return groups, tables, max(len(call.args[0]) for call in logits.call_args_list)


@pytest.mark.parametrize("renormalised", [False, True])
def test_logits_have_a_limit(engine, renormalised):
    """Each of six beams has one token, and three of a tail at most. Beyond the limit rows take turns, and lists if a
    row of each is too much."""
    expected = engine.call(by_rounds, "fixed", 6, 3, renormalised, LENGTHS[0])
    for tokens, groups in ((72, [3]), (48, [3]), (24, [1, 1, 1]), (16, [1, 1, 1])):
        made, tables, most = engine.call(with_logits_of, tokens, 0, renormalised)
        assert made == groups or renormalised  # whose rows have one token
        assert most <= tokens
        for table in tables:
            same([one[:2] for one in ordered(ListResult.of_table(table).items[0])], expected)


def test_what_no_logits_have_room_for(engine):
    made, _, most = engine.call(with_logits_of, 50, 5)
    assert made == [3] * 5  # races count as lists do
    assert most <= 50
    made, tables, _ = engine.call(with_logits_of, 12)
    assert not made
    assert [table.tolist() for table in tables] == [[[float(REASONS.index(NoList.TOO_LARGE))]]] * 3


def test_the_largest_pass_runs_at_the_start(engine):
    """So that memory that is not there is missed there, on all ranks alike, and not in a step of others."""
    tokens, beams, sizes = engine.call(largest)
    assert max(sizes) == min(tokens, 2 * beams) >= 160


def largest(llm: Any) -> tuple[int, int, list[int]]:
    """Tokens that a pass may have logits of, beams that have room, and of how many tokens a start takes the logits."""
    from vllm_static.worker.lists import WideLists

    runner = runner_of(llm)
    room = runner.prompt_logprobs_worker.static_lists._room
    with mock.patch.object(runner.model, "compute_logits", wraps=runner.model.compute_logits) as logits:
        WideLists(runner, room)
    return room.tokens, room.beams, [len(call.args[0]) for call in logits.call_args_list]


def break_passes() -> None:
    from vllm_static.worker import beam_forward

    def broken(*args: Any) -> Any:
        raise TypeError("there is another field")

    beam_forward._run = broken


def blocks_of(llm: Any) -> tuple[int, int]:
    """The worker's and the scheduler's."""
    return runner_of(llm).kv_cache_config.num_blocks, llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


def test_passes_that_do_not_run_are_found_at_the_start(engines, tiny_model, static, engine):
    """A vLLM whose runner has changed: lists take rounds, and the scheduler keeps all blocks."""
    worker, scheduler = engine.call(blocks_of)
    assert scheduler < worker
    broken = engines("v2", tiny_model, **static, prepare=break_passes)
    added, counted = broken.call(ways, [{"extra_args": {"item_set": "prefixes"}}] * 2)
    assert added > 4
    assert counted == {"no room is kept for beams": 2}
    assert "Ranked lists take rounds of requests: a first pass failed: TypeError('there is" in broken.log()
    worker, scheduler = broken.call(blocks_of)
    assert scheduler == worker


def test_a_model_with_inputs_of_its_own_takes_rounds():
    from vllm.v1.worker.gpu.model_states.encoder_decoder import EncoderDecoderModelState

    from vllm_static.worker import beam_forward

    runner = SimpleNamespace(model_state=object.__new__(EncoderDecoderModelState))
    assert beam_forward.try_out(runner, 0) == "the model has inputs of its own"
