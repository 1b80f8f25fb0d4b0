"""A ranked list as one request of the engine: what the front end asks, and what comes back."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from itemset.ranking.search import Best, Ranked, ordered
from itemset.serving.lists import Refusals
from sglang_static import http

logger = logging.getLogger(__name__)

WANTED = "wanted_list"
"""Attribute of the `GenerateReqInput` that asks for a list: the reference of its set, and a Wanted."""

ENGINE, SET, REQUEST = "engine", "set", "request"
"""What a refusal holds for: all lists of this engine, those of this set and width, or this one."""


class Wanted(NamedTuple):
    """A list of `k` items, by a beam of this width."""

    k: int
    width: int
    end_token: int
    renormalised: bool


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
    """Asks the engine for lists. refusals: why it could not have some."""

    def __init__(self) -> None:
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
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        from itemset.serving.metrics import LISTS
        from sglang_static.metrics import ONE_REQUEST, count_list

        ours = (reference, wanted.width)
        if reason := self.refusals.why(*ours):
            count_list(ENGINE if self.refusals.always else SET, reason)
            return None
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
                async for part in generate(manager, asked, None):
                    output = part
        except asyncio.CancelledError:
            manager.abort_request(asked.rid)
            raise
        except ValueError as error:
            if not (found := _REFUSAL.fullmatch(str(error))):
                raise
            scope, reason = found.groups()
            count_list(scope, reason)
            self.refusals.refused(reason, of=ours if scope == SET else None, always=scope == ENGINE)
            return None
        except HTTPException as error:  # the KV cache was full
            count_list(REQUEST, "")
            self.refusals.refused(str(error.detail))
            return None
        info = output["meta_info"]
        if "beam_results" not in info:
            count_list(REQUEST, "")
            self.refusals.refused(str(info.get("finish_reason")))
            return None
        LISTS.labels(ONE_REQUEST).inc()
        return _answered(info)


def _answered(info: dict[str, Any]) -> Answered:
    results = info.pop("beam_results")
    took = results[0]["meta_info"]["finish_reason"]
    texts = {tuple(one["output_ids"][:-1]): one["text"] for one in results}
    scores = [one["meta_info"]["sequence_score"] for one in results]
    found = [Ranked(tokens, score) for tokens, score in zip(texts, scores, strict=True) if tokens]
    return Answered(Best(ordered(found), took["proven"], took["passes"], took["rounds"]), texts, info)
