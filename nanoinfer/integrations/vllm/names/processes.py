"""What vLLM's programs call to clean up and to find addresses."""

from __future__ import annotations

import gc
import socket

import torch


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
