"""Log-probabilities over the legal tokens: against masking by a dict trie, in float64, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from distributions import fit
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie
from samples import SAMPLES
from strategies import item_sets
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from views import KINDS, made

import itemset
from itemset import ItemSetError
from itemset.ranking.exact_sampling import Drawing
from itemset.training import (
    LegalPolicy,
    boosted_log_probs,
    legal_cross_entropy,
    legal_log_probs,
    legal_log_probs_of_hidden,
    legal_tokens,
)

STOP, PAD, VOCABULARY, WIDTH = 44, 43, 45, 6
Where = list[tuple[int, int, list[int]]]  # row, position, and the tokens that are legal there


def ragged(count: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 12, rng.integers(1, 6)).tolist() for _ in range(count)]


def batch(items: list[list[int]], starts: list[int], steps: int) -> tuple[Tensor, list[int], Where]:
    """Ids with thoughts before each item, a stop token after it, and padding; lengths; and what the oracle allows."""
    trie, ids, lengths, where = dict_trie(items), torch.full((len(starts), steps), PAD), [], []
    for row, start in enumerate(starts):
        item = items[(7 * row) % len(items)]
        whole = [*range(20, 20 + start), *item, STOP][:steps]
        ids[row, : len(whole)] = torch.tensor(whole)
        lengths.append(len(whole))
        node = trie
        for position in range(start, len(whole)):
            where.append((row, position, [STOP if token is None else token for token in node]))
            node = node.get(whole[position], {})
    return ids, lengths, where


def by_masking(logits: Tensor, ids: Tensor, where: Where) -> dict[str, Tensor]:
    """log q, log m and entropy by a mask over the whole vocabulary, a place at a time."""
    found = {name: torch.zeros(ids.shape, dtype=logits.dtype) for name in ("q", "mass", "entropy")}
    for row, position, allowed in where:
        mask = torch.full((logits.shape[-1],), -math.inf, dtype=logits.dtype)
        mask[allowed] = 0
        p, q = logits[row, position].log_softmax(0), (logits[row, position] + mask).log_softmax(0)
        found["q"][row, position] = q[ids[row, position]]
        found["mass"][row, position] = p[allowed].logsumexp(0)
        found["entropy"][row, position] = -(q[allowed].exp() * q[allowed]).sum()
    return found


def gradient(value: Tensor, of: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return torch.autograd.grad((value * weights).sum(), of, retain_graph=True)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_masking(kind: str, temperature: float) -> None:
    items, starts = ragged(), [0, 3, 0, 1, 2, 0, 5]
    ids, lengths, where = batch(items, starts, 7)
    logits = torch.randn(*ids.shape, VOCABULARY, dtype=torch.float64, requires_grad=True)
    legal = legal_tokens(ids, made(items, kind), stop_tokens=STOP, starts=starts, lengths=lengths)
    policy = LegalPolicy.of_logits(logits, legal, temperature=temperature)
    expected = by_masking(logits / temperature, ids, where)
    pairs = {"q": policy.log_probs, "mass": policy.log_mass, "entropy": policy.entropy}
    pairs["p"], expected["p"] = policy.log_probs + policy.log_mass, expected["q"] + expected["mass"]
    for name, value in pairs.items():
        torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=0)
        torch.testing.assert_close(gradient(value, logits), gradient(expected[name], logits), atol=1e-12, rtol=0)


@pytest.mark.parametrize("mass", [True, False])
def test_logits_may_be_a_view_of_others(mass: bool) -> None:
    """Without columns that pad the vocabulary, without the last place, and of one row with places side by side."""
    items = ragged()
    for starts in ([0, 3, 1], [0]):
        ids, lengths, _ = batch(items, starts, 7)
        legal = legal_tokens(ids, made(items), stop_tokens=STOP, starts=starts, lengths=lengths)
        padded = torch.randn(len(starts), 8, VOCABULARY + 3, dtype=torch.float64, requires_grad=True)
        turned = torch.randn(len(starts), VOCABULARY, 7, dtype=torch.float64, requires_grad=True)
        for given_, view in ((padded, padded[:, :-1, :VOCABULARY]), (turned, turned.transpose(1, 2))):
            found, expected = (LegalPolicy.of_logits(one, legal, mass=mass) for one in (view, view.contiguous()))
            for name in ("log_probs", "entropy", *(["log_mass"] if mass else [])):
                mine, theirs = getattr(found, name), getattr(expected, name)
                torch.testing.assert_close(mine, theirs)
                torch.testing.assert_close(gradient(mine, given_), gradient(theirs, given_))


@pytest.mark.parametrize("mass", [True, False])
def test_from_hidden_states_it_is_the_same(mass: bool) -> None:
    items, starts = ragged(), [0, 3, 0, 1, 2, 0, 5]
    ids, lengths, _ = batch(items, starts, 7)
    hidden = torch.randn(*ids.shape, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    legal = legal_tokens(ids, made(items), stop_tokens=STOP, starts=starts, lengths=lengths)
    found = LegalPolicy.of_hidden(hidden, head, legal, temperature=0.8, mass=mass)
    expected = LegalPolicy.of_logits(hidden @ head.T, legal, temperature=0.8)
    pairs = [(found.log_probs, expected.log_probs), (found.entropy, expected.entropy)]
    pairs += [(found.log_mass, expected.log_mass)] if mass else []
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
        for parameter in (hidden, head):
            torch.testing.assert_close(gradient(mine, parameter), gradient(theirs, parameter), atol=1e-12, rtol=0)
    if not mass:
        with pytest.raises(ItemSetError, match="make the policy with mass=True"):
            _ = found.log_mass


def test_tokens_of_probability_zero_count_nothing() -> None:
    """Others are as among those that are left, with their gradients."""
    legal = legal_tokens([[1, STOP]], itemset.build([[1], [2], [3]]), stop_tokens=STOP)
    less = legal_tokens([[1, STOP]], itemset.build([[1], [2]]), stop_tokens=STOP)
    logits, other = torch.randn(2, 1, 2, VOCABULARY, dtype=torch.float64)
    logits[..., 3] = -math.inf
    logits.requires_grad_()
    mine, own = (LegalPolicy.of_logits(logits, one, mass=False) for one in (legal, less))
    theirs, others = (LegalPolicy.of_logits(other, one, mass=False) for one in (legal, less))
    shift = theirs.log_probs - others.log_probs  # of what the reference gives to the third
    for found, expected in ((mine.entropy, own.entropy), (mine.kl(theirs), own.kl(others) - shift)):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradient(found, logits), gradient(expected, logits))
    assert mine.kl(mine).abs().max() == 0


def test_divergence_is_exact_and_falls_to_zero() -> None:
    items = ragged()
    ids, lengths, where = batch(items, [0, 2], 6)
    logits, other = (torch.randn(2, 6, VOCABULARY, dtype=torch.float64, requires_grad=True) for _ in range(2))
    legal = legal_tokens(ids, made(items), stop_tokens=STOP, starts=[0, 2], lengths=lengths)
    mine, theirs = (LegalPolicy.of_logits(one, legal, mass=False) for one in (logits, other))
    expected = torch.zeros(ids.shape, dtype=torch.float64)
    for row, position, allowed in where:
        q, r = (one[row, position, allowed].log_softmax(0) for one in (logits, other))
        expected[row, position] = (q.exp() * (q - r)).sum()
    torch.testing.assert_close(mine.kl(theirs), expected, atol=1e-12, rtol=0)
    for parameter in (logits, other):
        grads = gradient(mine.kl(theirs), parameter), gradient(expected, parameter)
        torch.testing.assert_close(*grads, atol=1e-12, rtol=0)
    assert mine.kl(mine).abs().max() == 0
    again = legal_tokens(ids, made(items), stop_tokens=STOP, starts=[0, 2], lengths=lengths)
    with pytest.raises(ItemSetError, match="same LegalTokens"):
        mine.kl(LegalPolicy.of_logits(other, again))


@settings(max_examples=80, deadline=None)
@given(items=item_sets(), data=st.data())
def test_the_walk_finds_what_the_oracle_allows(items: Any, data: Any) -> None:
    items = [list(item) for item in items]
    stop = max(map(max, items)) + 1
    rows = data.draw(st.lists(st.sampled_from(items), min_size=1, max_size=5))
    starts = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    steps = max(start + len(row) for start, row in zip(starts, rows, strict=True)) + 1
    ids, expected, trie = np.full((len(rows), steps), stop + 1), [], dict_trie(items)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[i, start : start + len(row) + 1] = [*row, stop]
        node = trie
        for t in range(start, start + len(row) + 1):
            expected.append((i * steps + t, {stop if token is None else token for token in node}))
            node = node.get(int(ids[i, t]), {})
    legal = legal_tokens(ids, made(items), stop_tokens=[stop], starts=starts)
    assert legal.places.tolist() == [place for place, _ in expected]
    found = [set(part.tolist()) for part in legal.tokens.split(legal.counts.tolist())]
    assert found == [allowed for _, allowed in expected]
    assert legal.counts.tolist() == [len(allowed) for _, allowed in expected]
    assert legal.tokens[legal.chosen].tolist() == ids.ravel()[legal.places].tolist()
    assert sorted(torch.cat([block.entries for block in legal.blocks]).tolist()) == list(range(len(legal.tokens)))


def test_a_set_for_each_row() -> None:
    first, second = [[1, 2], [1, 3]], [[1, 4], [5]]
    ids = [[1, 2, STOP], [1, 4, STOP], [5, STOP, PAD]]
    one, other = made(first, "whole"), made(second, "filtered")
    legal = legal_tokens(ids, [one, other, other], stop_tokens=STOP)
    parts = [sorted(part.tolist()) for part in legal.tokens.split(legal.counts.tolist())]
    assert parts == [[1], [2, 3], [STOP], [1, 5], [4], [STOP], [1, 5], [STOP]]
    with pytest.raises(ItemSetError, match="2 sets for 3 rows"):
        legal_tokens(ids, [one, other], stop_tokens=STOP)


def test_what_is_no_item_is_free() -> None:
    items = itemset.build([[1, 2], [1, 2, 3]])
    places = {
        "labels": ([[-100, -100, 1, 2, STOP, -100]], {}, [2, 3, 4]),
        "nothing after the stop token": ([[1, 2, STOP, 1, 9, 9]], {}, [0, 1, 2]),
        "cut": ([[1, 2, PAD]], {"lengths": 2}, [0, 1]),
        "no item": ([[9, 9, 9]], {"starts": [3]}, []),
        "no stop tokens": ([[1, 2, 3, 9]], {"stop_tokens": []}, [0, 1, 2]),
        "all padding": ([[-100, -100]], {}, []),
    }
    for name, (ids, options, expected) in places.items():
        assert legal_tokens(ids, items, **{"stop_tokens": STOP, **options}).places.tolist() == expected, name
    nothing = legal_tokens([[9, 9]], items, stop_tokens=STOP, starts=2)
    logits = torch.randn(1, 2, VOCABULARY, requires_grad=True)
    head = torch.randn(VOCABULARY + 1, VOCABULARY)
    for value in (*legal_log_probs(logits, nothing), *legal_log_probs_of_hidden(logits, head, nothing)):
        assert value.tolist() == [[0, 0]]
        assert gradient(value, logits).abs().max() == 0
    for shape in ((0, 3), (2, 0), (0, 0)):
        empty = legal_tokens(torch.zeros(shape, dtype=torch.int64), items, stop_tokens=STOP)
        policy = LegalPolicy.of_logits(torch.randn(*shape, VOCABULARY), empty)
        assert policy.log_probs.shape == policy.log_mass.shape == policy.entropy.shape == shape
        assert not empty.blocks


def test_a_stop_token_that_continues_an_item_is_a_token_of_it() -> None:
    items = itemset.build([[1], [1, STOP]])
    legal = legal_tokens([[1, STOP, STOP]], items, stop_tokens=[STOP, STOP])
    assert [part.tolist() for part in legal.tokens.split(legal.counts.tolist())] == [[1], [STOP], [STOP]]


def test_errors_name_the_place_and_the_mend() -> None:
    items = itemset.build([[1, 2], [1, 3]])
    good = [[1, 2, STOP], [1, 3, STOP]]
    bad = {
        "row 1, position 1: token 4 is not legal after 1 tokens": ([[1, 2, STOP], [1, 4, STOP]], {}),
        "row 0, position 2: token 43 is not legal.*`lengths`": ([[1, 2, PAD]], {}),
        "row 0, position 0: token 9 is not legal.*`starts`": ([[9, 1, 2]], {}),
        f"token {1 << 40} is not legal": ([[1, 1 << 40]], {}),
        "ids must be .batch, time.": ([1, 2], {}),
        "starts must be 0 to 3, one for all rows or one for each of 2": (good, {"starts": [0, 1, 2]}),
        "lengths must be 0 to 3": (good, {"lengths": 4}),
    }
    for message, (ids, options) in bad.items():
        with pytest.raises(ItemSetError, match=message):
            legal_tokens(ids, items, stop_tokens=STOP, **options)
    for message, given_ in {
        "the stop token -1 is no token": (good, items, [STOP, -1]),
        "stop_tokens must be integers, not object": (good, items, None),
        "ids must be integers, not float64": ([[1.0, 2.9]], items, STOP),
        "starts must be integers, not float64": (good, items, STOP, 0.5),
        "0 sets for 2 rows": (good, None, STOP),
    }.items():
        with pytest.raises(ItemSetError, match=message):
            legal_tokens(*given_[:2], stop_tokens=given_[2], starts=given_[3] if given_[3:] else None)
    legal, logits = legal_tokens(good, items, stop_tokens=STOP), torch.randn(2, 3, VOCABULARY)
    wrong: dict[str, Any] = {
        "the model has 10 tokens": (logits[..., :10], legal),
        "one place before it": (logits[:, 1:], legal),
        "give item_set and stop_tokens": (logits, torch.tensor(good)),
        "walked already": (logits, legal, items),
    }
    for message, given_ in wrong.items():
        with pytest.raises(ItemSetError, match=message):
            legal_log_probs(*given_)
    with pytest.raises(ItemSetError, match="temperature must be more than 0"):
        legal_log_probs(logits, legal, temperature=0)


def test_cross_entropy_lies_between_the_set_s_own_and_the_ordinary_one() -> None:
    items = itemset.build(ragged())
    item = items.items()[0]
    labels = torch.tensor([[-100, *item, STOP, -100]])
    logits = torch.randn(*labels.shape, VOCABULARY)
    ordinary = torch.nn.functional.cross_entropy(logits[0], labels[0])
    log_q, _ = legal_log_probs(logits, labels, items, stop_tokens=STOP)
    for weight, expected in ((1.0, ordinary), (0.0, -log_q.sum() / (len(item) + 1))):
        found = legal_cross_entropy(logits, labels, items, stop_tokens=STOP, mass_weight=weight)
        torch.testing.assert_close(found, expected)


def test_a_boosted_policy_is_what_boosted_draws_follow() -> None:
    """Over all items of a set: the draws' frequencies, and the ratio of two policies from draws of one of them."""
    built = itemset.build([[1], [2], [3], [4], [5]], keys=[10, 20, 30, 40, 50], attributes={"margin": [0, 1, 2, 0, 3]})
    view = itemset.view(built, boost={"margin": 0.5}, boost_keys={40: -1.0})
    boosts, items = view.boosts_of(built.items()), torch.tensor(built.items())[:, 0]
    torch.manual_seed(0)
    after = torch.randn(8, dtype=torch.float64)
    old, new = (one.log_softmax(0)[items][None] for one in (torch.randn(8, dtype=torch.float64), after))
    served = boosted_log_probs(old, boosts)
    expected = old.exp() * torch.tensor([0, 0.5, 1, -1, 1.5], dtype=torch.float64).exp()
    torch.testing.assert_close(served.exp(), expected / expected.sum())
    drawing = Drawing(view, SAMPLES, end_token=None, seed=1)
    while drawing.passes:
        drawing.take([(np.zeros(0), old[0].numpy()) for _ in drawing.passes])
    drawn = [built.items().index(list(one.tokens)) for one in drawing.result.items]
    assert fit(np.bincount(drawn, minlength=5), served[0].exp().numpy()) > 1e-3
    # docs/training.md: the boosts cancel, and what is left of the normalisers is the mean over the draws.
    ratio, weights = boosted_log_probs(new, boosts) - served, served.exp()
    torch.testing.assert_close(ratio.exp(), (new - old).exp() / ((new - old).exp() * weights).sum())
    with pytest.raises(ItemSetError, match=r"boosts of shape \(4,\) for log-probabilities of \(1, 5\)"):
        boosted_log_probs(new, boosts[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    items = ragged()
    ids, lengths, where = batch(items, [0, 1, 2], 7)
    logits = torch.randn(*ids.shape, VOCABULARY, dtype=dtype, requires_grad=True)
    legal = legal_tokens(ids, made(items), stop_tokens=STOP, starts=[0, 1, 2], lengths=lengths)
    log_q, log_mass = legal_log_probs(logits, legal)
    expected = by_masking(logits.double(), ids, where)
    assert log_q.dtype == torch.float32
    torch.testing.assert_close(log_q.double(), expected["q"], atol=1e-5, rtol=0)
    torch.testing.assert_close(log_mass.double(), expected["mass"], atol=1e-5, rtol=0)
    assert gradient(log_q + log_mass, logits).dtype == dtype


class Largest(TorchDispatchMode):
    """The most elements of any tensor that comes out of an operation."""

    elements = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            self.elements = max(self.elements, one.numel() if isinstance(one, Tensor) else 0)
        return found


@pytest.mark.parametrize("mass", [True, False])
def test_hidden_states_never_become_logits_of_the_whole_vocabulary(mass: bool) -> None:
    vocabulary, width = 30_000, 4
    rows = np.random.default_rng(0).integers(0, 50, (64, 3)) + 50 * np.arange(3)
    ids = torch.cat((torch.tensor(rows), torch.full((64, 1), 200)), 1)
    legal = legal_tokens(ids, itemset.build(rows), stop_tokens=200)
    hidden, head = (torch.randn(*shape, requires_grad=True) for shape in ((64, 4, width), (vocabulary, width)))
    with Largest() as largest:  # the backward pass runs in it, too
        log_q, log_mass = legal_log_probs_of_hidden(hidden, head, legal, mass=mass)
        (log_q if log_mass is None else log_q + log_mass).sum().backward()
    assert largest.elements <= max(vocabulary * width, 64 * 4 * 1024)
    assert largest.elements < ids.numel() * vocabulary / 20
