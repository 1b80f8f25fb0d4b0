"""Lists after thoughts, in one request: those of two requests, and nothing of the prompt is read twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from engine_words import CITIES
from engines import force_asynchronous_scheduling
from samples import CHURNED
from test_vllm_wide_lists import ROOMY, given, prompt_of
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_static.front.list_requests import RankingParams

ONE, TWO = "station", "station letter"
"""Markers of so many tokens."""


@pytest.fixture(params=[None, force_asynchronous_scheduling], ids=["synchronous", "asynchronous"])
def engine(request: Any, engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
    return engines("v2", tiny_model, prepare=request.param, **given(static, ranked_list_beams=160), **ROOMY)


def words(llm: Any, **options: Any) -> SamplingParams:
    """Of a thought of four tokens, two of which are those of the markers."""
    allowed = [200, 201, *llm.get_tokenizer().encode(TWO, add_special_tokens=False)]
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "allowed_token_ids": allowed}
    return SamplingParams(**sampling | options)


def asked(name: str, marker: Any, k: int = 5, **options: Any) -> dict[str, Any]:
    return {"item_set": name, "list": k, "list_after": marker, **options}


def think(llm: Any, extra: dict[str, Any], lengths: list[int], n: int) -> tuple[list[Any], int, int]:
    """In the engine's process: thoughts with the items after them; the requests that it got, and how many tokens it ran
    in all."""
    core, ran = llm.llm_engine.engine_core, [0]
    scheduler = core.engine_core.scheduler

    def schedule(*arguments: Any, **others: Any) -> Any:
        step = own(*arguments, **others)
        ran[0] += step.total_num_scheduled_tokens
        return step

    own = scheduler.schedule
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in lengths]
    counted = mock.patch.object(core, "add_request", wraps=core.add_request)
    with counted as added, mock.patch.object(scheduler, "schedule", schedule):
        outputs = llm.generate(prompts, words(llm, n=n, extra_args=extra), use_tqdm=False)
    for output, length in zip(outputs, lengths, strict=True):
        assert output.prompt_token_ids == prompt_of(length)
    thoughts = [(list(one.token_ids), one.finish_reason, one.items) for output in outputs for one in output.outputs]
    return thoughts, added.call_count, ran[0]


def in_two(llm: Any, extra: dict[str, Any], lengths: list[int], n: int) -> Iterator[tuple[list[int], list[Any]]]:
    """In the engine's process: the same thoughts, by requests without a set, and the lists after them."""
    marker = llm.get_tokenizer().encode(extra["list_after"], add_special_tokens=False)
    options = {key: value for key, value in extra.items() if key not in ("list", "list_after")}
    found = []
    for length in lengths:
        (output,) = llm.generate([{"prompt_token_ids": prompt_of(length)}], words(llm, n=n), use_tqdm=False)
        for one in output.outputs:
            tokens = list(one.token_ids)
            ends = [i for i in range(1, len(tokens) + 1) if tokens[:i][-len(marker) :] == marker]
            prompt = [*prompt_of(length), *tokens[: ends[0]]]
            params = RankingParams(beam_width=extra["list"], max_tokens=40, extra_args=options)
            (best,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
            found.append((tokens[: ends[0]], [(item.key, item.cum_logprob) for item in best.sequences]))
    return found


def same(thoughts: list[Any], others: list[Any]) -> None:
    for (tokens, finish, items), (expected, best) in zip(thoughts, others, strict=True):
        assert tokens == expected
        assert finish == "stop"
        assert [item["key"] for item in items] == [key for key, _ in best]
        assert [item["rank"] for item in items] == [*range(1, len(best) + 1)]
        np.testing.assert_allclose([item["score"] for item in items], [score for _, score in best], atol=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        asked("large", ONE, width=24),
        asked("prefixes", TWO, k=4, renormalised=True, item_logprobs=True),
        asked("fixed", TWO, without_end=True),
    ],
)
def test_one_request_is_as_good_as_two(engine, extra):
    lengths, n = [3, 31, 70], 2
    thoughts, requests, ran = engine.call(think, extra, lengths, n)
    same(thoughts, engine.call(in_two, extra, lengths, n))
    assert len({len(tokens) for tokens, *_ in thoughts}) > 2
    assert all("item_logprobs" in item for _, _, items in thoughts for item in items) == ("item_logprobs" in extra)
    if "item_logprobs" in extra:  # rounds score these
        return
    assert requests == 6
    # Each prompt twice, for the two thoughts; of these each token once. A step that was begun before the end was seen
    # computes the marker's last token.
    once = 2 * sum(lengths) - 32 * 2 + sum(len(tokens) for tokens, *_ in thoughts)
    assert once <= ran <= once + 32 * 2 + 6


REASONS = {
    "model runner V1": ("v1", {}),
    "exact": ("v2", {"exact": True}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_rounds_after_a_thought(engines, tiny_model, static, reason):
    runner, options = REASONS[reason]
    more = (given(static, ranked_list_beams=160) | ROOMY) if runner == "v2" else static
    engine = engines(runner, tiny_model, **more)
    extra = asked("ragged", TWO, k=3, **options)
    thoughts, requests, _ = engine.call(think, extra, [12, 40], 2)
    same(thoughts, engine.call(in_two, extra, [12, 40], 2))
    assert requests > 8


def test_an_inline_set_and_thoughts_beside_others(engine):
    """One list an inline set's, one none; a thought that is no thought beside them."""
    made = engine.call(beside)
    assert [items for items in made if items is not None] == [[0, 1, 2]] * 2


def beside(llm: Any) -> list[Any]:
    inline = StructuredOutputsParams(choice=["Paris", "London", "New York"])
    extra = {"list": 3, "list_after": ONE}
    params = [words(llm, extra_args=extra, structured_outputs=inline), words(llm, max_tokens=5)] * 2
    outputs = llm.generate([{"prompt_token_ids": prompt_of(9)}] * 4, params, use_tqdm=False)
    each = [getattr(output.outputs[0], "items", None) for output in outputs]
    return [items and sorted(item["key"] for item in items) for items in each]


def test_a_thought_under_a_grammar(engine):
    """The marker ends it before its grammar does; the list knows nothing of that. What has a set inside is refused."""
    found, ((tokens, best),) = engine.call(under_a_grammar, "(station){2,4} letter(station){5}")
    same([found], [(tokens, best)])
    assert tokens[-2:] == [tokens[0], tokens[-1]]
    assert 3 <= len(tokens) <= 5
    inside = json.dumps({"type": "object", "properties": {"film": {"type": "string", "item_set": "large"}}})
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=inside), extra_args=asked("large", ONE))
    with pytest.raises(VLLMValidationError, match="inside the grammar of a thought would be lost"):
        engine.generate(["p"], params)


def under_a_grammar(llm: Any, regex: str) -> Any:
    extra = asked("large", TWO)
    params = words(llm, extra_args=extra, structured_outputs=StructuredOutputsParams(regex=regex))
    (output,) = llm.generate([{"prompt_token_ids": prompt_of(9)}], params, use_tqdm=False)
    (one,) = output.outputs
    tokens = list(one.token_ids)
    ranking = RankingParams(beam_width=5, max_tokens=40, extra_args={"item_set": "large"})
    (best,) = llm.beam_search([{"prompt_token_ids": prompt_of(9) + tokens}], ranking)
    expected = (tokens, [(item.key, item.cum_logprob) for item in best.sequences])
    return (tokens, one.finish_reason, one.items), [expected]


def test_a_thought_that_does_not_end(engine):
    """Its limit, another stop, and the end of the context, in which the longest item must have room."""
    for options, reason, length in (
        ({"max_tokens": 4}, "length", 4),
        ({"stop_token_ids": [200, 201]}, "stop", None),
        ({"max_tokens": None}, "length", 256 - 9 - 6 - 2),
    ):
        assert engine.call(without_end, options) == (reason, length or mock.ANY)


def without_end(llm: Any, options: dict[str, Any]) -> tuple[str, int]:
    params = words(llm, **{"allowed_token_ids": [200, 201, 202]} | options, extra_args=asked("large", ONE))
    (output,) = llm.generate([{"prompt_token_ids": prompt_of(9)}], params, use_tqdm=False)
    (one,) = output.outputs
    assert one.items is None
    return one.finish_reason, len(one.token_ids)


def test_nothing_is_left(engine):
    """After thoughts of which every fourth is aborted and some preempted, before and after their ends."""
    before, after, thinking, answered, aborted, preempted = engine.call(churn, CHURNED // 4)
    assert before == after
    assert not thinking
    assert answered + aborted == CHURNED // 4
    assert aborted
    assert preempted


def churn(llm: Any, count: int) -> tuple[Any, Any, Any, int, int, int]:
    from vllm_static.compat import backend_of

    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    scheduler, backend = core.scheduler, backend_of(core.scheduler.structured_output_manager)
    llm.reset_prefix_cache()

    def held() -> Any:
        users = [(one.digest, one.users) for one in backend._device.plan._residents.values()]
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), users

    before, answered, aborted, preempted, added, step = held(), 0, 0, 0, list[str](), 0
    while len(added) < count or engine.has_unfinished_requests():
        for i in range(len(added), min(len(added) + 2, count)):
            params = words(llm, seed=i, extra_args=asked(("fixed", "ragged")[i % 2], (ONE, TWO)[i % 2]))
            engine.add_request(str(i), {"prompt_token_ids": prompt_of(20 + 13 * (i % 11))}, params)
            added.append(str(i))
        step += 1
        gone = [name for name in scheduler.requests if int(name.partition("-")[0]) % 4 == 3 and step % 5 == 0]
        engine.abort_request(gone, internal=True)
        aborted += len(gone)
        answered += sum(output.finished for output in engine.step())
        if step % 7 == 0 and scheduler.running:
            preempted += len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
    llm.reset_prefix_cache()
    return before, held(), backend.thinking, answered, aborted, preempted


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"list_after": ONE}, "list_after is the text that ends a thought.* with list: 10"),
        ({"list": 4, "list_after": ["a"]}, "list_after is the text that ends a thought"),
        ({"list": 4, "list_after": "x" * 101}, "at most 100 characters"),
        ({"list": 4, "list_after": ""}, "list_after is the text that ends a thought"),
        ({"list": 4, "list_after": True}, "knows no end of the model's reasoning: give its text as list_after"),
        ({"list": 4, "list_after": "</s>"}, "holds the end-of-sequence token"),
        ({"list": 4, "list_after": ONE, "width": 3}, "width=3 finds no 4 items"),
        ({"list": 4000, "list_after": ONE}, "longer than this engine's limit"),
        ({"list": 4, "list_after": ONE, "draws": 3}, "without use_beam_search, draws and slate"),
        ({"list": 4, "list_afer": ONE}, "n says how many items, but beside list_after"),
    ],
)
def test_what_can_be_no_thought_is_refused(engines, tiny_model, static, extra, message):
    engine = engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY)
    with pytest.raises(VLLMValidationError, match=message):
        engine.generate(["p"], SamplingParams(extra_args={"item_set": "large", **extra}))


@pytest.fixture
def reasoner(servers, tiny_model, named_sets):
    """A server with a reasoning parser whose marks are two of the tiny model's ordinary tokens."""

    def start() -> Any:
        parser = Path(__file__).with_name("tiny_reasoning.py")
        flags = ["--guided-decoding-backend", "static", "--item-set"]
        flags += [f"{name}={named_sets[name].path}" for name in ("large", "one")]
        flags += ["--reasoning-parser", "tiny", "--reasoning-parser-plugin", str(parser)]
        given = ("--additional-config", json.dumps({"ranked_list_beams": 24}))
        return servers("v2", tiny_model, arguments=(*flags, *given))

    return start


CHAT = {"messages": [{"role": "user", "content": "a film"}]}
ITEMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "p"}),
    ("/v1/completions", {"prompt": ["a film", "q"], "n": 2}),
    ("/v1/completions", {"prompt": "p", "use_beam_search": True, "n": 3}),
    ("/v1/completions", {"prompt": "p", "draws": 3}),
    ("/v1/chat/completions", CHAT | {"include_reasoning": False}),
    ("/v1/chat/completions", CHAT | {"use_beam_search": True, "n": 3}),
    ("/v1/chat/completions", CHAT | {"draws": 3}),
]


@pytest.mark.parametrize(("path", "body"), ITEMS)
def test_an_item_is_the_content_with_a_reasoning_parser(reasoner, path, body):
    """Where nothing tells of a thought, and where a list is made without one: no answer is free, none is reasoning."""
    server = reasoner()
    for texts in (CITIES, ["a film"], ["yes", "no", "I do not know"]):
        asked = {"model": "tiny", "max_tokens": 30, "structured_outputs": {"choice": texts}, **body}
        status, answer = server.post(path, asked)
        assert status == 200, answer
        for choice in answer["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert texts[choice["item"]["key"]] == text
            assert "text" in choice or choice["message"]["reasoning"] is None
        if "use_beam_search" not in body and "draws" not in body:
            events = [one for event in server.events(path, asked | {"stream": True}) for one in event["choices"]]
            ends = [one for one in events if one.get("finish_reason")]
            assert all(one["item"] is not None for one in ends)
            assert not any(one.get("delta", {}).get("reasoning") for one in events)


def test_a_prompt_that_opens_a_thought_is_one(reasoner):
    """Its item comes after the thought's end, which the model is made to write."""
    server, ends, begins = reasoner(), marker(), marker("letter")
    for prompt in ([begins], [200, ends, begins], [begins, 300, 301]):
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "item_set": "one"}
        _, answer = server.post("/v1/completions", asked | {"logit_bias": {str(marker()): 6}, "seed": 5})
        (choice,) = answer["choices"]
        assert ONE in choice["text"]
        assert choice["item"] == {"key": 0}


def test_thoughts_over_http(reasoner):
    """Streamed or not: the thought's text, and in the event that ends it the items. On the chat endpoint it ends where
    the model's reasoning does."""
    server = reasoner()
    counted = lists_of(server)
    biased = {"model": "tiny", "max_tokens": 100, "n": 2, "seed": 5, "logit_bias": {str(marker()): 6}}
    extra = asked("large", ONE, k=4, width=16)
    status, answer = server.post("/v1/completions", biased | extra | {"prompt": "p"})
    assert status == 200, answer
    events = server.events("/v1/completions", biased | extra | {"prompt": "p", "stream": True})
    for choice in answer["choices"]:
        said = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in said) == choice["text"]
        assert choice["text"].endswith(ONE)
        for one, item in zip(said[-1]["items"], choice["items"], strict=True):  # a list in parts may differ by a bit
            assert one == item | {name: pytest.approx(item[name], abs=1e-4) for name in ("score", "logprob")}
        assert [item["rank"] for item in choice["items"]] == [1, 2, 3, 4]
        assert choice["finish_reason"] == said[-1]["finish_reason"] == "stop"
    chat = biased | extra | {"messages": [{"role": "user", "content": "a film"}], "list_after": True}
    status, answer = server.post("/v1/chat/completions", chat)
    assert status == 200, answer
    assert all(len(choice["items"]) == 4 for choice in answer["choices"])
    for more, sentence in (
        ({"use_beam_search": True}, "without use_beam_search"),
        ({"stream": True, "list_after": "</s>"}, "end-of-sequence"),
        ({"item_set": None}, "beside item_set"),
    ):
        status, answer = server.post("/v1/completions", biased | extra | {"prompt": "p"} | more)
        assert status == 400, more
        assert sentence in str(answer)
    status, answer = server.post("/v1/responses", {"model": "tiny", "input": "p", **extra})
    assert status == 400
    assert "send list_after beside item_set to /v1/completions or /v1/chat/completions" in str(answer)
    assert lists_of(server) == counted + 6


def lists_of(server: Any) -> float:
    """Lists that were made in one request. None was made otherwise."""
    counted = {name: value for name, value in server.figures().items() if "ranked_lists_total" in name}
    assert set(counted) <= {'item_set:ranked_lists_total{way="one request"}'}
    return sum(counted.values())


def marker(mark: str = ONE) -> int:
    from models import tiny_tokenizer

    (token,) = tiny_tokenizer().encode(mark, add_special_tokens=False)
    return token
