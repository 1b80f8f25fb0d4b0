"""Triton's interpreter as the tests have it gives what Triton's own gives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from devices import DEVICE


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing is interpreted")
def test_operations_on_all_types() -> None:
    import mixed_types

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1"}
    command = [sys.executable, mixed_types.__file__]
    own = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert mixed_types.results() == own.stdout.splitlines()


@triton.jit
def _rows(out_ptr, stride, rows, width: tl.constexpr):  # type: ignore[no-untyped-def]
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * stride + tl.arange(0, width)
        tl.store(out_ptr + at, row * 10 + tl.arange(0, width))


def test_the_variable_of_a_loop_has_a_type() -> None:
    """vLLM's kernel for top_p and top_k asks it for another (v1/sample/ops/topk_topp_triton.py)."""
    out = torch.zeros(5, 4, dtype=torch.int32, device=DEVICE)
    _rows[(2,)](out, out.stride(0), 5, 4)
    assert out.tolist() == [[10 * row + i for i in range(4)] for row in range(5)]
