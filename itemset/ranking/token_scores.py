"""log p and log q of each token of items that are known already, such as those of a list: one round of passes.

A list's search has the sums alone, and a trainer needs each token's. Prefixes that items share are scored once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from itemset.item_set import ItemSet
from itemset.ranking.scored_tree import Answers, Pass
from itemset.ranking.search import Rounds


class TokenScores(Rounds):
    """The scores of some items' tokens and of the end token after each. Its `result` is itself.

    items: of each item log p and log q, [tokens + 1] floats each, once the round is taken.
    """

    def __init__(self, item_set: ItemSet, items: Sequence[Sequence[int]], end_token: int) -> None:
        """items: without their end tokens. Raises ItemSetError for one that is no item's beginning."""
        self._items, self._end, self.items = items, end_token, list[tuple[list[float], list[float]]]()
        self._of_prefix: dict[tuple[int, ...], Pass] = {}
        for item in items:
            known = 0
            for i in range(len(item) + 1):
                prefix = tuple(item[:i])
                if prefix not in self._of_prefix:
                    tokens, ends = item_set.children(prefix)
                    after = np.append(tokens, [end_token] * bool(ends)).astype(np.int64)
                    if len(after) == 1 and i < len(item):
                        continue  # certain: the next pass scores it with the tokens before its own
                    self._of_prefix[prefix] = Pass(prefix, known, after)
                known = i + 1
        self._passes = list(self._of_prefix.values())

    def take(self, answers: Sequence[Answers]) -> None:
        of_prefix = dict(zip(self._of_prefix, answers, strict=True))
        for item in self._items:
            log_p, log_q, row = list[float](), list[float](), (*item, self._end)
            for i, token in enumerate(row):
                if (one := self._of_prefix.get(row[:i])) is None:
                    continue
                run, after = of_prefix[row[:i]]
                log_p += map(float, run)
                log_q += [0.0] * len(run)
                log_p.append(float(after[int(np.flatnonzero(one.after == token)[0])]))
                log_q.append(log_p[-1] - float(np.logaddexp.reduce(np.asarray(after, np.float64))))
            self.items.append((log_p, log_q))
        self._passes = []

    @property
    def result(self) -> Any:
        return self

    def _next_nodes(self) -> Any:
        return ()
