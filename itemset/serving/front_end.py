"""What the front ends of both engines have in common: from a judged request to what the engine gets of it, and to what
its answers are read with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from itemset.item_set import ItemSet
from itemset.ranking.search import Rounds
from itemset.serving import metrics
from itemset.serving.admission import Checks
from itemset.serving.answer_fields import Expected
from itemset.serving.catalogue import RefusedError, set_ref
from itemset.serving.config import StaticConfig
from itemset.serving.constraint import Constraint
from itemset.serving.embedded_answer import ExpectedItems
from itemset.serving.embedded_sets import Constraints
from itemset.serving.request import ItemRequest
from itemset.serving.request_fields import WEIGHT
from itemset.serving.single_request import OneRequest
from itemset.serving.version_watcher import Follower
from itemset.serving.wire import INLINE, EngineRequest

Wanted = str | Constraint
"""What a request has: a set, by its reference, or a constraint with sets in it."""


class ListJob(NamedTuple):
    """A ranked list, or the draws of one prompt, that is to be made.

    of_set: what its answer says of the set. carried: what the request carries by which the engine makes it; None if
    rounds of requests must.
    """

    item_set: ItemSet
    search: Rounds[Any]
    of_set: Mapping[str, str]
    carried: EngineRequest | None


class FrontEndBase:
    """One of each process that takes requests. Safe for threads.

    follower: follows the published sets among the registered ones, once the engine can be asked.
    """

    follower: Follower | None = None

    def __init__(self, config: StaticConfig, checks: Checks, constraints: Constraints, one_request: OneRequest) -> None:
        self.config, self.checks, self.constraints, self.one_request = config, checks, constraints, one_request

    def engine_request(
        self, wanted: Wanted, *, stop_tokens: set[int], max_tokens: int | None, weighed: bool = False, **least: int
    ) -> EngineRequest:
        """Return what a request carries to the engine. Counts it.

        least: `prompt_tokens` and `min_tokens`. Raises RefusedError where the set or the constraint and the other
        parameters leave no way to end an item.
        """
        if isinstance(wanted, str):
            self.checks.request(wanted, stop_tokens=stop_tokens, **least)
            carried = EngineRequest(set_ref(self.checks.catalogue, wanted), weighed=weighed)
        else:
            self.constraints.check(wanted, stop_tokens=stop_tokens, max_tokens=max_tokens, **least)
            carried = EngineRequest(holes=wanted.holes_spec(self.checks.catalogue))
        for reference in [wanted] if isinstance(wanted, str) else wanted.references:
            metrics.REQUESTS.labels(metrics.label(reference)).inc()
        return carried

    def begin_list(
        self,
        asked: ItemRequest,
        end_token: int,
        *,
        prompt_tokens: int,
        max_tokens: int | None,
        after: int,
        **options: Any,
    ) -> ListJob:
        """Begin a request's ranked list or draws. Counts it.

        options: of `OneRequest.spec`. Raises RefusedError as `Checks.ranked` does.
        """
        limits = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "end_token": end_token, "after": after}
        item_set, search = self.checks.ranked(asked, **limits)  # type: ignore[arg-type]
        catalogue, reference = self.checks.catalogue, self.checks.reference(asked)
        metrics.REQUESTS.labels(metrics.label(asked.item_set or INLINE)).inc()
        spec = self.one_request.spec(asked, reference, search, end_token, **options)
        carried = None if spec is None else EngineRequest(set_ref(catalogue, reference), spec)
        return ListJob(item_set, search, catalogue.version_fields(reference), carried)

    def expected(
        self,
        wanted: Wanted,
        stop_tokens: frozenset[int],
        content: Callable[[Sequence[int]], Sequence[int]] | None,
        *,
        weighed: bool,
    ) -> Expected | ExpectedItems:
        """Return what names the items of a request's answers. content: takes off reasoning, see `Expected`."""
        catalogue = self.checks.catalogue
        if isinstance(wanted, str):
            return Expected(catalogue[wanted], stop_tokens, content, catalogue.version_fields(wanted), weighed)
        return ExpectedItems(wanted, self.constraints.vocabulary, catalogue, stop_tokens, content)

    @staticmethod
    def check_weight(reason: str | None, *, instead_of: str | None, ignore_eos: Any) -> None:
        """Raises RefusedError if answers cannot say their `set_weight`.

        reason: why this engine gives none. instead_of: what the request asks for that comes in the same place.
        """
        if instead_of:
            reason = f"it comes in the place of {instead_of}: ask for one of them"
        if ignore_eos:
            reason = "with ignore_eos an answer goes on after its end: leave one of them out"
        if reason:
            raise RefusedError("set weight", f"{WEIGHT} cannot be had here: {reason}", WEIGHT)
