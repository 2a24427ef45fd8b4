"""How the products of tiles of choices with the rows of their experts' GroupWeights are cut."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.kernels.experts.operand import can_multiply_groups
from nanoinfer.kernels.groups import BITS, GroupWeight
from nanoinfer.kernels.linear.groups.tiles import group_operand, scales_come_first, step_of
from nanoinfer.kernels.linear.operands.operand import Operand
from nanoinfer.kernels.linear.tiles import TileConfig, stages_that_fit


def group_operand_and_config(weight: GroupWeight, x: Tensor, block_m: int) -> tuple[Operand, TileConfig]:
    """Return the operand of experts' weights for vectors x, and the fastest configuration for tiles of so many choices.

    Measured on an H200, with 32 experts of 2880 in MXFP4, and with 128 experts of 768 in four bits with zeros. Where
    sums are scaled, all cuts have the same groups, and so one order.
    """
    assert can_multiply_groups(weight)
    is_first = scales_come_first(weight, x.dtype)
    block_k = step_of(weight, x.dtype, 64 if x.itemsize == 4 or (is_first and block_m > 16) else 128)
    assert block_k is not None
    if is_first and x.itemsize == 2:
        block_n, warps, most = 128, 4, 4 if block_m in (32, 64) else 3
    else:
        block_n, warps, most = (128, 8, 3) if block_m == 128 else (64, 4, 3 if block_m >= 64 else 4)
    stage = block_k * (block_m * x.itemsize + block_n * BITS[weight.numbers] // 8)
    stages = stages_that_fit(most, stage, x.device)
    config = TileConfig(block_m, block_n, block_k, 1, warps, stages, persistent=block_m == 128 and not is_first)
    return group_operand(weight, x, block_k, is_first), config
