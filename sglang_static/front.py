"""The front end: a request's item set is found, checked and attached to it before a scheduler sees it."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar

from itemset import ItemSet
from itemset.answer import Expected
from itemset.best import Search
from itemset.catalogue import INLINE, RefusedError
from itemset.checks import Checks, Words
from itemset.config import INDEX, REFERENCE, StaticConfig
from itemset.lists import Lists
from itemset.words import CHOICE
from sglang_static import compat, http

logger = logging.getLogger(__name__)

WORDS = Words("context_length", "--context-length", "min_new_tokens", "max_new_tokens", compat.VARIABLE)
OTHERS = ("json_schema", "regex", "ebnf", "structural_tag")
BEHIND = 5  # of the context: SGLang takes prompts shorter than that (managers/tp_worker.py, max_req_input_len)
PATIENCE = 0.2  # seconds between two looks for the client
RESERVED = 2  # tokens that SGLang keeps of a context (managers/scheduler.py, init_req_max_new_tokens)
SEATS = 256  # requests that SGLang runs at a time, for all that its front end knows unless --max-running-requests says


Result = TypeVar("Result")


async def while_connected(work: Awaitable[Result], http_request: Any) -> Result:
    """Await it, but cancel it when the client has left: SGLang looks for that only every four seconds of a request that
    was tokenized (managers/tokenizer_manager.py, _wait_one_response). Raises ValueError then, as SGLang does.

    http_request: Starlette's, or None where there is no client that may leave.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=PATIENCE))[0]:
            if http_request is not None and await http_request.is_disconnected():
                raise ValueError("the client has left")
        return task.result()
    finally:
        task.cancel()


class FrontEnd:
    """One of each process that takes requests. Safe for threads."""

    def __init__(self, manager: Any) -> None:
        """Open and check the registered sets. Raises ItemSetError as `Checks` does."""
        config, model = StaticConfig.of(compat.options()), manager.model_config
        tokenizer = manager.tokenizer
        if tokenizer is None:
            raise ValueError("the static backend needs the model's tokenizer: leave out --skip-tokenizer-init")
        self._ends = set(model.hf_eos_token_id or ()) | {tokenizer.eos_token_id} - {None}
        self._all_ends = self._ends | set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        self._tokenizer = tokenizer
        self._checks = Checks(
            config,
            tokenizer,
            WORDS,
            vocab_size=model.vocab_size,
            context=model.context_len,
            reserved=RESERVED,
            end_tokens=self._ends,
        )
        self._lists: Lists | None = None
        reason = "as configured" if config.item_set_path == "host" else compat.why_host_path(manager.server_args)
        path = f"host path: {reason}" if reason else "device path, masks inside the sampler"
        logger.info("Grammar backend static, %s. Item sets: %s", path, self._checks.summary())

    async def prepare(self, request: Any, http_request: Any) -> None:
        """Put each inline set in place of its texts, wherever the request has them. After this, `take` is immediate.

        Await it on the event loop before anything is done with a request of one or several prompts. Encoding stops if
        the client leaves. Raises as `take` does.
        """
        given, several = request.sampling_params, isinstance(request.sampling_params, list)
        params = [self._own(one) for one in (given if several else [given])]
        places = [http.fields(), *params, *(one.get("custom_params") for one in params)]
        brought = [place for place in places if isinstance(place, dict) and place.get(CHOICE) is not None]
        for place in brought:
            place[CHOICE] = await while_connected(self._checks.prepare(place[CHOICE]), http_request)
        if brought and given is not None:
            request.sampling_params = params if several else params[0]

    @staticmethod
    def _own(params: Any) -> dict[str, Any]:
        """A copy that may be changed: the user may use his own again."""
        if params is not None and not isinstance(params, dict):
            raise RefusedError("wrong type", "sampling_params of one prompt must be an object: send no list of them")
        own = dict(params or {})
        if isinstance(own.get("custom_params"), dict):
            own["custom_params"] = dict(own["custom_params"])
        return own

    def take(
        self, request: Any, defaults: dict[str, Any] | None, *, ranked: bool = False
    ) -> tuple[str | None, dict[str, Any]]:
        """The reference of the set that a request names or brings along, and its parameters without these words.

        They may stand in the body of an HTTP request, in `sampling_params` as SGLang's own `regex` does, in its
        `custom_params`, and in the server's preferred parameters. An inline set is encoded and built here, unless it
        was not long ago or `prepare` has done so. Raises RefusedError, or ItemSetError for what is wrong with an inline
        set's items.
        """
        given = {**(defaults or {}), **self._own(request.sampling_params)}
        custom = given.get("custom_params") or {}
        if isinstance(custom, dict) and INDEX in custom:
            raise RefusedError("wrong type", f"{INDEX} is not for requests: name the set as item_set, or send a choice")
        words = [http.fields(), custom if isinstance(custom, dict) else {}, given]
        named = [place[REFERENCE] for place in words if place.get(REFERENCE) is not None]
        choices = [place[CHOICE] for place in words if place.get(CHOICE) is not None]
        rest = {key: value for key, value in given.items() if key not in (REFERENCE, CHOICE)}
        if custom and isinstance(custom, dict):
            rest["custom_params"] = {k: v for k, v in custom.items() if k not in (REFERENCE, CHOICE)} or None
        if not named and not choices:
            return None, rest
        other = [key for key in OTHERS if given.get(key)]
        if any(name != named[0] for name in named) or len(choices) > 1 or (choices and named) or other:
            raise RefusedError(
                "two constraints",
                f"item_set, choice and {', '.join(other) or 'other constraints'} (or response_format) exclude each "
                "other: give one",
            )
        if not ranked and (given.get("beam_width") or 1) > 1:
            raise RefusedError(
                "beam search",
                "beam_width would ignore the item set here: leave it out, and use n for several answers",
            )
        if getattr(request, "custom_logit_processor", None) is not None:
            raise RefusedError(
                "custom_logit_processor",
                "custom_logit_processor is not supported with an item set, from which it could lead away: leave it out",
            )
        return (self._checks.named(named[0]) if named else self._checks.inline(choices[0])), rest

    def expected(self, reference: str, request: Any, params: Any) -> Expected:
        """What names the item of a request's answers. request: a GenerateReqInput; params: its `SamplingParams`."""
        return Expected(
            self._checks.catalogue[reference],
            frozenset({*(params.stop_token_ids or ()), *self._all_ends}),
            compat.content_after_reasoning(self._tokenizer, request),
        )

    def ranked(
        self,
        request: Any,
        params: dict[str, Any],
        options: dict[str, Any],
        k: int,
        prompt_tokens: int,
        end_token: int,
    ) -> tuple[ItemSet, Search]:
        """The set of a request for a ranked list of `k`, and the search. params: its sampling parameters for one
        prompt. options: those of the list.

        Raises RefusedError if some of its items could not be scored.
        """
        one = SimpleNamespace(sampling_params=params, custom_logit_processor=request.custom_logit_processor)
        reference, _ = self.take(one, None, ranked=True)
        return self._checks.ranked(
            str(reference),
            options,
            k=k,
            prompt_tokens=prompt_tokens,
            max_tokens=params.get("max_new_tokens", 128),
            end_token=end_token,
            behind=BEHIND,
        )

    def lists(self, manager: Any) -> Lists:
        """What runs the ranked lists of the engine whose tokenizer manager this is."""
        if self._lists is None:
            seats = compat.resolved(manager.server_args).max_running_requests or SEATS
            self._lists = Lists(seats, lambda: len(manager.rid_to_state))
        return self._lists

    def attach(self, reference: str, params: Any, prompt_tokens: int) -> None:
        """Make a request's `SamplingParams` carry the set to the scheduler, in `custom_params`.

        Raises RefusedError where the set and the other parameters leave no way to end an item.
        """
        stops = set(params.stop_token_ids or ()) | self._ends
        self._checks.request(
            reference, prompt_tokens=prompt_tokens, min_tokens=params.min_new_tokens, stop_tokens=stops
        )
        if not stops:
            raise RefusedError("no end", "the model has no end token: give the request stop_token_ids")
        custom = {**(params.custom_params or {}), REFERENCE: reference}
        inline = self._checks.catalogue.inline(reference) if reference.startswith(INLINE) else None
        if inline:
            custom[INDEX] = b64encode(inline.index).decode()
        params.custom_params = custom
