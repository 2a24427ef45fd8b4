"""What Triton's interpreter need not do for each call of a kernel, and of a kernel's functions, it does once a process.

All that a kernel computes stays as it is; the tests of kernels take less than half of the time.
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
    keep_types()
    keep_shapes()
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
    """Let types of blocks share what their shape says, and tensors what their type says: most live for one sum.

    Then two tensors of one type are seen at once, which need no cast and no broadcast.
    """
    tl, semantic = interpreter.tl, type(interpreter.interpreter_semantic)
    init_type, init_tensor, check = tl.block_type.__init__, tl.tensor.__init__, semantic.binary_op_type_checking_impl
    of_types, of_tensors = dict[tuple[Any, ...], dict[str, Any]](), dict[str, dict[str, Any]]()

    def init_known_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in shape])
        if key not in of_types:
            init_type(self, element_ty, shape)
            of_types[key] = dict(self.__dict__)
        self.__dict__.update(of_types[key])

    def init_known_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in of_tensors:
            init_tensor(self, handle, type)
            of_tensors[type.name] = dict(self.__dict__)
        self.__dict__.update(of_tensors[type.name], handle=handle, type=type)

    def check_unlike(self: Any, lhs: Any, rhs: Any, *pointers: bool, **more: bool) -> Any:
        is_known = type(lhs) is type(rhs) is tl.tensor and lhs.shape is rhs.shape and lhs.dtype is rhs.dtype
        if is_known and not more and len(pointers) < 3 and not lhs.dtype.is_ptr():
            return lhs, rhs
        return check(self, lhs, rhs, *pointers, **more)

    tl.block_type.__init__, tl.tensor.__init__ = init_known_type, init_known_tensor
    semantic.binary_op_type_checking_impl = check_unlike


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
