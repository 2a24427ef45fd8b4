"""The Ray cluster that this process is in: what its machines have, and what replicas ask of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def connected() -> ModuleType:
    """Return the module ray, connected as ray.init() connects: to a cluster that there is, or to a new one.

    Raises ValueError if Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ValueError("data_parallel_backend='ray': needs Ray: pip install 'nanoinfer[ray]'")
    import ray  # here, for most LLMs do without

    if not ray.is_initialized():
        ray.init()
    return ray


def has_gpus() -> bool:
    """Whether a machine of the cluster has a GPU now."""
    return any(machine.get("GPU", 0) for machine in _machines())


def share_of_replica(device: str, ranks: int, replicas: int) -> dict[str, int]:
    """Return what an actor of one of several replicas asks for, as the options num_gpus and num_cpus.

    On GPUs it is one for each rank, beside one CPU. Otherwise the replicas share half of each machine's CPUs.
    """
    if device == "cuda":
        return {"num_gpus": ranks, "num_cpus": 1}
    halves = [int(machine.get("CPU", 0)) // 2 for machine in _machines()]
    most = max(halves, default=1)
    fitting = (share for share in range(most, 1, -1) if sum(half // share for half in halves) >= replicas)
    return {"num_gpus": 0, "num_cpus": next(fitting, 1)}


def describe_room(asked: dict[str, int]) -> str:
    """Say what a replica asks for, and what the cluster has."""
    ray, machines = connected(), len(_machines())
    total, free = ray.cluster_resources(), ray.available_resources()
    kinds = {"GPU": asked["num_gpus"], "CPU": asked["num_cpus"]}
    has = [f"{_count(total.get(kind, 0), kind)} ({free.get(kind, 0):g} free)" for kind, count in kinds.items() if count]
    return (
        f"a replica asks for {' and '.join(_count(count, kind) for kind, count in kinds.items() if count)} of one"
        f" machine, and the cluster has {' and '.join(has)} on {_count(machines, 'machine')}"
    )


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}{'' if number == 1 else 's'}"


def _machines() -> list[dict[str, Any]]:
    """Return the resources of each machine that is up."""
    return [node["Resources"] for node in connected().nodes() if node["Alive"]]
