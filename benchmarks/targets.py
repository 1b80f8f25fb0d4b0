"""Where an edge leads: stored in 4 bytes, as the index does it in 2 and shared bases, or counted from a bitmap.

python benchmarks/targets.py --items 1e7

Follows random edges of a set of uniform random semantic IDs (8 tokens of 2,048 codes), each from a place in memory that
the last one does not predict, with the three forms in compiled loops, and prints nanoseconds an edge and bytes an item.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numba
import numpy as np

import itemset
from itemset.walk import END, TAIL, follow

LENGTH, CODES, EDGES, ROUNDS = 8, 2_048, 5_000_000, 5


@numba.njit
def all_targets(tables, edges, out):  # type: ignore[no-untyped-def]
    for i in range(len(edges)):
        out[i] = follow(tables, edges[i])


@numba.njit
def all_stored(stored, edges, out):  # type: ignore[no-untyped-def]
    for i in range(len(edges)):
        target = np.int64(stored[edges[i]])
        leaf = target >> 31
        out[i] = (target & 0x7FFFFFFF) + leaf * TAIL


@numba.njit
def ones(word):  # type: ignore[no-untyped-def]
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@numba.njit
def all_counted(words, before, level_leaves, level_tails, width, edges, out):  # type: ignore[no-untyped-def]
    """Nodes count up over the edges without a leaf bit. The tails of items of one length start at a multiple of their
    level's tail length, so the level must be found; tails of any length would need a directory of starts instead."""
    for i in range(len(edges)):
        edge = edges[i]
        word, bit = edge >> 6, np.uint64(edge & 63)
        leaves = np.int64(before[word]) + ones(words[word] & ((np.uint64(1) << bit) - np.uint64(1)))
        if (words[word] >> bit) & np.uint64(1) == 0:
            out[i] = 1 + edge - leaves
            continue
        level = 0
        while leaves >= level_leaves[level + 1]:
            level += 1
        start = level_tails[level] + (leaves - level_leaves[level]) * (width - 1 - level)
        out[i] = TAIL + start if level < width - 1 else END


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=float, default=1e6)
    count = int(parser.parse_args().items)
    s = itemset.build(np.random.default_rng(0).integers(0, CODES, (count, LENGTH), dtype=np.uint16))
    tables, total = s.trie.tables, len(s.trie.tables.labels)
    everything = np.empty(total, np.int64)
    all_targets(tables, np.arange(total), everything)
    leaf = (everything >= TAIL) | (everything == END)
    place = np.where(everything == END, 0, everything % TAIL)
    stored = (place | (leaf.astype(np.int64) << 31)).astype(np.uint32)
    words = np.packbits(np.append(leaf, np.zeros(-total % 64, np.bool_)), bitorder="little").view(np.uint64)
    before = np.concatenate(([0], np.cumsum(np.bitwise_count(words))))[:-1].astype(np.uint32)
    level_ends = np.cumsum(s.trie.level_edges)
    leaves = np.add.reduceat(leaf.astype(np.int64), np.concatenate(([0], level_ends[:-1])))
    level_leaves = np.concatenate(([0], np.cumsum(leaves), [1 << 62]))
    tails = leaves * (LENGTH - 1 - np.arange(len(leaves)))
    level_tails = np.concatenate(([0], np.cumsum(tails)))

    edges = np.random.default_rng(1).integers(0, total, EDGES)
    out = np.empty(EDGES, np.int64)
    own = (tables.targets.nbytes + tables.node_base.nbytes + tables.tail_base.nbytes) / count
    forms: dict[str, tuple[Any, float]] = {
        "stored, 4 bytes": (lambda: all_stored(stored, edges, out), stored.nbytes / count),
        "2 bytes and bases (the index)": (lambda: all_targets(tables, edges, out), own),
        "counted": (
            lambda: all_counted(words, before, level_leaves, level_tails, LENGTH, edges, out),
            (words.nbytes + before.nbytes) / count,
        ),
    }
    for name, (work, _) in forms.items():
        work()
        same = (out == everything[edges]) | (everything[edges] < 0)
        if not same.all():
            raise SystemExit(f"{name} gives another target for edge {edges[np.flatnonzero(~same)[0]]}")
    print(f"| where an edge leads, {count:,} items | ns an edge | bytes an item | whole index |\n|---|--:|--:|--:|")
    for name, (work, nbytes) in forms.items():
        best = float("inf")
        for _ in range(ROUNDS):
            started = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - started)
        whole = s.nbytes / count - own + nbytes
        print(f"| {name} | {best / EDGES * 1e9:.1f} | {nbytes:.2f} | {whole:.2f} |")


if __name__ == "__main__":
    main()
