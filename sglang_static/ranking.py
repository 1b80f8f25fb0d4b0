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

from itemset.best import Answer, Pass, described
from itemset.catalogue import RefusedError
from sglang_static import http
from sglang_static.front import while_connected

IN_ITEM = ("rank", "key", "proven", "passes", "rounds")
SLICE = 32  # items of an answer that are written out in one turn of the event loop
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
    """Whether it names or brings an item set. Raises RefusedError if only some of its prompts do."""
    given = request.sampling_params
    without = []
    for params in (each := given if isinstance(given, list) else [given]):
        one = SimpleNamespace(sampling_params=params, custom_logit_processor=request.custom_logit_processor)
        if manager.static_front_end.take(one, None, ranked=True)[0] is None:
            without.append(each.index(params))
    if 0 < len(without) < len(each):
        raise RefusedError(
            "beam search",
            f"sampling_params[{without[0]}] has no item set, and others of this batch have one: give each prompt its "
            "set, or send those without one in a request of their own",
        )
    return not without


async def ranked(generate: Generate, manager: Any, request: Any, http_request: Any) -> Any:
    """What `TokenizerManager.generate_request` answers to a request with a set and `beam_width`: a dict for one prompt,
    a list for several."""
    prompts = request.text if request.input_ids is None else request.input_ids
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))

    async def one(i: int, prompt: str | list[int]) -> dict[str, Any]:
        params = request.sampling_params if isinstance(request.sampling_params, dict) else request.sampling_params[i]
        tokens = manager.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        lora = request.lora_path[i] if isinstance(request.lora_path, list) else request.lora_path
        return await _one(partial(_ask, generate, manager, lora, tokens), manager, request, params, tokens)

    tasks = [one(i, prompt) for i, prompt in enumerate([prompts] if single else prompts)]
    answers = await while_connected(asyncio.gather(*tasks), http_request)
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
    ask: Callable[[Pass], Awaitable[dict[str, Any]]],
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
    options = {**http.fields(), **(params.get("custom_params") or {}), **params}
    width = width_of(params)
    k = width
    if not http.fields().get(http.BEAMS):
        if options.get("width") is not None:
            raise RefusedError("beam search", "beam_width is the width of a list here: leave width out, and give n")
        options["width"] = width
        k = min(params["n"], width) if (params.get("n") or 1) > 1 else width  # SGLang: the beam, or n of it
    # On a thread, because the set's tokens may have to be looked through.
    item_set, search = await asyncio.to_thread(front_end.ranked, request, params, options, k, len(prompt), end)
    said: dict[str, Any] = {}

    def read(one: Pass, output: dict[str, Any]) -> Answer:
        said.update(output["meta_info"])
        return _answer(one, output["meta_info"])

    lists = front_end.lists(manager)
    best = await lists.run(search, ask, read)
    entries = await lists.on_thread(described, best, item_set)
    results = []
    for i, (item, entry) in enumerate(zip(best.items, entries, strict=True)):
        if i % SLICE == 0:
            await asyncio.sleep(0)
        ids = [*item.tokens, end]
        # What SGLang says of any answer, such as the version of the weights, is that of the last pass.
        info = {name: value for name, value in said.items() if "logprob" not in name} | {
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


async def _ask(generate: Generate, manager: Any, lora: str | None, prompt: list[int], one: Pass) -> dict[str, Any]:
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
    with http.ordinary():
        async for part in generate(manager, asked, None):
            output = part
    return output


def _answer(one: Pass, info: Mapping[str, Any]) -> Answer:
    entries = info["input_token_logprobs"]
    run = [entry[0] for entry in entries[len(entries) - len(one.tokens) + one.known :]]
    (after,) = info["output_token_ids_logprobs"]
    return np.array(run), np.array([entry[0] for entry in after[: len(one.after)]])
