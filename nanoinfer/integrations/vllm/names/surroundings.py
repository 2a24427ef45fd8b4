"""What programs ask of the machine, and of images, by vLLM's names."""

from __future__ import annotations

import os
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
