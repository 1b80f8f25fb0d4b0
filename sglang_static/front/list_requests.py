"""Ranked lists and draws, in place of SGLang's beam search if a request has a set.

SGLang's own takes its candidates before the sampler masks them, and refuses grammars. Most lists and draws are one
request, whose candidates come from the set (`scheduler.lists`). For the others, and to end what that leaves undecided,
each round is a batch of ordinary requests that score chosen tokens (`token_ids_logprob`, `logprob_start_len`).
"""

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from itemset.ranking.scored_tree import Answer, Pass
from itemset.ranking.search import TokenScores
from itemset.serving.catalogue import RefusedError
from itemset.serving.front import audit
from itemset.serving.front.answer_fields import item_logprobs
from itemset.serving.front.healing import HEALED
from itemset.serving.front.http_bodies import body, no_body, while_connected
from itemset.serving.front.list_runner import AbortedError
from itemset.serving.front.request import THOUGHT, wants_candidates
from itemset.serving.front.request_fields import BEAMS, LOGPROBS, REFERENCE, ListOptions, objects
from itemset.serving.wire import EngineRequest, ListResult, NoList, Tokens
from sglang_static.front.request import CARRIED, given_prompts

AFTER = 5  # of the context: SGLang takes prompts shorter than that (managers/tp_worker.py, max_req_input_len)
_Made = TypeVar("_Made")
Generate = Callable[..., AsyncGenerator[Any, None]]
_KEPT = ("cache_salt", "extra_key", "priority", "routed_dp_rank")  # of a request, by its list's own requests
Entries = list[dict[str, Any]]  # what an answer says of each of its items


async def ranked(generate: Generate, manager: Any, request: Any, http_request: Any) -> AsyncGenerator[Any, None]:
    """Yield what `TokenizerManager.generate_request` answers with lists or draws: a dict for one prompt, or a list."""
    body().begin(thinks=False)
    prompts, single = given_prompts(request)
    prompts = [prompts] if single else prompts
    params, loras = (
        given if isinstance(given, list) else [given] * len(prompts)
        for given in (request.sampling_params, request.lora_path)
    )

    given = zip(loras, params, prompts, map(partial(_kept, request), range(len(prompts))), strict=True)
    each = [_one(generate, manager, request, *one) for one in given]
    # SGLang looks for the client only every four seconds of a request that was tokenized (_wait_one_response).
    made = await while_connected(_together(each), http_request)
    if (body().fields or {}).get(BEAMS) or wants_candidates(params[0]):  # an OpenAI endpoint wants an answer a choice
        choices = []
        for answer, entries in made:
            choices += answer["meta_info"]["beam_results"]
            for choice, entry in zip(answer["meta_info"]["beam_results"], entries, strict=False):  # none if aborted
                choice["meta_info"]["item"] = entry
        yield choices
    else:
        yield made[0][0] if single else [answer for answer, _ in made]


async def _together(each: Iterable[Coroutine[Any, Any, _Made]]) -> list[_Made]:
    tasks = [asyncio.ensure_future(one) for one in each]
    try:
        return await asyncio.gather(*tasks)
    finally:  # one that fails ends the others
        for task in tasks:
            task.cancel()


async def add_lists(parts: list[Any], request: Any) -> None:
    """Add to answers, or batches of them, the lists after their thoughts. request: Starlette's, None without one.

    These are made when the thoughts' own request has ended: it keeps new weights waiting, and they new requests.
    """
    thoughts = [one["meta_info"] for part in parts for one in objects(part) if THOUGHT in one["meta_info"]]
    lists = await while_connected(_together([info.pop(THOUGHT)() for info in thoughts]), request)
    for info, items in zip(thoughts, lists, strict=True):
        info["items"] = items


def is_thought(part: Any) -> bool:
    return any(THOUGHT in one["meta_info"] for one in objects(part))


async def after_thought(manager: Any, request: Any, asked: Any) -> Entries | None:
    """Return what an answer says of the list after its thought, `asked.ended`; None if it was aborted."""
    params = {**request.sampling_params, REFERENCE: asked, "max_new_tokens": None}
    given, prompt = copy.copy(request), [*asked.ended.prompt, *asked.ended.tokens]
    given.stream = given.return_logprob = False
    of = given, request.lora_path, params, prompt, _kept(request)
    answer, entries = await _one(manager.generate_request, manager, *of)
    for one, entry in zip(answer["meta_info"]["beam_results"], entries, strict=False):
        entry |= {name: one["meta_info"][name] for name in (LOGPROBS,) if name in one["meta_info"]}
        entry["text"] = one["text"]
    return entries or None


def _kept(request: Any, prompt: int = 0) -> dict[str, Any]:
    values = {name: getattr(request, name) for name in _KEPT}
    return {name: one[prompt] if isinstance(one, list) else one for name, one in values.items()}


async def _one(
    generate: Generate, manager: Any, request: Any, lora: str | None, params: dict[str, Any], given: str | list[int],
    kept: Mapping[str, Any],
) -> tuple[dict[str, Any], Entries]:  # fmt: skip
    """Return the answer to one prompt, and what it says of each item: of none if the engine has aborted it."""
    front_end, tokenizer, asked = manager.static_front_end, manager.tokenizer, params[REFERENCE]
    # A long text would hold up all other requests.
    prompt = await asyncio.to_thread(front_end.encode, given) if isinstance(given, str) else list(given)
    if request.stream or request.return_logprob:
        what = "a ranked list has" if isinstance(asked.several, ListOptions) else "draws have"
        raise RefusedError("beam search", f"{what} no stream and no logprobs of single tokens: leave them out")
    end, ask = tokenizer.eos_token_id, partial(_ask, generate, {"lora_path": lora, **kept}, set(), prompt)
    begin = partial(front_end.list_job, asked, lora, prompt_tokens=len(prompt))
    job = await asyncio.to_thread(begin)  # the set's tokens may have to be looked through
    said, texts, special = dict[str, Any](), dict[Tokens, str](), frozenset(getattr(tokenizer, "all_special_ids", ()))

    def read(one: Pass, output: dict[str, Any]) -> Answer:
        said.update(output["meta_info"])
        return _answer(one, output["meta_info"])

    best: Any = None
    try:
        if job.carried is not None:
            result, texts, info = await _in_one_request(generate, manager, prompt, job.carried, kept)
            said |= info
            best = front_end.one_request.outcome(job.carried, result, job.search)
        if best is None:
            best = await front_end.lists.run(job.search, ask, read)
        logs = TokenScores(job.item_set, [item.tokens for item in best.items] if asked.weighed else [], end)
        if logs.passes:
            await front_end.lists.run(logs, ask, read)
    except AbortedError as error:
        info = {name: value for name, value in error.args[0].items() if "logprob" not in name}
        none = {"output_ids": [], "text": "", "meta_info": {**info, "item": None}}
        return {**none, "meta_info": {**info, "beam_results": [none] * asked.wanted}}, []
    # What SGLang says of any answer, such as the version of the weights, is that of the last pass.
    common = {name: value for name, value in said.items() if "logprob" not in name}
    results, entries = list[dict[str, Any]](), Entries()
    request_id = request.rid if isinstance(request.rid, str) else uuid.uuid4().hex
    async for part in front_end.lists.entries(best, job.item_set, job.of_set, job.names):
        for item, entry in part:
            ids = [*item.tokens, end]
            said_of_item = common | {
                "id": request_id,
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
            text = text.removeprefix(" ") if asked.escape == HEALED else text
            results.append({"output_ids": ids, "text": text, "meta_info": said_of_item})
            entries.append(entry)
    audit.answered(request_id, lora, job, {"items": entries})
    first = results[0]
    counts = {"completion_tokens": sum(len(one["output_ids"]) for one in results)}
    return {**first, "meta_info": {**first["meta_info"], **counts, "beam_results": results}}, entries


async def _in_one_request(
    generate: Generate, manager: Any, prompt: list[int], carried: EngineRequest, kept: Mapping[str, Any]
) -> tuple[ListResult, dict[Tokens, str], dict[str, Any]]:
    """Return what the engine has made, the items' texts, and what SGLang says of any answer. Cancelled, it takes the
    request back."""
    request = GenerateReqInput(
        rid=uuid.uuid4().hex,
        input_ids=prompt,
        sampling_params={"beam_width": 2, "max_new_tokens": 1, "skip_special_tokens": True},
        log_metrics=False,
        **kept,
    )
    setattr(request, CARRIED, carried)
    try:
        info = (await _output(generate, request))["meta_info"]
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
    generate: Generate, kept: Mapping[str, Any], loaded: set[str | None], prompt: list[int], one: Pass
) -> dict[str, Any]:
    """Return SGLang's answer to one pass. Raises RefusedError for a second adapter. loaded: the list's so far."""
    asked = GenerateReqInput(
        input_ids=[*prompt, *one.tokens],
        sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=len(prompt) + one.known - 1,
        token_ids_logprob=one.after.tolist() or [0],
        log_metrics=False,
        **kept,
    )
    output = await _output(generate, asked)
    loaded.add(asked.lora_id)
    if len(loaded) > 1:
        raise RefusedError(
            "beam search", f"the adapter {kept['lora_path']!r} was loaded anew while this list was made: ask again"
        )
    return output


async def _output(generate: Generate, request: GenerateReqInput) -> dict[str, Any]:
    """Return SGLang's answer to a request of our own. Raises AbortedError if it was aborted."""
    output: dict[str, Any] = {}
    with no_body():
        async for part in generate(obj=request, request=None):
            output = part
    if output["meta_info"]["finish_reason"]["type"] == "abort":
        raise AbortedError(output["meta_info"])
    return output


def _answer(one: Pass, info: Mapping[str, Any]) -> Answer:
    entries = info["input_token_logprobs"]
    run = [entry[0] for entry in entries[len(entries) - len(one.tokens) + one.known :]]
    (after,) = info["output_token_ids_logprobs"]
    return np.array(run), np.array([entry[0] for entry in after[: len(one.after)]])
