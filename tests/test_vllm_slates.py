"""Slates on vLLM's device path: the answers of the host path, told alike, however they are scheduled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engines import force_asynchronous_scheduling
from slate_tests import *  # noqa: F403 - its tests, with the engines of this module
from slate_tests import check_distinct, slate, told
from test_vllm_engine import metrics, sampled

PREEMPTING = {"num_gpu_blocks_override": 12, "max_model_len": 176, "enable_prefix_caching": False}


@pytest.fixture
def start(engines, tiny_model, sets_of_slates):
    def start(path: str, kernels: str = "numba", **more: Any) -> Any:
        given = {"item_sets": sets_of_slates, "item_set_path": path, "item_set_kernels": kernels}
        backend = {"structured_outputs_config": {"backend": "static"}}
        return engines("v2", tiny_model, **backend, additional_config=given, **more)

    return start


@pytest.fixture
def others():
    return [{"regex": "[a-c]{4}", "temperature": 0}]


@pytest.fixture
def host_path_taken():
    return lambda engine: engine.call(paths).get("host", 0)


def paths(llm: Any) -> dict[str, int]:
    return dict(llm.llm_engine.engine_core.engine_core.static_backend.figures()["by_path"])


def test_many_slates_in_triton_kernels(start):
    words = [slate(n=n, sampled={"temperature": 1}) for n in (1, 2, 3)] * 2
    engine = start("device", "triton")
    for answer, one in zip(engine.ask(["p"] * 6, words), words, strict=True):
        check_distinct(answer, one["slate"]["n"])
    assert set(engine.call(sampled)) == {"slates"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preempted_slates_begin_anew(start, asynchronous):
    """Requests that have come back walk their output again, in another slot, into an empty list."""
    prepare = {"prepare": force_asynchronous_scheduling} if asynchronous else {}
    more = {"async_scheduling": asynchronous, **prepare}
    words = [slate(n=8, sampled={"max_tokens": 140})] * 8
    prompts = [f"slate {i}" for i in range(8)]
    roomy = start("device", **more)
    expected = roomy.ask(prompts, words)
    tight = start("device", disable_log_stats=False, **more, **PREEMPTING)
    assert told(tight.ask(prompts, words)) == told(expected)
    assert tight.call(metrics)["vllm:num_preemptions"] > 0
    for answer in expected:
        check_distinct(answer, 8)
    assert roomy.call(residents) == roomy.call(residents_of_registered)


def residents(llm: Any) -> int:
    return len(llm.llm_engine.engine_core.engine_core.static_backend._device.plan.residents)


def residents_of_registered(llm: Any) -> int:
    return len(llm.llm_engine.engine_core.engine_core.static_backend._catalogue.registered)


def test_what_takes_the_host_path(start):
    """A separator of several tokens, or one that is a token of an item: as a grammar."""
    engine = start("device")
    before = engine.call(paths)
    answers = engine.ask(["p"] * 3, [slate(n=2, separator=" and then\n"), slate(n=2, separator=":"), slate(n=2)])
    assert Counter(engine.call(paths)) - Counter(before) == {"device": 1, "host": 2}
    for answer in answers[::2]:
        check_distinct(answer, 2)
