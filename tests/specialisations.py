"""What Triton would compile for a launch: the key by which it knows a compiled kernel, without compiling it."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def _binder(function: Any, values: tuple[str, ...], addresses: tuple[str, ...]) -> Any:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction, create_function_from_signature

    jitted = JITFunction(function, do_not_specialize=list(values), do_not_specialize_on_alignment=list(addresses))
    backend = backends["nvidia"].compiler(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(jitted.signature, jitted.params, backend)


def key(kernel: Any, *args: Any, **kwargs: Any) -> str:
    """kernel: as Triton's interpreter holds it. The rest: what it is launched with."""
    given = kernel.kwargs
    values, addresses = given["do_not_specialize"] or (), given["do_not_specialize_on_alignment"] or ()
    _, specialization, options = _binder(kernel.fn, tuple(values), tuple(addresses))(*args, **kwargs)
    return f"{kernel.fn.__name__} {specialization} {sorted(options.items())}"


class Recorded:
    """A kernel that notes the key of each launch."""

    def __init__(self, kernel: Any, keys: set[str]) -> None:
        self.kernel, self.keys = kernel, keys

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.keys.add(key(self.kernel, *args, **kwargs))
            self.kernel[grid](*args, **kwargs)

        return launch
