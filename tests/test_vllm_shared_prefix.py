"""Passes of ranked lists that read each prompt once for all beams: the same attention, and the same lists."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shared_rows
import torch
from devices import DEVICE
from engines import Engine, take_triton_attention
from test_vllm_wide_lists import PLAIN, ROOMY, beside, cached, given, inside, prompt_of, reads, runner_of, same
from torch import Tensor

ON: dict[str, Any] = {"item_set_shared_prefix": "on"}
TRITON: dict[str, Any] = {"attention_config": {"backend": "TRITON_ATTN"}, "prepare": take_triton_attention}


@pytest.mark.parametrize(("cap", "heads_first"), [(0.0, False), (2.0, True)])
@pytest.mark.parametrize(
    "backend",
    [pytest.param("FLASH_ATTN", marks=pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")), "TRITON_ATTN"],
)
def test_attention_in_two_parts(backend: str, cap: float, heads_first: bool) -> None:
    """Over three prompts, one of which ends with a block."""
    dtype, most = (torch.float16, 5e-3) if backend == "FLASH_ATTN" else (torch.float32, 1e-5)
    assert shared_rows.largest_difference(backend, dtype, cap=cap, heads_first=heads_first) <= most


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"logits_soft_cap": 30.0}, None),
        ({"sliding_window": 64}, "a sliding window"),
        ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, "ALiBi"),
        ({"sinks": torch.zeros(shared_rows.HEADS)}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of fp8"),
    ],
)
def test_what_two_parts_cannot_do(options: dict[str, Any], reason: str | None) -> None:
    from vllm_static.shared_prefix import _why_not

    why = _why_not(shared_rows.implementation("TRITON_ATTN", **options))
    assert why == reason if reason is None else str(why).startswith(reason)


@pytest.fixture
def plain(engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
    return engines("v2", tiny_model, **static, **ROOMY, **TRITON)


@pytest.fixture
def apart(engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
    return engines("v2", tiny_model, **given(static, **ON), **ROOMY, **TRITON)


@pytest.mark.parametrize(("name", "renormalised"), [("ragged", False), ("prefixes", True)])
def test_the_same_lists(apart, plain, name, renormalised):
    """Prompts inside a block of 32, of one, and a token longer, in passes of eight rows of several prompts; tails."""
    lengths = [20, 32, 33, 33]
    found = apart.call(inside, name, 4, 3, renormalised, lengths)
    assert "each pass reads a prompt once for all beams" in apart.log()
    for items, expected in zip(found, plain.call(inside, name, 4, 3, renormalised, lengths), strict=True):
        same(items, expected)
        assert items


def test_a_prompt_from_the_prefix_cache(apart, plain):
    (none, first), (some, second) = apart.call(cached)
    assert (none, some) == (0, 64)
    same(second, first)
    same(first, plain.call(cached)[0][1])


def parts(llm: Any) -> tuple[int, tuple[int, Counter[str]], int]:
    """How often layers attend in two parts: for ordinary requests, and for a list, with its passes."""
    from vllm_static import shared_prefix

    with mock.patch.object(shared_prefix, "attend", wraps=shared_prefix.attend) as attend:
        llm.generate([{"prompt_token_ids": prompt_of(length)} for length in (9, 40)], PLAIN, use_tqdm=False)
        ordinary = attend.call_count
        return ordinary, reads(llm), attend.call_count


def test_the_passes_of_lists_alone_attend_in_two_parts(apart):
    """In both layers of the model, and nothing is read back."""
    assert apart.call(parts) == (0, (4, Counter()), 8)


def test_neighbours_stay_as_they_are(apart):
    assert apart.call(beside, 2) == apart.call(beside, 0)


def recorded(llm: Any) -> list[tuple[str, int, int]]:
    """What passes of four rows, and of six, are given when vLLM has recorded graphs for both."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from vllm_static.branch_forward import _shape

    runner, found = runner_of(llm), []
    manager = runner.cudagraph_manager
    decode = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, uniform_token_count=1)
    pieces = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None)
    whole = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8)
    graphs = {"_candidates": {(4, 0): [decode, pieces], (6, 0): [whole]}, "_graphs_captured": True}
    with mock.patch.multiple(manager, **graphs):
        for rows, graphs_too in product((4, 6), (True, False)):
            shape = _shape(runner, rows, 1, [], graphs=graphs_too)
            found.append((shape.cg_mode.name, shape.num_tokens, shape.num_reqs or 0))
    return found


def test_no_full_graph_replays_them(apart):
    """A recorded graph of the whole model holds another attention. One of the pieces between attention will do."""
    assert apart.call(recorded) == [("FULL", 8, 8), ("PIECEWISE", 8, 0), ("FULL", 8, 8), ("NONE", 6, 6)]


@pytest.mark.parametrize("named", [{}, {"attention_config": {"backend": "TRITON_ATTN"}}])
def test_a_backend_that_cannot_is_refused_at_the_start(tiny_model, static, named):
    """A CPU's, which vLLM takes there whatever it is told: with a name it is found out after the model is loaded."""
    with pytest.raises(ValueError, match="backend CPU_ATTN cannot read a prompt once"):
        Engine("v2", tiny_model, **given(static, **ON), **named)


def take_another_base() -> None:
    """A Triton attention whose sums were of powers of 2, as another version of vLLM might have."""
    take_triton_attention()
    from vllm_static import shared_prefix

    own = shared_prefix._by_triton

    def by_triton(*args: Any) -> tuple[Tensor, Tensor]:
        output, sums = own(*args)
        return output, sums / math.log(2)

    shared_prefix._ATTEND["TritonAttentionImpl"] = by_triton


def test_other_logits_are_found_at_the_start(engines, tiny_model, static, plain):
    arguments = {"attention_config": TRITON["attention_config"], "prepare": take_another_base}
    other = engines("v2", tiny_model, **given(static, **ON), **ROOMY, **arguments)
    assert "although item_set_shared_prefix is on: a first pass gave other logits" in other.log()
    (found,), (expected,) = (engine.call(inside, "fixed", 4, 3, False, [33]) for engine in (other, plain))
    same(found, expected)
