"""Ranked lists and draws: the best items of a set, or some that are drawn, in place of SGLang's beam search where a
request has one.

SGLang's own takes its candidates before the sampler masks them, and refuses grammars. Most lists and draws are one
request, whose candidates come from the set (`step_lists`). For the others, and to end what that leaves undecided, each
round is a batch of ordinary requests that score chosen tokens of a prompt (`token_ids_logprob`, `logprob_start_len`).
"""

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import TokenScores
from itemset.serving.catalogue import RefusedError
from itemset.serving.front.answer_fields import item_logprobs
from itemset.serving.front.http_bodies import body, no_body, while_connected
from itemset.serving.front.list_runner import AbortedError
from itemset.serving.front.request import wants_candidates
from itemset.serving.front.request_fields import BEAMS, LOGPROBS, REFERENCE, ListOptions
from itemset.serving.wire import EngineRequest, ListResult, NoList, Tokens
from sglang_static.front.request import CARRIED, given_prompts

AFTER = 5  # of the context: SGLang takes prompts shorter than that (managers/tp_worker.py, max_req_input_len)
_OF_DRAWS = ("draw", "exact", "explored", "weight", "accepted", "candidates", "open")
_OF_KEYS = ("key", "keys", "attributes", "keys_attributes")
_IN_ITEM = ("rank", "logprob", *_OF_KEYS, "proven", *_OF_DRAWS, "passes", "rounds", "item_set_version")
Generate = Callable[..., AsyncGenerator[Any, None]]


async def ranked(generate: Generate, manager: Any, request: Any, http_request: Any) -> AsyncGenerator[Any, None]:
    """Yield what `TokenizerManager.generate_request` answers with lists or draws: a dict for one prompt, or a list."""
    body().begin(thinks=False)
    prompts, single = given_prompts(request)

    async def one(i: int, prompt: str | list[int]) -> dict[str, Any]:
        params = request.sampling_params if isinstance(request.sampling_params, dict) else request.sampling_params[i]
        encode = manager.static_front_end.encode  # a long text would hold up all other requests
        tokens = await asyncio.to_thread(encode, prompt) if isinstance(prompt, str) else list(prompt)
        lora = request.lora_path[i] if isinstance(request.lora_path, list) else request.lora_path
        return await _one(generate, manager, lora, request, params, tokens)

    async def each() -> list[dict[str, Any]]:
        tasks = [asyncio.ensure_future(one(i, prompt)) for i, prompt in enumerate([prompts] if single else prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # one that fails ends the others
            for task in tasks:
                task.cancel()

    # SGLang looks for the client only every four seconds of a request that was tokenized (_wait_one_response).
    answers = await while_connected(each(), http_request)
    given = request.sampling_params if isinstance(request.sampling_params, dict) else request.sampling_params[0]
    if (body().fields or {}).get(BEAMS) or wants_candidates(given):  # an OpenAI endpoint wants an answer a choice
        items = [one for answer in answers for one in answer["meta_info"]["beam_results"]]
        for info in (one["meta_info"] for one in items):
            if "sequence_score" in info:
                score = {"score" if "rank" in info else "logprob": info["sequence_score"]}
                info["item"] = score | {name: info[name] for name in _IN_ITEM if name in info}
        yield items
    else:
        yield answers[0] if single else answers


async def after_thought(manager: Any, request: Any, asked: Any) -> list[dict[str, Any]] | None:
    """Return what an answer says of the list after its thought, whose KV is in the prefix cache; None if that was
    aborted.

    asked: `ItemRequest`, after a `Thought` with its prompt.
    """
    params = {**request.sampling_params, REFERENCE: asked, "max_new_tokens": None}
    given, prompt = copy.copy(request), [*asked.ended.prompt, *asked.ended.tokens]
    given.stream = given.return_logprob = False
    answer = await _one(manager.generate_request, manager, request.lora_path, given, params, prompt)
    made = [one | one["meta_info"] for one in answer["meta_info"]["beam_results"] if "rank" in one["meta_info"]]
    words = (*_IN_ITEM, LOGPROBS, "text")
    return [
        {"score": one["sequence_score"], **{word: one[word] for word in words if word in one}} for one in made
    ] or None


async def _one(
    generate: Generate, manager: Any, lora: str | None, request: Any, params: dict[str, Any], prompt: list[int]
) -> dict[str, Any]:
    front_end, tokenizer = manager.static_front_end, manager.tokenizer
    asked = params[REFERENCE]
    if request.stream or request.return_logprob:
        what = "a ranked list has" if isinstance(asked.several, ListOptions) else "draws have"
        raise RefusedError("beam search", f"{what} no stream and no logprobs of single tokens: leave them out")
    end, ask = tokenizer.eos_token_id, partial(_ask, generate, lora, set(), prompt)
    begin = partial(front_end.list_job, asked, lora, prompt_tokens=len(prompt))
    begun = asked.ended.jobs if asked.ended is not None else []
    job = begun.pop() if begun else await asyncio.to_thread(begin)  # the set's tokens may have to be looked through
    said, texts, special = dict[str, Any](), dict[Tokens, str](), frozenset(getattr(tokenizer, "all_special_ids", ()))

    def read(one: Pass, output: dict[str, Any]) -> Answer:
        said.update(output["meta_info"])
        return _answer(one, output["meta_info"])

    best: Any = None
    try:
        if job.carried is not None:
            result, texts, info = await _in_one_request(generate, manager, prompt, job.carried)
            said |= info
            best = front_end.one_request.outcome(job.carried, result, job.search)
        if best is None:
            best = await front_end.lists.run(job.search, ask, read)
        logs = TokenScores(job.item_set, [item.tokens for item in best.items] if asked.weighed else [], end)
        if logs.passes:
            await front_end.lists.run(logs, ask, read)
    except AbortedError as error:
        info = {"finish_reason": error.args[0]}
        none = {"output_ids": [], "text": "", "meta_info": info}
        return {**none, "meta_info": {**info, "beam_results": [none] * asked.wanted}}
    results: list[dict[str, Any]] = []
    async for part in front_end.lists.entries(best, job.item_set, job.of_set, job.names):
        for item, entry in part:
            ids = [*item.tokens, end]
            # What SGLang says of any answer, such as the version of the weights, is that of the last pass.
            said_of_item = {name: value for name, value in said.items() if "logprob" not in name} | {
                "id": request.rid if isinstance(request.rid, str) else uuid.uuid4().hex,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "finish_reason": {"type": "stop", "matched": end},
                "sequence_score": item.score,
                **{name: value for name, value in entry.items() if name != "score"},
            }
            if logs.items:
                said_of_item[LOGPROBS] = item_logprobs(*logs.items[len(results)])
            text = texts.get(item.tokens) if special.isdisjoint(item.tokens) else None
            text = text or tokenizer.decode(item.tokens, skip_special_tokens=False)
            results.append({"output_ids": ids, "text": text, "meta_info": said_of_item})
    first = results[0]
    counts = {"completion_tokens": sum(len(one["output_ids"]) for one in results)}
    return {**first, "meta_info": {**first["meta_info"], **counts, "beam_results": results}}


async def _in_one_request(
    generate: Callable[..., AsyncGenerator[Any, None]], manager: Any, prompt: list[int], carried: EngineRequest
) -> tuple[ListResult, dict[Tokens, str], dict[str, Any]]:  # fmt: skip
    """Return what the engine has made, the items' texts by their tokens, and what SGLang says of any answer. Cancelled,
    it takes the request back."""
    request = GenerateReqInput(
        rid=uuid.uuid4().hex,
        input_ids=prompt,
        sampling_params={"beam_width": 2, "max_new_tokens": 1, "skip_special_tokens": True},
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
    info = _unless_aborted(output)["meta_info"]
    if (results := info.pop("beam_results", None)) is None:
        return ListResult(reason=NoList.NO_ROOM_NOW, detail=str(info.get("finish_reason"))), {}, {}
    texts, items, totals = dict[Tokens, str](), list[tuple[Tokens, float]](), list[int]()
    for one in results:
        score = one["meta_info"]["sequence_score"]
        if tokens := tuple(one["output_ids"][:-1]):
            texts[tokens] = one["text"]
            items.append((tokens, score))
        else:  # the end token alone: a number of the list's totals (`ItemGroup.finalize`)
            totals.append(int(score))
    proven, passes, rounds, *counts = totals
    rows = iter(items)
    races = [[next(rows) for _ in range(count)] for count in counts]
    return ListResult(races, bool(proven), passes, rounds), texts, info


async def _ask(
    generate: Generate, lora: str | None, loaded: set[str | None], prompt: list[int], one: Pass
) -> dict[str, Any]:
    """Return SGLang's answer to one pass. Raises RefusedError for a second adapter. loaded: the list's so far."""
    asked = GenerateReqInput(
        input_ids=[*prompt, *one.tokens],
        sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=len(prompt) + one.known - 1,
        token_ids_logprob=one.after.tolist() or [0],
        lora_path=lora,
        log_metrics=False,
    )
    output: dict[str, Any] = {}
    with no_body():
        async for part in generate(obj=asked, request=None):
            output = part
    loaded.add(asked.lora_id)
    if len(loaded) > 1:
        raise RefusedError("beam search", f"the adapter {lora!r} was loaded anew while this list was made: ask again")
    return _unless_aborted(output)


def _unless_aborted(output: dict[str, Any]) -> dict[str, Any]:
    if (reason := output["meta_info"]["finish_reason"])["type"] == "abort":
        raise AbortedError(reason)
    return output


def _answer(one: Pass, info: Mapping[str, Any]) -> Answer:
    entries = info["input_token_logprobs"]
    run = [entry[0] for entry in entries[len(entries) - len(one.tokens) + one.known :]]
    (after,) = info["output_token_ids_logprobs"]
    return np.array(run), np.array([entry[0] for entry in after[: len(one.after)]])
