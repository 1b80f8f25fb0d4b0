"""A ranked list, or draws, as one request of the engine. Rounds of requests make the lists, and end the draws, that the
engine does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from itemset.ranking.exact_sampling import Draw, Drawing, Draws
from itemset.ranking.search import Best, Ranked, ordered
from itemset.serving import metrics
from itemset.serving.draw_options import race_width
from itemset.serving.list_runner import DRAWS_OF, Refusals
from itemset.serving.request import ItemRequest
from itemset.serving.wire import GRAPHS, EngineRequest, ListResult, ListSpec, NoList


class OneRequest:
    """Says which lists and draws the engine may make, reads what it has made, and counts both.

    beams: for all races of some draws. widest: beams of a list; None if the engine decides.
    """

    def __init__(
        self, warn: Callable[[str, str], None], *, beams: int, widest: int | None, too_many: str, always: str = ""
    ) -> None:
        """warn: of a logger. too_many: the metrics' label of draws with more beams. always: as of `Refusals`."""
        self.beams, self.widest, self._too_many = beams, widest, too_many
        self.refusals = Refusals(warn, always or None)

    def spec(
        self,
        asked: ItemRequest,
        reference: str,
        search: Any,
        end_token: int,
        *,
        reasons: Mapping[str, bool] = MappingProxyType({}),
    ) -> ListSpec | None:
        """Return the list, or the draws, that the engine may try to make; None if rounds must.

        reference: of its set. search: what `Checks.ranked` gave. reasons: why the engine may not, if they hold.
        """
        if (options := asked.ranked) is not None:
            spec = ListSpec(options.k, options.beam, end_token, options.without_end, options.renormalised)
            more = {"exact": options.exact, "max_passes": options.max_passes is not None}
            more["wider than ranked_list_beams"] = self.widest is not None and spec.width > self.widest
        elif isinstance(search, Drawing) and asked.drawn is not None:
            keys, k = search.races
            width = race_width(asked.drawn, len(keys), k, self.beams)
            spec = ListSpec(k, width or 1, end_token, races=tuple(keys), temperature=asked.drawn.temperature)
            more = {"max_passes": asked.drawn.max_passes is not None, self._too_many: width is None}
        else:
            return None  # draws by importance
        known = self.refusals.why(*_key(reference, spec))
        if reason := known or next((reason for reason, holds in {**more, **reasons}.items() if holds), None):
            _ways(spec).labels(reason).inc()
            return None
        return spec

    def outcome(self, carried: EngineRequest, result: ListResult, search: Any) -> Best | Draws | None:
        """Return what the engine has made; None if rounds must make or end it.

        carried: by the request. search: of draws, the `Drawing` that must end them: it takes over those that are
        decided.
        """
        assert carried.item_set is not None
        assert carried.ranked is not None
        spec, reference = carried.ranked, carried.item_set.reference
        for graph, passes in zip(GRAPHS, result.graphs, strict=False):
            metrics.LIST_PASSES.labels(graph.lower()).inc(passes)
        made: Best | Draws | None = None
        reason, way = result.reason, "draft head" if spec.placeholders else metrics.ONE_REQUEST
        if reason is None and spec.races:
            decided = {i: items for i, items in enumerate(result.items) if result.proven or len(items) == spec.k}
            known = {i: [Draw(tokens, score, True) for tokens, score in items] for i, items in decided.items()}
            made = search.begin_with(known, result.passes, result.rounds)
            way = metrics.UNDECIDED if made is None else way
        elif reason is None and any(result.items):
            made = best_of(result)
        else:
            reason = reason or NoList.HOST_PATH
            way = result.detail if result.detail and reason.scope == "engine" else reason.value
            of = _key(reference, spec) if reason.scope == "set" else None
            self.refusals.refused(way, detail=result.detail, of=of, always=reason.scope == "engine")
        _ways(spec).labels(way).inc()
        return made


def best_of(result: ListResult) -> Best:
    """Return the list that an engine has made."""
    return Best(ordered([Ranked(*item) for item in result.items[0]]), result.proven, result.passes, result.rounds)


def _key(reference: str, spec: ListSpec) -> tuple[str, int]:
    """What a refusal holds for: lists, or draws, of a set with this many beams."""
    return (DRAWS_OF if spec.races else "") + reference, spec.beams


def _ways(spec: ListSpec) -> Any:
    return metrics.DRAWS if spec.races else metrics.LISTS
