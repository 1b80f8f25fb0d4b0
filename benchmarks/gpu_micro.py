"""Step `rounds` of `gpu.py`: rounds of a list and of a race of draws as graphs; wide rows on their own; mask and
sampling together, of logits whose rows are padded or unaligned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_peers import Step, allowed_by, loaded
from gpu_steps import Bench, Emit
from torch import Tensor

import itemset
from itemset.masking.arena import Arena
from itemset.masking.host import HostState, fill_bitmasks
from itemset.ranking.beams import Beams
from itemset.select.views import without
from itemset.trie.walk import STATE_BITS

VOCABULARY, ROWS, ITEMS = 151_936, 512, 1_000_000
WIDTHS = (256, 512)


def micro(bench: Bench, emit: Emit) -> None:
    """Emit a row for each measurement, in microseconds of a step."""
    rows = ROWS if bench.cuda else 4
    lists(bench, emit)
    for vocabulary in (VOCABULARY, VOCABULARY - 3):
        for padded in (True, False):
            emit(sampled(bench, itemset.build(codes(2_048)), vocabulary, padded, rows))
    for name, items in {"codes": codes(2_048), "words": codes(min(30_000, VOCABULARY // 2), VOCABULARY)}.items():
        item_set = itemset.build(items)
        for kind, one in (("whole", item_set), ("with exclusions", without(item_set, np.arange(0, ITEMS, 9_973)))):
            arena, number = loaded(one, bench.device)
            for level in range(3):
                emit(
                    {"set": name, "kind": kind, "level": level}
                    | mask_row(bench, arena, number, one, items, level, rows)
                )


def codes(most: int, of: int = 2_048) -> Any:
    """Items of four tokens. The tokens of words are spread over the vocabulary, codes stand at its end."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, most, (ITEMS, 4))
    return draw.permutation(of)[:most][tokens].astype(np.uint32) if of > most else tokens + VOCABULARY - 3 - most


def mask_row(
    bench: Bench, arena: Arena, number: int, item_set: itemset.ItemSet, items: Any, level: int, rows: int
) -> dict[str, Any]:
    """All rows at one level, beside one write of the logits and xgrammar's kernel."""
    draw = np.random.default_rng(level)
    hosts: list[HostState] = []
    while len(hosts) < rows:
        host = HostState(item_set, [0])
        if host.accept(items[draw.integers(len(items))][:level].tolist()):
            hosts.append(host)
    states = torch.tensor([host.state | number << STATE_BITS for host in hosts], device=bench.device)
    marks = torch.tensor([[-1, 0]] * rows, dtype=torch.int32, device=bench.device)
    slots = torch.arange(rows, device=bench.device)
    logits = torch.randn(rows, VOCABULARY, device=bench.device).bfloat16()
    bitmask = torch.zeros(rows, -(-VOCABULARY // 32), dtype=torch.int32)
    fill_bitmasks(hosts, [host.state for host in hosts], list(range(rows)), bitmask.numpy())
    kernels = arena.kernels
    expected = logits.masked_fill(~allowed_by(bitmask.to(bench.device), VOCABULARY), -torch.inf)
    same = torch.equal(kernels.mask(arena, logits, states, marks, slots), expected)
    result = {
        "rows": rows,
        "ok": same,
        "ours": bench.step([partial(kernels.mask, arena, logits, states, marks, slots)] * 8),
        "one write": bench.step([partial(logits.fill_, 1.0)] * 8),
    }
    if bench.xgrammar is not None:
        result["xgrammar"] = bench.step([partial(bench.xgrammar, logits, bitmask.to(bench.device))] * 8)
    return result


def sampled(bench: Bench, item_set: itemset.ItemSet, vocabulary: int, padded: bool, rows: int) -> dict[str, Any]:
    """Mask the model's logits and take the best token."""
    arena, number = loaded(item_set, bench.device)
    states = torch.full((rows,), number << STATE_BITS, device=bench.device)
    marks = torch.tensor([[-1, 0]] * rows, dtype=torch.int32, device=bench.device)
    slots, stride = torch.arange(rows, device=bench.device), vocabulary + (-vocabulary % 64 if padded else 0)
    logits = torch.randn(rows, stride, device=bench.device).bfloat16()[:, :vocabulary]
    best = torch.empty(rows, dtype=torch.int64, device=bench.device)
    kernels = arena.kernels

    def step(mask: bool) -> None:
        if mask:
            kernels.mask(arena, logits, states, marks, slots)
        torch.argmax(logits, 1, out=best)

    return {
        "vocabulary": vocabulary, "padded": padded, "rows": rows,
        "mask and sample": bench.step([partial(step, True)] * 4), "sample": bench.step([partial(step, False)] * 4),
    }  # fmt: skip


def lists(bench: Bench, emit: Emit) -> None:
    """The rounds of a list and of a race over given logits, in one graph."""
    item_set = itemset.build(codes(2_048))
    (arena, number), keys = loaded(item_set, bench.device), torch.arange(1, device=bench.device)
    for width in WIDTHS if bench.cuda else (8,):
        logits = torch.randn(1, width, VOCABULARY, device=bench.device).bfloat16()
        given: dict[str, Any] = {"width": width, "k": width, "stepwise": True, "kernels": "triton"}
        ways: dict[str, Callable[[], Beams]] = {
            "list": lambda given=given: Beams(arena, [number], item_set.level_plan, end_token=None, **given),
            "race": lambda given=given: Beams(arena, [number], item_set.level_plan, keys=keys, end_token=0, **given),
        }
        for name, make in ways.items():
            emit({"rounds of a": name, "width": width, "ours": bench.step([rounds(make, logits)])})


def rounds(make: Callable[[], Beams], logits: Tensor) -> Step:
    def search() -> None:
        beams = make()
        beams.round(logits[0, :1, None])
        while beams.passes_left:
            beams.round(logits[0, :, None])

    return search
