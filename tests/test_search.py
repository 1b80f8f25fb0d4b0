"""The best items of a set: the oracle's ranking, proven where it is said to be, in few rounds."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie
from strategies import item_sets
from views import made

import itemset
from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import Found, Search

VOCABULARY = 72
END = VOCABULARY - 1


def log_probs(prefix: Sequence[int], vocabulary: int = VOCABULARY) -> np.ndarray:
    """Those of a random model: a function of the prefix."""
    seed = int.from_bytes(hashlib.blake2b(repr(list(prefix)).encode(), digest_size=6).digest(), "big")
    logits = np.random.default_rng(seed).standard_normal(vocabulary)
    return logits - np.log(np.exp(logits).sum())


class Model:
    """Answers passes, and remembers them."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self.vocabulary = vocabulary
        self.rounds: list[list[Pass]] = []

    def __call__(self, passes: Sequence[Pass]) -> list[tuple[np.ndarray, np.ndarray]]:
        self.rounds.append(list(passes))
        answers = []
        for tokens, known, after in passes:
            run = [log_probs(tokens[:i], self.vocabulary)[tokens[i]] for i in range(known, len(tokens))]
            answers.append((np.array(run), log_probs(tokens, self.vocabulary)[after]))
        return answers


def best_items(score: Callable[[Sequence[Pass]], Sequence[Answer]], search: Search) -> Found:
    """Run a search to its end. score: runs a round of passes."""
    while search.passes:
        search.take(score(search.passes))
    return search.result


def oracle(items: list[list[int]], end: int | None) -> list[tuple[float, tuple[int, ...]]]:
    """Every item with its score, best first."""
    scored = []
    for item in {tuple(item) for item in items}:
        tokens = [*item, *([] if end is None else [end])]
        scored.append((sum(log_probs(tokens[:i])[token] for i, token in enumerate(tokens)), item))
    return sorted(scored, key=lambda pair: (-pair[0], pair[1]))


def check(best: Found, expected: list[tuple[float, tuple[int, ...]]]) -> None:
    assert [item.tokens for item in best.items] == [item for _, item in expected]
    np.testing.assert_allclose([item.score for item in best.items], [score for score, _ in expected])


@settings(max_examples=80, deadline=None)
@given(
    items=item_sets(vocab_size=VOCABULARY - 1), k=st.integers(1, 8), end=st.sampled_from([None, END]), data=st.data()
)
def test_exact_is_the_oracles_ranking(items, k, end, data):
    width = data.draw(st.integers(1, 9))
    best = best_items(Model(), Search(made(items), k, width=width, end_token=end, exact=True))
    check(best, oracle(items, end)[:k])
    assert best.proven


@settings(max_examples=60, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), end=st.sampled_from([None, END]))
def test_a_beam_as_wide_as_the_set_ranks_it(items, end):
    best = best_items(Model(), Search(made(items), len(items), end_token=end))
    check(best, oracle(items, end))
    assert best.proven


@settings(max_examples=40, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1))
def test_scores_renormalised_over_the_legal_tokens(items):
    """They are the probabilities with which sampling inside the set gives each item, and sum up to one."""
    model = Model()
    best = best_items(model, Search(made(items), 1_000, end_token=END, renormalised=True))
    assert {item.tokens for item in best.items} == set(map(tuple, items))
    assert sum(np.exp(item.score) for item in best.items) == pytest.approx(1)
    trie = dict_trie(items)
    for item in best.items:
        node, score = trie, 0.0
        for i, token in enumerate((*item.tokens, None)):
            legal = [END if other is None else other for other in node]
            log = log_probs(item.tokens[:i])
            score += log[END if token is None else token] - np.logaddexp.reduce(log[legal])
            node = node[token]
        assert item.score == pytest.approx(score)
    assert all(one.known == len(one.tokens) for passes in model.rounds for one in passes)  # no tail was scored


def test_a_narrow_beam_says_that_it_is_not_proven():
    items = np.random.default_rng(0).integers(0, 70, (400, 4)).tolist()
    narrow = best_items(Model(), Search(itemset.build(items), 2, width=2, end_token=END))
    proven = best_items(Model(), Search(itemset.build(items), 2, end_token=END, exact=True))
    assert not narrow.proven
    assert proven.proven
    assert proven.passes > narrow.passes
    assert narrow.items[0].score <= proven.items[0].score
    check(proven, oracle(items, END)[:2])


def test_limits_of_passes():
    """All give the best so far, with right scores and no proof. What leaves room for the beam is no worse than it; a
    limit of the proof alone lets the beam end."""
    items = np.random.default_rng(2).integers(0, 70, (400, 4)).tolist()
    scores = {item: score for score, item in oracle(items, END)}

    def limited(**limits: int) -> Found:
        best = best_items(Model(), Search(itemset.build(items), 5, end_token=END, exact=True, **limits))
        assert not best.proven
        assert all(item.score == pytest.approx(scores[item.tokens]) for item in best.items)
        return best

    def no_worse(best: Found) -> bool:
        return all(mine.score >= theirs.score for mine, theirs in zip(best.items, beam.items, strict=True))

    beam = best_items(Model(), Search(itemset.build(items), 5, end_token=END))
    for limit in (1, 2, 7, 30, beam.passes, beam.passes + 1, beam.passes + 20):
        best = limited(max_passes=limit)
        assert best.passes <= limit
        assert limit < beam.passes or no_worse(best)
    for limit in (1, beam.passes, beam.passes + 9):
        best = limited(proof_passes=limit)
        assert best.passes == max(limit, beam.passes)
        assert no_worse(best)
    best = best_items(Model(), Search(itemset.build(items), 5, end_token=END, exact=True, proof_passes=10_000))
    check(best, oracle(items, END)[:5])
    assert best.proven


def test_equal_scores_are_ordered_by_tokens_and_impossible_items_are_not_found():
    items = [[a, b] for a in range(6) for b in range(5)] + [[6]]

    def score(passes: Sequence[Pass]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.full(len(one.tokens) - one.known, -2.0), np.where(one.after == 3, -np.inf, -2.0)) for one in passes]

    best = best_items(score, Search(itemset.build(items), 40, end_token=END))
    possible = sorted((tuple(item) for item in items if 3 not in item), key=lambda item: (len(item), item))
    assert [item.tokens for item in best.items] == possible
    best = best_items(score, Search(itemset.build(items), 7, width=3, end_token=END))
    assert [item.tokens for item in best.items] == [(0, 0), (0, 1), (0, 2)]


def test_a_round_of_a_long_list_is_not_kept_as_objects():
    """A round of 1,000 prefixes of a million items has half a million children: sixteen bytes each, at most."""
    codes = np.random.default_rng(0).integers(0, 2_048, (1_000_000, 8))
    search = Search(itemset.build(codes), 1_000, end_token=2_048, exact=True)
    model = Model(vocabulary=2_049)
    search.take(model(search.passes))
    answers = [(np.zeros(0), np.full(len(one.after), -7.0)) for one in search.passes]
    tracemalloc.start()
    search.take(answers)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(after) for _, after in answers) > 400_000
    assert kept < 20e6
    assert most < 100e6


def test_a_long_proof_takes_ever_larger_rounds():
    items = np.random.default_rng(3).integers(0, 70, (2_000, 4)).tolist()
    best = best_items(Model(), Search(itemset.build(items), 2, end_token=END, exact=True))
    check(best, oracle(items, END)[:2])
    assert best.passes > 300
    assert best.rounds < best.passes / 8


def test_a_million_semantic_ids_take_four_rounds():
    """Items of 8 tokens, most of which stand alone behind two: a beam of single tokens takes 8 rounds and the end's."""
    codes = np.random.default_rng(0).integers(0, 2_048, (1_000_000, 8))
    model = Model(vocabulary=2_049)
    best = best_items(model, Search(itemset.build(codes), 10, end_token=2_048))
    assert len({item.tokens for item in best.items}) == 10
    assert best.rounds == len(model.rounds) <= 4
    assert best.passes == sum(map(len, model.rounds)) <= 1 + 3 * 10


@pytest.mark.parametrize(
    "what", [{"k": 0}, {"k": 1, "width": 0}, {"k": 1, "max_passes": -1}, {"k": 1, "proof_passes": 0}]
)
def test_nothing_to_search_for(what):
    with pytest.raises(ValueError, match="make it at least 1"):
        best_items(Model(), Search(itemset.build([[1]]), **what))
