"""Weights of four or eight bits, whose groups of neighbouring inputs share a scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8

Numbers = Literal["int4", "int6", "int8", "e2m1", "nf4", "fp4"]  # e2m1: of OCP MX (2023); nf4, fp4: of bitsandbytes

BITS: dict[Numbers, int] = {"int4": 4, "int6": 8, "int8": 8, "e2m1": 4, "nf4": 4, "fp4": 4}  # that numbers take
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
_FP4 = tuple(twelfths / 12 for twelfths in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))  # so, too
_NF4 = (  # quantiles of a normal distribution (Dettmers et al., 2023)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# What codes stand for; the others are integers.
TABLES: dict[Numbers, tuple[float, ...]] = {
    "e2m1": (*E2M1, *(-value for value in E2M1)),
    "nf4": _NF4,
    "fp4": (*_FP4, *(-value for value in _FP4)),
}
BITSANDBYTES: tuple[Numbers, ...] = ("nf4", "fp4")  # tables that no arithmetic makes
MIDDLES: dict[Numbers, int] = {"int4": 8, "int6": 32, "int8": 128}  # half of what integers count to
LARGEST_POWER = 2.0**65  # of scales that are powers of two: see linear.groups.scales.factors_of
# Standard deviations, if all are as likely.
SPREADS: dict[Numbers, float] = {"int4": 4.61, "int6": 18.5, "int8": 73.9, "e2m1": 2.93, "nf4": 0.517, "fp4": 0.487}


class GroupWeight(NamedTuple):
    """A weight, [out_features, in_features]: (number - zero) * scale * factor; experts have a dimension more before.

    Or number * scale - minimum, as GGUF's types have it.

    words: [out_features, 4 * ceil(in_features * bits / 128)] int32, see pack
    scales: [out_features, groups] of a floating type, e4m3 among them, or uint8: powers of two, with 127 added (e8m0)
    zeros: [out_features, groups] uint8, of integers, or minima of a floating type; None: half of what numbers count to
    factors: [out_features] float32; None: 1, as with minima
    numbers: what a word's bits mean
    in_features: a multiple of the groups
    blocks: [out_features, blocks, 1 or 2] float16, which multiply the scales of a block's groups, and their minima, and
        are exact; None: 1
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor | None
    numbers: Numbers
    in_features: int
    blocks: Tensor | None = None

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.in_features // self.scales.shape[-1]

    @property
    def has_minima(self) -> bool:
        """Whether groups have minima, and numbers from 0 on."""
        return self.zeros is not None and self.zeros.is_floating_point()

    @property
    def block(self) -> int | None:
        """The inputs whose scales are multiplied alike; None: no scales are."""
        return None if self.blocks is None else self.in_features // self.blocks.shape[-2]

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupWeight:
        """Return a weight with other tensors."""
        parts = {name: change(part) for name, part in zip(self._fields, self, strict=True) if isinstance(part, Tensor)}
        return self._replace(**cast("dict[str, Any]", parts))

    def select(self, rows: Tensor) -> GroupWeight:
        """Return a copy of some rows. rows: their numbers, of int32"""
        return self.map(lambda part: part.index_select(0, rows))

    def split(self, rows: int | list[int]) -> list[GroupWeight]:
        """Return views of neighbouring rows, as Tensor.split does."""
        names = [name for name, part in zip(self._fields, self, strict=True) if isinstance(part, Tensor)]
        of_each = zip(*(getattr(self, name).split(rows) for name in names), strict=True)
        return [self._replace(**dict(zip(names, parts, strict=True))) for parts in of_each]


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack [..., in_features] integers below 2^bits into int32 words, [..., 4 * ceil(in_features * bits / 128)].

    Four words have a block of numbers, in which the word c has the neighbours 8 i + 2 c and 8 i + 2 c + 1 for every i:
    the first of them in its lower half, the second in its upper half, both from bit i * bits on. So one mask takes two
    out, each into a half of its own. And they are those of the block that one thread of a tensor core's four needs.
    """
    count = 128 // bits
    padded = F.pad(numbers.to(torch.uint8), (0, -numbers.shape[-1] % count))
    halves = padded.unflatten(-1, (-1, count // 8, 4, 2)).movedim(-3, -1)  # of words, number by number
    packed = halves if bits == 8 else halves[..., 0::2] | halves[..., 1::2] << 4
    return packed.contiguous().flatten(-2).view(torch.int32).flatten(-3)


def words_of(in_features: int, bits: int) -> int:
    """Return how many words `pack` makes of a row."""
    return 4 * -(-in_features * bits // 128)


def unpack(words: Tensor, bits: int, in_features: int) -> Tensor:
    """Return the numbers that `pack` packed, [..., in_features] uint8."""
    halves = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 2, 2))
    if bits == 4:
        halves = torch.stack([halves & 15, halves >> 4], dim=-1).flatten(-2)
    return halves.movedim(-1, -3).flatten(-4)[..., :in_features]


def scales_of(weight: GroupWeight) -> Tensor:
    """Return the groups' scales as float32, with the rows' factors."""
    scales = weight.scales
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    if weight.blocks is not None:
        scales = _multiplied(scales, weight.blocks[..., 0])
    return scales.float() if weight.factors is None else scales.float() * weight.factors.unsqueeze(-1)


def scaled_minima(weight: GroupWeight) -> Tensor:
    """Return the groups' minima as float32, with the blocks' factors."""
    assert weight.zeros is not None
    return weight.zeros.float() if weight.blocks is None else _multiplied(weight.zeros, weight.blocks[..., 1])


def _multiplied(of_groups: Tensor, of_blocks: Tensor) -> Tensor:
    """Return what groups have times what their blocks have, as float32."""
    by_block = of_groups.float().unflatten(-1, (of_blocks.shape[-1], -1))
    return (by_block * of_blocks.float().unsqueeze(-1)).flatten(-2)


def scales_are_exact(weight: GroupWeight, dtype: torch.dtype) -> bool:
    """Return whether dtype has each product of a number, of two bits, and a scale; float16 lacks most powers of two."""
    if weight.numbers != "e2m1":
        return False
    return weight.scales.dtype == FP8 or (weight.scales.dtype == torch.uint8 and dtype != torch.float16)


def values_of(numbers: Tensor, kind: Numbers, zeros: Tensor | None = None) -> Tensor:
    """Return what numbers, of any integer type, stand for, as float32, if their scale is 1. The shape stays.

    zeros: of integers; None: half of what they count to
    """
    if kind not in TABLES:
        return numbers.float().sub_(MIDDLES[kind] if zeros is None else zeros)
    table = torch.tensor(TABLES[kind], device=numbers.device)
    return F.embedding(numbers.int(), table.unsqueeze(1)).squeeze(-1)


def minima_of(zeros: Tensor, scales: Tensor) -> Tensor:
    """Return minima of the scales' dtype, with which numbers stand for what they do with zeros, of integers."""
    return (zeros.float() * scales.float()).to(scales.dtype)


def dequantize_reference(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight in a floating type, [out_features, in_features], each number rounded once."""
    numbers = unpack(weight.words, BITS[weight.numbers], weight.in_features).unflatten(-1, (-1, weight.group))
    return scale_groups(values_of(numbers, weight.numbers), weight).flatten(-2).to(dtype)


def scale_groups(values: Tensor, weight: GroupWeight) -> Tensor:
    """Return the weight, [out_features, groups, group] float32, in the memory of `values`.

    values: values_of its numbers, whose zeros are half of what they count to
    """
    scales = scales_of(weight).unsqueeze(-1)
    if weight.zeros is None:
        return values.mul_(scales)
    middle = MIDDLES[weight.numbers]
    if weight.has_minima:
        return values.add_(middle).mul_(scales).sub_(scaled_minima(weight).unsqueeze(-1))
    return values.sub_(weight.zeros.float().unsqueeze(-1) - middle).mul_(scales)
