"""Triton's own JIT for one GPU, without a device: launches on CPU tensors compile as they would there, and run nothing.

Import this before anything else of Triton's. `compiled` then lists what was compiled, kernel by kernel, and Triton's
cache holds the machine code: it is found on a machine with the same Triton if it lies in the same absolute folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.compiler
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

CAPABILITY, WARP = 90, 32
launched: list[str] = []  # every launch by its kernel's name
compiled: list[str] = []  # every compilation


class _Utils:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        """Of an H100, as far as the compiler asks."""
        rates = {"sm_clock_rate": 1_980_000, "mem_clock_rate": 2_619_000, "mem_bus_width": 5_120}
        return {
            "max_shared_mem": 232_448,
            "multiprocessor_count": 132,
            "max_num_regs": 65_536,
            "warpSize": WARP,
        } | rates

    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, WARP, 0, 1_024


class _Launcher:
    """Builds what launches a kernel, for Triton's cache, and loads it not: it wants a driver."""

    launch_cooperative_grid = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = source.fn.__name__
        if os.environ.get("TRITON_CACHE_DIR"):
            nvidia.CudaLauncher(source, metadata)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        launched.append(self._name)


class _Driver:
    utils, launcher_cls = _Utils, _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def _stub() -> str:
    """A folder with a libcuda of no functions, for the linker."""
    folder = tempfile.mkdtemp()
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-xc", os.devnull, "-o", f"{folder}/libcuda.so.1"]
    subprocess.run(command, check=True)
    return folder


def only_what_runs() -> None:
    """Remove from Triton's cache what no launch reads: all but machine code and what is said of it."""
    for group in Path(os.environ["TRITON_CACHE_DIR"]).rglob("__grp__*.json"):
        every = json.loads(group.read_text())
        for name, path in list(every["child_paths"].items()):
            if not name.endswith((".cubin", ".json")):
                Path(path).unlink()
                del every["child_paths"][name]
        group.write_text(json.dumps(every))


if os.environ.get("TRITON_CACHE_DIR"):
    os.environ["TRITON_LIBCUDA_PATH"] = _stub()
    build._load_module_from_path = lambda name, path: SimpleNamespace(launch=None)  # type: ignore[assignment]
backends["nvidia"].driver.is_active = staticmethod(lambda: True)
triton.runtime.driver.set_active(_Driver())
_compile = triton.compiler.compile


def _noted(source: Any, target: Any = None, options: Any = None, *args: Any, **kwargs: Any) -> Any:
    compiled.append(source.fn.__name__)
    return _compile(source, target, options, *args, **kwargs)


triton.compiler.compile = triton.compiler.compiler.compile = triton.compile = _noted
