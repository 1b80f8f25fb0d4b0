"""The front end: a request's item set is found, checked and attached to it before the engine sees it."""

from __future__ import annotations

import copy
import hashlib
import threading
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

import itemset
from itemset import ItemSet, ItemSetError, Rows
from itemset.text import encode, fingerprint
from vllm_static import compat
from vllm_static.catalogue import INLINE, Catalogue, RefusedError
from vllm_static.config import INDEX, PLACE, REFERENCE, StaticConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


class FrontEnd:
    """One of each process that takes requests. Safe for threads."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any) -> None:
        """Open and check the registered sets. Raises ItemSetError: a file that is missing or damaged, a set made with
        another tokenizer, outside the vocabulary, or with items longer than the context."""
        self._config = StaticConfig.of(vllm_config.additional_config)
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._context = vllm_config.model_config.max_model_len
        self._end_tokens = _end_tokens(vllm_config, tokenizer)
        self._catalogue = Catalogue(self._config)
        # Encoding runs on other threads than the engine's own use of the tokenizer, which is not safe for threads.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._encoding = threading.Lock()
        model_print = None
        for name, item_set in self._catalogue.registered.items():
            if item_set.tokenizer is not None:
                model_print = model_print or fingerprint(self._tokenizer)
                self._check_tokenizer(name, item_set, model_print)
            self._check_fit(f"the item set {name!r} ({self._config.item_sets[name]})", item_set)
        sets = [f"{name} ({len(item_set):,} items)" for name, item_set in self._catalogue.registered.items()]
        path = "device path, masks inside the sampler"
        if not compat.on_device_path(vllm_config):
            as_configured = "as configured" if self._config.item_set_path == "host" else None
            path = f"host path: {as_configured or compat.why_host_path(vllm_config)}"
        logger.info("Structured output backend static, %s. Item sets: %s", path, ", ".join(sets) or "none")

    def find(self, params: SamplingParams) -> str | None:
        """The reference of the item set that `params` name or bring along, None where they do neither.

        An inline set (`structured_outputs.choice`) is encoded and built here, unless it was not long ago.
        Raises RefusedError, or ItemSetError for what is wrong with an inline set's items.
        """
        extra = params.extra_args or {}
        if INDEX in extra or PLACE in extra:
            raise RefusedError(
                "wrong type", f"{INDEX} and {PLACE} are not for requests: name the set as item_set, or send a choice"
            )
        reference = extra.get(REFERENCE)
        if reference is None:
            choice = params.structured_outputs and params.structured_outputs.choice
            return None if choice is None else self._inline(choice)
        if not isinstance(reference, str):
            raise RefusedError(
                "wrong type", f"item_set must be the name of an item set, a string, not {reference!r:.60}"
            )
        if params.structured_outputs is not None:
            raise RefusedError(
                "two constraints", "item_set and structured_outputs (or response_format) exclude each other: give one"
            )
        if reference not in self._catalogue.registered:
            self._catalogue[reference if not reference.startswith(INLINE) else ""]  # raises, naming what there is
        return reference

    def attach(self, reference: str, params: SamplingParams, prompt_tokens: int) -> None:
        """Make `params`, the request's own, carry the set to the engine.

        Raises RefusedError where the set and the other parameters leave no way to end an item.
        """
        item_set = self._catalogue[reference]
        called = "the inline set" if reference.startswith(INLINE) else f"the item set {reference!r}"
        room = self._context - prompt_tokens
        if item_set.longest > room:
            raise RefusedError(
                "no room in the context",
                f"{called} has an item of {item_set.longest} tokens, but max_model_len={self._context} leaves {room} "
                f"after a prompt of {prompt_tokens}: shorten the prompt or the item, or raise --max-model-len",
            )
        if params.min_tokens > item_set.shortest:
            raise RefusedError(
                "min_tokens",
                f"min_tokens={params.min_tokens} forbids the shortest item of {called}, which has {item_set.shortest} "
                f"tokens: set min_tokens to at most {item_set.shortest}",
            )
        for parameter in ("allowed_token_ids", "bad_words"):
            if getattr(params, parameter):
                raise RefusedError(
                    parameter,
                    f"{parameter} is not supported with an item set, of which it could leave no item: leave it out, "
                    "or register a smaller set",
                )
        if inside := item_set.occurring(params.all_stop_token_ids):
            raise RefusedError(
                "stop token inside",
                f"the stop token {inside[0]} occurs inside an item of {called}, which could never be finished: "
                "choose another stop token, or build the set without it",
            )
        inline = self._catalogue.inline(reference)
        params.extra_args = {**(params.extra_args or {}), REFERENCE: reference}
        if inline:
            params.extra_args[INDEX] = inline[1]
        params.structured_outputs = StructuredOutputsParams(choice=[reference])

    def _inline(self, choice: Any) -> str:
        if not isinstance(choice, list) or not choice:
            raise RefusedError("bad items", "choice must be a list of at least one text")
        if len(choice) > self._config.inline_item_limit:
            raise RefusedError(
                "inline limit",
                f"choice has {len(choice):,} items, the limit of an inline set is {self._config.inline_item_limit:,}: "
                'register it with `itemset build` and --item-set, or raise {"inline_item_limit": N} in '
                "--additional-config",
            )
        digest = hashlib.blake2b(repr(choice).encode("utf-8", "surrogatepass"), digest_size=16)
        reference = INLINE + digest.hexdigest()
        if self._catalogue.inline(reference) is None:
            with self._encoding:
                tokens, offsets = encode(choice, self._tokenizer)
            item_set = itemset.build(Rows(tokens, offsets))
            self._check_fit("the inline set", item_set)
            self._catalogue.keep(reference, item_set, item_set.to_bytes())
        return reference

    def _check_fit(self, called: str, item_set: ItemSet) -> None:
        if ends := item_set.occurring(self._end_tokens):
            raise ItemSetError(
                f"{called} has an item with the model's end-of-sequence token {ends[0]} in it, which could never be "
                "finished: build the set without it"
            )
        highest = int(item_set.token_ids[-1])
        if highest >= self._vocab_size:
            raise ItemSetError(
                f"{called} holds token id {highest}, the model's vocabulary ends at {self._vocab_size - 1}: "
                "build the set with this model's token ids"
            )
        if item_set.longest > self._context:
            raise ItemSetError(
                f"{called} has an item of {item_set.longest} tokens, longer than max_model_len={self._context}: "
                "raise --max-model-len or leave the item out"
            )

    def _check_tokenizer(self, name: str, item_set: ItemSet, model_print: str) -> None:
        if item_set.tokenizer is not None and item_set.tokenizer.fingerprint != model_print:
            model = getattr(self._tokenizer, "name_or_path", type(self._tokenizer).__name__)
            raise ItemSetError(
                f"the item set {name!r} ({self._config.item_sets[name]}) was built with the tokenizer "
                f"{item_set.tokenizer.name} ({item_set.tokenizer.fingerprint[:12]}), the model uses {model} "
                f"({model_print[:12]}): build the set with --tokenizer {model}"
            )


def _end_tokens(vllm_config: VllmConfig, tokenizer: Any) -> set[int]:
    """The tokens at which the model ends, by its tokenizer and its generation config."""
    ends = (vllm_config.model_config.try_get_generation_config() or {}).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
