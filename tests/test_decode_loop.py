"""Beam search over a set: exact where the beam is wide enough, and never a filler."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import pytest
import torch
from devices import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie
from strategies import item_sets
from views import KINDS, made

import itemset
from itemset.adapters.decode_loop import Ranking, beam_search
from itemset.masking import Kernels
from itemset.masking.arena import Arena, room_for

VOCABULARY = 40
END_TOKEN = VOCABULARY - 1


def model(row: int, prefix: Sequence[int]) -> torch.Tensor:
    """Random logits that are a function of the prefix."""
    seed = int.from_bytes(hashlib.blake2b(repr((row, list(prefix))).encode(), digest_size=6).digest(), "big")
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def logits_fn(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    assert parents.shape == tokens.shape[:2]
    rows = [[model(b, prefix) for prefix in beams] for b, beams in enumerate(tokens.tolist())]
    return torch.stack([torch.stack(row) for row in rows]).to(tokens.device)


def brute_force(items: list[list[int]], row: int, end_token: int | None) -> list[tuple[float, tuple[int, ...]]]:
    ranking = []
    for item in {tuple(item) for item in items}:
        tokens = [*item, *([end_token] if end_token is not None else [])]
        score = sum(model(row, item[:i]).log_softmax(-1)[token].item() for i, token in enumerate(tokens))
        ranking.append((score, item))
    return sorted(ranking, reverse=True)


def by_hand(
    items: list[list[int]], row: int, width: int, end_token: int | None, longest: int
) -> list[tuple[float, tuple[int, ...]]]:
    """What a beam of single tokens finds, on the dict trie."""
    open_, found = [(0.0, (), dict_trie(items))], []
    for t in range(longest + (end_token is not None)):
        bar = found[-1][0] if len(found) == width else -math.inf
        children = []
        for score, prefix, node in open_:
            log = model(row, prefix).double().log_softmax(-1)
            if None in node:
                found.append((score + (0 if end_token is None else log[end_token].item()), prefix))
            children += [
                (score + log[token].item(), (*prefix, token), child)
                for token, child in node.items()
                if token is not None and t < longest
            ]
        if end_token is None:
            found += [(score, item) for score, item, node in children if node.keys() == {None}]
            children = [child for child in children if child[2].keys() != {None}]
        found = sorted(found, reverse=True)[:width]
        open_ = [child for child in sorted(children, key=lambda child: -child[0])[:width] if child[0] > bar]
    if end_token is None:
        found += [(score, prefix) for score, prefix, node in open_ if None in node]
    return sorted(found, reverse=True)[:width]


def search(
    items: list[list[int]],
    width: int,
    end_token: int | None,
    batch: int = 2,
    kernels: Kernels = "auto",
    longest: int | None = None,
    kind: str = "whole",
) -> Ranking:
    built = made(items, kind)
    arena = Arena(room_for(built), DEVICE, kernels=kernels)
    number = arena.acquire(built)
    longest = longest or built.longest
    return beam_search(arena, number, logits_fn, batch=batch, width=width, longest=longest, end_token=end_token)


def check_exact(items: list[list[int]], answer: Ranking, row: int, end_token: int | None) -> None:
    expected = brute_force(items, row, end_token)
    assert answer.found[row] == len(expected)
    found = [tuple(t for t in tokens if t >= 0) for tokens in answer.tokens[row, : len(expected)].tolist()]
    assert found == [item for _, item in expected]
    torch.testing.assert_close(answer.scores[row, : len(expected)].cpu(), torch.tensor([s for s, _ in expected]))
    assert (answer.tokens[row, len(expected) :] == -1).all()
    assert answer.scores[row, len(expected) :].isneginf().all()


@given(
    item_sets(VOCABULARY - 1, max_items=12),
    st.sampled_from([None, END_TOKEN]),
    st.integers(0, 3),
    st.sampled_from(KINDS),
)
@settings(max_examples=30, deadline=None)
def test_a_beam_as_wide_as_the_set_is_exact(
    items: list[list[int]], end_token: int | None, more: int, kind: str
) -> None:
    answer = search(items, len({tuple(item) for item in items}) + more, end_token, kind=kind)
    for row in range(2):
        check_exact(items, answer, row, end_token)


@given(
    item_sets(VOCABULARY - 1, max_items=25), st.sampled_from([None, END_TOKEN]), st.integers(1, 6), st.integers(1, 31)
)
@settings(max_examples=40, deadline=None)
def test_a_narrow_beam_finds_what_one_by_hand_does(
    items: list[list[int]], end_token: int | None, width: int, longest: int
) -> None:
    answer = search(items, width, end_token, longest=longest)
    for row in range(2):
        expected = by_hand(items, row, width, end_token, longest)
        assert answer.found[row] == len(expected)
        assert answer.tokens.shape == (2, width, longest)
        found = [tuple(t for t in tokens if t >= 0) for tokens in answer.tokens[row, : len(expected)].tolist()]
        assert found == [item for _, item in expected]
        torch.testing.assert_close(answer.scores[row, : len(expected)].cpu(), torch.tensor([s for s, _ in expected]))


@pytest.mark.parametrize("end_token", [None, END_TOKEN])
def test_triton_finds_the_same(end_token: int | None) -> None:
    items = [[1, 2], [1, 2, 3], [4], [5, 6, 7, 8], [5, 6, 1, 2], [38, 0]]
    check_exact(items, search(items, 8, end_token, batch=1, kernels="triton"), 0, end_token)


def test_an_impossible_item_is_not_found() -> None:
    def forbids(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        logits = logits_fn(tokens, parents)
        logits[:, :, 7] = -torch.inf
        return logits

    built = itemset.build([[7, 1], [3, 7], [3, 4], [5]])
    arena = Arena(built.nbytes + 4096, DEVICE)
    answer = beam_search(arena, arena.acquire(built), forbids, batch=1, width=4, longest=2)
    assert answer.found.tolist() == [2]
    assert sorted(answer.tokens[0, :2].tolist()) == [[3, 4], [5, -1]]
