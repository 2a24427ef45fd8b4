"""Weights of four or eight bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Numbers = Literal["int4", "int8", "e2m1"]  # e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (OCP MX, 2023)

BITS: dict[Numbers, int] = {"int4": 4, "int8": 8, "e2m1": 4}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


class GroupWeight(NamedTuple):
    """A weight, [out_features, in_features]: (number - zero) * scale * factor; experts have a dimension more before.

    words: [out_features, ceil(in_features * bits / 32)] int32, see pack
    scales: [out_features, groups] of a floating type, e4m3 among them, or uint8: powers of two, with 127 added (e8m0)
    zeros: [out_features, groups] uint8; None: half of what the bits count to, or for e2m1 nothing
    factors: [out_features] float32; None: 1
    numbers: what a word's bits mean
    in_features: a multiple of the groups
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor | None
    numbers: Numbers
    in_features: int

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.in_features // self.scales.shape[-1]


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack [..., in_features] integers below 2^bits into int32 words, [..., ceil(in_features * bits / 32)].

    A word has the numbers of even places in its lower half, from the lowest bits on, and those of odd places in its
    upper half: so one mask takes two neighbours out, each into a half of its own.
    """
    count = 32 // bits
    padded = F.pad(numbers.to(torch.int64), (0, -numbers.shape[-1] % count)).unflatten(-1, (-1, count))
    words = (padded << _shifts(bits, numbers.device)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words: Tensor, bits: int, in_features: int) -> Tensor:
    """Return the numbers that `pack` packed, [..., in_features] int32."""
    numbers = words.unsqueeze(-1) >> _shifts(bits, words.device).int() & (1 << bits) - 1
    return numbers.flatten(-2)[..., :in_features]


def _shifts(bits: int, device: torch.device) -> Tensor:
    places = torch.arange(32 // bits, device=device)
    return places % 2 * 16 + places // 2 * bits


def scales_of(weight: GroupWeight) -> Tensor:
    """Return the groups' scales as float32, with the rows' factors."""
    scales = weight.scales
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return scales.float() if weight.factors is None else scales.float() * weight.factors.unsqueeze(-1)


def dequantize_reference(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight in a floating type, [out_features, in_features], each number rounded once."""
    bits = BITS[weight.numbers]
    numbers = unpack(weight.words, bits, weight.in_features)
    if weight.numbers == "e2m1":
        magnitudes = torch.tensor(E2M1, device=numbers.device)[numbers & 7]
        values = torch.where(numbers >= 8, -magnitudes, magnitudes)
    else:
        values = numbers.float()
        zeros = 1 << bits - 1 if weight.zeros is None else weight.zeros.float().repeat_interleave(weight.group, dim=-1)
        values = values - zeros
    return (values * scales_of(weight).repeat_interleave(weight.group, dim=-1)).to(dtype)
