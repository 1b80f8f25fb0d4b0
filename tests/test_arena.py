"""The arena: shared, counted, reused, never moved, and plain about being full."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import DEVICE

import itemset
from itemset import ItemSetError
from itemset.masking.arena import Arena, ArenaFullError
from itemset.trie.walk import STATE_BITS


def numbered(first: int, items: int = 300) -> itemset.ItemSet:
    """A set that differs from others in its tokens, not in its size."""
    draw = np.random.default_rng(3).integers(0, 50, (items, 5))
    return itemset.build(np.concatenate([draw, [[first, 1, 1, 1, 1]]]), vocab_size=1000)


def room_for(sets: int) -> int:
    arena = Arena(1 << 20)
    arena.acquire(numbered(900))
    return arena.plan.used * sets


def root(arena: Arena, number: int) -> list[int]:
    """The tokens that may begin an item, as the mask has them."""
    logits = torch.zeros(1, 1000, device=arena.device)
    states = torch.tensor([number << STATE_BITS], device=arena.device)
    slots = torch.tensor([0], device=arena.device)
    marks = torch.full((1, 2), -1, dtype=torch.int32, device=arena.device)
    arena.kernels.mask(arena, logits, states, marks, slots)
    return logits[0].isfinite().nonzero()[:, 0].tolist()


def test_equal_sets_share_one_place() -> None:
    arena = Arena(room_for(1), DEVICE)
    one, same = numbered(900), numbered(900)
    assert arena.acquire(one) == arena.acquire(same)
    (resident,) = arena.plan.residents
    assert (resident.users, resident.nbytes) == (2, arena.plan.used)
    assert one.nbytes <= resident.nbytes <= one.nbytes + 7 * 128


def test_a_full_arena_says_how_much_is_missing() -> None:
    arena = Arena(room_for(2), DEVICE)
    kept = [arena.acquire(numbered(900)), arena.acquire(numbered(901))]
    need = arena.plan.used // 2
    with pytest.raises(ArenaFullError, match=re.escape(f"takes {need:,} bytes, {need:,} more than are free")):
        arena.acquire(numbered(902))
    assert [root(arena, number)[-1] for number in kept] == [900, 901]
    arena.release(kept[0])
    number = arena.acquire(numbered(902))
    assert [root(arena, n)[-1] for n in (number, kept[1])] == [902, 901]


def test_a_set_that_nobody_uses_stays_until_its_place_is_wanted() -> None:
    arena = Arena(room_for(3), DEVICE)
    numbers = {first: arena.acquire(numbered(first)) for first in (900, 901, 902)}
    for first in (901, 900, 902):
        arena.release(numbers[first])
    assert arena.plan.used == 0
    assert arena.acquire(numbered(900)) == numbers[900]  # no copy
    arena.acquire(numbered(903))  # in the place of 901, released longest ago
    digests = {resident.digest for resident in arena.plan.residents}
    assert digests == {numbered(first).digest for first in (900, 902, 903)}
    assert root(arena, numbers[900])[-1] == 900


def test_neighbouring_holes_become_one() -> None:
    arena = Arena(room_for(4), DEVICE)
    numbers = [arena.acquire(numbered(first)) for first in (900, 901, 902, 903)]
    large = itemset.build(np.random.default_rng(4).integers(0, 900, (600, 5)))
    for number in numbers[1:3]:
        arena.release(number)
    assert arena.plan.used < large.nbytes * 2 < 3 * arena.plan.used
    assert root(arena, arena.acquire(large)) == large.children()[0].tolist()
    assert [root(arena, n)[-1] for n in (numbers[0], numbers[3])] == [900, 903]


def test_more_sets_than_it_was_made_for() -> None:
    arena = Arena(1 << 20, DEVICE, max_sets=1)
    number = arena.acquire(numbered(900))
    with pytest.raises(ArenaFullError, match=r"1 sets are in use.*made for no more of them"):
        arena.acquire(numbered(901))
    arena.release(number)
    assert root(arena, arena.acquire(numbered(901)))[-1] == 901


def test_misuse() -> None:
    with pytest.raises(ItemSetError, match="an arena holds 1 to 4,096 sets, not 5,000"):
        Arena(1, max_sets=5000)
    with pytest.raises(ItemSetError, match="cpu cannot hold an arena of"):
        Arena(1 << 60, kernels="triton")
    arena = Arena(1 << 20)
    number = arena.acquire(numbered(900))
    arena.release(number)
    for unknown in (number, 17):
        with pytest.raises(ValueError, match=f"set {unknown} of the arena is not in use"):
            arena.release(unknown)


def test_tables_that_are_no_trie_never_reach_the_device() -> None:
    broken = numbered(900)
    targets = broken.trie.tables.targets.copy()
    targets[3] += 5
    broken.trie.__dict__["tables"] = replace(broken.trie.tables, targets=targets)
    with pytest.raises(ItemSetError, match="no trie: build its index again"):
        Arena(1 << 20).acquire(broken)
