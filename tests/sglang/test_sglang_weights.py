"""Weights of answers in the real SGLang: those of the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import named
from async_rollouts import check_cycles, cycles
from candidate_tests import *  # noqa: F403 - its trainer
from candidate_tests import check_candidates, check_logprobs, check_refusals, check_samples, trainer_of
from engine_words import PROMPT, Answer
from models import cached_tiny_llama
from sets import named_flags
from sglang_engines import NGRAM, draft_model, sampling_params
from weight_tests import *  # noqa: F403 - its oracle
from weight_tests import check_weights


def test_log_probabilities_with_speculation_are_refused(static, path):
    engine = static(path, item_set_kernels="numba", **NGRAM)
    with pytest.raises(ValueError, match="item_logprobs cannot be had here: with speculation"):
        engine.generate(input_ids=PROMPT, sampling_params=named("one", item_logprobs=True))


@pytest.mark.parametrize("kind", ["ngram", "chain", "tree", "plain"])
def test_a_weight_is_the_legal_mass_along_its_answer(static, path, named_sets, oracle, kind):
    draft = cached_tiny_llama(seed=1)
    speculation = {"plain": {}, "ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}
    engine = static(path, item_set_kernels="numba", **speculation[kind])
    check_weights(engine, named_sets, oracle, {}, {"temperature": 0.7, "presence_penalty": 0.5})


def test_candidates_have_the_log_probabilities_of_the_trainer(static, path, named_sets, trainer):
    engine = static(path, item_set_kernels="numba")
    check_samples(engine, named_sets, trainer)
    check_candidates(engine, named_sets, trainer)
    check_refusals(engine)

    def logprobs(answer: Answer) -> list[float]:
        return [one[0] for one in answer.said["output_token_logprobs"]]

    check_logprobs(engine, named_sets, trainer, logprobs, legal=True, temperature=0.7)


def test_ten_cycles_of_sleep_and_new_weights_under_load(static, path, tiny_model, named_sets):
    models = [tiny_model, cached_tiny_llama(seed=1)]
    engine = static(path, item_set_kernels="numba")
    (first,) = engine.rank(3, prompts=[PROMPT], item_set="ragged", width=6)
    found = engine.call(in_cycles, models)
    assert [answer.tokens for answer in found.lists[1]] == [tokens for _, tokens in first.items]
    check_cycles(found, named_sets["ragged"].items, [trainer_of(model) for model in models])


def test_weights_of_generate(servers, tiny_model, named_sets, oracle):
    server = servers(tiny_model, arguments=("--grammar-backend", "static", *named_flags(named_sets)))
    items = named_sets["ragged"].items
    body = {"input_ids": PROMPT, "item_set": "ragged", "return_set_weight": True}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    for one in (answer, server.events("/generate", body | {"stream": True})[-1]):
        expected = oracle(items, tuple(one["output_ids"][:-1]))[0]
        assert one["meta_info"]["item"]["set_weight"] == pytest.approx(expected, abs=2e-3)


def in_cycles(engine: Any, models: list[Path]) -> Any:
    """In the process of the engine, which ends with the weights that it began with."""
    from sglang.srt.managers import io_struct as ask_for

    manager = engine.tokenizer_manager

    async def ask(prompt: Any, words: dict[str, Any]) -> list[Answer]:
        found = await engine.async_generate(input_ids=prompt, sampling_params=sampling_params(words))
        said = [(one, one["meta_info"]) for one in (found if isinstance(found, list) else [found])]
        return [
            Answer(tuple(one["output_ids"]), one["text"], info["finish_reason"]["type"], info) for one, info in said
        ]

    async def renew(model: Path, level: int) -> None:
        await manager.pause_generation(ask_for.PauseGenerationReqInput())
        await manager.release_memory_occupation(ask_for.ReleaseMemoryOccupationReqInput())
        await manager.resume_memory_occupation(ask_for.ResumeMemoryOccupationReqInput())
        success, message, _ = await manager.update_weights_from_disk(
            ask_for.UpdateWeightFromDiskReqInput(model_path=str(model))
        )
        assert success, message
        await manager.continue_generation(ask_for.ContinueGenerationReqInput())

    return engine.loop.run_until_complete(cycles(ask, renew, models))
