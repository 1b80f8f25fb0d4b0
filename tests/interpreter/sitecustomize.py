"""Lets vLLM's model runner V2 run on a CPU through Triton's interpreter, in every process that has this on PYTHONPATH.

Python imports `sitecustomize` before anything else, so that holds for the processes which vLLM starts as well. Nothing
happens unless TRITON_INTERPRET is set.
"""

from __future__ import annotations

import os
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
    _patch_language_once_a_launch(interpreter)


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


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """Spare the interpreter a third of its time: it patches triton.language again at every call inside a kernel.

    Which modules it patches depends only on the globals of the function called, and what a call patched stays patched
    until the launch ends.
    """
    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    class Launch:
        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            self.scope.restore()
            patched.clear()

    def patch_language_once(function: Any) -> Launch | None:
        namespace = id(function.__globals__)
        if namespace in patched:
            return None
        patched.add(namespace)
        return Launch(patch_language(function))

    interpreter._patch_lang = patch_language_once


if os.environ.get("TRITON_INTERPRET") == "1":
    prepare_triton()
