"""How to launch kernels: for how many multiprocessors, and early, while the kernel before still runs.

Programmatic dependent launch (CUDA Programming Guide) starts a kernel before its predecessor has ended. So the launch
itself costs no time, nor do the weights that the kernel reads meanwhile. Every program of such a kernel must call
`wait_for_predecessor` before it loads anything that its predecessor writes, before it stores anything that its
predecessor uses, and before it ends. After that call the predecessor is complete, and so are all kernels before it.

A program may load weights before that call. So the host must launch a kernel that is not early, such as torch's,
between a kernel that writes weights and the first early one.

A kernel lets its successor start only after its own wait has ended. Otherwise many kernels would be resident at once,
and the later ones would hold the shared memory that the next one needs. So when a kernel starts, all kernels before its
predecessor are complete: `load_complete` loads what they wrote, before the wait.

A multiprocessor divides one memory between its L1 cache and shared memory, and anew only when no program runs on it.
Where a program takes more than 48 KB of shared memory, Triton asks for the smallest L1 cache. A product of one row that
starts beside such programs loads its weight through that, and so do the products behind it, which follow without a gap:
layers of 8b took 116 us instead of 101 on an H200. So such programs start their successor last.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS_WHEN_INTERPRETED = 4
RESERVED_BYTES = 2048  # of a program's shared memory, for what is no tile
LINE = tl.constexpr(128)  # bytes that the L2 cache fetches at once
COPIED_BYTES = 16  # at multiples of so many begin the rows that tensor-memory copies read and write

_thread = threading.local()


@contextmanager
def recording() -> Iterator[None]:
    """Say that a graph records what this thread launches, or that this is a trial run before it does.

    The host's time for such a launch does not count.
    """
    before, _thread.records = is_recording(), True
    try:
        yield
    finally:
        _thread.records = before


def is_recording() -> bool:
    """Return whether this thread is within `recording`."""
    return getattr(_thread, "records", False)


def launch_options(x: Tensor, fused: bool = True) -> dict[str, bool]:
    """Return the options for a kernel on x's device; they launch it early if the device can do that.

    fused: the compiler may round a product and a sum once together. Every launch says so: Triton's default changes
    """
    return _options_on(x.device, fused)


@functools.cache
def _options_on(device: torch.device, fused: bool) -> dict[str, bool]:
    early = {"EARLY": True, "launch_pdl": True} if can_launch_early(device) else {"EARLY": False}
    return {**early, "enable_fp_fusion": fused}


@functools.cache
def can_launch_early(device: torch.device) -> bool:
    """Return whether a kernel can start while the one before it runs: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def can_copy(*matrices: Tensor) -> bool:
    """Return whether tensor-memory copies can read these matrices, whose rows follow each other."""
    return all(
        matrix.is_contiguous() and (matrix.data_ptr() | matrix.shape[-1] * matrix.itemsize) % COPIED_BYTES == 0
        for matrix in matrices
    )


@functools.cache
def is_measured(device: torch.device) -> bool:
    """Return whether the device is an H100 or H200, or built as these: there, all kernels were compared with others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; a few for interpreted kernels, so that programs share work too."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WHEN_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 20
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def cdiv(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up. A call of triton.cdiv takes the host 2 us, a fifth of a launch."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is `number`, which is 1 or more, or above; see cdiv for why."""
    return 1 << (number - 1).bit_length()


def launch_in_between(device: torch.device) -> None:
    """Launch a kernel that is not early: after it, an early kernel may load what was just written before its wait."""
    torch.zeros(1, device=device)


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr, START_SUCCESSOR: tl.constexpr = True):
    """Wait until the kernel before has ended and its stores are visible; then let the next kernel start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if START_SUCCESSOR:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_complete(ptr, mask=None, other=None):
    """Load, before the wait, what kernels before the predecessor wrote. The L1 cache may still hold older numbers."""
    return tl.load(ptr, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def fetch(ptrs, EARLY: tl.constexpr):
    """Let the L2 cache fetch the 128 bytes at each address, before the wait, if a kernel is launched early at all."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fetch_rows(ptr, row, end, columns, first, COUNT: tl.constexpr, EARLY: tl.constexpr):
    """Let the L2 cache fetch COUNT numbers, from column `first` on, of a matrix's rows before `end`; see fetch."""
    PER_LINE: tl.constexpr = LINE * 8 // ptr.dtype.element_ty.primitive_bitwidth
    column = tl.minimum(first + tl.arange(0, (COUNT + PER_LINE - 1) // PER_LINE) * PER_LINE, columns - 1)
    fetch(ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * columns + column[None, :], EARLY)


@triton.jit
def start_successor(EARLY: tl.constexpr):
    """Let the next kernel start; for a long kernel, whose successor would only take up room if it started earlier."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
