"""The kernels that SGLang compiles as it runs, and those of item sets, made before: for a machine without a compiler.

python benchmarks/gpu_jit.py build FOLDER    here, with CUDA's compiler: one library a module
python benchmarks/gpu_jit.py triton          here: what Triton compiles for item sets, into TRITON_CACHE_DIR
python benchmarks/gpu_jit.py seed SITE       there: the libraries into SGLang's own cache, by that machine's keys

SGLang finds a module in its cache (SGLANG_JIT_CACHE_DIR) by a key of its source, its flags, the machine's compilers and
versions. So the machine itself computes the keys, and takes what was built for what it would compile.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_engine import SIZE

FOLDER = "static_gpu_jit"  # within the pack
OPS = "sglang.kernels.ops"


def modules() -> list[tuple[str, str, tuple[Any, ...]]]:
    """What a forward pass of Qwen3-1.7B's shape in bfloat16 loads: module, function, arguments."""
    import torch

    head, kv_heads, kind = SIZE.model[5], SIZE.model[4], torch.bfloat16
    row = 2 * head * kv_heads  # bytes of a token's keys
    return [
        (f"{OPS}.layernorm.norm", "_jit_qknorm_module", (head, kind)),
        (f"{OPS}.attention.rope", "_jit_fused_rope_module", (True, head, kind, kind)),
        (f"{OPS}.kvcache.kvcache", "_jit_kvcache_module", (row, row, 0)),
        (f"{OPS}.activation.activation", "activation_module", (kind,)),
        (f"{OPS}.attention.clamp_position", "_jit_clamp_position_module", (torch.int64,)),
        (f"{OPS}.attention.clamp_position", "_jit_clamp_position_module", (torch.int32,)),
    ]


def load(module: str, function: str, arguments: tuple[Any, ...]) -> None:
    getattr(importlib.import_module(module), function)(*arguments)


def build(folder: Path) -> None:
    for one in modules():
        load(*one)
    folder.mkdir(parents=True, exist_ok=True)
    for library in Path(os.environ["SGLANG_JIT_CACHE_DIR"]).rglob("*.so"):
        shutil.copy(library, folder)


def seed(folder: Path) -> None:
    """Have SGLang build its modules with a compiler that takes what is there. A row for each."""
    from sglang.kernels.jit.utils.compile import ninja

    sources = list[Path]()

    def taken(*, spec: Any, build_dir: Path, build_file: str) -> Path:
        sources[:] = map(Path, spec.sources)
        build_dir.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(folder / f"{spec.module_name}.so", build_dir))

    ninja.build, ninja.scan_dependencies = taken, lambda build_dir: list(sources)
    for module, function, arguments in modules():
        row: dict[str, Any] = {"way": "seed", "module": f"{module.removeprefix(OPS)[1:]}.{function}"}
        try:
            load(module, function, arguments)
        except Exception as error:  # what the engine does without it is its own affair
            row["failed"] = f"{type(error).__name__}: {error}"[-300:]
        print(json.dumps(row), flush=True)


def triton() -> None:
    """Compile what a scheduler's sampler launches at first, without a device."""
    import gpu_nodev
    import torch

    from itemset.serving.config import StaticConfig
    from sglang_static.scheduler.masks import ItemSetSampler

    config = StaticConfig.of({"item_set_kernels": "triton"})
    ItemSetSampler(config, torch.device("cpu"), SIZE.vocabulary).allocate(SIZE.rows[0] + 1, 1)
    gpu_nodev.only_what_runs()
    print(f"{len(gpu_nodev.compiled)} kernels of item sets: {', '.join(sorted(set(gpu_nodev.compiled)))}")


ACTIONS: dict[str, Callable[[], Any]] = {
    "build": lambda: build(Path(sys.argv[2])),
    "seed": lambda: seed(Path(sys.argv[2]) / FOLDER),
    "triton": triton,
}

if __name__ == "__main__":
    sys.exit(ACTIONS[sys.argv[1]]())
