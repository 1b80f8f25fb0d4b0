"""Ranked lists inside steps of models some of whose layers have states: those of Mamba 2, and of the delta rule."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from models import cached, tiny_tokenizer
from test_vllm_beam_attention import TRITON, by_graphs
from test_vllm_list_steps import made
from test_vllm_wide_lists import as_accelerators, by_rounds, given, inside, rounds, same
from torch import Tensor

LENGTHS = [20, 64, 75, 75, 110]  # of prompts
STATES: dict[str, Any] = {
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": False,
}  # a CPU's Mamba 2 has none
BLOCK = 288  # tokens, of the model with the delta rule
HEADS, GROUPS, SIZE, KEYS = 4, 2, 3, 5


def config_of(kind: str) -> Any:
    import transformers

    given: dict[str, Any] = {
        "vocab_size": 2112, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "dtype": "float32",
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.1, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    if kind == "granite":
        given |= {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
        given |= {"mamba_chunk_size": 32, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0}
        given |= {"shared_intermediate_size": 128, "position_embedding_type": "rope", "num_experts_per_tok": 0}
        return transformers.GraniteMoeHybridConfig(num_hidden_layers=3, **given)
    if kind == "nemotron_h":
        given |= {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 64, "chunk_size": 32}
        return transformers.NemotronHConfig(hybrid_override_pattern="M*M-", head_dim=32, **given)
    given |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 32, "dtype": "bfloat16"}
    given |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    given |= {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64}  # 16 bits never choose others
    given |= {"shared_expert_intermediate_size": 64}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return transformers.Qwen3NextConfig(num_hidden_layers=4, layer_types=kinds, **given)


def build(kind: str, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(kind))
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def model_of(kind: str) -> Path:
    return cached(f"tiny-{kind}", partial(build, kind), recipe=Path(__file__).read_text())


def in_parts(*arguments: Any) -> list[Any]:
    """`inside`, of passes that have few rows at a time."""
    with mock.patch("vllm_static.worker.beam_kv.STATE_ROWS", 7):
        return inside(*arguments)


@pytest.mark.parametrize("kind", ["granite", "nemotron_h"])
def test_lists_are_those_of_rounds(engines, static, kind):
    """Several in a step, whose tails are read whole or a token a pass."""
    engine = engines("v2", model_of(kind), **given(static, ranked_list_beams=160), **STATES)
    for name, width, k, renormalised in (("ragged", 9, 5, False), ("fixed", 16, 10, True)):
        expected = [engine.call(by_rounds, name, width, k, renormalised, length) for length in LENGTHS]
        for form in (inside, as_accelerators):
            for found, one in zip(engine.call(form, name, width, k, renormalised, LENGTHS), expected, strict=True):
                same(found, one)
                assert found
        for found, one in zip(engine.call(in_parts, name, width, k, renormalised, LENGTHS), expected, strict=True):
            same(found, one)
    assert engine.call(rounds, 75)[:2] == (4, {})  # nothing is read back


def test_lists_by_the_delta_rule(engines, static):
    """In 16 bits, of which alone vLLM's kernels of CPUs are. Of one prompt a part is in the prefix cache."""
    sets = given(static, ranked_list_beams=160)
    options = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_batched_tokens": 512}
    engine = engines("v2", model_of("qwen3_next"), **sets, **STATES | {"enable_prefix_caching": True}, **options)
    lengths = [20, BLOCK, 2 * BLOCK + 30, 2 * BLOCK + 30]
    expected = [engine.call(by_rounds, "ragged", 9, 5, False, length) for length in lengths]
    for form in (inside, as_accelerators):
        for found, one in zip(engine.call(form, "ragged", 9, 5, False, lengths), expected, strict=True):
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in one]
            np.testing.assert_allclose([score for _, score in found], [score for _, score in one], rtol=1e-2)
            assert found


def test_lists_take_rounds_until_asked_for(engines, static):
    log = engines("v2", model_of("granite"), **static, **STATES).log()
    assert "layers with states, with which this has run on no GPU yet (ranked_list_beams" in log


def test_a_recorded_list_is_made_again_for_other_prompts(engines, static):
    engine = engines("v2", model_of("granite"), **given(static, ranked_list_beams=160), **STATES, **TRITON)
    lengths = [70, 75, 90, 110]
    found, recorded, replayed = engine.call(by_graphs, "ragged", False, lengths)
    assert (recorded, replayed) == (1, 2)
    for items, length in zip(found, lengths, strict=True):
        same(items, engine.call(as_accelerators, "ragged", 4, 3, False, [length])[0])
        assert items


def test_a_list_ends_in_its_step(engines, static):
    """The next one would overwrite the states."""
    sets = given(static, ranked_list_beams=160, max_list_rows_per_step=8)
    tables, rows = engines("v2", model_of("granite"), **sets, **STATES).call(made, [("large", 24, False, 0)], [90])
    assert len(rows) == 1
    assert len(tables[0]) > 1


def by_steps(state: Tensor, tokens: list[tuple[Tensor, ...]], delta: bool) -> Tensor:
    """What tokens read one after another: [tokens, heads, size]. state: [heads, size, keys]. tokens: their queries,
    keys, values, decays and rates."""
    found = []
    for query, key, value, decay, rate in tokens:
        queries, keys = (one.repeat_interleave(HEADS // GROUPS, 0) for one in (query, key))
        state = state * decay.exp()[:, None, None]
        added = rate[:, None] * (value - torch.einsum("hvk,hk->hv", state, keys)) if delta else value
        state = state + added[:, :, None] * keys[:, None]
        found.append(torch.einsum("hvk,hk->hv", state, queries))
    return torch.stack(found)


@pytest.mark.parametrize("delta", [False, True])
def test_reads_are_those_of_a_matrix(delta):
    """Of rows after two prompts, in passes of one token and then of three, as of a matrix that each token changes."""
    from vllm_static.worker.beam_kv import BeamMetadata
    from vllm_static.worker.beam_states import States

    random = torch.Generator().manual_seed(1)
    channels, numbers = HEADS * SIZE + 2 * GROUPS * KEYS, HEADS * SIZE * KEYS
    pages = torch.randn(6, 16 * channels, generator=random)
    past = pages[:, : 3 * channels].unflatten(1, (3, channels))
    matrices = pages[:, 3 * channels :][:, :numbers].unflatten(1, (HEADS, SIZE, KEYS))
    layer: Any = SimpleNamespace(
        kv_cache=(past, matrices), get_state_shape=lambda: (past.shape[1:], matrices.shape[1:])
    )
    weights = torch.randn(channels, 4, generator=random)
    block, parents = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([1, 1, 0, 4, 3])
    of, ancestors = [1, 1, 1, 0, 0], torch.empty(5, 0, dtype=torch.int64)
    tokens: list[list[Any]] = [[] for _ in of]
    inputs = [[*past[one]] for one in of]
    for first, more in ((0, 1), (5, 1), (10, 3)):
        each = torch.randn(5 * more, channels, generator=random)
        keys = torch.randn(2, 5 * more, GROUPS, KEYS, generator=random)
        values, rates = (
            torch.randn(5 * more, HEADS, SIZE, generator=random),
            torch.rand(2, 5 * more, HEADS, generator=random),
        )
        entries, spans = torch.arange(first, first + 5), [(0, 3 * more, 1), (3 * more, 5 * more, 1)]
        positions = torch.zeros(5, more, dtype=torch.int64)
        states = States(layer, BeamMetadata(positions, ancestors, entries, 2, block, block, block, spans, 1, 1))
        mixed = states.convolve(each, weights, None)
        read = states.read(*keys, values, -rates[0], rates[1] if delta else None)
        for row in range(5):
            own = range(row * more, row * more + more)
            inputs[row] += [each[i] for i in own]
            tokens[row] += [(*keys[:, i], values[i], -rates[0, i], rates[1, i]) for i in own]
            sums = [
                (torch.stack(inputs[row][end - 4 : end], 1) * weights).sum(1) for end in range(4, len(inputs[row]) + 1)
            ]
            expected = by_steps(matrices[of[row]], tokens[row], delta), torch.nn.functional.silu(torch.stack(sums))
            for found, one in zip((read, mixed), expected, strict=True):
                torch.testing.assert_close(found[own.start : own.stop], one[-more:], atol=1e-4, rtol=1e-4)
        ancestors = torch.cat((ancestors, entries[:, None]), 1)[parents]
        tokens, inputs = [[*tokens[row]] for row in parents], [[*inputs[row]] for row in parents]
