"""What an item set costs: its levels, its size in the published STATIC layout, and the least that any index takes."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.trie.attributes import kind_of
from itemset.trie.pointers import compiled, first_edge, label
from itemset.trie.walk import END, TAIL, follow, is_terminal, tail_entry

_SHOWN_LEVELS = 24


def describe(s: ItemSet) -> list[str]:
    """Return lines for people: the levels, then the index's bytes an item beside STATIC's and the least possible."""
    every = levels(s)
    shown = len(every) if len(every) <= _SHOWN_LEVELS else _SHOWN_LEVELS - 1
    rows = [(f"{i}", level) for i, level in enumerate(every[:shown])]
    if shown < len(every):
        rows.append((f"{shown} to {len(every) - 1}", every[shown:].sum(0)))
    lines = [f"{'level':<12} {'nodes':>16} {'edges':>16} {'tail tokens':>16}"]
    lines += [f"{name:<12} {nodes:>16,} {edges:>16,} {tails:>16,}" for name, (nodes, edges, tails) in rows]
    lines += ["", f"{'compared':<12} {'bytes':>16} {'bytes/item':>11}"]
    for name, size, what in costs(s):
        figures = f"{'-':>16} {'-':>11}" if size is None else f"{size:>16,.0f} {size / len(s):>11.2f}"
        lines.append(f"{name:<12} {figures}  {what}")
    return lines


def costs(s: ItemSet) -> list[tuple[str, float | None, str]]:
    """Return names, bytes and remarks: of this index, of STATIC's layout (None if it has none), of the least."""
    static = static_bytes(s)
    exact = "number of such sets" if s.shortest == s.longest else "estimate from its tokens and lengths"
    return [
        ("this index", s.nbytes, "keys not counted"),
        ("STATIC", static, "published layout" if static else "no layout: it takes items of one length, 2 or more"),
        ("information", least_bytes(s), f"log2 of the {exact}"),
    ]


def levels(s: ItemSet) -> NDArray[np.int64]:
    """Return of each level, root first, [levels, 3]: its nodes, its edges, and the tokens in the tails after these."""
    tails = _lone_items(s) * np.arange(s.longest - 1, s.longest - 1 - len(s.trie.level_nodes), -1)
    if s.shortest != s.longest:
        tails = count(s, tails=True).tail_tokens
    return np.column_stack((s.trie.level_nodes, s.trie.level_edges, tails))


def static_bytes(s: ItemSet) -> int | None:
    """Return the bytes of the STATIC layout for the same set; None, for it has none, if lengths differ or are 1.

    Counted from the arrays that the authors' own `build_static_index` makes (static_decoding/csr_utils.py of
    github.com/youtube/static-constraint-decoding, the code of "Vectorizing the Trie", arXiv 2602.22647). With V tokens,
    numbered from 0 without gaps, items of L tokens, P(k) distinct prefixes of k tokens and d = 2 dense levels
    (1 if L = 2):

        packed_csr               8 (P(2) + ... + P(L) + V)
        indptr                   4 (P(2) + ... + P(L - 1) + V + 3)
        start_mask               V
        dense_mask, dense_states 5 V^d
    """
    if s.shortest != s.longest or s.longest < 2:
        return None
    # A prefix of k tokens is an edge at level k - 1, or in the tail of an item that stood alone before.
    below = s.longest - len(s.trie.level_edges)
    alone = np.pad(np.cumsum([0, *_lone_items(s)]), (0, below), "edge")[:-1]
    prefixes, vocab = np.pad(s.trie.level_edges, (0, below)) + alone, len(s.token_ids)
    csr = 8 * (int(prefixes[1:].sum()) + vocab)
    indptr = 4 * (int(prefixes[1:-1].sum()) + vocab + 3)
    return int(csr + indptr + vocab + 5 * vocab ** min(2, s.longest - 1))


def least_bytes(s: ItemSet) -> float:
    """Return the bytes that name the set among all sets like it. No index of such sets takes fewer on average.

    For N items of one length L over V distinct tokens, log2 of the number of such sets: log2 C(V^L, N) / 8. For items
    of different lengths an estimate, since there is no such number: N items drawn independently, each a length and
    then its tokens, by the frequencies that lengths and tokens have in the set (zero-order entropies H), in an order
    that is free: (N H(length) + T H(token) - log2 N!) / 8, with T tokens in all items. Items that resemble one another
    more than that, as texts do, could be told apart with less.
    """
    if s.shortest == s.longest:
        return _log2_choose(len(s.token_ids) ** s.longest, len(s)) / 8
    counts = count(s, tails=True)
    order_is_free = math.lgamma(len(s) + 1) / math.log(2)
    return max(0.0, _entropy_bits(counts.lengths) + _entropy_bits(counts.tokens) - order_is_free) / 8


def _lone_items(s: ItemSet) -> NDArray[np.int64]:
    """Count the edges of each level after which an item stands alone."""
    return np.subtract(s.trie.level_edges, [*s.trie.level_nodes[1:], 0])


def _log2_choose(universe: int, chosen: int) -> float:
    """Return log2 of the number of subsets of `chosen` members; accurate at any size."""
    chosen = min(chosen, universe - chosen)
    if chosen <= 0:
        return 0.0
    if universe < 2**20:
        ln = math.lgamma(universe + 1) - math.lgamma(universe - chosen + 1)
    else:  # the difference by Stirling's formula: the two terms would agree in nearly all of their digits
        share = chosen / universe
        spread = chosen if share < 1e-9 else (universe - chosen + 0.5) * -math.log1p(-share)
        ln = chosen * math.log(universe) + spread - chosen
    return (ln - math.lgamma(chosen + 1)) / math.log(2)


def _entropy_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits of a sequence with these counts, if each symbol costs -log2 of its frequency."""
    seen = counts[counts > 0].astype(np.float64)
    return float(-(seen * np.log2(seen / seen.sum())).sum())


def facts(s: ItemSet) -> list[tuple[str, str]]:
    """Return what an item set holds, as names and values for people."""
    return [
        ("items", f"{len(s):,}"),
        ("duplicates", f"{s.duplicates:,} folded"),
        ("keys", f"{len(s.keys):,}; items with several: {s.shared:,}"),
        ("attributes", ", ".join(f"{field.name} ({kind_of(field.type)})" for field in s.attributes.schema) or "none"),
        ("tokens", f"{s.shortest} (shortest item) to {s.longest} (longest)"),
        ("size", f"{s.nbytes:,} bytes, {s.nbytes / len(s):.2f} an item, keys not counted"),
    ]


def print_table(rows: list[tuple[str, str]]) -> None:
    """Print a line for each name and value."""
    for name, value in rows:
        print(f"{name:<12} {value}")


class Counts(NamedTuple):
    """Counts over all items, int64; the first four by how many tokens came before.

    shared: items whose prefix others share. chosen: those of them after whose prefix more than one token, or an end and
    a token, may come. widest: tokens that may follow one prefix, at most. tail_tokens: in the tails after these edges.
    lengths: items of each length. tokens: of all items, by their place in `token_ids`. by_first: items below each edge
    of the root. ends: items that others begin with.
    """

    shared: NDArray[np.int64]
    chosen: NDArray[np.int64]
    widest: NDArray[np.int64]
    tail_tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int64]
    by_first: NDArray[np.int64]
    ends: int


def count(s: ItemSet, *, tails: bool) -> Counts:
    """Count in one pass over the tables, without unfolding any item. tails: if False, no lengths and no tokens."""
    tables, level_nodes = s.trie.tables.pointers, np.array(s.trie.level_nodes, np.int64)
    below = np.zeros(tables.nodes, np.int64)
    _count_below(tables, len(s), below)
    levels = np.zeros((4, len(level_nodes)), np.int64)
    totals = [np.zeros(size, np.int64) for size in (s.longest + 1, len(s.token_ids), s.trie.level_edges[0])]
    ids = s.token_ids if tails else np.zeros(0, np.int64)
    ends = _count(tables, level_nodes, ids, below, levels, *totals)
    return Counts._make([*levels, *totals, int(ends)])


@compiled
def _count_below(tables, items, below):  # type: ignore[no-untyped-def]
    """Fill in the items that pass through each node."""
    nodes = len(below)
    for node in range(nodes - 1, -1, -1):  # children have higher numbers
        total = np.int64(is_terminal(tables, node))
        for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
            state = follow(tables, edge)
            total += below[state] if state < nodes else np.int64(1)
        below[node] = min(total, items)


@compiled
def _count(tables, level_nodes, ids, below, levels, lengths, tokens, by_first):  # type: ignore[no-untyped-def]
    """Fill in `Counts`, its first four as `levels`; return `ends`. ids: `token_ids`; if empty, no tail is read."""
    mask, prefixes = (1 << tables.token_bits) - 1, 0
    node, position = np.int64(0), np.int64(0)
    for depth in range(len(level_nodes)):
        for _ in range(min(level_nodes[depth], len(below) - node)):
            first, last, ends = first_edge(tables, node), first_edge(tables, node + 1), is_terminal(tables, node)
            levels[0, depth] += below[node]
            levels[1, depth] += below[node] if last - first + ends > 1 else 0
            levels[2, depth] = max(levels[2, depth], last - first)
            prefixes += ends
            _add(lengths, depth, ends)
            for edge in range(first, last):
                state, start = follow(tables, edge), position
                items_after = below[state] if state < len(below) else np.int64(1)
                if node == 0:
                    by_first[edge - first] = items_after
                _add(tokens, np.searchsorted(ids, label(tables, edge)), items_after)
                entry = tail_entry(tables, position) if state >= TAIL and len(ids) else np.int64(-1)
                while entry >= 0:  # tails are in the order of their edges
                    _add(tokens, np.searchsorted(ids, entry & mask), 1)
                    position += 1
                    entry = tail_entry(tables, position) if entry <= mask else np.int64(-1)
                levels[3, depth] += position - start
                if state >= TAIL or state == END:
                    _add(lengths, depth + 1 + position - start, 1)
            node += 1
    return prefixes


@compiled
def _add(counts, place, more):  # type: ignore[no-untyped-def]
    if place < len(counts):
        counts[place] += more
