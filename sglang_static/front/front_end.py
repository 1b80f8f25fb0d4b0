"""The front end: a request's item set is found, checked and attached to it before a scheduler sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from itemset.embedded.holes import Vocabulary
from itemset.serving.catalogue import RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.constraint import Constraint, after
from itemset.serving.front.front_end import FrontEndBase, ListJob
from itemset.serving.front.healing import HEALED, ends_in_space
from itemset.serving.front.http_bodies import body, while_connected
from itemset.serving.front.list_runner import Lists, OneRequest
from itemset.serving.front.lost_fields import refuse_lost
from itemset.serving.front.request import ItemRequest, Thought, wants_candidates
from itemset.serving.front.request_fields import BEAMS, CUSTOM, DRAWS, LIST, LIST_AFTER, LOGPROBS, PROMPT, wrong_type
from itemset.serving.front.sampler_limits import refuse_unsampled
from itemset.serving.wire import Tokens
from sglang_static import compat
from sglang_static.compat import logger
from sglang_static.front import answers
from sglang_static.front.list_requests import AFTER
from sglang_static.front.request import (
    OTHERS,
    asked,
    check_prompts,
    in_place,
    names_set,
    names_sets,
    prompts_of,
    take_spaces,
    wants_list,
)

RESERVED = 2  # tokens that SGLang keeps of a context (managers/scheduler.py, init_req_max_new_tokens)


class FrontEnd(FrontEndBase):
    log = logger
    words = Words("context_length", "--context-length", "min_new_tokens", compat.VARIABLE)

    validate = staticmethod(compat.validate)

    def __init__(self, manager: Any) -> None:
        config, model = StaticConfig.of(compat.options()), manager.model_config
        tokenizer = manager.tokenizer
        if tokenizer is None:
            raise ValueError("the static backend needs the model's tokenizer: leave out --skip-tokenizer-init")
        self._ends = set(model.hf_eos_token_id or ()) | {tokenizer.eos_token_id} - {None}
        self._all_ends = self._ends | set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        self._defaults, self._context = manager.preferred_sampling_params or {}, model.context_len - RESERVED
        seats = compat.resolved(manager.server_args).max_running_requests or 256  # a guess if none are given
        super().__init__(
            config,
            tokenizer,
            ModelLimits(model.vocab_size, model.context_len, RESERVED, self._ends),
            lambda: Vocabulary(compat.token_info(tokenizer, model.vocab_size, model.hf_eos_token_id)),
            OneRequest(logger.warning, beams=seats, widest=None, too_many="more draws than the engine has seats for"),
            json_options=compat.json_options(),
        )
        self.lists = Lists(seats, lambda: len(manager.rid_to_state), logger.warning)
        self._speculates = manager.server_args.speculative_algorithm is not None
        self._why_no_weights = compat.why_host_path(manager.server_args)  # they need what the device path does
        reason = config.why_on_host(self._why_no_weights)
        here = manager.server_args.nnodes == 1
        self._begin("Grammar backend", reason, here=here, model=str(manager.served_model_name))

    async def judge(self, request: Any, http_request: Any) -> bool:
        """Judge what each prompt of a request says, once, and put an ItemRequest in the place of its words, at item_set
        of its sampling parameters. Return whether they are to get ranked lists.

        Await it before anything is done with a request. Encoding stops if the client leaves. Raises RefusedError, or
        ItemSetError for what is wrong with an inline set's items.
        """
        fields, given = body().fields or {}, request.sampling_params
        each = given if isinstance(given, list) else [given]
        if not all(params is None or isinstance(params, dict) for params in each):
            raise wrong_type("sampling_params of one prompt must be an object: send no list of them")
        ways = [(wants_list(params or {}, fields), wants_candidates(params)) for params in each]
        ranked = bool(each) and ways[0][0]
        if any(way != ways[0] for way in ways) and any(names_set(params or {}, fields) for params in each):
            message = f"beam_width, {LIST} and {DRAWS} are for all prompts of a batch or for none: send two requests"
            raise RefusedError("beam search", message)
        with_defaults = [{**self._defaults, **(params or {})} for params in each]
        requests = await self._asked(with_defaults, fields, http_request, ranked=ranked)
        if hasattr(request, "input_ids") and (any(requests) or (fields and not each)):
            check_prompts(request, listed=ranked)
        if not any(requests):
            return False
        if ranked and None in requests:
            raise RefusedError(
                "beam search",
                f"sampling_params[{requests.index(None)}] has no item set, and others of this batch have one: give "
                "each prompt its set, or send those without one in a request of their own",
            )
        made: dict[tuple[int, float, Any], Any] = {}  # by the identity of its list, which prompts may share
        judged, texts = [], prompts_of(request) if hasattr(request, "input_ids") else list[Any]()
        healed, spaced = set[int](), any(map(ends_in_space, texts))
        for i, (params, one) in enumerate(zip(each, requests, strict=True)):
            if one is None:
                judged.append(params)
                continue
            self._check_beside(one, request, i, with_defaults, ranked=ranked)
            if one.choice is not None and one.made is None:
                one = replace(one, made=made.get((id(one.choice), one.temperature, one.escape)))
            waits = one.chooses or (one.choice is not None and one.made is None)
            heals = spaced and not self._stops_early(request, with_defaults[i])
            known = bool(texts) and (PROMPT in one.selection or heals)
            for at in [i] if isinstance(given, list) or not known else range(len(texts)):
                asks, prompt = one, texts[at] if known else None
                if heals and isinstance(prompt, str) and ends_in_space(prompt):
                    was = one.choice and made.get((id(one.choice), one.temperature, HEALED))
                    if was:
                        asks = replace(one, escape=HEALED, made=was)
                    else:
                        asks = await while_connected(self.healed(one, prompt), http_request)
                    healed |= {at} if asks.escape == HEALED else set()
                beside = self.prepare(asks, prompt) if waits and asks.made is None else None
                pinned = self.pinned(asks) if beside is None else await while_connected(beside, http_request)
                assert pinned is not None
                made[id(one.choice), one.temperature, asks.escape] = pinned.made
                judged.append(in_place(params or {}, pinned))
        if healed:
            take_spaces(request, healed)
        request.sampling_params = judged if isinstance(given, list) or len(judged) > 1 else judged[0]
        return ranked

    async def _asked(
        self, each: Sequence[dict[str, Any]], fields: Mapping[str, Any], http_request: Any, *, ranked: bool
    ) -> list[ItemRequest | None]:
        """Return what the parameters of each prompt ask, with the constraints made in which sets stand."""
        requests = [asked(params, fields, ranked=ranked) for params in each]
        for i, one in enumerate(requests):
            if one is not None and one.constraint is not None:
                requests[i] = await while_connected(self.prepare(one), http_request)
                if requests[i] is not None and sum(bool(each[i].get(name)) for name in OTHERS) > 1:
                    raise RefusedError("two constraints", f"of {', '.join(OTHERS)} only one can hold: omit the others")
        inside = sum(one is not None and one.constraint is not None for one in requests)
        refuse_lost(body().stated, reached=inside)
        if ranked and inside:
            raise RefusedError("beam search", f"a beam search takes no item_set inside a grammar: omit {BEAMS}", BEAMS)
        return requests

    @staticmethod
    def _stops_early(request: Any, params: Mapping[str, Any]) -> bool:
        """Return whether an item does not begin right after its prompt, or a stop string is looked for in its space."""
        return bool(getattr(request, "require_reasoning", False) or params.get("stop") or params.get("stop_regex"))

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's tokens, as SGLang encodes it. Safe for threads, which SGLang's own tokenizer is not."""
        return self._tokenizer.encode(prompt)

    def _check_beside(
        self, one: ItemRequest, request: Any, prompt: int, each: Sequence[Mapping[str, Any]], *, ranked: bool
    ) -> None:
        """Raises RefusedError for what one of a request's prompts cannot have beside a set, as for a weight that its
        answers cannot say. each: the parameters of all."""
        refuse_unsampled(each[prompt], self.vocab_size)
        if not isinstance(each[prompt].get(CUSTOM), dict | None):
            raise wrong_type(f"{CUSTOM} must be an object", CUSTOM)
        word, processors = "custom_logit_processor", request.custom_logit_processor
        theirs = processors if isinstance(processors, list) else [processors]
        if any(own is not None for own in (theirs[prompt : prompt + 1] if len(theirs) == len(each) else theirs)):
            message = f"{word} is not supported with an item set, from which it could lead away: leave it out"
            raise RefusedError(word, message)
        if ranked or one.after or not one.weighed:
            return
        logprobs = getattr(request, "return_logprob", None)
        if isinstance(logprobs, list):
            logprobs = prompt < len(logprobs) and logprobs[prompt]
        instead_of = "log-probabilities" if logprobs and not hasattr(request, answers.WEIGHED) else None
        reason = "with speculation" if self._speculates and one.weighed == LOGPROBS else self._why_no_weights
        self.check_weight(one.weighed, reason, instead_of=instead_of, ignore_eos=each[prompt].get("ignore_eos"))

    def attach(self, asked: ItemRequest, request: Any, params: Any, prompt: list[int]) -> None:
        """Write a pinned request into its `SamplingParams` for the scheduler, and note which items its answers may be.
        request: a GenerateReqInput. Raises RefusedError if no item could end."""
        if asked.marker:
            setattr(request, answers.EXPECTED, self._think(asked, request, params, prompt))
            return
        stops = set(params.stop_token_ids or ())
        ends, least = stops | self._ends, {"prompt_tokens": len(prompt), "min_tokens": params.min_new_tokens}
        carried = self.engine_request(asked, stop_tokens=ends, **least)
        if not ends:
            raise RefusedError("no end", "the model has no end token: give the request stop_token_ids")
        params.custom_params = {**(params.custom_params or {}), **carried.json()}
        mark = self.reasoning_end() if request.require_reasoning else ()
        content = partial(after, mark) if mark else None
        body().begin(thinks=content is not None)
        if not (params.ignore_eos and isinstance(asked.made, Constraint)):
            params.skip_special_tokens = params.spaces_between_special_tokens = False  # an item shows its own
        setattr(request, answers.EXPECTED, self.expected(asked, frozenset(stops | self._all_ends), content))

    def _think(self, asked: ItemRequest, request: Any, params: Any, prompt: list[int]) -> Thought:
        """Let a thought end at its marker, and leave room for the items after it."""
        self.refuse_inside(names_sets(request.sampling_params))
        job = self.list_job(asked, request.lora_path, prompt_tokens=len(prompt) + len(asked.marker))
        room = self._context - AFTER - job.item_set.longest - len(prompt)
        params.max_new_tokens = min(params.max_new_tokens or room, room)
        params.stop_token_ids = {*(params.stop_token_ids or ()), *asked.marker}
        params.no_stop_trim = True
        return Thought(asked, [job], prompt)

    def list_job(self, asked: ItemRequest, lora: str | None, *, prompt_tokens: int) -> ListJob:
        reasons = {"LoRA adapter": lora is not None}
        return self.begin_list(asked, prompt_tokens=prompt_tokens, after=AFTER, reasons=reasons)

    def _marker(self, after: str | bool) -> Tokens:
        marker = super()._marker(after)
        if (count := len(marker)) > 1:
            message = f"{LIST_AFTER} has {count} tokens, and SGLang ends an answer at one: give one that is a token"
            raise wrong_type(message, LIST_AFTER)
        return marker

    def reasoning_end(self) -> Tokens:
        return compat.reasoning(self._tokenizer)[1]
