"""Compiles every Triton kernel to machine code for a GPU of the given architecture, on a machine without one.

python tests/compile_kernels.py 90
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from itemset import triton_kernels as kernels
from itemset.batch import CHAIN, COLUMNS, TREE

POINTERS = {
    "logits": "*bf16",
    **dict.fromkeys(["sets", "states", "cells", "positions", "out"], "*i64"),
    **dict.fromkeys(["words", "tokens", "marks", "slots", "history", "begins", "ends", "above"], "*i32"),
}
GIVEN = object()  # not constant, though COMMON says so
NO_DRAFTS = {"above": None, "tokens": None, "LAYOUT": CHAIN}
MASK = {"CHUNK": kernels.CHUNK, "CHUNKS": kernels.CHUNKS}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "advance": (kernels._advance_kernel, {}),
    "advance_unmarked": (kernels._advance_kernel, {"marks": None}),
    "forced": (kernels._forced_kernel, {"GUESS": False}),
    "forced_guess": (kernels._forced_kernel, {"GUESS": True}),
    "mask": (kernels._mask_kernel, MASK),
    "step": (kernels._walk_kernel, NO_DRAFTS | MASK),
    "walk": (kernels._walk_kernel, {"LAYOUT": CHAIN, "logits": None} | MASK),
    "walk_columns": (kernels._walk_kernel, {"LAYOUT": COLUMNS, "logits": None} | MASK),
    "walk_each": (kernels._walk_kernel, {"LAYOUT": CHAIN, "above": None, "rows_each": GIVEN, "logits": None} | MASK),
    "walk_positions": (kernels._walk_kernel, {"LAYOUT": CHAIN, "positions": GIVEN, "logits": None} | MASK),
    "walk_tree": (kernels._walk_kernel, {"LAYOUT": TREE, "logits": None} | MASK),
}
COMMON = {"rows_each": None, "positions": None, "STOPS": 16, "STOP_LANES": 16, "LANES": kernels.LANES, "BY_SLOT": True}


def compiled(architecture: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each kernel, in each variant, and its code in every form: "ptx" and "cubin" among them."""
    for name, (kernel, constants) in VARIANTS.items():
        constants = {key: value for key, value in (COMMON | constants).items() if key in kernel.arg_names}
        constants = {key: value for key, value in constants.items() if value is not GIVEN}
        types = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in kernel.arg_names}
        source = ASTSource(kernel, signature=types, constexprs=constants)
        warps = kernels.MASK_WARPS if types.get("logits", "constexpr") != "constexpr" else kernels.WALK_WARPS
        target = GPUTarget("cuda", architecture, 32)
        yield name, triton.compile(source, target=target, options={"num_warps": warps}).asm


if __name__ == "__main__":
    for name, code in compiled(int(sys.argv[1])):
        assert code["cubin"]
        if name.startswith(("walk", "step")):
            # One thread reads a cell, for all of its program, and one writes it.
            ptx = code["ptx"]
            read = r"@%p\d+ atom\.global\.gpu\.relaxed\.or\.b64[^@]*@%p\d+ st\.shared\.b64[^@]*bar\.sync"
            assert re.search(read, ptx)
            assert len(re.findall(r"@%p\d+ atom\.global\.gpu\.relaxed\.exch\.b64", ptx)) == 1
        print(name)
