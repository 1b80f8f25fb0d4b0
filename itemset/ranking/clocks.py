"""One race of `draws`: which place of a tree of scored prefixes rings next, and the random numbers that say so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.ranking.scored import ASKED, ITEM, NOTHING, ROOT, UNSCORED, Places, Steps
from itemset.trie.jit import compiled

_FULL = -9  # a heap needs more room
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)
NOBODY, TOKEN = 0, 1  # numbers that a key gives: nobody's, and where those of its tokens begin
_SOON = math.log(4.0)  # children that the first window has on average, at most
_DOUBLE = math.log(2.0)


class _Heap(NamedTuple):
    """The entries of a race, the earliest first: see `Race`."""

    clocks: NDArray[Any]
    places: NDArray[Any]
    keys: NDArray[Any]
    begun: NDArray[Any]
    windows: NDArray[Any]

    @classmethod
    def of_room(cls, size: int) -> _Heap:
        return cls(*(np.zeros(size, kind) for kind in (np.float64, np.int32, np.uint64, np.float64, np.int32)))


@dataclass
class Race:
    """One race: the places that have not rung, as a heap. found: the items that have, up to `wanted`.

    root: the key of its root. The heap's columns:
    clocks: float64, logarithms of times. places: int32. keys: uint64, from which a place takes its random numbers.
    begun, windows: float64 and int32. An entry of window 0 is a place. Another one stands for the children of a scored
    place that are in this window of time or later, after the place rang at `begun`: so of many children only those that
    may ring soon are entries. Its key is that of the place with its certain tokens.
    """

    root: int
    wanted: int
    heap: _Heap
    size: int = 1
    found: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, key: np.uint64, wanted: int) -> Race:
        heap = _Heap.of_room(64)
        heap.keys[0], heap.clocks[0], heap.places[0] = key, log_exponential(key), ROOT
        return cls(int(key), wanted, heap)

    @property
    def over(self) -> bool:
        return len(self.found) == self.wanted or not self.size

    @property
    def waits_for(self) -> int:
        return int(self.heap.places[0])

    def run(self, tree: Places, steps: Steps, among_known: bool = False) -> bool:
        """Run on to an unscored prefix; return whether the race is over. among_known: pass by such prefixes."""
        while not self.over:
            self.size, status = _run(tree.masses, tree.first, steps, self.heap, self.size, among_known)
            if status == ITEM:
                self.found.append(int(self.heap.places[0]))
                self.size = _pop(self.heap, self.size)
            elif status == _FULL:
                room = _Heap.of_room(len(self.heap.keys))
                self.heap = _Heap(*(np.concatenate(columns) for columns in zip(self.heap, room, strict=True)))
            elif status == UNSCORED:
                return False
        return True

    def next_after(self, tree: Places, steps: Steps, count: int) -> list[int]:
        """The next prefixes that it will wait for unless it is over before: `count` at most. They are marked ASKED."""
        ahead, found = self._copy(), list[int]()
        while len(found) < count and not ahead.run(tree, steps):
            place = ahead.waits_for
            if tree.first[place] == UNSCORED:
                tree.first[place] = ASKED
                found.append(place)
            ahead.size = _pop(ahead.heap, ahead.size)
        return found

    def among_known(self, tree: Places, steps: Steps) -> list[int]:
        """The items that it finds if unscored prefixes lead nowhere."""
        race = self._copy()
        race.run(tree, steps, among_known=True)
        return race.found

    def _copy(self) -> Race:
        return Race(self.root, self.wanted, _Heap(*(c.copy() for c in self.heap)), self.size, list(self.found))


@compiled
def mixed(key, n):  # type: ignore[no-untyped-def]
    """Number n of those that a key gives: splitmix64 (Steele, Lea and Flood 2014)."""
    z = key + (np.uint64(n) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@compiled
def uniform(key, n):  # type: ignore[no-untyped-def]
    """A number between 0 and 1, neither of which it is."""
    return _unit(mixed(key, n))


@compiled
def _unit(bits):  # type: ignore[no-untyped-def]
    return (np.float64(bits >> _S12) + 0.5) * 2.0**-52


@compiled
def log_exponential(bits):  # type: ignore[no-untyped-def]
    """The logarithm of a time of rate 1."""
    return math.log(-math.log(_unit(bits)))


@compiled
def log_left(total):  # type: ignore[no-untyped-def]
    """The logarithm of what a total of shares leaves of 1; all that rounding leaves of nothing is nothing."""
    return math.log1p(-total) if total < 1 else -math.inf


@compiled
def gap(time, earliest):  # type: ignore[no-untyped-def]
    """The logarithm of the time from the earliest one on; all of these are logarithms."""
    if time <= earliest:
        return -math.inf
    return time + math.log1p(-math.exp(earliest - time))


@compiled
def log_of_sum(a, b):  # type: ignore[no-untyped-def]
    """The logarithm of a sum. The first is finite."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


@compiled
def _run(masses, first, steps, heap, size, among_known):  # type: ignore[no-untyped-def]
    """Let places ring until an item or an unscored prefix is the next; return the heap's size, and which it is: ITEM,
    UNSCORED, _FULL, or NOTHING if nothing is left."""
    while size > 0:
        place, window = heap.places[0], heap.windows[0]
        part = first[place]
        if part == ITEM:
            return size, ITEM
        if part in (UNSCORED, ASKED) and not among_known:
            return size, UNSCORED
        if part < 0:
            size = _pop(heap, size)
            continue
        clock, key = heap.begun[0], heap.keys[0]
        if window == 0:
            clock, mass = heap.clocks[0], masses[place]
            for i in range(steps.runs[place], steps.runs[place] + steps.lengths[place]):
                nobody = log_exponential(mixed(key, NOBODY)) - log_left(math.exp(steps.run_masses[i]))
                key = mixed(key, TOKEN + steps.run_tokens[i])
                time = log_exponential(key) - steps.run_masses[i]
                clock = log_of_sum(clock, gap(time, min(time, nobody)) - mass)
                mass += steps.run_masses[i]
        size, done = _let_in(masses, steps, heap, size, place, clock, key, max(window, np.int32(1)))
        if not done:
            return size, _FULL
    return size, NOTHING


@compiled
def _let_in(masses, steps, heap, size, place, clock, key, window):  # type: ignore[no-untyped-def]
    """Put children of a place, those of this window of time, in the place of the heap's first entry, and one entry for
    the others. Return the heap's size, and whether there was room; if not, nothing has changed."""
    begin, count, mass = steps.children[place], steps.counts[place], steps.after[place]
    total = 0.0
    for i in range(begin, begin + count):
        total += math.exp(masses[i] - mass)
    earliest = log_exponential(mixed(key, NOBODY)) - log_left(total)
    times, keys = np.empty(count), np.empty(count, np.uint64)
    for i in range(count):
        keys[i] = mixed(key, TOKEN + steps.tokens[begin + i])
        times[i] = log_exponential(keys[i]) - (masses[begin + i] - mass)
        earliest = min(earliest, times[i])
    unit = _SOON - (masses[begin] - mass if count == 1 else math.log(total))
    low = -math.inf if window == 1 else unit + (window - 2) * _DOUBLE
    high, rest, entries = unit + (window - 1) * _DOUBLE, math.inf, 0
    for i in range(count):
        times[i] = gap(times[i], earliest)
        entries += low <= times[i] < high
        rest = min(rest, times[i]) if times[i] >= high else rest
    if size + entries >= len(heap.keys):
        return size, False
    size = _pop(heap, size)
    for i in range(count):
        if low <= times[i] < high:
            size = _push(heap, size, log_of_sum(clock, times[i] - mass), begin + i, keys[i], 0.0, 0)
    if rest < math.inf:
        later = max(window + 1, window + 1 + int((rest - high) / _DOUBLE))
        while unit + (later - 2) * _DOUBLE > rest:  # by a rounding
            later -= 1
        size = _push(heap, size, log_of_sum(clock, unit + (later - 2) * _DOUBLE - mass), place, key, clock, later)
    return size, True


@compiled
def _push(heap, size, clock, place, key, begun, window):  # type: ignore[no-untyped-def]
    """Add an entry to a heap; return its size."""
    at = size
    while at > 0 and heap.clocks[(at - 1) >> 1] > clock:
        above = (at - 1) >> 1
        _move(heap, above, at)
        at = above
    heap.clocks[at], heap.places[at], heap.keys[at] = clock, place, key
    heap.begun[at], heap.windows[at] = begun, window
    return size + 1


@compiled
def _pop(heap, size):  # type: ignore[no-untyped-def]
    """Take the earliest entry out of a heap; return its size."""
    size -= 1
    clock, at = heap.clocks[size], 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and heap.clocks[below + 1] < heap.clocks[below]:
            below += 1
        if heap.clocks[below] >= clock:
            break
        _move(heap, below, at)
        at = below
    _move(heap, size, at)
    return size


@compiled
def _move(heap, source, to):  # type: ignore[no-untyped-def]
    heap.clocks[to], heap.places[to], heap.keys[to] = heap.clocks[source], heap.places[source], heap.keys[source]
    heap.begun[to], heap.windows[to] = heap.begun[source], heap.windows[source]
