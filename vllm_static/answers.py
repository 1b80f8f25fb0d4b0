"""The item of every answer: found where vLLM's front end finishes an output, put into the bodies of its endpoints.

An output's item is `CompletionOutput.item`: {"key": ...}, or None if the answer did not end at an item's end; if item
sets stand in its constraint, `CompletionOutput.items` is a list of them. Other outputs have no such attribute.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from vllm.logger import init_logger

from itemset.serving import metrics
from itemset.serving.answer_fields import told_of
from itemset.serving.hooks import IMPORTED
from itemset.serving.request_fields import LOGPROBS
from vllm_static.compat import hook

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

EXPECTED = "expected_item"
"""Attribute of a request's parameters, which do not send it to the engine: makes what is expected of its answers
(itemset.serving.answer_fields). Of its state in vLLM's output processor: that. Copies made for `n` have none."""


@hook("vllm.v1.engine.output_processor:OutputProcessor.add_request", why="the set, kept until its answer is there")
def add_request(original: Callable[..., Any], self: Any, request: Any, parent_req: Any) -> None:
    """Its state of a request is told the request's set."""
    original()
    expecting = getattr((parent_req or request).sampling_params, EXPECTED, None)
    if expecting is not None and request.request_id in self.request_states:
        setattr(self.request_states[request.request_id], EXPECTED, expecting(request))


@hook("vllm.v1.engine.output_processor:RequestState._new_completion_output", why="which item a finished answer is")
def new_completion_output(original: Callable[..., Any], self: Any, finish_reason: Any, stop_reason: Any) -> Any:
    """The one place where all tokens of a finished answer are known."""
    output, logs = original(), ((), ())
    if (expected := getattr(self, EXPECTED, None)) is None:
        return output
    if expected.weighed:  # nobody has asked for the columns in which log p and log q came
        columns = self.logprobs_processor.logprobs.logprobs
        logs, output.logprobs = (columns[::2], columns[1::2]), None
        output.cumulative_logprob = output.cumulative_logprob if expected.weighed == LOGPROBS else None
    if finish_reason is not None:
        # By a stop string, or aborted.
        cut = isinstance(stop_reason, str) or str(finish_reason) not in ("stop", "length")
        tokens, stopped = self.detokenizer.output_token_ids, not cut and str(finish_reason) == "stop"
        told = expected.answer_fields(tokens, cut=cut, logs=logs)
        if fault := metrics.count_answer(expected, tokens, told, stopped=stopped):
            logger.error("Request %s: %s", self.external_req_id, fault)
        _say(output, told)
    return output


@hook("vllm.outputs:RequestOutput.add", why="drops what it does not know, the item, where a stream's reader is slow")
def merge(original: Callable[..., Any], self: Any, next_output: Any) -> None:
    original()
    for done in next_output.outputs:
        for output in self.outputs:
            if output.index == done.index:
                _say(output, told_of(done))


_COMPLETIONS = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
_CHAT = "vllm.entrypoints.openai.chat_completion"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"


@hook(f"{_COMPLETIONS}.request_output_to_completion_response", when=IMPORTED)
def completion_response(original: Callable[..., Any], final_res_batch: Any) -> Any:
    """An answer's item; a list's ranks and scores."""
    outputs = [output for result in final_res_batch for output in result.outputs]
    return _with_items(original(), dict(enumerate(map(told_of, outputs))))


@hook(f"{_CHAT}.serving:OpenAIServingChat.chat_completion_full_generator", when=IMPORTED)
async def chat_response(original: Callable[..., Any], result_generator: Any) -> Any:
    """An answer's item; a list's ranks and scores."""
    items: Items = {}
    return _with_items(await original(result_generator=_noted(result_generator, items)), items)


@hook(f"{_CHAT}.batch_serving:OpenAIServingChatBatch.chat_completion_full_generator_batch", when=IMPORTED)
async def chat_batch_response(original: Callable[..., Any], generators: Any) -> Any:
    """An answer's item."""
    items: Items = {}
    noted = [_noted(results, items, first=i) for i, results in enumerate(generators)]
    return _with_items(await original(generators=noted), items)


@hook(f"{_RESPONSES}.responses_full_generator", why="an answer's item, streamed or not", when=IMPORTED)
async def responses_response(original: Callable[..., Any], context: Any) -> Any:
    """Streams end with the same object. A response has no choices: `item` stands beside its `output`."""
    response = await original()
    outputs = getattr(getattr(context, "last_output", None), "outputs", None)
    if outputs and hasattr(response, "output"):
        _say(response, told_of(outputs[0]))
    return response


@hook(
    f"{_COMPLETIONS}.completion_stream_generator",
    f"{_CHAT}.serving:OpenAIServingChat.chat_completion_stream_generator",
    when=IMPORTED,
)
async def stream(original: Callable[..., Any], request: Any, result_generator: Any) -> AsyncGenerator[str, None]:
    """An answer's item, streamed."""
    from itemset.serving import http_bodies

    items: Items = {}
    noted = _noted(result_generator, items, choices=request.n or 1)
    async with aclosing(original(result_generator=noted)) as events:
        async for event in events:
            yield http_bodies.with_items(event, items)


Items = dict[int, dict[str, Any]]
"""By choice, what an answer says of items."""


async def _noted(results: Any, items: Items, first: int = 0, choices: int = 1) -> AsyncGenerator[Any, None]:
    """The same results, whose items are noted before vLLM makes an event of each. first: the choice of the first
    output. choices: of a prompt, if a result comes with its prompt's number."""
    try:
        async for part in results:
            prompt, result = part if isinstance(part, tuple) else (0, part)
            for output in result.outputs:
                if fields := told_of(output):
                    items[first + prompt * choices + output.index] = fields
            yield part
    finally:
        if hasattr(results, "aclose"):
            await results.aclose()


def _with_items(response: Any, items: Items) -> Any:
    """The same response with each answer's items in its choice."""
    for i, choice in enumerate(getattr(response, "choices", ())):
        _say(choice, items.get(i, {}))
    return response


def _say(target: Any, told: dict[str, Any]) -> None:
    for name, value in told.items():
        setattr(target, name, value)
