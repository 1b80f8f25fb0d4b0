"""What a file's tables must be before anything walks them, and the digest that tells two sets apart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from itemset.trie.file import pieces
from itemset.trie.jit import compiled
from itemset.trie.numbering import in_order
from itemset.trie.pointers import bit, first_edge
from itemset.trie.rows import MAX_ITEM_TOKENS, token_dtype
from itemset.trie.tables import Tables, Trie
from itemset.trie.targets import BLOCK, MAX_TAIL_TOKENS, is_leaf, set_levels, sizes, tail_at, type_of_targets


def check_shapes(trie: Trie) -> None:
    """Raise ValueError if an array lacks the type or length that the walks rely on, or a row leaves the edges.

    Reads `row_offsets` and `terminal`, the smallest of the arrays.
    """
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
    targets, tail_bases = sizes(tables.targets.dtype, edges, levels)
    expected = {
        "row_offsets": (nodes + 1, {"uint32"}),
        "terminal": (-(-nodes // 32), {"uint32"}),
        "labels": (edges, {token_dtype((1 << tables.token_bits) - 1).__name__}),
        "targets": (targets, {"uint16", "uint32", "uint64"}),
        "node_base": (-(-edges // BLOCK), {"uint32"}),
        "tail_base": (tail_bases, {"uint32"}),
        "tails": (-(-trie.tail_tokens * (tables.token_bits + 1) // 32) + 1, {"uint32"}),
    }
    for field, (count, dtypes) in expected.items():
        array = getattr(tables, field)
        if len(array) != count or array.dtype.name not in dtypes:
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
    length, levels = trie.longest, len(trie.level_edges)
    edges = np.array(trie.level_edges)
    leaves = edges - np.array((*trie.level_nodes[1:], 0))
    if trie.shortest != length or type_of_targets(length, levels, 0) != np.uint64:
        raise ValueError("section targets does not fit the header")
    tails = leaves * (length - 1 - np.arange(levels))
    words = np.zeros_like(trie.tables.tail_base)
    if (tails >= 0).all() and levels <= length:
        before_edges, before_leaves, before_tails = (np.cumsum(counts) - counts for counts in (edges, leaves, tails))
        set_levels(words, before_edges, before_leaves, before_tails, length)
    if tails.sum() != trie.tail_tokens or not np.array_equal(words, trie.tables.tail_base):
        raise ValueError("section tail_base does not fit the header")


def check_items(trie: Trie) -> None:
    """Raise ValueError unless the tables are a trie as `build_trie` makes it, and its counts are theirs.

    Reads every tail once, and every edge twice. Each item then leads to its number, and back.
    """
    tables = trie.tables
    if not in_order(tables.pointers, trie.tail_tokens):
        raise ValueError("its tables are no trie")
    nodes = len(tables.row_offsets) - 1
    ends = np.unpackbits(tables.terminal.view(np.uint8), bitorder="little")
    if ends[0] or ends[nodes:].any():
        raise ValueError("items end where there is no node")
    levels = np.array(trie.level_nodes), np.array(trie.level_edges)
    shortest, longest = lengths(tables.pointers, trie.tail_tokens, *levels)
    if not longest:
        raise ValueError("its levels do not fit its tables")
    if (shortest, longest) != (trie.shortest, trie.longest):
        raise ValueError(f"its items have {shortest} to {longest} tokens, not {trie.shortest} to {trie.longest}")


@compiled
def lengths(tables, tail_tokens, level_nodes, level_edges):  # type: ignore[no-untyped-def]
    """Return the tokens of the shortest and of the longest item; 0, 0 if a level does not have so many nodes.

    The tables are in order: a tail ends where the next one begins, so the tails themselves are not read.
    """
    edge, node = 0, 1
    shortest, longest = np.int64(1 << 62), np.int64(0)
    tail, above = np.int64(-1), np.int64(0)  # where the last tail begins, and the tokens that lead there
    for depth in range(len(level_edges)):
        first = node
        for _ in range(level_edges[depth]):
            length, leaf = np.int64(depth + 1), is_leaf(tables, edge)
            begins = tail_at(tables, edge) if leaf else np.int64(-1)
            edge += 1
            if begins >= 0:
                if tail >= 0:
                    shortest, longest = min(shortest, above + begins - tail), max(longest, above + begins - tail)
                tail, above = begins, length
                continue
            if not leaf:
                node += 1
                if not bit(tables.terminal, node - 1):
                    continue
            shortest, longest = min(shortest, length), max(longest, length)
        below = level_nodes[depth + 1] if depth + 1 < len(level_nodes) else 0
        if node - first != below or first_edge(tables, first) != edge:
            return 0, 0
    if tail >= 0:
        shortest, longest = min(shortest, above + tail_tokens - tail), max(longest, above + tail_tokens - tail)
    return shortest, longest


def digest_of(tables: Tables, on_read: Callable[[int], object] = lambda nbytes: None) -> str:
    """Return a hex digest that is equal for equal tables. on_read: told of the bytes of each piece that was read."""
    digest = hashlib.blake2b(tables.token_bits.to_bytes(4, "little"), digest_size=16)
    for array in tables.sections.values():
        digest.update(array.dtype.str.encode() + len(array).to_bytes(8, "little"))
        for piece in pieces(array):
            digest.update(piece)
            on_read(len(piece))
    return digest.hexdigest()
