"""Whether products add up in one order, whatever the number of tokens.

Tensor cores add the same terms to an output one after the other, however many outputs there are beside it. No GPU
promises that. So bits are compared at the start: of products that are all rounding error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK, FP8, Fp8Weight
from nanoinfer.kernels.groups import BITS, MIDDLES, SPREADS, TABLES, GroupWeight, Numbers, minima_of, pack
from nanoinfer.kernels.launch import launch_in_between

AnyNumbers: TypeAlias = Tensor | Fp8Weight | GroupWeight
Multiply: TypeAlias = Callable[..., Tensor]  # of vectors, a weight, and a bias or None


class Grouping(NamedTuple):
    """The form of a GroupWeight, whatever its shape.

    size: of a group; has_minima: its zeros are minima; block: inputs whose scales have a factor in common; 0: none have
    """

    numbers: Numbers
    size: int
    scales: torch.dtype
    has_zeros: bool
    has_factors: bool
    has_minima: bool = False
    block: int = 0


class WeightShape(NamedTuple):
    """All that the order of a weight's products can depend on.

    block: the height and the width of the blocks of a weight in FP8; grouping: of a GroupWeight
    """

    rows: int
    inputs: int
    block: tuple[int, int] | None = None
    grouping: Grouping | None = None

    @classmethod
    def like(cls, weight: AnyNumbers) -> WeightShape:
        """Return the shape of a weight, or that of each of several experts'."""
        if isinstance(weight, Tensor):
            return cls(weight.shape[-2], weight.shape[-1])
        if isinstance(weight, Fp8Weight):
            return cls(weight.numbers.shape[-2], weight.numbers.shape[-1], weight.block)
        forms = (
            weight.scales.dtype,
            weight.zeros is not None,
            weight.factors is not None,
            weight.has_minima,
            weight.block or 0,
        )
        grouping = Grouping(weight.numbers, weight.group, *forms)
        return cls(weight.words.shape[-2], weight.in_features, None, grouping)

    @property
    def half(self) -> int:
        """The first half of the inputs, in whole blocks or groups."""
        together = 1
        if self.grouping is not None and self.grouping.size < self.inputs:
            together = self.grouping.size
        elif self.block is not None:
            together = self.block[1] if self.block[1] < self.inputs else BLOCK.value
        return self.inputs // together // 2 * together

    def draw(self, dtype: torch.dtype, generator: torch.Generator) -> AnyNumbers:
        """Draw a weight. The second half of each row, if it has one, undoes the first; behind them is nothing.

        So its products with vectors that `undone` returns are what was rounded away.
        """
        if self.grouping is not None:
            return self._draw_groups(self.grouping, (), 1.0, generator)
        weight = self.undone(self._numbers(generator, self.rows, self.inputs, dtype=dtype), -1)
        if self.block is None:
            return weight
        scales = self._numbers(generator, *self._blocks(self.block)).abs()
        return Fp8Weight(weight.to(FP8), _repeated(scales, self.half // self.block[1]))

    def draw_experts(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> AnyNumbers:
        """Draw the weights of so many experts, whose products are about as large as what they multiply."""
        if self.grouping is not None:
            size = SPREADS[self.grouping.numbers] * self.inputs**0.5
            return self._draw_groups(self.grouping, (count,), size, generator)
        weight = self._numbers(generator, count, self.rows, self.inputs, dtype=dtype)
        if self.block is None:
            return weight / self.inputs**0.5
        scales = self._numbers(generator, count, *self._blocks(self.block)).abs()
        return Fp8Weight(weight.to(FP8), scales / self.inputs**0.5)

    def undone(self, x: Tensor, sign: int = 1) -> Tensor:
        """Return vectors, [..., inputs], whose second halves are their first ones times `sign`; one block has none."""
        if not self.half:
            return x
        first, rest = x[..., : self.half], torch.zeros_like(x[..., 2 * self.half :])
        return torch.cat([first, sign * first, rest], dim=-1)

    def _numbers(self, generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)

    def _blocks(self, block: tuple[int, int]) -> tuple[int, int]:
        return self.rows // block[0], self.inputs // block[1]

    def _draw_groups(
        self, form: Grouping, experts: tuple[int, ...], size: float, generator: torch.Generator
    ) -> GroupWeight:
        """Draw a weight as `draw` does, or experts', divided by a size."""
        device, most, rows = generator.device, _count_of(form.numbers), (*experts, self.rows)
        numbers = torch.randint(0 if experts else 1, most, (*rows, self.inputs), generator=generator, device=device)
        scales = torch.rand(*rows, self.inputs // form.size, generator=generator, device=device) + 0.5
        if not experts:
            first = numbers[..., : self.half]
            opposite, sign = _opposite(first, form.numbers)
            zero = TABLES[form.numbers].index(0.0) if form.numbers in TABLES else most // 2
            numbers = torch.cat([first, opposite, torch.full_like(numbers[..., 2 * self.half :], zero)], dim=-1)
            scales = _repeated(scales, self.half // form.size, sign)
        factors = torch.full(rows, 1 / size, device=device) if form.has_factors else None
        if form.scales == torch.uint8:
            scales = scales.log2().round() + 127 - round(math.log2(size))
        elif not form.has_factors:
            scales /= size
        scales, zeros = scales.to(form.scales), None
        if form.has_zeros:  # the middle of the numbers counts nothing
            middle = torch.full_like(scales, most // 2, dtype=torch.uint8)
            zeros = minima_of(middle, scales) if form.has_minima else middle
        blocks = None
        if form.block:
            shape = *rows, self.inputs // form.block, 2 if form.has_minima else 1
            blocks = torch.ones(shape, dtype=torch.float16, device=device)
        words = pack(numbers, BITS[form.numbers])
        return GroupWeight(words, scales, zeros, factors, form.numbers, self.inputs, blocks)


def _count_of(numbers: Numbers) -> int:
    return 2 * MIDDLES[numbers] if numbers in MIDDLES else 1 << BITS[numbers]


def _opposite(numbers: Tensor, kind: Numbers) -> tuple[Tensor, int]:
    """Return numbers and the sign of their scales, whose products undo those of some numbers with scales above 0."""
    if kind == "nf4":  # has no negatives of its numbers
        return numbers, -1
    return numbers ^ 8 if kind in TABLES else _count_of(kind) - numbers, 1


def _repeated(scales: Tensor, half: int, sign: int = 1) -> Tensor:
    """Return scales, [..., groups], of which the second `half` are the first ones times `sign`."""
    first = scales[..., :half]
    return torch.cat([first, sign * first, scales[..., 2 * half :]], dim=-1)


@functools.cache
def sizes_alike(
    multiply: Multiply,
    reference: Multiply,
    shape: WeightShape,
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device,
    sizes: tuple[int, ...],
) -> frozenset[int]:
    """Return for which of these numbers of tokens a product has the bits of `reference`, which gets all of them.

    dtype: of the tokens' vectors
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(max(sizes), shape.inputs, generator=generator, device=device, dtype=dtype)
    x, weight = shape.undone(x), shape.draw(dtype, generator)
    bias = None
    if has_bias:
        bias = torch.randn(shape.rows, generator=generator, device=device, dtype=dtype) * 1e-6
    launch_in_between(device)
    expected = reference(x, weight, bias)
    return frozenset(size for size in sizes if torch.equal(multiply(x[:size], weight, bias), expected[:size]))
