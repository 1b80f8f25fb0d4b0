"""Lists that explore: the best items, and after them draws without replacement among those that these leave."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import Found, Item, Rounds, Search
from itemset.select.views import view


class Exploring(Rounds):
    """The search for the best items, and then `n` draws by the model's probabilities, and boosts, among the others:
    fewer if the set has fewer. An answer says of each draw that it is explored."""

    def __init__(
        self, item_set: ItemSet, best: Search, n: int, *, end_token: int, boost: float = 1.0,
        max_passes: int | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        """best: of the same set. The others as for `Drawing`."""
        super().__init__(best.tree, None)
        self._of, self._best, self._n = item_set, best, n
        self._options: dict[str, Any] = {"end_token": end_token, "boost": boost, "max_passes": max_passes, "seed": seed}
        self._made: Found | None = None
        self._draws: Drawing | None = None

    def begin_with(self, made: Found) -> None:
        """Take the best items from a list that an engine has made: only draws are left to do."""
        self._made = made

    def take(self, answers: Sequence[Answer]) -> None:
        (self._best if self._draws is None else self._draws).take(answers)
        self._passes = self._ask()

    def _ask(self) -> list[Pass]:
        if self._made is None:
            if passes := self._best.passes:
                return passes
            self._made = self._best.result
        if self._draws is None:
            found = [item.tokens for item in self._made.items]
            if len(found) == len(self._of):
                return []
            listed: Any = list(chain.from_iterable(self._of.keys_of(found)))
            try:
                rest = view(self._of, exclude_keys=listed)
            except ItemSetError:  # what is left has keys of the best items, too
                return []
            self._draws = Drawing(rest, self._n, replace=False, **self._options)
        return self._draws.passes

    @property
    def result(self) -> Found:
        """Return the result so far. Raises CutOffError as `Drawing.result` does."""
        made = self._made or self._best.result
        if self._draws is None:
            return made
        drawn = self._draws.result
        logs = [(item.tokens, item.score) for item in drawn.items]
        scores = self.tree.scores(logs) if logs else ()
        items = [
            Item(tokens, float(score), {"logprob": log, "explored": True})
            for (tokens, log), score in zip(logs, scores, strict=True)
        ]
        passes, rounds = made.passes + drawn.passes, made.rounds + drawn.rounds
        return made._replace(items=[*made.items, *items], passes=passes, rounds=rounds)
