"""Inline sets in the front end: limits, turns, equal lists, clients that leave, what is kept."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from models import tiny_tokenizer

import itemset
from itemset.serving import metrics
from itemset.serving.catalogue import Catalogue, InlineSet
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.front.admission import Checks
from itemset.serving.front.inline import FEW_TEXTS, SLICE_CHARACTERS, SLICE_TEXTS, Encoder, InlineTexts, Steps, _slices
from itemset.serving.front.request import ItemRequest

WORDS = Words("max_model_len", "--max-model-len", "min_tokens", "--additional-config")


async def prepared(checks: Checks, choice: Any) -> Any:
    """The set that a front end makes of these texts."""
    return await checks.prepare(ItemRequest(choice=choice))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def front_end(tokenizer: Any) -> Checks:
    return Checks(StaticConfig(), tokenizer, WORDS, ModelLimits(2112, 256, 0, {1}))


class Gate:
    """Holds the encoding thread after its first slice, until `open`."""

    def __init__(self) -> None:
        self.texts: list[int] = []
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self, texts: int) -> None:
        self.texts.append(texts)
        self.begun.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Where each slice's texts are counted."""
    gate = Gate()
    monkeypatch.setattr(metrics.ENCODED, "inc", gate)
    return gate


def test_equal_lists_at_once_are_encoded_once(tokenizer, gate):
    texts = [f"label {i}" for i in range(3 * SLICE_TEXTS)]
    checks = front_end(tokenizer)

    async def run() -> list[InlineSet]:
        tasks = [asyncio.create_task(prepared(checks, list(texts))) for _ in range(5)]
        await asyncio.to_thread(gate.begun.wait)
        gate.opened.set()
        return await asyncio.gather(*tasks, prepared(checks, texts))

    found = asyncio.run(run())
    assert len({id(one) for one in found}) == 1
    assert gate.texts == [SLICE_TEXTS] * 3
    asked = (ItemRequest(choice=texts), ItemRequest(made=found[0]))
    references = [checks.made(one).reference for one in asked]
    assert references == [found[0].reference] * 2
    assert gate.texts == [SLICE_TEXTS] * 3
    assert sorted(found[0].item_set.items()) == sorted(tokenizer(texts, add_special_tokens=False)["input_ids"])


def test_a_known_set_waits_for_no_list_and_a_short_one_passes_a_long_one(tokenizer, gate):
    ended: list[str] = []
    checks = front_end(tokenizer)

    async def one(name: str, choice: list[str]) -> None:
        await prepared(checks, choice)
        ended.append(name)

    async def run() -> None:
        gate.opened.set()
        await one("known", ["yes", "no"])
        gate.opened.clear()
        gate.begun.clear()
        long = [f"label {i}" for i in range(4 * SLICE_TEXTS)]
        tasks = [asyncio.create_task(one("long", long))]
        await asyncio.to_thread(gate.begun.wait)
        await one("known again", ["yes", "no"])  # while the thread is held
        tasks.append(asyncio.create_task(one("short", ["red", "green"])))
        await asyncio.sleep(0)  # it has asked
        gate.opened.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert ended == ["known", "known again", "short", "long"]
    assert gate.texts == [2, SLICE_TEXTS, 2, *[SLICE_TEXTS] * 3]


def test_encoding_goes_on_for_those_who_stay(tokenizer, gate):
    texts = [f"label {i}" for i in range(3 * SLICE_TEXTS)]
    checks = front_end(tokenizer)

    async def run() -> InlineSet:
        leaves, stays = (asyncio.create_task(prepared(checks, texts)) for _ in range(2))
        await asyncio.to_thread(gate.begun.wait)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        gate.opened.set()
        return await stays

    assert len(asyncio.run(run()).item_set) == len(texts)
    assert gate.texts == [SLICE_TEXTS] * 3


def test_every_waiting_client_is_told_what_is_wrong_and_the_next_list_is_served(tokenizer, gate):
    checks = front_end(tokenizer)
    bad = ["red", "</s>", *map(str, range(2 * SLICE_TEXTS))]

    async def run() -> list[Any]:
        tasks = [asyncio.create_task(prepared(checks, bad)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.opened.set()
        return await asyncio.gather(*tasks, prepared(checks, ["red"]), return_exceptions=True)

    *errors, good = asyncio.run(run())
    assert all("choice[1] ('</s>') holds the end-of-sequence token" in str(error) for error in errors)
    assert good.item_set.items() == tokenizer(["red"], add_special_tokens=False)["input_ids"]


def test_large_lists_are_read_beside_the_event_loop(tokenizer, monkeypatch):
    readers, read = [], InlineTexts._read

    def recorded(self: InlineTexts, texts: list[Any], *how: Any) -> tuple[str, int]:
        readers.append(threading.current_thread())
        return read(self, texts, *how)

    monkeypatch.setattr(InlineTexts, "_read", recorded)
    checks = front_end(tokenizer)
    for choice, beside in ((["red"] * FEW_TEXTS, False), (["red"] * (FEW_TEXTS + 1), True), (["ab" * 9] * 5, False)):
        asyncio.run(prepared(checks, choice))
        assert (readers.pop() is not threading.main_thread()) == beside


def test_turns_are_fair():
    """A long list is neither first nor put off by a stream of short ones."""
    sets, order = Catalogue(StaticConfig()), []
    encoder = Encoder(sets)
    begun, opened = threading.Event(), threading.Event()
    index = itemset.build([[1, 2]]).to_bytes()

    def steps(name: str, slices: int, stream: int = 0) -> Steps:
        for _ in range(slices):
            begun.set()
            assert opened.wait(60)
            yield 1
        order.append(name)
        if stream:
            asked.append(encoder.ask(f"short {stream}", 1, steps("short", 1, stream - 1)))
        return InlineSet.from_index(name + str(stream), index)

    asked: list[Future[InlineSet]] = [encoder.ask("long", 10, steps("long", 10))]
    begun.wait()
    asked.append(encoder.ask("middle", 4, steps("middle", 4)))
    asked.append(encoder.ask("short", 1, steps("short", 1, stream=100)))
    opened.set()
    for future in Iterating(asked):
        future.result(timeout=60)
    assert len(order) == 103
    assert order[0] == "short"
    assert order.index("middle") < order.index("long") < 60


def test_a_short_list_passes_the_last_of_many_equal_ones():
    order: list[str] = []
    encoder = Encoder(Catalogue(StaticConfig()))
    opened = threading.Event()
    index = itemset.build([[1, 2]]).to_bytes()

    def steps(name: str, slices: int) -> Steps:
        for _ in range(slices):
            assert opened.wait(60)
            yield 1
        order.append(name)
        if len(order) == 8:
            asked.append(encoder.ask("short", 1, steps("short", 1)))
        return InlineSet.from_index(name, index)

    asked = [encoder.ask(f"long {i}", 20, steps(f"long {i}", 20)) for i in range(10)]
    opened.set()
    for future in Iterating(asked):
        future.result(timeout=60)
    assert order.index("short") == 8  # and not after the two that are left


class Iterating:
    """Goes through a list that grows meanwhile."""

    def __init__(self, growing: list[Any]) -> None:
        self._growing = growing

    def __iter__(self) -> Iterator[Any]:
        i = 0
        while i < len(self._growing):
            yield self._growing[i]
            i += 1


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [SLICE_CHARACTERS * 3],
        [3] * (2 * SLICE_TEXTS + 1),
        [SLICE_CHARACTERS, 1, SLICE_CHARACTERS - 1, 2],
        [700] * 99,
    ],
)
def test_slices(lengths):
    texts = ["x" * length for length in lengths]
    parts = list(_slices(texts))
    assert [text for _, part in parts for text in part] == texts
    assert [start for start, _ in parts] == [sum(len(part) for _, part in parts[:i]) for i in range(len(parts))]
    assert all(len(part) <= SLICE_TEXTS for _, part in parts)
    assert all(len(part) == 1 or sum(map(len, part)) <= SLICE_CHARACTERS for _, part in parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["ab"], ["a", "b"]),
        (["é"], ["e\u0301"]),
        (["\ud83d", "\ude00"], ["\U0001f600"]),
        (["a", "b"], ["b", "a"]),
        (["a"] * 20_001, ["a"] * 20_000),
    ],
)
def test_other_texts_are_another_set(tokenizer, one, other):
    texts = front_end(tokenizer)._inline
    assert texts._read(one)[0] != texts._read(other)[0]
    assert texts._read(one)[0] == texts._read([str(text) for text in one])[0]


def kept(catalogue: Catalogue, texts: int) -> str:
    one = InlineSet.from_index(f"inline:{texts}", itemset.build([[i, i + 1] for i in range(texts)]).to_bytes())
    catalogue.keep(one)
    return one.reference


def test_a_set_is_known_while_it_is_held():
    sets = Catalogue(StaticConfig(inline_set_host_memory=0))
    held = sets.inline(kept(sets, 3))
    assert copy.deepcopy(ItemRequest(made=held)).made is held  # engines copy a request's parameters
    kept(sets, 4)
    assert sets.inline(held.reference) is held
    assert sets[held.reference] is held.item_set
    reference = held.reference
    del held
    assert sets.inline(reference) is None


def test_the_tables_lie_in_the_index_bytes():
    one = InlineSet.from_index("inline:0", itemset.build([[1, 2], [3, 4]]).to_bytes())
    for section in one.item_set.trie.tables.sections.values():
        assert np.shares_memory(section, np.frombuffer(one.index, np.uint8))
