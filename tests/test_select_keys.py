"""The best keys of each list, by a radix select in one launch, against torch's `topk`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from devices import DEVICE

from itemset.ranking import triton_select
from itemset.ranking.beam_state import NOTHING

LOW, HIGH = -(1 << 63), (1 << 63) - 1


def lists_of_keys() -> Iterator[tuple[str, torch.Tensor, int]]:
    draw = torch.Generator().manual_seed(0)
    for size, wanted in ((1, 1), (7, 3), (300, 257), (2_500, 40), (1_025, 1_024)):
        yield "any", torch.randint(LOW, HIGH, (2, 3, size), generator=draw), wanted
        yield "near", torch.randint(0, 9, (1, 2, size), generator=draw) - 4, wanted
        few = torch.full((1, 2, size), NOTHING)
        few[:, :, size // 2 :: 5] = torch.randint(LOW, HIGH, few[:, :, size // 2 :: 5].shape, generator=draw)
        yield "mostly none", few, wanted
    yield "the extremes", torch.tensor([[[LOW, HIGH, 0, -1, 1, HIGH, LOW]]]), 5


@pytest.mark.parametrize(("kind", "keys", "wanted"), list(lists_of_keys()), ids=lambda one: str(one)[:12])
def test_the_best_keys_stand_as_in_a_sort(kind: str, keys: torch.Tensor, wanted: int) -> None:
    found, places = triton_select.best_keys(keys.to(DEVICE), wanted)
    expected, at = keys.sort(descending=True, stable=True)
    assert torch.equal(found.cpu(), expected[:, :, :wanted])
    assert torch.equal(places.cpu(), at[:, :, :wanted])


def test_one_launch_and_one_form_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    from specialisations import Recorded

    forms: set[str] = set()
    launches: list[int] = []
    recorded = Recorded(triton_select.select_kernel, forms)

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> object:
            launches.append(grid[0])
            return recorded[grid]

    monkeypatch.setattr(triton_select, "select_kernel", Counted())
    for size, wanted in ((40, 5), (129, 64), (1_000, 257)):
        triton_select.best_keys(torch.randint(LOW, HIGH, (2, 2, size), device=DEVICE), wanted)
    assert launches == [4, 4, 4]
    assert len(forms) == 1


def test_long_lists_and_wide_ones_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program would read them alone."""
    monkeypatch.setattr(triton_select, "select_kernel", None)
    for size, wanted in (
        (triton_select.MOST_KEYS + 1, 3),
        (triton_select.MOST_WANTED + 1, triton_select.MOST_WANTED + 1),
    ):
        keys = torch.arange(size, device=DEVICE)[None, None]
        assert triton_select.best_keys(keys, wanted)[0][0, 0, :3].tolist() == [size - 1, size - 2, size - 3]
