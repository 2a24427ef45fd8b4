"""What cards would run, on a machine without them: a script that compiles launches.LAUNCHES.

It reads lines of JSON, the arguments of Compiler.compile, and answers each with another. Tests run it as a process,
because theirs interprets kernels, and as one for all of a worker's tests, because it imports for seconds.
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
from cards import CARDS, Card
from launches import LAUNCHES
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores")
COPIED = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*? 0x([0-9a-f]+)")
MOVED = re.compile(r"ttg\.local_alloc %")
WIDEST = 16  # bytes that a thread copies at once


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes: bytes of shared memory, a thread's registers, and bytes that it stores for lack of these.

    narrowest: the fewest bytes that a thread copies at once while it computes
    moved: matrices that go from its registers to shared memory within a loop
    """

    launch: str
    name: str
    shared: int
    registers: int
    spilled: int
    narrowest: int
    moved: int


class Machine(DriverBase):
    """A driver that says what its devices are, CARDS in their order, and cannot launch."""

    def __init__(self) -> None:
        self.cards = list(CARDS.values())
        self.current = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: {"max_shared_mem": self.cards[index].shared_bytes}
        )
        self.get_current_device = lambda: self.current
        self.get_current_stream = lambda _: 0
        self.set_current_device = lambda _: None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def card(self, device: torch.device | None = None) -> Card:
        """Return a device's; None: the current one's"""
        return self.cards[self.current if device is None else device.index]

    def get_current_target(self) -> GPUTarget:
        major, minor = self.card().capability
        return GPUTarget("cuda", major * 10 + minor, warp_size=32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.current)

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> None:
        return None


class OnDevice(TorchFunctionMode):
    """Tensors have no memory, and say that they are on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.answers = ((Tensor.device.__get__, device), (Tensor.is_cuda.__get__, True))

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for getter, answer in self.answers:
            if func == getter:
                return answer
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class Compiler:
    """Lets launches compile alone."""

    def __init__(self) -> None:
        self.machine = Machine()
        driver.set_active(self.machine)
        torch.cuda.device_count = lambda: len(CARDS)
        torch.cuda.get_device_capability = lambda device=None: self.machine.card(device).capability
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(
            multi_processor_count=self.machine.card(device).multiprocessors
        )
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        self._found: list[tuple[str, Any, str]] = []  # a kernel's name, the kernel, and what ptxas says of it
        found, run = self._found, JITFunction.run

        def compile_kernel(self: JITFunction, *args: Any, grid: object, **options: Any) -> object:
            assert "enable_fp_fusion" in options, "each launch says it: Triton's default changes"
            in_tuples = [part for arg in args if isinstance(arg, tuple) for part in arg]
            assert not any(isinstance(part, TensorDescriptor) for part in in_tuples), "no launcher takes these"
            pointers = [MockTensor(arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
            with contextlib.redirect_stdout(io.StringIO()) as log:
                kernel = run(self, *pointers, grid=grid, **{**options, "warmup": True})
            found.append((self.fn.__name__, kernel, log.getvalue()))
            return kernel

        JITFunction.run = compile_kernel

    def compile(self, card: str, rooms: list[str], often: list[str]) -> dict[str, Any]:
        """Compile the launches of some rooms that have one of these for `often`; each kernel of a card once.

        Returns what the kernels take, and the errors of the launches that have one, by their names.
        """
        self.machine.current = list(CARDS).index(card)
        kernels, errors = [], {}
        for launch in (launch for room in rooms for launch in LAUNCHES[room] if launch.often in often):
            try:
                with torch.device("meta"), OnDevice(self.machine.get_active_torch_device()):
                    launch.call()
            except Exception as error:
                errors[launch.name] = f"{type(error).__name__}: {error}"
            kernels += self._take(launch.name)
        return {"kernels": [asdict(kernel) for kernel in kernels], "errors": errors}

    def _take(self, launch: str) -> Iterator[Kernel]:
        """Yield what the found kernels take; of one that was compiled before, ptxas says nothing."""
        while self._found:
            name, kernel, log = self._found.pop(0)
            if (used := USED.search(log)) and (spilled := SPILLED.search(log)):
                narrowest = min((int(copy[1], 16) for copy in COPIED.finditer(kernel.asm["ptx"])), default=WIDEST)
                moved = len(MOVED.findall(kernel.asm["ttgir"].partition("scf.for")[2]))
                yield Kernel(launch, name, kernel.metadata.shared, int(used[1]), int(spilled[1]), narrowest, moved)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed, by libraries too, is no answer
    compiler = Compiler()
    for line in sys.stdin:
        print(json.dumps(compiler.compile(*json.loads(line))), file=answers, flush=True)
