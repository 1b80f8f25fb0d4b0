"""Ranked lists and draws: a set's best items, or some that are drawn, in place of vLLM's beam search.

vLLM's own loop takes the top 2 x width of all tokens and filters them afterwards, and over HTTP drops the constraint.
Here a list or draws are one request, whose beams run inside a step of model runner V2 (`worker.lists`). If that cannot
be, or leaves draws undecided, each round is a batch of ordinary requests that score chosen tokens.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
from vllm import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils import random_uuid

from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import Found, TokenScores, described
from itemset.serving.catalogue import RefusedError
from itemset.serving.front import audit
from itemset.serving.front.answer_fields import item_logprobs, told_of
from itemset.serving.front.beside import at_once
from itemset.serving.front.healing import HEALED
from itemset.serving.front.http_bodies import body, no_body
from itemset.serving.front.list_runner import AbortedError, run_together
from itemset.serving.front.request import THOUGHT, ItemRequest
from itemset.serving.front.request_fields import ATTRIBUTES, LOGPROBS, OPTIONS, REFERENCE, wrong_type
from itemset.text import decoded
from vllm_static import compat
from vllm_static.v1 import model_runner

_IN_SOME = {"score", "attributes", "keys_attributes", "exact", "explored", "weight", "accepted", "candidates"}
_OF_SEARCH = {"proven", "passes", "rounds", "open"}
ABORT = "abort"  # vLLM's word for why an answer ended
_KEPT = ("type", "mm_kwargs", "mm_hashes", "mm_placeholders", "cache_salt")  # of a prompt, whatever tokens it gets
_NEAR = 8  # tokens before an item that its text may depend on


class RankingParams(BeamSearchParams, kw_only=True):  # type: ignore[call-arg]
    """vLLM's BeamSearchParams with its word for a plugin's arguments, {"item_set": NAME}, and with that name and the
    options of a list (`serving.front.request_fields.ListOptions`) as fields."""

    extra_args: dict[str, Any] | None = None
    item_set: str | None = None
    width: int | Sequence[int] | None = None
    exact: bool = False
    renormalised: bool = False
    max_passes: int | None = None
    without_end: bool = False
    normalise_length: float | None = None
    at_most: dict[str, int] | None = None
    explore: int | None = None
    item_attributes: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        """Raises RefusedError for an option that is given twice, with different values."""
        super().__post_init__()
        self.merged()

    def merged(self) -> dict[str, Any]:
        """Return `extra_args` with what the fields say beside it. Raises RefusedError as the construction does."""
        extra = dict(self.extra_args or {})
        for name in (REFERENCE, *OPTIONS, ATTRIBUTES):
            value = getattr(self, name)
            if value is not None and value is not False and extra.setdefault(name, value) != value:
                raise wrong_type(f"{name} is {value!r}, and in extra_args {extra[name]!r}: give one", name)
        return extra


class DrawParams(RankingParams, kw_only=True):  # type: ignore[call-arg]
    """The same of draws, for `LLM.beam_search`: extra_args={"item_set": NAME, "draws": N}, and beside them
    `itemset.serving.front.request_fields.DrawOptions`."""

    beam_width: int = 1


class ScoringParams(SamplingParams):
    """Of a request that scores tokens for a ranked list: as many as a node has children, whatever --max-logprobs is."""

    def _validate_logprobs(self, model_config: Any) -> None:
        pass


class RankedList:
    """One ranked list, or the draws of one prompt, that are being made: the set, the prompt, and the search.

    whole_prompt: of the one request by which the engine makes them. table: what that has made, after a thought already.
    """

    def __init__(self, front_end: Any, asked: ItemRequest, given: Any, lora: Any = None, priority: int = 0) -> None:
        """given: the prompt, rendered by vLLM. Raises RefusedError, or ItemSetError for an inline set's items."""
        self.prompt, self._given, self._embedded = _tokens_of(given), given, "prompt_embeds" in given
        self.lora, self.priority = lora, priority
        self.table, self._healed = asked.ended and asked.ended.table, asked.escape == HEALED
        self.job = front_end.list_job(asked, prompt_tokens=len(self.prompt))
        self.search = self.job.search
        self.whole_prompt = given if self._embedded else self._rendered([*self.prompt, *self.job.placeholders])
        if self._embedded and (self.job.carried is None or self.job.placeholders):
            raise self._needs_tokens()
        self._adapters = front_end.vllm_config.lora_config is not None
        self._end, self._v2, self._logged = front_end.end_token, front_end.v2, bool(asked.weighed)

    def token_scores(self, best: Found) -> TokenScores:
        """Return what scores the tokens of the list's items; without passes if nobody asks."""
        items = [item.tokens for item in best.items] if self._logged else []
        return TokenScores(self.job.item_set, items, self._end)

    def outputs(self, items: Iterable[Any], logs: TokenScores, request_id: str) -> list[CompletionOutput]:
        """Return an output of each item, with what an answer says of it and its text. logs: their tokens' scores."""
        outputs = []
        for i, (item, entry, text) in enumerate(items):
            tokens, reason = [*item.tokens, self._end], {"finish_reason": "stop"}
            log = item.about.get("logprob", item.score)
            text = text.removeprefix(" ") if self._healed else text
            output = CompletionOutput(i, text, tokens, log, logprobs=None, stop_reason=self._end, **reason)
            output.item = entry
            if logs.items:
                output.item_logprobs = item_logprobs(*logs.items[i])
            outputs.append(output)
        adapter, told = self.lora and self.lora.lora_name, {"items": [output.item for output in outputs]}
        audit.answered(request_id, adapter, self.job, told)
        return outputs

    def _needs_tokens(self) -> RefusedError:
        return RefusedError(
            "beam search",
            "after prompt embeddings lists and draws are made inside a step of the engine, and these take rounds of "
            "requests or a draft head (the server's log says why): send a prompt of tokens",
        )

    def _rendered(self, tokens: list[int]) -> dict[str, Any]:
        return _rendered(tokens, self._given)

    def ask(self, one: Pass, *, cached: bool) -> tuple[Any, SamplingParams]:
        """Return the prompt and the parameters of the request that scores a pass.

        cached: whether it may use the prefix cache, of which the answer lacks the tokens' rows (`missing`). Raises
        RefusedError on a CPU with LoRA adapters: scoring several prompts at once would end vLLM's engine.
        """
        if self._embedded:
            raise self._needs_tokens()
        if self._adapters and compat.platforms.current_platform.is_cpu():
            raise RefusedError(
                "beam search",
                "this list or these draws take rounds of requests, at which vLLM's engine would end on a CPU with LoRA "
                "adapters: merge the adapter into the model, or ask for sampled answers",
            )
        common = {**compat.ONE_TOKEN, "flat_logprobs": True}  # columns, not an object a token
        tokens, run = [*self.prompt, *one.tokens], one.tokens[one.known :]
        if not self._v2:  # which alone scores chosen tokens anywhere in a prompt
            return self._rendered(tokens), ScoringParams(**common, **model_runner.scoring(one, cached=cached))
        chosen = np.full((len(run) + 1, max(1, len(one.after))), -1, np.int64)
        chosen[: len(run), 0] = run
        chosen[-1, : len(one.after)] = one.after
        params = ScoringParams(
            prompt_logprob_token_ids=chosen,
            prompt_logprob_start=len(self.prompt) + one.known - 1,
            skip_reading_prefix_cache=not cached,
            **common,
        )
        # The last row scores what would follow; a prompt's rows end one before its last token.
        return self._rendered([*tokens, self._end]), params

    def missing(self, one: Pass, output: Any) -> bool:
        """Return whether the output lacks what was asked, so that it has to be asked again."""
        if not self._v2:
            return model_runner.lacks_scores(one, len(self.prompt), output)
        return output.prompt_token_id_logprobs is None

    def answer(self, one: Pass, output: Any) -> Answer:
        if not self._v2:
            return model_runner.scored(one, len(self.prompt), output)
        run = len(one.tokens) - one.known
        table = np.asarray(output.prompt_token_id_logprobs, np.float64)
        return table[:run, 0], table[run, : len(one.after)]


def offline(
    llm: Any, inputs: Sequence[Any], asked: ItemRequest, params: Any, loras: Sequence[Any], priorities: Sequence[int]
) -> list[Any]:
    """`LLM.beam_search` of prompts that vLLM has tokenized. The others as for `candidates`."""
    from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput, BeamSearchSequence

    pinned = llm.llm_engine.input_processor.static_front_end.pinned(asked)  # all lists are of one version
    made = candidates(llm, inputs, [pinned] * len(inputs), loras, priorities)
    texts = iter(_texts(llm.get_tokenizer(), made, skip_special_tokens=params.skip_special_tokens))
    results = []
    for prompt, lora, answer in zip(inputs, loras, made, strict=True):
        sequences: list[Any] = []
        for output in answer.outputs:
            sequence = BeamSearchSequence(
                prompt,
                tokens=[*answer.prompt_token_ids, *output.token_ids],
                logprobs=[],
                lora_request=lora,
                cum_logprob=output.cumulative_logprob,
                text=next(texts),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            entry = output.item
            for name in ("key", "keys", *(_IN_SOME & entry.keys())):
                setattr(sequence, name, entry[name])
            sequence.item_text = output.text  # without the prompt and the end token
            sequence.item_set_version = entry.get("item_set_version")
            if hasattr(output, LOGPROBS):
                sequence.item_logprobs = output.item_logprobs
            sequences.append(sequence)
        result = BeamSearchOutput(sequences=sequences)
        for name in _OF_SEARCH & answer.outputs[0].item.keys():
            setattr(result, name, answer.outputs[0].item[name])
        results.append(result)
    return results


def with_lists(llm: Any, results: list[Any]) -> list[Any]:
    """Return the results of `LLM`, after whose thoughts lists are made: the `items` of their outputs."""
    each = [(one, output) for one in results if isinstance(one, RequestOutput) for output in one.outputs]
    each = [(one, output) for one, output in each if hasattr(output, THOUGHT)]
    asked = [vars(output).pop(THOUGHT) for _, output in each]
    inputs = [_after(one, thought) for (one, _), thought in zip(each, asked, strict=True)]
    loras = [one.lora_request for one, _ in each]
    made = candidates(llm, inputs, asked, loras, [0] * len(each)) if each else []
    for (_, output), one in zip(each, made, strict=True):
        output.items = _as_items(one)
    return results


async def with_list(client: Any, result: RequestOutput, told: dict[int, dict[str, Any]], **options: Any) -> None:
    """Make the lists after a result's ended thoughts: `told` gets their items. options: of requests."""
    for output in result.outputs:
        if (asked := told.get(output.index, {}).get(THOUGHT)) is not None:
            vars(output).pop(THOUGHT, None)
            made = await online(asked, client, _after(result, asked), result.request_id, **options)
            told[output.index] = {"items": _as_items(made)}


def _as_items(made: RequestOutput) -> list[dict[str, Any]] | None:
    """Return what an answer says of the list after its thought; None if that was aborted."""
    told = [told_of(one) | {"text": one.text} for one in made.outputs if one.finish_reason != ABORT]
    return [one.pop("item") | one for one in told] or None


def candidates(
    llm: Any, inputs: Sequence[Any], asked: Sequence[ItemRequest], loras: Sequence[Any], priorities: Sequence[int]
) -> list[RequestOutput]:
    """Return what `LLM.generate` answers to requests for lists or draws, of prompts that vLLM has tokenized."""
    tokenizer, front_end = llm.get_tokenizer(), llm.llm_engine.input_processor.static_front_end
    healed = [at_once(front_end.healed_prompt(*one, here=True)) for one in zip(asked, inputs, strict=True)]
    inputs = [prompt for _, prompt in healed]
    pinned = [front_end.pinned(one, _tokens_of(prompt)) for one, prompt in healed]
    lists = [RankedList(front_end, *each) for each in zip(pinned, inputs, loras, priorities, strict=True)]
    made, logs = _results(llm, front_end, lists)
    # All that is written out goes through the tokenizer together, and through its set.
    entries = list[list[dict[str, Any]]]()
    jobs = zip((one.job for one in lists), made, strict=True)
    for _, group in groupby(jobs, key=lambda pair: (id(pair[0].item_set), *pair[0].names)):
        alike, found = zip(*group, strict=True)
        entries += described(found, alike[0].item_set, alike[0].of_set, alike[0].names)
    texts = iter(decoded([list(item.tokens) for one in made for item in one.items], tokenizer))
    outputs = []
    for i, best in enumerate(made):
        items = zip(best.items, entries[i], islice(texts, len(best.items)), strict=True)
        request_id = str(next(llm.request_counter))
        outputs.append(_output(request_id, inputs[i], lists[i].outputs(items, logs[i], request_id)))
    return outputs


def _output(request_id: str, prompt: Any, outputs: list[CompletionOutput]) -> RequestOutput:
    prompt = prompt.get("decoder_prompt", prompt)
    tokens = list(prompt.get("prompt_token_ids") or ())
    return RequestOutput(request_id, prompt.get("prompt"), tokens, None, outputs, finished=True)


def _tokens_of(prompt: Any) -> list[int]:
    """Return a prompt's tokens; of one of embeddings as many zeros, which nobody reads."""
    prompt = prompt.get("decoder_prompt", prompt)
    return [0] * len(prompt["prompt_embeds"]) if "prompt_embeds" in prompt else list(prompt["prompt_token_ids"])


def _rendered(tokens: list[int], given: Any) -> dict[str, Any]:
    """Return a prompt of tokens as vLLM has it once it is rendered, with the images and the like of a given one."""
    if "decoder_prompt" in given:
        return {**given, "decoder_prompt": _rendered(tokens, given["decoder_prompt"])}
    return {"type": "token", **{name: given[name] for name in _KEPT if name in given}, "prompt_token_ids": tokens}


def _after(result: RequestOutput, asked: ItemRequest) -> dict[str, Any]:
    """Return the prompt of the list after a result's thought, which has ended."""
    assert asked.ended is not None
    return _rendered([*(result.prompt_token_ids or ()), *asked.ended.tokens], asked.ended.prompt)


def _texts(tokenizer: Any, made: Sequence[RequestOutput], **options: Any) -> list[str]:
    """Return the text of each prompt with each of its items. A prompt is decoded once, but for its last tokens, on
    which the text that follows may depend. options: of `decode`."""
    befores, rows = list[str](), list[list[int]]()
    for one in made:
        prompt: Any = one.prompt_token_ids
        near = prompt[-_NEAR:]
        whole, end = decoded([prompt, near], tokenizer, **options)
        if not whole.endswith(end):  # these tokens begin inside a character
            near, end = prompt, whole
        befores += [whole[: len(whole) - len(end)]] * len(one.outputs)
        rows += [[*near, *output.token_ids] for output in one.outputs]
    return [before + text for before, text in zip(befores, decoded(rows, tokenizer, **options), strict=True)]


def _results(llm: Any, front_end: Any, lists: Sequence[RankedList]) -> tuple[list[Found], list[TokenScores]]:
    """Make the lists, each in one request if it can be, the others round by round together; then score their tokens."""

    def generate(requests: Sequence[tuple[RankedList, Any, SamplingParams]]) -> list[Any]:
        """Return the outputs of requests, each with its list."""
        lists, prompts, params = zip(*requests, strict=True)
        given = {"lora_requests": [one.lora for one in lists], "priorities": [one.priority for one in lists]}
        # `LLM.generate` would render the prompts anew, without their images.
        outputs: list[Any] = llm._render_and_run_requests(iter(prompts), params, RequestOutput, use_tqdm=False, **given)
        return outputs

    def score(of: Sequence[RankedList], passes: Sequence[tuple[int, Pass]]) -> list[Answer]:
        """Return the answers to passes, each with the index of its list."""
        answers: dict[int, Answer] = {}
        for cached in (True, False):
            left = [(n, of[i], one) for n, (i, one) in enumerate(passes) if n not in answers]
            asked = [(made, *made.ask(one, cached=cached)) for _, made, one in left]
            for (n, made, one), output in zip(left, generate(asked) if asked else (), strict=True):
                if not made.missing(one, output):
                    answers[n] = made.answer(one, output)
        return [answers[n] for n in range(len(passes))]

    inside = [one for one in lists if one.job.carried is not None]
    whole = [(one, one.whole_prompt, compat.list_params(one.job.carried)) for one in inside if one.table is None]
    for (one, *_), output in zip(whole, generate(whole) if whole else (), strict=True):
        one.table = output.prompt_token_id_logprobs
    results = {one: front_end.one_request.read(one.job.carried, one.table, one.search) for one in inside}
    others = [one for one in lists if results.get(one) is None]
    results |= zip(others, run_together([one.search for one in others], partial(score, others)), strict=True)
    logs = {one: one.token_scores(results[one]) for one in lists}
    asking = [one for one in lists if logs[one].passes]
    run_together([logs[one] for one in asking], partial(score, asking))
    return [results[one] for one in lists], [logs[one] for one in lists]


async def online(asked: ItemRequest, client: Any, prompt: Any, request_id: str, **options: Any) -> RequestOutput:
    """Return the beam search of vLLM's server, and candidates of `AsyncLLM.generate`. options: of requests.

    When the client goes, all its requests are aborted. A list that the engine aborts ends as samples do then.
    """
    tokenizer = client.renderer.get_tokenizer()
    front_end = client.input_processor.static_front_end
    asked, prompt = await front_end.healed_prompt(asked, prompt)
    asked = await front_end.prepare(asked, _tokens_of(prompt))
    body().begin(thinks=False)
    made = RankedList(front_end, asked, prompt)
    lists = front_end.lists(client)

    async def generate(prompt: Any, params: SamplingParams) -> Any:
        output: Any = None
        with no_body():
            async for part in client.generate(prompt, params, f"{request_id}-{random_uuid()}", **options):
                output = part
        if output.outputs[0].finish_reason in (ABORT, "error"):
            raise AbortedError
        return output

    async def ask(one: Pass) -> Any:
        for cached in (True, False):
            output = await generate(*made.ask(one, cached=cached))
            if not made.missing(one, output):
                return output
        raise RuntimeError("vLLM gave no scores")

    best = None
    try:
        if (carried := made.job.carried) is not None:
            if made.table is None:
                async with front_end.one_request.room(carried.ranked, lambda: compat.unfinished(client)):
                    output = await generate(made.whole_prompt, compat.list_params(carried))
                made.table = output.prompt_token_id_logprobs
            best = front_end.one_request.read(carried, made.table, made.search)
        if best is None:
            best = await lists.run(made.search, ask, made.answer)
        if (logs := made.token_scores(best)).passes:
            await lists.run(logs, ask, made.answer)
    except AbortedError:
        none = [CompletionOutput(i, "", [], 0.0, None, finish_reason=ABORT) for i in range(asked.wanted)]
        for one in none:
            one.item = None
        return _output(request_id, prompt, none)
    items: list[tuple[Any, Any, str]] = []
    async for part in lists.entries(best, made.job.item_set, made.job.of_set, made.job.names):
        texts = decoded([list(item.tokens) for item, _ in part], tokenizer)
        items += [(item, entry, text) for (item, entry), text in zip(part, texts, strict=True)]
    return _output(request_id, prompt, made.outputs(items, logs, request_id))
