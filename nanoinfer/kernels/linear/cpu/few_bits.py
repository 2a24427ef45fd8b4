"""A weight of few bits on the CPU: few rows are multiplied by its bits, more by numbers of bfloat16, kept beside them.

A single row's product takes as long as the weight takes to be read, so fewer bits take less. torch's own product reads
numbers of four bits. One of eight is two of them: 16 * high + low, which meet the inputs times 16 and the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.groups import BITS, MIDDLES, GroupWeight, Numbers, scaled_minima, scales_of, unpack
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.cpu.packed import PackedWeight
from nanoinfer.kernels.linear.operands.weight import Weight

GROUPS = 256, 128, 64, 32  # inputs that share a scale, as torch's product takes them
OUTPUTS, BLOCK = 16, 64  # which it needs a multiple of, and which it packs together
NUMBERS_AT_ONCE = 1 << 19  # that are packed; more fit no cache
HIGH = 16  # how much more a high half counts than a low one
# What is taken off integers: torch's product takes off 8, and with it each half is from -8 to 7.
CENTRES: dict[Numbers, int] = {"int4": 8, "int6": 32, "int8": 136}
ROWS = 8  # of more, or of half as many with eight bits, bfloat16's product is as fast (measured on two cores with AMX)


class FewBitsWeight(Weight):
    """Bits for few rows, and the numbers for more. (number - 8) * scale + added is what torch's product reads."""

    def __init__(self, weight: GroupWeight, numbers: PackedWeight) -> None:
        """weight: fits; numbers: the same in bfloat16"""
        group = _group_of(weight)
        assert group is not None
        self._numbers, self._halves = numbers, _halves_of(weight)
        self._own_group, self._group = group // self._halves, group
        self._rows = ROWS // self._halves
        rows = max(NUMBERS_AT_ONCE // weight.in_features // BLOCK, 1) * BLOCK
        self._packed = torch.cat([self._pack(part) for part in weight.split(rows)])
        self._scales = self._scales_and_added(weight)
        self._times = torch.tensor([[float(HIGH)], [1.0]], dtype=torch.bfloat16)

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        if len(x) > self._rows:
            return self._numbers.product(x, bias, activation)
        if self._halves == 2:  # each group's inputs times 16, then the inputs
            x = (x.unflatten(1, (-1, 1, self._own_group)) * self._times).flatten(1)
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self._packed, self._group, self._scales)
        out = out if bias is None else out.add_(bias)
        return gate_mul(out, activation) if activation else out

    def _pack(self, weight: GroupWeight) -> Tensor:
        numbers = unpack(weight.words, BITS[weight.numbers], weight.in_features)
        if self._halves == 2:
            raised = (numbers + (CENTRES["int4"] - CENTRES[weight.numbers])).view(torch.int8)  # which may wrap around
            both = torch.stack([(raised >> 4) + CENTRES["int4"], raised & HIGH - 1])
            numbers = both.unflatten(-1, (-1, self._own_group)).permute(1, 2, 0, 3).flatten(1)
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int().contiguous(), 2)
        return packed

    def _scales_and_added(self, weight: GroupWeight) -> Tensor:
        """Return them as torch's product reads them, [groups, out_features, 2]."""
        scales = scales_of(weight)
        zero = MIDDLES[weight.numbers] if weight.zeros is None else 0 if weight.has_minima else weight.zeros.float()
        added = (CENTRES[weight.numbers] - zero) * scales
        if weight.has_minima:
            added -= scaled_minima(weight)
        if self._halves == 2:
            added /= HIGH + 1  # as often as it is added for an input
        both = torch.stack([scales, added], dim=-1).to(torch.bfloat16)
        return both.repeat_interleave(weight.group // self._own_group, dim=1).transpose(0, 1).contiguous()


def fits(weight: GroupWeight) -> bool:
    """Return whether torch has a fast product of such numbers, groups and outputs here."""
    is_fast = torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_wide = len(weight.words) % OUTPUTS == 0 and weight.words.device.type == "cpu"
    return is_fast and is_wide and weight.numbers in CENTRES and _group_of(weight) is not None


def bytes_of(weight: GroupWeight) -> float:
    """Return the bytes of a number, of one that fits, and its part of a scale and of what is added."""
    group = _group_of(weight)
    assert group is not None
    return _halves_of(weight) * (1 / 2 + 2 * torch.bfloat16.itemsize / group)


def _halves_of(weight: GroupWeight) -> int:
    """Return how many numbers of four bits stand for one."""
    return BITS[weight.numbers] // 4


def _group_of(weight: GroupWeight) -> int | None:
    """Return the largest group that torch's product takes."""
    return next((group for group in GROUPS if weight.group * _halves_of(weight) % group == 0), None)
