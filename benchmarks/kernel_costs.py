"""Reads Triton's compiled kernels without a GPU: registers, spills, programs an SM, and how long a step should take.

python benchmarks/kernel_costs.py --architectures 80 90 --json docs/benchmarks/kernel_costs.json

The time is an estimate for an H200: the longest chain of loads of which each needs the one before, each at the latency
of the memory it reads, and the bytes at the memory's bandwidth. The chain is that of an ordinary row: one new token, no
drafts, and no node with more children than are compared at once. A wide row's has the loads that narrow its children
down, once: enough for 65,536 of them.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import defaultdict
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"

import triton
from runner import Report, Row, parser
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from itemset.masking import triton_kernels as kernels
from itemset.masking import triton_tables as tables

COLD, NEAR = 0.6, 0.27  # µs of a load that misses the L2 cache, and of one that hits it
BANDWIDTH = 4.3e6  # bytes a µs
SMS = 132
REGISTERS, MOST_WARPS, MOST_PROGRAMS, SHARED = 65_536, 64, 32, 227 << 10  # of an SM
WIDE = (tables.narrowed, tables.first_from)  # what a row calls whose node has more children than are compared at once
RARE = (tables.is_stop, tables.is_dead)  # what neither an ordinary row nor a wide one calls

ALIGNED = ("words", "sets", "logits", "logits_stride", "vocabulary")  # as Triton finds them: multiples of 16


def variants() -> dict[str, Any]:
    """The forms in which the tests compile each kernel, with bf16 logits; ordinary rows' walk, and whole steps."""
    from compile_kernels import VARIANTS, form_of  # of the tests

    forms = {name: changed(form_of(name)) for name in VARIANTS}
    forms["walk, no drafts"] = changed(forms["walk"], above=None, tokens=None)
    for chunk in (2_048, 4_096):
        step = changed(forms["step"], CHUNK=chunk)
        forms[f"step, {chunk:,} logits"] = step._replace(warps=kernels.step_warps(chunk))
    return forms


def changed(form: Any, **constants: Any) -> Any:
    types = form.types | dict.fromkeys(constants, "constexpr")
    return form._replace(types=types, constants=form.constants | constants)


class Compiled(NamedTuple):
    """us_cold, us_near: the chain, with the tables outside the L2 cache and inside. us_wide: of a wide row, outside."""

    warps: int
    registers: int
    spilled: int
    shared: int
    programs: int
    loads: int
    us_cold: float
    us_near: float
    us_wide: float


def costs(form: Any, architecture: int) -> Compiled:
    kernel, types, constants, warps = form
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in ALIGNED and name not in constants
    }
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    ptx = result.asm["ptx"]
    from compile_kernels import assembled

    registers, spilled = assembled(ptx)
    shared = result.metadata.shared
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    programs = min(by_registers, MOST_WARPS // warps, MOST_PROGRAMS, SHARED // (shared + 1024))
    loads, cold, near = (chain(ptx, table, other) for table, other in ((1, 1), (COLD, NEAR), (NEAR, NEAR)))
    wide = chain(ptx, COLD, NEAR, RARE)
    return Compiled(warps, registers, spilled, shared, programs, int(loads), cold, near, wide)


def chain(ptx: str, table: float, other: float, rare: tuple[Any, ...] = (*RARE, *WIDE)) -> float:
    """The longest chain of loads, each at its cost: `table` for one of the arena's words. Loops count once. A branch
    waits for what it tests, and all after it for the branch, because a warp issues in order. rare: not counted."""
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
            if re.search(r"(ld|atom)\.global", text) and not _calls(where, rare):
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


def step_us(forms: dict[str, Compiled], rows: int, vocabulary: int, kind: str) -> dict[str, float]:
    """Estimated µs of a step, and of one write of its logits. kind: "cold", "near" or "wide"."""
    write = rows * vocabulary * 2 / BANDWIDTH

    def latency(form: Compiled) -> float:
        us: float = getattr(form, f"us_{kind}")
        return us

    if vocabulary <= kernels.WHOLE:
        (form,) = (forms[name] for name in forms if name == f"step, {vocabulary:,} logits")
        waves = -(-rows // (SMS * form.programs))
        return {"step": waves * latency(form) + write, "write": write}
    walk, mask = forms["walk, no drafts"], forms["mask"]
    span = min(vocabulary, kernels.SPAN)
    programs = rows * -(-vocabulary // span)
    one = latency(mask) + span * 2 / (BANDWIDTH / SMS)  # one program's, alone on its SM
    masks = max(write + one, -(-programs // (SMS * mask.programs)) * one)
    return {"step": -(-rows // (SMS * walk.programs)) * latency(walk) + masks, "write": write}


def kernels_of(architecture: int) -> dict[str, Compiled]:
    return {name: costs(form, architecture) for name, form in variants().items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--architectures", type=int, nargs="+", default=[80, 90, 100])
    arguments = options.parse_args()
    report, rows, steps = Report(arguments), list[Row](), list[Row]()
    for architecture in arguments.architectures:
        forms = kernels_of(architecture)
        rows += [{"sm": architecture, "kernel": name, **form._asdict()} for name, form in forms.items()]
        kinds = {"cold": "outside the L2 cache", "near": "in the L2 cache", "wide": "outside it, wide rows"}
        for many, vocabulary in ((140, 2_048), (512, 151_936)) if architecture == 90 else ():
            for kind, where in kinds.items():
                us = step_us(forms, many, vocabulary, kind)
                row = {"rows": many, "vocabulary": vocabulary, "tables": where}
                row |= {"step, µs": us["step"], "one write, µs": us["write"], "step / write": us["step"] / us["write"]}
                steps.append(row)
    report.add("kernels", rows)
    report.add("steps", steps)


if __name__ == "__main__":
    main()
