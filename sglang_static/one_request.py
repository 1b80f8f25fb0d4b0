"""A ranked list, or draws, as one request of the engine: what the front end asks, and what comes back."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from itemset.ranking.exact_sampling import Draw, Drawing
from itemset.ranking.search import Best, Ranked, ordered
from itemset.serving.drawing import DrawOptions, race_width
from itemset.serving.lists import DRAWS_OF, Refusals
from sglang_static import http

logger = logging.getLogger(__name__)

WANTED = "wanted_list"
"""Attribute of the `GenerateReqInput` that asks for a list: the reference of its set, and a Wanted."""

ENGINE, SET, REQUEST = "engine", "set", "request"
"""What a refusal holds for: all lists of this engine, those of this set and width, or this one."""


class Wanted(NamedTuple):
    """A list of `k` items, by a beam of this width; or the draws that some races make, k items and so many beams each.

    races: their keys, as of `Drawing.races`. temperature: of draws. without_end: as of `ListOptions`.
    """

    k: int
    width: int
    end_token: int
    renormalised: bool
    races: Sequence[int] = ()
    temperature: float = 1.0
    without_end: bool = False

    @property
    def counted(self) -> int | None:
        """The end token that counts in the scores, if any does."""
        return None if self.without_end else self.end_token


class Answered(NamedTuple):
    """A list that the engine has made. texts: of each item, by its tokens. said: what SGLang says of any answer."""

    best: Best
    texts: dict[tuple[int, ...], str]
    said: dict[str, Any]


def refusal(scope: str, reason: str) -> str:
    """The scheduler's answer if it does not make a list."""
    return f"[rounds: {scope}] {reason}"


_REFUSAL = re.compile(r"\[rounds: (\w+)\] (.*)", re.DOTALL)


class OneRequest:
    """Asks the engine for lists and draws. refusals: why it could not have some."""

    def __init__(self, seats: int) -> None:
        """seats: requests that the engine runs at a time."""
        self._seats = seats
        self.refusals = Refusals(logger.warning)

    async def best(
        self,
        generate: Callable[..., AsyncGenerator[Any, None]],
        manager: Any,
        prompt: list[int],
        reference: str,
        wanted: Wanted,
        skip_special_tokens: bool,
    ) -> Answered | None:
        """Return a list, or None if rounds must make it. Cancelled, it takes the request back.

        skip_special_tokens: as in SGLang's sampling parameters, of the items' texts.
        """
        from itemset.serving.metrics import LISTS, ONE_REQUEST

        info = await self._ask(generate, manager, prompt, reference, wanted, skip_special_tokens)
        if not info:
            return None
        LISTS.labels(ONE_REQUEST).inc()
        return _answered(info)

    async def draw(
        self,
        generate: Callable[..., AsyncGenerator[Any, None]],
        manager: Any,
        prompt: list[int],
        reference: str,
        asked: DrawOptions,
        end_token: int,
        drawing: Drawing,
    ) -> dict[str, Any]:
        """Let the engine run the races of `drawing`, which takes over those that it decides: rounds must end the
        others. Returns what SGLang says of any answer, nothing if it did not run them."""
        from itemset.serving.metrics import DRAWS, ONE_REQUEST, UNDECIDED

        keys, k = drawing.races
        width = race_width(asked, len(keys), k, self._seats)
        if width is None or asked.max_passes is not None:
            DRAWS.labels("max_passes" if width is not None else "more draws than the engine has seats for").inc()
            return {}
        wanted = Wanted(k, width, end_token, False, keys, asked.temperature)
        info = await self._ask(generate, manager, prompt, reference, wanted, True)
        if info:
            results = info.pop("beam_results")
            took = results[0]["meta_info"]["finish_reason"]
            items = iter(_items(results))
            found = {i: [Draw(*next(items), True) for _ in range(count)] for i, count in enumerate(took["found"])}
            DRAWS.labels(ONE_REQUEST if took["proven"] else UNDECIDED).inc()
            known = {i: some for i, some in found.items() if took["proven"] or len(some) == k}
            drawing.begin_with(known, took["passes"], took["rounds"])
        return info

    async def _ask(
        self,
        generate: Callable[..., AsyncGenerator[Any, None]],
        manager: Any,
        prompt: list[int],
        reference: str,
        wanted: Wanted,
        skip_special_tokens: bool,
    ) -> dict[str, Any]:
        """Return the `meta_info` of what the engine has made, empty if it makes it not."""
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        from sglang_static.metrics import count_rounds

        races = len(wanted.races)
        ours = (DRAWS_OF + reference, races * wanted.width) if races else (reference, wanted.width)
        if reason := self.refusals.why(*ours):
            count_rounds(ENGINE if self.refusals.always else SET, reason, draws=races > 0)
            return {}
        asked = GenerateReqInput(
            rid=uuid.uuid4().hex,
            input_ids=prompt,
            sampling_params={"beam_width": 2, "max_new_tokens": 1, "skip_special_tokens": skip_special_tokens},
            log_metrics=False,
        )
        setattr(asked, WANTED, (reference, wanted))
        output: dict[str, Any] = {}
        try:
            with http.ordinary():
                async for part in generate(obj=asked, request=None):
                    output = part
        except asyncio.CancelledError:
            manager.abort_request(asked.rid)
            raise
        except ValueError as error:
            if not (found := _REFUSAL.fullmatch(str(error))):
                raise
            scope, reason = found.groups()
            count_rounds(scope, reason, draws=races > 0)
            self.refusals.refused(reason, of=ours if scope == SET else None, always=scope == ENGINE)
            return {}
        except HTTPException as error:  # the KV cache was full
            count_rounds(REQUEST, "", draws=races > 0)
            self.refusals.refused(str(error.detail))
            return {}
        info: dict[str, Any] = output["meta_info"]
        if "beam_results" not in info:
            count_rounds(REQUEST, "", draws=races > 0)
            self.refusals.refused(str(info.get("finish_reason")))
            return {}
        return info


def _answered(info: dict[str, Any]) -> Answered:
    results = info.pop("beam_results")
    took = results[0]["meta_info"]["finish_reason"]
    texts = {tuple(one["output_ids"][:-1]): one["text"] for one in results}
    found = [Ranked(*item) for item in _items(results)]
    return Answered(Best(ordered(found), took["proven"], took["passes"], took["rounds"]), texts, info)


def _items(results: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], float]]:
    """The items of SGLang's beams without their end tokens, and their scores."""
    found = [(tuple(one["output_ids"][:-1]), one["meta_info"]["sequence_score"]) for one in results]
    return [(tokens, score) for tokens, score in found if tokens]  # an end token alone says that there is no item
