"""What Triton's interpreter makes of operations on tensors and numbers of all types.

Run as a program, it prints this by the interpreter as Triton has it.
"""

from __future__ import annotations

import warnings
from itertools import product

import torch
import triton
import triton.language as tl

TYPES = [torch.bool, *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))]
TYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@triton.jit
def _arithmetic(one, other, out, size: tl.constexpr):
    place = tl.arange(0, size)
    a, b = tl.load(one + place), tl.load(other + place)
    row, column = tl.load(one + place)[:, None], tl.load(other + tl.arange(0, 4))[None, :]
    tl.store(out + place, (a + b).to(tl.float64))
    tl.store(out + size + place, (a * b - 3 * a).to(tl.float64))
    tl.store(out + 2 * size + place, tl.where(a < b, a, b + 1).to(tl.float64))
    tl.store(out + 3 * size + place, (a == tl.load(other)).to(tl.int32).to(tl.float64))
    tl.store(out + 4 * size + place, tl.sum((row + column).to(tl.float64), axis=1))
    tl.store(out + 5 * size + place, (2.5 * a + 7).to(tl.float64), mask=place < 5)


@triton.jit
def _of_bits(one, other, out, size: tl.constexpr):
    place = tl.arange(0, size)
    a, b = tl.load(one + place), tl.load(other + place)
    tl.store(out + place, ((a & b) | (a ^ 5)).to(tl.float64))
    tl.store(out + size + place, (tl.maximum(a, b) >> 1).to(tl.float64))
    tl.store(out + 2 * size + place, tl.minimum(a, b).to(tl.float64))
    tl.store(out + 3 * size + place, ((a << 2) + tl.program_id(0)).to(tl.float64))


def results() -> list[str]:
    """A line for each pair of types: the types and what comes of them, or the error."""
    warnings.simplefilter("ignore")  # 200 + 200 does not fit in 8 bits
    found, numbers = [], torch.tensor([0, 1, 3, 5, 100, 127, 2, 64])
    for kernel, one, other in product((_arithmetic, _of_bits), TYPES, TYPES):
        out = torch.full((64,), -1.0, dtype=torch.float64)
        try:
            kernel[(1,)](numbers.to(one), numbers.flip(0).to(other), out, size=8)
            found.append(f"{kernel.__name__} {one} {other} {out.tolist()}")
        except Exception as error:
            found.append(f"{kernel.__name__} {one} {other} {type(error.__cause__).__name__}")
    return found


if __name__ == "__main__":
    print(*results(), sep="\n")
