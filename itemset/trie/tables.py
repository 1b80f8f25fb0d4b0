"""The trie of an item set as flat arrays, built in one pass over the sorted items.

Nodes are the prefixes that two or more items share, in level order; edges are in node order, labels ascending in a row.
If an item stands alone after its edge, the rest of it is a *tail*: plain tokens, not a chain of nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.trie import targets
from itemset.trie.pointers import Pointers, compiled, element, or32, put_element, set_bit, store32
from itemset.trie.rows import Rows, bounds, token_dtype
from itemset.trie.targets import BLOCK, MAX_TAIL_TOKENS, NO_BLOCK, put_leaf, set_bases

Room = Callable[[int, Any], NDArray[Any]]  # makes zeros: how many, of which type

NONE: NDArray[np.uint32] = np.zeros(0, np.uint32)
NONE.flags.writeable = False
MAX_INDEX = 2**31 - 5  # nodes and edges, each: a node's state is its number, and four marks come after the nodes


@dataclass(frozen=True, eq=False)
class Tables:
    """What a walk reads, on a device as on the host. Arrays are read-only. Of the items 2 5 7, 2 5 8 9 and 4 1:

        row_offsets   0     2     3     5             edges of node n are row_offsets[n] .. row_offsets[n + 1]
                      node 0      node 1  node 2      terminal: a bit a node, set if an item ends there
        labels        2  4        5       7  8        uint16 or uint32, ascending in a row
        targets       n  t        n       -  t        to the next node (n), into a tail (t), or the item ends (-)
        tails         1. 9.                           a marked token ends its tail

    A view alone has `alive` and `dead`.
    """

    row_offsets: NDArray[np.uint32]
    terminal: NDArray[np.uint32]  # [ceil(nodes / 32)]
    labels: NDArray[Any]
    # Counted, [ceil(edges / 64)] uint64, a bit that is set for t and -; stored, [edges] uint16 (uint32 if a tail has
    # over 1,056 tokens), all ones for -, else a distance from its block's base and, as the highest bit, t.
    targets: NDArray[Any]
    node_base: NDArray[np.uint32]  # [ceil(edges / 32)], the next node at each block: the nth n leads to node n
    # Stored, [ceil(edges / 32)], where a block's tails start, modulo 2^32; counted, [4 * levels], `targets.FIRST_EDGE`.
    tail_base: NDArray[np.uint32]
    # Token p is the token_bits + 1 bits from bit p * (token_bits + 1) on, the highest of them the mark. There is one
    # word more, so that two words can always be read.
    tails: NDArray[np.uint32]
    alive: NDArray[np.uint32]  # [ceil(edges / 32)], bit e: a walk may take edge e; empty if it may take all
    dead: NDArray[np.uint32]  # ascending: edges that none may take, TERMINAL + n for a node n at which no item may end
    token_bits: int  # that hold every token id of the set
    far_block: int  # the first block whose tails start at 2^32 or after it, NO_BLOCK if none do
    # Of a set that is steered: see `trie.potential`.
    potential: NDArray[np.uint32] = field(default_factory=lambda: NONE)
    boosted: NDArray[np.uint32] = field(default_factory=lambda: NONE)
    pointers: Pointers = field(init=False, repr=False)  # where the arrays lie, for compiled code

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in (*SECTIONS, *OF_VIEWS)}
        place = {name: one.__array_interface__["data"][0] if len(one) else 0 for name, one in arrays.items()}
        pointers = Pointers(
            **place, nodes=len(self.row_offsets) - 1, edges=len(self.labels), level_words=len(self.tail_base),
            tail_words=len(self.tails), dead_count=len(self.dead), boosted_count=len(self.boosted) // 2,
            token_bits=self.token_bits, far_block=self.far_block, label_bytes=self.labels.itemsize,
            target_bytes=self.targets.itemsize,
        )  # fmt: skip
        object.__setattr__(self, "pointers", pointers)

    def __reduce__(self) -> Any:
        """Without the pointers: a copy's arrays lie elsewhere."""
        return Tables, tuple(getattr(self, one.name) for one in fields(self) if one.init)

    @property
    def counted(self) -> bool:
        """Return whether `targets` are counted, not stored."""
        return self.targets.itemsize == 8

    @cached_property
    def terminal_rank(self) -> NDArray[np.uint32]:
        """Count the terminal nodes before each word of the bitmap, and in all: [words + 1]."""
        counts = np.unpackbits(self.terminal.view(np.uint8)).reshape(-1, 32).sum(axis=1, dtype=np.uint32)
        return np.append(np.uint32(0), np.cumsum(counts, dtype=np.uint32))

    @cached_property
    def largest_boost(self) -> float:
        """Return the most that a boost adds to an item's score, or takes from it."""
        values = self.potential if len(self.potential) else self.boosted[len(self.boosted) // 2 :]
        return float(np.abs(values.view(np.float32)).max(initial=0))

    @property
    def sections(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a whole set, by name: what a file and an arena hold."""
        names = (*SECTIONS, "potential") if len(self.potential) else SECTIONS
        return {name: getattr(self, name) for name in names}


SECTIONS = ("row_offsets", "terminal", "labels", "targets", "node_base", "tail_base", "tails")
OF_VIEWS = ("alive", "dead", "potential", "boosted")
TERMINAL = 1 << 31  # in `dead`: a node follows, not an edge


@dataclass(frozen=True)
class Trie:
    """The tables, and the counts that go with them."""

    tables: Tables
    items: int
    shortest: int
    longest: int
    level_nodes: tuple[int, ...]  # of each level, root first
    level_edges: tuple[int, ...]
    tail_tokens: int  # in all tails

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.tables.sections.values())


def build_trie(rows: Rows, lcp: NDArray[np.uint16], room: Room = np.zeros) -> tuple[Trie, NDArray[np.uint32]]:
    """Build the trie of sorted distinct rows, with lcp as `rows.sort_unique` gives it.

    room: where the tables come to lie. Returns the trie and `members` [N] uint32: the row of each item number. Items
    that stand alone after an edge come first, in edge order; after them come those that end at a node, in node order.
    Raises ItemSetError if nodes or edges pass MAX_INDEX, or tail tokens MAX_TAIL_TOKENS, before any table is made.
    """
    shortest, longest = rows.shortest, rows.longest
    per_level = np.zeros((COUNTS, longest + 2), np.int64)
    longest_tail = count(*rows.layout, lcp, per_level)
    per_level[NODES, 0] = 1
    token_bits = max(1, int(rows.tokens.max()).bit_length())
    length = longest if shortest == longest else 0
    levels = int(np.count_nonzero(per_level[EDGES]))
    target_type = targets.type_of_targets(length, levels, longest_tail)
    tables, starts = allocate(per_level, token_bits, target_type, length, room)
    members = room(len(rows), np.uint32)
    fill(*rows.cells, lcp, starts, tables.pointers, members)
    set_bases(tables.pointers)
    for array in tables.sections.values():
        array.flags.writeable = False
    nodes, edges = (tuple(per_level[count, :levels].tolist()) for count in (NODES, EDGES))
    tail_tokens = int(per_level[TAIL_TOKENS].sum())
    tables = replace(tables, far_block=targets.far_block_of(tables.targets, tables.tail_base, tail_tokens))
    return Trie(tables, len(rows), shortest, longest, nodes, edges, tail_tokens), members


NODES, EDGES, LEAVES, TAIL_TOKENS, TERMINALS = range(5)
COUNTS = 5  # what is counted of each level: [COUNTS, levels + 2 or more]


def shapes(
    nodes: int, edges: int, levels: int, tail_tokens: int, token_bits: int, target_type: Any
) -> dict[str, tuple[int, Any]]:
    """Return how many elements each of SECTIONS has, and of which type."""
    counted, blocks = np.dtype(target_type).itemsize == 8, -(-edges // BLOCK)
    return {
        "row_offsets": (nodes + 1, np.uint32),
        "terminal": (-(-nodes // 32), np.uint32),
        "labels": (edges, token_dtype((1 << token_bits) - 1)),
        "targets": (-(-edges // 64) if counted else edges, target_type),
        "node_base": (blocks, np.uint32),
        "tail_base": (targets.OF_A_LEVEL * levels if counted else blocks, np.uint32),
        "tails": (-(-tail_tokens * (token_bits + 1) // 32) + 1, np.uint32),
    }


def allocate(
    per_level: NDArray[np.int64], token_bits: int, target_type: Any, length: int, room: Room = np.zeros
) -> tuple[Tables, NDArray[np.int64]]:
    """Return tables for what `count` has counted, and for each level where `fill` begins.

    target_type: of `type_of_targets`. length: tokens of each item, if targets are counted. Raises as `build_trie`.
    """
    totals = per_level.sum(axis=1)
    nodes, edges, tail_tokens = (int(totals[i]) for i in (NODES, EDGES, TAIL_TOKENS))
    each = ("nodes", nodes, MAX_INDEX), ("edges", edges, MAX_INDEX), ("tail tokens", tail_tokens, MAX_TAIL_TOKENS)
    for name, total, limit in each:
        if total > limit:
            raise ItemSetError(f"the set needs {total:,} {name}, the limit is {limit:,}: split the set")
    levels = int(np.count_nonzero(per_level[EDGES]))
    sections = shapes(nodes, edges, levels, tail_tokens, token_bits, target_type)
    arrays = {name: room(*shape) for name, shape in sections.items()}
    tables = Tables(**arrays, alive=NONE, dead=NONE, token_bits=token_bits, far_block=NO_BLOCK)
    starts = np.cumsum(per_level, axis=1) - per_level
    if tables.counted:
        targets.set_levels(tables.tail_base, starts[[EDGES, LEAVES, TAIL_TOKENS]], length)
    starts[TERMINALS] += totals[LEAVES]
    tables.row_offsets[nodes] = edges
    return tables, starts


@compiled
def count(offsets, row_width, lcp, per_level):  # type: ignore[no-untyped-def]
    """Count each level's nodes (but the root), edges, leaves, tail tokens and terminals; return the longest tail."""
    longest_tail = 0
    for i in range(len(lcp) - 1):
        item, end = bounds(offsets, row_width, i)
        length = end - item
        left, right = np.int64(lcp[i]), np.int64(lcp[i + 1])
        alone = max(left, right)
        for depth in range(left + 1, right + 1):
            per_level[NODES, depth] += 1
        for depth in range(left, min(alone, length - 1) + 1):
            per_level[EDGES, depth] += 1
        if alone < length:
            tail = length - alone - 1
            per_level[LEAVES, alone] += 1
            per_level[TAIL_TOKENS, alone] += tail
            longest_tail = max(longest_tail, tail)
        else:
            per_level[TERMINALS, alone] += 1
    return longest_tail


@compiled
def fill(tokens, size, offsets, row_width, lcp, cursor, tables, members):  # type: ignore[no-untyped-def]
    """Fill the tables, zeros before, with one write position for each level; `targets` for `set_bases` to finish."""
    width = tables.token_bits + 1
    last_bit = np.int64(1) << tables.token_bits
    store32(tables.row_offsets, 0, 0)
    for i in range(len(lcp) - 1):
        item, end = bounds(offsets, row_width, i)
        length = end - item
        left, right = np.int64(lcp[i]), np.int64(lcp[i + 1])
        alone = max(left, right)
        for depth in range(left + 1, right + 1):
            node = cursor[NODES, depth]
            cursor[NODES, depth] += 1
            store32(tables.row_offsets, node, cursor[EDGES, depth])
        for depth in range(left, min(alone, length - 1) + 1):
            edge = cursor[EDGES, depth]
            cursor[EDGES, depth] += 1
            put_element(tables.labels, tables.label_bytes, edge, element(tokens, size, item + depth))
        if alone == length:
            node = cursor[NODES, length] - 1
            set_bit(tables.terminal, node)
            members[cursor[TERMINALS, length]] = i
            cursor[TERMINALS, length] += 1
            continue
        tail = length - alone - 1
        put_leaf(tables, cursor[EDGES, alone] - 1, tail)
        members[cursor[LEAVES, alone]] = i
        cursor[LEAVES, alone] += 1
        position = cursor[TAIL_TOKENS, alone]
        cursor[TAIL_TOKENS, alone] += tail
        at, word = position * width, np.int64(0)  # bits below `at` of its word are 0 in `word`
        for k in range(length - tail, length):
            entry = element(tokens, size, item + k) | (last_bit if k == length - 1 else np.int64(0))
            word |= entry << (at & 31)
            if (at & 31) + width >= 32:
                or32(tables.tails, at >> 5, word)
                word = word >> 32 & 0xFFFFFFFF
            at += width
        if tail:
            or32(tables.tails, at >> 5, word)
