"""The item of every answer: found where SGLang hands a finished output to its endpoints, put into their bodies.

An output's item is `meta_info["item"]`: {"key": ...}, or None if the answer did not end at an item's end; if item sets
stand in its constraint, `meta_info["items"]` is a list of them. Other outputs have no such entry.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from itemset.serving.front import http_bodies
from itemset.serving.front.answer_fields import FIELDS, Expected, Logs
from itemset.serving.front.request import THOUGHT, Thought
from itemset.text import decode
from sglang_static.compat import hook, logger

EXPECTED = "expected_item"  # attribute of a GenerateReqInput of one prompt: an `Expected`. Copies for `n` keep it
_NEAR = 64  # the newest tokens, among which the end of reasoning is looked for
WEIGHED = "item_set_weight"  # attribute of one for which we have asked for log-probabilities: its field for them


@hook("sglang.srt.managers.tokenizer_manager:TokenizerManager._stream_one_response")
async def stream_one_response(
    original: Callable[..., Any], self: Any, obj: Any, state: Any
) -> AsyncGenerator[Any, None]:
    """Which item a finished answer is: every output passes here, and its state has all of its tokens. After a thought
    comes its list."""
    expected, sent = getattr(obj, EXPECTED, None), 0
    begin, before = None, ""  # where its item begins, and the text of what stands before
    others = healed = False
    if isinstance(expected, Expected):
        healed, others = expected.healed, bool(expected.content or obj.sampling_params.get("ignore_eos"))
    async with aclosing(original()) as parts:
        async for part in parts:
            info, finish = part["meta_info"], part["meta_info"].get("finish_reason")
            logs = _taken_logs(info, state) if expected is not None and expected.weighed else ((), ())
            if expected is not None and finish:
                from itemset.serving.front import audit  # with metrics, which wait until the engine has started
                from itemset.serving.metrics import count_answer

                by_string = isinstance(finish.get("matched"), str)
                cut = finish["type"] not in ("stop", "length") or (by_string and isinstance(expected, Thought))
                told = expected.answer_fields(state.output_ids, cut=cut, logs=logs)
                asked = finish.get("length") != 0  # else it is SGLang's own, which caches the prompt of `n` answers
                if asked and not cut:
                    audit.answered(obj.rid, obj.lora_path, expected, told)
                stopped = not by_string and finish["type"] == "stop"
                if asked and (fault := count_answer(expected, state.output_ids, told, stopped=stopped)):
                    logger.error("Request %s: %s", obj.rid, fault)
                if THOUGHT in told:  # whose list has been counted as one
                    from sglang_static.front.list_requests import after_thought

                    told = {THOUGHT: partial(after_thought, self, obj, told[THOUGHT])}
                info.update(told)
            if expected is not None and (others or healed) and "text" in part:
                ids = state.output_ids
                if begin is None and (finish or expected.begun(ids[-_NEAR:])):
                    thought, of_item = expected.parts(ids)
                    if of_item:
                        begin, before = len(thought), decode(list(thought), self.tokenizer) if thought else ""
                if begin is None:
                    shown = str(state.get_text())
                else:
                    item = decode(list(expected.parts(ids, begin)[1]), self.tokenizer)
                    item = item.removeprefix(" ") if healed else item
                    shown = _cut(before + item, state, finish or {})
                part["text"] = shown[sent:]
                sent = len(shown) if obj.stream and self.incremental_streaming_output else 0
            yield part


def _cut(text: str, state: Any, finish: Any) -> str:
    """Return an answer's text so far as it is shown: without a part of a character, and what a stop string ends."""
    if not finish:
        return text.rstrip("\ufffd")  # of a character whose last bytes are still to come
    if not isinstance(stop := finish.get("matched"), str):
        return text
    before, found, _ = text.partition(stop)
    return before + found if state.obj.sampling_params.get("no_stop_trim") else before


def _taken_logs(info: dict[str, Any], state: Any) -> Logs:
    """Take what nobody asked for out of `meta_info`; return log p and log q so far, or weights and zeros."""
    for name in [name for name in info if "logprobs" in name]:
        del info[name]
    first = list(state.output_token_logprobs_val)
    return first, [value for (value,) in state.output_top_logprobs_val] or [0.0] * len(first)


_PARSER = "sglang.srt.parser.reasoning_parser:ReasoningParser"


@hook(f"{_PARSER}.parse_non_stream", why="an item is content: parsers take for reasoning all that no mark ends")
def parse_non_stream(original: Callable[..., Any], full_text: str) -> Any:
    return (None, full_text) if http_bodies.body().whole else original()


@hook(f"{_PARSER}.parse_stream_chunk", why="the same of a stream")
def parse_stream_chunk(original: Callable[..., Any], chunk_text: str) -> Any:
    return (None, chunk_text) if http_bodies.body().whole else original()


def note(output: Any) -> None:
    """Keep what an output says of items, for the choices that its endpoint makes: of one answer, or of all."""
    given = http_bodies.body()
    for i, one in enumerate(output if isinstance(output, list) else [output]):
        if fields := {name: one["meta_info"][name] for name in FIELDS if name in one["meta_info"]}:
            given.items[0, one.get("index", i)] = fields
