"""Ranked lists on the host, in rounds of forward passes: beam search, and proof by best-first search.

An item's score is the sum of its tokens' log-probabilities over the whole vocabulary (STATIC, arXiv 2602.22647,
Algorithm 1), with its end token's. Whoever runs the model, runs the rounds.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.item_set import ItemSet
from itemset.ranking.scored_tree import ITEM, NODE, SELF, UNSCORED, Answer, Pass, ScoredTree

_PROOF_SHARE = 8  # a round of a proof takes one pass for each eight before it


Width = int | Sequence[int]  # beams of every level, or of each level in turn; the last goes on for all further ones


def width_at(width: Width, taken: int) -> int:
    """Return how many beams there are once `taken` tokens, at least one, stand in each."""
    return width if isinstance(width, int) else width[min(taken, len(width)) - 1]


def widest(width: Width) -> int:
    """Return the most beams of any level."""
    return width if isinstance(width, int) else max(width)


class Item(NamedTuple):
    tokens: tuple[int, ...]  # without the end token
    score: float  # its log-probability, with its end token's if that is scored, and in a list its boost
    about: Mapping[str, Any] = MappingProxyType({})  # what an answer says of it besides


class Found(NamedTuple):
    items: list[Item]  # a list, best first, without an item twice, or draws in their order
    passes: int  # that it took
    rounds: int
    proven: bool | None = None  # of a list: no other item of the set can score higher than its last one
    open: float = 0.0  # of approximate draws: the most that unscored items may have of the distribution

    def of_item(self, i: int) -> dict[str, Any]:
        item, (place, score) = self.items[i], ("draw", "logprob") if self.proven is None else ("rank", "score")
        return {place: i + 1, score: item.score, **item.about}

    @property
    def took(self) -> dict[str, Any]:
        """Return an answer's fields for all of them."""
        proven = {} if self.proven is None else {"proven": self.proven}
        return {**proven, "passes": self.passes, "rounds": self.rounds, **({"open": self.open} if self.open else {})}


class Rounds(ABC):
    """A search by rounds. Score `passes`, give the answers to `take`, until there are none; then read `result`."""

    def __init__(self, tree: ScoredTree, max_passes: int | None) -> None:
        self.tree, self._max_passes, self._taken, self._rounds = tree, max_passes or sys.maxsize, 0, 0
        self._bar = -np.inf  # nodes whose mass is no higher are of no use
        self._passes: list[Pass] | None = None

    @property
    def passes(self) -> list[Pass]:
        """Return the round to score next. Empty: the search has ended."""
        if self._passes is None:  # the first is made late, because often an engine makes the list by itself
            self._passes = self._ask()
        return self._passes

    def take(self, answers: Sequence[Answer]) -> None:
        """Take the answers to `passes`, one each: `passes` becomes the next round."""
        self._taken, self._rounds = self._taken + len(self.passes), self._rounds + 1
        self.tree.take(answers, self._bar)
        self._passes = self._ask()

    @property
    def _left(self) -> int:
        return max(0, self._max_passes - self._taken)

    def _ask(self) -> list[Pass]:
        nodes = self._next_nodes()[: self._left]
        return self.tree.ask(nodes) if len(nodes) else []

    @property
    @abstractmethod
    def result(self) -> Found: ...

    def _next_nodes(self) -> Sequence[int] | NDArray[np.int64]:
        """Return the nodes to score in the next round, as many as may be; none at the end."""
        return ()


def check_positive(**numbers: int | None) -> None:
    """Raise ValueError for a number, by its name, that is less than 1."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: make it at least 1")


def check_widths(width: Width) -> None:
    """Raise ValueError unless there is a width, and each is at least 1."""
    check_positive(width=width if isinstance(width, int) else min(width, default=0))


def of_items(item_set: ItemSet, items: Sequence[Sequence[int]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what a set says of items: the key, all keys and, with names, the attributes of the key, or of each key."""
    told: list[dict[str, Any]] = [{"key": keys[0], "keys": keys} for keys in item_set.keys_of(items)]
    for one, each in zip(told, item_set.attributes_of(items, names), strict=True) if names else ():
        one |= {"attributes": each[0]} | ({"keys_attributes": each} if len(each) > 1 else {})
    return told


def described(
    lists: Sequence[Found], item_set: ItemSet, of_set: Mapping[str, Any] = MappingProxyType({}),
    names: Sequence[str] = (),
) -> list[list[dict[str, Any]]]:  # fmt: skip
    """Return an answer's fields for each item of some lists: its own, its keys, those of its list and `of_set`.

    names: of attributes. What the set says of all items is looked up together.
    """
    told = iter(of_items(item_set, [item.tokens for found in lists for item in found.items], names))
    return [
        [{**found.of_item(i), **own, **found.took, **of_set} for i, own in enumerate(islice(told, len(found.items)))]
        for found in lists
    ]


class Search(Rounds):
    """The search for the `k` best items.

    A prefix scores at least as high as everything below it. Items of probability zero are never found. Equal scores
    are ordered by tokens; of items that tie for the last place, the one found first stays.
    """

    def __init__(
        self, item_set: ItemSet, k: int, *, width: Width | None = None, end_token: int | None = None,
        exact: bool = False, renormalised: bool = False, max_passes: int | None = None, proof_passes: int | None = None,
        boost: float = 1.0, normalise_length: float = 0.0,
    ) -> None:  # fmt: skip
        """Raises ValueError if k, width, max_passes or proof_passes is less than 1.

        width: prefixes in a round of the beam, or in each, k if None. By default, a beam: of a round's children the
        `width` best go on, and those that lead to a single item are scored to its end in one pass. It finds what a beam
        of single tokens finds, or better: a single item that has come so far is not pruned on its last tokens.
        exact: after that beam go on from the best prefix, wherever it stands, until none can beat the k-th item.
        end_token: if given, the end of an item counts in its score.
        renormalised: score each token by its share among those that may stand there, as sampling inside the set does.
        The tokens of a tail then cost nothing, neither a score nor a pass.
        max_passes: end after this many passes, unproven. proof_passes: the same, but the beam ends first.
        boost: what the boosts of the set count, which are added to scores: see `view`. normalise_length: a power of an
        item's tokens, its end token if that is scored, by which its log-probability is divided.
        """
        check_positive(k=k, max_passes=max_passes, proof_passes=proof_passes)
        options: dict[str, Any] = {"end_token": end_token, "renormalised": renormalised, "forced": False}
        tree = ScoredTree(item_set, boost=boost, normalise_length=normalise_length, **options)
        super().__init__(tree, max_passes)
        self._k, self._width, self._exact, self._proof_passes = k, k if width is None else width, exact, proof_passes
        check_widths(self._width)
        self._best = np.zeros(0, NODE)  # the best items, at most k
        self._beam, self._new = True, 0  # the nodes of the last round begin at `_new`
        self._pruned = -np.inf  # the best mass of what is pruned for good

    @property
    def result(self) -> Found:
        items = self.tree.items(self._best)
        left = self.tree.nodes["mass"][self.tree.nodes["expansion"] == UNSCORED].max(initial=self._pruned)
        return Found(ordered(items, self.tree.scores(items)), self._taken, self._rounds, proven=bool(left <= self._bar))

    def begin_with(self, made: Found) -> Found | None:
        """Take a list that an engine has made, before the first round. Returns the result if nothing is left to do."""
        return made

    def _next_nodes(self) -> NDArray[np.int64]:
        self._rank_items()
        nodes = self._best_prefixes(self._new if self._beam else 0)
        if self._beam and self._exact and not len(nodes):
            self._beam = False  # it has set a bar, which what it pruned has to beat
            self.tree.keep(0, self._at_stake(0, UNSCORED))
            nodes = self._best_prefixes(0)
        self._new = len(self.tree.nodes)
        return nodes

    def _rank_items(self) -> None:
        """Put the last round's items among the best, those that end at a scored prefix first."""
        new = self.tree.nodes[self._at_stake(self._new, ITEM)]
        new = new[_largest(new["mass"], self._k)]
        items = np.concatenate([self._best, new[new["edge"] == SELF], new[new["edge"] != SELF]])
        self._best = items[np.argsort(-items["mass"], kind="stable")[: self._k]]
        if len(self._best) == self._k:
            self._bar = self._best["mass"][-1]

    def _best_prefixes(self, first: int) -> NDArray[np.int64]:
        """Return the best unscored nodes from `first` on, as many as a round may have. A beam keeps no others."""
        nodes, count = self._at_stake(first, UNSCORED), self._budget()
        masses = self.tree.nodes["mass"][nodes]
        good = _largest(masses, count)
        # Equal scores are ordered by edge: on one level, that is by tokens.
        best = good[np.lexsort((self.tree.nodes["edge"][nodes[good]], -masses[good]))][:count]
        if self._exact:
            return nodes[best]
        self.tree.keep(first, nodes[best])
        masses[best] = -np.inf
        self._pruned = masses.max(initial=self._pruned)
        return first + np.arange(len(best))

    def _at_stake(self, first: int, kind: int) -> NDArray[np.int64]:
        """Return the nodes of a kind, from `first` on, that may still change the result."""
        nodes = self.tree.nodes[first:]
        return first + np.flatnonzero((nodes["expansion"] == kind) & (nodes["mass"] > self._bar))

    def _budget(self) -> int:
        # A proof of many passes takes them in ever larger rounds: a few of the last one's may turn out needless.
        if self._beam:
            return min(width_at(self._width, max(1, self._rounds)), self._left)
        most = min(max(widest(self._width), self._taken // _PROOF_SHARE), self._left)
        return most if self._proof_passes is None else max(0, min(most, self._proof_passes - self._taken))


class TokenScores(Rounds):
    """log p and log q of each token of known items, of which a list's search has the sums alone: in one round.

    Prefixes that items share are scored once. Its `result` is itself.

    items: of each item log p and log q, of its end token too, [tokens + 1] floats each, once the round is taken.
    """

    def __init__(self, item_set: ItemSet, items: Sequence[Sequence[int]], end_token: int) -> None:
        """items: without their end tokens. Raises ItemSetError for one that is no item's beginning."""
        self._rows, self.items = [(*item, end_token) for item in items], list[tuple[list[float], list[float]]]()
        of_prefix: dict[tuple[int, ...], Pass] = {}
        for row in self._rows:
            known = 0
            for i in range(len(row)):
                if (prefix := row[:i]) not in of_prefix:
                    tokens, ends = item_set.children(prefix)
                    after = np.append(tokens, [end_token] * bool(ends)).astype(np.int64)
                    if len(after) == 1 and i + 1 < len(row):
                        continue  # certain: the next pass scores it with the tokens before its own
                    of_prefix[prefix] = Pass(prefix, known, after)
                known = i + 1
        self._passes = list(of_prefix.values())

    def take(self, answers: Sequence[Answer]) -> None:
        of_prefix = {one.tokens: (one, *answer) for one, answer in zip(self.passes, answers, strict=True)}
        for row in self._rows:
            log_p, log_q = list[float](), list[float]()
            for i, token in enumerate(row):
                if row[:i] in of_prefix:
                    one, run, after = of_prefix[row[:i]]
                    log_p += [*map(float, run), float(after[int(np.flatnonzero(one.after == token)[0])])]
                    log_q += [0.0] * len(run)
                    log_q.append(log_p[-1] - float(np.logaddexp.reduce(np.asarray(after, np.float64))))
            self.items.append((log_p, log_q))
        self._passes = []

    @property
    def result(self) -> Any:
        return self


def ordered(items: Sequence[tuple[tuple[int, ...], float]], scores: NDArray[np.float64] | None = None) -> list[Item]:
    """Return items best first, equal ones by tokens. scores: [items] float64, the log-probabilities if None."""
    each = [log for _, log in items] if scores is None else scores.tolist()
    ranked = (Item(tokens, score, {"logprob": log}) for (tokens, log), score in zip(items, each, strict=True))
    return sorted(ranked, key=lambda one: (-one.score, one.tokens))


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return which of some values are the `count` largest, or equal the least of these."""
    if count >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values >= np.partition(values, -count)[-count]) if count else np.zeros(0, np.int64)
