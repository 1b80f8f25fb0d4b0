"""A ranked list, or draws, as one request of the engine, as a front end asks for it. Rounds of requests must make the
other lists, and end the other draws."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from itemset.ranking.exact_sampling import Draw, Drawing, Draws
from itemset.ranking.search import Best, Ranked, ordered
from itemset.serving import metrics
from itemset.serving.config import StaticConfig
from itemset.serving.drawing import DrawOptions, race_width
from itemset.serving.lists import DRAWS_OF, Pace, Refusals
from itemset.serving.metrics import ONE_REQUEST, UNDECIDED
from itemset.serving.request import ListOptions
from itemset.serving.travel import Carried
from itemset.serving.words import LIST, RACES, REFERENCE
from vllm_static import compat

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

NO_BLOCKS, NO_ROOM, TOO_DEEP, TOO_LONG, TOO_LARGE = range(5)
REASONS = (
    "the KV cache has no blocks for beams",
    "so many beams do not fit their blocks",
    "the set has too many levels",
    "the set's tails are too long",
    "the logits of a pass are too large",
)
"""Why a worker did not make a list, by number: its answer is then a table of this one number."""
FOR_GOOD = (TOO_DEEP, TOO_LONG, TOO_LARGE)  # it holds for all lists of the set that are as wide
DRAFTED = "draft head"
GRAPHS = ("FULL", "PIECEWISE", "NONE")
"""vLLM's names of how a pass runs; the third is without a CUDA graph."""
HEAD = 3 + len(GRAPHS) + 1
"""Numbers of a table's first row: see `wide_lists.WideLists.answer`."""
_BEAMS = 512  # until a worker has said how many have room
LOOK = 0.002  # seconds between two looks whether other requests have had their time


class ListParams(SamplingParams):
    """Of a request that is a ranked list: with them it is checked, and carries its set, from the start."""


class OneRequest:
    """Asks the engine for lists, as many at a time as `ranked_list_beams` says, or as a worker says that it has room
    for. It counts how each list is made.

    under_way: lists that the engine has now.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = StaticConfig.of(vllm_config.additional_config)
        self._refusals = Refusals(logger.warning, compat.why_rounds(vllm_config))
        self._engines: int = vllm_config.parallel_config.data_parallel_size
        self._taken, self.under_way = 0, 0  # beams; lists that have some
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._others_until = 0.0
        self._pace = Pace(1, 1)
        self._have(_BEAMS if config.ranked_list_beams is None else config.ranked_list_beams)
        self._asks_workers = config.ranked_list_beams is None

    def params(
        self,
        reference: str,
        carried: Callable[[str], Carried],
        asked: ListOptions,
        end_token: int,
        placeholders: int = 0,
    ) -> ListParams | None:
        """Return the parameters of a request for the list; None if rounds must make it.

        reference: its set's, as `front.attach` would name it. carried: `travel.carried`. placeholders: how many stand
        after the prompt, if the draft head makes the list; 0 for beams of the model.
        """
        width = asked.beam
        of_list: dict[str, Any] = {"k": asked.k, "width": width, "renormalised": asked.renormalised}
        of_list["end_token"] = asked.counted(end_token)
        if placeholders:
            return list_params(carried(reference), placeholders=placeholders, **of_list)
        reasons = {
            "exact": asked.exact,
            "max_passes": asked.max_passes is not None,
            "wider than ranked_list_beams": width > self._width,
        }
        if reason := self._refusals.why(reference, width) or next(
            (reason for reason, holds in reasons.items() if holds), None
        ):
            metrics.LISTS.labels(reason).inc()
            return None
        return list_params(carried(reference), **of_list)

    def of_draws(
        self,
        reference: str,
        carried: Callable[[str], Carried],
        asked: DrawOptions,
        end_token: int,
        drawing: Drawing,
    ) -> ListParams | None:
        """Return the parameters of a request for draws, whose races are those of `drawing`; None if rounds must make
        them. Else as `params`."""
        keys, wanted = drawing.races
        width = race_width(asked, len(keys), wanted, self._width)
        if asked.max_passes is not None:
            reason: str | None = "max_passes"
        elif width is None:
            reason = "more draws than ranked_list_beams has room for"
        else:
            reason = self._refusals.why(DRAWS_OF + reference, width * len(keys))
        if width is None or reason is not None:
            metrics.DRAWS.labels(reason).inc()
            return None
        params = list_params(carried(reference), k=wanted, width=width, end_token=end_token, renormalised=False)
        params.extra_args[RACES] = [asked.temperature, *keys]
        return params

    def best(self, params: ListParams, table: NDArray[np.float64] | None, search: Any = None) -> Best | Draws | None:
        """Return the list of an answer, whose prompt_token_id_logprobs are its `table`; None if rounds must make it.

        search: for draws, the `Drawing` that must end them if they are not decided: it takes over those that are.
        """
        if table is not None and table.shape[1] >= HEAD and not params.extra_args[LIST][-1]:
            *counts, beams = table[0, 3:HEAD].astype(int).tolist()
            for graph, count in zip(GRAPHS, counts, strict=True):
                metrics.LIST_PASSES.labels(graph.lower()).inc(count)
            if self._asks_workers:
                self._have(beams)
        races = len(params.extra_args.get(RACES, [])[1:])
        ways = metrics.DRAWS if races else metrics.LISTS
        if table is not None and table.shape[1] > 1 and races:
            done = draws_of(table, races, search)
            ways.labels(UNDECIDED if done is None else ONE_REQUEST).inc()
            return done
        if table is not None and table.shape[1] > 1 and (best := best_of(table)).items:
            ways.labels(DRAFTED if params.extra_args[LIST][-1] else ONE_REQUEST).inc()
            return best
        number = None if table is None or table.shape[1] > 1 else int(table[0, 0])
        reason = "the request took the host path" if number is None else REASONS[number]
        ours = ((DRAWS_OF if races else "") + params.extra_args[REFERENCE], _beams(params))
        self._refusals.refused(reason, of=ours if number in FOR_GOOD else None, always=number == NO_BLOCKS)
        ways.labels(reason).inc()
        return None

    def _have(self, beams: int) -> None:
        """So many beams have room in each engine."""
        self._width, self._pace.most = beams, beams * self._engines
        self._freed.set()

    @asynccontextmanager
    async def beams(self, params: ListParams, unfinished: Callable[[], int]) -> AsyncIterator[None]:
        """Wait until there are beams for the list, first come, first served, and keep them. The draft head's beams take
        no blocks of the KV cache.

        A list's step is a long one: only so many are under way as their `Pace` allows, and after one the engine's other
        requests have as much time for themselves as it took. unfinished: how many requests there are, of lists too.
        """
        width = 0 if params.extra_args[LIST][-1] else _beams(params)
        async with self._turn:
            while self._taken and self._taken + width > self._pace.limit:
                self._freed.clear()
                await self._freed.wait()
            while width and unfinished() > self.under_way and time.monotonic() < self._others_until:
                await asyncio.sleep(LOOK)
            self._taken += width
            self.under_way += 1
        began, among = time.monotonic(), self._taken
        try:
            yield
            if width:
                self._pace.took(among, time.monotonic() - began)
        finally:
            self._taken -= width
            self.under_way -= 1
            if width:
                now = time.monotonic()
                self._others_until = now + (now - began)
            self._freed.set()


def _beams(params: ListParams) -> int:
    """How many beams a list has, or all races of some draws."""
    width: int = params.extra_args[LIST][1]
    return width * max(1, len(params.extra_args.get(RACES, [])[1:]))


def list_params(
    carried: Carried, *, k: int, width: int, end_token: int | None, renormalised: bool, placeholders: int = 0
) -> ListParams:
    """Return the parameters of a request for a list: see `OneRequest.params`. Its one token does not matter.

    end_token: None if ends cost nothing.
    """
    end = -1 if end_token is None else end_token
    return ListParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,  # no other request has these parameters
        structured_outputs=StructuredOutputsParams(choice=[carried[REFERENCE]]),
        extra_args={**carried, LIST: [k, width, end, int(renormalised), placeholders]},
    )


def best_of(table: NDArray[np.float64]) -> Best:
    """Return what a worker's table says, [1 + k, 2 + longest]: see `wide_lists.WideLists.answer`."""
    proven, passes, rounds = table[0, :3].tolist()
    found = table[1:][np.isfinite(table[1:, 0])]
    rows = zip(found[:, 0].tolist(), found[:, 1:].astype(np.int64).tolist(), strict=True)
    items = [Ranked(tuple(tokens[:length]), score) for score, (length, *tokens) in rows]
    return Best(ordered(items), bool(proven), int(passes), int(rounds))


def draws_of(table: NDArray[np.float64], races: int, drawing: Drawing) -> Draws | None:
    """Return what a worker's table says of the draws that so many races make, [1 + items, 2 + longest]; None if not all
    of them are decided, or if there is nothing to draw. `drawing` then takes over those that are."""
    proven, passes, rounds = table[0, :3].tolist()
    found: dict[int, list[Draw]] = {}
    for race, rows in enumerate(np.split(table[1:], races)):
        here = rows[np.isfinite(rows[:, 0])]
        if proven or len(here) == len(rows):
            found[race] = [
                Draw(tuple(tokens[:length]), score, True)
                for score, (length, *tokens) in zip(here[:, 0].tolist(), here[:, 1:].astype(int).tolist(), strict=True)
            ]
    return drawing.begin_with(found, int(passes), int(rounds))
