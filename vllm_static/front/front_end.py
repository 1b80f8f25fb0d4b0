"""The front end of vLLM: attaches a request's item set to it before the engine sees it; follows published sets."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from itemset.embedded.placement import JSON, TAG
from itemset.errors import ItemSetError
from itemset.serving.catalogue import RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.front.answer_fields import Expected, ExpectedItems
from itemset.serving.front.front_end import FrontEndBase, ListJob
from itemset.serving.front.healing import HEALED, ends_in_space, unhealed
from itemset.serving.front.http_bodies import body
from itemset.serving.front.list_runner import Lists
from itemset.serving.front.request import ItemRequest, Thought
from itemset.serving.front.request_fields import BEAMS, REFERENCE
from itemset.serving.front.sampler_limits import PARAMETERS, refuse_unsampled
from itemset.serving.wire import WIRE, EngineRequest, Tokens
from vllm_static import compat
from vllm_static.compat import logger
from vllm_static.front.engine_lists import EngineLists
from vllm_static.front.request import names_sets
from vllm_static.metrics import ROLLOUT

AFTER = 1  # of the context: a request that scores an item must sample a token; in V2 it holds the end token besides
PATIENCE = 1.0  # seconds after which a front end checks that the engine is still there


class FrontEnd(FrontEndBase):
    log = logger
    words = Words("max_model_len", "--max-model-len", "min_tokens", "--additional-config")

    @staticmethod
    def validate(kind: str, spec: str) -> None:
        """Raises VLLMValidationError for what vLLM refuses with xgrammar."""
        name = {JSON: "json", TAG: "structural_tag"}.get(kind, "grammar")
        validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(**{name: spec})))

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any) -> None:
        config, model = StaticConfig.of(vllm_config.additional_config), vllm_config.model_config
        generation = model.try_get_generation_config() or {}
        ends = generation.get("eos_token_id")
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        super().__init__(
            config,
            tokenizer,
            ModelLimits(model.get_vocab_size(), model.max_model_len, 0, ends),
            partial(compat.vocabulary_of, vllm_config, tokenizer),
            EngineLists(vllm_config),
            json_options=compat.json_options(vllm_config),
            added_tokens=compat.added_tokens(vllm_config),
        )
        self.vllm_config, self.end_token = vllm_config, tokenizer.eos_token_id
        self._lists: Lists | None = None
        if config.item_set_draft_head is not None:
            from vllm_static.front.draft_head import drafting

            self.drafting = drafting(config.item_set_draft_head, vllm_config, self.checks)
        self.v2, self._logprobs_mode = bool(vllm_config.use_v2_model_runner), str(model.logprobs_mode)
        on_device, speculative = compat.on_device_path(vllm_config), vllm_config.speculative_config
        reason = None if on_device else str(config.why_on_host(compat.why_host_path(vllm_config)))
        here = compat.answers_here_at_once(vllm_config)
        self._begin("Structured output backend", reason, here=here, model=str(model.served_model_name))
        forced = config.forced_drafts and compat.core_has_drafts(vllm_config)
        if self.host_path and speculative is not None and not forced:
            logger.warning(
                "On the host path no draft of %s is forced or masked: those of requests with an item set are cut where "
                "they leave it, and most of them do.",
                speculative.method,
            )

    async def healed_prompt(self, asked: ItemRequest, prompt: Any, *, here: bool = False) -> tuple[ItemRequest, Any]:
        """Do `healed`, and take the space back. prompt: as vLLM has rendered it."""
        if (text := self._ended(prompt)) is None:
            return unhealed(asked), prompt
        asked = asked if asked.escape == HEALED else await self.healed(asked, text, here=here)
        if asked.escape == HEALED:
            prompt = {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:-1]}
        return asked, prompt

    def _ended(self, prompt: Any) -> str | None:
        """Return the text of a prompt whose last token is a space; None of others, and if the client sent token ids."""
        given = getattr(body().request, "prompt", None)
        sent_ids = isinstance(given, list) and bool(given) and not isinstance(given[0], str)
        if not isinstance(prompt, dict) or sent_ids:
            return None
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        ended = tokens and ends_in_space(text) and tokens[-1] == self.healing.space
        return text if ended and "prompt_embeds" not in prompt else None

    def attach(
        self, asked: ItemRequest, params: SamplingParams, prompt_tokens: int, prompt: Any
    ) -> Callable[[Any], Expected | ExpectedItems | Thought]:
        """Write a pinned request into `params`, its own, for the engine.

        prompt: as vLLM has rendered it. Returns a function of an EngineCoreRequest: what names the items of its
        answers. Raises RefusedError where a set and the other parameters leave no way to end an item.
        """
        refuse_unsampled({name: getattr(params, name, None) for name in PARAMETERS}, self.vocab_size)
        in_reasoning = self.vllm_config.structured_outputs_config.enable_in_reasoning and not asked.marker
        for parameter, holds in (("trace_decode_token_ids", True), ("thinking_token_budget", in_reasoning)):
            if holds and getattr(params, parameter) is not None:
                message = f"{parameter} puts tokens into an answer past its item set: leave it out"
                raise RefusedError(parameter, message, parameter)
        if asked.marker:
            return self._think(asked, params, prompt_tokens, prompt)
        least = {"prompt_tokens": prompt_tokens, "min_tokens": params.min_tokens}
        carried = self.engine_request(asked, stop_tokens=set(params.all_stop_token_ids), **least)
        for parameter in ("allowed_token_ids", "bad_words"):
            if getattr(params, parameter):
                raise RefusedError(
                    parameter,
                    f"{parameter} is not supported with an item set, of which it could leave no item: leave it out, "
                    "or register a smaller set",
                    parameter,
                )
        if asked.weighed:  # in the place of the sampled tokens' log-probabilities: see `worker.weights`
            instead_of = "logprobs" if params.logprobs is not None or params.logprob_token_ids else None
            reason = compat.why_no_weights(self.vllm_config)
            self.check_weight(asked.weighed, reason, instead_of=instead_of, ignore_eos=params.ignore_eos)
            params.logprobs, params.flat_logprobs = 1, True
        others = {key: value for key, value in (params.extra_args or {}).items() if key != REFERENCE}
        params.extra_args = {**others, WIRE: carried}
        own = {"grammar": carried.grammar} if carried.grammar else {"choice": [carried.reference]}
        params.structured_outputs = compat.of_our_backend(StructuredOutputsParams(**own))

        def expected(request: Any) -> Expected | ExpectedItems:
            """Called when vLLM has completed the request: whether it begins with reasoning is known last."""
            content = compat.content_after_reasoning(self.vllm_config, self._tokenizer, request)
            calls = asked.constraint is not None and not body().stated  # a constraint that vLLM has made of tools
            body().begin(thinks=calls or content is not None)
            stop_tokens = frozenset(request.sampling_params.all_stop_token_ids)
            return self.expected(asked, stop_tokens, content)

        return expected

    def _think(
        self, asked: ItemRequest, params: SamplingParams, prompt_tokens: int, prompt: Any
    ) -> Callable[[Any], Thought]:
        """Do `attach` for a thought, which leaves room for the items after it."""
        job = self.list_job(asked, prompt_tokens=prompt_tokens + len(asked.marker))
        if self.vllm_config.speculative_config is not None:  # drafts after the marker have KV, too
            job = job._replace(carried=None)
        after = job.item_set.longest + AFTER + self.v2 + len(job.placeholders)
        room: int = self.vllm_config.model_config.max_model_len - prompt_tokens - after
        params.max_tokens = min(params.max_tokens or room, room)
        carried = job.carried or EngineRequest(self.checks.made(asked).ref)
        carried = carried.but(after=(asked.marker, job.placeholders))
        params.extra_args = {**(params.extra_args or {}), REFERENCE: None, WIRE: carried}
        self.refuse_inside(names_sets(params))
        if params.structured_outputs is None:
            params.structured_outputs = compat.of_our_backend(StructuredOutputsParams(choice=[carried.reference]))
        thought = Thought(asked, [job], prompt)
        return lambda request: thought

    def reasoning_end(self) -> Tokens:
        begun = SimpleNamespace(reasoning_ended=False, reasoning_parser_kwargs=None)
        content = compat.content_after_reasoning(self.vllm_config, self._tokenizer, begun)
        return tuple(content.args[0]) if isinstance(content, partial) else ()

    def list_job(self, asked: ItemRequest, *, prompt_tokens: int) -> ListJob:
        """Do `begin_list`. Raises RefusedError also if the engine's scores are no log-probabilities."""
        if self._logprobs_mode.endswith("logits"):
            raise RefusedError(
                "beam search",
                f"this server gives logits for log-probabilities (--logprobs-mode {self._logprobs_mode}), and a ranked "
                "list adds log-probabilities up: start it with raw_logprobs",
                BEAMS,
            )
        return self.begin_list(asked, prompt_tokens=prompt_tokens, after=AFTER + self.v2, reasons={})

    def lists(self, client: Any) -> Lists:
        """Return what runs the ranked lists of the server whose engine `client` talks to."""
        if self._lists is None:
            seats, shorter = self.vllm_config.scheduler_config.max_num_seqs, compat.shorter_passes(self.vllm_config)
            self._lists = Lists(seats, lambda: compat.unfinished(client), logger.warning, shorter=shorter)
        return self._lists


def follow(client: Any) -> None:
    """Let the front end of an AsyncLLM with item sets follow published ones. Call it on the event loop."""
    front, loop = client.input_processor.static_front_end, asyncio.get_running_loop()
    if front.follower is not None:
        return

    def send(message: Any) -> list[Any]:
        answers = asyncio.run_coroutine_threadsafe(compat.ask_each(client.engine_core, ROLLOUT, message), loop)
        while True:
            try:
                return answers.result(PATIENCE)
            except TimeoutError:
                if client.errored:  # vLLM answers nothing of an engine that has ended
                    raise ItemSetError("the engine has ended") from None

    front.follow(send).start()
