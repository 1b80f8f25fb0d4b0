"""Step cost on skewed codes: a host step, level by level, for Zipf-distributed codes beside uniform ones.

python benchmarks/skew.py --items 1e6 --exponent 1.2

A step takes one token (walk) and fills the row's bitmask, as the engine asks for it. Walks are random in two ways: to a
random item, as a model that has learned the catalogue takes them, and to a random child at every node. At the root both
sets have every code as a child; below it skewed codes gather in few nodes with long rows, to which walks to items lead.
"Step" is what the engine waits for, Python's calls included; "compiled" is the walk and the filling without the calls,
whose time follows the number of children.
"""

from __future__ import annotations

import argparse
import itertools
import time
from statistics import median

import numba
import numpy as np
from numpy.typing import NDArray

import itemset
from itemset import ItemSet
from itemset.masking.host import HostState, _fill_bitmask
from itemset.trie import walk

LENGTH, CODES, WALKS, ROUNDS = 8, 2_048, 2_000, 25


def semantic_ids(count: int, exponent: float) -> NDArray[np.uint16]:
    """`count` distinct items; code k of a level, in an order of the level's own, has a share of 1 / k^exponent."""
    draw = np.random.default_rng(3)
    shares = np.arange(1, CODES + 1) ** -exponent
    found = np.zeros((0, LENGTH), np.uint16)
    while len(found) < count:
        ranks = draw.choice(CODES, (count // 4 + 1_000, LENGTH), p=shares / shares.sum()).astype(np.uint16)
        found = np.unique(np.concatenate((found, ranks)), axis=0)
    orders = np.stack([np.random.default_rng(level).permutation(CODES) for level in range(LENGTH)]).astype(np.uint16)
    ranks = draw.permutation(found)[:count]
    return np.stack([orders[level][ranks[:, level]] for level in range(LENGTH)], axis=1)


def walks_to_items(s: ItemSet, items: NDArray[np.uint16]) -> list[list[int]]:
    return np.random.default_rng(5).permutation(items)[:WALKS].tolist()


def walks_to_children(s: ItemSet, items: NDArray[np.uint16]) -> list[list[int]]:
    draw = np.random.default_rng(5)
    walks = []
    for _ in range(WALKS):
        state, tokens = 0, []
        while state != walk.END:
            tokens.append(int(draw.choice(walk.children(s.trie.tables, state)[0])))
            state = walk.advance(s.trie.tables.pointers, state, tokens[-1])
        walks.append(tokens)
    return walks


class Step:
    """One level of one set's walks: the least microseconds of a step and of its compiled part so far, and the children
    met there on average. The first level's step is the filling alone: no token was taken yet."""

    def __init__(self, s: ItemSet, walks: list[list[int]], level: int) -> None:
        self.item_set = s
        self.before = [tokens[: max(0, level - 1)] for tokens in walks]
        self.last = [tokens[max(0, level - 1) : level] for tokens in walks]
        self.children = sum(len(s.children(tokens[:level])[0]) for tokens in walks) / len(walks)
        self.microseconds = self.compiled = float("inf")

    def measure(self) -> None:
        row, stops = np.zeros(CODES // 32, np.int32), np.zeros(1, np.int64)
        states = [HostState(self.item_set, [0]) for _ in self.before]
        for state, tokens in zip(states, self.before, strict=True):
            state.accept(tokens)
        at, taken = np.array([state.state for state in states]), np.array(self.last, np.int64)
        start = time.perf_counter()
        for state, tokens in zip(states, self.last, strict=True):
            state.accept(tokens)
            state.fill_bitmask(row)
        middle = time.perf_counter()
        _walk_and_fill(self.item_set.trie.tables, at, taken, stops, row.view(np.uint32))
        end = time.perf_counter()
        self.microseconds = min(self.microseconds, (middle - start) / len(states) * 1e6)
        self.compiled = min(self.compiled, (end - middle) / len(states) * 1e6)


@numba.njit
def _walk_and_fill(tables, states, tokens, stops, row):  # type: ignore[no-untyped-def]
    for i in range(len(states)):
        state = states[i]
        for token in tokens[i]:
            state = walk.advance(tables.pointers, state, token)
        _fill_bitmask(tables, state, stops, row)


def rows_of(s: ItemSet) -> list[str]:
    """Nodes of each level, and the median and largest number of children they have."""
    children = np.split(np.diff(s.trie.tables.row_offsets.astype(np.int64)), np.cumsum(s.trie.level_nodes)[:-1])
    return [f"{len(row):>9,} {median(row.tolist()):>6.0f} {row.max():>6,}" for row in children]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=float, default=1e6)
    parser.add_argument("--exponent", type=float, default=1.2)
    args = parser.parse_args()
    sets = {}
    for name, exponent in (("uniform", 0.0), ("Zipf", args.exponent)):
        ids = semantic_ids(int(args.items), exponent)
        sets[name] = itemset.build(ids), ids
        s = sets[name][0]
        print(f"{name}: {len(s):,} items, {s.nbytes / len(s):.2f} bytes an item")
        print(f"{'level':>5} {'nodes':>9} {'median':>6} {'max':>6}  children")
        for level, line in enumerate(rows_of(s)):
            print(f"{level:>5} {line}")
    for what, make in (("to a random item", walks_to_items), ("to a random child", walks_to_children)):
        print(f"\nwalks {what}: microseconds, uniform and Zipf")
        print(f"{'level':>5} {'step':>15} {'ratio':>6} {'compiled':>17} {'ratio':>6} {'children met':>19}")
        walks = [(s, make(s, ids)) for s, ids in sets.values()]
        levels = [[Step(s, each, level) for s, each in walks] for level in range(LENGTH)]
        for _ in range(ROUNDS):  # in turns, so that what else the machine does meets both
            for step in itertools.chain(*levels):
                step.measure()
        for level, (plain, skewed) in enumerate(levels):
            print(
                f"{level:>5} {plain.microseconds:>7.2f} {skewed.microseconds:>7.2f} "
                f"{skewed.microseconds / plain.microseconds:>6.2f}   {plain.compiled:>7.3f} {skewed.compiled:>7.3f} "
                f"{skewed.compiled / plain.compiled:>6.2f}   {plain.children:>8,.1f} {skewed.children:>8,.1f}"
            )
        whole = [sum(step.microseconds for step in column) for column in zip(*levels, strict=True)]
        print(f"{'item':>5} {whole[0]:>7.2f} {whole[1]:>7.2f} {whole[1] / whole[0]:>6.2f}")


if __name__ == "__main__":
    main()
