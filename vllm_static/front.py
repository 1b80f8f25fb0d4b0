"""The front end: a request's item set is found, checked and attached to it before the engine sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from itemset import ItemSet
from itemset.answer import Expected
from itemset.best import Search
from itemset.catalogue import RefusedError
from itemset.checks import Checks, Words
from itemset.config import INDEX, REFERENCE, StaticConfig
from itemset.errors import shown
from itemset.lists import Lists
from itemset.words import nearest
from vllm_static import compat, metrics
from vllm_static.device import PLACE

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

WORDS = Words("max_model_len", "--max-model-len", "min_tokens", "max_tokens", "--additional-config")
Params = TypeVar("Params")
BEHIND = 1  # of the context: a request that scores an item must sample a token; in V2 it holds the end token besides


class FrontEnd:
    """One of each process that takes requests. Safe for threads."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any) -> None:
        """Open and check the registered sets. Raises ItemSetError as `Checks` does."""
        config, model = StaticConfig.of(vllm_config.additional_config), vllm_config.model_config
        self._checks = Checks(
            config,
            tokenizer,
            WORDS,
            vocab_size=model.get_vocab_size(),
            context=model.max_model_len,
            end_tokens=_end_tokens(vllm_config, tokenizer),
            on_encoded=metrics.ENCODED.inc,
        )
        self._vllm_config, self._tokenizer = vllm_config, tokenizer
        self._seats: int = vllm_config.scheduler_config.max_num_seqs
        self._lists: Lists | None = None
        self.v2, self._logprobs_mode = bool(vllm_config.use_v2_model_runner), str(model.logprobs_mode)
        path = "device path, masks inside the sampler"
        if not compat.on_device_path(vllm_config):
            as_configured = "as configured" if config.item_set_path == "host" else None
            path = f"host path: {as_configured or compat.why_host_path(vllm_config)}"
        logger.info("Structured output backend static, %s. Item sets: %s", path, self._checks.summary())
        if vllm_config.speculative_config is not None and not compat.on_device_path(vllm_config):
            logger.warning(
                "On the host path no draft of %s is forced or masked: those of requests with an item set are cut where "
                "they leave it, and most of them do.",
                vllm_config.speculative_config.method,
            )

    async def prepare(self, params: Params) -> Params:
        """The same parameters, in which an inline set stands in place of its texts: SamplingParams or BeamSearchParams.

        After this, `find` is immediate with them. Await it on the event loop before anything is done with a request; if
        it is cancelled, encoding stops. Raises as `find` does.
        """
        structured = getattr(params, "structured_outputs", None)
        named = (getattr(params, "extra_args", None) or {}).get(REFERENCE)
        if structured is None or structured.choice is None or named is not None:
            return params
        inline_set = await self._checks.prepare(structured.choice)
        own, structured = copy.copy(params), copy.copy(structured)
        vars(own).update(vars(params))  # BeamSearchParams have the options of a list there, and copies do not
        structured.choice = inline_set
        own.structured_outputs = structured  # type: ignore[attr-defined]
        return own

    def find(self, params: SamplingParams) -> str | None:
        """The reference of the item set that `params` name or bring along, None where they do neither.

        An inline set (`structured_outputs.choice`) is encoded and built here, unless it was not long ago or `prepare`
        has done so.
        Raises RefusedError, or ItemSetError for what is wrong with an inline set's items.
        """
        extra = params.extra_args or {}
        if INDEX in extra or PLACE in extra:
            raise RefusedError(
                "wrong type", f"{INDEX} and {PLACE} are not for requests: name the set as item_set, or send a choice"
            )
        reference = extra.get(REFERENCE)
        if reference is None:
            for key in extra:
                if nearest(key, (REFERENCE,)):
                    raise RefusedError("wrong type", f"extra_args has no {shown(key)}: name the set as {REFERENCE}")
            choice = params.structured_outputs and params.structured_outputs.choice
            return None if choice is None else self._checks.inline(choice)
        if isinstance(reference, str) and params.structured_outputs is not None:
            raise RefusedError(
                "two constraints", "item_set and structured_outputs (or response_format) exclude each other: give one"
            )
        return self._checks.named(reference)

    def attach(self, reference: str, params: SamplingParams, prompt_tokens: int) -> None:
        """Make `params`, the request's own, carry the set to the engine.

        Raises RefusedError where the set and the other parameters leave no way to end an item.
        """
        self._checks.request(
            reference,
            prompt_tokens=prompt_tokens,
            min_tokens=params.min_tokens,
            stop_tokens=params.all_stop_token_ids,
        )
        for parameter in ("allowed_token_ids", "bad_words"):
            if getattr(params, parameter):
                raise RefusedError(
                    parameter,
                    f"{parameter} is not supported with an item set, of which it could leave no item: leave it out, "
                    "or register a smaller set",
                )
        inline = self._checks.catalogue.inline(reference)
        params.extra_args = {**(params.extra_args or {}), REFERENCE: reference}
        if inline:
            params.extra_args[INDEX] = inline.index
        params.structured_outputs = StructuredOutputsParams(choice=[reference])

    def expecting(self, reference: str) -> Callable[[Any], Expected]:
        """A function of an EngineCoreRequest: what names the item of its answers.

        To be called when vLLM has completed the request: whether it begins with reasoning is told last.
        """
        item_set = self._checks.catalogue[reference]

        def expected(request: Any) -> Expected:
            content = compat.content_after_reasoning(self._vllm_config, self._tokenizer, request)
            return Expected(item_set, frozenset(request.sampling_params.all_stop_token_ids), content)

        return expected

    def ranked(
        self, reference: str, given: dict[str, Any], params: Any, prompt_tokens: int, end_token: int
    ) -> tuple[ItemSet, Search]:
        """The set of a request for a ranked list, whose `params` are BeamSearchParams, and the search for the list.

        given: its options. Raises RefusedError if some of the items could not be scored.
        """
        if self._logprobs_mode.endswith("logits"):
            raise RefusedError(
                "beam search",
                f"this server gives logits for log-probabilities (--logprobs-mode {self._logprobs_mode}), and a ranked "
                "list adds log-probabilities up: start it with raw_logprobs",
            )
        return self._checks.ranked(
            reference,
            given,
            k=params.beam_width,
            prompt_tokens=prompt_tokens,
            max_tokens=params.max_tokens,
            end_token=end_token,
            behind=BEHIND + self.v2,
        )

    def lists(self, client: Any) -> Lists:
        """What runs the ranked lists of the server whose engine `client` talks to."""
        if self._lists is None:
            self._lists = Lists(self._seats, lambda: compat.unfinished(client))
        return self._lists


def _end_tokens(vllm_config: VllmConfig, tokenizer: Any) -> set[int]:
    """The tokens at which the model ends, by its tokenizer and its generation config."""
    ends = (vllm_config.model_config.try_get_generation_config() or {}).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
