"""A group of torch.distributed that a user gives, whose ranks share the model."""

from __future__ import annotations

from torch.distributed import ProcessGroup, distributed_c10d

from nanoinfer.checks import short

MAX_RANKS = 8


def size_of_group(group: object, size: int) -> int:
    """Return how many ranks a group has, if this process is one of them; size: tensor_parallel_size, 1 if unset."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"tensor_parallel_group={short(group)}: must be a torch.distributed.ProcessGroup that this process belongs"
            " to, such as new_group or DeviceMesh.get_group returns"
        )
    if group not in distributed_c10d._world.pg_map:
        raise ValueError(f"tensor_parallel_group={group}: must be a group of torch.distributed that is not destroyed")
    num_ranks = group.size()
    if num_ranks > MAX_RANKS:
        raise ValueError(f"tensor_parallel_group has {num_ranks} ranks: must have at most {MAX_RANKS}")
    if size not in (1, num_ranks):
        raise ValueError(f"tensor_parallel_size={size}: must be left out, or {num_ranks} as tensor_parallel_group has")
    return num_ranks
