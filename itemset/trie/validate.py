"""What a file's tables must be before anything walks them, and the digest that tells two sets apart."""

import hashlib
from collections.abc import Callable

import numpy as np

from itemset.trie.file import pieces
from itemset.trie.pointers import bit, compiled, first_edge, label, load32
from itemset.trie.rows import MAX_ITEM_TOKENS
from itemset.trie.tables import Tables, Trie, shapes
from itemset.trie.targets import MAX_TAIL_TOKENS, set_levels, tails_of, type_of_targets
from itemset.trie.walk import END, TAIL, follow, tail_entry

_DTYPES = {"uint16", "uint32", "uint64"}


def check_shapes(trie: Trie) -> None:
    """Raise ValueError if an array is not as walks rely on, or a row leaves the edges. Reads the smallest arrays."""
    tables, levels = trie.tables, len(trie.level_nodes)
    for holds, what in (
        (levels == len(trie.level_edges) > 0, f"{levels} levels of nodes, {len(trie.level_edges)} of edges"),
        (min((*trie.level_nodes, *trie.level_edges), default=0) > 0, "a level without nodes or edges"),
        (1 <= tables.token_bits <= 31, f"tokens of {tables.token_bits} bits"),
        (1 <= trie.shortest <= trie.longest <= MAX_ITEM_TOKENS, f"items of {trie.shortest} to {trie.longest} tokens"),
        (0 <= trie.tail_tokens <= MAX_TAIL_TOKENS, f"{trie.tail_tokens} tail tokens"),
    ):
        if not holds:
            raise ValueError(f"its header counts {what}")
    nodes, edges = sum(trie.level_nodes), sum(trie.level_edges)
    expected = shapes(nodes, edges, levels, trie.tail_tokens, tables.token_bits, tables.targets.dtype)
    for field, (count, dtype) in expected.items():
        array = getattr(tables, field)
        if len(array) != count or array.dtype != dtype or array.dtype.name not in _DTYPES:
            raise ValueError(f"section {field} does not fit the header")
    if tables.counted:
        _check_levels(trie)
    rows = tables.row_offsets
    if rows[0] != 0 or rows[-1] != edges or np.any(rows[1:] < rows[:-1]):
        raise ValueError("section row_offsets does not ascend to the number of edges")
    items = edges - (nodes - 1) + np.count_nonzero(np.unpackbits(tables.terminal.view(np.uint8)))
    if trie.items != items:
        raise ValueError("its number of items does not fit its tables")


def _check_levels(trie: Trie) -> None:
    """Raise ValueError unless counted targets go with the header, and the levels' words are those that it makes.

    Walks on the host and on a device look for an edge's level in different ways: of other words they might differ.
    """
    length, levels, edges = trie.longest, len(trie.level_edges), np.array(trie.level_edges)
    leaves = edges - np.array((*trie.level_nodes[1:], 0))
    if trie.shortest != length or type_of_targets(length, levels, 0) != np.uint64:
        raise ValueError("section targets does not fit the header")
    tails = leaves * (length - 1 - np.arange(levels))
    words = np.zeros_like(trie.tables.tail_base)
    if (tails >= 0).all() and levels <= length:
        counts = np.stack((edges, leaves, tails))
        set_levels(words, np.cumsum(counts, axis=1) - counts, length)
    if tails.sum() != trie.tail_tokens or not np.array_equal(words, trie.tables.tail_base):
        raise ValueError("section tail_base does not fit the header")


def check_items(trie: Trie) -> None:
    """Raise ValueError unless the tables are a trie of `build_trie` with these counts. Reads all of them."""
    if (extent := lengths_in_order(trie)) is None:
        raise ValueError("its tables are no trie")
    if extent != (trie.shortest, trie.longest):
        raise ValueError(f"its items have {extent[0]} to {extent[1]} tokens, not {trie.shortest} to {trie.longest}")


def lengths_in_order(trie: Trie) -> tuple[int, int] | None:
    """Return the tokens of the shortest and of the longest item, None unless the tables are a trie of these levels."""
    extent = _in_order(trie.tables.pointers, trie.tail_tokens, np.array(trie.level_nodes), np.array(trie.level_edges))
    return (int(extent[0]), int(extent[1])) if extent[1] else None


@compiled
def _in_order(tables, tail_tokens, level_nodes, level_edges):  # type: ignore[no-untyped-def]
    """Do `lengths_in_order`, with 0, 0 for None.

    Labels ascend in their rows, none of which is empty. In the order of the edges, nodes count up from 1 and tails
    follow without gaps, and each block's bases say how far both have come. Items end at nodes but the root alone.
    """
    node, parent, edges, position = np.int64(1), np.int64(0), np.int64(0), np.int64(0)
    shortest, longest = np.int64(MAX_ITEM_TOKENS + 1), np.int64(0)
    for depth in range(len(level_nodes)):
        for _ in range(level_nodes[depth]):
            first, end = first_edge(tables, parent), first_edge(tables, parent + 1)
            parent += 1
            if first == end:
                return 0, 0
            for edge in range(first, end):
                if edge & 31 == 0 and (
                    load32(tables.node_base, edge >> 5) != node or tails_of(tables, edge >> 5) != position
                ):
                    return 0, 0
                if edge > first and label(tables, edge) <= label(tables, edge - 1):
                    return 0, 0
                state, length = follow(tables, edge), np.int64(depth + 1)
                if state == node:
                    node += 1
                    if not bit(tables.terminal, state):
                        continue
                elif state != END:
                    if state != TAIL + position:
                        return 0, 0
                    entry = np.int64(0)
                    while entry >> tables.token_bits == 0:
                        entry = tail_entry(tables, position)
                        position, length = position + 1, length + 1
                shortest, longest = min(shortest, length), max(longest, length)
        edges += level_edges[depth]
        below = level_nodes[depth + 1] if depth + 1 < len(level_nodes) else 0
        if node != parent + below or first_edge(tables, parent) != edges or position > tail_tokens:
            return 0, 0
    last = load32(tables.terminal, parent >> 5) >> (parent & 31) if parent & 31 else np.int64(0)
    if last or bit(tables.terminal, 0) or position != tail_tokens:
        return 0, 0
    return shortest, longest


def digest_of(tables: Tables, on_read: Callable[[int], object] = lambda nbytes: None) -> str:
    """Return a hex digest that is equal for equal tables. on_read: called with the bytes of each piece."""
    digest = hashlib.blake2b(tables.token_bits.to_bytes(4, "little"), digest_size=16)
    for array in tables.sections.values():
        digest.update(array.dtype.str.encode() + len(array).to_bytes(8, "little"))
        for piece in pieces(array):
            digest.update(piece)
            on_read(len(piece))
    return digest.hexdigest()
