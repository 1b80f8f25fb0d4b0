"""The host path against the oracle: bitmask bit for bit, accepting, validating, rolling back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie, prefixes
from strategies import item_sets

import itemset
from itemset.host import HostState, forced_tokens

STOPS = {66, 69}


def bits(state: HostState, vocab_size: int) -> list[int]:
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    state.fill_bitmask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@given(item_sets(65))
@settings(max_examples=200, deadline=None)
def test_the_bitmask_of_every_state(items: list[list[int]]) -> None:
    s = itemset.build(items)
    for before, tokens, ends in prefixes(dict_trie(items)):
        state = HostState(s, STOPS)
        assert state.accept(before)
        assert bits(state, 70) == sorted({*tokens, *(STOPS if ends else ())})
        assert state.allowed_prefix([66, 69, 66]) == ([66, 69, 66] if ends else [])
        if ends:
            assert state.accept([66])
            assert state.complete
            assert bits(state, 70) == sorted(STOPS)
            state.rollback(1)
            assert bits(state, 70) == sorted({*tokens, *STOPS})


@given(item_sets(70), st.lists(st.integers(0, 69), max_size=8), st.data())
@settings(max_examples=300, deadline=None)
def test_accept_validate_rollback(items: list[list[int]], tail: list[int], data: st.DataObject) -> None:
    known = {before: (tokens, ends) for before, tokens, ends in prefixes(dict_trie(items))}
    item = data.draw(st.sampled_from(items))
    tokens = item[: data.draw(st.integers(0, len(item)))] + tail
    legal = 0
    while legal < len(tokens) and tuple(tokens[: legal + 1]) in known:
        legal += 1
    state = HostState(itemset.build(items), ())
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
    assert state.complete


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
