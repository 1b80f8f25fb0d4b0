"""Answers sampled from what may follow, without a mask: the answers of the mask, in fewer launches."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from test_vllm_device import processor_of
from test_vllm_engine import CITIES, inline, named, on_path
from test_vllm_wide_lists import runner_of
from vllm import SamplingParams


@pytest.fixture(scope="module")
def ways(engines: Any, tiny_model: Any, static: dict[str, Any]) -> tuple[Any, Any]:
    """The same engine without and with it. Kernels are Triton's, interpreted."""
    masked = on_path(static, "device")
    config = masked["additional_config"] | {"item_set_child_sampling": "on"}
    return engines("v2", tiny_model, **masked), engines("v2", tiny_model, **masked | {"additional_config": config})


def watch(llm: Any) -> None:
    """Count, from now on, launches that write masks, and those that sample from children."""
    from itemset.masking import triton_kernels
    from vllm_static.worker import triton_child_sampling

    counts = llm.launches = Counter()

    class Counted:
        def __init__(self, kernel: Any, name: str) -> None:
            self._kernel, self._name = kernel, name

        def __getitem__(self, grid: Any) -> Any:
            counts[self._name] += 1
            return self._kernel[grid]

    for module, name in (
        (triton_kernels, "_mask_kernel"), (triton_kernels, "_walk_kernel"), (triton_child_sampling, "sample_kernel"),
    ):  # fmt: skip
        kernel = getattr(module, name)
        setattr(module, name, Counted(getattr(kernel, "_kernel", kernel), name))


def answers(engine: Any, params: list[SamplingParams]) -> list[list[int]]:
    prompts = [f"prompt {i}" for i in range(len(params))]
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]


def test_the_same_seeds_give_the_same_answers_in_a_launch_less(ways: tuple[Any, Any], named_sets: Any) -> None:
    masked, children = ways
    children.call(watch)
    for temperature in (0.0, 0.5, 1.0, 2.0):
        params = [named(name, temperature=temperature, seed=11 + i) for i, name in enumerate(named_sets)]
        params.append(inline(CITIES, temperature=temperature, seed=3))
        assert answers(children, params) == answers(masked, params), temperature
    counts = children.call(lambda llm: dict(llm.launches))
    assert counts["sample_kernel"] == counts["_walk_kernel"] > 0
    assert "_mask_kernel" not in counts


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 1}, {"repetition_penalty": 1.3},
        {"logit_bias": {5: 2.0}}, {"min_tokens": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_asks_for_more_is_masked_as_ever(ways: tuple[Any, Any], more: dict[str, Any]) -> None:
    masked, children = ways
    children.call(watch)
    params = [named("fixed", temperature=1.0, seed=5, **more), named("ragged", temperature=1.0, seed=6)]
    assert answers(children, params) == answers(masked, params)
    assert children.call(lambda llm: llm.launches["_mask_kernel"] + llm.launches["_walk_kernel"]) > 0


def test_a_neighbour_without_a_set_has_the_step_masked(ways: tuple[Any, Any]) -> None:
    masked, children = ways
    params = [named("fixed", temperature=1.0, seed=5), SamplingParams(max_tokens=6, temperature=1.0, seed=7)]
    assert answers(children, params) == answers(masked, params)


def test_after_the_item_nothing_but_its_end(ways: tuple[Any, Any], named_sets: Any) -> None:
    """A request that goes on after its end, in steps with others inside their items."""
    masked, children = ways
    params = [named("ragged", temperature=1.0, seed=i, ignore_eos=True, max_tokens=14) for i in range(3)]
    assert answers(children, params) == answers(masked, params)
    assert children.call(lambda llm: bool(processor_of(llm).child_sampling))


def tried(llm: Any) -> tuple[bool, bool]:
    """In the engine's process: what the trial says of the kernel, and of one that samples something else."""
    from vllm_static.worker import triton_child_sampling as kernels

    slots, like = processor_of(llm)._slots, torch.zeros(1, 300, dtype=torch.bfloat16)
    given = slots.arena, slots.marks, like
    with mock.patch.object(kernels, "sample", lambda arena, logits, states, *_: torch.zeros_like(states)):
        other = kernels.is_as_masked(*given, fp64=False)
    return kernels.is_as_masked(*given, fp64=False), other


def test_a_trial_finds_a_device_that_samples_something_else(ways: tuple[Any, Any]) -> None:
    assert ways[1].call(tried) == (True, False)


def beside_another_processor(llm: Any, params: list[SamplingParams]) -> tuple[list[list[int]], int]:
    """In the engine's process: answers beside a processor that is not known, and how many steps wrote no mask."""
    sampler = runner_of(llm).sampler
    processors = sampler.logits_processors
    with mock.patch.object(sampler, "logits_processors", [*processors, processors[0]]):
        outputs = llm.generate([f"prompt {i}" for i in range(len(params))], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs], llm.launches["sample_kernel"]


def test_a_processor_of_the_users_has_its_say(ways: tuple[Any, Any]) -> None:
    masked, children = ways
    children.call(watch)
    params = [named("fixed", temperature=1.0, seed=5)]
    assert children.call(beside_another_processor, params) == (answers(masked, params), 0)
