"""A round of a beam search in Triton: against Numba, in how many launches, and compiled beforehand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from compared_lists import compared
from devices import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interleaving import interleaved
from specialisations import Recorded
from strategies import item_sets
from test_beams import placed
from test_kernels import Launches
from torch.utils._python_dispatch import TorchDispatchMode

import itemset
from itemset.masking.arena import Arena
from itemset.ranking import triton_kernels, triton_select
from itemset.ranking.beams import Beams, table_of, warm_up
from itemset.ranking.lockstep import Lockstep

VOCABULARY, END = 72, 71
KERNELS = [(triton_kernels, name) for name in vars(triton_kernels) if name.endswith("_kernel")]
KERNELS.append((triton_select, "select_kernel"))
SMALL = {"SUM_LANES": 8, "SUM_EACH": 2, "CHILDREN": 8, "LANES": 4, "ITEMS": 2, "OTHERS": 8, "TOKENS": 4}
WIDE = [[[t] for t in range(58)] + [[3, t] for t in range(20)] + [[3, 5, 1, 2, 6], [9, 1]]]
SEARCHES: list[dict[str, Any]] = [{}, {"renormalised": True}, {"stepwise": True}, {"lockstep": True}]
NARROW: list[dict[str, Any]] = [{"narrow": True} | kind for kind in SEARCHES]
RACES: list[dict[str, Any]] = [{"races": True, "temperature": 0.7} | kind for kind in ({}, *SEARCHES[2:])]

VIEWS = ("view", "select", "slice", "unbind", "detach", "alias", "_unsafe_view", "expand", "transpose")


@pytest.fixture
def small_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes so few that every launch has several programs, and every program several turns."""
    for name, value in SMALL.items():
        monkeypatch.setattr(triton_kernels, name, value)


def random_sets(seed: int) -> list[list[list[int]]]:
    draw = random.Random(seed)
    lengths = [(1, 3), (2, 9), (4, 4)]
    return [
        [[draw.randrange(9) if i else draw.randrange(60) for i in range(draw.randint(*bounds))] for _ in range(25)]
        for bounds in lengths
    ]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=item_sets(vocab_size=VOCABULARY - 1, max_items=20), end=st.sampled_from([None, END]), data=st.data())
@pytest.mark.slow
def test_both_agree(small_constants: None, items: list[list[int]], end: int | None, data: Any) -> None:
    options = data.draw(st.sampled_from(SEARCHES + RACES + NARROW))
    size = {"width": data.draw(st.integers(1, 6)), "k": data.draw(st.integers(1, 6))}
    end = END if "races" in options else end
    compared([items], DEVICE, seed=1, vocabulary=VOCABULARY, end_token=end, **size, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SEARCHES, ids=str)
@pytest.mark.slow
def test_lists_of_different_sets_and_logits_of_any_type(dtype: torch.dtype, options: dict[str, Any]) -> None:
    end = END if dtype == torch.bfloat16 else None
    sets, options = [*random_sets(3), *WIDE], options | {"width": 6, "k": 5, "end_token": end}
    run = compared(sets, DEVICE, seed=2, vocabulary=VOCABULARY, dtype=dtype, padding=3, **options)
    assert run.compared > 10


@pytest.mark.parametrize("options", SEARCHES + RACES + NARROW, ids=str)
@pytest.mark.usefixtures("small_constants")
@pytest.mark.slow
def test_programs_run_in_any_order_and_in_turns(options: dict[str, Any]) -> None:
    with interleaved(seed=5):
        compared(random_sets(5)[:2], DEVICE, seed=5, vocabulary=VOCABULARY, width=3, k=3, end_token=END, **options)


@pytest.mark.parametrize("options", NARROW, ids=str)
@pytest.mark.parametrize("end", [None, END])
@pytest.mark.slow
def test_levels_with_tokens_of_their_own(end: int | None, options: dict[str, Any]) -> None:
    """There are logits of these alone, and of the end token after the last level. Some sets have tails, too."""
    items = [[a, 20 + b, 40 + c] for a in range(5) for b in range(3) for c in range(2)]
    assert itemset.build(items).level_plan.spans == ((0, 4), (20, 22), (40, 41))
    assert itemset.build([*items, [1]]).level_plan.spans == ()
    options = options | {"width": 4, "k": 4, "end_token": end, "made_as": "whole"}
    for rows in (items, items[:-5]):
        compared([rows], DEVICE, seed=3, vocabulary=VOCABULARY, **options)


@pytest.mark.usefixtures("small_constants")
def test_a_vocabulary_smaller_than_the_sets() -> None:
    for end in (None, 60):
        sets = [random_sets(7)[0], *WIDE]
        compared(sets, DEVICE, seed=7, vocabulary=50, width=4, k=4, end_token=end)


class Operations(TorchDispatchMode):
    """Notes every operation that computes something, between the launches of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS and not name.startswith("empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_beams_below_the_bar_lead_to_nothing() -> None:
    """Their logits are not summed: high ones must not lift what follows them above the bar."""
    for seed in range(8):
        rows = np.random.default_rng(seed).integers(2, 9, (60, 4)).tolist()
        arena, (number,), (built,) = placed([*rows, [3], [4, 5]])
        results = []
        for kernels in ("auto", "triton"):
            torch.manual_seed(seed)
            beams = Beams(arena, [number], built.level_plan, width=6, k=2, end_token=END, kernels=kernels)
            while beams.passes_left:
                beams.round(torch.randn(6 if beams.taken else 1, beams.queries, 12, device=DEVICE) * 2 + 20)
            results.append(table_of(beams.found))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", [None, END])
def test_a_round_is_few_launches(monkeypatch: pytest.MonkeyPatch, end: int | None) -> None:
    launched: list[Any] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Launches(getattr(module, name), launched))
    sets = random_sets(1)[2:]
    arena, numbers, (built,) = placed(*sets)
    beams = Beams(arena, numbers * 2, built.level_plan, width=6, k=4, end_token=end, kernels="triton")
    counts = []
    while beams.passes_left:
        logits = torch.randn(2 * (6 if beams.taken else 1), beams.queries, VOCABULARY, device=DEVICE)
        launched.clear()
        with Operations() as operations:
            beams.round(logits)
        counts.append((len(launched), operations.names))
    done = [] if end else [1]  # items are followed as well
    assert counts[:-1] == [(6 + len(done), ["cumsum"])] * (len(counts) - 1)
    assert len(counts) >= 3
    assert counts[-1][0] <= 6 + len(done)


@pytest.mark.parametrize("races", [False, True], ids=["lists", "races"])
@pytest.mark.slow
def test_a_round_in_lockstep_is_as_few(monkeypatch: pytest.MonkeyPatch, races: bool) -> None:
    """Tails that ride along are part of the same launches."""
    launched: list[Any] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Launches(getattr(module, name), launched))
    arena, numbers, (built,) = placed(random_sets(1)[1])
    options: dict[str, Any] = {"keys": torch.arange(4, device=DEVICE)} if races else {}
    beams = Lockstep(arena, numbers * 4, built.level_plan, width=6, k=4, end_token=END, kernels="triton", **options)
    counts = []
    while beams.passes_left:
        rows = 1 if races and not beams.taken else beams.row_count * (1 if races else 4)
        logits = torch.randn(rows, VOCABULARY, device=DEVICE)
        launched.clear()
        with Operations() as operations:
            beams.round(logits)
        counts.append((len(launched), len(operations.names)))
    assert max(counts) == (6, 1)
    assert len(counts) > 5


def as_engines_have_them(count: int, queries: int, vocabulary: int) -> list[torch.Tensor]:
    """Logits as vLLM pads them, as copies of them lie, and parts that begin anywhere."""
    padded = torch.randn(count, queries, -(-vocabulary // 64) * 64, device=DEVICE)[:, :, :vocabulary]
    anywhere = torch.randn(1 + count * queries * vocabulary, device=DEVICE)[1:].view(count, queries, vocabulary)
    return [padded, padded.contiguous(), anywhere]


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [80, 77])
def test_nothing_is_compiled_while_serving(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    """Rounds, widths, lists, sets and strides of other sizes take the forms of the kernels that were compiled
    beforehand."""
    keys: set[str] = set()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorded(getattr(module, name), keys))
    warm_up(Arena(4096, DEVICE, kernels="triton"), torch.randn(1, 1, vocabulary, device=DEVICE))
    assert {key.split()[0] for key in keys} == {name for _, name in KERNELS}
    known = set(keys)
    choices: list[dict[str, Any]] = [{"end_token": END}, {"end_token": None}, {"end_token": END, "renormalised": True}]
    for seed, size, lists in ((2, {"width": 6, "k": 16}, 2), (3, {"width": 1, "k": 1}, 3)):
        for form, sets in enumerate(random_sets(seed)):
            arena, numbers, (built,) = placed(sets)
            for options in (choices[form], choices[form - seed]):
                beams = Beams(arena, numbers * lists, built.level_plan, kernels="triton", **size, **options)
                while beams.passes_left:
                    rows = beams.rows if beams.taken else 1
                    beams.round(as_engines_have_them(lists * rows, beams.queries, vocabulary)[(form + beams.taken) % 3])
                lockstep = Lockstep(arena, numbers[:1], built.level_plan, kernels="triton", width=2, k=2, **options)
                while lockstep.passes_left:
                    logits = as_engines_have_them(max(1, lockstep.row_count), 1, vocabulary)
                    lockstep.round(logits[(form + lockstep.taken) % 3])
    assert keys == known
