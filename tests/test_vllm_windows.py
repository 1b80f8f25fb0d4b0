"""Ranked lists inside steps of models with sliding windows, with layers of both kinds, soft caps, and attention
sinks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import cached, tiny_tokenizer
from test_vllm_beam_attention import TRITON, by_graphs
from test_vllm_list_steps import made
from test_vllm_wide_lists import as_accelerators, by_rounds, given, inside, rounds, runner_of, same

WINDOW = 40  # of blocks of 32 tokens: it ends inside one
SLIDING, FULL = "sliding_attention", "full_attention"
LENGTHS = [20, 64, 75, 75, 110]  # of prompts: inside the window, at a block's end, and longer
ONE_GROUP: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True}
GEMMA3 = {  # three groups, the last of a layer and of nothing; three, for the interpreter, whose time goes with layers
    "gemma3": [SLIDING, SLIDING, SLIDING, FULL, FULL],
    "gemma3_small": [SLIDING, SLIDING, FULL],
}
SINKS = 2.0  # standard deviation of their logits, whose keys' are smaller


def config_of(kind: str) -> Any:
    import transformers

    given: dict[str, Any] = {
        "vocab_size": 2112, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "sliding_window": WINDOW, "dtype": "float32",
        "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    if kind == "mistral":
        return transformers.MistralConfig(num_hidden_layers=2, **given)
    if kind in GEMMA3:
        kinds = GEMMA3[kind]
        given |= {"num_hidden_layers": len(kinds), "layer_types": kinds, "query_pre_attn_scalar": 32}
        return transformers.Gemma3TextConfig(**given)
    if kind == "gemma2":
        soft = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32}
        return transformers.Gemma2Config(num_hidden_layers=2, layer_types=[SLIDING, FULL], **soft, **given)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.GptOssConfig(num_hidden_layers=2, layer_types=[SLIDING, FULL], **experts, **given)


def build(kind: str, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(kind))
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=SINKS)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def model_of(kind: str) -> Path:
    return cached(f"tiny-{kind}", partial(build, kind), recipe=Path(__file__).read_text())


def groups(llm: Any) -> int:
    return len(runner_of(llm).kv_cache_config.kv_cache_groups)


CASES = [
    ("mistral", {}, 1), ("gemma3", {}, 3), ("gemma3", ONE_GROUP, 1), ("gemma3_small", TRITON, 3),
    ("gemma2", {}, 2), ("gpt_oss", {}, 2), ("gpt_oss", TRITON, 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "count"), CASES)
def test_lists_are_those_of_rounds(engines, static, kind, options, count):
    """Several in a step, after prompts that share blocks, whose tails are read whole or a token a pass."""
    room = {"kv_cache_memory_bytes": 256 << 20}
    engine = engines("v2", model_of(kind), **given(static, ranked_list_beams=160), **room, **options)
    assert engine.call(groups) == count
    interpreted = options is TRITON  # which takes half a minute for each list of five
    lengths = LENGTHS[::2] if interpreted else LENGTHS
    for name, width, k, renormalised in (("ragged", 9, 5, False), ("fixed", 16, 10, True))[: 1 if interpreted else 2]:
        expected = [engine.call(by_rounds, name, width, k, renormalised, length) for length in lengths]
        for form in (inside, as_accelerators):
            for found, one in zip(engine.call(form, name, width, k, renormalised, lengths), expected, strict=True):
                same(found, one)
                assert found
    assert engine.call(rounds, 75)[:2] == (4, {})  # nothing is read back


def test_a_recorded_list_is_made_again_for_other_prompts(engines, static):
    """Whose windows begin elsewhere in their blocks."""
    room = {"kv_cache_memory_bytes": 256 << 20}
    engine = engines("v2", model_of("gemma3_small"), **given(static, ranked_list_beams=160), **room, **TRITON)
    lengths = [70, 75, 90, 110]
    found, recorded, replayed = engine.call(by_graphs, "ragged", False, lengths)
    assert (recorded, replayed) == (1, 2)
    for items, one in zip(found, engine.call(as_accelerators, "ragged", 4, 3, False, lengths), strict=True):
        same(items, one)
        assert items


@pytest.mark.parametrize(("options", "steps"), [({}, 1), (ONE_GROUP, 3)])
def test_a_list_ends_in_its_step_where_windows_free_blocks(engines, static, options, steps):
    sets = given(static, ranked_list_beams=160, max_list_rows_per_step=8)
    engine = engines("v2", model_of("gemma3"), **sets, kv_cache_memory_bytes=256 << 20, **options)
    tables, rows = engine.call(made, [("large", 24, False, 0)], [90])
    assert len(rows) == steps
    assert len(tables[0]) > 1
