"""Weights of answers in the real vLLM: those of the same checkpoint in Hugging Face's code, at nobody else's cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import cached_tiny_llama
from ranking import EOS, PROMPT, weights_of
from sets import FIRST, tagged_items
from test_vllm_engine import NGRAM, inline, named, on_path
from torch.overrides import TorchFunctionMode
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

FORCED = {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
WAYS = {
    "v1": ("v1", "host", None),
    "v1-ngram": ("v1", "host", NGRAM),
    "v2": ("v2", "device", None),
    "v2-forced": ("v2", "device", FORCED),
    "v2-drafted": ("v2", "device", {"method": "draft_model", "num_speculative_tokens": 3}),
}
ANSWERS = 100
SETS = ("prefixes", "ragged", "labels", "one", "tagged", "fixed")


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return weights_of(tiny_model)


def weighed(name: str, **kwargs: Any) -> SamplingParams:
    return named(name, extra_args={"item_set": name, "return_set_weight": True}, **kwargs)


def answers(llm: Any, params: list[SamplingParams]) -> list[tuple[tuple[int, ...], Any, Any]]:
    """In the engine's process: each output's tokens, item, and what vLLM says of log-probabilities."""
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params, use_tqdm=False)
    found = [one for output in outputs for one in output.outputs]
    return [(tuple(one.token_ids), getattr(one, "item", None), (one.logprobs, one.cumulative_logprob)) for one in found]


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
    params = [weighed(name, **greedy) for name in SETS for _ in range(2)]
    several = {"temperature": 0.7, "n": 2} | ({} if speculative else {"logit_bias": {150: 5.0}})
    params += [weighed("tagged", **greedy), weighed("ragged", **(greedy or several))]
    params[-2].extra_args["exclude_keys"] = ["item 1"]
    free = SamplingParams(max_tokens=6, logprobs=1)
    params += [named("ragged", logprobs=2, **greedy), free, inline(["Paris"], **greedy)]
    *found, ragged, free, paris = engine.call(answers, params)
    names = [*(name for name in SETS for _ in range(2)), "tagged", "ragged", "ragged"]
    left = {tuple(item) for i, item in enumerate(tagged_items()) if i != 1}
    for i, (name, (tokens, item, logprobs)) in enumerate(zip(names, found, strict=False)):
        assert tokens[-1] == EOS
        items = left if i == 12 else named_sets[name].items
        weight, score = oracle(items, tokens[:-1])
        assert item["set_weight"] == pytest.approx(weight, abs=2e-3)
        assert score - 2e-3 <= item["set_weight"] <= 0
        assert logprobs == (None, None)
    assert len({item["set_weight"] for _, item, _ in found}) > 5
    assert "key" in found[-1][1]
    assert len(found) == len(names) - bool(greedy)
    assert not any("set_weight" in one[1] for one in (ragged, paris))
    assert all(len(one[2][0]) == len(one[0]) for one in (ragged, free))
    for tokens, _, (columns, total) in (ragged, free):
        assert total == pytest.approx(sum(column[token].logprob for column, token in zip(columns, tokens, strict=True)))


def test_with_weights_estimates_from_masked_answers_are_unbiased(engines, tiny_model, static, named_sets, oracle):
    """The mean of the weights is the probability of the set, and that over the answers that are one item is the item's.
    The bound is five times the standard deviation of such a mean, which the oracle knows."""
    engine = engines("v1", tiny_model, **on_path(static, "host", "numba"))
    seeds = [weighed("prefixes", seed=seed) for seed in range(ANSWERS)]
    found = [(tokens[:-1], item["set_weight"]) for tokens, item, _ in engine.call(answers, seeds)]
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
    asked = [weighed("labels"), named("ragged")]
    assert engine.call(count_masks, asked) == 2  # the two tokens of the one


def count_masks(llm: Any, params: list[SamplingParams]) -> int:
    """In the engine's process: how often rows are masked once more."""
    from vllm_static import compat
    from vllm_static.processor import item_sets

    processor = item_sets(compat.runner_of(llm.llm_engine.model_executor.driver_worker))
    calls = []
    mask, processor._slots.mask = processor._slots.mask, lambda *given: (calls.append(1), mask(*given))
    try:
        llm.generate(["p"] * len(params), params, use_tqdm=False)
    finally:
        del processor._slots.mask
    return len(calls)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprobs": 0}, "return_set_weight cannot be had here: it comes in the place of logprobs"),
        ({"ignore_eos": True}, "with ignore_eos an answer goes on after its end"),
        ({"extra_args": {"return_set_weight": True}}, "return_set_weight is of one sampled answer with item_set"),
        ({"extra_args": {"item_set": "one", "return_set_weight": "yes"}}, "must be true or false, not 'yes'"),
        ({"extra_args": {"item_set": "one", "return_set_weigth": True}}, "did you mean return_set_weight?"),
    ],
)
def test_what_cannot_be_weighed_is_refused(engines, tiny_model, static, given, message):
    engine = engines("v2", tiny_model, **on_path(static, "device", "numba"))
    params = SamplingParams(**({"extra_args": {"item_set": "one", "return_set_weight": True}} | given))
    with pytest.raises(VLLMValidationError, match=message):
        engine.generate("p", params)


def test_the_host_path_of_model_runner_v2_refuses(engines, tiny_model, static):
    engine = engines("v2", tiny_model, **on_path(static, "host"))
    with pytest.raises(VLLMValidationError, match="model runner V2 needs the device path for it"):
        engine.generate("p", weighed("one"))


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

    from vllm_static import legal_mass, v1_token_logprobs

    logits = torch.zeros(4, 9, device="meta")
    with PageableCopies() as copies:
        assert legal_mass._mass(logits, [(0, 0, 1), (1, 0, 3)]).shape == (2,)
        ids, scores = v1_token_logprobs._scores(Sampler(), logits, [0, 2], [[1, 2, 3], [4]])
    assert ids.shape == scores.shape == (2, 3)
    assert copies.found == []
