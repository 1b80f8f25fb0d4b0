"""Compiles every Triton kernel to machine code for a GPU of the given architecture, on a machine without one.

python tests/compile_kernels.py 90
python tests/compile_kernels.py 90 stores     how logits of 16 bits are written, and what spills
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from itemset.masking import triton_kernels as kernels
from itemset.masking.batch import CHAIN, COLUMNS, TREE
from itemset.ranking import triton_kernels as beams
from itemset.ranking import triton_select
from itemset.ranking.beam_state import ALONE, ENDED, OPEN
from vllm_static.worker import triton_attention

POINTERS = {
    **dict.fromkeys(["logits", "found"], "*bf16"),
    **dict.fromkeys(["sets", "states", "cells", "positions", "out"], "*i64"),
    **dict.fromkeys(["words", "tokens", "marks", "slots", "history", "begins", "ends", "above"], "*i32"),
}
LISTS = {
    "logits": "*bf16",
    "sums": "*fp32",
    "words": "*i32",
    "columns": "*i32",
    "power": "i64",
    **dict.fromkeys(["boost", "length", "norm"], "i64"),
    **dict.fromkeys(["bars", "ends", "item_scores", "item_logs", "new_scores", "new_logs"], "*fp64"),
    **dict.fromkeys(["sets", "table", "tokens", "offsets", "keys", "found", "places", "new", "new_tokens"], "*i64"),
    **dict.fromkeys(["item_tokens", "done", "done_tokens", "alive"], "*i64"),
}
GIVEN = object()  # not constant, though COMMON says so
NO_DRAFTS = {"above": None, "tokens": None, "LAYOUT": CHAIN}
CHUNK = kernels.STORED // 2  # of 16 bits
MASK = {"CHUNK": CHUNK, "CHUNKS": kernels.SPAN // CHUNK, "ALIGNED": True}
SELECT = {name: getattr(triton_select, name) for name in ("LANES", "ITEMS", "OTHERS")}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "advance": (kernels._advance_kernel, {}),
    "beams_own": (triton_attention.add_own_kernel, {}),
    "children": (kernels._children_kernel, {}),
    "forced": (kernels._forced_kernel, {"GUESS": False}),
    "forced_guess": (kernels._forced_kernel, {"GUESS": True}),
    "lists_candidates": (beams.candidates_kernel, {"ITEMS": OPEN}),
    "lists_candidates_alone": (beams.candidates_kernel, {"ITEMS": ALONE}),
    "lists_candidates_narrow": (beams.candidates_kernel, {"ITEMS": OPEN, "columns": GIVEN}),
    "lists_candidates_steps": (beams.candidates_kernel, {"ITEMS": ENDED, "WHOLE": False}),
    "lists_ended": (beams.ended_kernel, {}),
    "lists_follow": (beams.follow_kernel, {"LANES": beams.LANES}),
    "lists_follow_steps": (beams.follow_kernel, {"WHOLE": False, "LANES": beams.LANES}),
    "lists_legal_sums": (beams.legal_sums_kernel, {}),
    "lists_legal_sums_narrow": (beams.legal_sums_kernel, {"columns": GIVEN}),
    "lists_log_sums": (beams.log_sums_kernel, {"LANES": beams.SUM_LANES}),
    "lists_merge": (beams.merge_kernel, {"done": None, "done_tokens": None, "ITEMS": beams.ITEMS}),
    "lists_merge_done": (beams.merge_kernel, {"ITEMS": beams.ITEMS}),
    "lists_select": (triton_select.select_kernel, SELECT),
    "mask": (kernels._mask_kernel, MASK),
    "races_candidates": (beams.candidates_kernel, {"ITEMS": OPEN}),
    "races_candidates_steps": (beams.candidates_kernel, {"ITEMS": OPEN, "WHOLE": False}),
    "races_ended": (beams.ended_kernel, {}),
    "races_ended_steps": (beams.ended_kernel, {"WHOLE": False}),
    "races_follow": (beams.follow_kernel, {"LANES": beams.LANES}),
    "races_follow_steps": (beams.follow_kernel, {"WHOLE": False, "LANES": beams.LANES}),
    "step": (kernels._walk_kernel, NO_DRAFTS | MASK),
    "walk": (kernels._walk_kernel, {"LAYOUT": CHAIN, "logits": None} | MASK),
    "walk_columns": (kernels._walk_kernel, {"LAYOUT": COLUMNS, "logits": None} | MASK),
    "walk_each": (kernels._walk_kernel, {"LAYOUT": CHAIN, "above": None, "rows_each": GIVEN, "logits": None} | MASK),
    "walk_positions": (kernels._walk_kernel, {"LAYOUT": CHAIN, "positions": GIVEN, "logits": None} | MASK),
    "walk_tree": (kernels._walk_kernel, {"LAYOUT": TREE, "logits": None} | MASK),
}
COMMON = {"rows_each": None, "positions": None, "STOPS": 16, "STOP_LANES": 16, "LANES": kernels.LANES, "BY_SLOT": True}
OWN = {"GROUP": 2, "HEADS": 16, "SIZE": 128, "PADDED": 128, "KEYS": triton_attention.KEYS}
OWN_POINTERS = {
    "sums": "*fp32",
    **dict.fromkeys(["ancestors", "entries"], "*i64"),
    **dict.fromkeys(["output", "query", "keys", "values", "own"], "*bf16"),
    **dict.fromkeys(["scale", "cap"], "fp32"),
}
LISTS_COMMON = {
    "columns": None,
    "ALIGNED": True,
    "EACH": beams.SUM_EACH,
    "OTHERS": beams.OTHERS,
    "TOKENS": beams.TOKENS,
    "WHOLE": True,
}


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
    races = name.startswith("races_")
    common, pointers = (LISTS_COMMON, LISTS) if of_lists else (COMMON, POINTERS)
    if name == "beams_own":
        common, pointers = OWN, OWN_POINTERS
    if of_lists:
        common = common | {"RACES": races, "LANES": beams.CHILDREN // (4 if "ended" in name else 2 if races else 1)}
    constants = {key: value for key, value in (common | constants).items() if key in kernel.arg_names}
    constants = {key: value for key, value in constants.items() if value is not GIVEN}
    types = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
    warps = kernels.MASK_WARPS if types.get("logits", "constexpr") != "constexpr" else kernels.WALK_WARPS
    if name == "beams_own":
        warps = triton_attention.WARPS
    if name == "step":
        warps = kernels.step_warps(constants["CHUNK"])
    if of_lists:
        of_a_row = "follow" in name or name == "lists_ended"
        warps = beams.SUM_WARPS if name == "lists_log_sums" else beams.ROW_WARPS if of_a_row else beams.WARPS
        warps = triton_select.WARPS if name == "lists_select" else warps
    return Form(kernel, types, constants, warps)


ALIGNED = ("words", "sets", "logits")  # as Triton finds them: multiples of 16. The vocabulary may be odd


def stores(architecture: int) -> Iterator[str]:
    """Of each kernel that masks: stores of 16 bytes, and bytes spilled."""
    for name in ("mask", "step"):
        kernel, types, constants, warps = form_of(name)
        at = [(i,) for i, one in enumerate(kernel.arg_names) if one in ALIGNED and one not in constants]
        attrs = {place: [["tt.divisibility", 16]] for place in at}
        source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attrs)
        target = GPUTarget("cuda", architecture, 32)
        ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
        yield f"{name}: {len(re.findall(r'st.global.v4.b32', ptx))} {assembled(ptx)[1]}"


def compiled(architecture: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each kernel, in each variant, and its code in every form: "ptx" and "cubin" among them."""
    target = GPUTarget("cuda", architecture, 32)
    for name in VARIANTS:
        form = form_of(name)
        source = ASTSource(form.kernel, signature=form.types, constexprs=form.constants)
        yield name, triton.compile(source, target=target, options={"num_warps": form.warps}).asm


def assembled(ptx: str) -> tuple[int, int]:
    """Registers a thread, and bytes spilled, as ptxas says."""
    target = re.search(r"\.target (\w+)", ptx)[1]
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = folder / ("ptxas-blackwell" if target.startswith(("sm_10", "sm_12")) else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", f"-arch={target}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"Used (\d+) registers", said)[1]), int(re.search(r"(\d+) bytes spill stores", said)[1])


if __name__ == "__main__":
    if sys.argv[2:] == ["stores"]:
        print(*stores(int(sys.argv[1])), sep="\n")
        sys.exit()
    for name, code in compiled(architecture := int(sys.argv[1])):
        assert code["cubin"]
        # ptxas may trade one register of 64 bits for more programs at a time.
        assert architecture != 90 or assembled(code["ptx"])[1] <= 8, f"{name} spills registers"
        if name.startswith(("walk", "step")):
            # One thread reads a cell, for all of its program, and one writes it.
            ptx = code["ptx"]
            read = r"@%p\d+ atom\.global\.gpu\.relaxed\.or\.b64[^@]*@%p\d+ st\.shared\.b64[^@]*bar\.sync"
            assert re.search(read, ptx)
            assert len(re.findall(r"@%p\d+ atom\.global\.gpu\.relaxed\.exch\.b64", ptx)) == 1
        if name == "mask":  # whatever a row's width, and however many chunks it has
            assert code["ptx"].count("bar.sync") == 5
        print(name)
