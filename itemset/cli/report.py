"""What an item set costs: its levels, its size in the published STATIC layout, and the least that any index takes."""

import math

import numpy as np
from numpy.typing import NDArray

from itemset.cli.choice_stats import count
from itemset.item_set import ItemSet
from itemset.trie.attributes import kind_of

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
