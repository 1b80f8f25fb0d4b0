"""The host path against the oracle: bitmask bit for bit, accepting, validating, rolling back."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie, prefixes
from strategies import item_sets
from views import made

import itemset
from itemset.embedded.forced import extend
from itemset.masking.host import HostState, fill_bitmasks, forced_tokens
from itemset.select.views import filtered, without
from itemset.trie.walk import END, FREE

STOPS = {66, 69}


def bits(state: HostState, vocab_size: int) -> list[int]:
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    state.fill_bitmask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@given(item_sets(65))
@settings(max_examples=200, deadline=None)
def test_the_bitmask_of_every_state(items: list[list[int]]) -> None:
    s = made(items)
    for before, tokens, ends in prefixes(dict_trie(items)):
        state = HostState(s, STOPS)
        assert state.accept(before)
        assert bits(state, 70) == sorted({*tokens, *(STOPS if ends else ())})
        assert state.allowed_prefix([66, 69, 66]) == ([66, 69, 66] if ends else [])
        if ends:
            assert state.accept([66])
            assert state.state == END
            assert bits(state, 70) == sorted(STOPS)
            state.rollback(1)
            assert bits(state, 70) == sorted({*tokens, *STOPS})


@given(item_sets(65), st.integers(0, 6), st.data())
@settings(max_examples=100, deadline=None)
def test_what_a_set_forces_comes_after_drafts(items: list[list[int]], most: int, data: st.DataObject) -> None:
    known = {before: (*tokens, *((66,) if ends else ())) for before, tokens, ends in prefixes(dict_trie(items))}
    item = data.draw(st.sampled_from(items))
    state, drafts = HostState(made(items), {66}), item[: data.draw(st.integers(0, min(most, len(item))))]
    expected = list(drafts)
    while len(expected) < most and len(following := known.get(tuple(expected), ())) == 1:
        expected += following
    assert extend(state, drafts, most, 3) == expected
    assert state.state == 0


@given(item_sets(70), st.lists(st.integers(0, 69), max_size=8), st.data())
@settings(max_examples=150, deadline=None)
def test_accept_validate_rollback(items: list[list[int]], tail: list[int], data: st.DataObject) -> None:
    known = {before: (tokens, ends) for before, tokens, ends in prefixes(dict_trie(items))}
    item = data.draw(st.sampled_from(items))
    tokens = item[: data.draw(st.integers(0, len(item)))] + tail
    legal = 0
    while legal < len(tokens) and tuple(tokens[: legal + 1]) in known:
        legal += 1
    state = HostState(made(items), ())
    assert state.allowed_prefix(tokens) == tokens[:legal]
    assert bits(state, 70) == known[()][0]
    assert state.accept(tokens) is (legal == len(tokens))
    assert bits(state, 70) == known[tuple(tokens[:legal])][0]
    back = data.draw(st.integers(0, legal))
    state.rollback(back)
    assert bits(state, 70) == known[tuple(tokens[: legal - back])][0]
    state.reset()
    assert bits(state, 70) == known[()][0]
    with pytest.raises(ValueError, match="cannot roll back 1 tokens, 0 were accepted"):
        state.rollback(1)


def test_a_stop_token_that_continues_an_item_is_the_items() -> None:
    state = HostState(itemset.build([[1], [1, 2]]), {2})
    assert state.accept([1, 2])
    assert state.state == END


@pytest.mark.parametrize("vocab_size", [70, 96, 97])
def test_tokens_above_the_row_are_left_out(vocab_size: int) -> None:
    state = HostState(itemset.build([[vocab_size - 1], [2_000]]), {3_000})
    assert bits(state, vocab_size) == [vocab_size - 1]


def test_forced_tokens_have_no_rival() -> None:
    s = itemset.build([[1, 2, 3], [1, 2], [4, 5, 6], [7, 8], [7, 9]])
    counts = {
        (4, 5, 6, 0): 3,
        (1, 2, 3, 0): 2,
        (1, 2, 0): 1,
        (7, 9, 0): 1,
        (4,): 0,
        (4, 5): 1,
        (5,): 0,
        (7, 8, 0, 0): 1,
    }
    assert {tokens: forced_tokens(s, tokens) for tokens in counts} == counts


@given(st.lists(item_sets(), min_size=1, max_size=4), st.integers(70, 130), st.data())
@settings(max_examples=200, deadline=None)
def test_a_batch_is_filled_as_its_rows_are(sets: list[list[list[int]]], vocab_size: int, data: st.DataObject) -> None:
    """States of several sets, some ended, in rows of any order; a free row allows everything, others stay."""
    hosts = []
    for items in sets:
        item_set = made(items)
        for item in data.draw(st.lists(st.sampled_from(items), max_size=4)):
            hosts.append(HostState(item_set, STOPS))
            assert hosts[-1].accept(item[: data.draw(st.integers(0, len(item)))])
            hosts[-1].accept([66] * data.draw(st.integers(0, 2)))
    words = -(-vocab_size // 32)
    rows = data.draw(st.permutations(range(len(hosts) + 3)))
    free = [*hosts[:1]] * data.draw(st.integers(0, 1))
    expected, bitmask = (np.full((len(hosts) + 3, words), 12345, np.int32) for _ in range(2))
    for host, row in zip(hosts, rows, strict=False):
        host.fill_bitmask(expected[row])
    for _ in free:
        expected[rows[len(hosts)]] = -1
    states = [host.state for host in hosts] + [FREE] * len(free)
    fill_bitmasks(hosts + free, states, rows[: len(states)], bitmask)
    assert np.array_equal(bitmask, expected)


@given(item_sets(), st.lists(st.integers(-1, 69), max_size=6), st.data())
@settings(max_examples=200, deadline=None)
def test_draft_states_are_those_of_accepting_one_by_one(
    items: list[list[int]], tail: list[int], data: st.DataObject
) -> None:
    host = HostState(made(items), STOPS)
    item = data.draw(st.sampled_from(items))
    before = data.draw(st.integers(0, len(item)))
    assert host.accept(item[:before])
    drafts = item[before : data.draw(st.integers(before, len(item)))] + tail
    expected, padded, refused, accepted = [], False, False, 0
    for token in [*drafts, None]:
        expected.append(FREE if padded else host.state)
        padded = padded or (token == -1 and not refused)
        if token is None or padded or refused:
            continue
        refused = not host.accept([token])
        accepted += not refused
    host.rollback(accepted)
    at = host.state
    assert host.draft_states(drafts) == expected
    assert host.state == at


@pytest.mark.parametrize("top", [69, 70_000], ids=["labels of 2 bytes", "of 4"])
@pytest.mark.parametrize(("tail", "width"), [(0, 8), (3, 2), (1_100, 4)], ids=["counted", "targets of 2 bytes", "of 4"])
@pytest.mark.slow
def test_every_width_of_the_tables(top: int, tail: int, width: int) -> None:
    items = [[1, 2, top, *range(tail)], [1, top, *range(tail)], [top], [top, 5]]
    if width == 8:
        items = [[1, 2, top, 7], [1, top, 8, 8], [1, top, 8, 9], [top, 5, 5, 5]]
    s = itemset.build(items)
    tables = s.trie.tables
    assert (tables.labels.itemsize, tables.targets.itemsize) == (4 if top > 65_535 else 2, width)
    state = HostState(s, STOPS)
    del s, tables
    gc.collect()  # the state keeps what the compiled walks read
    assert bits(state, 70_016) == [1, top]
    for item in items:
        assert state.accept(item)
        assert bits(state, 70_016) == sorted({66, 69} | ({5} if item == [top] else set()))
        assert not state.accept([68])
        state.reset()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_reads_what_another_state_keeps(copied: Callable[[HostState], object]) -> None:
    with pytest.raises(TypeError, match="holds addresses, so it cannot be copied or pickled: make a new one"):
        copied(HostState(itemset.build([[1]]), ()))


def test_rows_that_are_not_there() -> None:
    hosts = [HostState(itemset.build([[1]]), ())] * 2
    bitmask = np.zeros((2, 3), np.int32)
    for row in (-1, 2):
        with pytest.raises(IndexError, match="the bitmask has no such row"):
            fill_bitmasks(hosts, [0, 0], [0, row], bitmask)
    with pytest.raises(ValueError, match="1 rows need a request and a state each, not 2 and 2"):
        fill_bitmasks(hosts, [0, 0], [0], bitmask)
    assert not bitmask.any()


@pytest.mark.parametrize("words", [0, 3, 10, 40])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_wide_nodes_of_views(share: float, words: int) -> None:
    """Whose tokens follow one another or do not, in blocks of 32 edges that live wholly, in part or not at all."""
    draw = np.random.default_rng(int(100 * share))
    runs = [draw.integers(0, 900) + np.arange(draw.integers(1, 200)) for _ in range(6)]
    spread = [np.sort(draw.choice(1_200, draw.integers(1, 400), replace=False)) for _ in range(6)]
    holed = [np.delete(run, draw.integers(0, len(run), len(run) // 20)) for run in runs if len(run) > 20]
    each = [*runs, *spread, *holed]
    items = [[first, int(token)] for first, tokens in enumerate(each) for token in tokens]
    whole = itemset.build(items)
    lives = draw.random(len(items)) < share
    lives[:50] = True
    seen = filtered(whole, lives)
    for item_set in (whole, seen, without(seen, np.arange(0, 50, 2))):
        for first in range(len(each)):
            state = HostState(item_set, [])
            if not state.accept([first]):
                continue
            children = item_set.children([first])[0].tolist()
            assert bits(state, 32 * words) == [token for token in children if token < 32 * words]
