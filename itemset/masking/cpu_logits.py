"""Setting to -inf the logits that a bitmask omits, 32 at once: LLVM makes of a word's bits what lanes are selected by.

To look at each bit took four to twenty times longer.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from itemset.trie.pointers import compiled, load16, load32, load64, store16, store32, store64

_ALL = 0xFFFFFFFF


def _forbid_word(size: int) -> Any:
    """Make what sets to `forbidden` those of 32 elements of `size` bytes at an address whose bits are clear."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, word, forbidden = arguments
        lane, one = ir.IntType(8 * size), ir.VectorType(ir.IntType(8 * size), 1)
        value = forbidden if size == 8 else builder.trunc(forbidden, lane)
        first = builder.insert_element(ir.Constant(one, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), 32), [0] * 32)
        others = builder.shuffle_vector(first, ir.Constant(one, ir.Undefined), zeros)
        place = builder.inttoptr(address, ir.VectorType(lane, 32).as_pointer())
        bits = builder.bitcast(builder.trunc(word, ir.IntType(32)), ir.VectorType(ir.IntType(1), 32))
        with builder.if_else(builder.icmp_signed("==", word, ir.Constant(word.type, 0))) as (none, some):
            with none:  # nothing is read of a word without a bit
                builder.store(others, place, align=size)
            with some:
                builder.store(builder.select(bits, builder.load(place, align=size), others), place, align=size)
        return context.get_dummy_value()

    kind = types.void(types.int64, types.int64, types.int64)
    return intrinsic(lambda _typing, address, word, forbidden: (kind, generate))


_ForbidWord = Callable[[Any, Any, Any], None]
_forbid16: _ForbidWord = _forbid_word(2)
_forbid32: _ForbidWord = _forbid_word(4)
_forbid64: _ForbidWord = _forbid_word(8)


@compiled
def forbid(logits: int, size: int, count: int, words: Any, forbidden: int) -> None:
    """Set to -inf, `forbidden`, the logits whose bit is clear. logits: the address of `count`, of `size` bytes each."""
    whole = count >> 5
    for at in range(whole):
        word, place = load32(words, at), logits + (at << 5) * size
        if word == _ALL:
            continue
        if size == 4:
            _forbid32(place, word, forbidden)
        elif size == 2:
            _forbid16(place, word, forbidden)
        else:
            _forbid64(place, word, forbidden)
    for token in range(whole << 5, count):
        if load32(words, whole) >> (token & 31) & 1 == 0:
            put_logit(logits, size, token, forbidden)


@compiled
def logit(logits: int, size: int, token: int) -> Any:
    return load32(logits, token) if size == 4 else load16(logits, token) if size == 2 else load64(logits, token)


@compiled
def put_logit(logits: int, size: int, token: int, value: int) -> None:
    if size == 4:
        store32(logits, token, value)
    elif size == 2:
        store16(logits, token, value)
    else:
        store64(logits, token, value)
