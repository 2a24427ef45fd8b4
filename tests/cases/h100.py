"""What an H100 would run, on a machine without one: a script that compiles the kernels of one of launches.LAUNCHES.

    python tests/cases/h100.py ROOM [--whole]

It prints a line of JSON for each kernel. Tests run it in a process of its own, because theirs interprets kernels.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
from launches import LAUNCHES
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

DEVICE, CAPABILITY = torch.device("cuda", 0), (9, 0)
MULTIPROCESSORS = 132
SHARED_BYTES = 232_448  # that a program can have
USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores")


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes: bytes of shared memory, a thread's registers, and bytes that it stores for lack of these."""

    launch: str
    kernel: str
    shared: int
    registers: int
    spilled: int


class H100(DriverBase):
    """A driver that says what the device is, and cannot launch."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES})
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: 0
        self.set_current_device = lambda _: None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], warp_size=32)

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> None:
        return None


class OnDevice(TorchFunctionMode):
    """Tensors have no memory, and say that they are on the device."""

    ANSWERS = ((Tensor.device.__get__, DEVICE), (Tensor.is_cuda.__get__, True))

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for getter, answer in self.ANSWERS:
            if func == getter:
                return answer
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def compile_instead() -> list[tuple[str, Any, str]]:
    """Let launches compile alone; returns a list that grows: a kernel's name, the kernel, and what ptxas says of it."""
    driver.set_active(H100())
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    found, run = [], JITFunction.run

    def compile_kernel(self: JITFunction, *args: Any, grid: object, **options: Any) -> object:
        pointers = [MockTensor(arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *pointers, grid=grid, **{**options, "warmup": True})
        found.append((self.fn.__name__, kernel, log.getvalue()))
        return kernel

    JITFunction.run = compile_kernel
    return found


def compiled(room: str, is_whole: bool) -> Iterator[Compiled]:
    """Yield what each kernel of a room takes, once."""
    found = compile_instead()
    for launch in LAUNCHES[room]:
        if is_whole or launch.often:
            with torch.device("meta"), OnDevice():
                launch.call()
        for name, kernel, log in found:
            if (used := USED.search(log)) and (spilled := SPILLED.search(log)):  # else it was compiled before
                yield Compiled(launch.name, name, kernel.metadata.shared, int(used[1]), int(spilled[1]))
        found.clear()


if __name__ == "__main__":
    for one in compiled(sys.argv[1], "--whole" in sys.argv):
        print(json.dumps(asdict(one)), flush=True)
