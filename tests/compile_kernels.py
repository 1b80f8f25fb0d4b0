"""Compiles every Triton kernel to machine code for a GPU of the given architecture, on a machine without one.

python tests/compile_kernels.py 90
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from itemset.masking import triton_kernels as kernels
from itemset.masking.batch import CHAIN, COLUMNS, TREE
from itemset.ranking import triton_expand as expand
from itemset.ranking import triton_races as races
from itemset.ranking.torch_expand import ALONE, ENDED, OPEN, Rows

POINTERS = {
    "logits": "*bf16",
    **dict.fromkeys(["sets", "states", "cells", "positions", "out"], "*i64"),
    **dict.fromkeys(["words", "tokens", "marks", "slots", "history", "begins", "ends", "above"], "*i32"),
}
LISTS = {
    "logits": "*bf16",
    "sums": "*fp32",
    "words": "*i32",
    **dict.fromkeys(["scores", "found_scores", "done_scores", "new_scores", "ends"], "*fp64"),
    **dict.fromkeys(["sets", "offsets", "keys", "places", "found_tokens", "done_tokens", *Rows._fields], "*i64"),
    **{f"new_{name}": "*i64" for name in Rows._fields if name != "scores"},
}
LISTS["scores"] = "*fp64"
RACES = LISTS | dict.fromkeys(["logs", "earliest", "end_logs", "new_logs"], "*fp64")
RACES |= dict.fromkeys(["out", "new_keys"], "*i64") | {"power": "i64"}
GIVEN = object()  # not constant, though COMMON says so
NO_DRAFTS = {"above": None, "tokens": None, "LAYOUT": CHAIN}
MASK = {"CHUNK": kernels.CHUNK, "CHUNKS": kernels.CHUNKS, "ALIGNED": True}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "advance": (kernels._advance_kernel, {}),
    "advance_unmarked": (kernels._advance_kernel, {"marks": None}),
    "forced": (kernels._forced_kernel, {"GUESS": False}),
    "forced_guess": (kernels._forced_kernel, {"GUESS": True}),
    "grow": (kernels._grow_kernel, {"above": None, "tokens": None, "LAYOUT": CHAIN}),
    "grow_positions": (kernels._grow_kernel, {"LAYOUT": CHAIN, "positions": GIVEN}),
    "grow_tree": (kernels._grow_kernel, {"LAYOUT": TREE}),
    "lists_candidates": (expand._candidates_kernel, {"ITEMS": OPEN, "WHOLE": True, "LANES": expand.CHILDREN}),
    "lists_candidates_alone": (expand._candidates_kernel, {"ITEMS": ALONE, "WHOLE": True, "LANES": expand.CHILDREN}),
    "lists_candidates_steps": (expand._candidates_kernel, {"ITEMS": ENDED, "WHOLE": False, "LANES": expand.CHILDREN}),
    "lists_ended": (expand._ended_kernel, {"LANES": expand.ENDS}),
    "lists_follow": (expand._follow_kernel, {"WHOLE": True}),
    "lists_follow_steps": (expand._follow_kernel, {"WHOLE": False}),
    "lists_legal_sums": (expand._legal_sums_kernel, {"WHOLE": True, "LANES": expand.CHILDREN}),
    "lists_log_sums": (expand._log_sums_kernel, {"ALIGNED": True, "LANES": expand.SUM_LANES, "EACH": expand.SUM_EACH}),
    "lists_merge": (expand._merge_kernel, {"done_tokens": None, "done_scores": None}),
    "lists_merge_done": (expand._merge_kernel, {}),
    "mask": (kernels._mask_kernel, MASK),
    "races_candidates": (races._candidates_kernel, {"WHOLE": True, "LANES": races.CHILDREN}),
    "races_candidates_steps": (races._candidates_kernel, {"WHOLE": False, "LANES": races.CHILDREN}),
    "races_looked": (races._looked_kernel, {"WHOLE": True, "LANES": races.CHILDREN}),
    "races_looked_steps": (races._looked_kernel, {"WHOLE": False, "LANES": races.CHILDREN}),
    "races_went_on": (races._went_on_kernel, {"LANES": races.BEAMS}),
    "step": (kernels._walk_kernel, NO_DRAFTS | MASK),
    "walk": (kernels._walk_kernel, {"LAYOUT": CHAIN, "logits": None} | MASK),
    "walk_columns": (kernels._walk_kernel, {"LAYOUT": COLUMNS, "logits": None} | MASK),
    "walk_each": (kernels._walk_kernel, {"LAYOUT": CHAIN, "above": None, "rows_each": GIVEN, "logits": None} | MASK),
    "walk_positions": (kernels._walk_kernel, {"LAYOUT": CHAIN, "positions": GIVEN, "logits": None} | MASK),
    "walk_tree": (kernels._walk_kernel, {"LAYOUT": TREE, "logits": None} | MASK),
}
COMMON = {"rows_each": None, "positions": None, "STOPS": 16, "STOP_LANES": 16, "LANES": kernels.LANES, "BY_SLOT": True}
LISTS_COMMON = {"ITEMS": expand.ITEMS, "OTHERS": expand.OTHERS, "COLUMNS": expand.COLUMNS, "LANES": expand.LANES}
LISTS_WARPS = {"lists_log_sums": expand.SUM_WARPS, "lists_follow": expand.FOLLOW_WARPS, "races_went_on": 1}


class Form(NamedTuple):
    """What a kernel is compiled with: its arguments' types, the values of constants, and warps."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int


def form_of(name: str) -> Form:
    """Return the form of a variant."""
    kernel, constants = VARIANTS[name]
    of_lists = name.startswith(("lists_", "races_"))
    common, pointers = (LISTS_COMMON, RACES if name.startswith("races_") else LISTS) if of_lists else (COMMON, POINTERS)
    if name == "lists_ended":
        pointers = pointers | {"out": "*fp64"}
    constants = {key: value for key, value in (common | constants).items() if key in kernel.arg_names}
    constants = {key: value for key, value in constants.items() if value is not GIVEN}
    types = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
    warps = kernels.MASK_WARPS if types.get("logits", "constexpr") != "constexpr" else kernels.WALK_WARPS
    if name == "step":
        warps = kernels.step_warps(constants["CHUNK"])
    if of_lists:
        warps = LISTS_WARPS.get(name.removesuffix("_steps"), expand.WARPS)
    return Form(kernel, types, constants, warps)


def compiled(architecture: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each kernel, in each variant, and its code in every form: "ptx" and "cubin" among them."""
    target = GPUTarget("cuda", architecture, 32)
    for name in VARIANTS:
        form = form_of(name)
        source = ASTSource(form.kernel, signature=form.types, constexprs=form.constants)
        yield name, triton.compile(source, target=target, options={"num_warps": form.warps}).asm


if __name__ == "__main__":
    for name, code in compiled(int(sys.argv[1])):
        assert code["cubin"]
        if name.startswith(("walk", "step")):
            # One thread reads a cell, for all of its program, and one writes it.
            ptx = code["ptx"]
            read = r"@%p\d+ atom\.global\.gpu\.relaxed\.or\.b64[^@]*@%p\d+ st\.shared\.b64[^@]*bar\.sync"
            assert re.search(read, ptx)
            assert len(re.findall(r"@%p\d+ atom\.global\.gpu\.relaxed\.exch\.b64", ptx)) == 1
        if name == "mask":  # whatever a row's width, and however many chunks it has
            assert code["ptx"].count("bar.sync") == 4
        print(name)
