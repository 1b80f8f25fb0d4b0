"""Exact draws from a model's own distribution over a set, in few forward passes however many items there are.

Gumbel-top-k sampling by stochastic beam search over the trie (Kool, van Hoof and Welling 2019), run lazily, as a race
in which items ring: docs/internals/ranking.md has why it is exact. A draw depends on the seed, its number and the model
alone: not on the rounds, nor on other draws, nor on who runs the race. `beams.Beams` runs it over beams.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.scored_tree import ITEM, PENDING, ROOT, UNSCORED, ScoredTree
from itemset.ranking.search import Found, Item, Rounds, check_positive
from itemset.select.views import tempered
from itemset.trie.pointers import compiled

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)
NOBODY, TOKEN = 0, 1  # numbers of a key: for what lies outside the set, and the first of those for its tokens
ENTRY = np.dtype([("clock", "f8"), ("key", "u8"), ("rung", "f8"), ("node", "i4"), ("window", "i4")])
"""clock: when it rings. key: of its random numbers. window: 0 for a node. Other entries stand for the children of a
scored node, which rang at `rung`, that ring in this window of time or later: so a heap holds only those of many
children that may ring soon. Their key is that of the node with its certain tokens."""
_SOON = math.log(4.0)  # children that the first window has on average, at most
_DOUBLE = math.log(2.0)
_LAST = 1 << 30  # window, which has no end: at tiny temperatures siblings are billions of windows apart
_AHEAD = 6  # by default a round takes one pass for each six before it


class CutOffError(ValueError):
    """The passes ended before the draws did. To answer with the draws that had ended would favour likely items."""


class Drawing(Rounds):
    """Draws of items, all of which share the passes: a round scores the prefix that each unfinished draw waits for and,
    up to its width, those that they will need next. An answer says of an item whether its race was run to the end."""

    def __init__(
        self, item_set: ItemSet, n: int, *, end_token: int, replace: bool = True, temperature: float = 1.0,
        boost: float = 1.0, seed: int | None = None, width: int | None = None, max_passes: int | None = None,
        approximate: bool = False,
    ) -> None:  # fmt: skip
        """Raises ValueError if n, width or max_passes is less than 1, or the temperature not above 0.

        end_token: counts in an item's probability: else an item that is the beginning of another would count twice.
        replace: the n draws are independent, so that an item may occur again. Else they are n distinct items, each
        drawn from what the others have left: fewer if the set has fewer.
        temperature: T, over items: one of probability p and boost b (`view`) is drawn with a weight of (p * e^b)^(1/T).
        boost: what boosts are multiplied by. seed: of all random numbers; another one each time if None.
        width: passes in a round at least, if they can be of use; by default rounds grow with the passes so far.
        max_passes: stop after these. approximate: unfinished draws then go on among the scored items; else `result`
        raises CutOffError.
        """
        check_positive(n=n, width=width, max_passes=max_passes)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}: make it more than 0")
        if temperature > 1 and item_set.temperature != temperature:
            item_set = tempered(item_set, temperature, boost)
        boost = 1.0 if temperature > 1 else boost / temperature  # above 1 the potentials have all of that
        # Where potentials count items that are left out, they may fall within certain tokens: beams see that there.
        tables = item_set.trie.tables
        loose = item_set.is_steered and bool(len(tables.dead) or len(tables.boosted))
        tree = ScoredTree(item_set, end_token=end_token, power=1 / temperature, boost=boost, forced=not loose)
        super().__init__(tree, max_passes)
        races, self._k = (n, 1) if replace else (1, n)
        self._keys = np.random.SeedSequence(seed).generate_state(races, "u8")
        roots = [(log_exponential(key) - tree.nodes["mass"][ROOT], key, 0.0, ROOT, 0) for key in self._keys]
        self._races = {i: Race(self._k, np.array([root], ENTRY)) for i, root in enumerate(roots)}
        self._known: Mapping[int, Sequence[Item]] = {}  # of the other races
        self._before, self._width, self._approximate = (0, 0), width, approximate

    @property
    def races(self) -> tuple[list[int], int]:
        """Return the keys of the races' roots, as int64, and how many items each race is for: for `beams.Beams`."""
        return self._keys.view(np.int64).tolist(), self._k

    def begin_with(self, known: Mapping[int, Sequence[Item]], passes: int, rounds: int) -> Found | None:
        """Take over all items of some races, by number, before the first round, and what they took of `beams.Beams`.

        The others begin again, with the same result. Returns that if nothing is left to do, and something was drawn.
        """
        self._known, self._before = known, (passes, rounds)
        self._races = {i: race for i, race in self._races.items() if i not in known}
        return None if self._races or not any(known.values()) else self.result

    @property
    def result(self) -> Found:
        """Return the draws, none if the whole set has probability zero. Raises CutOffError unless `approximate`."""
        cut = not all(race.over for race in self._races.values())
        if cut and not self._approximate:
            raise CutOffError(f"the draws need more than {self._taken} passes")
        ended = {i: race.cut_off(self.tree) for i, race in self._races.items()}
        nodes = [node for race in ended.values() for node in race.items]
        scored, drawn = iter(self.tree.items(self.tree.nodes[np.array(nodes, np.int64)])), {**self._known}
        for i, race in ended.items():
            exact = len(self._races[i].items)
            drawn[i] = [Item(*next(scored), {"exact": n < exact}) for n in range(len(race.items))]
        items = [item for i in range(len(drawn)) for item in drawn[i]]
        passes, rounds = self._before
        left = self.tree.unknown_share() if cut else 0.0
        return Found(items, passes + self._taken, rounds + self._rounds, open=left)

    def _next_nodes(self) -> list[int]:
        waiting = [race for race in self._races.values() if not race.run(self.tree)]
        nodes = list(dict.fromkeys(race.waits_for for race in waiting))[: self._left]
        if not nodes:
            return []
        self.tree.nodes["expansion"][nodes] = PENDING
        most = min(self._left, max(1, self._taken // _AHEAD) if self._width is None else self._width)
        share = math.ceil((most - len(nodes)) / len(waiting))
        for race in waiting:
            if len(nodes) >= most:
                break
            nodes += race.look_ahead(self.tree, min(share, most - len(nodes)))
        return nodes


@dataclass
class Race:
    """The heap of one race, the earliest entry first."""

    k: int
    heap: NDArray[Any]  # [room] ENTRY
    size: int = 1
    items: list[int] = field(default_factory=list)  # the nodes of those that have rung; there will be `k`

    @property
    def over(self) -> bool:
        return len(self.items) == self.k or not self.size

    @property
    def waits_for(self) -> int:
        """Return the unscored node that rings next."""
        return int(self.heap["node"][0])

    def run(self, tree: ScoredTree, known_only: bool = False) -> bool:
        """Run until an unscored node is next; return whether the race is over. known_only: pass over such nodes."""
        while not self.over:
            self.heap, self.size, is_item = _run(*tree.arrays, self.heap, self.size, known_only)
            if is_item:
                self.items.append(int(self.heap["node"][0]))
                self.size = _pop(self.heap, self.size)
            elif self.size:
                return False
        return True

    def copy(self) -> "Race":
        return replace(self, heap=self.heap.copy(), items=self.items.copy())

    def cut_off(self, tree: ScoredTree) -> "Race":
        """Return the race at its end, among the scored items alone if it is not over."""
        ended = self.copy()
        ended.run(tree, known_only=True)
        return ended

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
def _run(nodes, expansions, runs, heap, size, known_only):  # type: ignore[no-untyped-def]
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
def _let_in(nodes, expansion, heap, size, node, clock, key, window):  # type: ignore[no-untyped-def]
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
    if window >= _LAST or high <= low:  # floats as large as these differ by more than a window
        high = math.inf
    size = _pop(heap, size)
    for i in range(count):
        time = gap(times[i], earliest)
        if low <= time < high:
            rings = log_of_sum(clock, time - mass)
            heap, size = _push(heap, size, rings, keys[i], 0.0, np.int64(begin + i), np.int64(0))
        elif time >= high:
            rest = min(rest, time)
    if rest < math.inf:
        later = window + 1 + int(min((rest - high) / _DOUBLE, float(_LAST - window - 1)))
        while unit + (later - 2) * _DOUBLE > rest:  # by a rounding
            later -= 1
        start = log_of_sum(clock, unit + (later - 2) * _DOUBLE - mass)
        heap, size = _push(heap, size, start, key, clock, np.int64(node), np.int64(later))
    return heap, size


@compiled
def _push(heap, size, clock, key, rung, node, window):  # type: ignore[no-untyped-def]
    """Add an entry; return the heap, a larger one if it was full, and its size."""
    if size == len(heap):
        full, heap = heap, np.empty(2 * size, heap.dtype)
        for i in range(size):
            heap[i] = full[i]
    at = size
    while at > 0 and heap[(at - 1) >> 1].clock > clock:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    entry = heap[at]
    entry.clock, entry.key, entry.rung, entry.node, entry.window = clock, key, rung, node, window
    return heap, size + 1


@compiled
def _pop(heap, size):  # type: ignore[no-untyped-def]
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
def mixed(key, n):  # type: ignore[no-untyped-def]
    """Return number `n` of a key: splitmix64 (Steele, Lea and Flood 2014)."""
    z = key + (np.uint64(n) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@compiled
def uniform(key, n):  # type: ignore[no-untyped-def]
    """Return number `n` of a key as one between 0 and 1, both excluded."""
    return _unit(mixed(key, n))


@compiled
def _unit(bits):  # type: ignore[no-untyped-def]
    return (np.float64(bits >> _S12) + 0.5) * 2.0**-52


@compiled
def log_exponential(bits):  # type: ignore[no-untyped-def]
    """Return an exponential time of rate 1."""
    return math.log(-math.log(_unit(bits)))


@compiled
def time_outside(key, total):  # type: ignore[no-untyped-def]
    """Return the time of what lies outside the set, whose share is what `total` leaves of 1: nothing of 1 or more."""
    return log_exponential(mixed(key, NOBODY)) - (math.log1p(-total) if total < 1 else -math.inf)


@compiled
def clock_after(clock, time, earliest, mass):  # type: ignore[no-untyped-def]
    """Return when what has such a time rings, after a prefix of such a mass that rings at `clock`."""
    return log_of_sum(clock, gap(time, earliest) - mass) if time < math.inf else math.inf


@compiled
def gap(time, earliest):  # type: ignore[no-untyped-def]
    """Return the time since the earliest."""
    if time <= earliest:
        return -math.inf
    return time + math.log1p(-math.exp(earliest - time))


@compiled
def log_of_sum(a, b):  # type: ignore[no-untyped-def]
    """Return the sum of two times, the first of them not 0."""
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))
