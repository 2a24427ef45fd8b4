"""Products with a GroupWeight that add up the groups of inputs in their order, whatever the number of tokens.

Our kernel for several tokens does so if it neither cuts the inputs into pieces nor rounds a product and a sum once
together: the weight is always its left operand. A single token takes it, too. As for matrices of 16 bits, we compare
bits at the start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.groups import BITS, GroupWeight, Numbers, pack
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.groups.one_wave import BLOCK, Cut, can_multiply, one_wave_triton
from nanoinfer.kernels.linear.weight import OwnProduct

CUTS = (Cut(16, 64), Cut(32, 64), Cut(64, 128, warps=8))  # for up to so many tokens, the last for all others


class GroupInOrderWeight(OwnProduct):
    """A weight of four or eight bits whose products add up in one order."""

    def __init__(self, weight: GroupWeight, dtype: torch.dtype, has_bias: bool, sizes: Iterable[int]) -> None:
        """Compare bits of these and some more numbers of tokens, and raise what check_multiplies and check_order raise.

        dtype: of the tokens' vectors
        """
        check_multiplies(dtype, weight)
        self._weight = weight
        sizes = tuple(sorted({*sizes, *(cut.block_m for cut in CUTS)}))
        check_order(Shape.of(weight), dtype, has_bias, weight.words.device, sizes)

    def product(self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        return group_in_order(x, self._weight, bias, activation)


def group_in_order(
    x: Tensor, weight: GroupWeight, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """Compute GroupInOrderWeight.product."""
    cut = next((cut for cut in CUTS if len(x) <= cut.block_m), CUTS[-1])
    return one_wave_triton(x, weight, cut, bias, activation, in_order=True)


def check_multiplies(dtype: torch.dtype, weight: GroupWeight) -> None:
    """Raise ValueError if the kernel for several tokens does not multiply this weight with tokens of a dtype."""
    if not can_multiply(dtype, weight):
        raise ValueError(
            f"deterministic=True: with weights in {weight.numbers}, dtype must have 16 bits, and a multiple of {BLOCK}"
            f" inputs must share a scale; here dtype is {str(dtype).removeprefix('torch.')}, and {weight.group} of"
            f" {weight.in_features} inputs share one; device='cpu' takes all"
        )


class Shape(NamedTuple):
    """All that the order of a weight's products can depend on."""

    numbers: Numbers
    out_features: int
    in_features: int
    groups: int
    scales: torch.dtype
    has_zeros: bool
    has_factors: bool

    @classmethod
    def of(cls, weight: GroupWeight) -> Shape:
        """Return that of a weight."""
        (rows, groups), zeros, factors = weight.scales.shape, weight.zeros, weight.factors
        has_zeros, has_factors = zeros is not None, factors is not None
        return cls(weight.numbers, rows, weight.in_features, groups, weight.scales.dtype, has_zeros, has_factors)

    def draw(self, half: int, generator: torch.Generator, device: torch.device) -> GroupWeight:
        """Draw a weight whose inputs from `half` on undo the first `half` ones; what is behind them is nothing.

        half: whole groups, or if all inputs are one group, any number
        """
        rows, most = self.out_features, 1 << BITS[self.numbers]
        drawn = torch.randint(1, most, (rows, half), generator=generator, device=device)
        undone = drawn ^ most // 2 if self.numbers == "e2m1" else most - drawn
        nothing = drawn.new_full((rows, self.in_features - 2 * half), 0 if self.numbers == "e2m1" else most // 2)
        words = pack(torch.cat([drawn, undone, nothing], dim=1), BITS[self.numbers])
        scales = torch.rand(rows, self.groups, generator=generator, device=device) + 0.5
        of_half = half * self.groups // self.in_features
        scales[:, of_half : 2 * of_half] = scales[:, :of_half]
        zeros = drawn.new_full((rows, self.groups), most // 2, dtype=torch.uint8) if self.has_zeros else None
        factors = torch.rand(rows, generator=generator, device=device) if self.has_factors else None
        stored = (scales * 4 + 124).to(torch.uint8) if self.scales == torch.uint8 else scales.to(self.scales)
        return GroupWeight(words, stored, zeros, factors, self.numbers, self.in_features)


@functools.cache
def check_order(shape: Shape, dtype: torch.dtype, has_bias: bool, device: torch.device, sizes: tuple[int, ...]) -> None:
    """Raise ValueError if the kernel has other bits for some numbers of tokens. sizes: the numbers to try"""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    # The second half of a product undoes the first, so that the result is what was rounded away.
    group = 1 if shape.groups == 1 else shape.in_features // shape.groups
    half = shape.in_features // group // 2 * group
    x, bias = numbers(max(sizes), shape.in_features), numbers(shape.out_features) * 1e-6 if has_bias else None
    x[:, half : 2 * half] = x[:, :half]
    weight = shape.draw(half, generator, device)
    expected = group_in_order(x, weight, bias)
    if not all(torch.equal(group_in_order(x[:size], weight, bias), expected[:size]) for size in sizes):
        raise ValueError(
            f"deterministic=True: this GPU adds up products in {shape.numbers} in other orders for other numbers of"
            " tokens; device='cpu' does not"
        )
