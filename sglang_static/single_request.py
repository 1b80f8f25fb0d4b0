"""A ranked list, or draws, as one request of SGLang's engine: what the front end asks, and what comes back."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from itemset.serving.http_bodies import no_body
from itemset.serving.single_request import OneRequest
from itemset.serving.wire import EngineRequest, ListResult, ListTotals, NoList, Tokens

logger = logging.getLogger(__name__)

CARRIED = "item_set_list"
"""Attribute of the `GenerateReqInput` that asks for a list: its EngineRequest."""


class EngineLists(OneRequest):
    """Asks the engine for lists and draws."""

    def __init__(self, seats: int) -> None:
        """seats: requests that the engine runs at a time."""
        too_many = "more draws than the engine has seats for"
        super().__init__(logger.warning, beams=seats, widest=None, too_many=too_many)

    async def ask(
        self,
        generate: Callable[..., AsyncGenerator[Any, None]],
        manager: Any,
        prompt: list[int],
        carried: EngineRequest,
        skip_special_tokens: bool,
    ) -> tuple[ListResult, dict[Tokens, str], dict[str, Any]]:
        """Return what the engine has made, the text of each item by its tokens, and what SGLang says of any answer.

        Cancelled, it takes the request back. skip_special_tokens: as in SGLang's sampling parameters, of the texts.
        """
        request = GenerateReqInput(
            rid=uuid.uuid4().hex,
            input_ids=prompt,
            sampling_params={"beam_width": 2, "max_new_tokens": 1, "skip_special_tokens": skip_special_tokens},
            log_metrics=False,
        )
        setattr(request, CARRIED, carried)
        output: dict[str, Any] = {}
        try:
            with no_body():
                async for part in generate(obj=request, request=None):
                    output = part
        except asyncio.CancelledError:
            manager.abort_request(request.rid)
            raise
        except ValueError as error:
            try:
                return msgspec.json.decode(str(error), type=ListResult), {}, {}
            except msgspec.DecodeError:  # not the scheduler's refusal of a list
                raise error from None
        except HTTPException as error:  # the KV cache was full
            return ListResult(reason=NoList.NO_ROOM_NOW, detail=str(error.detail)), {}, {}
        info: dict[str, Any] = output["meta_info"]
        if (results := info.pop("beam_results", None)) is None:
            return ListResult(reason=NoList.NO_ROOM_NOW, detail=str(info.get("finish_reason"))), {}, {}
        texts, items = dict[Tokens, str](), list[tuple[Tokens, float]]()
        for one in results:
            if tokens := tuple(one["output_ids"][:-1]):  # an end token alone says that there is no item
                texts[tokens] = one["text"]
                items.append((tokens, one["meta_info"]["sequence_score"]))
        totals, rows = msgspec.convert(results[0]["meta_info"]["finish_reason"], ListTotals), iter(items)
        found = [[next(rows) for _ in range(count)] for count in totals.found]
        return ListResult(found, totals.proven, totals.passes, totals.rounds), texts, info
