"""Passes of ranked lists that read each prompt once for all beams, whose own tokens are entries of a trie."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import beam_rows
import pytest
import torch
from devices import DEVICE
from engines import take_triton_attention
from test_vllm_wide_lists import (
    PLAIN,
    ROOMY,
    as_accelerators,
    by_rounds,
    fixed_shapes,
    given,
    inside,
    prompt_of,
    rounds,
    runner_of,
    same,
)
from torch import Tensor

from vllm_static.front.list_requests import RankingParams

TRITON: dict[str, Any] = {"attention_config": {"backend": "TRITON_ATTN"}, "prepare": take_triton_attention}
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
FLASHINFER = pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="needs flashinfer-python")
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="vLLM's attention for CPUs")


@pytest.mark.parametrize(
    ("backend", "dtype", "cap", "heads_first", "cache"),
    [
        pytest.param("FLASH_ATTN", torch.float16, 0.0, False, "auto", marks=ON_GPU),
        pytest.param("FLASH_ATTN", torch.float16, 2.0, True, "auto", marks=ON_GPU),
        ("TRITON_ATTN", torch.float32, 0.0, False, "auto"),
        ("TRITON_ATTN", torch.float32, 2.0, True, "auto"),
        ("TRITON_ATTN", torch.float32, 0.0, True, "fp8"),
        pytest.param("FLASHINFER", torch.float32, 0.0, False, "auto", marks=FLASHINFER),
        pytest.param("FLASHINFER", torch.float32, 2.0, True, "fp8", marks=FLASHINFER),
        pytest.param("CPU_ATTN", torch.float32, 0.0, True, "auto", marks=ON_CPU),
        pytest.param("CPU_ATTN", torch.float32, 2.0, True, "auto", marks=ON_CPU),
        pytest.param("CPU_ATTN", torch.bfloat16, 0.0, True, "auto", marks=ON_CPU),
    ],
)
def test_attention_in_two_parts(backend: str, dtype: torch.dtype, cap: float, heads_first: bool, cache: str) -> None:
    """Over three prompts, one of which ends with a block; those in a cache of 8 bits are as it keeps them."""
    most = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert beam_rows.largest_difference(backend, dtype, cap=cap, heads_first=heads_first, cache=cache) <= most


@pytest.mark.parametrize(
    "backend", ["TRITON_ATTN", pytest.param("CPU_ATTN", marks=ON_CPU), pytest.param("FLASHINFER", marks=FLASHINFER)]
)
@pytest.mark.parametrize("window", [None, 22, 40, 90])
def test_windows_and_sinks(backend: str, window: int | None) -> None:
    """Rows have up to 21 tokens of their own, so that one of them sees a last token of its prompt in the first window.
    A sink is counted once."""
    sinks = torch.linspace(-1, 4, beam_rows.HEADS, device=DEVICE)
    given: dict[str, Any] = {"heads_first": True, "window": window, "sinks": sinks}
    assert beam_rows.largest_difference(backend, torch.float32, **given) <= 1e-5


def test_one_form_of_our_kernel_serves_lists_draws_and_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a row's tokens and ancestors are, and wherever its part of them begins."""
    from specialisations import Recorded

    from vllm_static.worker import triton_attention

    keys: set[str] = set()
    monkeypatch.setattr(triton_attention, "add_own_kernel", Recorded(triton_attention.add_own_kernel, keys))
    for more, known, first in ((1, 0, 0), (1, 1, 1), (2, 3, 0), (3, 1, 1), (5, 2, 1)):
        rows = 2
        query = torch.randn(rows * more, 4, 64, device=DEVICE)
        new = (torch.randn(rows * more, 2, 64, device=DEVICE), torch.randn(rows * more, 2, 64, device=DEVICE))
        own = torch.randn(16, 2, 128, device=DEVICE)
        entries = torch.arange(8, 12, device=DEVICE)[first : first + rows]
        ancestors = torch.zeros(4, known, dtype=torch.int64, device=DEVICE)[first : first + rows]
        sums, output = torch.zeros(4, rows * more, device=DEVICE), torch.zeros_like(query)
        triton_attention.add_own(output, sums, query, new, own, entries, ancestors, 0.125, 0.0)
        kept = torch.cat(new, -1)[::more]
        assert torch.equal(own[entries], kept)  # and the entries of no other token
    assert len(keys) == 1


def test_a_layer_launches_flash_attention_and_one_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of torch's copies, gathers or scatters beside them: a pass of 28 layers waits for its launches."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.v1.attention.backends import fa_utils

    from vllm_static.worker import beam_attention, triton_attention
    from vllm_static.worker.beam_kv import BeamMetadata

    launched: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):  # no view
                launched.append(str(func))
            return func(*args, **(kwargs or {}))

    def flash(q: Tensor, out: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        launched.append("flash_attn_varlen_func")
        assert given["return_softmax_lse"]
        return out, sums

    class FlashAttentionImpl:
        """The attributes that `attend` and `_by_flash` read."""

        sliding_window, sinks = (-1, -1), None
        head_size, scale, logits_soft_cap, vllm_flash_attn_version, kv_cache_dtype = 64, 0.125, 0.0, 3, "auto"

    def add_own(*args: Any) -> None:
        launched.append("add_own_kernel")

    layer = torch.nn.Module()
    layer.impl = FlashAttentionImpl()
    query, output = torch.randn(6, 4, 64), torch.randn(8, 4, 64)[:6]
    new, cache, sums = (torch.randn(6, 2, 64), torch.randn(6, 2, 64)), torch.zeros(4, 2, 16, 128), torch.zeros(4, 6)
    numbers = torch.arange(8)
    prompt = numbers[:2].int(), numbers[1:2].int(), numbers[None, :1].int(), [(0, 6, 1)], 6, 1
    beams = BeamMetadata(numbers[:6].view(2, 3), numbers[:4].view(2, 2), numbers[:2], 3, *prompt)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(triton_attention, "add_own", add_own)
    with Operations():
        beam_attention.attend(layer, query, new, cache, beams, output)
    assert launched == ["flash_attn_varlen_func", "add_own_kernel"]


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("TRITON_ATTN", {}, None),
        ("TRITON_ATTN", {"logits_soft_cap": 30.0}, None),
        ("TRITON_ATTN", {"sliding_window": 64}, None),
        ("TRITON_ATTN", {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, "ALiBi"),
        ("TRITON_ATTN", {"sinks": torch.zeros(beam_rows.HEADS)}, None),
        ("TRITON_ATTN", {"kv_cache_dtype": "fp8"}, None),
        ("TRITON_ATTN", {"kv_cache_dtype": "fp8_e5m2"}, "a KV cache of fp8_e5m2"),
        ("TRITON_ATTN", {"sliding_window": 64, "chunk_lookback": 1}, "attention in chunks"),
        ("TRITON_ATTN", {"kv_sharing_target_layer_name": "layers.0"}, "layers that share KV"),
        pytest.param("FLASHINFER", {"kv_cache_dtype": "fp8"}, None, marks=FLASHINFER),
        pytest.param("FLASHINFER", {"kv_cache_dtype": "fp8_e5m2"}, "a KV cache of fp8_e5m2", marks=FLASHINFER),
    ],
)
def test_what_two_parts_cannot_do(backend: str, options: dict[str, Any], reason: str | None) -> None:
    from vllm_static.worker.beam_attention import why_not

    why = why_not(beam_rows.implementation(backend, **options))
    assert why == reason if reason is None else str(why).startswith(reason)


def parts(llm: Any) -> tuple[int, tuple[int, Counter[str]], int]:
    """How often layers attend in two parts: for ordinary requests, and for a list, with its passes."""
    from vllm_static.worker import beam_attention

    with mock.patch.object(beam_attention, "attend", wraps=beam_attention.attend) as attend:
        llm.generate([{"prompt_token_ids": prompt_of(length)} for length in (9, 40)], PLAIN, use_tqdm=False)
        ordinary = attend.call_count
        return ordinary, rounds(llm, 40)[:2], attend.call_count


def test_the_passes_of_lists_alone_attend_in_two_parts(engines, tiny_model, static):
    """In both layers of the model, and nothing is read back."""
    engine = engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY)
    assert engine.call(parts) == (0, (4, Counter()), 8)


def recorded(llm: Any) -> list[tuple[str, int, int]]:
    """What passes of four rows, and of six, are given when vLLM has recorded graphs for both."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from vllm_static.worker.beam_forward import _shape

    runner, found = runner_of(llm), []
    manager = runner.cudagraph_manager
    decode = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, uniform_token_count=1)
    pieces = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None)
    whole = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8)
    graphs = {"_candidates": {(4, 0): [decode, pieces], (6, 0): [whole]}, "_graphs_captured": True}
    with mock.patch.multiple(manager, **graphs):
        for rows in (4, 6):
            shape = _shape(runner, rows, rows, [])
            found.append((shape.cg_mode.name, shape.num_tokens, shape.num_reqs or 0))
    return found


def test_no_full_graph_replays_them(engines, tiny_model, static):
    """A recorded graph of the whole model holds another attention. One of the pieces between attention will do."""
    engine = engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY)
    assert engine.call(recorded) == [("PIECEWISE", 8, 0), ("NONE", 6, 6)]


def take_another_base() -> None:
    """A Triton attention whose sums were of powers of 2, as another version of vLLM might have."""
    take_triton_attention()
    from vllm_static.worker import beam_attention

    own = beam_attention._by_triton

    def by_triton(*args: Any) -> Tensor:
        sums: Tensor = own(*args)
        return sums / math.log(2)

    beam_attention._PROMPT["TritonAttentionImpl"] = by_triton


def test_other_numbers_are_found_at_the_start(engines, tiny_model, static):
    """Then lists take rounds."""
    arguments = {"attention_config": TRITON["attention_config"], "prepare": take_another_base}
    other = engines("v2", tiny_model, **static, **ROOMY, **arguments)
    assert "reads prompts once for all beams gives other numbers" in other.log()


def forms_of(llm: Any) -> tuple[set[str], set[str]]:
    """The forms of vLLM's kernels that trying a layer compiles, and those that passes of few and many rows take."""
    from specialisations import Recorded
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.ops import triton_unified_attention as theirs

    from vllm_static.worker import beam_attention

    runner, tried, taken = runner_of(llm), set[str](), set[str]()
    names = [name for name in vars(theirs) if name.startswith("kernel_unified") or name == "reduce_segments"]
    layer = next(iter(get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase).values()))
    for keys in (tried, taken):
        with mock.patch.multiple(theirs, **{name: Recorded(getattr(theirs, name), keys) for name in names}):
            if keys is tried:
                for segments in (beam_attention.SEGMENTS, 1):
                    beam_attention.largest_difference(layer, runner.dtype, segments)
            else:
                for many in (1 << 30, 1):
                    with mock.patch.object(beam_attention, "MANY", many):
                        beam_attention.largest_difference(layer, runner.dtype, 0)
    return tried, taken


def by_graphs(
    llm: Any,
    name: str,
    renormalised: bool,
    lengths: list[int],
    most_rows: int | None = None,
    fails: str | None = None,
    boost: float | None = None,
) -> tuple[list[Any], int, int]:
    """Lists of prompts, one after the other, with fixed shapes, and how often one was recorded and replayed. On a CPU
    a replay runs the recorded program again: on the buffers that it reads, with the constants that it has. fails:
    "at once" if none can be recorded, "later" if a replay gives the list that was recorded, whatever the prompt.
    boost: by which the lists are steered."""
    from vllm_static.worker import list_graphs

    lists, recorded, replayed = runner_of(llm).prompt_logprobs_worker.static_lists, 0, 0

    def record(program: Any, pool: Any) -> Any:
        nonlocal recorded
        recorded += 1
        if fails == "at once":
            raise torch.OutOfMemoryError("CUDA out of memory")
        first = program() if fails else None

        def replay() -> Any:
            nonlocal replayed
            replayed += 1
            if first is not None:
                return first
            with mock.patch("vllm_static.compat.to_device", side_effect=AssertionError("a copy from the host")):
                return program()

        return replay

    given = {"narrow": False, "graphs": list_graphs.ListGraphs(runner_of(llm), lists._first_block)}
    with (
        mock.patch.multiple(lists, **given),
        mock.patch.object(lists.share, "rows", most_rows or lists.share.rows),
        mock.patch.object(list_graphs, "record", record),
    ):
        if boost is not None:
            found = [boosted(llm, name, boost, length) for length in lengths]
        else:
            found = [inside(llm, name, 4, 3, renormalised, [length])[0] for length in lengths]
    return found, recorded, replayed


def boosted(llm: Any, name: str, weight: float, length: int) -> list[Any]:
    """A list steered by this weight of the attribute `tag`, with fixed shapes."""
    params = RankingParams(beam_width=3, max_tokens=40, width=4, item_set=name, extra_args={"boost": {"tag": weight}})
    with fixed_shapes(llm):
        (found,) = llm.beam_search([{"prompt_token_ids": prompt_of(length)}], params)
    return [(tuple(one.tokens[length:-1]), one.score) for one in found.sequences]


@pytest.mark.parametrize(
    ("scores", "items", "same"),
    [
        ([-0.011, -4.0, -5.95, -6.0], [1, 2, 3, 4], True),  # rounding near 0
        ([-0.01, -4.03, -5.97, -6.05], [1, 2, 4, 5], True),  # of those that are last, others
        ([-0.01, -4.0, -5.95, -6.0], [1, 7, 8, 9], False),
        ([-0.01, -4.5, -5.95, -6.0], [1, 2, 3, 4], False),
        ([-0.01, -4.0, -5.95, -torch.inf], [1, 2, 3, 0], False),
    ],
)
def test_lists_that_only_round_otherwise_are_alike(scores: list[float], items: list[int], same: bool) -> None:
    from vllm_static.worker.list_graphs import alike

    def table(scores: list[float], items: list[int]) -> torch.Tensor:
        rows = [[1.0, 1, 1, 4], *([score, 2, item, item] for score, item in zip(scores, items, strict=True))]
        return torch.tensor([rows], dtype=torch.float64)

    wanted = table([-0.01, -4.0, -5.95, -6.0], [1, 2, 3, 4])
    assert alike(table(scores, items), wanted) is same


class TestTriton:
    """vLLM's own Triton attention, and ours for beams, in Triton's interpreter where there is no GPU."""

    @pytest.fixture
    def engine(self, engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
        return engines("v2", tiny_model, **static, **ROOMY, **TRITON)

    @pytest.fixture
    def usual(self, engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
        return engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY)

    def test_a_recorded_list_is_made_again_for_other_prompts(self, engine):
        """The first of a kind runs as ever, the second is recorded; a prompt of more blocks is of another kind."""
        lengths = [20, 31, 33, 9, 25]
        found, recorded, replayed = engine.call(by_graphs, "ragged", False, lengths)
        assert (recorded, replayed) == (1, 2)
        expected = engine.call(as_accelerators, "ragged", 4, 3, False, lengths)
        for items, one in zip(found, expected, strict=True):
            same(items, one)
            assert items

    def test_a_steered_list_is_recorded_too(self, engine):
        found, recorded, replayed = engine.call(by_graphs, "tagged", False, [9, 12, 10], None, None, 0.5)
        assert (recorded, replayed) == (1, 1)
        same(found[2], engine.call(boosted, "tagged", 0.5, 10))
        assert found[2][0][1] - engine.call(boosted, "tagged", 0.0, 10)[0][1] == pytest.approx(2 * 0.5)  # tags: 0 to 2

    @pytest.mark.parametrize(("fails", "counts"), [("at once", (1, 0)), ("later", (1, 1))])
    def test_lists_are_made_as_ever_where_a_graph_makes_others(self, engine, fails, counts):
        lengths = [20, 31, 28, 30]
        found, recorded, replayed = engine.call(by_graphs, "ragged", False, lengths, None, fails)
        assert (recorded, replayed) == counts
        for items, one in zip(found, engine.call(as_accelerators, "ragged", 4, 3, False, lengths), strict=True):
            same(items, one)

    def test_a_cache_of_8_bits(self, engines, tiny_model, static):
        """Beams' own tokens are not rounded, so lists are nearly those of rounds, whose tokens are."""
        options = given(static, ranked_list_beams=160)
        engine = engines("v2", tiny_model, **options, **ROOMY, **TRITON, kv_cache_dtype="fp8")
        for name, renormalised in (("fixed", False), ("ragged", True)):
            (found,) = engine.call(as_accelerators, name, 4, 3, renormalised, [20])
            expected = engine.call(by_rounds, name, 4, 3, renormalised, 20)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            for (_, score), (_, other) in zip(found, expected, strict=True):
                assert score == pytest.approx(other, abs=0.1)

    def test_a_list_of_several_steps_is_in_no_graph(self, engine):
        found, recorded, _ = engine.call(by_graphs, "fixed", False, [20, 20, 20], 5)
        assert (recorded, found[0]) == (0, found[2])

    def test_wide_passes_take_forms_that_the_start_has_tried(self, engine):
        """A list of many rows goes through its prompt in one part, a constant of vLLM's kernels."""
        tried, taken = engine.call(forms_of)
        assert len(tried) > 1
        assert taken <= tried

    @pytest.mark.parametrize(("name", "renormalised"), [("fixed", False), ("ragged", False), ("prefixes", True)])
    def test_lists_are_those_of_another_layout(self, engine, usual, name, renormalised):
        """Prompts inside a block of 32, of one, and a token longer, in passes of several prompts; tails are read whole,
        or as on an accelerator. vLLM's own Triton attention reads the prompts, and ours the beams' own tokens."""
        lengths = [20, 32, 33, 33]
        expected = usual.call(inside, name, 4, 3, renormalised, lengths)
        assert "TRITON_ATTN" in engine.log()
        for form in (inside, as_accelerators):
            for items, wanted in zip(engine.call(form, name, 4, 3, renormalised, lengths), expected, strict=True):
                same(items, wanted)
                assert items
