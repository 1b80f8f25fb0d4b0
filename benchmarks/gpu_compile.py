"""Compiles every kernel in every variant to machine code, without a GPU, and lists what each takes of one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton.backends.nvidia

ARCHITECTURES = (80, 90, 100)


def report(emit: Callable[[str, Any], None]) -> None:
    """Emit a row a kernel and architecture: registers a thread, bytes of it that spill to memory, and shared bytes."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    compiled = importlib.import_module("compile_kernels").compiled
    for architecture in ARCHITECTURES:
        for name, code in compiled(architecture):
            emit("kernels", {"kernel": name, "sm": architecture} | usage(code["cubin"]))


def usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", listing)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"], "shared": found["SHARED"]}
