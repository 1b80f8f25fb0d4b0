"""Wide rows: ready masks, and what is done without them, on the host and on a device, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICE, KERNELS
from oracle import dict_trie, prefixes
from views import KINDS, made

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import READY, Batch
from itemset.masking.host import HostState, fill_bitmasks
from itemset.masking.slots import Slots
from itemset.trie import levels as ready

STOPS = [17, 4_500]


def wide_items(seed: int) -> list[list[int]]:
    """About 700 first tokens, with two of which hundreds of items begin, and one is an item."""
    draw = np.random.default_rng(seed)
    first = draw.choice(6_000, 700, replace=False)
    items: set[tuple[int, ...]] = {(int(token), int(other)) for token in first for other in draw.integers(0, 9_000, 2)}
    items |= {(int(first[0]), int(token), 5) for token in draw.choice(6_000, 400, replace=False)}
    items |= {(int(first[1]), token) for token in range(3_000, 3_900)} | {(int(first[1]),)}
    return list(map(list, items))


@pytest.fixture(params=[True, False], ids=["ready", "not ready"])
def is_ready(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    taken = bool(request.param)
    if not taken:
        monkeypatch.setattr(ready, "WIDE", 1 << 40)
    return taken


def states_of(items: list[list[int]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """The widest prefixes and some others, with all tokens that may follow."""
    found = sorted(prefixes(dict_trie(items)), key=lambda one: -len(one[1]))
    return [(tuple(prefix), sorted({*tokens, *(STOPS if ends else [])})) for prefix, tokens, ends in found[:6]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [4_000, 9_001])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.slow
def test_wide_rows_on_a_device(kernels: Any, vocabulary: int, kind: str, is_ready: bool) -> None:
    items = wide_items(seed=1)
    item_set, known = made(items, kind), states_of(items)
    assert [len(tokens) > 300 for _, tokens in known[:3]] == [True] * 3
    arena = Arena(room_for(item_set), DEVICE, kernels=kernels)
    number = arena.acquire(item_set)
    if kernels == "triton":
        assert (int(arena.sets[number, READY]) >= 0) == is_ready
    else:
        assert bool(arena.rows[number, READY]) == is_ready
    slots = Slots(arena, len(known), max_rows=len(known), max_stop_tokens=2)
    ids = torch.arange(len(known), device=DEVICE)
    slots.assign(ids, torch.full_like(ids, number), torch.tensor([[-1, *STOPS]] * len(known), device=DEVICE))
    history = torch.tensor([[*prefix, 0, 0, 0][:3] for prefix, _ in known], device=DEVICE)
    ends = torch.tensor([len(prefix) for prefix, _ in known], device=DEVICE)
    logits = torch.randn(len(known), vocabulary + 7, device=DEVICE).to(torch.bfloat16)[:, :vocabulary]
    expected = torch.full_like(logits, -torch.inf)
    for row, before, (_, tokens) in zip(expected, logits, known, strict=True):
        kept = [token for token in tokens if token < vocabulary]
        row[kept] = before[kept]
    slots.step(Batch(ids, history, begin=torch.zeros_like(ends), end=ends), logits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_wide_rows_on_the_host(kind: str, is_ready: bool) -> None:
    items = wide_items(seed=2)
    item_set, known = made(items, kind), states_of(items)
    assert (len(item_set.ready) > 0) == is_ready
    hosts = [HostState(item_set, STOPS) for _ in known]
    assert all(host.accept(prefix) for host, (prefix, _) in zip(hosts, known, strict=True))
    for words in (100, 282):
        bitmask = np.full((len(known), words), -1, np.int32)
        fill_bitmasks(hosts, [host.state for host in hosts], list(range(len(known))), bitmask)
        for row, (_, tokens) in zip(bitmask, known, strict=True):
            bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            assert bits == [token for token in tokens if token < 32 * words]


@pytest.mark.parametrize(("tokens", "levels"), [(2_048, 2), (20_000, 1)])
def test_ready_masks_are_few_and_the_arena_counts_them(tokens: int, levels: int) -> None:
    """Whole levels, as far as an eighth of the tables' bytes goes; the root's in any case."""
    draw = np.random.default_rng(3)
    items = np.stack([draw.integers(0, 300, 600_000), *(draw.integers(5_000, 5_000 + tokens, (2, 600_000)))], 1)
    item_set = itemset.build(np.concatenate((items, [[tokens - 1, 5_000, 0]])))
    nodes, _, width = item_set.ready[: ready.HEADER].tolist()
    assert nodes == sum(item_set.trie.level_nodes[:levels])
    assert len(item_set.ready) == ready.HEADER + nodes * width
    assert item_set.ready.nbytes <= max(item_set.nbytes / 8, 1 << 15) + 4 * ready.HEADER
    assert room_for(item_set) >= item_set.nbytes + item_set.ready.nbytes
    assert len(itemset.build(items[:100]).ready) == 0
