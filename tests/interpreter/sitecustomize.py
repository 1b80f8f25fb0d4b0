"""Lets vLLM's model runner V2 run on a CPU through Triton's interpreter, in every process that has this on PYTHONPATH.

Python imports `sitecustomize` before anything else, so that holds for the processes which vLLM starts as well. Nothing
happens unless TRITON_INTERPRET is set.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


def prepare_triton() -> None:
    """Make Triton acceptable to vLLM on a CPU, and its interpreter complete and faster."""
    from triton.backends import Backend, backends
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    # vLLM disables Triton on a CPU unless Triton has a backend of this name. Nothing asks it to compile.
    backends.setdefault("cpu", Backend(compiler=None, driver=InterpreterDriver))
    # On a GPU this comes from CUDA's math library. Probabilistic verification of draft tokens needs it.
    libdevice.log1p = _log1p_kernel()
    # Overflow checks are computed for each integer operation, then thrown away because debug is off.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    runpy.run_path(str(Path(__file__).with_name("quick_triton.py")))["make_quick"](interpreter)


class InterpreterDriver:
    """As much of a Triton driver as vLLM looks at."""

    @staticmethod
    def is_active() -> bool:
        return True


def _log1p_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def log1p(x):
        return tl.log(1.0 + x)

    # The interpreter finds `tl` among the globals of the function's module.
    globals()["tl"] = tl
    return log1p


BLOCK, WIDER_BLOCK = 1024, 4096
SAMPLING = {  # functions of vLLM that launch a program for each block of the vocabulary, or loop over its blocks
    "vllm.v1.worker.gpu.sample.gumbel": "gumbel_sample",
    "vllm.v1.worker.gpu.sample.logprob": "compute_token_logprobs",
    "vllm.v1.worker.gpu.sample.min_p": "apply_min_p",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": "rejection_sample",
}


class WiderBlocks(MetaPathFinder):
    """Has vLLM sample in one block where it would take three for the vocabularies of tests: most of a step goes there.

    In the interpreter an operation costs the same however many lanes it has. Which blocks there are changes no sample.
    """

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in SAMPLING or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        assert isinstance(spec.loader, SourceFileLoader)
        execute = spec.loader.exec_module

        def execute_and_widen(module: ModuleType) -> None:
            execute(module)
            function = getattr(module, SAMPLING[fullname])
            blocks = [WIDER_BLOCK if constant == BLOCK else constant for constant in function.__code__.co_consts]
            function.__code__ = function.__code__.replace(co_consts=tuple(blocks))

        spec.loader.exec_module = execute_and_widen  # type: ignore[method-assign]
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    prepare_triton()
    sys.meta_path.insert(0, WiderBlocks())
