"""The item of every answer: found where vLLM's front end finishes an output, put into the bodies of its endpoints.

An output's item is `CompletionOutput.item`: {"key": ...}, or None if the answer did not end at an item's end; if item
sets stand in its constraint, `CompletionOutput.items` is a list of them. Other outputs have no such attribute.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

from itemset.serving import metrics
from itemset.serving.front import audit, http_bodies
from itemset.serving.front.answer_fields import Expected, ExpectedItems, told_of
from itemset.serving.front.request import THOUGHT, Thought
from itemset.serving.front.request_fields import LOGPROBS
from itemset.serving.hooks import IMPORTED
from vllm_static import compat
from vllm_static.compat import hook, logger

_NEAR = 64  # tokens in which the end of reasoning is looked for
EXPECTED = "expected_item"
"""Attribute of a request's parameters, which do not send it to the engine: makes what is expected of its answers
(`itemset.serving.front.answer_fields`), with TOLD. Of its state in vLLM's output processor: that. Copies made for `n`
have none."""
TOLD = "told_of_items"  # attribute of a client's parameters: a dict, for what their answers say of items, by output


@hook("vllm.v1.engine.output_processor:OutputProcessor.add_request", why="the set, kept until its answer is there")
def add_request(original: Callable[..., Any], self: Any, request: Any, parent_req: Any) -> None:
    """Store what the request's answers are read with, and let their items be decoded as texts of their own."""
    original()
    expecting = getattr((parent_req or request).sampling_params, EXPECTED, None)
    if expecting is not None and (state := self.request_states.get(request.request_id)) is not None:
        setattr(state, EXPECTED, expecting(request))
        decode_items(state, self.tokenizer, request, getattr(state, EXPECTED)[0])


def decode_items(state: Any, tokenizer: Any, request: Any, expected: Any) -> None:
    """Decode an answer's item without what stands before it, and with its special tokens, from the first delta on."""
    alone = isinstance(expected, Expected)
    if not hasattr(state.detokenizer, "decode_next") or not (alone or isinstance(expected, ExpectedItems)):
        return
    request, params = copy.copy(request), copy.copy(request.sampling_params)
    params.skip_special_tokens = params.spaces_between_special_tokens = False
    request.sampling_params = params
    if alone:
        request.prompt_token_ids, request.prompt_embeds = [], None
    own, its = type(state.detokenizer).from_new_request(tokenizer, request), weakref.ref(state.detokenizer)
    other_tokens, begun = type(state.detokenizer).decode_next, expected.content is None
    spaced = alone and expected.healed

    def decode_next(token: int) -> str:
        nonlocal begun, spaced
        whole: Any = its()  # a circle would hold the set until Python's collector comes
        begun = begun or len(expected.content(whole.output_token_ids[-_NEAR:])) > 0
        if token in expected.stop_tokens or not begun:
            return str(other_tokens(whole, token))
        own.token_ids.append(token)
        text = str(own.decode_next(token))
        if spaced and text:  # the prompt's, before an item that is not there twice
            text, spaced = text.removeprefix(" "), False
        return text

    state.detokenizer.decode_next = decode_next


@hook("vllm.v1.engine.output_processor:RequestState._new_completion_output", why="which item a finished answer is")
def new_completion_output(original: Callable[..., Any], self: Any, finish_reason: Any, stop_reason: Any) -> Any:
    """The one place where all tokens of a finished answer are known."""
    output, logs = original(), ((), ())
    expected, by_output = getattr(self, EXPECTED, (None, None))
    if expected is None:
        return output
    if expected.weighed:  # nobody has asked for the columns in which log p and log q came
        columns = self.logprobs_processor.logprobs.logprobs
        logs, output.logprobs = (columns[::2], columns[1::2]), None
        output.cumulative_logprob = output.cumulative_logprob if expected.weighed == LOGPROBS else None
    if finish_reason is not None:
        by_string = isinstance(stop_reason, str)
        cut = str(finish_reason) not in ("stop", "length") or (by_string and isinstance(expected, Thought))
        tokens, stopped = self.detokenizer.output_token_ids, not by_string and str(finish_reason) == "stop"
        try:
            told = expected.answer_fields(tokens, cut=cut, logs=logs)
        except Exception:  # all answers end in this loop, and with it the server
            logger.exception("Request %s: what its answer holds cannot be told", self.external_req_id)
            told = {"items" if isinstance(expected, ExpectedItems) else "item": None}
        if not cut:
            audit.answered(self.external_req_id, self.lora_name, expected, told)
        if THOUGHT in told:
            told[THOUGHT].ended.table = self.logprobs_processor.pop_prompt_token_id_logprobs()
            output.finish_reason = "stop"  # also if it had to stop by its limit
        if fault := metrics.count_answer(expected, tokens, told, stopped=stopped):
            logger.error("Request %s: %s", self.external_req_id, fault)
        vars(output).update(told)
        if by_output is not None:
            by_output[output.index] = told
    return output


@hook("vllm.parser.parser_manager:ParserManager.get_parser", when=IMPORTED)
def get_parser(original: Callable[..., Any]) -> Any:
    """An item is an answer's content: parsers of reasoning take all for that which their mark does not end."""
    parser: Any = original()
    if parser is None:
        return None

    class Reading(parser):
        def parse(self, model_output: str, *args: Any, **kwargs: Any) -> Any:
            whole = http_bodies.body().whole
            return (None, model_output, []) if whole else super().parse(model_output, *args, **kwargs)

        def parse_delta(self, delta_text: str, *args: Any, **kwargs: Any) -> Any:
            whole = http_bodies.body().whole
            return compat.content(delta_text) if whole else super().parse_delta(delta_text, *args, **kwargs)

        def count_reasoning_tokens(self, *args: Any) -> int:
            return 0 if http_bodies.body().whole else int(super().count_reasoning_tokens(*args))

    return Reading


def noting() -> Callable[..., Any]:
    """Return what notes the items of the engine's next prompt, for its endpoint, and passes its RequestOutput on."""
    body = http_bodies.body()
    prompt, body.prompts = body.prompts, body.prompts + 1

    def note(result: Any, told: dict[int, dict[str, Any]] | None = None) -> Any:
        """told: by output, what is said of items: vLLM drops it from outputs that it joins, where a reader is slow."""
        for output in result.outputs:
            vars(output).update((told or {}).get(output.index, {}))
            if fields := told_of(output):
                body.items[prompt, output.index] = fields
        return result

    return note
