"""Slates on vLLM's device path: the answers of the host path, told alike, however they are scheduled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engines import force_asynchronous_scheduling
from inside_cases import KEYS, TITLES, sets
from models import tiny_tokenizer
from test_vllm_engine import metrics
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PREEMPTING = {"num_gpu_blocks_override": 12, "max_model_len": 176, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def options(tmp_path_factory, named_sets):
    files = sets(tmp_path_factory.mktemp("slates"), tiny_tokenizer())
    return {"item_sets": files | {"fixed": named_sets["fixed"].path, "tagged": named_sets["tagged"].path}}


def arguments(options: dict[str, Any], path: str, kernels: str = "numba") -> dict[str, Any]:
    given = options | {"item_set_path": path, "item_set_kernels": kernels}
    return {"structured_outputs_config": {"backend": "static"}, "additional_config": given}


def slate(
    item_set: Any = "titles", n: int = 4, *, sampled: dict[str, Any] | None = None, **more: Any
) -> SamplingParams:
    asked = {"item_set": item_set, "n": n, **more}
    return SamplingParams(**{"temperature": 0, "max_tokens": 120} | (sampled or {}), extra_args={"slate": asked})


SLATES = {
    "four": slate(),
    "one": slate(n=1),
    "all": slate(n=len(TITLES), sampled={"max_tokens": 230}),
    "some": slate(n=3, exclude_keys=KEYS[:14]),
    "inline": slate(["red", "green", "blue", "grün"], 3),
    "inside one another": slate(TITLES[:3], 3),
    "filtered": slate("tagged", 4, item_filter={"tag": {"$lt": 1}}),
    "filtered, and others left out": slate("tagged", 4, item_filter={"tag": 1}, exclude_keys=["item 1", "item 4"]),
    "semantic ids": slate("fixed", 6, separator=""),
    "other separator": slate(n=3, separator="\t"),
}


def paths(llm: Any) -> dict[str, int]:
    return dict(llm.llm_engine.engine_core.engine_core.structured_output_manager.backend.figures()["by_path"])


def answers_of(outputs: list[Any]) -> list[Any]:
    return [(one.outputs[0].token_ids, getattr(one.outputs[0], "items", None)) for one in outputs]


def test_the_same_answers_as_on_the_host_path(engines, tiny_model, options):
    """In one batch with items, free text and grammars."""
    others = [
        SamplingParams(temperature=0, max_tokens=20, extra_args={"item_set": "titles"}),
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-c]{4}")),
    ]
    params = [*SLATES.values(), *others]
    prompts = [f"prompt {i}" for i in range(len(params))]
    found, counts = [], []
    for path in ("device", "host"):
        engine = engines("v2", tiny_model, **arguments(options, path))
        before = engine.call(paths)
        found.append(answers_of(engine.generate(prompts, params)))
        after = engine.call(paths)
        counts.append(Counter(after) - Counter(before))
    for name, ours, theirs in zip(SLATES, *found, strict=False):
        assert ours == theirs, name
    assert found[0] == found[1]
    assert counts == [{"device": len(SLATES) + 1}, {"host": len(SLATES) + 1}]
    for name, (_, items) in zip(SLATES, found[0], strict=False):
        n = SLATES[name].extra_args["slate"]["n"]
        keys = [item["key"] for item in items]
        assert len(set(keys)) == len(keys) == n, name


def test_many_slates_in_triton_kernels(engines, tiny_model, options):
    engine = engines("v2", tiny_model, **arguments(options, "device", "triton"))
    params = [slate(n=n, sampled={"temperature": 1}) for n in (1, 2, 3)] * 2
    for one, asked in zip(answers_of(engine.generate(["p"] * 6, params)), params, strict=True):
        keys = [item["key"] for item in one[1]]
        assert len(set(keys)) == len(keys) == asked.extra_args["slate"]["n"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preempted_slates_begin_anew(engines, tiny_model, options, asynchronous):
    """Requests that have come back walk their output again, in another slot, into an empty list."""
    prepare = {"prepare": force_asynchronous_scheduling} if asynchronous else {}
    more = {"async_scheduling": asynchronous, **prepare}
    given = arguments(options, "device")
    params = [slate(n=8, sampled={"max_tokens": 140})] * 8
    prompts = [f"slate {i}" for i in range(8)]
    roomy = engines("v2", tiny_model, **given, **more)
    expected = answers_of(roomy.generate(prompts, params))
    tight = engines("v2", tiny_model, disable_log_stats=False, **given, **more, **PREEMPTING)
    assert answers_of(tight.generate(prompts, params)) == expected
    assert tight.call(metrics)["vllm:num_preemptions"] > 0
    for _, items in expected:
        assert len({item["key"] for item in items}) == 8
    assert roomy.call(residents) == roomy.call(residents_of_registered)


def residents(llm: Any) -> int:
    return len(llm.llm_engine.engine_core.engine_core.structured_output_manager.backend._device.plan.residents)


def residents_of_registered(llm: Any) -> int:
    return len(llm.llm_engine.engine_core.engine_core.structured_output_manager.backend._catalogue.registered)


def test_what_takes_the_host_path(engines, tiny_model, options):
    """A separator of several tokens, or one that is a token of an item: as a grammar."""
    engine = engines("v2", tiny_model, **arguments(options, "device"))
    before = engine.call(paths)
    params = [slate(n=2, separator=" and then\n"), slate(n=2, separator=":"), slate(n=2)]
    outputs = answers_of(engine.generate(["p"] * 3, params))
    assert Counter(engine.call(paths)) - Counter(before) == {"device": 1, "host": 2}
    assert all(len({item["key"] for item in items}) == 2 for _, items in outputs[::2])
