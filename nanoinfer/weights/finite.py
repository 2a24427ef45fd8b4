"""Whether the numbers of weights are finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nanoinfer.weights.shards import Away, Shard, Table, is_elsewhere, whole_of

FEW = 8


def find_not_finite(table: Table, names: Iterable[str]) -> str | None:
    """Return the first of the tensors whose targets hold NaN or infinity; None: no target does, but for limits.

    The search looks at each target only if a sum of numbers is not finite: that of a parameter, or if there are few
    targets, that of a target, for these may be small parts of large parameters.
    """
    targets = [(name, shard.target) for name in names for shard in table[name] if _counts(shard)]
    if not targets:
        return None
    summed = [target if len(targets) <= FEW else whole_of(target) for _, target in targets]
    each = {_identity(values): values for values in summed}.values()  # there are fewer parameters than targets
    sums = torch.stack([_numbers(values).sum(dtype=torch.float32) for values in each])
    if sums.isfinite().all():
        return None
    return next((name for name, target in targets if not _numbers(target).isfinite().all()), None)


def _counts(shard: Shard) -> bool:
    return not (shard.is_limit or is_elsewhere(shard.target))


def _identity(values: Any) -> int:
    return id(values.target if isinstance(values, Away) else values)


def describe_not_finite(table: Table, name: str) -> str:
    """Say that a tensor's numbers are not finite in the dtype of the weights."""
    dtype = str(_numbers(table[name][0].target).dtype).removeprefix("torch.")
    return f"{name} has numbers that are NaN or infinite as {dtype}"


def _numbers(values: Any) -> Tensor:
    numbers: Tensor = values if isinstance(values, Tensor) else values.unpacked()
    return numbers
