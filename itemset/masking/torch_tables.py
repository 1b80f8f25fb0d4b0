"""Reading an arena's tables in plain torch, for `ranking`'s torch kernels alone."""

from __future__ import annotations

import torch
from torch import Tensor

from itemset.masking.arena import (
    ALIVE,
    COUNTED,
    DEAD_COUNT,
    DEAD_LIST,
    FAR_BLOCK,
    LABELS,
    NARROW_LABELS,
    NARROW_TARGETS,
    NO_BITS,
    NODE_BASE,
    ROW_OFFSETS,
    TAIL_BASE,
    TAILS,
    TARGETS,
    TERMINAL,
    WIDTHS,
    Arena,
)
from itemset.masking.batch import LOCAL
from itemset.trie import tables
from itemset.trie.targets import FAR, FIRST_EDGE, LENGTH, OF_A_LEVEL, START, START_HIGH
from itemset.trie.walk import END, STATE_BITS, TAIL, WAITING

_LEVELS, _ROUNDS = 16, 32  # of counted targets; of a search in a list of dead entries


def may_end(arena: Arena, states: Tensor) -> Tensor:
    """Return whether an item may end at each state: bool, in the shape of states."""
    return TablesOf(arena, states).may_end(states & LOCAL)


class TablesOf:
    """The tables of each state's set. All arguments and results are int64 tensors of the states' shape."""

    def __init__(self, arena: Arena, states: Tensor) -> None:
        self.arena, self.states = arena, states
        self.fields = arena.sets[states >> STATE_BITS]

    def field(self, column: int) -> Tensor:
        return self.fields[..., column]

    def word(self, column: int, index: Tensor, *, each: bool = False) -> Tensor:
        """each: index is [states, any], or broadcasts to that."""
        place = self.field(column)
        at = (place[..., None] if each else place) + index
        # Read flat: on a CPU several times faster than by an index of more dimensions.
        return self.arena.words.index_select(0, at.flatten()).view(at.shape).long() & 0xFFFFFFFF

    def element(self, column: int, index: Tensor, narrow_bit: int) -> Tensor:
        narrow = self.field(WIDTHS) & narrow_bit != 0
        word = self.word(column, torch.where(narrow, index >> 1, index))
        return torch.where(narrow, (word >> ((index & 1) * 16)) & 0xFFFF, word)

    def label(self, edge: Tensor) -> Tensor:
        return self.element(LABELS, edge, NARROW_LABELS)

    def is_alive(self, edge: Tensor) -> Tensor:
        """Return whether a walk may take each edge, as `walk.is_alive`."""
        place = self.field(ALIVE)
        word = self.word(ALIVE, torch.where(place == NO_BITS, -place, edge >> 5))
        alive = (place == NO_BITS) | ((word >> (edge & 31)) & 1 != 0)
        return alive & ~self._is_dead(edge)

    def _is_dead(self, entry: Tensor) -> Tensor:
        low, count = torch.zeros_like(entry), self.field(DEAD_COUNT)
        high = count.expand_as(entry)
        for _ in range(_ROUNDS):
            middle = (low + high) >> 1
            below = (low < high) & (self.word(DEAD_LIST, torch.where(low < high, middle, 0)) < entry)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        return (low < count) & (self.word(DEAD_LIST, torch.where(low < count, low, 0)) == entry)

    def row(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first edge and the one after the last; equal if the state is no node."""
        node = torch.where(local < WAITING, local, 0)
        first, end = self.word(ROW_OFFSETS, node), self.word(ROW_OFFSETS, node + 1)
        return first, torch.where(local < WAITING, end, first)

    def may_end(self, local: Tensor) -> Tensor:
        node = torch.where(local < WAITING, local, 0)
        bit = (self.word(TERMINAL, node >> 5) >> (node & 31)) & 1
        ends = bit != 0
        ends = ends & ~self._is_dead(tables.TERMINAL + node)
        return (local == END) | ((local < WAITING) & ends)

    def tail_entry(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token at this position of the tails, and whether it is the last of its tail."""
        token_bits = self.field(WIDTHS) & 0xFF
        at = torch.where(local >= TAIL, local - TAIL, 0) * (token_bits + 1)
        shift = at & 31
        low, high = self.word(TAILS, at >> 5), self.word(TAILS, (at >> 5) + 1)
        entry = (low >> shift) | (high << (32 - shift))
        return entry & ((1 << token_bits) - 1), (entry >> token_bits) & 1 != 0

    def follow(self, edge: Tensor) -> Tensor:
        """Return the state after an edge, as `walk.follow`."""
        widths = self.field(WIDTHS)
        counted = widths & COUNTED != 0
        after = self._follow_counted(torch.where(counted, edge, 0), torch.where(counted, widths >> FAR_BLOCK, 0))
        return torch.where(counted, after, self._follow_stored(torch.where(counted, 0, edge)))

    def _follow_counted(self, edge: Tensor, size: Tensor) -> Tensor:
        """size: words of `Tables.tail_base`."""
        leaves, bit = self.word(TARGETS, edge >> 5), edge & 31
        nodes = self.word(NODE_BASE, edge >> 5) + bit - _ones(leaves & ((1 << bit) - 1))
        at = torch.arange(_LEVELS * OF_A_LEVEL, device=edge.device)
        there = at < size[..., None]
        words = self.word(TAIL_BASE, torch.where(there, at, 0), each=True).unflatten(-1, (_LEVELS, OF_A_LEVEL))
        reached = there[..., ::OF_A_LEVEL] & (edge[..., None] >= words[..., FIRST_EDGE])
        level = (reached.sum(-1, keepdim=True) - 1).clamp(min=0)
        low, high, length = (
            torch.take_along_dim(words[..., part], level, -1)[..., 0] for part in (START, START_HIGH, LENGTH)
        )
        start = low | high << 32
        tail = torch.where(length == 0, END, start + (edge - nodes + 1) * length + TAIL)
        return torch.where((leaves >> bit) & 1 != 0, tail, nodes)

    def _follow_stored(self, edge: Tensor) -> Tensor:
        target = self.element(TARGETS, edge, NARROW_TARGETS)
        leaf = torch.where(self.field(WIDTHS) & NARROW_TARGETS != 0, 1 << 15, 1 << 31)
        node = self.word(NODE_BASE, edge >> 5) + target
        far = torch.where(edge >> 5 >= self.field(WIDTHS) >> FAR_BLOCK, FAR, 0)
        tail = self.word(TAIL_BASE, edge >> 5) + far + target - leaf + TAIL
        return torch.where(target == 2 * leaf - 1, END, torch.where(target >= leaf, tail, node))


def _ones(word: Tensor) -> Tensor:
    """Count the bits set in each word of 32 bits. Torch has no operation for it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 0xFF
