"""Every kernel in machine code for GPUs, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMED = ["advance", "beams_own", "children", "forced", "forced_guess"]
NAMED += ["lists_candidates", "lists_candidates_alone", "lists_candidates_narrow", "lists_candidates_steps"]
NAMED += ["lists_ended", "lists_follow", "lists_follow_steps", "lists_legal_sums", "lists_legal_sums_narrow"]
NAMED += ["lists_log_sums", "lists_merge", "lists_merge_done", "lists_select"]
NAMED += ["mask", "races_candidates", "races_candidates_steps", "races_ended", "races_ended_steps", "races_follow"]
NAMED += ["races_follow_steps", "step", "walk", "walk_columns"]
NAMED += ["walk_each", "walk_positions", "walk_tree"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_kernel_compiles_for_a_gpu(architecture: int) -> None:
    """To machine code, without a GPU: the interpreter takes what the compiler refuses."""
    script = Path(__file__).parent / "compile_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, script, str(architecture)], env=environment, capture_output=True, text=True, timeout=550
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == NAMED


@pytest.mark.slow
def test_logits_of_16_bits_are_written_16_bytes_at_once() -> None:
    """Rows without a ready mask, what stays of one's and all else of one's; whatever the vocabulary; nothing spills."""
    script = Path(__file__).parent / "compile_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, script, "90", "stores"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines() == ["mask: 3 0", "step: 6 0"], run.stderr[-3000:]
