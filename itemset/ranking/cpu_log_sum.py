"""The log-sum-exp of logits in Numba: read once, and so written that a core takes eight or sixteen at once."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from itemset.trie.pointers import compiled

_LOG2_E = np.float32(np.log2(np.e))
# 2^x for x from -1/2 to 1/2, as exactly as a float32 has it.
_POLYNOMIAL = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=np.polynomial.Polynomial)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(value) for value in _POLYNOMIAL.coef)
_ROUNDS = np.float32(3 << 22)  # added to a small float32, it leaves no room for a fraction
_GLANCE = 64  # logits whose greatest is base enough for all, but if another is far above it
_FAR = np.float32(2.0**100)


def as_float(value: Any) -> Any:
    """Return a logit as float32; an integer is the bits of a bfloat16."""
    raise NotImplementedError  # in compiled code it is one of these


@overload(as_float)
def _as_float(value):
    if isinstance(value, types.Integer):
        return lambda value: np.int32(np.int32(value) << np.int32(16)).view(np.float32)
    return lambda value: value


@compiled
def _greatest(logits):
    """Compare them as integers, of which a core takes eight or sixteen at once."""
    most = np.int32(-(1 << 31))
    for i in range(len(logits)):
        most = max(most, ordered(np.float32(as_float(logits[i])).view(np.int32)))
    return np.int32(ordered(most)).view(np.float32)


@compiled
def ordered(bits):
    """The bits of a float32 as an integer that is ordered as the floats are; and back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def log_sum(logits):
    """Return the log-sum-exp. The greatest logit is looked for only if the sum would leave the float32s without it."""
    base = _greatest(logits[:_GLANCE])
    total = _sum_of_powers(logits, base)
    if not total < _FAR:  # or no number
        base = _greatest(logits)
        total = _sum_of_powers(logits, base)
    return base + np.log(total)


@compiled(fastmath={"reassoc", "contract"})
def _sum_of_powers(logits, base):
    """The sum of e^(logit - base): in any order, so that a core takes eight or sixteen at once.

    By index: over the values themselves, Numba 0.68 makes a loop that takes one at a time, and loses digits.
    """
    total = np.float32(0)
    for i in range(len(logits)):
        total += _power(as_float(logits[i]) - base)
    return total


@compiled(fastmath={"contract"})  # what `reassoc` would do to a sum and a difference of the same is no rounding
def _power(x):
    """Return e^x by plain operations; 2^127 for more than that."""
    power = x * _LOG2_E
    power = np.float32(-126) if power < np.float32(-126) else power  # nan stays nan
    power = np.float32(127) if power > np.float32(127) else power
    rounded = np.float32(power + _ROUNDS)
    x = power - (rounded - _ROUNDS)
    part = np.float32(((((_C5 * x + _C4) * x + _C3) * x + _C2) * x + _C1) * x + _C0)
    # The last bits of `rounded` are the whole number, and go to where a float32 has its exponent.
    return np.int32(part.view(np.int32) + (rounded.view(np.int32) << np.int32(23))).view(np.float32)
