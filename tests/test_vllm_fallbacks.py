"""Engines whose lists come by rounds until a GPU has run the passes of such models, and the log says why."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
from ranking import EOS
from test_vllm_wide_lists import prompt_of, runner_of, searched, ways
from vllm import SamplingParams

WINDOW = 32
LENGTH = 70  # of a prompt that no window holds
MODELS: dict[str, dict[str, Any]] = {
    "sliding windows": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
    "a hybrid": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
SPECS = {"sliding windows": {"SlidingWindowSpec"}, "a hybrid": {"FullAttentionSpec", "SlidingWindowSpec"}}
REASON = (
    "sliding windows, with which this has run on no GPU yet (ranked_list_beams, how many to keep room for, tries it)"
)


def one_by_one(llm: Any, items: list[tuple[int, ...]]) -> list[tuple[float, tuple[int, ...]]]:
    """In the engine's process: each item by a request of its own, without any list, best first."""
    prompt = prompt_of(LENGTH)
    rows = [[*prompt, *item, EOS] for item in items]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    scored = []
    for item, row, output in zip(items, rows, outputs, strict=True):
        entries = zip(row[LENGTH:], output.prompt_logprobs[LENGTH:], strict=True)
        scored.append((sum(entry[token].logprob for token, entry in entries), item))
    return sorted(scored, reverse=True)


def specs(llm: Any) -> set[str]:
    """What the groups of the engine's KV cache are."""
    return {type(group.kv_cache_spec).__name__ for group in runner_of(llm).kv_cache_config.kv_cache_groups}


@pytest.mark.parametrize("kind", MODELS)
def test_lists_of_such_models_come_by_rounds(engines, tiny_model, named_sets, static, tmp_path, kind):
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    config = json.loads((path / "config.json").read_text()) | MODELS[kind]
    (path / "config.json").write_text(json.dumps(config))
    engine = engines("v2", path, **static, kv_cache_memory_bytes=128 << 20)
    assert engine.call(specs) == SPECS[kind]
    assert REASON in engine.log()
    added, counted = engine.call(ways, [{"extra_args": {"item_set": "prefixes"}}] * 2)
    assert added > 4
    assert counted == {"no room is kept for beams": 2}
    ((found, proven, _),) = engine.call(searched, {"item_set": "prefixes", "width": 7}, 7, [LENGTH])
    expected = engine.call(one_by_one, sorted(named_sets["prefixes"].items))
    assert proven
    assert [tokens for tokens, _ in found] == [item for _, item in expected]
    np.testing.assert_allclose([score for _, score in found], [score for score, _ in expected], atol=1e-3)
