"""The harness itself: what other tests take for granted about engines, servers and models."""

from __future__ import annotations

import os
import time

import pytest
from engines import Engine, EngineError, force_asynchronous_scheduling
from models import cached_tiny_llama
from servers import Server, start_expecting_failure
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

CHOICES = ["alpha", "beta", "gamma"]


def constrained(**kwargs) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1, "max_tokens": 16, "structured_outputs": StructuredOutputsParams(choice=CHOICES)} | kwargs
    )


def model_runner(llm) -> str:
    executor = llm.llm_engine.model_executor
    return type(executor.driver_worker.worker.model_runner).__module__


def test_tokenizer_encodes_any_text(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for text in ["The lost river", " Amélie (2001)", "日本\n\t🎬", "</s"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("river")[0] == tokenizer.bos_token_id
    assert "assistant: " in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )


def test_model_is_built_once(tiny_model):
    weights = tiny_model / "model.safetensors"
    built = weights.stat().st_mtime_ns
    assert cached_tiny_llama() == tiny_model
    assert weights.stat().st_mtime_ns == built


def test_engine_generates_on_the_runner_that_was_asked_for(runner, tiny_model, engines):
    engine = engines(runner, tiny_model)
    module = engine.call(model_runner)
    assert module == {"v1": "vllm.v1.worker.cpu_model_runner", "v2": "vllm.v1.worker.cpu.model_runner"}[runner]

    started = time.monotonic()
    outputs = engine.generate([f"prompt {i}" for i in range(16)], constrained())
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"start {engine.start_seconds:.1f} s, {tokens / (time.monotonic() - started):.0f} tokens/s")
    assert {output.outputs[0].text for output in outputs} == set(CHOICES)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_prompts_may_be_tokens_and_parameters_a_list(runner, tiny_model, engines):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = engines(runner, tiny_model).generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


def test_engines_are_shared_and_the_least_recently_used_is_closed(runner, tiny_model, odd_model, engines):
    first = engines(runner, tiny_model)
    assert engines(runner, tiny_model) is first
    second = engines(runner, odd_model)
    assert engines(runner, tiny_model) is first
    third = engines(runner, tiny_model, max_num_seqs=4)
    assert (first.alive, second.alive, third.alive) == (True, False, True)
    assert third.call(lambda llm: llm.llm_engine.vllm_config.scheduler_config.max_num_seqs) == 4


def test_exceptions_come_back_with_their_type_and_the_engine_survives(runner, tiny_model, engines):
    engine = engines(runner, tiny_model)
    with pytest.raises(VLLMValidationError, match="regex") as caught:
        engine.generate("prompt", SamplingParams(structured_outputs=StructuredOutputsParams(regex="((")))
    assert "sampling_params" in str(caught.value.__cause__)
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda llm: 1 // 0)
    assert engine.generate("prompt", constrained())[0].outputs[0].text in CHOICES


def test_an_engine_that_cannot_start_says_why(runner, tiny_model):
    with pytest.raises(ValueError, match="StructuredOutputsConfig"):
        Engine(runner, tiny_model, structured_outputs_config={"backend": "no such backend"})


def test_environment_of_one_engine(tiny_model):
    with Engine("v1", tiny_model, env={"HARNESS_TEST": "seen"}) as engine:
        assert engine.call(lambda llm: os.environ["HARNESS_TEST"]) == "seen"
    assert "HARNESS_TEST" not in os.environ


def test_a_dead_engine_is_an_error_with_its_log(tiny_model):
    with Engine("v1", tiny_model) as engine:
        with pytest.raises(EngineError, match="last words"):
            engine.call(lambda llm: print("last words", flush=True) or os._exit(1))
        assert not engine.alive
        with pytest.raises(EngineError, match="closed"):
            engine.generate("prompt")


def test_a_hanging_engine_is_an_error_that_shows_where(tiny_model):
    with Engine("v1", tiny_model) as engine:
        engine.timeout = 1
        with pytest.raises(EngineError, match=r"within 1 s(.|\n)*test_harness.py"):
            engine.call(lambda llm: time.sleep(60))
        assert not engine.alive


def test_asynchronous_scheduling_can_be_forced(runner, tiny_model, engines):
    engine = engines(runner, tiny_model, prepare=force_asynchronous_scheduling)
    assert engine.call(lambda llm: type(llm.llm_engine.engine_core.engine_core.scheduler).__name__) == "AsyncScheduler"
    outputs = engine.generate([f"prompt {i}" for i in range(9)], constrained())
    assert {output.outputs[0].text for output in outputs} <= set(CHOICES)


# On V2, because there the engine's process, which the server starts, needs Triton prepared as well.
def test_server_answers(tiny_model):
    with Server("v2", tiny_model, forked=False) as server:
        print(f"start {server.start_seconds:.1f} s")
        assert server.get("/health")[0] == 200
        answer = server.client.completions.create(
            model=server.model_name,
            prompt="prompt",
            max_tokens=16,
            extra_body={"structured_outputs": {"choice": CHOICES}},
        )
        assert answer.choices[0].text in CHOICES
        status, body = server.post("/v1/completions", {"model": server.model_name, "prompt": "p", "max_tokens": -1})
        assert status == 400
        assert "max_tokens" in body["error"]["message"]
        assert "Using V2 Model Runner" in server.log()
    assert not server.alive


def test_a_server_that_refuses_to_start_leaves_its_log(tiny_model):
    log = start_expecting_failure("v1", tiny_model, structured_outputs_config={"backend": "no such backend"})
    assert "no such backend" in log


def test_a_server_that_has_not_refused_in_time_is_a_failure(tiny_model):
    with pytest.raises(AssertionError, match="not up within"):
        start_expecting_failure("v1", tiny_model, timeout=0.5)
