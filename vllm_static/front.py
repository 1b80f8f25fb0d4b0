"""The front end: a request's item set is found, checked and attached to it before the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from itemset import ItemSet
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.search import Found, Rounds
from itemset.serving import metrics
from itemset.serving.admission import Checks, Words
from itemset.serving.answer import Expected
from itemset.serving.catalogue import INLINE, RefusedError
from itemset.serving.config import StaticConfig
from itemset.serving.following import Follower
from itemset.serving.inside import Constraint, Constraints, ExpectedItems
from itemset.serving.lists import Lists
from itemset.serving.request import ItemRequest
from itemset.serving.travel import carried
from itemset.serving.words import BEAMS, HOLES, SELECTION, SLATED, WEIGHT
from vllm_static import compat
from vllm_static.drafting import drafting
from vllm_static.inside import constraint_of, engine_constraint, json_options, validate, vocabulary_of
from vllm_static.one_request import ListParams, OneRequest

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

WORDS = Words("max_model_len", "--max-model-len", "min_tokens", "max_tokens", "--additional-config")
AFTER = 1  # of the context: a request that scores an item must sample a token; in V2 it holds the end token besides
LEAST_PENALTY = 1e-6
"""Of repetition: a logit divided by less may be infinite, and two of them then have no difference."""


class FrontEnd:
    """One of each process that takes requests. Safe for threads."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any) -> None:
        """Open and check the registered sets. Raises ItemSetError as `Checks` does."""
        config, model = StaticConfig.of(vllm_config.additional_config), vllm_config.model_config
        self.checks = Checks(
            config,
            tokenizer,
            WORDS,
            vocab_size=model.get_vocab_size(),
            context=model.max_model_len,
            end_tokens=_end_tokens(vllm_config, tokenizer),
            added_tokens=compat.added_tokens(vllm_config),
            on_encoded=metrics.ENCODED.inc,
        )
        self.constraints = Constraints(
            self.checks,
            tokenizer,
            partial(vocabulary_of, vllm_config, tokenizer),
            options=json_options(vllm_config),
            validate=validate,
        )
        self._carried = partial(carried, self.checks.catalogue)
        self.config, self.vllm_config, self._tokenizer = config, vllm_config, tokenizer
        self.follower: Follower | None = None
        """What follows the published sets among them, once the engine can be asked."""
        self._seats: int = vllm_config.scheduler_config.max_num_seqs
        self._lists: Lists | None = None
        self.one_request = OneRequest(vllm_config)
        self._drafting = drafting(vllm_config, self.checks.fingerprint, self.checks.catalogue.registered)
        self.v2, self._logprobs_mode = bool(vllm_config.use_v2_model_runner), str(model.logprobs_mode)
        path = "device path, masks inside the sampler"
        if not compat.on_device_path(vllm_config):
            as_configured = "as configured" if config.item_set_path == "host" else None
            path = f"host path: {as_configured or compat.why_host_path(vllm_config)}"
        logger.info("Structured output backend static, %s. Item sets: %s", path, self.checks.summary())
        if vllm_config.speculative_config is not None and not compat.on_device_path(vllm_config):
            logger.warning(
                "On the host path no draft of %s is forced or masked: those of requests with an item set are cut where "
                "they leave it, and most of them do.",
                vllm_config.speculative_config.method,
            )

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """The constraint with item sets in it that a request has, made unless it was before. Raises as
        `Constraints.get` does."""
        structured = params.structured_outputs
        if structured is not None and isinstance(structured.grammar, Constraint):
            return structured.grammar
        given = constraint_of(params)
        return None if given is None else self.constraints.get(*given)

    def attach(
        self, wanted: str | Constraint, params: SamplingParams, prompt_tokens: int
    ) -> Callable[[Any], Expected | ExpectedItems]:
        """Make `params`, the request's own, carry the set, or a constraint with sets in it, to the engine.

        wanted: a set's reference, or the constraint. Returns a function of an EngineCoreRequest: what names the items
        of its answers. Raises RefusedError where a set and the other parameters leave no way to end an item.
        """
        request: dict[str, Any] = {"prompt_tokens": prompt_tokens, "min_tokens": params.min_tokens}
        request["stop_tokens"] = params.all_stop_token_ids
        if isinstance(wanted, str):
            self.checks.request(wanted, **request)
        else:
            self.constraints.check(wanted, max_tokens=params.max_tokens, **request)
        for reference in [wanted] if isinstance(wanted, str) else wanted.references:
            metrics.REQUESTS.labels(metrics.label(reference)).inc()
        for parameter in ("allowed_token_ids", "bad_words"):
            if getattr(params, parameter):
                raise RefusedError(
                    parameter,
                    f"{parameter} is not supported with an item set, of which it could leave no item: leave it out, "
                    "or register a smaller set",
                    parameter,
                )
        if not LEAST_PENALTY <= params.repetition_penalty <= 1 / LEAST_PENALTY:
            raise RefusedError(
                "repetition_penalty",
                f"with a repetition_penalty of {params.repetition_penalty} tokens have no scores: give one near 1",
                "repetition_penalty",
            )
        extra = {key: value for key, value in (params.extra_args or {}).items() if key not in SELECTION}
        if weighed := bool(extra.get(WEIGHT)):
            self._weigh(params)
        if isinstance(wanted, str):
            params.extra_args = {**extra, **self._carried(wanted)}
            params.structured_outputs = compat.of_our_backend(StructuredOutputsParams(choice=[wanted]))
            item_set, of_set = self.checks.catalogue[wanted], self.checks.catalogue.told(wanted)
            return partial(self._expected, partial(Expected, item_set, of_set=of_set, weighed=weighed))
        params.extra_args = {**extra, HOLES: wanted.carried(self.checks.catalogue)}
        if wanted.slate is not None:
            params.extra_args[SLATED] = list(wanted.slate)
        params.structured_outputs = engine_constraint(wanted)
        made = partial(ExpectedItems, wanted, self.constraints.vocabulary, self.checks.catalogue)
        return partial(self._expected, made)

    def _weigh(self, params: SamplingParams) -> None:
        """Let a request's weights come as the log-probabilities of its tokens: see `weights`. Raises RefusedError if
        they cannot."""
        reason = compat.why_no_weights(self.vllm_config)
        if params.logprobs is not None or params.logprob_token_ids:
            reason = "it comes in the place of logprobs: ask for one of them"
        if params.ignore_eos:
            reason = "with ignore_eos an answer goes on after its end: leave one of them out"
        if reason:
            raise RefusedError("set weight", f"{WEIGHT} cannot be had here: {reason}", WEIGHT)
        params.logprobs = 0

    def _expected(self, expected: Callable[..., Expected | ExpectedItems], request: Any) -> Expected | ExpectedItems:
        """To be called when vLLM has completed the request: whether it begins with reasoning is told last."""
        content = compat.content_after_reasoning(self.vllm_config, self._tokenizer, request)
        return expected(frozenset(request.sampling_params.all_stop_token_ids), content)

    def ranked(
        self, asked: ItemRequest, *, prompt_tokens: int, max_tokens: int, end_token: int
    ) -> tuple[ItemSet, Rounds[Found]]:
        """The set of a request for a ranked list or draws, and the search for them.

        Raises RefusedError if some of the items could not be scored, and as `reference` does.
        """
        if self._logprobs_mode.endswith("logits"):
            raise RefusedError(
                "beam search",
                f"this server gives logits for log-probabilities (--logprobs-mode {self._logprobs_mode}), and a ranked "
                "list adds log-probabilities up: start it with raw_logprobs",
                BEAMS,
            )
        after = AFTER + self.v2
        if placeholders := self.placeholders(asked):
            after += len(placeholders)
        found = self.checks.ranked(
            asked, prompt_tokens=prompt_tokens, max_tokens=max_tokens, end_token=end_token, after=after
        )
        metrics.REQUESTS.labels(metrics.label(asked.item_set or INLINE)).inc()
        return found

    def placeholders(self, asked: ItemRequest) -> tuple[int, ...]:
        """The tokens that stand after the prompt if the draft head makes the list; none if it does not.

        Raises RefusedError if the head has no room for so wide a list, and as `Checks.reference` does.
        """
        if self._drafting is None or asked.ranked is None:
            return ()
        reference = self.checks.reference(asked)
        drafts = self._drafting.drafts(reference, self.checks.catalogue[reference], asked.ranked)
        return self._drafting.placeholders if drafts else ()

    def one_list(
        self, asked: ItemRequest, end_token: int, placeholders: int, search: Rounds[Found]
    ) -> ListParams | None:
        """The parameters of the one request for a list or draws that `ranked` has passed; None if rounds must make it.

        placeholders: how many stand after its prompt. search: what `ranked` gave.
        """
        reference = self.checks.reference(asked)
        if isinstance(search, Drawing) and asked.drawn is not None:
            return self.one_request.of_draws(reference, self._carried, asked.drawn, end_token, search)
        if asked.ranked is None:
            return None  # draws by importance
        return self.one_request.params(reference, self._carried, asked.ranked, end_token, placeholders)

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
