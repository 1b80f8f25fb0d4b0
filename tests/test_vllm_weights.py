"""Weights of answers in the real vLLM: those of the same checkpoint in Hugging Face's code, at nobody else's cost."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from async_rollouts import check_cycles, cycles
from candidate_tests import *  # noqa: F403 - its trainer
from candidate_tests import check_candidates, check_logprobs, check_refusals, check_samples, trainer_of
from engine_words import PROMPT, Answer
from engines import FAST, answered, given
from models import cached_tiny_llama
from sets import FIRST
from test_vllm_engine import NGRAM, named, on_path
from torch.overrides import TorchFunctionMode
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from weight_tests import *  # noqa: F403 - its oracle
from weight_tests import check_weights, weighed

FORCED = {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
WAYS = {
    "v1": ("v1", "host", None),
    "v1-ngram": ("v1", "host", NGRAM),
    "v2": ("v2", "device", None),
    "v2-forced": ("v2", "device", FORCED),
    "v2-drafted": ("v2", "device", {"method": "draft_model", "num_speculative_tokens": 3}),
}
ANSWERS = 100
of_one = SamplingParams(extra_args={"item_set": "one", "return_set_weight": True})


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_weight_is_the_legal_mass_along_its_answer(engines, tiny_model, static, named_sets, oracle, way):
    runner, path, speculative = way
    more = {}
    if speculative is not None:
        model = {"model": str(cached_tiny_llama(seed=1))} if speculative["method"] == "draft_model" else {}
        more = {"speculative_config": speculative | model}
    engine = engines(runner, tiny_model, **on_path(static, path, "numba"), **more)
    # vLLM's n-grams need a temperature of 0 on model runner V1 and a CPU: docs/serving.md.
    greedy = {"temperature": 0} if speculative is NGRAM else {}
    bent = {"temperature": 0.7} | ({} if speculative else {"logit_bias": {150: 5.0}})
    check_weights(engine, named_sets, oracle, greedy, bent)


def test_logprobs_add_up(engines, tiny_model, static):
    """Of answers that are not weighed, beside one that is."""
    params = [named("ragged", logprobs=2), SamplingParams(max_tokens=6, logprobs=1), of_one]
    for output in engines("v1", tiny_model, **on_path(static, "host", "numba")).generate(["p"] * 3, params)[:2]:
        (one,) = output.outputs
        chosen = [column[token].logprob for column, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(chosen))


def test_with_weights_estimates_from_masked_answers_are_unbiased(engines, tiny_model, static, named_sets, oracle):
    """The mean of the weights is the probability of the set, and that over the answers that are one item is the item's.
    The bound is five times the standard deviation of such a mean, which the oracle knows."""
    engine = engines("v1", tiny_model, **on_path(static, "host", "numba"))
    seeds = [weighed("prefixes", seed=seed) for seed in range(ANSWERS)]
    found = [(one.item, one.said["item"]["set_weight"]) for one in engine.ask([PROMPT] * ANSWERS, seeds)]
    items = sorted(named_sets["prefixes"].items)
    weights, scores = (np.array(column) for column in zip(*(oracle(items, item) for item in items), strict=True))
    masked, likely = np.exp(scores - weights), np.exp(scores)
    assert masked.sum() == pytest.approx(1)
    for chosen in (np.full(len(items), True), np.array([item == (FIRST, 500) for item in items])):
        spread = np.sqrt((masked * np.exp(2 * weights))[chosen].sum() - likely[chosen].sum() ** 2)
        of_these = [np.exp(weight) * chosen[items.index(item)] for item, weight in found]
        assert abs(np.mean(of_these) - likely[chosen].sum()) < 5 * spread / np.sqrt(ANSWERS)


def test_nothing_is_launched_for_those_who_do_not_ask(engines, tiny_model, static):
    engine = engines("v2", tiny_model, **on_path(static, "device", "numba"))
    assert engine.call(count_masks, [named("ragged"), named("labels"), SamplingParams(max_tokens=4)]) == 0
    of_labels = named("labels", extra_args={"item_set": "labels", "return_set_weight": True})
    assert engine.call(count_masks, [of_labels, named("ragged")]) == 2  # the two tokens of the one


def count_masks(llm: Any, params: list[SamplingParams]) -> int:
    """In the engine's process: how often rows are masked once more."""
    from vllm_static import compat
    from vllm_static.compat import item_sets

    processor = item_sets(compat.runner_of(llm.llm_engine.model_executor.driver_worker))
    with mock.patch.object(processor._slots, "mask", wraps=processor._slots.mask) as mask:
        llm.generate(["p"] * len(params), params, use_tqdm=False)
    return mask.call_count


def test_the_host_path_of_model_runner_v2_refuses(engines, tiny_model, static):
    engine = engines("v2", tiny_model, **on_path(static, "host"))
    with pytest.raises(VLLMValidationError, match="model runner V2 needs the device path for it"):
        engine.ask(["p"], weighed("one"))


class PageableCopies(TorchFunctionMode):
    """Notes copies from the host for which the host would wait: of memory that is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        elsewhere = torch.device(given.get("device") or "cpu").type != "cpu"
        if (name == "tensor" and elsewhere) or (name == "to" and not given.get("non_blocking")):
            self.found.append(name)
        return func(*args, **given)


def test_on_v1_the_host_waits_for_no_copy():
    """Which rows are weighed, or whose tokens are scored, goes to the device beside its work."""
    from vllm.v1.sample.sampler import Sampler

    from vllm_static import compat
    from vllm_static.v1 import model_runner

    logits, rows = torch.zeros(4, 9, device="meta"), [(0, 0, 1), (1, 0, 3)]
    with PageableCopies() as copies:
        temperatures = compat.to_device([1, 1], logits.device)[:, None]
        assert model_runner._scaled(logits, rows, temperatures).shape == (2, 9)
        ids, scores = model_runner._scores(Sampler(), logits, [(0, 0, 0), (1, 0, 2)], [[1, 2, 3], [4]])
    assert ids.shape == scores.shape == (2, 3)
    assert copies.found == []


@pytest.mark.parametrize("way", [WAYS["v1"], WAYS["v2"], WAYS["v2-drafted"]], ids=["v1", "v2", "v2-drafted"])
def test_candidates_have_the_log_probabilities_of_the_trainer(engines, tiny_model, static, named_sets, trainer, way):
    runner, path, speculative = way
    more = {"speculative_config": speculative | {"model": str(cached_tiny_llama(seed=1))}} if speculative else {}
    engine = engines(runner, tiny_model, **on_path(static, path, "numba"), **more)
    check_samples(engine, named_sets, trainer)
    if not speculative:
        check_candidates(engine, named_sets, trainer)


@pytest.mark.parametrize(
    ("way", "mode", "legal", "temperature"),
    [
        ("v1", "raw", True, 1.0),
        ("v1", "processed", True, 0.7),
        ("v2", "raw", False, 1.0),
        ("v2", "processed", True, 0.7),
    ],
)
def test_which_number_logprobs_are(engines, tiny_model, static, named_sets, trainer, way, mode, legal, temperature):
    runner, path, _ = WAYS[way]
    more = {} if mode == "raw" else {"logprobs_mode": "processed_logprobs"}
    engine = engines(runner, tiny_model, **on_path(static, path, "numba"), **more)

    def logprobs(answer: Answer) -> list[float]:
        columns = answer.said["logprobs"]
        return [column[token].logprob for column, token in zip(columns, answer.tokens, strict=True)]

    check_logprobs(engine, named_sets, trainer, logprobs, legal=legal, temperature=temperature)


def test_candidates_beside_samples_of_one_call(engines, tiny_model, static, named_sets):
    """In the order of the prompts."""
    engine = engines("v2", tiny_model, **on_path(static, "device", "numba"))
    words = [{"item_set": "tagged", "list": True, "n": 2}, {"max_tokens": 3, "n": 2, "ignore_eos": True}]
    *listed, first, second = engine.ask([PROMPT, "A film"], words)
    assert all(answer.item in named_sets["tagged"].items for answer in listed)
    assert len(first.tokens) == len(second.tokens) == 3


def test_what_makes_no_candidates_is_refused(engines, tiny_model, static):
    check_refusals(engines("v2", tiny_model, **on_path(static, "device", "numba")))


@pytest.mark.parametrize(("runner", "path"), [("v1", "host"), ("v2", "device")])
def test_ten_cycles_of_sleep_and_new_weights_under_load(engines, tiny_model, static, named_sets, runner, path):
    models = [tiny_model, cached_tiny_llama(seed=1)]
    options = on_path(static, path, "numba")
    engine = engines(runner, tiny_model, **options)
    found = engine.call(in_cycles, models, FAST | options)
    (first,) = engine.rank(3, prompts=[PROMPT], item_set="ragged", width=6)
    assert [answer.tokens for answer in found.lists[1]] == [tokens for _, tokens in first.items]
    check_cycles(found, named_sets["ragged"].items, [trainer_of(model) for model in models])


def in_cycles(llm: Any, models: list[Path], options: dict[str, Any]) -> Any:
    """In the process of an engine, with another like it."""
    return asyncio.run(_in_cycles(models, options))


async def _in_cycles(models: list[Path], options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(models[0]), **options))
    numbers = itertools.count()

    async def ask(prompt: Any, words: dict[str, Any]) -> list[Answer]:
        params = SamplingParams(**given(words))
        params.output_kind = RequestOutputKind.FINAL_ONLY
        async for output in engine.generate({"prompt_token_ids": prompt}, params, str(next(numbers))):
            last = output
        return [answered(one) for one in last.outputs]

    async def renew(model: Path, level: int) -> None:
        await engine.sleep(level)
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        await engine.wake_up()

    try:
        return await cycles(ask, renew, models)
    finally:
        engine.shutdown()
