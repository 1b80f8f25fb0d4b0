"""The beams of ranked lists on tensors, against the search on the host and the dict trie's ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import item_sets
from test_kernels import NothingReadBack
from test_search import END, VOCABULARY, Model, best_items, log_probs, oracle
from views import made

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import LOCAL
from itemset.ranking import triton_kernels
from itemset.ranking.beam_state import STATE
from itemset.ranking.beams import Beams, table_of
from itemset.ranking.search import Found, Search, width_at
from itemset.trie.walk import DEAD

WIDTHS = st.integers(1, 12) | st.lists(st.integers(1, 12), min_size=1, max_size=3)
"""Of all levels, or of each."""


def logits_after(prefix: Sequence[int], row: int) -> torch.Tensor:
    """Of the model that the search on the host asks, for list 0; other lists have other ones. Not normalised."""
    log = log_probs(prefix) if row == 0 else log_probs([*prefix, -row])
    return torch.tensor(log + len(prefix) % 3)


class Caller:
    """Runs the toy model as an engine would: rows continue rows of the pass before, by what the beams say alone."""

    def __init__(
        self, beams: Beams, dtype: torch.dtype = torch.float64, zero: int | None = None, narrow: bool = False
    ) -> None:
        self.beams, self.dtype, self.zero, self.narrow = beams, dtype, zero, narrow
        self.fed: list[list[list[int]]] = [[[]] for _ in range(beams.lists)]  # tokens in each row's keys and values
        self.shapes: list[tuple[int, ...]] = []

    def logits(self, prefixes: list[list[list[list[int]]]]) -> torch.Tensor:
        rows = [
            [[logits_after(prefix, row) for prefix in queries] for queries in one] for row, one in enumerate(prefixes)
        ]
        made = torch.stack([torch.stack([torch.stack(queries) for queries in one]) for one in rows])
        if self.zero is not None:
            made[..., self.zero] = -torch.inf
        self.shapes.append(tuple(made.shape))
        return made.flatten(0, 1).to(DEVICE, self.dtype)

    def run(self) -> Beams:
        beams = self.beams
        beams.round(self.logits([[[[]]]] * beams.lists))
        while beams.passes_left:
            rows = beams.rows
            inputs, parents = beams.next_inputs[:, :rows].tolist(), beams.parents[:, :rows].tolist()
            prefixes = []
            for row in range(beams.lists):
                before = [self.fed[row][parent] for parent in parents[row]]
                prefixes.append(
                    [
                        [past + new[: i + 1] for i in range(len(new))]
                        for past, new in zip(before, inputs[row], strict=True)
                    ]
                )
                self.fed[row] = [past + new[:1] for past, new in zip(before, inputs[row], strict=True)]
            logits = self.logits(prefixes)
            with NothingReadBack():
                beams.round(logits)
            if self.narrow:
                beams.narrow()
        return beams


def placed(*sets: list[list[int]], kind: str | None = None) -> tuple[Arena, list[int], list[itemset.ItemSet]]:
    built = [made(items, kind) for items in sets]
    arena = Arena(sum(map(room_for, built)), DEVICE)
    return arena, [arena.acquire(s) for s in built], built


def listed(beams: Beams, row: int) -> list[tuple[float, tuple[int, ...]]]:
    """Of one list: each item's score and tokens, as its result says."""
    items = []
    for score, length, *tokens in table_of(beams.found)[row].tolist():
        if score == -np.inf:
            assert length == 0
            assert set(tokens) <= {-1.0}
            continue
        items.append((score, tuple(int(token) for token in tokens[: int(length)])))
        assert set(tokens[int(length) :]) <= {-1.0}
    return items


def check(beams: Beams, row: int, best: Found) -> None:
    found = listed(beams, row)
    assert [tokens for _, tokens in found] == [item.tokens for item in best.items]
    np.testing.assert_allclose([score for score, _ in found], [item.score for item in best.items], rtol=1e-5)


@settings(max_examples=80, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), end=st.sampled_from([None, END]), data=st.data())
@pytest.mark.slow
def test_the_search_on_the_host_finds_the_same(items: list[list[int]], end: int | None, data: Any) -> None:
    k, width = data.draw(st.integers(1, 12)), data.draw(WIDTHS)
    renormalised, narrow = data.draw(st.booleans()), data.draw(st.booleans())
    arena, (_, number), (_, built) = placed([[3, 1], [4]], items)
    beams = Beams(arena, [number] * 2, built.level_plan, width=width, k=k, end_token=end, renormalised=renormalised)
    caller = Caller(beams, narrow=narrow)
    caller.run()
    search = Search(built, k, width=width, end_token=end, renormalised=renormalised)
    best = best_items(Model(), search)
    check(beams, 0, best)
    assert bool(beams.all_over)
    assert (bool(beams.proven[0]), *beams.took[0].tolist()) == (best.proven, best.passes, best.rounds)
    assert all(shape[1] <= width_at(width, taken) for taken, shape in enumerate(caller.shapes[1:], 1))


@settings(max_examples=60, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), end=st.sampled_from([None, END]))
def test_a_beam_as_wide_as_the_set_ranks_it(items: list[list[int]], end: int | None) -> None:
    arena, (number,), (built,) = placed(items)
    many = len(built) + 3
    beams = Beams(arena, [number], built.level_plan, width=many, k=many, end_token=end)
    Caller(beams).run()
    expected = oracle(items, end)
    assert [item for _, item in listed(beams, 0)] == [item for _, item in expected]
    np.testing.assert_allclose([s for s, _ in listed(beams, 0)], [s for s, _ in expected], rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), end=st.sampled_from([None, END]), zero=st.integers(0, 3))
def test_items_of_probability_zero_are_not_found(items: list[list[int]], end: int | None, zero: int) -> None:
    arena, (number,), (built,) = placed(items)
    beams = Beams(arena, [number], built.level_plan, width=80, k=80, end_token=end)
    Caller(beams, zero=zero).run()
    assert {item for _, item in listed(beams, 0)} == {tuple(item) for item in items if zero not in item}


def test_level_plans_bound_every_level() -> None:
    items = [[0, t, 1] for t in range(50)] + [[t, 3] for t in range(1, 9)] + [[1, 4, 5, 6], [1, 4, 5]]
    plan = itemset.build(items).level_plan
    assert plan.levels == 4
    assert plan.nodes == (1, 2, 1, 1)
    assert plan.tails == (1, 1, 0, 0)
    assert plan.longest == 4
    assert [plan.children(0, rows) for rows in (1, 9)] == [9, 9]
    assert [plan.children(1, rows) for rows in (1, 2, 9)] == [50, 52, 52]
    assert plan.children(4, 9) == 0


def test_the_next_pass_is_told() -> None:
    arena, (number,), (built,) = placed([[5, 6, 7, 8], [5, 9], [7], [4, 4, 4]], kind="whole")
    beams = Beams(arena, [number], built.level_plan, width=8, k=2, end_token=END)
    assert (beams.queries, beams.rows, beams.passes_left) == (1, 1, 3)
    assert beams.tokens.shape == (1, 8, 4)
    logits = torch.zeros(1, 1, VOCABULARY, device=DEVICE)
    logits[..., 5] = 1
    beams.round(logits)
    assert (beams.queries, beams.rows, beams.passes_left) == (3, 3, 2)
    assert beams.next_inputs[0].tolist() == [[5, 0, 0], [4, 4, 4], [7, 0, 0], *[[0, 0, 0]] * 5]
    assert beams.parents[0].tolist() == [0] * 8
    assert (beams._rows.table[STATE, 0] & LOCAL).tolist()[3:] == [DEAD] * 5
    assert not beams.all_over
    for wrong in (torch.zeros(2, 3, 9), torch.zeros(3, 2, 9), torch.zeros(9, 3, 9), torch.zeros(3, 9)):
        with pytest.raises(ValueError, match="1 lists of 3 to 8 rows with 3 query tokens"):
            beams.round(wrong.to(DEVICE))
    beams.round(torch.zeros(5, 3, VOCABULARY, device=DEVICE))
    beams.round(torch.zeros(8, 3, VOCABULARY, device=DEVICE))
    assert beams.passes_left == 0
    with pytest.raises(ValueError, match="the search is over"):
        beams.round(torch.zeros(8, 3, VOCABULARY, device=DEVICE))


@pytest.mark.slow
def test_candidates_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit in memory at once: the best of all parts are chosen."""
    items = torch.randint(0, 70, (150, 4), generator=torch.Generator().manual_seed(3)).tolist()
    arena, (number,), (built,) = placed(items)
    results = []
    for most in (1 << 20, 200, 2):
        monkeypatch.setattr(triton_kernels, "CANDIDATES", most)
        for end in (None, END):
            beams = Beams(arena, [number] * 2, built.level_plan, width=9, k=12, end_token=end, kernels="triton")
            results.append(table_of(Caller(beams).run().found))
    assert all(torch.equal(result, results[i % 2]) for i, result in enumerate(results))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 0}, "width is 0"),
        ({"width": [4, 0]}, "width is 0"),
        ({"width": []}, "width is 0"),
        ({"k": -1}, "k is -1"),
        ({"numbers": []}, "lists is 0"),
        ({"renormalised": True, "stepwise": True}, "exclude each other"),
        ({"longest": 3}, "without stepwise"),
    ],
)
def test_what_cannot_be_searched(options: dict[str, Any], sentence: str) -> None:
    arena, (number,), (built,) = placed([[1, 2]])
    given = {"numbers": [number], "width": 2, "k": 2, "end_token": None, **options}
    with pytest.raises(ValueError, match=sentence):
        Beams(arena, given.pop("numbers"), built.level_plan, **given)
