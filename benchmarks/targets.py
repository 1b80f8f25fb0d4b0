"""Compares the two forms of `Tables.targets` on one set of random semantic IDs: bytes, and the time of what reads them.

The set is built twice, counted and stored (as for items of several lengths), and both are asked the same in turns:
edges followed at random, a masked step of 140 requests on the host, lookups, items by number, and the torch kernels'
step. Prints a table: medians of all rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from external import chunk_of, masked_step
from numpy.typing import NDArray

import itemset
from itemset import ItemSet
from itemset.masking.arena import Arena, room_for
from itemset.trie import targets
from itemset.trie.jit import compiled
from itemset.trie.numbering import items_at, rank_terminals
from itemset.trie.walk import STATE_BITS, follow

TOKENS, VOCAB = 8, 2048
EDGES, ITEMS = 2_000_000, 200_000  # asked in a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=lambda text: int(float(text)), default=2 * 10**7)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = chunk_of(0, args.items, TOKENS, VOCAB)
    sets = {"counted": itemset.build(rows)}
    with stored():
        sets["stored"] = itemset.build(rows)
    asked = rows[np.random.default_rng(1).permutation(len(rows))[:ITEMS]].copy()
    del rows
    arenas = {name: Arena(room_for(s)) for name, s in sets.items()}
    numbers = {name: arena.acquire(sets[name]) for name, arena in arenas.items()}
    edges = np.random.default_rng(2).integers(0, len(sets["stored"].trie.tables.labels), EDGES)
    work: dict[str, Callable[[str], float]] = {
        "an edge followed (ns)": lambda name: 1e9 * timed(follow_all, sets[name].trie.tables.pointers, edges) / EDGES,
        "masked step of 140 rows, host (µs)": lambda name: 1e6 * masked_step(sets[name], asked, VOCAB),
        "lookup of an item (µs)": lambda name: 1e6 * timed(sets[name].lookup, asked) / ITEMS,
        "item of a number (µs)": lambda name: 1e6 * timed(items_of, sets[name], ITEMS) / ITEMS,
        "step of 140 rows, torch kernels (µs)": lambda name: 1e6 * kernel_step(arenas[name], numbers[name], asked),
    }
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for what, ask in work.items():
            for name in sets if turn % 2 else reversed(sets):
                took = ask(name)
                if turn:  # what comes first loads the compiled loops
                    taken.setdefault((what, name), []).append(took)
    print(f"| {args.items:,} items | stored | counted | counted / stored |\n|---|--:|--:|--:|")
    sizes = [sets[name].nbytes / len(sets[name]) for name in ("stored", "counted")]
    print(f"| bytes an item | {sizes[0]:.2f} | {sizes[1]:.2f} | {sizes[1] / sizes[0]:.2f} |")
    for what in work:
        a, b = (float(np.median(taken[what, name])) for name in ("stored", "counted"))
        print(f"| {what} | {a:.2f} | {b:.2f} | {b / a:.2f} |")
    for section, array in sets["counted"].trie.tables.sections.items():
        print(f"{section:<12} {array.nbytes / len(sets['counted']):5.2f} B an item")


@contextmanager
def stored() -> Iterator[None]:
    """Sets that are built here have stored targets, whatever their items' lengths."""
    before, targets._MOST_LEVELS = targets._MOST_LEVELS, 0
    yield
    targets._MOST_LEVELS = before


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


@compiled
def follow_all(tables: Any, edges: Any) -> Any:
    total = 0
    for edge in edges:
        total += follow(tables, edge)
    return total


def items_of(s: ItemSet, count: int) -> None:
    tables = s.trie.tables
    items_at(tables, rank_terminals(tables.terminal), np.arange(0, len(s), len(s) // count), s.trie.longest)


def kernel_step(arena: Arena, number: int, asked: NDArray[np.integer[Any]]) -> float:
    """Seconds of a step that takes a token of each of 140 items: the median over the tokens of 20 batches."""
    took = []
    for batch in range(20):
        tokens = torch.from_numpy(asked[batch * 140 : batch * 140 + 140].astype(np.int64))
        states = torch.full((len(tokens),), number << STATE_BITS)
        for depth in range(TOKENS - 1):
            started = time.perf_counter()
            arena.kernels.advance(arena, states, tokens[:, depth], None, states)
            took.append(time.perf_counter() - started)
    return float(np.median(took))


if __name__ == "__main__":
    main()
