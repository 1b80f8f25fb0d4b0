"""Rollouts while an engine sleeps, takes new weights and wakes, on the event loop of a real engine of either kind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from candidate_tests import Trainer, check
from engine_words import PROMPT, Answer, Item, asked

CYCLES = 10
LIST = asked("ragged", list=True, n=3, width=6, item_logprobs=True)
LOADS = (asked("ragged", n=2), LIST, asked("ragged", draws=True, n=2))
SETTLED, GROWTH = 5, 16 << 20  # the cycle after which it is nearly flat; in those after it 7 MiB, a leak would be 44

Ask = Callable[[Any, dict[str, Any]], Awaitable[list[Answer]]]


class Cycles(NamedTuple):
    """lists: the list asked for after each cycle. ended: what the load's requests came to, each its answers or the
    error's words. resident: bytes after each cycle."""

    lists: list[list[Answer]]
    ended: list[list[Answer] | str]
    resident: list[int]


async def cycles(ask: Ask, renew: Callable[[Path, int], Awaitable[Any]], models: Sequence[Path]) -> Cycles:
    """renew: sleeps at a level, takes the weights of a model, and wakes."""
    found = Cycles([], [], [])
    going = True

    async def load(words: dict[str, Any]) -> None:
        for i in itertools.count():
            if not going:
                return
            try:
                found.ended.append(await ask([PROMPT, [9, 8]][i % 2], words))
            except Exception as error:
                found.ended.append(f"{type(error).__name__}: {error}")

    loads = [asyncio.ensure_future(load(words)) for words in LOADS]
    for cycle in range(CYCLES):
        await asyncio.sleep(0.1)
        await renew(models[(cycle + 1) % 2], 1 + cycle // 2 % 2)
        found.lists.append(await ask(PROMPT, LIST))
        processes = psutil.Process().children(recursive=True)
        found.resident.append(sum(one.memory_info().rss for one in processes))
    going = False
    await asyncio.gather(*loads)
    return found


def check_cycles(found: Cycles, items: frozenset[Item], trainers: Sequence[Trainer]) -> None:
    """trainers: of the models, in their order. Each list is that of a fresh engine, and of the weights taken last."""
    for cycle, listed in enumerate(found.lists):
        check(trainers[(cycle + 1) % 2], items, listed)
        assert [one.tokens for one in listed] == [one.tokens for one in found.lists[cycle % 2]]
    assert found.lists[0] != found.lists[1]
    assert [one for one in found.ended if isinstance(one, str)] == []
    answers = [answer for one in found.ended for answer in one]
    assert {answer.finish for answer in answers} == {"stop", "abort"}
    assert all(answer.item in items for answer in answers if answer.finish == "stop")
    assert found.resident[-1] - found.resident[SETTLED] < GROWTH
