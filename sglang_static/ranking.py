"""Ranked lists: the best items of a set, in place of SGLang's beam search where a request has one.

SGLang's own takes its candidates before the sampler masks them, and refuses grammars. Here each round is a batch of
ordinary requests that score chosen tokens of a prompt (`token_ids_logprob`, `logprob_start_len`): the children of a
prefix, or a whole tail. The answer has the form of SGLang's beam search: `meta_info["beam_results"]`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from fastapi.responses import ORJSONResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from itemset import ItemSet
from itemset.best import Answer, Pass, described, search
from itemset.catalogue import RefusedError
from itemset.checks import found_some, ranking_options
from sglang_static import http

IN_ITEM = ("rank", "key", "proven", "passes", "rounds")
Generate = Callable[..., AsyncGenerator[Any, None]]


def width_of(params: Mapping[str, Any]) -> int:
    """How many beams the parameters of one prompt ask for: 1 where for none. vLLM's word takes `n` of them."""
    width = params.get("n") if http.fields().get(http.BEAMS) else params.get("beam_width")
    return int(width or 1)


def wanted(request: Any) -> bool:
    """Whether a request, of one prompt or several, asks for a beam search."""
    given = request.sampling_params
    first = given[0] if isinstance(given, list) and given else given
    return isinstance(first, Mapping) and (width_of(first) > 1 or bool(http.fields().get(http.BEAMS)))


def has_set(manager: Any, request: Any) -> bool:
    """Whether it names or brings an item set."""
    given = request.sampling_params
    one = SimpleNamespace(
        sampling_params=given[0] if isinstance(given, list) else given,
        custom_logit_processor=request.custom_logit_processor,
    )
    reference, _ = manager.static_front_end.take(one, None, ranked=True)
    return reference is not None


async def ranked(generate: Generate, manager: Any, request: Any, http_request: Any) -> Any:
    """What `TokenizerManager.generate_request` answers to a request with a set and `beam_width`: a dict for one prompt,
    a list for several."""
    prompts = request.text if request.input_ids is None else request.input_ids
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))

    async def one(i: int, prompt: str | list[int]) -> dict[str, Any]:
        params = request.sampling_params if isinstance(request.sampling_params, dict) else request.sampling_params[i]
        tokens = manager.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        lora = request.lora_path[i] if isinstance(request.lora_path, list) else request.lora_path
        scoring = partial(_outputs, generate, manager, http_request, lora, tokens)
        return await _one(scoring, manager, request, params, tokens)

    tasks = [asyncio.ensure_future(one(i, prompt)) for i, prompt in enumerate([prompts] if single else prompts)]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if http.fields().get(http.BEAMS):  # an OpenAI endpoint, which wants an answer a choice
        return [one for answer in answers for one in answer["meta_info"]["beam_results"]]
    return answers[0] if single else answers


def with_items(response: Any, results: Sequence[Any]) -> Any:
    """An OpenAI response with each answer's item in its choice: its key, in a ranked list also its rank and score, and
    what the list took. Responses to requests without a set stay as they are."""
    infos = [result["meta_info"] for result in results or ()]
    if not any("item" in info or "rank" in info for info in infos) or not hasattr(response, "choices"):
        return response
    body = response.model_dump(mode="json")
    for choice, info in zip(body["choices"], infos, strict=True):
        if "rank" in info:
            choice["item"] = {"score": info["sequence_score"]} | {name: info[name] for name in IN_ITEM}
        elif "item" in info:
            choice["item"] = info["item"]
    return ORJSONResponse(body)


async def _one(
    outputs_of: Callable[[Sequence[Pass]], Awaitable[list[dict[str, Any]]]],
    manager: Any,
    request: Any,
    params: dict[str, Any],
    prompt: list[int],
) -> dict[str, Any]:
    front_end, tokenizer = manager.static_front_end, manager.tokenizer
    if request.stream or request.return_logprob:
        raise RefusedError(
            "beam search", "a ranked list has no stream and no logprobs of single tokens: leave them out"
        )
    end = tokenizer.eos_token_id
    item_set: ItemSet = front_end.ranked(request, params, width_of(params), len(prompt), end)
    options = {**http.fields(), **(params.get("custom_params") or {}), **params}
    rounds = search(
        item_set,
        width_of(params),
        end_token=end,
        **ranking_options(options),
    )
    passes = next(rounds)
    while True:
        outputs = await outputs_of(passes)
        try:
            passes = rounds.send(
                [_answer(one, output["meta_info"]) for one, output in zip(passes, outputs, strict=True)]
            )
        except StopIteration as stop:
            best = found_some(stop.value)
            break
    results = []
    returned = params.get("n") if (params.get("n") or 1) > 1 else width_of(params)  # SGLang: the beam, or n of it
    for item, entry in list(zip(best.items, described(best, item_set), strict=True))[:returned]:
        ids = [*item.tokens, end]
        # What SGLang says of any answer, such as the version of the weights, is that of the last pass.
        info = {name: value for name, value in outputs[-1]["meta_info"].items() if "logprob" not in name} | {
            "id": request.rid if isinstance(request.rid, str) else uuid.uuid4().hex,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "finish_reason": {"type": "stop", "matched": end},
            "sequence_score": entry.pop("score"),
            **entry,
        }
        text = tokenizer.decode(item.tokens, skip_special_tokens=params.get("skip_special_tokens", True))
        results.append({"output_ids": ids, "text": text, "meta_info": info})
    first = results[0]
    counts = {"completion_tokens": sum(len(one["output_ids"]) for one in results)}
    return {**first, "meta_info": {**first["meta_info"], **counts, "beam_results": results}}


async def _outputs(
    generate: Generate, manager: Any, http_request: Any, lora: str | None, prompt: list[int], passes: Sequence[Pass]
) -> list[dict[str, Any]]:
    asked = GenerateReqInput(
        input_ids=[[*prompt, *one.tokens] for one in passes],
        sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=[len(prompt) + one.known - 1 for one in passes],
        token_ids_logprob=[one.after.tolist() or [0] for one in passes],
        lora_path=None if lora is None else [lora] * len(passes),
        log_metrics=False,
    )
    # SGLang looks for it every four seconds of a request, and these are shorter.
    if http_request is not None and await http_request.is_disconnected():
        raise ValueError("the client is gone")
    outputs: list[dict[str, Any]] = []
    with http.ordinary():
        async for part in generate(manager, asked, http_request):
            outputs = part
    return outputs


def _answer(one: Pass, info: Mapping[str, Any]) -> Answer:
    entries = info["input_token_logprobs"]
    run = [entry[0] for entry in entries[len(entries) - len(one.tokens) + one.known :]]
    (after,) = info["output_token_ids_logprobs"]
    return np.array(run), np.array([entry[0] for entry in after[: len(one.after)]])
