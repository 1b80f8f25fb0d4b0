"""VLLM_STATIC: our backend for an engine that something else builds, such as a trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import TESTS, environment
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_static.engine_config import apply_environment


def test_it_chooses_the_backend_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"item_sets": {"films": "films.itemset"}, "ranked_list_beams": 8}
    monkeypatch.setenv("VLLM_STATIC", json.dumps(options))
    args = EngineArgs(model="any", additional_config={"ranked_list_beams": 4})
    apply_environment(args)
    assert args.structured_outputs_config.backend == "static"
    assert args.additional_config == {**options, "ranked_list_beams": 4}


@pytest.mark.parametrize("given", [{"backend": "xgrammar"}, StructuredOutputsConfig(backend="xgrammar")])
def test_another_choice_stays(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="any", structured_outputs_config=given)
    monkeypatch.setenv("VLLM_STATIC", "{}")
    apply_environment(args)
    assert args.structured_outputs_config == given
    assert not args.additional_config


def test_it_chooses_the_backend_of_options_in_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="any", structured_outputs_config={"disable_any_whitespace": True})
    monkeypatch.setenv("VLLM_STATIC", "{}")
    apply_environment(args)
    assert args.structured_outputs_config == {"disable_any_whitespace": True, "backend": "static"}


@pytest.mark.parametrize("text", ["films", "3", "[1]"])
def test_what_is_no_json_object_says_so(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_STATIC", text)
    with pytest.raises(ValueError, match="VLLM_STATIC must be a JSON object"):
        apply_environment(EngineArgs(model="any"))


def test_trl_s_own_loop_with_vllm_in_its_process(tiny_model: Path, tmp_path: Path) -> None:
    """What vLLM says of a rollout is what the trainer computes, so the importance ratio is 1."""
    command = [sys.executable, TESTS / "colocated_grpo.py", tiny_model, tmp_path]
    run = subprocess.run(command, env=environment("v1"), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-6000:]
    ratios = json.loads(run.stdout.splitlines()[-1])
    assert len(ratios) == 3
    assert [one for pair in ratios for one in pair] == pytest.approx([1] * 6, abs=1e-3)
