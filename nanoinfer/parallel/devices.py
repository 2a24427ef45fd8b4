"""The devices that an LLM computes on."""

from __future__ import annotations

import torch

from nanoinfer.checks import check_choice
from nanoinfer.parallel.ray_cluster import has_gpus


def resolve_device(device: str | torch.device, ranks: int, replicas: int, on_ray: bool) -> str:
    """Return "cpu" or "cuda", the device of the option; raises ValueError if this machine has too few GPUs.

    on_ray: the GPUs are those of a Ray cluster, which gives them when it has them
    """
    if isinstance(device, (str, torch.device)):
        device = str(device).removesuffix(":0")
        if device.startswith("cuda:"):
            raise ValueError(f"device={device!r}: must be 'cuda'; the environment's CUDA_VISIBLE_DEVICES chooses GPUs")
    device = check_choice("device", device, ["auto", "cuda", "cpu"])
    if on_ray:
        return "cuda" if device == "cuda" or (device == "auto" and has_gpus()) else "cpu"
    count = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cpu" or (device == "auto" and count == 0):
        return "cpu"
    if count == 0:
        raise ValueError("device='cuda': torch sees no CUDA device; use device='cpu', or 'auto'")
    found = f"this machine has {count} GPU{'s' if count > 1 else ''}"
    if replicas == 1 and ranks > count:
        raise ValueError(f"tensor_parallel_size={ranks}: {found}")
    if replicas * ranks > count:
        raise ValueError(
            f"data_parallel_size={replicas}: {replicas} replicas of tensor_parallel_size={ranks} need"
            f" {replicas * ranks} GPUs, and {found}"
        )
    return "cuda"
