"""The beams of ranked lists, one token of each row a pass, against the search on the host."""

from __future__ import annotations

from typing import Any

import torch
from devices import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import item_sets
from test_best import END, VOCABULARY, Model, best_items
from test_draws import drawn, random_model
from test_kernels import NothingReadBack
from test_ranked_beams import check, logits_after, placed

from itemset.ranking.draws import Drawing
from itemset.ranking.lockstep import Lockstep, LockstepRaces, rows_of_passes, rows_of_races
from itemset.ranking.search import Search


def run(beams: Lockstep | LockstepRaces, narrow: bool = False) -> list[int]:
    """Run the toy model as an engine does; returns how many rows each pass had. narrow: without those that `rows_after`
    leaves out."""
    fed: list[list[int]] = [[]]
    counts = []
    while True:
        logits = torch.stack([logits_after(tokens, 0) for tokens in fed]).to(DEVICE)
        open_beams = int(beams.open_beams)
        with NothingReadBack():
            beams.round(logits)
        if not beams.passes_left:
            return counts
        parents, tokens = beams.parents.tolist(), beams.next_inputs.tolist()
        assert len(parents) == len(tokens) == beams.row_count
        fed = [[*fed[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        if narrow:
            fed = fed[: beams.rows_after(open_beams)] or [[]]  # an engine has a row at least
        counts.append(len(fed))


@settings(max_examples=150, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1), data=st.data())
def test_the_search_on_the_host_finds_the_same(items: list[list[int]], data: Any) -> None:
    k, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    renormalised, narrow = data.draw(st.booleans()), data.draw(st.booleans())
    arena, (_, number), (_, built) = placed([[3, 1], [4]], items)
    plan = built.level_plan
    beams = Lockstep(arena, number, plan, width=width, k=k, end_token=END, renormalised=renormalised, kernels="torch")
    counts = run(beams, narrow)
    best = best_items(Model(), Search(built, k, width=width, end_token=END, renormalised=renormalised))
    check(beams, 0, best)
    assert bool(beams.all_over)
    assert bool(beams.proven[0]) == best.proven
    most = rows_of_passes(plan, width, renormalised=renormalised)
    assert len(counts) == len(most)
    assert all(count <= bound if narrow else count == bound for count, bound in zip(counts, most, strict=True))
    passes, rounds = beams.took[0].tolist()
    assert rounds == best.rounds
    assert passes >= best.passes  # its bar rises later, when a tail ends


@settings(max_examples=20, deadline=None)
@given(items=item_sets(vocab_size=VOCABULARY - 1, max_items=20), seed=st.integers(0, 99), data=st.data())
def test_races_draw_what_rounds_draw(items: list[list[int]], seed: int, data: Any) -> None:
    """Whatever the width, what is decided; with room for all prefixes, everything."""
    n, replace, temperature = (
        data.draw(st.integers(1, 4)),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1, 0.5])),
    )
    narrow, kernels = data.draw(st.booleans()), data.draw(st.sampled_from(["auto", "torch"]))
    arena, (_, number), (_, built) = placed([[3, 1], [4]], items)
    drawing = Drawing(built, n, end_token=END, replace=replace, seed=seed, temperature=temperature)
    expected, (keys, wanted), plan = drawn(random_model, drawing).items, drawing.races, built.level_plan
    roots = torch.tensor(keys, device=DEVICE)
    for width in (2, 80):
        options: dict[str, Any] = {"temperature": temperature, "kernels": kernels}
        races = LockstepRaces(arena, number, plan, roots, width=width, k=wanted, end_token=END, **options)
        counts = run(races, narrow)
        most = rows_of_races(plan, width, len(keys))
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
