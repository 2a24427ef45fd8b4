"""Whether the numbers of weights are finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.kernels.linear.packed import PackedRows
from nanoinfer.weights.shards import Table, Target


def find_not_finite(table: Table, names: Iterable[str]) -> str | None:
    """Return the first of the tensors whose targets hold NaN or infinity; None: no target does.

    The search looks at each number of a target only if their sum is not finite.
    """
    targets = [(name, shard.target) for name in names for shard in table[name]]
    if not targets:
        return None
    sums = torch.stack([_numbers(target).sum(dtype=torch.float32) for _, target in targets])
    suspects = [targets[index] for index in (~sums.isfinite()).nonzero().flatten().tolist()]
    return next((name for name, target in suspects if not _numbers(target).isfinite().all()), None)


def describe_not_finite(table: Table, name: str) -> str:
    """Say that a tensor's numbers are not finite in the dtype of the weights."""
    dtype = str(_numbers(table[name][0].target).dtype).removeprefix("torch.")
    return f"{name} has numbers that are NaN or infinite as {dtype}"


def _numbers(target: Target) -> Tensor:
    return target.unpacked() if isinstance(target, PackedRows) else target
