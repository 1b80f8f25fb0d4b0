"""Ranked lists: the best items of a set, in place of vLLM's beam search where a request has one.

vLLM's own loop takes the top 2 x width of all tokens and filters them afterwards, and over HTTP drops the constraint.
Here each round is a batch of ordinary requests that score chosen tokens: the children of a prefix, or a whole tail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils import random_uuid

from itemset import ItemSet
from itemset.best import Answer, Best, Pass, Rounds, described, search
from itemset.checks import found_some, ranking_options
from itemset.config import REFERENCE
from vllm_static import metrics


class RankingParams(BeamSearchParams, kw_only=True):  # type: ignore[call-arg]
    """vLLM's BeamSearchParams with its word for a plugin's arguments: {"item_set": NAME}, and beside it
    `itemset.checks.RANKING`."""

    extra_args: dict[str, Any] | None = None


class ScoringParams(SamplingParams):
    """Of a request that scores tokens for a ranked list: as many as a node has children, whatever --max-logprobs is."""

    def _validate_logprobs(self, model_config: Any) -> None:
        pass


class Ranking:
    """One ranked list that is being made: the set, the prompt, and the search."""

    def __init__(self, front_end: Any, params: Any, prompt: list[int], end_token: int) -> None:
        """params: vLLM's BeamSearchParams. Raises RefusedError, or ItemSetError for an inline set's items."""
        extra = dict(getattr(params, "extra_args", None) or {})
        given = SimpleNamespace(extra_args=extra, structured_outputs=params.structured_outputs)
        reference = front_end.find(given)
        self._item_set: ItemSet = front_end.ranked(reference, params, len(prompt), end_token)
        self._prompt, self._end, self._v2 = prompt, end_token, front_end.v2
        self.rounds: Rounds = search(
            self._item_set,
            params.beam_width,
            end_token=end_token,
            **ranking_options(extra),
        )
        metrics.REQUESTS.labels(metrics.label(reference)).inc()

    def ask(self, one: Pass, *, cached: bool) -> tuple[list[int], SamplingParams]:
        """The prompt and the parameters of the request that scores a pass.

        cached: whether it may use the prefix cache. Where the row of a wanted token lies in a cached block, the answer
        is missing, and it has to be asked again without.
        """
        common: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        tokens, run = [*self._prompt, *one.tokens], one.tokens[one.known :]
        if not self._v2:
            # V2 alone scores chosen tokens anywhere in a prompt; V1 those that may follow it, and a prompt's own.
            after = one.after.tolist()
            own = {"prompt_logprobs": 0, "skip_reading_prefix_cache": not cached} if run else {}
            # Without `logprobs`: vLLM would look for as many most likely tokens besides.
            chosen = {"logprob_token_ids": after} if after else {"logprobs": 0}
            return tokens, ScoringParams(**chosen, **common, **own)
        wanted = np.full((len(run) + 1, max(1, len(one.after))), -1, np.int64)
        wanted[: len(run), 0] = run
        wanted[-1, : len(one.after)] = one.after
        params = ScoringParams(
            prompt_logprob_token_ids=wanted,
            prompt_logprob_start=len(self._prompt) + one.known - 1,
            skip_reading_prefix_cache=not cached,
            **common,
        )
        # The last row scores what would follow; a prompt's rows end one before its last token.
        return [*tokens, self._end], params

    def answer(self, one: Pass, output: Any) -> Answer | None:
        """What vLLM has scored, None where it has to be asked again."""
        run = one.tokens[one.known :]
        if not self._v2:
            first = len(self._prompt) + one.known
            if run and (output.num_cached_tokens or 0) >= first:
                return None  # V1 fills in rows that it has computed, and leaves what was in memory for the others
            own = [output.prompt_logprobs[first + i][token].logprob for i, token in enumerate(run)]
            (after,) = output.outputs[0].logprobs
            return np.array(own), np.array([after[token].logprob for token in one.after.tolist()])
        if output.prompt_token_id_logprobs is None:
            return None
        table = np.asarray(output.prompt_token_id_logprobs, np.float64)
        return table[: len(run), 0], table[len(run), : len(one.after)]

    def described(self, best: Best) -> list[dict[str, Any]]:
        """What an answer says of each of the items found."""
        return described(best, self._item_set)


def offline(
    llm: Any, inputs: Sequence[Any], params: Any, lora_requests: Sequence[Any], priorities: Sequence[int] | None = None
) -> list[Any]:
    """`LLM.beam_search` of prompts that vLLM has tokenized, all of them round by round together."""
    from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput, BeamSearchSequence

    tokenizer = llm.get_tokenizer()
    front_end = llm.llm_engine.input_processor.static_front_end
    rankings = [Ranking(front_end, params, list(one["prompt_token_ids"]), tokenizer.eos_token_id) for one in inputs]
    waiting = {i: next(ranking.rounds) for i, ranking in enumerate(rankings)}
    best: dict[int, Best] = {}
    while waiting:
        asked = [(i, one) for i, passes in waiting.items() for one in passes]
        answers = _scored(llm, rankings, asked, lora_requests, priorities)
        for i, passes in list(waiting.items()):
            mine, answers = answers[: len(passes)], answers[len(passes) :]
            try:
                waiting[i] = rankings[i].rounds.send(mine)
            except StopIteration as end:
                best[i] = found_some(end.value)
                del waiting[i]
    outputs = []
    for i, ranking in enumerate(rankings):
        sequences = []
        for item, entry in zip(best[i].items, ranking.described(best[i]), strict=True):
            tokens = [*inputs[i]["prompt_token_ids"], *item.tokens, tokenizer.eos_token_id]
            sequence = BeamSearchSequence(
                inputs[i],
                tokens=tokens,
                logprobs=[],
                lora_request=lora_requests[i],
                cum_logprob=item.score,
                text=tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
                finish_reason="stop",
                stop_reason=tokenizer.eos_token_id,
            )
            sequence.key = entry["key"]
            sequences.append(sequence)
        output = BeamSearchOutput(sequences=sequences)
        output.proven, output.passes, output.rounds = best[i].proven, best[i].passes, best[i].rounds
        outputs.append(output)
    return outputs


def _scored(
    llm: Any,
    rankings: Sequence[Ranking],
    asked: Sequence[tuple[int, Pass]],
    lora_requests: Sequence[Any],
    priorities: Sequence[int] | None,
) -> list[Answer]:
    answers: dict[int, Answer] = {}
    for cached in (True, False):
        missing = [n for n in range(len(asked)) if n not in answers]
        if not missing:
            break
        requests = [rankings[asked[n][0]].ask(asked[n][1], cached=cached) for n in missing]
        outputs = llm.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in requests],
            [params for _, params in requests],
            use_tqdm=False,
            lora_request=[lora_requests[asked[n][0]] for n in missing] if any(lora_requests) else None,
            priority=None if priorities is None else [priorities[asked[n][0]] for n in missing],
        )
        for n, output in zip(missing, outputs, strict=True):
            answer = rankings[asked[n][0]].answer(asked[n][1], output)
            if answer is not None:
                answers[n] = answer
    return [answers[n] for n in range(len(asked))]


async def online(
    serving: Any, prompt: Any, request_id: str, params: Any, lora_request: Any = None, **options: Any
) -> AsyncGenerator[RequestOutput, None]:
    """The beam search of vLLM's server. Where the client goes, all its requests are aborted."""
    tokenizer = serving.renderer.get_tokenizer()
    client = serving.engine_client
    tokens = list(prompt["prompt_token_ids"])
    front_end = client.input_processor.static_front_end
    # On a thread, because it encodes an inline set.
    ranking = await asyncio.to_thread(Ranking, front_end, params, tokens, tokenizer.eos_token_id)

    async def one_answer(one: Pass) -> Answer:
        for cached in (True, False):
            asked, scoring = ranking.ask(one, cached=cached)
            output = None
            name = f"{request_id}-{random_uuid()}"
            given = {"prompt_token_ids": asked}
            async for part in client.generate(given, scoring, name, lora_request=lora_request, **options):
                output = part
            answer = ranking.answer(one, output)
            if answer is not None:
                return answer
        raise RuntimeError("vLLM gave no scores")

    passes = next(ranking.rounds)
    while True:
        tasks = [asyncio.ensure_future(one_answer(one)) for one in passes]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        try:
            passes = ranking.rounds.send(answers)
        except StopIteration as end:
            best = found_some(end.value)
            break
    outputs = []
    for i, (item, entry) in enumerate(zip(best.items, ranking.described(best), strict=True)):
        ids = [*item.tokens, tokenizer.eos_token_id]
        output = CompletionOutput(
            index=i,
            text=tokenizer.decode(item.tokens, skip_special_tokens=params.skip_special_tokens),
            token_ids=ids,
            cumulative_logprob=item.score,
            logprobs=None,
            finish_reason="stop",
            stop_reason=None,
        )
        output.ranked = entry
        outputs.append(output)
    yield RequestOutput(
        request_id=request_id,
        prompt=prompt.get("prompt"),
        outputs=outputs,
        finished=True,
        prompt_token_ids=tokens,
        prompt_logprobs=None,
    )


def has_set(params: Any) -> bool:
    """Whether BeamSearchParams name or bring an item set."""
    structured = params.structured_outputs
    named = (getattr(params, "extra_args", None) or {}).get(REFERENCE)
    return named is not None or (structured is not None and structured.choice is not None)
