"""The prefixes of a set's items that a model has scored so far: a tree, grown by rounds of forward passes.

Beam search, its proof, draws and DISC are orders in which to score its leaves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.masking.cpu_kernels import children_from
from itemset.trie.pointers import compiled, first_edge, label
from itemset.trie.potential import ROOT as ROOT_POTENTIAL
from itemset.trie.potential import potential_of
from itemset.trie.rows import grown
from itemset.trie.tables import TERMINAL
from itemset.trie.walk import END, TAIL, advance, follow, is_alive, is_terminal, tail_token


class Pass(NamedTuple):
    """One forward pass over the prompt and `tokens` of an item, whose answer is an `Answer`."""

    tokens: tuple[int, ...]
    known: int
    after: NDArray[np.int64]


Answer = tuple[NDArray[Any], NDArray[Any]]  # log-probabilities of a pass's `tokens[known:]`, and of `after` after these

UNSCORED, PENDING, ITEM = -1, -2, -3  # in place of a node's expansion; PENDING: its pass is asked for
ROOT = 0
SELF = -1  # in place of an edge: the item that ends where its node's parent does

NODE = np.dtype([("mass", "f8"), ("edge", "i4"), ("parent", "i4"), ("token", "i4"), ("expansion", "i4")])
"""A prefix or an item. mass: its log-probability times the tree's power. edge, token: of the trie, to it; of SELF the
end token. parent: the expansion whose child it is. expansion: its own, or a state."""
EXPANSION = np.dtype([("mass", "f8"), ("first", "i4"), ("count", "i4"), ("run", "i4"), ("length", "i4")])
"""A scored prefix. mass: with the tokens after it that are certain. first, count: its children, side by side, those of
probability zero omitted. run, length: its certain tokens, in `runs`."""
RUN = np.dtype([("token", "i8"), ("mass", "f8")])  # a certain token, and how much it adds to the mass


class ScoredTree:
    """The tree of one prompt: `ask` gives the passes that score some nodes, `take` their answers.

    A pass scores what follows a prefix, and with it the tokens that are certain to follow: the tail of an item that
    stands alone. Node 0 is the empty prefix; expansion 0 stands above it.
    """

    def __init__(
        self, item_set: ItemSet, *, end_token: int | None, power: float = 1.0, renormalised: bool = False,
        forced: bool = True, boost: float = 0.0, normalise_length: float = 0.0,
    ) -> None:  # fmt: skip
        """power: at least 1, or masses would be no bounds, unless the set's potentials make them so. end_token: None if
        the end of an item is not scored. renormalised: a token's probability is its share among those that may stand
        there, so that tails cost nothing. forced: tokens without an alternative in the set are certain, too. boost:
        what the set's potentials count, which are added to masses. normalise_length: the power of an item's scored
        tokens that divides its log-probability; a prefix's is divided by that of the longest item below it.
        """
        self._item_set, self.boost = item_set, boost * item_set.is_steered
        self._tables, self._power, self.length = item_set.trie.tables, power, float(normalise_length)
        self._end = -1 if end_token is None else end_token
        self._renormalised, self._forced = renormalised, forced
        root = self.boost * item_set.most_boost if self.boost else 0.0
        self.nodes: NDArray[Any] = np.array([(root, SELF, 0, -1, UNSCORED)], NODE)
        self._expansions, self._runs = np.zeros(1, EXPANSION), np.zeros(0, RUN)
        self._prefixes: list[tuple[int, ...]] = [()]  # the tokens of each expansion
        # Of the passes that were asked for: the nodes; the edges to the children of all, side by side, of each the
        # last may be SELF; and how many.
        self._asked, self._edges, self._counts = (np.zeros(0, np.int64) for _ in range(3))
        self._ends: tuple[NDArray[np.int64], NDArray[np.int64]]  # of each: its last edge, and the state after it
        self._ones: list[Pass] = []

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Nodes, expansions and runs, for compiled code."""
        return self.nodes, self._expansions, self._runs

    def ask(self, nodes: Sequence[int] | NDArray[np.int64]) -> list[Pass]:
        """Return the passes that score these nodes, prefixes that are not scored."""
        self._asked = np.array(nodes, np.int64)
        asked = self.nodes[self._asked]
        self.nodes["expansion"][self._asked] = PENDING
        states, runs, lasts = self._read(asked["edge"], self._forced)
        self._ends = lasts, states
        self._counts, self._edges, sizes, after = _children(self._tables.pointers, states, self._end)
        before = (self._prefixes[parent] for parent in asked["parent"].tolist())
        columns = zip(before, runs, asked["edge"].tolist(), np.split(after, np.cumsum(sizes)), strict=False)
        self._ones = [Pass(prefix + run, len(prefix) + (edge >= 0), own) for prefix, run, edge, own in columns]
        return self._ones

    def take(self, answers: Sequence[Answer], above: float = -np.inf) -> None:
        """Take the answers to the passes of `ask`, one each. above: omit children whose mass is not."""
        nodes, edges, counts = self._asked, self._edges, self._counts
        logs = self._power * np.concatenate([after for _, after in answers], dtype=np.float64)
        if self._renormalised:
            asked = np.array([len(after) for _, after in answers])
            asked = asked[asked > 0]  # in a view, a node may have no children
            logs -= np.repeat(np.logaddexp.reduceat(logs, np.cumsum(asked) - asked), asked)
        if self._end < 0:
            logs, of_edges = np.zeros(len(edges)), logs
            logs[edges != SELF] = of_edges
        own, first, expansions = len(self._expansions), len(self.nodes), np.empty(len(nodes), EXPANSION)
        expansions["mass"] = self.nodes["mass"][nodes] + self._add_runs(expansions, answers)
        masses = np.repeat(expansions["mass"], counts) + logs
        if self.boost or self.length:
            masses = self._steered(nodes, expansions["mass"] - self.nodes["mass"][nodes], logs)
        new = np.empty(int(np.count_nonzero(masses > above)), NODE)
        rule = self._end, self._renormalised
        _add_children(self._tables.pointers, (own, first), expansions, masses, edges, counts, above, rule, new)
        self.nodes["expansion"][nodes] = np.arange(own, own + len(nodes))
        self.nodes, self._expansions = np.append(self.nodes, new), np.append(self._expansions, expansions)
        self._prefixes += [one.tokens for one in self._ones]

    def keep(self, first: int, nodes: NDArray[np.int64]) -> None:
        """Omit the nodes from `first` on but for these, which now stand there in this order."""
        self.nodes = np.append(self.nodes[:first], self.nodes[nodes])

    def items(self, nodes: NDArray[Any]) -> list[tuple[tuple[int, ...], float]]:
        """Return the tokens of some items, [items] NODE, without the end token, and their log-probabilities."""
        _, runs, _ = self._read(nodes["edge"], False)
        items = [self._prefixes[i] + run for i, run in zip(nodes["parent"].tolist(), runs, strict=True)]
        boosts, norms = self._of_items(items)
        logs = (nodes["mass"] - boosts) / norms / self._power
        return list(zip(items, logs.tolist(), strict=True))

    def scores(self, items: Sequence[tuple[tuple[int, ...], float]]) -> NDArray[np.float64]:
        """Return the score of each item of a list, given as tokens and log-probability."""
        boosts, norms = self._of_items([tokens for tokens, _ in items])
        return np.asarray(norms * np.array([log for _, log in items], np.float64) + boosts)

    def _of_items(self, items: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
        """Return what boosts add to the mass of each item, and what its log-probability is multiplied by."""
        boosts = self.boost * self._item_set.boosts_of(items) if self.boost else 0.0
        return boosts, self._norms(np.array([len(one) for one in items], np.int64)) if self.length else 1.0

    def _norms(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """tokens: of items, without the end token."""
        return np.asarray((tokens + (self._end >= 0)) ** -self.length, np.float64)

    def _steered(
        self, nodes: NDArray[np.int64], runs: NDArray[np.float64], logs: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the masses of the children of some nodes. runs: of their certain tokens. logs: of the children."""
        above, counts = self.nodes[nodes], self._counts
        heights = self._item_set.heights if self.length else np.zeros(0, np.uint16)
        parents = self.boost, above["edge"].astype(np.int64), *self._ends
        boosts, own, tokens = _of_children(self._tables.pointers, heights, *parents, counts, self._edges)
        if not self.length:
            less = np.minimum(own - np.repeat(boosts, counts), 0.0)
            return np.asarray(np.repeat(above["mass"] + runs, counts) + logs + less)
        before = np.array([len(self._prefixes[parent]) for parent in above["parent"].tolist()])
        longest = np.where(above["edge"] < 0, self._item_set.longest, before + heights[np.maximum(above["edge"], 0)])
        log = (above["mass"] - boosts) / self._norms(longest) + runs
        depths = np.repeat([len(one.tokens) for one in self._ones], counts)
        return np.asarray((np.repeat(log, counts) + logs) * self._norms(depths + tokens) + own)

    def unknown_share(self) -> float:
        """Return the most that items of unscored prefixes may have of the set's distribution: a share of 0 to 1."""
        masses, kinds = self.nodes["mass"], self.nodes["expansion"]
        unscored = masses[(kinds == UNSCORED) | (kinds == PENDING)]
        if not len(unscored):
            return 0.0
        known = np.logaddexp.reduce(masses[kinds == ITEM]) if (kinds == ITEM).any() else -np.inf
        most = np.logaddexp.reduce(unscored)
        return float(np.exp(most - np.logaddexp(most, known)))

    def _read(
        self, edges: NDArray[np.int32], forced: bool
    ) -> tuple[NDArray[np.int64], list[tuple[int, ...]], NDArray[np.int64]]:
        """Return the state after each edge and its certain tokens, these tokens, and the last edge on the way."""
        states, lengths, flat, lasts = _read_edges(self._tables.pointers, np.ascontiguousarray(edges), forced)
        ends, tokens = np.cumsum(lengths).tolist(), flat.tolist()
        return states, [tuple(tokens[end - n : end]) for end, n in zip(ends, lengths.tolist(), strict=True)], lasts

    def _add_runs(self, expansions: NDArray[Any], answers: Sequence[Answer]) -> NDArray[np.float64]:
        """Add the certain tokens of some expansions; return what those of each add to its mass."""
        lengths = [len(run) for run, _ in answers]
        new, ends = np.empty(sum(lengths), RUN), np.cumsum(lengths)
        new["token"] = [token for one in self._ones for token in one.tokens[one.known :]]
        new["mass"] = masses = self._power * np.concatenate([run for run, _ in answers], dtype=np.float64)
        expansions["run"], expansions["length"] = len(self._runs) + ends - lengths, lengths
        self._runs = np.append(self._runs, new)
        return np.array([masses[end - n : end].sum() for end, n in zip(ends.tolist(), lengths, strict=True)])


@compiled
def _read_edges(tables, edges, forced):  # type: ignore[no-untyped-def]
    """Do `ScoredTree._read`, with how many certain tokens there are, and these side by side. SELF: after the root."""
    states, lengths = np.empty(len(edges), np.int64), np.empty(len(edges), np.int64)
    lasts = np.empty(len(edges), np.int64)
    tokens, size = np.empty(8 * len(edges) + 8, np.int64), 0
    for i in range(len(edges)):
        first, edge = size, np.int64(edges[i])
        if edge >= 0:
            token, state = label(tables, edge), follow(tables, edge)
        else:
            token, state, edge = _certain(tables, np.int64(0), forced, edge)
        while token >= 0:
            if size == len(tokens):
                tokens = grown(tokens, size + 1)
            tokens[size] = token
            size += 1
            token, state, edge = _certain(tables, state, forced, edge)
        states[i], lengths[i], lasts[i] = state, size - first, edge
    return states, lengths, tokens[:size], lasts


@compiled
def _certain(tables, state, forced, last):  # type: ignore[no-untyped-def]
    """Return the token that is certain to follow, or -1, the state after it, and the last edge, `last` before it."""
    if state >= TAIL:
        token = tail_token(tables, state)
        return token, advance(tables, state, token) if token >= 0 else np.int64(END), last
    if not forced or state >= tables.nodes or is_terminal(tables, state):
        return np.int64(-1), state, last
    only, count = children_from(tables, state)
    return (label(tables, only), follow(tables, only), only) if count == 1 else (np.int64(-1), state, last)


@compiled
def _of_children(tables, heights, boost, parents, lasts, states, counts, edges):  # type: ignore[no-untyped-def]
    """Return what boosts add to each node, to each of its children, and the tokens of the longest item below a child.

    parents: the edge of each node; lasts, states: the last edge after it, and the state. counts, edges: its children.
    """
    above, own, tokens = np.empty(len(counts)), np.empty(len(edges)), np.zeros(len(edges), np.int64)
    at = 0
    for i in range(len(counts)):
        above[i] = boost * potential_of(tables, parents[i] if parents[i] >= 0 else np.int64(ROOT_POTENTIAL))
        for j in range(at, at + counts[i]):
            entry = np.int64(edges[j])
            if entry < 0:
                entry = TERMINAL + states[i] if states[i] < tables.nodes else lasts[i]
            elif len(heights):
                tokens[j] = heights[entry]
            own[j] = boost * potential_of(tables, entry)
        at += counts[i]
    return above, own, tokens


@compiled
def _children(tables, states, end_token):  # type: ignore[no-untyped-def]
    """Return how many children each state has, and all edges, those of a state with SELF last if an item ends there;
    then how many of each are scored, all but SELF if the end token is -1, and their tokens."""
    room = len(states)
    for state in states:
        if state < tables.nodes:
            room += first_edge(tables, state + 1) - first_edge(tables, state)
    edges, tokens, size, scored = np.empty(room, np.int32), np.empty(room, np.int64), 0, 0
    counts, sizes = np.zeros(len(states), np.int64), np.zeros(len(states), np.int64)
    for i, state in enumerate(states):
        first, first_scored = size, scored
        if state < tables.nodes:
            for edge in range(first_edge(tables, state), first_edge(tables, state + 1)):
                if is_alive(tables, edge):
                    edges[size], tokens[scored] = edge, label(tables, edge)
                    size, scored = size + 1, scored + 1
        if is_terminal(tables, state):
            edges[size], tokens[scored] = SELF, end_token
            size, scored = size + 1, scored + (end_token >= 0)
        counts[i], sizes[i] = size - first, scored - first_scored
    return counts, edges[:size], sizes, tokens[:scored]


@compiled
def _add_children(tables, numbers, expansions, masses, edges, counts, above, rule, nodes):  # type: ignore[no-untyped-def]
    """Fill in new nodes, the children above a mass, and where those of each expansion are. numbers: of the first new
    expansion and node. rule: the end token, -1 if ends are not scored; whether tails are not, either."""
    end_token, renormalised = rule
    at, size = 0, 0
    for i in range(len(counts)):
        expansions[i].first = numbers[1] + size
        for j in range(at, at + counts[i]):
            if masses[j] > above:
                edge, node = np.int64(edges[j]), nodes[size]
                node.mass, node.edge, node.parent = masses[j], edge, numbers[0] + i
                node.token = label(tables, edge) if edge >= 0 else end_token
                state = follow(tables, edge) if edge >= 0 and (renormalised or end_token < 0) else np.int64(0)
                is_item = edge < 0 or state == END or (renormalised and state >= TAIL)
                node.expansion = ITEM if is_item else UNSCORED
                size += 1
        expansions[i].count = numbers[1] + size - expansions[i].first
        at += counts[i]
