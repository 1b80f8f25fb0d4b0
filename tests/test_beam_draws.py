"""Draws as beams on tensors: the model's own distribution, whatever the width, and the races of `Drawing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compared_lists import compared
from devices import DEVICE
from distributions import END, Toy, fit, toys
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import interleaved
from samples import SAMPLES
from specialisations import Recorded
from strategies import item_sets
from test_beams import placed
from test_exact_sampling import SURE, drawn, logs, random_model
from test_kernels import Launches, NothingReadBack
from test_ranking_kernels import KERNELS, Operations, as_engines_have_them, random_sets
from test_search import END as LAST
from test_search import VOCABULARY
from views import made

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.ranking import beams, exact_sampling, search, triton_kernels, triton_reads
from itemset.ranking.beams import Beams, table_of, warm_up
from itemset.ranking.exact_sampling import Drawing

TOYS = toys()
ROOM = 17  # tokens of the toys' vocabulary: what nothing of a set has is the last one's

Item = tuple[int, ...]
LogProbs = Callable[[Item], np.ndarray]


def of_toy(toy: Toy) -> LogProbs:
    """Its log-probabilities after a prefix, all that lies outside the set in one token."""
    known: dict[Item, np.ndarray] = {}

    def after(prefix: Item) -> np.ndarray:
        if prefix not in known:
            row = np.array([toy.probability.get((prefix, token), 0.0) for token in range(ROOM)])
            row[-1] = max(0.0, 1 - row.sum())
            with np.errstate(divide="ignore"):
                known[prefix] = np.log(row)
        return known[prefix]

    return after


def run(
    items: Sequence[Sequence[int]], after: LogProbs, drawing: Drawing, end: int, width: int,
    *, kernels: str = "auto", narrow: bool = False, temperature: float = 1.0,
) -> Beams:  # fmt: skip
    """The races of a drawing."""
    return run_in(
        made(list(map(list, items))), after, drawing, end, width, kernels, narrow=narrow, temperature=temperature
    )


def run_in(
    built: itemset.ItemSet, after: LogProbs, drawing: Drawing, end: int, width: int, kernels: str = "auto",
    *, narrow: bool = False, temperature: float = 1.0,
) -> Beams:  # fmt: skip
    """The same of a set or view."""
    arena = Arena(room_for(built), DEVICE)
    number, (keys, wanted) = arena.acquire(built), drawing.races
    options: dict[str, Any] = {"width": width, "k": wanted, "end_token": end, "kernels": kernels}
    options |= {"keys": torch.tensor(keys, device=DEVICE), "temperature": temperature, "boost": drawing.tree.boost}
    found = Beams(arena, [number] * len(keys), built.level_plan, **options)
    while found.passes_left:
        rows, queries = found.rows if found.taken else 1, found.queries
        tokens = found.tokens[:, :rows].flatten(0, 1).cpu().numpy()
        dead = (found._rows.scores[:, :rows] <= found.bar).flatten().cpu().numpy()
        prefixes, row = np.unique(np.where(dead[:, None], -2, tokens), axis=0, return_inverse=True)
        table = np.array([[after(_prefix(one, found.taken + q)) for q in range(queries)] for one in prefixes.tolist()])
        given = torch.tensor(table[row.ravel()], device=DEVICE)
        with NothingReadBack():
            found.round(given + found.taken)  # not normalised
        if narrow:
            found.narrow()
    return found


def _prefix(row: list[int], length: int) -> Item:
    """The first tokens of a beam. Of one that leads to nothing, -2, what follows does not matter: the empty prefix."""
    return tuple(token for token in row[:length] if token >= 0)


def decided(found: Beams) -> list[list[tuple[Item, float] | None]]:
    """The items of each race with their log-probabilities; None where it is not decided what comes."""
    exact = found.exact.tolist()
    return [
        [
            (tuple(map(int, tokens[: int(length)])), score) if sure else None
            for (score, length, *tokens), sure in zip(rows, sures, strict=True)
            if score > -np.inf or not sure
        ]
        for rows, sures in zip(table_of(found.found).tolist(), exact, strict=True)
    ]


def same(given: Sequence[tuple[Item, float] | None], expected: Sequence[search.Item]) -> int:
    """Check what is decided, and return how much of it is."""
    sure = [(one, other) for one, other in zip(given, expected, strict=False) if one is not None]
    assert [item for (item, _), _ in sure] == [other.tokens for _, other in sure]
    np.testing.assert_allclose([score for (_, score), _ in sure], [other.score for _, other in sure], atol=1e-5)
    return len(sure)


@triton.jit
def _random_kernel(keys, n, numbers, logs, size, lanes: tl.constexpr):
    lane = tl.arange(0, lanes)
    bits = triton_reads.random_bits(tl.load(keys + lane, mask=lane < size), n.to(tl.int64))
    tl.store(numbers + lane, bits, mask=lane < size)
    tl.store(logs + lane, triton_reads.log_exponential(bits), mask=lane < size)


def test_both_have_the_same_random_numbers():
    keys = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    on_device = torch.tensor(keys.view(np.int64), device=DEVICE)
    for n in (exact_sampling.NOBODY, exact_sampling.TOKEN, 150_000):
        numbers, logs = torch.empty_like(on_device), torch.empty(1000, dtype=torch.float64, device=DEVICE)
        _random_kernel[(1,)](on_device, n, numbers, logs, 1000, lanes=1024)
        expected = [int(exact_sampling.mixed(key, n)) for key in keys]
        assert numbers.cpu().numpy().view(np.uint64).tolist() == expected
        times = [exact_sampling.log_exponential(np.uint64(bits)) for bits in expected]
        np.testing.assert_allclose(logs.cpu().numpy(), times, rtol=1e-12)
        np.testing.assert_allclose(beams._log_exponential(numbers).cpu().numpy(), times, rtol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_races_follow_the_distribution(toy, temperature):
    """Also of a set that holds the beginnings of items, and where a likely prefix leads to unlikely items alone."""
    drawing = partial(Drawing, end_token=END, temperature=temperature, seed=8)
    (_, _, (built,)) = placed([list(item) for item in toy.items])
    width, n = (64, SAMPLES // 4) if len(toy.items) > 9 else (9, SAMPLES)
    found = run(toy.items, of_toy(toy), drawing(built, n), END, width, temperature=temperature)
    assert bool(found.proven.all())
    items = [one[0] for one in decided(found)]
    assert fit(toy.counts([item for item, _ in items]), toy.weights(temperature)) > SURE
    same(items, drawn(toy, drawing(built, n)).items)


@settings(max_examples=3, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1, max_items=20), seed=st.integers(0, 99), data=st.data())
@pytest.mark.slow
def test_what_is_decided_is_what_rounds_find(items, seed, data):
    """For any width, kernels, set, number of items and temperature; and what is not decided, rounds end."""
    replace, temperature = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 0.4]))
    n, options = data.draw(st.integers(1, 6)), {"temperature": temperature}
    (_, _, (built,)) = placed([list(item) for item in items])
    drawing = partial(Drawing, built, n, end_token=LAST, seed=seed, replace=replace, **options)
    whole = drawn(random_model, drawing())
    expected = [[one] for one in whole.items] if replace else [whole.items]
    for width in (1, 3, 80):
        kernels = data.draw(st.sampled_from(["auto", "triton"]))
        begun, narrow = drawing(), data.draw(st.booleans())
        with pytest.MonkeyPatch.context() as few:  # children that stand in memory at once
            few.setattr(triton_kernels, "CANDIDATES", data.draw(st.sampled_from([5, 1 << 20])))
            found = run(items, logs, begun, LAST, width, kernels=kernels, narrow=narrow, **options)
        known = {}
        for i, (one, wanted) in enumerate(zip(decided(found), expected, strict=True)):
            sure = same(one, wanted)
            assert sure == len(wanted) if width == 80 else sure <= len(wanted)
            if sure == len(wanted):
                known[i] = wanted
        begun.begin_with(known, 7, 2)
        ended = drawn(random_model, begun)
        assert [one.tokens for one in ended.items] == [one.tokens for one in whole.items]
        assert (ended.passes >= 7, ended.rounds >= 2) == (True, True)
        if len(known) == len(expected):
            assert (ended.passes, ended.rounds) == (7, 2)


@pytest.mark.parametrize("kind", [{}, {"stepwise": True}, {"lockstep": True}], ids=str)
@pytest.mark.slow
def test_triton_agrees_with_numba(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On logits of which some are -inf, with lanes so few that programs take several turns, run in any order."""
    monkeypatch.setattr(triton_kernels, "CHILDREN", 16)
    options = {"width": 5, "k": 2, "end_token": 70, "temperature": 0.7} | kind
    for seed, items in enumerate(random_sets(3)):
        with interleaved(seed=seed):
            run = compared([items] * 3, DEVICE, seed=seed, vocabulary=72, races=True, **options)
        assert run.compared > 10


@pytest.mark.slow
def test_a_round_of_triton_is_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Launches(getattr(module, name), launched))
    built = itemset.build(random_sets(1)[2])
    arena = Arena(room_for(built), DEVICE)
    options: dict[str, Any] = {"keys": torch.arange(4, device=DEVICE), "kernels": "triton"}
    races = Beams(arena, [arena.acquire(built)] * 4, built.level_plan, width=6, k=1, end_token=71, **options)
    counts = []
    while races.passes_left:
        logits = torch.randn(4 * (6 if races.taken else 1), races.queries, 72, device=DEVICE)
        launched.clear()
        with Operations() as operations:
            races.round(logits)
        counts.append((len(launched), len(operations.names)))
    assert max(counts) == (6, 1), operations.names


@pytest.mark.slow
@pytest.mark.parametrize("stepwise", [False, True], ids=["whole", "stepwise"])
def test_nothing_is_compiled_while_serving(stepwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, widths, temperatures, races and sets of other sizes take the forms that were compiled beforehand."""
    keys: set[str] = set()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorded(getattr(module, name), keys))
    warm_up(Arena(4096, DEVICE, kernels="triton"), torch.randn(1, 1, 77, device=DEVICE), stepwise=stepwise)
    assert {key.split()[0] for key in keys} == {name for _, name in KERNELS}
    known = set(keys)
    for items, n, width, temperature in zip(random_sets(2), (1, 2, 5), (1, 16, 6), (1.0, 0.5, 0.7), strict=True):
        built = itemset.build(items)
        arena = Arena(room_for(built), DEVICE)
        numbers, roots = [arena.acquire(built)] * n, torch.arange(n, device=DEVICE) - 1
        options = {"width": width, "k": n, "end_token": 71, "temperature": temperature, "stepwise": stepwise}
        races = Beams(arena, numbers, built.level_plan, keys=roots, kernels="triton", **options)
        while races.passes_left:
            count = n * (races.rows if races.taken else 1)
            races.round(as_engines_have_them(count, races.queries, 77)[races.taken % 3])
    assert keys == known


def test_narrow_beams_leave_races_undecided_and_know_which():
    """Draws of those that are decided alone would be biased: the others go on by rounds, with the same keys."""
    toy = TOYS["trap"]
    (_, _, (built,)) = placed([list(item) for item in toy.items])
    found = {}
    for width in (1, 2, 4):
        made = run(toy.items, of_toy(toy), Drawing(built, SAMPLES, end_token=END, seed=4), END, width)
        found[width] = [one[0] for one in decided(made) if one[0] is not None]
    assert 0 < len(found[1]) < len(found[2]) < len(found[4]) == SAMPLES
    assert fit(toy.counts([item for item, _ in found[2]]), toy.weights()) < SURE


def test_an_impossible_set_gives_nothing():
    items = [[1, 2], [1, 3], [2]]
    (_, _, (built,)) = placed(items)
    for impossible, expected in (({2}, (1, 3)), ({1, 2}, None)):
        row = np.array([-np.inf if token in impossible else -1.0 for token in range(6)])
        drawing = Drawing(built, 9, end_token=END, seed=1)
        found = run(items, lambda _, row=row: row, drawing, END, 4)
        assert bool(found.proven.all())
        assert {item for one in decided(found) for item, _ in one} == ({expected} if expected else set())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_what_cannot_be_drawn(temperature):
    arena, (number,), (built,) = placed([[1]])
    keys = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="more than 0"):
        Beams(arena, [number], built.level_plan, keys=keys, width=1, k=1, end_token=0, temperature=temperature)
