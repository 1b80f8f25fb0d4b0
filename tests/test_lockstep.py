"""The beams of ranked lists, one token of each row a pass, against the search on the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from devices import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import item_sets
from test_beams import WIDTHS, check, logits_after, placed
from test_exact_sampling import drawn, random_model
from test_kernels import NothingReadBack
from test_search import END, VOCABULARY, Model, best_items

from itemset.ranking.beams import table_of
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.lockstep import Lockstep, rows_of_passes
from itemset.ranking.search import Search


def run(beams: Lockstep, models: Sequence[int] = (0,), narrow: bool = False) -> list[int]:
    """Run the toy model as an engine does; returns how many rows each pass had. models: of each
    list. narrow: without those rows that `rows_after` leaves out."""
    fed: list[list[list[int]]] = [[[]] for _ in models]
    counts = []
    while True:
        logits = [logits_after(tokens, model) for model, rows in zip(models, fed, strict=True) for tokens in rows]
        open_beams = int(beams.open_beams)
        with NothingReadBack():
            beams.round(torch.stack(logits).to(DEVICE))
        if not beams.passes_left:
            return counts
        parents, tokens = (column.view(len(models), -1).tolist() for column in (beams.parents, beams.next_inputs))
        assert all(len(row) == beams.row_count for row in (*parents, *tokens))
        fed = [
            [[*rows[parent], token] for parent, token in zip(*pair, strict=True)]
            for rows, *pair in zip(fed, parents, tokens, strict=True)
        ]
        if narrow:
            fed = [rows[: beams.rows_after(open_beams)] or [[]] for rows in fed]  # an engine has a row at least
        counts.append(len(fed[0]))


@settings(max_examples=100, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), end=st.sampled_from([None, END]), data=st.data())
@pytest.mark.slow
def test_the_search_on_the_host_finds_the_same(items: list[list[int]], end: int | None, data: Any) -> None:
    k, width, lists = data.draw(st.integers(1, 12)), data.draw(WIDTHS), data.draw(st.integers(1, 2))
    renormalised, narrow = data.draw(st.booleans()), lists == 1 and data.draw(st.booleans())
    arena, (_, number), (_, built) = placed([[3, 1], [4]], items)
    plan, numbers = built.level_plan, [number] * lists
    options: dict[str, Any] = {"width": width, "end_token": end, "renormalised": renormalised}
    beams = Lockstep(arena, numbers, plan, k=k, **options)
    counts = run(beams, range(lists), narrow)
    best = best_items(Model(), Search(built, k, **options))
    check(beams, 0, best)
    assert bool(beams.all_over)
    assert bool(beams.proven[0]) == best.proven
    if lists == 2:  # as the other one alone
        alone = Lockstep(arena, [number], plan, k=k, **options)
        run(alone, models=[1])
        torch.testing.assert_close(table_of(beams.found)[1], table_of(alone.found)[0])
    most = rows_of_passes(plan, width, renormalised=renormalised, end_token=end)
    assert len(counts) == len(most)
    assert all(count <= bound if narrow else count == bound for count, bound in zip(counts, most, strict=True))
    passes, rounds = beams.took[0].tolist()
    # Its bar rises later, when a tail ends: until then a beam goes on that the search on the host has given up.
    assert passes >= best.passes
    assert best.rounds <= rounds <= 1 + len(counts)


@pytest.mark.parametrize(("codes", "width"), [(9, 64), (20, 256)])
def test_items_of_one_length_take_a_pass_a_token(codes: int, width: int) -> None:
    """With ends that cost nothing the last token takes none: the pass before has scored it."""
    draw = random.Random(3)
    items = [[a, b, c] for a in range(codes) for b in range(codes) for c in draw.sample(range(60), 7)]
    arena, (number,), (built,) = placed(items, kind="whole")
    for end, passes in ((None, [codes, width]), (END, [codes, width, width])):
        beams = Lockstep(arena, [number], built.level_plan, width=width, k=width, end_token=end, kernels="auto")
        assert run(beams) == passes
        check(beams, 0, best_items(Model(), Search(built, width, width=width, end_token=end)))


@pytest.mark.parametrize(("end", "renormalised"), [(None, False), (END, False), (END, True)])
@pytest.mark.slow
def test_triton_finds_the_same(end: int | None, renormalised: bool) -> None:
    """Two lists, whose rows must lie in memory as kernels expect them."""
    draw = random.Random(5)
    items = [[draw.randrange(9) for _ in range(draw.randint(1, 5))] for _ in range(60)]
    arena, (number,), (built,) = placed(items, kind="whole")
    options: dict[str, Any] = {"width": 5, "k": 6, "end_token": end, "renormalised": renormalised}
    made = [
        Lockstep(arena, [number] * 2, built.level_plan, kernels=kernels, **options) for kernels in ("auto", "triton")
    ]
    for beams in made:
        run(beams, (0, 1))
    torch.testing.assert_close(table_of(made[1].found), table_of(made[0].found), atol=1e-5, rtol=0)


@settings(max_examples=20, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1, max_items=20), seed=st.integers(0, 99), data=st.data())
def test_races_draw_what_rounds_draw(items: list[list[int]], seed: int, data: Any) -> None:
    """Whatever the width, what is decided; with room for all prefixes, everything."""
    n, replace, temperature = (
        data.draw(st.integers(1, 4)),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1, 0.5])),
    )
    narrow = data.draw(st.booleans())
    arena, (_, number), (_, built) = placed([[3, 1], [4]], items)
    drawing = Drawing(built, n, end_token=END, replace=replace, seed=seed, temperature=temperature)
    expected, (keys, wanted), plan = drawn(random_model, drawing).items, drawing.races, built.level_plan
    roots = torch.tensor(keys, device=DEVICE)
    for width in (2, 80):
        options: dict[str, Any] = {"temperature": temperature, "keys": roots}
        races = Lockstep(arena, [number] * len(keys), plan, width=width, k=wanted, end_token=END, **options)
        counts = run(races, narrow=narrow)
        most = rows_of_passes(plan, width, races=len(keys))
        assert len(counts) == len(most)
        assert all(count <= bound if narrow else count == bound for count, bound in zip(counts, most, strict=True))
        found = [
            (tuple(token for token in row if token >= 0), score)
            for rows, scores in zip(*(column.tolist() for column in races.decided), strict=True)
            for row, score in zip(rows, scores, strict=True)
        ]
        sure = [(one, other) for one, other in zip(found, expected, strict=False) if one[1] > -torch.inf]
        assert [item for (item, _), _ in sure] == [other.tokens for _, other in sure]
        torch.testing.assert_close(
            [score for (_, score), _ in sure], [other.score for _, other in sure], atol=1e-5, rtol=0
        )
        assert len(sure) == len(expected) or width == 2
        assert bool(races.proven.all()) or width == 2
