"""What Triton's interpreter need not do for each call of a kernel, and of a kernel's functions, it does once a process.

All that a kernel computes stays as it is; the tests of kernels take less than half of the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
from triton.runtime import interpreter


def hasten() -> None:
    """Let this process interpret kernels without what is done again and again, and what is done for nothing."""
    adapt_once()
    keep_types()
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
