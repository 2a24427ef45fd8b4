"""Compiles the kernels of steps before they run, all of them side by side: compiling is most of a first start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from warnings import catch_warnings

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.process.bar import Advance, ignore

Step = Callable[[], object]

_lock = threading.Lock()  # held while launches compile alone


def compile_kernels(steps: Sequence[Step], device: torch.device, advance: Advance = ignore) -> None:
    """Compile the kernels that steps launch, and load them onto the device. No kernel runs.

    advance: hears of each kernel, in any thread

    The steps run torch's own operations alone. They see zeros where kernels would write, and their results mean
    nothing. Raises the error of a step, or of a kernel that does not compile.
    """

    def collect() -> None:
        with AsyncCompileMode(pool), _launches_compile(), _Zeros():
            for step in steps:
                step()

    # Triton sets filters of warnings and sets them back, which in threads leaves some behind.
    with catch_warnings(), _Compilers(device, advance) as pool:
        copy_context().run(collect)  # Triton 3.5 leaves its mode set behind an error


class _Compilers(ThreadPoolExecutor):
    """Threads that compile and load, more than there are cores: some wait for other programs, such as ptxas."""

    def __init__(self, device: torch.device, advance: Advance) -> None:
        super().__init__(initializer=torch.cuda.set_device, initargs=(device,))
        self._advance = advance

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(lambda: self._loaded(fn(*args, **kwargs)))

    def _loaded(self, kernel: Any) -> Any:
        """Load a kernel. Some versions of Triton call a C compiler now, for what launches it."""
        _ = kernel.run
        self._advance(1)
        return kernel


@contextmanager
def _launches_compile() -> Iterator[None]:
    """Let this thread's launches compile their kernels alone, which Triton can do for a single launch."""
    thread = threading.get_ident()
    with _lock:
        launch = JITFunction.run

        def run(kernel: JITFunction, *args: Any, **options: Any) -> Any:
            if threading.get_ident() == thread:
                options["warmup"] = True
            return launch(kernel, *args, **options)

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch


class _Zeros(TorchFunctionMode):
    """A context in which new memory holds zeros: any number there may be an index, which must be a valid one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.overrides."""
        made = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like):
            as_bytes(made).zero_()
        return made
