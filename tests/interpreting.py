"""What Triton's interpreter need not do for each call of a kernel, and of a kernel's functions, it does once a process.

All that a kernel computes stays as it is, to the bit; the tests of kernels take a third of the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter


def hasten() -> None:
    """Let this process interpret kernels without what is done again and again, and what is done for nothing."""
    adapt_once()
    call_at_once()
    unwrap_at_once()
    keep_types()
    keep_shapes()
    keep_sizes()
    Operations.keep()
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else it looks for sums that overflow, a third of its work, and drops what it finds
        builder.options = replace(builder.options, sanitize_overflow=False)


def keep_types() -> None:
    """Let the interpreter keep which type of NumPy is which of its own: it makes a table of all to look one up."""
    find = interpreter._get_np_dtype
    find_scalar = cache(find)

    def find_known(dtype: interpreter.tl.dtype) -> np.dtype:
        return find(dtype.scalar) if dtype.scalar.is_ptr() else find_scalar(dtype.scalar)

    interpreter._get_np_dtype = find_known


def keep_shapes() -> None:
    """Let types of blocks share what their shape says, and tensors what their type says: most live for one sum."""
    tl, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    init_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast, equals = semantic.broadcast_impl_value, tl.core.tuple.__eq__
    of_types, of_tensors = dict[tuple[Any, ...], dict[str, Any]](), dict[str, dict[str, Any]]()
    shapes = dict[tuple[Any, ...], Any]()

    def init_known_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in shape])
        if key not in of_types:
            init_type(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            of_types[key] = dict(self.__dict__)
        self.__dict__.update(of_types[key])

    def init_known_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in of_tensors:
            init_tensor(self, handle, type)
            of_tensors[type.name] = dict(self.__dict__)
        self.__dict__.update(of_tensors[type.name], handle=handle, type=type)

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        is_alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if is_alike else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = init_known_type, init_known_tensor
    semantic.broadcast_impl_value = broadcast_unlike
    tl.core.tuple.__eq__ = lambda self, other: tl.constexpr(True) if self is other else equals(self, other)
    tl.block_type.with_element_ty = cache_by_name(tl.block_type.with_element_ty)
    tl.block_type.to_ir = cache_by_name(tl.block_type.to_ir)


def cache_by_name(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Keep what a type's method returns for another type, or for the interpreter's builder. Equal types have one name.

    A pointer's name lacks where it points, which interpreted kernels do not say.
    """
    known = dict[tuple[str, str], Any]()

    def find(self: Any, other: Any) -> Any:
        key = self.name, getattr(other, "name", "")
        if key not in known:
            known[key] = method(self, other)
        return known[key]

    return find


def keep_sizes() -> None:
    """Let NumPy's type of a type's numbers be checked for its size once, and an index say where there is a new axis."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    check, fitting = handle.__post_init__, set[tuple[np.dtype, str]]()

    def check_unknown(self: Any) -> None:
        key = self.data.dtype, self.dtype.name
        if key not in fitting:
            check(self)
            fitting.add(key)

    def expand(self: Any, arg: Any, axis: int) -> Any:
        return handle(arg.data[(*(slice(None),) * axis, None)], arg.dtype.scalar)

    handle.__post_init__, builder.create_expand_dims = check_unknown, expand


class Operations:
    """What two operands' types say of what is computed: it is found out once, and NumPy broadcasts as it computes.

    An operand of the type that it is wanted of may have fewer numbers than the type: NumPy repeats them.
    """

    BITWISE = np.bitwise_and, np.bitwise_or, np.bitwise_xor  # for bits, too, they are what the interpreter computes
    NAMES = (
        *("add", "sub", "mul", "less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal"),
        *("and_", "or_", "xor_", "shl", "lshr"),
    )

    def __init__(self) -> None:
        semantic, builder = type(interpreter.interpreter_semantic), interpreter.InterpreterBuilder
        self.check, self.compute = semantic.binary_op_type_checking_impl, builder.binary_op
        self.wanted = dict[tuple[Any, ...], tuple[Any, Any]]()  # operands' types
        self.numbers = dict[tuple[Any, ...], Any]()  # Python's, as the interpreter has them
        self.seen: list[tuple[Any, ...]] | None = None  # what is checked and computed, while a method is watched

    @classmethod
    def keep(cls) -> None:
        """Let the interpreter keep them."""
        self, semantic = cls(), type(interpreter.interpreter_semantic)
        semantic.binary_op_type_checking_impl = lambda *args, **options: self.check_once(*args, **options)
        interpreter.InterpreterBuilder.binary_op = lambda *args: self.compute_seen(*args)
        for name in self.NAMES:
            setattr(semantic, name, self.keep_steps(getattr(semantic, name)))

    def keep_steps(self, method: Callable) -> Callable:
        """Return a method that goes straight to NumPy's function if it once came to one, and to nothing else."""
        tl, handle, known = interpreter.tl, interpreter.TensorHandle, dict[tuple[Any, ...], Any]()

        def compute(semantic: Any, lhs: Any, rhs: Any, *how: bool, **more: bool) -> Any:
            key = (*name_of(semantic, lhs), *name_of(semantic, rhs), *how, *more.items())
            if found := known.get(key):
                left, right, op, dtype, kind = found
                a, b = self.convert(semantic, lhs, left).handle, self.convert(semantic, rhs, right).handle
                out = op(a.data, b.data)
                if out.dtype == dtype:
                    return tl.tensor(handle(out, a.dtype.scalar), kind)
            self.seen = seen = []
            try:
                result = method(semantic, lhs, rhs, *how, **more)
            finally:
                self.seen = None
            if len(seen) == 2 and all(seen):
                known[key] = *seen[0], *seen[1], result.type
            return result

        return compute

    def check_once(self, semantic: Any, lhs: Any, rhs: Any, *how: bool, **more: bool) -> Any:
        key = (*name_of(semantic, lhs), *name_of(semantic, rhs), *how, *more.items())
        if key not in self.wanted:
            self.wanted[key] = tuple(operand.type for operand in self.check(semantic, lhs, rhs, *how, **more))
        wanted = self.wanted[key]
        if self.seen is not None:
            self.seen.append(wanted)
        return self.convert(semantic, lhs, wanted[0]), self.convert(semantic, rhs, wanted[1])

    def compute_seen(self, builder: Any, lhs: Any, rhs: Any, op: np.ufunc) -> Any:
        result = self.compute(builder, lhs, rhs, op)
        if self.seen is not None:
            kinds, dtype = (lhs.data.dtype, rhs.data.dtype), result.data.dtype
            is_plain = np.bool_ not in kinds or op in self.BITWISE
            is_whole = is_plain and op.resolve_dtypes((*kinds, None))[2] == dtype  # else more is done to the result
            self.seen.append((op, dtype) if is_whole else ())
        return result

    def convert(self, semantic: Any, operand: Any, wanted: Any) -> Any:
        tl = interpreter.tl
        if type(operand) is not tl.tensor:
            return tl.tensor(self.of_number(semantic, operand, wanted.scalar), wanted)
        if operand.type.name == wanted.name:
            return operand
        return tl.tensor(semantic.cast(operand, wanted.scalar).handle, wanted)

    def of_number(self, semantic: Any, number: Any, dtype: Any) -> Any:
        key = type(number), str(number), dtype.name  # 0.0 and -0.0 are equal
        if key not in self.numbers:
            self.numbers[key] = semantic._cast_to_computation_type(number, dtype).handle
        return self.numbers[key]


def name_of(semantic: Any, operand: Any) -> tuple[str, bool]:
    """Return the name of an operand's type, and whether it is a tensor."""
    is_tensor = type(operand) is interpreter.tl.tensor
    return (operand.type if is_tensor else semantic.to_tensor_type(operand)).name, is_tensor


def unwrap_at_once() -> None:
    """Let what is plainly no constant, or one of Triton's, be seen at once, and a type equal itself."""
    core = interpreter.tl.core
    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrap_known(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_known
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)


def call_at_once() -> None:
    """Let a function of the language be called without what finds out each time that an interpreter calls it."""
    semantic = interpreter.interpreter_semantic

    def adapt(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, _semantic: object = None, **options: Any) -> Any:
            return function(*args, _semantic=semantic, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = adapt


def adapt_once() -> None:
    """Let the interpreter adapt its language once, and leave it adapted: it looks at all that the language has."""
    adapt, adapted, known = interpreter._patch_lang, set(), set[Callable]()

    def adapt_new(function: Callable) -> SimpleNamespace:
        """Return what will undo nothing."""
        if function not in known:
            used = {one for one in function.__globals__.values() if inspect.ismodule(one)}
            languages = used & {interpreter.tl, interpreter.tl.core}
            if not languages or languages - adapted:
                adapt(function)
            adapted.update(languages)
            known.add(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = adapt_new
