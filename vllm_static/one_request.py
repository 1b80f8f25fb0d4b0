"""A ranked list as one request of the engine, as a front end asks for it; rounds of requests must make the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from itemset.ranking.search import Best, Ranked, ordered
from itemset.serving.config import StaticConfig
from itemset.serving.lists import Refusals
from itemset.serving.request import ListOptions
from itemset.serving.travel import Carried
from itemset.serving.words import LIST, REFERENCE
from vllm_static import compat, metrics

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
ONE_REQUEST, DRAFTED = "one request", "draft head"


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

    def best(self, params: ListParams, table: NDArray[np.float64] | None) -> Best | None:
        """Return the list of an answer, whose prompt_token_id_logprobs are its `table`; None if rounds must make it."""
        if table is not None and table.shape[1] > 1 and (best := best_of(table)).items:
            metrics.LISTS.labels(DRAFTED if params.extra_args[LIST][-1] else ONE_REQUEST).inc()
            return best
        number = None if table is None or table.shape[1] > 1 else int(table[0, 0])
        reason = "the request took the host path" if number is None else REASONS[number]
        ours = (params.extra_args[REFERENCE], params.extra_args[LIST][1])
        self._refusals.refused(reason, of=ours if number in FOR_GOOD else None, always=number == NO_BLOCKS)
        metrics.LISTS.labels(reason).inc()
        return None

    @asynccontextmanager
    async def beams(self, params: ListParams) -> AsyncIterator[None]:
        """Wait until there are beams for the list, first come, first served, and keep them. The draft head's beams take
        no blocks of the KV cache."""
        _, width, *_, placeholders = params.extra_args[LIST]
        width = 0 if placeholders else width
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
