"""The kernels, in Numba and in Triton, against the dict trie and against the host's walk."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICE, KERNELS
from hypothesis import HealthCheck, given, settings
from interleaving import interleaved
from oracle import dict_trie, prefixes
from samples import SAMPLES
from schedule import MOST_ROWS, SLOTS, STOPS, Schedule
from strategies import item_sets
from torch.utils._python_dispatch import TorchDispatchMode
from views import made

import itemset
from itemset import ItemSetError
from itemset.masking import cpu_kernels, triton_kernels
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import COLUMNS, LOCAL, Batch, kernels_for
from itemset.masking.slots import Slots
from itemset.trie.walk import DEAD, END, FREE, STATE_BITS, TAIL, WAITING
from itemset.trie.walk import advance as host_advance

VOCABULARY = 70
MODULES = {"numba": cpu_kernels, "triton": triton_kernels}
numba = pytest.mark.skipif(DEVICE != "cpu", reason="Numba's kernels run on CPUs alone")


@pytest.fixture(params=[MODULES[name] for name in KERNELS], ids=KERNELS)
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture
def small_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels with lanes and chunks so small that every set needs several of each."""
    for name, value in {"LANES": 4, "STORED": 64, "SPAN": 32, "WHOLE": 16}.items():
        monkeypatch.setattr(triton_kernels, name, value)


def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def resident(
    *sets: list[list[int]], kind: str | None = "whole", kernels: Any = "triton"
) -> tuple[Arena, list[itemset.ItemSet], list[int]]:
    """An arena of which both kinds of kernels can read on a CPU."""
    built = [made(items, kind) for items in sets]
    arena = Arena(sum(map(room_for, built)), DEVICE, kernels=kernels)
    return arena, built, [arena.acquire(s) for s in built]


def check_against_oracle(kernels: ModuleType, items: list[list[int]], most: int) -> None:
    """The states, masks and forced tokens of every prefix (`most` of them), in a second set of the arena."""
    arena, (_, built), (_, number) = resident([[3, 1], [4]], items, kind=None)
    nodes = list(prefixes(dict_trie(items)))
    nodes = nodes[:: -(-len(nodes) // most)]
    stop = VOCABULARY - 3
    states = []
    for prefix, _, _ in nodes:
        state = 0
        for token in prefix:
            state = host_advance(built.trie.tables.pointers, state, token)
        states.append(state | number << STATE_BITS)
    slots = torch.arange(len(nodes), device=DEVICE)
    marks = tensor([[-1, stop, -1]] * len(nodes), torch.int32)

    logits = torch.randn(len(nodes), VOCABULARY + 5, device=DEVICE)
    masked = kernels.mask(arena, logits.clone(), tensor(states), marks, slots)
    expected = torch.full_like(logits, -torch.inf)
    for i, (_, children, terminal) in enumerate(nodes):
        kept = sorted({*children, *([stop] if terminal else [])})
        expected[i, kept] = logits[i, kept]
    assert torch.equal(masked, expected)

    listed = [[*children, *([stop] if terminal else [])] for _, children, terminal in nodes]
    for width in (max(map(len, listed)), 2):
        tokens, found = kernels.children(arena, logits, tensor(states), marks, slots, None, width)
        for i, row in enumerate(listed):
            rest = width - len(row)
            assert tokens[i].tolist() == row[:width] + [-1] * rest
            assert found[i].tolist() == logits[i, row[:width]].tolist() + [-torch.inf] * rest

    tokens = [(i, token) for i, (_, children, _) in enumerate(nodes) for token in {*children, 0, 1, stop, 69, -1}]
    tokens = tokens[:: -(-len(tokens) // (3 * most))]
    picked = [i for i, _ in tokens]
    out = torch.empty(len(tokens), dtype=torch.int64, device=DEVICE)
    after = kernels.advance(
        arena, tensor(states)[picked], tensor([t for _, t in tokens], torch.int32), marks[picked], out
    )
    for (i, token), device_state in zip(tokens, after.tolist(), strict=True):
        state = host_advance(built.trie.tables.pointers, states[i] & LOCAL, token)
        if state == DEAD and token == stop and nodes[i][2]:
            state = END
        assert device_state == (state | number << STATE_BITS), (nodes[i], token)

    forced = kernels.forced(arena, tensor(states), marks, slots, torch.empty(len(nodes), 4, dtype=torch.int32))
    for (prefix, _, _), chain in zip(nodes, forced.tolist(), strict=True):
        assert chain == forced_by_oracle(items, prefix, stop, 4)


def forced_by_oracle(items: list[list[int]], prefix: tuple[int, ...], stop: int, k: int) -> list[int]:
    node = dict_trie(items)
    for token in prefix:
        node = node[token]
    chain = []
    while len(chain) < k and len(node) == 1:
        (token,) = node
        chain.append(stop if token is None else token)
        if token is None:
            break
        node = node[token]
    return chain + [-1] * (k - len(chain))


@given(item_sets(VOCABULARY - 4))
@settings(max_examples=60, deadline=None)
@numba
def test_random_sets_numba(items: list[list[int]]) -> None:
    check_against_oracle(cpu_kernels, items, most=60)


@given(item_sets(VOCABULARY - 4))
@settings(max_examples=15, deadline=None)
def test_random_sets_triton(items: list[list[int]]) -> None:
    check_against_oracle(triton_kernels, items, most=12)


@given(item_sets(VOCABULARY - 4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_constants")
@pytest.mark.slow
def test_random_sets_in_many_chunks(items: list[list[int]]) -> None:
    check_against_oracle(triton_kernels, items, most=6)


def masked_with_a_stop(count: int, vocabulary: int, stop: int) -> None:
    """An item may end where `count` tokens may follow, and it ends with a token that comes after them all."""
    arena, (built,), (number,) = resident([[5], *([5, token] for token in range(count))], kind=None)
    state = host_advance(built.trie.tables.pointers, 0, 5) | number << STATE_BITS
    logits = torch.randn(1, vocabulary, device=DEVICE)
    masked = triton_kernels.mask(arena, logits.clone(), tensor([state]), tensor([[-1, stop]], torch.int32), tensor([0]))
    assert masked[0].isfinite().nonzero().flatten().tolist() == [*range(count), stop]


@pytest.mark.usefixtures("small_constants")
def test_no_program_writes_to_what_another_masks() -> None:
    for count in range(1, 14):
        masked_with_a_stop(count, 70, 20)


@pytest.mark.slow
@pytest.mark.parametrize("count", [240, 241, 256, 257])
def test_no_program_writes_to_what_another_masks_in_a_large_vocabulary(count: int) -> None:
    masked_with_a_stop(count, triton_kernels.SPAN + 4_000, 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("window", [False, True], ids=["history", "window"])
@pytest.mark.parametrize(("name", "steps"), [(name, SAMPLES // (2 if name == "numba" else 10)) for name in KERNELS])
def test_engine_like_schedules(name: Any, steps: int, window: bool) -> None:
    """5,000 steps in Numba and 1,000 in Triton with STATIC_SAMPLES=10000."""
    schedule = Schedule(seed=steps + window, kernels=name, device=DEVICE, window=window)
    schedule.run(steps)
    assert schedule.checked > 5 * steps
    assert schedule.refused > 0  # the arena was full at times


@pytest.mark.parametrize("window", [False, True], ids=["history", "window"])
@pytest.mark.parametrize(("name", "steps"), [(name, 500 if name == "numba" else 100) for name in KERNELS])
@pytest.mark.slow
def test_schedules_of_equal_rows_and_told_tokens(name: Any, steps: int, window: bool) -> None:
    schedule = Schedule(seed=steps + window, kernels=name, device=DEVICE, window=window, each=True, positions=True)
    schedule.run(steps)
    assert schedule.checked > 5 * steps


@pytest.mark.parametrize("window", [False, True], ids=["history", "window"])
@pytest.mark.slow
def test_rows_of_a_slot_run_in_any_order_and_in_turns(window: bool) -> None:
    """One row's program reads the slot's cell before, between or after the writes of the others."""
    schedule = Schedule(seed=window, kernels="triton", device=DEVICE, window=window, each=True, positions=True)
    with interleaved(seed=window):
        schedule.run(40)
    assert schedule.checked > 5 * 40


def test_the_checks_for_a_gpu_compare_no_memory_that_nothing_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    gpu_checks = importlib.import_module("gpu_checks")
    schedule = Schedule(seed=3, kernels="triton", device=DEVICE)
    schedule.slots = gpu_checks.Compared(schedule.arena, SLOTS, max_rows=MOST_ROWS, max_stop_tokens=STOPS)
    schedule.slots.sets = schedule.sets
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).random_())
    schedule.run(6)
    assert schedule.checked > 6


STEP = ["cells", "marks", "slots", "history", "begin", "end", "above", "tokens", "positions", "out"]
READ = {
    "advance": ["states", "tokens", "marks", "out"],
    "walk": [*STEP, "logits"],
    "mask": ["logits", "states", "marks", "slots"],
    "forced": ["states", "marks", "slots", "out"],
    "children": ["logits", "states", "marks", "slots"],
}


@pytest.mark.parametrize(("kernel", "strided"), [(kernel, name) for kernel, names in READ.items() for name in names])
def test_tensors_of_another_stride_are_refused(kernel: str, strided: str) -> None:
    """They would be read, or written, where another row lies."""
    slots, batch, logits = plain_step("triton")
    batch = batch._replace(positions=tensor([0, 1, 2, -1, -1]))
    states = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    given = {"cells": slots.cells, "marks": slots.marks, "logits": logits, "states": states, "tokens": batch.tokens}
    given |= {name: value for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)}
    given["out"] = states[:, None].repeat(1, 3) if kernel == "forced" else states.clone()
    given[strided] = torch.stack([given[strided]] * 2, -1)[..., 0]
    before = {name: value.clone() for name, value in given.items()}
    launch = getattr(triton_kernels, kernel)
    if kernel == "walk":
        parts = {name: given[name] for name in batch._fields if name in given}
        arguments = [given["cells"], given["marks"], batch._replace(**parts), given["out"], given["logits"]]
    else:
        arguments = [given[name] for name in READ[kernel]] + ([None, 3] if kernel == "children" else [])
    with pytest.raises(ValueError, match=f"^{strided} has a stride of 2"):
        launch(slots.arena, *arguments)
    assert all(torch.equal(value, before[name]) for name, value in given.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [67, 70, 128, 5000, 9001])
def test_mask_in_place(kernels: ModuleType, dtype: torch.dtype, vocabulary: int) -> None:
    """Any dtype, row stride and vocabulary; also one smaller than the set's, or that ends inside a chunk."""
    arena, (built, _), (number, _) = resident([[t, 1] for t in range(68)] + [[68, 1, 2], [69]], [[8999], [3]])
    tail = host_advance(built.trie.tables.pointers, 0, 69 - 1)
    states = tensor([number << STATE_BITS, END, FREE, DEAD, tail | number << STATE_BITS, 1 << STATE_BITS, WAITING])
    marks = tensor([[0, 69, 2, -1]] * len(states), torch.int32)
    slots = tensor([0, 1, 2, 3, -1, 5, 6], torch.int32)
    whole = torch.randn(2 * len(states), vocabulary + 9, device=DEVICE).to(dtype)
    logits, before = whole[::2, 4:-5], whole.clone()
    kernels.mask(arena, logits, states, marks, slots)
    expected = before.clone()
    kept = [range(70), [2, 69], None, None, [1], [3, 8999], None]
    for row, tokens in zip(expected[::2, 4:-5], kept, strict=True):
        if tokens is not None:
            legal = torch.tensor([t for t in tokens if t < vocabulary])
            values = row[legal].clone()
            row.fill_(-torch.inf)
            row[legal] = values
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_children_are_what_a_mask_keeps(kernels: ModuleType, dtype: torch.dtype) -> None:
    """At nodes, in tails, after items, and where nothing constrains; with stop tokens that are forbidden, and with
    tokens that the logits do not have."""
    arena, (built,), (number,) = resident([[3, 1], [3], [4, 7, 7], [9, 9], [66, 1], [69, 2]], kind="whole")
    walked = [host_advance(built.trie.tables.pointers, 0, token) for token in (3, 4, 66)]
    states = [0, *walked, END, END, FREE, WAITING, DEAD]
    states += [host_advance(built.trie.tables.pointers, walked[1], 7)]
    marks = tensor([[-1, 5, 2, 69, -1]] * len(states), torch.int32)
    slots = tensor([*range(5), -1, *range(6, len(states))])
    wide = torch.randn(len(states), 2 * 68, device=DEVICE).to(dtype)
    logits = wide[:, :68]
    logits[4, 2] = -torch.inf
    bound = tensor([state not in (FREE, WAITING, DEAD) for state in states], torch.bool)
    given = arena, logits, tensor(states) | number << STATE_BITS, marks, slots
    before = logits.clone()
    tokens, found = kernels.children(*given, None, 8)
    assert torch.equal(logits, before)
    spread = torch.full((len(states), 69), -torch.inf, dtype=dtype, device=DEVICE)
    spread.scatter_(1, torch.where(tokens < 0, 68, tokens).long(), found)
    masked = kernels.mask(arena, logits.clone(), *given[2:])
    assert torch.equal(spread[bound, :68], masked[bound])
    assert found.dtype == dtype
    assert (tokens[~bound] < 0).all()
    assert found[~bound].isneginf().all()
    rows = [[token for token in row if token >= 0] for row in tokens.tolist()]
    assert rows[:3] == [[3, 4, 9, 66], [1, 5, 2], [7]]
    assert rows[4:6] == [[5, 2], []]
    twice = kernels.children(arena, logits, tensor([0, walked[0]] * 2) | number << STATE_BITS, marks, slots[:2], 2, 4)
    assert twice[0].tolist() == [[3, 4, 9, 66], [1, 5, 2, -1]] * 2


def test_a_step_of_children_alone(kernels: ModuleType) -> None:
    """`Slots.children` walks as `step` does."""
    name = "numba" if kernels is cpu_kernels else "triton"
    arena, _, (number,) = resident([[3, 1], [3], [4, 7, 7], [9, 9]], kernels=name)
    slots = Slots(arena, 2, max_rows=2)
    slots.assign(tensor([0, 1]), tensor([number] * 2), torch.tensor([[-1, 5] + [-1] * 15] * 2, device=DEVICE))
    history, begin = tensor([[3, 1], [4, 7]], torch.int32), tensor([0, 0])
    logits = torch.randn(2, 10, device=DEVICE)
    for taken, rows in enumerate([[[3, 4, 9]] * 2, [[1, 5, -1], [7, -1, -1]], [[5, -1, -1], [7, -1, -1]]]):
        tokens, found = slots.children(Batch(tensor([0, 1]), history, begin, begin + taken), logits, 3)
        assert tokens.tolist() == rows
        expected = logits.gather(1, tokens.long().clamp(min=0)).where(tokens >= 0, -torch.inf)
        assert torch.equal(found, expected)


def test_an_ended_row_is_never_empty(kernels: ModuleType) -> None:
    """Another processor may have forbidden the stop tokens; a sampler takes any token of an empty row."""
    arena, _, (number,) = resident([[3], [3, 4]])
    logits = torch.full((2, 9), -torch.inf, device=DEVICE)
    states = tensor([END, 1 | number << STATE_BITS])
    kernels.mask(arena, logits, states, tensor([[-1, 7, 5]] * 2, torch.int32), tensor([0, 1]))
    assert legal(logits) == [[5, 7], []]


@pytest.mark.slow
def test_a_root_with_a_million_children(kernels: ModuleType) -> None:
    children = np.unique(np.random.default_rng(1).integers(0, 2_000_000, 1_500_000))[:1_000_000]
    items = np.stack([children, children[::-1]], 1)
    built = itemset.build(items)
    arena = Arena(room_for(built), DEVICE, kernels="triton")
    state = tensor([arena.acquire(built) << STATE_BITS] * 4)
    asked = [int(children[0]), int(children[123_456]), int(children[-1]), int(np.setdiff1d(range(2000), children)[0])]
    marks = tensor([[-1, -1]] * 4, torch.int32)
    after = kernels.advance(arena, state, tensor(asked), marks, torch.empty_like(state)).tolist()
    assert after == [host_advance(built.trie.tables.pointers, 0, token) for token in asked]
    assert after[0] >= TAIL
    assert after[3] == DEAD
    logits = torch.zeros(1, int(children[-1]) + 77, device=DEVICE)
    kernels.mask(arena, logits, state[:1], marks[:1], tensor([0]))
    assert torch.equal(logits[0].isfinite().nonzero()[:, 0].cpu(), torch.from_numpy(children))


def plain_step(kernels: str) -> tuple[Slots, Batch, torch.Tensor]:
    """A step of three rows, the second with two drafts, on 4,999 logits: two launches in Triton."""
    arena, _, (one, two) = resident([[5, 6, 7, 8], [5, 9], [7]], [[5], [6, 7]], kernels=kernels)
    slots = Slots(arena, 4, max_rows=8, max_stop_tokens=2)
    slots.assign(tensor([0, 1, 2]), tensor([one, two, -1]), tensor([[-1, 1, 2], [-1, 1, -1], [-1, -1, -1]]))
    batch = Batch(
        slots=tensor([0, 0, 0, 1, 2], torch.int32),
        history=tensor([[5, 0, 0]] * 4, torch.int32),
        begin=tensor([0] * 4, torch.int32),
        end=tensor([1, 0, 1, 0], torch.int32),
        above=tensor([0, 1, 2, 0, 0], torch.int32),
        tokens=tensor([5, 6, 7, 0, 0], torch.int32),
    )
    return slots, batch, torch.randn(5, 4999, device=DEVICE)


def legal(logits: torch.Tensor) -> list[list[int]]:
    rows = [row.isfinite().nonzero()[:, 0].tolist() for row in logits]
    return [row if len(row) < logits.shape[1] else ["all"] for row in rows]


LEGAL = [[6, 9], [7], [8], [5, 6], ["all"]]


class OnlyKernels(TorchDispatchMode):
    """Refuses every torch operation: what a step does between launches of kernels may not be one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allowed = {"aten.slice.Tensor", "aten.detach.default", "aten.alias.default"}  # views: nothing is computed
        assert str(func) in allowed, f"a step called {func}"
        return func(*args, **(kwargs or {}))


def test_a_triton_step_is_two_launches_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, batch, logits = plain_step("triton")
    launched = []
    for name in ("_walk_kernel", "_mask_kernel"):
        monkeypatch.setattr(triton_kernels, name, Launches(getattr(triton_kernels, name), launched))
    with OnlyKernels():
        slots.step(batch, logits)
    assert len(launched) == 2
    assert legal(logits) == LEGAL
    with OnlyKernels():
        slots.step(batch, logits[:, :4096])
    assert len(launched) == 3


class Launches:
    """A kernel whose launches are counted. What is inside, on a CPU the interpreter's tensors, is nobody's business."""

    def __init__(self, kernel: Any, launched: list[Any]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launched.append(grid)
            with torch.utils._python_dispatch._disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


class NothingReadBack(TorchDispatchMode):
    """Refuses what would make the host wait for the device, or copy from the host to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_to_copy", "lift_fresh", "equal.default")
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if "_to_copy" in name:
            assert (kwargs or {}).get("device") is None, name
        else:
            assert not any(word in name for word in waits), name
        if "copy_" in name and len(tensors) == 2:
            assert tensors[0].device == tensors[1].device
        return func(*args, **(kwargs or {}))


def test_stepping_twice_is_stepping_once(kernels: ModuleType) -> None:
    """A row may read its slot's cell before or after another row has written it."""
    slots, batch, logits = plain_step("numba" if kernels is cpu_kernels else "triton")
    slots.step(batch, logits)
    before = slots.cells[:-1].clone()  # the last one is nobody's
    again = torch.randn_like(logits)
    slots.step(batch, again)
    assert legal(again) == LEGAL
    assert torch.equal(slots.cells[:-1], before)


def test_tokens_left_of_the_window_end_the_request(kernels: ModuleType) -> None:
    """Never a wrong mask: where committed tokens were missed, only stop tokens remain."""
    slots, batch, logits = plain_step("numba" if kernels is cpu_kernels else "triton")
    batch.begin.fill_(-1)
    slots.step(batch._replace(above=None, tokens=None), logits)
    assert legal(logits) == [[1, 2]] * 3 + [[1], ["all"]]


def test_drafts_in_columns(kernels: ModuleType) -> None:
    """As a draft model proposes them: all rows have as many, and the count lies on the device."""
    slots, batch, _ = plain_step("numba" if kernels is cpu_kernels else "triton")
    tokens = tensor([[6, 7, 0], [5, 2, 0], [9, 9, 9], [9, 1, 0]])
    depth = tensor([0])
    batch = batch._replace(
        slots=tensor([0, 1, 2, -1]), above=depth, tokens=tokens, layout=COLUMNS, end=tensor([1, 0, 0, 0])
    )
    expected = [[[6, 9], [5, 6]], [[7], [1]], [[8], ["all"]], [["all"], ["all"]]]
    for count, rows in enumerate(expected):
        depth.fill_(count)
        logits = torch.randn(4, 80, device=DEVICE)
        slots.step(batch, logits)
        assert legal(logits) == [*rows, ["all"], ["all"]], count


def test_a_guess_is_always_legal(kernels: ModuleType) -> None:
    arena, _, (number,) = resident([[5, 6, 7, 8], [5, 9], [7], [7, 3]])
    out = torch.full((5, 6), -7, device=DEVICE)
    states = tensor([number << STATE_BITS, END, FREE, DEAD, WAITING])
    kernels.forced(arena, states, tensor([[-1, 2, 1]] * 5, torch.int32), tensor([0, 1, 2, 3, 4]), out, True)
    assert out.tolist() == [[5, 6, 7, 8, 2, 2], [2] * 6, *[[-7] * 6] * 3]


def test_kernels_are_chosen_by_device() -> None:
    chosen = [kernels_for("masking", *asked).__name__ for asked in (("cpu",), ("cuda",), ("cpu", "triton"))]
    assert chosen == [f"itemset.masking.{name}_kernels" for name in ("cpu", "triton", "triton")]
    with pytest.raises(ItemSetError, match="in Numba are for CPUs, not for meta: choose triton"):
        Arena(1, "meta", kernels="numba")
