"""What a step on the GPU is measured beside: the items and states that all methods are measured at, and the other
methods in torch, from their published descriptions.

A method offers its steps as functions without arguments, whose tensors exist before they are called: so each can be
captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from itemset import ItemSet
from itemset.masking.host import HostState

Step = Callable[[], Any]
Apply = Callable[[Tensor, Tensor], Any]  # of a bitmask [rows, words] to logits [rows, vocabulary], in place

LENGTH = 8  # tokens of an item that is measured
FIXED_LEVELS = 3  # levels whose branching `with_children` fixes
STOP = 0  # every row's stop token. No row is measured where it is allowed
MOST_DENSE = 2_048  # codes up to which STATIC keeps its second level as a table of codes x codes
KEY_BITS = 63


def run(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


def capture(steps: Sequence[Step]) -> Step:
    """What replays these steps. They are done once before, because kernels are compiled at their first launch, which
    cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(steps)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(steps)
    replay: Step = graph.replay
    return replay


@contextlib.contextmanager
def constants(module: ModuleType, **values: int) -> Iterator[None]:
    """Other values of a module's constants, until the end of the block."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def uniform(items: int, vocabulary: int) -> NDArray[Any]:
    return np.random.default_rng(0).integers(0, vocabulary, (items, LENGTH), dtype=_dtype(vocabulary))


def zipf(items: int, vocabulary: int, exponent: float = 1.2) -> NDArray[Any]:
    """The token of rank k, in an order of the level's own, has a share of 1 / k^exponent."""
    draw = np.random.default_rng(0)
    shares = np.arange(1, vocabulary + 1) ** -exponent
    shares /= shares.sum()
    levels = [draw.permutation(vocabulary)[draw.choice(vocabulary, items, p=shares)] for _ in range(LENGTH)]
    return np.stack(levels, axis=1).astype(_dtype(vocabulary))


def with_children(items: int, vocabulary: int, children: int) -> NDArray[Any]:
    """Uniform items, but that each node of the first levels has so many children, as far as there are items."""
    draw = np.random.default_rng(0)
    tokens, rest = uniform(items, vocabulary), np.arange(items)
    children = min(children, vocabulary)
    for level in range(FIXED_LEVELS):
        tokens[:, level] = draw.permutation(vocabulary)[:children][rest % children]
        rest //= children
    return tokens


def _dtype(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


class Walks(NamedTuple):
    """Rows on their way to random items. In each step they are spread over all levels, as in real decoding.

    positions: [steps, rows]. Each row's item in the sorted items. tokens: [steps, rows, length]. That item.
    levels: [steps, rows]. How many of its tokens have been decoded.
    """

    positions: Tensor
    tokens: Tensor
    levels: Tensor

    @classmethod
    def random(cls, items: Tensor, steps: int, rows: int) -> Walks:
        """items: [N, length], sorted."""
        draw = torch.Generator(items.device).manual_seed(0)
        positions = torch.randint(len(items), (steps, rows), device=items.device, generator=draw)
        spread = torch.arange(steps, device=items.device)[:, None] + torch.arange(rows, device=items.device)
        return cls(positions, items[positions], (spread % items.shape[1]).int())

    def in_step(self) -> Walks:
        """The same with all rows of a step at one level, as beams are that decode together."""
        steps, rows = self.levels.shape
        levels = torch.arange(steps, dtype=torch.int32, device=self.levels.device) % self.tokens.shape[2]
        return self._replace(levels=levels[:, None].expand(steps, rows).contiguous())

    def first(self, steps: int, rows: int) -> Walks:
        return Walks(*(part[:steps, :rows].contiguous() for part in self))


def pack(tokens: Tensor, bits: int) -> Tensor:
    """Tokens [..., length] as few integers as hold them, [words, ...]: compared word by word, they order as tokens."""
    words = []
    per_word = KEY_BITS // bits
    for first in range(0, tokens.shape[-1], per_word):
        word = torch.zeros(tokens.shape[:-1], dtype=torch.int64, device=tokens.device)
        for depth in range(first, first + per_word):
            word <<= bits
            if depth < tokens.shape[-1]:
                word |= tokens[..., depth]
        words.append(word)
    return torch.stack(words)


def in_order(items: Tensor, bits: int) -> Tensor:
    order = torch.arange(len(items), device=items.device)
    for word in pack(items, bits).flip(0):
        order = order[torch.argsort(word[order], stable=True)]
    return items[order]


def fill_bitmasks(item_set: ItemSet, walks: Walks, vocabulary: int) -> Tensor:
    """The host path's bitmasks for these rows: [steps, rows, words] int32, on the host."""
    bitmasks = torch.zeros(*walks.levels.shape, -(-vocabulary // 32), dtype=torch.int32)
    rows = bitmasks.flatten(0, 1).numpy()
    for row, state in zip(rows, host_states(item_set, walks), strict=True):
        state.fill_bitmask(row)
    return bitmasks


def host_states(item_set: ItemSet, walks: Walks) -> list[HostState]:
    states = []
    for tokens, level in zip(walks.tokens.flatten(0, 1).tolist(), walks.levels.flatten().tolist(), strict=True):
        states.append(HostState(item_set, [STOP]))
        assert states[-1].accept(tokens[:level])
    return states


def allowed_by(bitmask: Tensor, vocabulary: int) -> Tensor:
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


def apply_in_torch(logits: Tensor, bitmask: Tensor) -> None:
    logits.masked_fill_(~allowed_by(bitmask, logits.shape[1]), -torch.inf)


def xgrammar_apply() -> Apply | None:
    """xgrammar's own way to apply a bitmask, None where it is not installed. Its default on CUDA is a Triton kernel on
    the current stream that allocates nothing and reads nothing back, so that it can be captured.

    XGRAMMAR_KERNEL may name the one file of xgrammar's that holds it, on a machine without the package."""
    if path := os.environ.get("XGRAMMAR_KERNEL"):
        spec = importlib.util.spec_from_file_location("xgrammar_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        carried: Apply = module.apply_token_bitmask_inplace_triton
        return carried
    try:
        from xgrammar import apply_token_bitmask_inplace
    except ImportError:
        return None
    apply: Apply = apply_token_bitmask_inplace
    return apply


def copy_and_apply(apply: Apply, logits: Tensor, bitmask: Tensor, pinned: Tensor) -> None:
    bitmask.copy_(pinned, non_blocking=True)
    apply(logits, bitmask)


class Static:
    """The STATIC scheme (arXiv 2602.22647): every prefix is a state, [token, next state] pairs lie in CSR form, and the
    first levels are also tables that the tokens index.

    All rows of a step are at one level (`Walks.in_step`). A row reads as many pairs as the largest node of its
    level has, scatters them into a mask, and the chosen pair gives the next state.
    """

    def __init__(self, items: Tensor, vocabulary: int, positions: Tensor) -> None:
        """items: [N, length], sorted. positions: as in `Walks`; the states on the way to these items are kept."""
        self.vocabulary, self.length, device = vocabulary, items.shape[1], items.device
        self.dense: list[Tensor] = []  # next state by the tokens so far and the next one; 0 where there is none
        self.branching: list[int] = []
        self.on_the_way = [torch.zeros_like(positions)]
        differs = items[1:] != items[:-1]
        differs_at = torch.where(differs.any(1), differs.byte().argmax(1), self.length)
        counts, pairs = [], []
        parents = torch.zeros(len(items), dtype=torch.int64, device=device)
        first_parent, parent_count = 0, 1
        for depth in range(self.length):
            is_new = torch.cat((torch.ones(1, dtype=torch.bool, device=device), differs_at <= depth))
            states = is_new.cumsum(0) + (first_parent + parent_count - 1)
            new_states = states[is_new]
            counts.append(torch.bincount(parents[is_new] - first_parent, minlength=parent_count))
            pairs.append(torch.stack((items[is_new, depth], new_states.int()), 1))
            self.branching.append(int(counts[-1].max()))
            self.on_the_way.append(states[positions])
            if depth < (2 if vocabulary <= MOST_DENSE else 1):
                table = torch.zeros([vocabulary] * (depth + 1), dtype=torch.int32, device=device)
                table[items[is_new, : depth + 1].long().unbind(1)] = new_states.int()
                self.dense.append(table)
            parents, first_parent, parent_count = states, first_parent + parent_count, len(new_states)
        self.forbidden = [table == 0 for table in self.dense]
        self.starts = torch.cat((counts[0][:1] * 0, torch.cat(counts).cumsum(0))).int()
        pairs.append(pairs[0].new_zeros(max(self.branching), 2))  # a row is read to the end of its level's largest
        self.pairs = torch.cat(pairs)
        self.lanes = torch.arange(max(self.branching), device=device)

    def steps(self, walks: Walks, logits: list[Tensor]) -> list[Step]:
        steps: list[Step] = []
        for i, target in enumerate(logits):
            level = i % self.length
            if level < len(self.dense):
                path = walks.tokens[i, :, : level + 1].long().unbind(1)
                steps.append(partial(self.dense_step, level, path, target))
            else:
                states, following = (self.on_the_way[level + k][i, : len(target)] for k in range(2))
                # Edges are numbered as the states that they lead to, which begin at 1.
                chosen = following - 1 - self.starts[states]
                steps.append(partial(self.sparse_step, level, states, chosen[:, None], target))
        return steps

    def dense_step(self, level: int, path: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        logits.masked_fill_(self.forbidden[level][path[:-1]], -torch.inf)
        return self.dense[level][path]

    def sparse_step(self, level: int, states: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        first, end = self.starts[states, None], self.starts[states + 1, None]
        edges = first + self.lanes[: self.branching[level]]
        pairs = self.pairs[edges]
        tokens = torch.where(edges < end, pairs[..., 0], self.vocabulary).long()
        forbidden = torch.ones(len(logits), self.vocabulary + 1, dtype=torch.bool, device=logits.device)
        forbidden.scatter_(1, tokens, False)
        logits.masked_fill_(forbidden[:, : self.vocabulary], -torch.inf)
        return pairs[..., 1].gather(1, chosen)


class Ppv:
    """PPV, the baseline of the STATIC paper: whether an item begins with a row's prefix and a candidate token is looked
    up by binary search among the sorted items. A row's state is its prefix."""

    def __init__(self, items: Tensor, bits: int) -> None:
        """items: [N, length], sorted."""
        self.bits, self.keys = bits, pack(items, bits)

    def steps(self, walks: Walks, logits: list[Tensor], candidates: int | None) -> list[Step]:
        """candidates: how many of the most probable tokens are looked up; all where None."""
        depths = torch.arange(walks.tokens.shape[2], device=walks.tokens.device)
        levels = walks.levels[:, :, None]
        # Each row's least key, what one more in its next token adds to it, and all ones behind that token.
        least = pack(torch.where(depths < levels, walks.tokens, 0), self.bits)
        unit = pack((depths == levels).int(), self.bits)
        behind = pack(torch.where(depths > levels, (1 << self.bits) - 1, 0), self.bits)
        return [
            partial(
                self.step, *(part[:, i, :, None].contiguous() for part in (least, unit, behind)), target, candidates
            )
            for i, target in enumerate(logits)
        ]

    def step(self, least: Tensor, unit: Tensor, behind: Tensor, logits: Tensor, candidates: int | None) -> None:
        if candidates is None:
            tokens = torch.arange(logits.shape[1], device=logits.device)
        else:
            tokens = logits.topk(candidates, sorted=False).indices
        wanted = least + unit * tokens
        at = self.count_below(wanted)
        found = (at < self.keys.shape[1]) & ~_below(wanted + behind, self.keys[:, at.clamp(max=self.keys.shape[1] - 1)])
        if candidates is None:
            logits.masked_fill_(~found, -torch.inf)
        else:
            forbidden = torch.ones_like(logits, dtype=torch.bool).scatter_(1, tokens, ~found)
            logits.masked_fill_(forbidden, -torch.inf)

    def count_below(self, wanted: Tensor) -> Tensor:
        """How many keys are below each wanted one."""
        count = self.keys.shape[1]
        at = torch.zeros(wanted.shape[1:], dtype=torch.int64, device=wanted.device)
        for bit in reversed(range(count.bit_length())):
            behind = at + (1 << bit)
            last = (behind - 1).clamp(max=count - 1)
            at = torch.where((behind <= count) & _below(self.keys[:, last], wanted), behind, at)
        return at


def _below(left: Tensor, right: Tensor) -> Tensor:
    below = left[-1] < right[-1]
    for word in reversed(range(len(left) - 1)):
        below = (left[word] < right[word]) | ((left[word] == right[word]) & below)
    return below


class CpuTrie:
    """The host path with its round trip: the tokens come from the device, each row's state and bitmask are computed on
    the host, and the bitmasks go to the device and are applied there."""

    def __init__(self, item_set: ItemSet, walks: Walks, logits: Tensor, apply: Apply) -> None:
        """walks: of one step; its last decoded token is what the device hands over."""
        self.logits, self.apply = logits, apply
        before = walks._replace(levels=(walks.levels - 1).clamp(min=0))
        self.states = host_states(item_set, before)
        # -1 where a request has just begun: no token yet.
        last = walks.tokens[0].gather(1, before.levels[0, :, None].long())[:, 0]
        self.tokens = torch.where(walks.levels[0] > 0, last, -1)
        words = -(-logits.shape[1] // 32)
        self.bitmask = torch.zeros(len(logits), words, dtype=torch.int32, device=logits.device)
        self.staging = torch.zeros(len(logits), words, dtype=torch.int32, pin_memory=logits.is_cuda)

    def step(self) -> None:
        for token, state, row in zip(self.tokens.tolist(), self.states, self.staging.numpy(), strict=True):
            if token >= 0:
                state.accept((token,))
            state.fill_bitmask(row)
        self.bitmask.copy_(self.staging, non_blocking=True)
        self.apply(self.logits, self.bitmask)

    def undo(self) -> None:
        for token, state in zip(self.tokens.tolist(), self.states, strict=True):
            state.rollback(int(token >= 0))
