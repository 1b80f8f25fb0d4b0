"""Every kernel in machine code for GPUs, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys

import compile_kernels
import pytest


def compiled(*words: str) -> list[str]:
    """What `compile_kernels.py` prints."""
    command = [sys.executable, compile_kernels.__file__, *words]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_kernel_compiles_for_a_gpu(architecture: int) -> None:
    """To machine code, without a GPU: the interpreter takes what the compiler refuses."""
    modules = (compile_kernels.kernels, compile_kernels.beams)
    every = {one for module in modules for name, one in vars(module).items() if name.endswith("_kernel")}
    assert every <= {kernel for kernel, _ in compile_kernels.VARIANTS.values()}
    assert compiled(str(architecture)) == list(compile_kernels.VARIANTS)


@pytest.mark.slow
def test_logits_of_16_bits_are_written_16_bytes_at_once() -> None:
    """Rows without a ready mask, what stays of one's and all else of one's; whatever the vocabulary; nothing spills."""
    assert compiled("90", "stores") == ["mask: 3 0", "step: 6 0"]
