"""Ranked lists and draws in a front end: within which limits, as one request of the engine, or in rounds of requests.

Rounds make the lists, and end the draws, that the engine does not: offline, or beside a server's other requests.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Any

import msgspec

from itemset.item_set import ItemSet
from itemset.ranking.exact_sampling import CutOffError, Drawing
from itemset.ranking.exploring import Exploring
from itemset.ranking.importance import Importance
from itemset.ranking.quotas import QuotaSearch
from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import Found, Item, Rounds, Search, Width, described, ordered, widest
from itemset.serving import metrics
from itemset.serving.catalogue import RefusedError
from itemset.serving.config import StaticConfig, Words
from itemset.serving.front.beside import on
from itemset.serving.front.request_fields import APPROXIMATE, DRAWS, IMPORTANCE, OF_EXACT, DrawOptions, ListOptions
from itemset.serving.wire import EngineRequest, ListResult, ListSpec, NoList

FEW = 32  # of the engine's seats, the part that lists may have whatever the others have, if the engine is quick
SLICE = 32  # items of an answer that are written out in one turn of the event loop
OTHERS_STAY = 1.0  # seconds for which lists make room after they have met other requests
PATIENCE = 0.1  # seconds that another request waits at most for what lists have in the engine
LONG = 3.0  # seconds after which a list says in the log why it takes so long
_KEPT = 256  # refusals that are remembered


class AbortedError(Exception):
    """The engine has ended a request of a list, because it goes to sleep or takes new weights: so the list ends too."""


def search_for(
    item_set: ItemSet, options: ListOptions | DrawOptions, end_token: int, config: StaticConfig, words: Words,
    boost: float = 1.0,
) -> Rounds:  # fmt: skip
    """Return the search for a list, or draws. boost: a factor of boosts. Raises RefusedError for what passes limits."""
    most, limit = config.ranked_list_passes, config.ranked_list_limit
    reason, width = "beam search", widest(options.width or 1)
    if isinstance(options, DrawOptions):
        reason, sizes = "draws", [(options.n, f"request for {options.n:,} draws", DRAWS)]
        sizes.append((width, f"round of {width:,} passes", "width"))
    else:
        sizes = [(options.n, f"ranked list of {options.n:,}", "n"), (width, f"beam of width {width:,}", "width")]
    for size, what, param in sizes:
        if size > limit:
            message = f"a {what} is longer than this engine's limit of {limit:,}: ask for fewer items, or raise "
            raise RefusedError(reason, message + words.option("ranked_list_limit"), param)
    if (options.max_passes or 0) > most:
        message = f"max_passes={options.max_passes:,} is more than this engine's limit of {most:,}: lower it, or raise "
        raise RefusedError(reason, message + words.option("ranked_list_passes"), "max_passes")
    most, given = max(1, most), msgspec.structs.asdict(options)
    common: dict[str, Any] = {"end_token": end_token, "max_passes": options.max_passes or most}
    if isinstance(options, DrawOptions):
        common["seed"] = options.seed
        if options.draw == IMPORTANCE:
            return Importance(item_set, options.n, candidates=options.candidates or 1, **common)
        return Drawing(item_set, options.n, boost=boost, **common, **{name: given[name] for name in OF_EXACT})
    scored_end, explored = None if given.pop("without_end") else end_token, given.pop("explore") or 0
    given |= {"k": given.pop("n") - explored, "end_token": scored_end, "proof_passes": most, "boost": boost}
    if at_most := given.pop("at_most"):
        return QuotaSearch(item_set, at_most=at_most, most=limit, **given)
    best = Search(item_set, **given)
    return Exploring(item_set, best, explored, boost=boost, **common) if explored else best


def run_together(
    searches: Sequence[Rounds], score: Callable[[list[tuple[int, Pass]]], Sequence[Answer]]
) -> list[Found]:
    """Run searches to their ends, round by round together. score: runs passes, each with its search's index. Raises
    RefusedError as `result_of` does."""
    while asked := [(i, one) for i, search in enumerate(searches) for one in search.passes]:
        answers = iter(score(asked))
        for search in searches:
            if search.passes:
                search.take([next(answers) for _ in search.passes])
    return [result_of(search) for search in searches]


def result_of(search: Rounds) -> Found:
    """Return the result of a search at its end. Raises RefusedError if draws were cut off, or there is no item."""
    try:
        result = search.result
    except CutOffError as error:
        known = "" if isinstance(search, Exploring) else f", or add {APPROXIMATE}: true for the best known by then"
        raise RefusedError(
            "draws",
            f"{error}, their limit: raise max_passes{known}. Fewer draws, or a smaller set, take fewer passes",
            "max_passes",
        ) from error
    if not result.items:
        raise RefusedError("beam search", "no item was found before the limit: raise max_passes", "max_passes")
    return result


class OneRequest:
    """Says which lists and draws the engine may make, reads what it has made, and counts both. It remembers why rounds
    must make the others, and logs each reason once.

    beams: for all races of some draws. widest: beams of a list; None if the engine decides. always: why rounds make all
    lists, as far as it is known.
    """

    def __init__(
        self, warn: Callable[[str, str], None], *, beams: int, widest: int | None, too_many: str, always: str = "",
        with_mend: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        """warn: of a logger. too_many: the label of draws with more beams. with_mend: adds to a reason what would make
        lists in one request.
        """
        self.beams, self.widest, self._too_many, self._with_mend = beams, widest, too_many, with_mend
        self._warn, self._of = lru_cache(_KEPT)(warn), dict[tuple[str, bool, Width], str]()
        self._room = dict[str, int]()  # of sets for whose lists as many beams as usual were too many
        self._note(always)

    def _note(self, always: str) -> None:
        self.always = always
        if always:
            metrics.BY_ROUNDS.labels(always).set(1)

    @property
    def by_rounds(self) -> str | None:
        """Return `always`, and what mends it."""
        return self._with_mend(self.always) if self.always else None

    def usual_beams(self, reference: str) -> int:
        """Return the most beams that a list of this set has which does not say how many, as far as the engine's room
        is known. Beside them there may be as many tails."""
        return self._room.get(reference, self.beams // 2 if self.widest is None else self.widest)

    def _refused(self, reference: str, spec: ListSpec, result: ListResult) -> str:
        """Note why the engine did not make a list. Return the label of that."""
        reason = result.reason or NoList.HOST_PATH
        label = reason.value
        if reason.scope == "engine":
            self._note(label := result.detail or label)
        elif reason.scope == "set":  # it never makes one of this width
            if len(self._of) >= _KEPT:
                self._of.clear()
                self._room.clear()
            self._of[_key(reference, spec)] = label
            if not spec.races:
                self._room[reference] = spec.beams // 2
        self._warn("A ranked list takes rounds of requests: %s", result.detail or label)
        return label

    def spec(
        self, options: ListOptions | DrawOptions, reference: str, search: Any, end_token: int, placeholders: int,
        reasons: Mapping[str, bool],
    ) -> ListSpec | None:  # fmt: skip
        """Return the list, or the draws, that the engine may try to make; None if rounds must.

        reference: of its set. search: what `search_for` gave. placeholders: tokens after the prompt if a draft head
        makes the list, which nothing then prevents. reasons: why the engine may not, if they hold.
        """
        if isinstance(options, ListOptions):
            scores = options.without_end, options.renormalised
            spec = ListSpec(
                options.n, options.beam, end_token, *scores, placeholders=placeholders, boost=search.tree.boost,
                normalise_length=search.tree.length,
            )  # fmt: skip
            if placeholders:
                return spec
            more = {"exact": options.exact, "max_passes": options.max_passes is not None}
            # What is complete before its end is scored has a score of its own in no kernel.
            more["normalise_length without ends"] = bool(options.normalise_length) and any(scores)
            more["wider than ranked_list_beams"] = self.widest is not None and spec.beams > self.widest
        elif isinstance(search, Drawing):
            keys, k = search.races
            width = options.race_width(len(keys), k, self.beams)
            spec = ListSpec(
                k, width or 1, end_token, races=tuple(keys), temperature=options.temperature, boost=search.tree.boost
            )
            more = {"max_passes": options.max_passes is not None, self._too_many: width is None}
        else:
            return None  # draws by importance
        known = self.always or self._of.get(_key(reference, spec))
        if reason := known or next((reason for reason, holds in {**more, **reasons}.items() if holds), None):
            _ways(spec).labels(reason).inc()
            return None
        return spec

    def outcome(self, carried: EngineRequest, result: ListResult, search: Any) -> Found | None:
        """Return what the engine has made; None if rounds must make or end it.

        carried: by the request. search: the `Drawing` that must end draws: it takes over those that are decided.
        """
        assert carried.item_set is not None
        assert carried.ranked is not None
        spec, reference = carried.ranked, carried.item_set.reference
        made: Found | None = None
        way = "draft head" if spec.placeholders else metrics.ONE_REQUEST
        if result.reason is None and spec.races:
            decided = {i: items for i, items in enumerate(result.items) if result.proven or len(items) == spec.k}
            known = {i: [Item(*item, {"exact": True}) for item in items] for i, items in decided.items()}
            made = search.begin_with(known, result.passes, result.rounds)
            way = metrics.UNDECIDED if made is None else way
        elif result.reason is None and any(result.items):
            (items,) = result.items
            ranked = ordered(items, search.tree.scores(items))
            made = search.begin_with(Found(ranked, result.passes, result.rounds, proven=result.proven))
        else:
            way = self._refused(reference, spec, result)
        _ways(spec).labels(way).inc()
        return made


def _key(reference: str, spec: ListSpec) -> tuple[str, bool, Width]:
    """Return what a refusal holds for: lists, or draws, of a set with this many beams."""
    return reference, bool(spec.races), spec.beams if spec.races else spec.width


def _ways(spec: ListSpec) -> Any:
    return metrics.DRAWS if spec.races else metrics.LISTS


class Pace:
    """How much of lists an engine may have at a time, so that whoever comes next waits no longer than PATIENCE for it.

    The unit is what makes its steps longer: requests, or beams. One is allowed whatever it takes.
    """

    def __init__(self, most: int) -> None:
        self.most, self._each = most, math.inf  # seconds that a unit takes; not known at first

    @property
    def limit(self) -> int:
        return min(self.most, max(1, int(PATIENCE / self._each)))

    def took(self, units: int, seconds: float) -> None:
        """Note how long the engine took while it had this many units."""
        each = max(seconds, 1e-6) / max(1, units)
        self._each = each if self._each == math.inf else 0.9 * self._each + 0.1 * each


class Lists:
    """Runs the ranked lists of a front end, all on one event loop, so that other requests hardly notice.

    The searches' own work is done on a thread. Engine requests are made one in a turn of the loop, list by list. Beside
    other requests as many are under way as these are, so that each side has half of a step; or a few, as far as the
    engine's `Pace` allows. Alone, up to half of what the engine takes, as its `Pace` allows.
    """

    def __init__(
        self, seats: int, unfinished: Callable[[], int], warn: Callable[..., None], *, shorter: str = ""
    ) -> None:
        """seats: requests that the engine runs at a time. unfinished: how many it has now, those of lists included.

        warn: of a logger, for the first list that takes LONG. shorter: what in the engine's flags would shorten it.
        """
        self._few = max(1, seats // FEW)
        self._pace = Pace(max(1, seats // 2))
        text = (
            "A ranked list has taken %g s and goes on: it takes rounds of requests, a forward pass for each beam and "
            "round; a smaller `width`, or `renormalised`, shortens lists%s"
        )
        self._say_why = cache(partial(warn, text, LONG, shorter))  # the first time alone
        self._unfinished = unfinished
        self._under_way, self._others, self._others_at = 0, 0, -OTHERS_STAY
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "ranked-lists")

    async def run(
        self, search: Rounds, ask: Callable[[Pass], Awaitable[Any]], read: Callable[[Pass, Any], Answer]
    ) -> Found:
        """Run a search to its end. Cancelled, it cancels what it has asked. Raises as `result_of` and `ask` do.

        ask: makes the engine's request for a pass. read: what its output says, called on the thread.
        """

        def take(outputs: list[Any]) -> None:
            search.take([read(one, output) for one, output in zip(search.passes, outputs, strict=True)])

        long = asyncio.get_running_loop().call_later(LONG, self._say_why)
        try:
            await on(self._thread, lambda: search.passes)  # the first round may have to be made
            while search.passes:
                await on(self._thread, take, await self._round(search.passes, ask))
            return await on(self._thread, result_of, search)
        finally:
            long.cancel()

    async def entries(
        self, best: Found, item_set: ItemSet, of_set: Mapping[str, Any], names: Sequence[str]
    ) -> AsyncGenerator[list[tuple[Any, dict[str, Any]]], None]:
        """Yield SLICE items at a time, each with what an answer says of it (`described`). Between them others run."""
        (entries,) = await on(self._thread, described, [best], item_set, of_set, names)
        items = list(zip(best.items, entries, strict=True))
        for first in range(0, len(items), SLICE):
            await asyncio.sleep(0)
            yield items[first : first + SLICE]

    async def _round(self, passes: Sequence[Pass], ask: Callable[[Pass], Awaitable[Any]]) -> list[Any]:
        tasks: list[asyncio.Future[Any]] = []
        try:
            for one in passes:
                async with self._turn:  # lists take turns, one request each
                    while self._under_way >= self._limit():
                        self._freed.clear()
                        await self._freed.wait()
                    tasks.append(asyncio.ensure_future(ask(one)))
                    self._under_way += 1
                    tasks[-1].add_done_callback(partial(self._leave, self._unfinished(), time.monotonic()))
                    await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _leave(self, among: int, began: float, task: asyncio.Future[Any]) -> None:
        if not task.cancelled():
            # Others' steps are no slowness of lists: all that the engine has share its time.
            self._pace.took(max(among, self._unfinished(), self._under_way), time.monotonic() - began)
        self._under_way -= 1
        self._freed.set()

    def _limit(self) -> int:
        now, others = time.monotonic(), self._unfinished() - self._under_way
        if others > 0:
            self._others, self._others_at = others, now
        if now - self._others_at < OTHERS_STAY:
            return max(min(self._few, self._pace.limit), min(self._others, self._pace.most))
        return max(self._few, self._pace.limit)
