"""Reads Triton's compiled kernels without a GPU: registers, spills, programs an SM, and how long a step should take.

python benchmarks/kernel_costs.py --architectures 80 90

The time is an estimate for an H200: the longest chain of loads of which each needs the one before, each at the latency
of the memory it reads, and the bytes at the memory's bandwidth. The chain is that of an ordinary row: one new token, no
drafts, and no node with more children than are compared at once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from itemset.masking import triton_kernels as kernels
from itemset.masking import triton_tables as tables
from itemset.masking.batch import CHAIN, COLUMNS, TREE

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import compile_kernels

COLD, NEAR = 0.6, 0.27  # µs of a load that misses the L2 cache, and of one that hits it
BANDWIDTH = 4.3e6  # bytes a µs
SMS = 132
REGISTERS, MOST_WARPS, MOST_PROGRAMS, SHARED = 65_536, 64, 32, 227 << 10  # of an SM
RARE = (tables.narrowed, tables.first_from, tables.is_stop, tables.is_dead)  # what an ordinary row does not call

POINTERS = {
    "logits": "*fp32",
    **dict.fromkeys(["sets", "states", "cells", "positions", "out"], "*i64"),
    **dict.fromkeys(["words", "tokens", "marks", "slots", "history", "begins", "ends", "above"], "*i32"),
}
ALIGNED = ("words", "sets", "logits", "logits_stride", "vocabulary")  # as Triton finds them: multiples of 16
GIVEN = object()  # not constant
NO_DRAFTS = {"above": None, "tokens": None, "LAYOUT": CHAIN}
NO_MASK = {"logits": None, "CHUNK": 1}


def variants() -> dict[str, tuple[Any, dict[str, Any], int]]:
    """Each kernel in the forms that engines launch: constants and warps."""
    walk, walk_warps = kernels._walk_kernel, kernels.WALK_WARPS
    mask = {"CHUNK": kernels.CHUNK, "CHUNKS": kernels.CHUNKS}
    forms: dict[str, tuple[Any, dict[str, Any], int]] = {
        "advance": (kernels._advance_kernel, {}, walk_warps),
        "forced": (kernels._forced_kernel, {"GUESS": True}, walk_warps),
        "walk": (walk, NO_DRAFTS | NO_MASK, walk_warps),
        "walk, chain": (walk, {"LAYOUT": CHAIN} | NO_MASK, walk_warps),
        "walk, chain, positions": (walk, {"LAYOUT": CHAIN, "positions": GIVEN} | NO_MASK, walk_warps),
        "walk, chain, rows each": (walk, {"LAYOUT": CHAIN, "above": None, "rows_each": GIVEN} | NO_MASK, walk_warps),
        "walk, tree": (walk, {"LAYOUT": TREE} | NO_MASK, walk_warps),
        "walk, columns": (walk, {"LAYOUT": COLUMNS} | NO_MASK, walk_warps),
        "mask": (kernels._mask_kernel, mask, kernels.MASK_WARPS),
    }
    for chunk in (2048, 4096):
        forms[f"step, {chunk:,} logits"] = (walk, NO_DRAFTS | {"CHUNK": chunk}, kernels.step_warps(chunk))
    return forms


class Compiled(NamedTuple):
    """us_cold, us_near: the chain, with the tables outside the L2 cache and inside."""

    warps: int
    registers: int
    spilled: int
    shared: int
    programs: int
    loads: int
    us_cold: float
    us_near: float


def compiled(kernel: Any, constants: dict[str, Any], warps: int, architecture: int) -> Compiled:
    common = {"STOPS": 128, "STOP_LANES": 128, "LANES": kernels.LANES, "BY_SLOT": True}
    common |= {"rows_each": None, "positions": None}
    constants = {name: value for name, value in (common | constants).items() if name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if value is not GIVEN}
    types = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in kernel.arg_names}
    return costs(compile_kernels.Form(kernel, types, constants, warps), architecture)


def costs(form: compile_kernels.Form, architecture: int) -> Compiled:
    kernel, types, constants, warps = form
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in ALIGNED and name not in constants
    }
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    ptx = result.asm["ptx"]
    registers, spilled = assembled(ptx)
    shared = result.metadata.shared
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    programs = min(by_registers, MOST_WARPS // warps, MOST_PROGRAMS, SHARED // (shared + 1024))
    loads, cold, near = (chain(ptx, table, other) for table, other in ((1, 1), (COLD, NEAR), (NEAR, NEAR)))
    return Compiled(warps, registers, spilled, shared, programs, int(loads), cold, near)


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


def chain(ptx: str, table: float, other: float) -> float:
    """The longest chain of loads, each at its cost: `table` for one of the arena's words. Loops count once. A branch
    waits for what it tests, and all after it for the branch, because a warp issues in order."""
    blocks, follows = _blocks(ptx)
    order = _topological(follows)
    place = {block: i for i, block in enumerate(order)}
    ready: dict[int, dict[str, float]] = defaultdict(dict)  # when each register has its value, on entry of a block
    longest = 0.0
    for block in order:
        known = ready[block]
        issued = known.get("issued", 0.0)
        for where, text in blocks[block]:
            used = re.findall(r"%\w+", text)
            latest = max([issued, *(known.get(name, 0.0) for name in used)])
            if "bra" in text.split()[:2] or re.match(r"(@!?%p\d+ )?bra", text):
                issued = latest
                continue
            if re.search(r"(ld|atom)\.global", text) and not _calls(where, RARE):
                latest += table if _calls(where, (tables.word, tables._has_bit)) else other
            longest = max(longest, latest)
            if "ld.shared" in text or "bar.sync" in text or "st.shared" in text:
                # What one thread writes, others read after a barrier.
                latest = known["shared"] = max(latest, known.get("shared", 0.0))
            predicated = text.startswith("@")
            for name in used[predicated : 1 + predicated]:
                known[name] = max(latest, issued)
        known["issued"] = issued
        for after in follows[block]:
            if place[after] > place[block]:
                for name, when in known.items():
                    ready[after][name] = max(ready[after].get(name, 0.0), when)
    return longest


def _blocks(ptx: str) -> tuple[list[list[tuple[str, str]]], list[list[int]]]:
    """Instructions of each basic block, with their lines in the source, and the blocks that may follow each."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    blocks: list[list[tuple[str, str]]] = [[]]
    labels: dict[str, int] = {}
    where = ""
    for line in map(str.strip, body.splitlines()):
        if line.startswith(".loc"):
            where = line.partition("//")[2]
            continue
        text = line.partition("//")[0].strip()
        label = re.match(r"(\$L\w+):", text)
        if label and "tmp" not in label[1]:
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif text and text[0] in "@abcdefghijklmnopqrstuvwxyz":
            blocks[-1].append((where, text))
            if re.match(r"(@!?%p\d+ )?\s*bra", text.replace("\t", " ")):
                blocks.append([])
    follows: list[list[int]] = []
    for i, block in enumerate(blocks):
        last = block[-1][1].replace("\t", " ") if block else ""
        jump = re.search(r"bra(?:\.uni)?\s+(\$L\w+)", last)
        after = [labels[jump[1]]] if jump else []
        if not last.startswith(("ret", "exit", "bra")) and i + 1 < len(blocks):
            after.append(i + 1)
        follows.append(after)
    return blocks, follows


def _topological(follows: list[list[int]]) -> list[int]:
    """Reverse postorder, in which only loops lead back."""
    seen: set[int] = set()
    order: list[int] = []
    stack: list[tuple[int, int]] = [(0, 0)]
    seen.add(0)
    while stack:
        block, i = stack.pop()
        if i < len(follows[block]):
            stack.append((block, i + 1))
            after = follows[block][i]
            if after not in seen:
                seen.add(after)
                stack.append((after, 0))
        else:
            order.append(block)
    return order[::-1]


def _calls(where: str, functions: tuple[Any, ...]) -> bool:
    """Whether a place in the source, with the calls that lead there, lies in one of the functions."""
    lines = [int(line) for line in re.findall(r"triton_tables\.py:(\d+)", where)]
    for function in functions:
        source, first = inspect.getsourcelines(function.fn)
        if any(first <= line < first + len(source) for line in lines):
            return True
    return False


def step_us(forms: dict[str, Compiled], rows: int, vocabulary: int, *, cold: bool) -> dict[str, float]:
    """Estimated µs of a step, and of one write of its logits."""
    write = rows * vocabulary * 4 / BANDWIDTH

    def latency(form: Compiled) -> float:
        return form.us_cold if cold else form.us_near

    if vocabulary <= kernels.WHOLE:
        (form,) = (forms[name] for name in forms if name == f"step, {vocabulary:,} logits")
        waves = -(-rows // (SMS * form.programs))
        return {"step": waves * latency(form) + write, "write": write}
    walk, mask = forms["walk"], forms["mask"]
    span = min(vocabulary, kernels.CHUNK * kernels.CHUNKS)
    programs = rows * -(-vocabulary // span)
    one = latency(mask) + span * 4 / (BANDWIDTH / SMS)  # one program's, alone on its SM
    masks = max(write + one, -(-programs // (SMS * mask.programs)) * one)
    return {"step": -(-rows // (SMS * walk.programs)) * latency(walk) + masks, "write": write}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures: dict[str, Any] = {"triton": triton.__version__}
    print(f"Triton {triton.__version__}\n")
    for architecture in args.architectures:
        forms = {name: compiled(*form, architecture) for name, form in variants().items()}
        for name in compile_kernels.VARIANTS:
            if name.startswith("lists_"):
                forms[name.replace("_", " ", 1)] = costs(compile_kernels.form_of(name), architecture)
        print(f"| sm_{architecture} | {' | '.join(name.replace('_', ' ') for name in Compiled._fields)} |")
        print(f"|---|{'--:|' * len(Compiled._fields)}")
        for name, form in forms.items():
            print(f"| {name} | {' | '.join(f'{value:.4g}' for value in form)} |")
        print()
        figures[f"sm_{architecture}"] = {name: form._asdict() for name, form in forms.items()}
        if architecture != 90:
            continue
        for rows, vocabulary, cold in ((140, 2048, True), (140, 2048, False), (512, 151_936, True)):
            us = step_us(forms, rows, vocabulary, cold=cold)
            place = "outside" if cold else "in"
            print(
                f"{rows} rows x {vocabulary:,}, tables {place} the L2 cache: {us['step']:.2f} µs, "
                f"one write {us['write']:.2f} µs, ratio {us['step'] / us['write']:.2f}"
            )
            figures[f"{rows} x {vocabulary}, {place} L2"] = us
        print()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
