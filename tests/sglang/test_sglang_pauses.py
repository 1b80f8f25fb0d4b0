"""Pauses of the real SGLang, which take all requests out of their batch: lists, draws and its own beams decode then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asking import named

PAUSED = [
    named("fixed", beam_width=50),
    named("large", beam_width=30, n=3),
    named("prefixes", draws=6, sampling_seed=3),
    named("ragged", temperature=0),
    {"beam_width": 4, "n": 4, "max_new_tokens": 12, "ignore_eos": True},  # SGLang's own
    {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
]


PACES = (0.03, 0.01, 0.003, 0.02, 0.06)  # seconds before each pause


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pause_changes_no_list(static, overlap):
    """Lists, draws and SGLang's own beams are there when it takes all KV. SGLang counts its slots at every step."""
    checks = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
    rows = {"max_running_requests": 320, "max_total_tokens": 40_000, "disable_overlap_schedule": not overlap}
    engine = static("device", **rows, env=checks)
    asked = [([7, 8, i], params) for i, params in enumerate(PAUSED * 3)]
    expected, _ = engine.call(paused, asked, "retract", 0)
    kinds = set[int]()
    for turn in range(24):  # a pause may come when nothing of a kind is under way, and machines differ
        answers, retracted = engine.call(paused, asked, "retract", 6, PACES[turn % len(PACES)])
        assert answers == expected
        kinds |= {*retracted}
        if len(kinds) == len(PAUSED):
            break
    assert kinds == {*range(len(PAUSED))}
    assert engine.call(paused, asked, "in_place", 6) == (expected, [])


def paused(
    engine: Any, asked: list[tuple[list[int], dict[str, Any]]], mode: str, times: int, pace: float = 0.03
) -> Any:
    """The answers to requests at the same time, during which the engine is paused several times; and the kinds of those
    that it took back meanwhile."""
    from sglang.srt.managers import io_struct as ask_for

    manager, retracted = engine.tokenizer_manager, set[int]()

    async def one(i: int, ids: list[int], params: dict[str, Any]) -> Any:
        output = await engine.async_generate(input_ids=ids, sampling_params=params)
        found = output["meta_info"].get("beam_results", [output])
        if any(one["meta_info"].get("num_retractions") for one in [output, *found]):
            retracted.add(i % len(PAUSED))
        return [(one["output_ids"], one["text"]) for one in found]

    async def pauses() -> None:
        for _ in range(times):
            await asyncio.sleep(pace)
            await manager.pause_generation(ask_for.PauseGenerationReqInput(mode=mode))
            await asyncio.sleep(0.01)
            await manager.continue_generation(ask_for.ContinueGenerationReqInput())

    async def all_of_them() -> list[Any]:
        _, *answers = await asyncio.gather(pauses(), *(one(i, *pair) for i, pair in enumerate(asked)))
        return answers

    return engine.loop.run_until_complete(all_of_them()), sorted(retracted)
