"""A ranked list, or draws, as one request of the engine, as a front end asks for it. Rounds of requests must make the
other lists, and end the other draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from itemset.ranking.draws import Draw, Drawing, Draws
from itemset.ranking.search import Best, Ranked, ordered
from itemset.serving import metrics
from itemset.serving.config import StaticConfig
from itemset.serving.drawing import DrawOptions, race_width
from itemset.serving.lists import DRAWS_OF, Refusals
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


class ListParams(SamplingParams):
    """Of a request that is a ranked list: with them it is checked, and carries its set, from the start."""


class OneRequest:
    """Asks the engine for lists, as many at a time as `ranked_list_beams` says. It counts how each list is made."""

    def __init__(self, vllm_config: Any) -> None:
        config = StaticConfig.of(vllm_config.additional_config)
        self._refusals, self._width = Refusals(logger.warning, compat.why_rounds(vllm_config)), config.ranked_list_beams
        self._free = self._width * vllm_config.parallel_config.data_parallel_size
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    def params(
        self,
        reference: str,
        carried: Callable[[str], Carried],
        asked: ListOptions,
        end_token: int,
        placeholders: int = 0,
    ) -> ListParams | None:
        """Return the parameters of a request for the list; None if rounds must make it.

        reference: its set's, as `front.attach` would name it. carried: `Sender.carried`. placeholders: how many stand
        after the prompt, if the draft head makes the list; 0 for beams of the model.
        """
        width = asked.beam
        if placeholders:
            return list_params(
                carried(reference), k=asked.k, width=width, end_token=end_token, renormalised=asked.renormalised,
                placeholders=placeholders,
            )  # fmt: skip
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
        return list_params(
            carried(reference), k=asked.k, width=width, end_token=end_token, renormalised=asked.renormalised
        )

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

    @asynccontextmanager
    async def beams(self, params: ListParams) -> AsyncIterator[None]:
        """Wait until there are beams for the list, first come, first served, and keep them. The draft head's beams take
        no blocks of the KV cache."""
        width = 0 if params.extra_args[LIST][-1] else _beams(params)
        async with self._turn:
            while self._free < width:
                self._freed.clear()
                await self._freed.wait()
            self._free -= width
        try:
            yield
        finally:
            self._free += width
            self._freed.set()


def _beams(params: ListParams) -> int:
    """How many beams a list has, or all races of some draws."""
    width: int = params.extra_args[LIST][1]
    return width * max(1, len(params.extra_args.get(RACES, [])[1:]))


def list_params(
    carried: Carried, *, k: int, width: int, end_token: int, renormalised: bool, placeholders: int = 0
) -> ListParams:
    """Return the parameters of a request for a list: see `OneRequest.params`. Its one token does not matter."""
    return ListParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,  # no other request has these parameters
        structured_outputs=StructuredOutputsParams(choice=[carried[REFERENCE]]),
        extra_args={**carried, LIST: [k, width, end_token, int(renormalised), placeholders]},
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
