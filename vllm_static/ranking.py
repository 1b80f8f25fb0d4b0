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

from itemset.best import Answer, Best, Pass, described
from itemset.config import REFERENCE
from itemset.lists import found_some
from vllm_static import metrics

SLICE = 32  # items of an answer that are written out in one turn of the event loop


class RankingParams(BeamSearchParams, kw_only=True):  # type: ignore[call-arg]
    """vLLM's BeamSearchParams with its word for a plugin's arguments: {"item_set": NAME}, and beside it
    `itemset.lists.RANKING`."""

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
        self._item_set, self.search = front_end.ranked(reference, extra, params, len(prompt), end_token)
        self._prompt, self._end, self._v2 = prompt, end_token, front_end.v2
        metrics.REQUESTS.labels(metrics.label(reference)).inc()

    def ask(self, one: Pass, *, cached: bool) -> tuple[list[int], SamplingParams]:
        """The prompt and the parameters of the request that scores a pass.

        cached: whether it may use the prefix cache. Where the row of a wanted token lies in a cached block, the answer
        is missing, and it has to be asked again without.
        """
        common: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0.0,
            "detokenize": False,
            "flat_logprobs": True,  # columns, not an object a token
            "skip_clone": True,  # no other request has these parameters
        }
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

    def missing(self, one: Pass, output: Any) -> bool:
        """Whether the output lacks what was asked, so that it has to be asked again."""
        if self._v2:
            return output.prompt_token_id_logprobs is None
        # V1 fills in rows that it has computed, and leaves what was in memory for the others.
        return len(one.tokens) > one.known and (output.num_cached_tokens or 0) >= len(self._prompt) + one.known

    def answer(self, one: Pass, output: Any) -> Answer:
        """What vLLM has scored."""
        run = one.tokens[one.known :]
        if self._v2:
            table = np.asarray(output.prompt_token_id_logprobs, np.float64)
            return table[: len(run), 0], table[len(run), : len(one.after)]
        own, (after,) = output.prompt_logprobs, [output.outputs[0].logprobs]
        first = len(self._prompt) + one.known
        scores = [own.logprobs[own.start_indices[i]] for i in range(first, first + len(run))]
        return np.array(scores), np.array(after.logprobs[1:])  # the first is the sampled token's

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
    while waiting := [(i, ranking) for i, ranking in enumerate(rankings) if ranking.search.passes]:
        asked = [(i, one) for i, ranking in waiting for one in ranking.search.passes]
        answers = iter(_scored(llm, rankings, asked, lora_requests, priorities))
        for _, ranking in waiting:
            ranking.search.take([next(answers) for _ in ranking.search.passes])
    outputs = []
    for i, ranking in enumerate(rankings):
        sequences, best = [], found_some(ranking.search.result)
        for item, entry in zip(best.items, ranking.described(best), strict=True):
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
        output.proven, output.passes, output.rounds = best.proven, best.passes, best.rounds
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
        left = [n for n in range(len(asked)) if n not in answers]
        if not left:
            break
        requests = [rankings[asked[n][0]].ask(asked[n][1], cached=cached) for n in left]
        outputs = llm.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in requests],
            [params for _, params in requests],
            use_tqdm=False,
            lora_request=[lora_requests[asked[n][0]] for n in left] if any(lora_requests) else None,
            priority=None if priorities is None else [priorities[asked[n][0]] for n in left],
        )
        for n, output in zip(left, outputs, strict=True):
            ranking, one = rankings[asked[n][0]], asked[n][1]
            if not ranking.missing(one, output):
                answers[n] = ranking.answer(one, output)
    return [answers[n] for n in range(len(asked))]


async def online(
    serving: Any, prompt: Any, request_id: str, params: Any, lora_request: Any = None, **options: Any
) -> AsyncGenerator[RequestOutput, None]:
    """The beam search of vLLM's server. When the client goes, all its requests are aborted."""
    tokenizer = serving.renderer.get_tokenizer()
    client = serving.engine_client
    tokens = list(prompt["prompt_token_ids"])
    front_end = client.input_processor.static_front_end
    params = await front_end.prepare(params)
    ranking = Ranking(front_end, params, tokens, tokenizer.eos_token_id)
    lists = front_end.lists(client)

    async def ask(one: Pass) -> Any:
        for cached in (True, False):
            asked, scoring = ranking.ask(one, cached=cached)
            output = None
            name = f"{request_id}-{random_uuid()}"
            given = {"type": "token", "prompt_token_ids": asked}  # vLLM has nothing left to render
            async for part in client.generate(given, scoring, name, lora_request=lora_request, **options):
                output = part
            if not ranking.missing(one, output):
                return output
        raise RuntimeError("vLLM gave no scores")

    best = await lists.run(ranking.search, ask, ranking.answer)
    entries = await lists.on_thread(ranking.described, best)
    outputs = []
    for i, (item, entry) in enumerate(zip(best.items, entries, strict=True)):
        if i % SLICE == 0:
            await asyncio.sleep(0)
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
