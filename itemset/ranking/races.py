"""Races of exact draws (see `exact_sampling`): their random numbers and times, which are logarithms; on the host the
frontier of a draw: a heap of nodes of a scored tree, by the times at which they ring."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.ranking.scored_tree import ITEM, PENDING, ROOT, UNSCORED, ScoredTree
from itemset.trie.jit import compiled

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)
NOBODY, TOKEN = 0, 1  # numbers of a key: for what lies outside the set, and the first of those for its tokens
ENTRY = np.dtype([("clock", "f8"), ("key", "u8"), ("rung", "f8"), ("node", "i4"), ("window", "i4")])
"""clock: when it rings. key: of its random numbers. window: 0 for a node. Other entries stand for the children of a
scored node, which rang at `rung`, that ring in this window of time or later: so a heap holds only those of many
children that may ring soon. Their key is that of the node with its certain tokens."""
_SOON = math.log(4.0)  # children that the first window has on average, at most
_DOUBLE = math.log(2.0)


@dataclass
class Race:
    """The heap of one race, the earliest entry first.

    items: the nodes of the items that have rung; there will be `k`. key: the root's. heap: [room] ENTRY.
    """

    key: int
    k: int
    heap: NDArray[Any]
    size: int = 1
    items: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, key: np.uint64, k: int) -> Race:
        """Return the race at its beginning."""
        heap = np.zeros(64, ENTRY)
        heap[0] = (log_exponential(key), key, 0.0, ROOT, 0)
        return cls(int(key), k, heap)

    @property
    def over(self) -> bool:
        """Whether it has all its items, or the set has no more."""
        return len(self.items) == self.k or not self.size

    @property
    def waits_for(self) -> int:
        """The unscored node that rings next."""
        return int(self.heap["node"][0])

    def run(self, tree: ScoredTree, known_only: bool = False) -> bool:
        """Run until an unscored node is next; return whether the race is over. known_only: as if nothing were below
        such nodes."""
        while not self.over:
            self.heap, self.size, is_item = _run(*tree.arrays, self.heap, self.size, known_only)
            if is_item:
                self.items.append(int(self.heap["node"][0]))
                self.size = _pop(self.heap, self.size)
            elif self.size:
                return False
        return True

    def copy(self) -> Race:
        """Return another race at the same point."""
        return replace(self, heap=self.heap.copy(), items=self.items.copy())

    def look_ahead(self, tree: ScoredTree, count: int) -> list[int]:
        """Mark as PENDING, and return, up to `count` nodes that the race will need next unless it is over before."""
        ahead, nodes = self.copy(), list[int]()
        while len(nodes) < count and not ahead.run(tree):
            node = ahead.waits_for
            if tree.nodes["expansion"][node] == UNSCORED:
                tree.nodes["expansion"][node] = PENDING
                nodes.append(node)
            ahead.size = _pop(ahead.heap, ahead.size)
        return nodes


@compiled
def _run(nodes, expansions, runs, heap, size, known_only):
    """Let nodes ring until an item or an unscored one is next; return the heap, its size, and whether it is an item."""
    while size > 0:
        top = heap[0]
        node, clock, key, window = top.node, top.rung, top.key, top.window
        which = nodes[node].expansion
        if which == ITEM:
            return heap, size, True
        if which < 0 and not known_only:
            return heap, size, False
        if which < 0 or expansions[which].count == 0:
            size = _pop(heap, size)
            continue
        if window == 0:
            clock, mass, window = top.clock, nodes[node].mass, np.int32(1)
            first = expansions[which].run
            for run in runs[first : first + expansions[which].length]:
                outside = time_outside(key, math.exp(run.mass))
                key = mixed(key, TOKEN + run.token)
                time = log_exponential(key) - run.mass
                clock = clock_after(clock, time, min(time, outside), mass)
                mass += run.mass
        heap, size = _let_in(nodes, expansions[which], heap, size, node, clock, key, window)
    return heap, size, False


@compiled
def _let_in(nodes, expansion, heap, size, node, clock, key, window):
    """Replace the heap's first entry by the node's children of this window of time, and one entry for later ones."""
    begin, count, mass = expansion.first, expansion.count, expansion.mass
    total = 0.0
    for i in range(begin, begin + count):
        total += math.exp(nodes[i].mass - mass)
    earliest = time_outside(key, total)
    times, keys = np.empty(count), np.empty(count, np.uint64)
    for i in range(count):
        keys[i] = mixed(key, TOKEN + nodes[begin + i].token)
        times[i] = log_exponential(keys[i]) - (nodes[begin + i].mass - mass)
        earliest = min(earliest, times[i])
    unit = _SOON - (nodes[begin].mass - mass if count == 1 else math.log(total))
    low = -math.inf if window == 1 else unit + (window - 2) * _DOUBLE
    high, rest = unit + (window - 1) * _DOUBLE, math.inf
    size = _pop(heap, size)
    for i in range(count):
        time = gap(times[i], earliest)
        if low <= time < high:
            heap, size = _push(heap, size, log_of_sum(clock, time - mass), keys[i], 0.0, begin + i, 0)
        elif time >= high:
            rest = min(rest, time)
    if rest < math.inf:
        later = max(window + 1, window + 1 + int((rest - high) / _DOUBLE))
        while unit + (later - 2) * _DOUBLE > rest:  # by a rounding
            later -= 1
        start = log_of_sum(clock, unit + (later - 2) * _DOUBLE - mass)
        heap, size = _push(heap, size, start, key, clock, node, later)
    return heap, size


@compiled
def _push(heap, size, clock, key, rung, node, window):
    """Add an entry; return the heap, a larger one if it was full, and its size."""
    if size == len(heap):
        heap = np.concatenate((heap, heap))
    at = size
    while at > 0 and heap[(at - 1) >> 1].clock > clock:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    entry = heap[at]
    entry.clock, entry.key, entry.rung, entry.node, entry.window = clock, key, rung, node, window
    return heap, size + 1


@compiled
def _pop(heap, size):
    """Take the earliest entry out of a heap; return its size."""
    size -= 1
    clock, at = heap[size].clock, 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and heap[below + 1].clock < heap[below].clock:
            below += 1
        if heap[below].clock >= clock:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = heap[size]
    return size


@compiled
def mixed(key, n):
    """Return number `n` of a key: splitmix64 (Steele, Lea and Flood 2014)."""
    z = key + (np.uint64(n) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@compiled
def uniform(key, n):
    """Return number `n` of a key as one between 0 and 1, both excluded."""
    return _unit(mixed(key, n))


@compiled
def _unit(bits):
    return (np.float64(bits >> _S12) + 0.5) * 2.0**-52


@compiled
def log_exponential(bits):
    """Return an exponential time of rate 1."""
    return math.log(-math.log(_unit(bits)))


@compiled
def time_outside(key, total):
    """Return the time of what lies outside the set, which has what a total of shares leaves: 1 or, by a rounding, more
    leaves nothing."""
    return log_exponential(mixed(key, NOBODY)) - (math.log1p(-total) if total < 1 else -math.inf)


@compiled
def clock_after(clock, time, earliest, mass):
    """Return when what has such a time rings, after a prefix of such a mass that rings at `clock`."""
    return log_of_sum(clock, gap(time, earliest) - mass) if time < math.inf else math.inf


@compiled
def gap(time, earliest):
    """Return the time since the earliest."""
    if time <= earliest:
        return -math.inf
    return time + math.log1p(-math.exp(earliest - time))


@compiled
def log_of_sum(a, b):
    """Return the sum of two times, the first of them not 0."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))
