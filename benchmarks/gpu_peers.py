"""What a step on the GPU is measured beside: the items and states that all methods are measured at, and the other
methods in torch, from their published descriptions.

A method offers its steps as functions without arguments, whose tensors exist before they are called: so each can be
captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from itemset import ItemSet
from itemset.masking.arena import Arena, room_for
from itemset.masking.host import HostState
from itemset.masking.slots import Slots

Step = Callable[[], Any]
Apply = Callable[[Tensor, Tensor], Any]  # of a bitmask [rows, words] to logits [rows, vocabulary], in place

LENGTH = 8  # tokens of an item that is measured
STOP = 0  # every row's stop token. No row is measured where it is allowed
MOST_DENSE = 2_048  # codes up to which STATIC keeps its second level as a table of codes x codes
KEY_BITS = 63


def loaded(item_set: ItemSet, device: str) -> tuple[Arena, int]:
    """An arena with one set, and the set's number."""
    arena = Arena(room_for(item_set), device, kernels="triton")
    return arena, arena.acquire(item_set)


def slots_of(arena: Arena, rows: int, **given: Any) -> Slots:
    """Slots whose steps run in Triton, in its interpreter on a CPU."""
    return Slots(arena, rows, **{"max_rows": rows, **given})


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


def bitmasks_of(item_set: ItemSet, walks: Walks, vocabulary: int) -> Tensor:
    """The host path's bitmasks for these rows: [steps, rows, words] int32, on the host."""
    bitmasks = torch.zeros(*walks.levels.shape, -(-vocabulary // 32), dtype=torch.int32)
    rows, walked = bitmasks.flatten(0, 1).numpy(), walks.tokens.flatten(0, 1).tolist()
    for row, tokens, level in zip(rows, walked, walks.levels.flatten().tolist(), strict=True):
        state = HostState(item_set, [STOP])
        assert state.accept(tokens[:level])
        state.fill_bitmask(row)
    return bitmasks


def allowed_by(bitmask: Tensor, vocabulary: int) -> Tensor:
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


def xgrammar_apply() -> Apply | None:
    """xgrammar's own way to apply a bitmask, None where it is not installed. Its default on CUDA is a Triton kernel on
    the current stream that allocates nothing and reads nothing back, so that it can be captured."""
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

    def children(self, level: int, states: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the authors' kernel: the logits of each row's children, their tokens and next states, -inf and the
        vocabulary's size where a row has fewer."""
        first, end = self.starts[states, None], self.starts[states + 1, None]
        edges = first + self.lanes[: self.branching[level]]
        pairs, valid = self.pairs[edges], edges < end
        tokens = torch.where(valid, pairs[..., 0], self.vocabulary).long()
        found = logits.gather(1, tokens.clamp(max=self.vocabulary - 1))
        return found.masked_fill_(~valid, -torch.inf), tokens, pairs[..., 1]

    def masked(self, level: int, at: Tensor | tuple[Tensor, ...], logits: Tensor) -> Tensor:
        """Return masked logits, not in place, as fast as can be. at: the states, or the path of `dense_step`."""
        if isinstance(at, tuple):
            return torch.where(self.forbidden[level][at[:-1]], -torch.inf, logits)
        found, tokens, _ = self.children(level, at, logits)
        return self.scattered(found, tokens)

    def scattered(self, found: Tensor, tokens: Tensor) -> Tensor:
        """Return the children in rows of -inf, which have a place more for what there is too much."""
        rows = found.new_full((len(found), self.vocabulary + 1), -torch.inf).scatter_(1, tokens, found)
        return rows[:, : self.vocabulary]

    def sparse_step(self, level: int, states: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        found, tokens, following = self.children(level, states, logits)
        logits.copy_(self.scattered(found, tokens))
        return following.gather(1, chosen)
