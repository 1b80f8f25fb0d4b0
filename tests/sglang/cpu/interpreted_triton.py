"""Triton's own interpreter for the kernels of item sets, beside the stub that SGLang's kernels keep.

The stub has the name `triton`. The real one lies in a folder of the environment where nothing else finds it, and its
modules have their names while ours are imported and while one of our kernels runs. The log names each form of a kernel
that a GPU would have to compile.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(sys.prefix) / "triton-interpreted"
SPEED = Path(__file__).resolve().parents[2] / "interpreter" / "sitecustomize.py"

_modules: dict[str, ModuleType] = {}


@contextmanager
def real_triton() -> Iterator[None]:
    """Let `import triton` mean the real one."""
    if "triton" in sys.modules and sys.modules["triton"] is _modules.get("triton"):
        yield
        return
    stubs = _taken()
    finders = sys.meta_path[:]
    sys.meta_path[:] = [finder for finder in finders if type(finder).__name__ != "_TritonFinder"]
    sys.path.insert(0, str(FOLDER))
    sys.modules.update(_modules)
    try:
        if not _modules:
            os.environ["TRITON_INTERPRET"] = "1"
            _modules["triton"] = importlib.import_module("triton")
            runpy.run_path(str(SPEED))
            _wrap_launches()
        yield
    finally:
        _modules.update(_taken())
        sys.modules.update(stubs)
        sys.path.remove(str(FOLDER))
        sys.meta_path[:] = finders


def _taken() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "triton"}


def _wrap_launches() -> None:
    """The interpreter imports parts of Triton when a kernel runs."""
    from triton.runtime.interpreter import InterpretedFunction

    run: Callable[..., Any] = InterpretedFunction.run
    compiled: set[str] = set()

    def run_in_real(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        import specialisations

        with real_triton():
            key = specialisations.key(self, *args, **kwargs)
            if key not in compiled:
                compiled.add(key)
                print("a GPU would compile", key, flush=True)
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run_in_real
