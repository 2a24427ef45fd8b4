"""What programs ask of the machine, and of images, and call to clean up, by vLLM's names."""

from __future__ import annotations

import gc
import os
import socket
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image


class Platform:
    """What computes: an NVIDIA GPU if there is one, and else the CPU."""

    device_name = device_type = property(lambda self: "cuda" if self.is_cuda() else "cpu")

    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return not self.is_cuda()

    def is_other(self) -> bool:
        """Whether it is anything else: never."""
        return False

    is_rocm = is_tpu = is_xpu = is_neuron = is_out_of_tree = is_other

    def device_count(self) -> int:
        """Return how many GPUs this process sees."""
        return torch.cuda.device_count()

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the name of a GPU, or "cpu"."""
        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"


class Environment(ModuleType):
    """A module whose names are variables of the environment; None: it is not set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("VLLM_"):
            return os.environ.get(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def convert_image_mode(image: Image, to_mode: str) -> Image:
    """Return an image in another mode, such as "RGB"."""
    return image if image.mode == to_mode else image.convert(to_mode)


def destroy_model_parallel() -> None:
    """Do nothing: no state outlives an LLM, whose close or deletion ends its processes."""


def destroy_distributed_environment() -> None:
    """Do nothing, as above."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what nothing refers to any more, and give PyTorch's cached memory back.

    shutdown_ray: True: end Ray in this process, too
    """
    if shutdown_ray:
        import ray

        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_ip() -> str:
    """Return this machine's address, as others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Absent:
    """A name that programs import, of something that there is not here. To use it is an error."""

    def __init__(self, name: str, instead: str) -> None:
        self._error = f"nanoinfer has no {name}: {instead}"

    def __call__(self, *args: object, **options: object) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(self._error)

    def __getattr__(self, name: str) -> None:
        raise AttributeError(self._error)
