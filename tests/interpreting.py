"""Triton's interpreter adapts its language once a process, not at each call of a kernel and of a kernel's functions.

Each time it looks at all that the language has, which took a third of the time of the tests of kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from triton.runtime import interpreter


def adapt_once() -> None:
    """Let what the interpreter does to its language stay, as it stays in `tl.core` anyway."""
    adapt, scope = interpreter._patch_lang, interpreter._LangPatchScope
    adapted, known = set(), set[Callable]()

    def adapt_new(function: Callable) -> interpreter._LangPatchScope:
        """Return changes to undo: none."""
        if function not in known:
            used = {one for one in function.__globals__.values() if inspect.ismodule(one)}
            languages = used & {interpreter.tl, interpreter.tl.core}
            if not languages or languages - adapted:
                adapt(function)
            adapted.update(languages)
            known.add(function)
        return scope()

    interpreter._patch_lang = adapt_new
