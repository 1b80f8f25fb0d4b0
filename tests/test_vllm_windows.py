"""Ranked lists inside steps of models with sliding windows, with layers of both kinds, and with attention sinks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import cached_tiny_llama
from safetensors.torch import load_file, save_file
from test_vllm_beam_attention import TRITON
from test_vllm_wide_lists import as_accelerators, by_rounds, given, inside, prompt_of, rounds, runner_of, same, searched

WINDOW = 40  # of blocks of 32 tokens: it ends inside one
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
KINDS: dict[str, dict[str, Any]] = {
    "windows": {**MISTRAL, "model_type": "mistral"},
    "both": {**MISTRAL, "model_type": "ministral", "layer_types": ["sliding_attention", "full_attention"]},
}
LENGTHS = [20, 64, 75, 75, 110]  # of prompts: inside the window, at a block's end, and longer


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    config = json.loads((path / "config.json").read_text()) | KINDS[request.param]
    (path / "config.json").write_text(json.dumps(config))
    return path


def groups(llm: Any) -> int:
    return len(runner_of(llm).kv_cache_config.kv_cache_groups)


@pytest.mark.parametrize(
    ("model", "options", "count"),
    [
        ("windows", {}, 1),
        ("both", {}, 2),
        ("both", {"disable_hybrid_kv_cache_manager": True}, 1),
        ("both", TRITON, 2),
    ],
    indirect=["model"],
)
def test_lists_are_those_of_rounds(engines, model, static, options, count):
    """Several in a step, whose tails are read whole or a token a pass, after prompts that share blocks."""
    engine = engines("v2", model, **given(static, ranked_list_beams=160), kv_cache_memory_bytes=256 << 20, **options)
    assert engine.call(groups) == count
    for name, width, k, renormalised in (("ragged", 9, 5, False), ("fixed", 16, 10, True)):
        expected = [engine.call(by_rounds, name, width, k, renormalised, length) for length in LENGTHS]
        for made in (inside, as_accelerators):
            for found, one in zip(engine.call(made, name, width, k, renormalised, LENGTHS), expected, strict=True):
                same(found, one)
                assert found
    assert engine.call(rounds, 75)[0] > 1
