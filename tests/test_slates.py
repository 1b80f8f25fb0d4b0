"""Slates on the device: what may follow at each step, against sets that are written out without the items so far."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from devices import DEVICE, KERNELS
from interleaving import interleaved
from test_kernels import Launches, OnlyKernels
from views import made

import itemset
from itemset.masking import triton_kernels
from itemset.masking.arena import Arena, Plan, room_for
from itemset.masking.arena_plan import Slate
from itemset.masking.batch import LOCAL, Batch
from itemset.masking.slots import NO_SET, Slots
from itemset.trie.walk import END, NO_TOKEN

VOCABULARY = 70
TOKENS = VOCABULARY - 4
SEPARATOR, STOP, START = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
WIDTH = 400

Items = Sequence[Sequence[int]]


class Asked:
    """A request with a slate of these items, and what its answer so far leaves."""

    def __init__(self, items: Items, n: int, separator: int, start: int) -> None:
        self.items, self.n, self.separator, self.start = set(map(tuple, items)), n, separator, start
        self.output: list[int] = []

    def allowed(self) -> set[int] | None:
        """The tokens that may follow; None if nothing constrains them yet."""
        output = self.output
        if self.start >= 0:
            if self.start not in output:
                return None
            output = output[output.index(self.start) + 1 :]
        left, item, given = set(self.items), (), 0
        for token in output:
            if token == STOP:
                return {STOP}
            if token != self.separator:
                item = (*item, token)
            if token == self.separator or (self.separator == NO_TOKEN and item in left and given < self.n - 1):
                left.remove(item)
                item, given = (), given + 1
        following = {one[len(item)] for one in left if one[: len(item)] == item and len(one) > len(item)}
        if item in left:
            following.add(self.separator if given < self.n - 1 else STOP)
        assert following
        return following


class Run:
    """Slots with slates and others in them, and the steps of an engine without a model; each row is checked."""

    def __init__(self, kernels: Any, draw: random.Random, window: bool = False) -> None:
        self.kernels, self.draw, self.window = kernels, draw, window
        self.requests: list[Asked] = []
        self.history = torch.zeros(8, WIDTH, dtype=torch.int32, device=DEVICE)
        self.end = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        self.sets: list[itemset.ItemSet] = []

    def ask(self, items: Items, n: int, separator: int, start: int = -1, kind: str | None = None) -> None:
        base = made(items, kind)
        self.sets.append(Slate(base, f"slate {len(self.sets)}", n - 1, separator))
        self.requests.append(Asked(items, n, separator, start))

    def begin(self) -> None:
        self.arena = Arena(sum(map(room_for, self.sets)), DEVICE, max_sets=40, kernels=self.kernels)
        self.numbers = [self.arena.acquire(one) for one in self.sets]
        self.slots = Slots(self.arena, 8, max_rows=8, max_stop_tokens=3)
        for slot in range(len(self.requests)):
            self.assign(slot)

    def assign(self, slot: int) -> None:
        marks = [[self.requests[slot].start, STOP, -1, -1]]
        self.slots.assign(*(torch.tensor(one, device=DEVICE) for one in ([slot], [self.numbers[slot]], marks)))

    def step(self) -> None:
        rows = [*range(len(self.requests))]
        self.draw.shuffle(rows)
        slots = torch.tensor([*rows, -1], device=DEVICE)
        begin = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        batch = Batch(slots, self.history, begin, self.end, slates=True)
        if self.window:
            newest = torch.full((len(slots), WIDTH), -7, device=DEVICE)
            for row, slot in enumerate(rows):
                if output := self.requests[slot].output:
                    newest[row, -len(output) :] = torch.tensor(output)
            begins = torch.tensor([WIDTH - len(self.requests[slot].output) for slot in rows] + [0], device=DEVICE)
            batch = Batch(slots, newest, begins, torch.full_like(begins, WIDTH), by_slot=False, slates=True)
        logits = torch.randn(len(slots), VOCABULARY + 3, device=DEVICE)
        before = logits.clone()
        self.slots.step(batch, logits)
        for row, slot in enumerate(rows):
            allowed = self.requests[slot].allowed()
            expected = before[row]
            if allowed is not None:
                expected = torch.full_like(before[row], -torch.inf)
                expected[sorted(allowed)] = before[row][sorted(allowed)]
            assert torch.equal(logits[row], expected), (self.requests[slot].output, allowed, kept(logits[row]))

    def commit(self, preempt: float = 0.1) -> None:
        for slot, request in enumerate(self.requests):
            for _ in range(self.draw.choice([0, 1, 1, 1, 2, 5])):
                allowed = request.allowed()
                if allowed is None:
                    allowed = {request.start, self.draw.randrange(VOCABULARY)}
                token = self.draw.choice(sorted(allowed))
                self.history[slot, len(request.output)] = token
                request.output.append(token)
            self.end[slot] = len(request.output)
            if self.draw.random() < preempt:
                self.assign(slot)  # its output is walked again

    @property
    def ended(self) -> bool:
        return all(request.output[-1:] == [STOP] for request in self.requests)

    def run(self) -> None:
        self.begin()
        self.step()
        while not self.ended:
            self.commit()
            self.step()


def kept(row: torch.Tensor) -> list[int]:
    return row.isfinite().nonzero()[:, 0].tolist()


def prefix_free(items: Items) -> list[Sequence[int]]:
    longest = max(map(len, items))
    return [item for item in items if len(item) == longest]


def some_items(draw: random.Random) -> list[list[int]]:
    """Few tokens, so that items share what they begin with; or many, so that nodes are wide."""
    tokens, longest = draw.choice([2, 3, TOKENS]), draw.choice([1, 3, 8])
    count = draw.choice([1, 4, 12])
    return [[draw.randrange(tokens) for _ in range(draw.randrange(1, longest + 1))] for _ in range(count)]


def run_of(seed: int, kernels: Any, most: int) -> Run:
    draw = random.Random(seed)
    run = Run(kernels, draw, window=draw.random() < 0.5)
    for _ in range(draw.randrange(1, 4)):
        items, separator = some_items(draw), draw.choice([SEPARATOR, SEPARATOR, NO_TOKEN])
        items = items if separator >= 0 else prefix_free(items)
        n = draw.randrange(1, min(len(set(map(tuple, items))), most) + 1)
        kind = None if separator >= 0 else "whole"  # of which no item may begin another
        run.ask(items, n, separator, draw.choice([-1, -1, START]), kind)
    return run


@pytest.mark.skipif(DEVICE != "cpu", reason="for CPUs")
@pytest.mark.parametrize("seed", range(60))
def test_random_slates_numba(seed: int) -> None:
    run_of(seed, "numba", most=12).run()


@pytest.mark.parametrize("seed", range(12))
def test_random_slates_triton(seed: int) -> None:
    run_of(seed, "triton", most=5).run()


@pytest.mark.parametrize("seed", range(100, 108))
def test_random_slates_in_many_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few lanes that lists and nodes take several rounds."""
    for name, value in {"LANES": 4, "CHUNK": 16, "CHUNKS": 2, "WHOLE": 16}.items():
        monkeypatch.setattr(triton_kernels, name, value)
    run_of(seed, "triton", most=6).run()


SHAPES: dict[str, list[list[int]]] = {
    "one inside another": [[1] * n for n in range(1, 9)],
    "a wide root": [[t] for t in range(12)],
    "a wide node": [[3, t] for t in range(12)],
    "tails": [[t, 9, 9, 9, t] for t in range(5)] + [[5, 1, 2, 3], [5, 1, 2, 4]],
    "a tree": [[a, b, c] for a in range(3) for b in range(2) for c in range(2)],
}


@pytest.mark.parametrize("kind", ["whole", "filtered", "without", "both"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_item_of_a_set(kernels: Any, shape: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slate of all items ends, in whichever order they come: the last is the only one left."""
    monkeypatch.setattr(triton_kernels, "LANES", 4)
    items = SHAPES[shape]
    run = Run(kernels, random.Random(f"{shape} {kind}"))
    run.ask(items, len(items), SEPARATOR, kind=kind)
    run.run()
    given = [request.output for request in run.requests]
    assert sorted(map(tuple, split(given[0], SEPARATOR))) == sorted(map(tuple, items))


def split(output: list[int], separator: int) -> Iterator[list[int]]:
    item: list[int] = []
    for token in output:
        if token in (separator, STOP):
            yield item
            item = []
            if token == STOP:
                return
        else:
            item.append(token)


def test_programs_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a launch, drafts' rows among them: the first row's program alone writes."""
    monkeypatch.setattr(triton_kernels, "LANES", 4)
    run = Run("triton", random.Random(5))
    for kind in ("whole", "both"):
        run.ask(SHAPES["a tree"], 5, SEPARATOR, kind=kind)
    with interleaved(seed=3):
        run.run()


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_rows_take_no_part(kernels: Any) -> None:
    """A request's list grows once, however many rows it has; and what a step does twice changes nothing."""
    run = Run(kernels, random.Random(1))
    run.ask(SHAPES["a wide root"], 4, SEPARATOR, kind="whole")
    run.begin()
    run.history[0, :4] = torch.tensor([5, SEPARATOR, 2, SEPARATOR])
    run.end[0] = 4
    begin = torch.zeros_like(run.end)
    rows = torch.tensor([0, 0, 0], device=DEVICE)
    above, tokens = (torch.tensor(one, device=DEVICE) for one in ([0, 1, 2], [SEPARATOR, 7, -1]))
    batch = Batch(rows, run.history, begin, run.end, above=above, tokens=tokens, slates=True)
    for _ in range(2):
        logits = torch.zeros(3, VOCABULARY, device=DEVICE)
        run.slots.step(batch, logits)
        assert kept(logits[0]) == sorted({*range(12)} - {5, 2})
        assert kept(logits[1]) == [SEPARATOR]


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_that_leave_the_set_leave_the_end_alone(kernels: Any) -> None:
    run = Run(kernels, random.Random(1))
    run.ask(SHAPES["a wide root"], 4, SEPARATOR, kind="whole")
    run.begin()
    run.history[0, :3] = torch.tensor([5, SEPARATOR, 5])  # a second time: something overrode the mask
    run.end[0] = 3
    for _ in range(2):
        logits = torch.zeros(1, VOCABULARY, device=DEVICE)
        batch = Batch(torch.tensor([0], device=DEVICE), run.history, torch.zeros_like(run.end), run.end, slates=True)
        run.slots.step(batch, logits)
        assert kept(logits[0]) == [STOP]
        assert run.slots.row_states[0] & LOCAL == END


def test_a_slate_costs_one_launch_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no operation of torch: all of it can be captured in a CUDA graph."""
    run = Run("triton", random.Random(1))
    run.ask(SHAPES["a tree"], 4, SEPARATOR, kind="both")
    run.begin()
    launched: list[Any] = []
    for name in ("_grow_kernel", "_walk_kernel", "_mask_kernel"):
        monkeypatch.setattr(triton_kernels, name, Launches(getattr(triton_kernels, name), launched))
    batch = Batch(torch.tensor([0], device=DEVICE), run.history, torch.zeros_like(run.end), run.end)
    for slates, vocabulary, launches in ((True, 4096, 2), (True, 4999, 3), (False, 4096, 1), (False, 4999, 2)):
        logits = torch.zeros(1, vocabulary, device=DEVICE)
        with OnlyKernels():
            run.slots.step(batch._replace(slates=slates), logits)
        assert len(launched) == launches
        launched.clear()


def test_a_slate_leaves_the_arena_with_its_request() -> None:
    base = itemset.build(SHAPES["a tree"])
    plan = Plan(1 << 14)
    held = plan.acquire(base)
    slates = [plan.acquire(Slate(base, f"slate {i}", 4, SEPARATOR)) for i in range(3)]
    assert {one.number for one in slates} == {1, 2, 3}
    assert all(one.below == [(held.number, held.start)] for one in slates)
    assert held.users == 4
    for one in slates:
        plan.release(one.number)
    assert [one.digest for one in plan.residents] == [base.digest]
    assert plan.acquire(Slate(base, "another", 4, SEPARATOR)).start == slates[0].start
    assert NO_SET not in [one.number for one in plan.residents]
