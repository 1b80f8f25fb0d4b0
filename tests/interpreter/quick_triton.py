"""Makes Triton's interpreter three times as fast: what it works out again at each operation is worked out once.

It computes the same (`tests/test_quick_triton.py`). Nothing here knows a kernel.
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property
from typing import Any

import numpy as np


def make_quick(interpreter: Any) -> None:
    """interpreter: the module `triton.runtime.interpreter`."""
    _let_loops_count_in_numbers_with_a_type(interpreter)
    _patch_language_once(interpreter)
    _launch_without_copies(interpreter)
    _make_handles_light(interpreter)
    _know_types(interpreter)
    _skip_checks_of_equal_types(interpreter)


def _let_loops_count_in_numbers_with_a_type(interpreter: Any) -> None:
    """A loop's variable is a Python number to the interpreter, and to a compiled kernel a scalar, which has `to`."""

    class Counted(int):
        def to(self, dtype: Any) -> Any:
            return interpreter.interpreter_semantic.to_tensor(int(self)).to(dtype)

    patch_core = interpreter._patch_lang_core

    def patch_core_and_loops(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        numbers = lang.range
        lang.range = lambda *args, **kwargs: map(Counted, numbers(*args, **kwargs))

    interpreter._patch_lang_core = patch_core_and_loops


class _Patched:
    """What stands in place of the scope of a launch: nothing is put back after it."""

    def restore(self) -> None:
        pass


def _patch_language_once(interpreter: Any) -> None:
    """The interpreter replaces the functions of triton.language at each launch, and again at each call inside it.

    Which modules it patches depends only on the globals of the function. In a process that interprets, nothing needs
    the functions as they were.
    """
    import triton.language as tl

    patch_language, patched, scope = interpreter._patch_lang, set(), _Patched()

    def patch_language_once(function: Any) -> _Patched:
        namespace = id(function.__globals__)
        if namespace not in patched:
            patched.add(namespace)
            patch_language(function)
        return scope

    asks = tl.core.builtin(
        lambda: None
    ).__code__  # of a function around each, which asks whether there is a `_semantic`

    def patch_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is asks else member
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_lang = patch_language_once
    interpreter._patch_attr = patch_function


def _launch_without_copies(interpreter: Any) -> None:
    """All tensors are the host's: the interpreter would make another tensor of each, and copy each onto itself."""
    builder, convert = interpreter.interpreter_builder, interpreter._implicit_cvt

    @cache
    def parameters(function: Any) -> inspect.Signature:
        return inspect.signature(function)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        signature = parameters(self.fn)
        bound = signature.bind(*args, **{name: kwargs[name] for name in kwargs if name in signature.parameters})
        bound.apply_defaults()
        constants = set(self.constexprs)
        given = {name: value if name in constants else convert(value) for name, value in bound.arguments.items()}
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        interpreter._patch_lang(self.fn)
        grid = self.grid(given) if callable(self.grid) else self.grid
        x, y, z = (*grid, 1, 1)[:3]
        builder.set_grid_dim(x, y, z)
        try:
            for index in np.ndindex(x, y, z):
                builder.grid_idx = index
                self.fn(**given)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch


def _make_handles_light(interpreter: Any) -> None:
    """A handle holds an array and its type: the interpreter looks at each whether they go together."""

    class Handle(interpreter.TensorHandle):
        def __init__(self, data: Any, dtype: Any) -> None:
            self.data, self.dtype, self.attr = data, dtype, {}

    interpreter.TensorHandle = Handle


def _know_types(interpreter: Any) -> None:
    """Types are compared by names, and those of blocks are written anew for each operation."""
    import triton.language as tl

    core, scalar_type, pointer, block, constant = tl.core, tl.dtype, tl.pointer_type, tl.block_type, tl.constexpr
    numpy_type, equal, unwrap = interpreter._get_np_dtype, scalar_type.__eq__, core._unwrap_if_constexpr
    make_block = block.__init__
    integers = frozenset(scalar_type.SINT_TYPES + scalar_type.UINT_TYPES)
    known: dict[str, np.dtype] = {}
    addresses, plain = np.dtype(np.uint64), frozenset((tl.tensor, int, float, bool, str, type(None), scalar_type))

    def numpy_type_of(dtype: Any) -> np.dtype:
        if isinstance(dtype, block):
            dtype = dtype.element_ty
        if isinstance(dtype, pointer):
            return addresses
        if dtype.name not in known:
            known[dtype.name] = numpy_type(dtype)
        return known[dtype.name]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors

    @cache
    def shape_of(*sizes: int) -> tuple[Any, int, tuple[Any, Any]]:
        own = block.__new__(block)
        make_block(own, tl.int8, list(sizes))
        return own.shape, own.numel, (constant(own.numel), core.tuple([constant(size) for size in sizes]))

    def make_known_block(self: Any, element: Any, shape: Any) -> None:
        self.element_ty = element
        self.shape, self.numel, self.of_tensors = shape_of(*(core._unwrap_if_constexpr(size) for size in shape))

    def with_element_type(self: Any, scalar: Any) -> Any:
        others = self.__dict__.setdefault("others", {})
        if scalar.name not in others:
            others[scalar.name] = block(scalar, self.shape)
        return others[scalar.name]

    def to_ir(self: Any, builder: Any) -> Any:
        return self

    interpreter._get_np_dtype = numpy_type_of
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    scalar_type.__eq__ = lambda self, other: self is other or equal(self, other)
    scalar_type.is_int = lambda self: self.name in integers
    scalar_type.of_tensors = constant(1), core.tuple([])
    block.__init__, block.name = make_known_block, cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    block.name.__set_name__(block, "name")
    block.with_element_ty, block.to_ir, pointer.to_ir = with_element_type, to_ir, to_ir
    tl.tensor.__init__ = make_tensor


def _skip_checks_of_equal_types(interpreter: Any) -> None:
    """Most operations are of two tensors of one type and shape, or of one and a number: nothing is converted."""
    import triton.language as tl

    own, handle, tensor = type(interpreter.interpreter_semantic), interpreter.TensorHandle, tl.tensor
    check, broadcast = own.binary_op_type_checking_impl, own.broadcast_impl_value
    cast, number = own.cast, own.scalar_constant
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    ranges = {name: np.iinfo(name) for name in integers}
    limits = {name: (int(one.min), int(one.max)) for name, one in ranges.items()}
    floats = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}  # what / and % give, too
    arrays = {name: one.dtype for name, one in ranges.items()} | floats
    alike = {*arrays, "int1"}

    def broadcast_unless_equal(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        if one.shape is other.shape:
            return one, other
        return broadcast(self, one, other)

    def joins(scalar: Any, value: Any) -> bool:
        """Whether a number becomes one of this type beside a tensor of it."""
        if type(value) is int and (limit := limits.get(scalar.name)):
            return limit[0] <= value <= limit[1]
        return type(value) in (int, float) and scalar.name in floats

    @cache
    def common(self: Any, one: Any, other: Any, div: bool) -> Any:
        return self.computation_type_impl(one, False, other, False, div)

    def check_unless_equal(
        self: Any, one: Any, other: Any, left: Any = False, right: Any = False, arithmetic: Any = True, div: Any = False
    ) -> tuple[Any, Any]:
        if isinstance(one, tensor):
            scalar = one.dtype
            if isinstance(other, tensor):
                name = other.dtype.name
                if scalar.name == name in alike or (left and scalar.is_ptr() and name in integers):
                    return broadcast_unless_equal(self, one, other)
                if arithmetic and scalar.name in arrays and name in arrays:
                    both = common(self, scalar, other.dtype, div)
                    return broadcast_unless_equal(self, self.cast(one, both), self.cast(other, both))
            elif arithmetic and joins(scalar, other):
                return broadcast_unless_equal(self, one, constant(self, other, scalar))
        elif arithmetic and isinstance(other, tensor) and joins(other.dtype, one):
            return broadcast_unless_equal(self, constant(self, one, other.dtype), other)
        return check(self, one, other, left, right, arithmetic, div)

    def cast_unless_equal(self: Any, one: Any, to: Any, rounding: Any = None) -> Any:
        to = to.scalar
        if one.dtype is to:
            return one
        if rounding is None and one.dtype.name in arrays and to.name in arrays:
            whole = one.type.with_element_ty(to) if one.type.is_block() else to
            return tensor(handle(one.handle.data.astype(arrays[to.name]), to), whole)
        return cast(self, one, to, rounding)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if (array := arrays.get(dtype.name)) is None:
            return number(self, value, dtype)
        return tensor(handle(np.array([value], array), dtype), dtype)

    own.broadcast_impl_value = broadcast_unless_equal
    own.binary_op_type_checking_impl = check_unless_equal
    own.cast = cast_unless_equal
    own.scalar_constant = constant
