"""Experts whose sums have one order, whatever the number of tokens.

The kernel adds an output's terms up in the order of the inputs, in tiles of any size, as the one for other weights
does. No GPU promises that. So we compare bits at the start.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.experts.operand import ExpertWeights
from nanoinfer.kernels.experts.products import expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import FP8, Fp8Weight, parts_of
from nanoinfer.kernels.groups import BITS, SPREADS, GroupWeight, Numbers, words_of
from nanoinfer.kernels.linear.activation import Activation

# An output of ordinary numbers shows another order only once in some thousand times, so many are compared.
TOKENS = 288
AT_ONCE = (8, 24, 96)  # of them, if each takes all experts: they fill tiles of every size but the largest


class Grouping(NamedTuple):
    """The form of a GroupWeight, whatever its shape."""

    numbers: Numbers
    size: int
    scales: torch.dtype
    has_zeros: bool
    has_factors: bool

    def draw(self, count: int, rows: int, columns: int, generator: torch.Generator) -> GroupWeight:
        """Return random weights, [count, rows, columns], whose products are about as large as what they multiply."""
        device, bits = generator.device, BITS[self.numbers]

        def integers(low: int, high: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.randint(low, high, (count, rows, *shape), generator=generator, device=device, dtype=dtype)

        groups, size = columns // self.size, SPREADS[self.numbers] * columns**0.5
        if self.scales == torch.uint8:
            scales = integers(126, 129, torch.uint8, groups) - round(math.log2(size))
        else:
            scales = torch.rand(count, rows, groups, generator=generator, device=device)
            scales = (scales if self.has_factors else scales / size).to(self.scales)
        return GroupWeight(
            integers(-(1 << 31), 1 << 31, torch.int32, words_of(columns, bits)),
            scales,
            integers(0, 1 << bits, torch.uint8, groups) if self.has_zeros else None,
            torch.full((count, rows), 1 / size, device=device) if self.has_factors else None,
            self.numbers,
            columns,
        )


class Shape(NamedTuple):
    """The shape of an expert's matrix, that of its blocks if it is in FP8, and the form of a GroupWeight."""

    rows: int
    columns: int
    height: int | None
    width: int | None
    grouping: Grouping | None = None

    @classmethod
    def like(cls, weight: ExpertWeights) -> Shape:
        """Return the shape of each of several experts' matrices, [experts, rows, columns]."""
        if isinstance(weight, GroupWeight):
            forms = weight.scales.dtype, weight.zeros is not None, weight.factors is not None
            grouping = Grouping(weight.numbers, weight.group, *forms)
            return cls(weight.words.shape[1], weight.in_features, None, None, grouping)
        numbers, _, block = parts_of(weight)
        _, rows, columns = numbers.shape
        return cls(rows, columns, *block)

    def draw(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> ExpertWeights:
        """Return random matrices of this shape, whose products are about as large as what they multiply."""
        if self.grouping is not None:
            return self.grouping.draw(count, self.rows, self.columns, generator)
        device = generator.device
        weight = torch.randn(count, self.rows, self.columns, generator=generator, device=device, dtype=dtype)
        if self.height is None or self.width is None:
            return weight / self.columns**0.5
        blocks = self.rows // self.height, self.columns // self.width
        scales = torch.rand(count, *blocks, generator=generator, device=device) / self.columns**0.5
        return Fp8Weight(weight.to(FP8), scales)


@cache
def check_order(
    gate_up: Shape, down: Shape, used: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError if the kernel gives a token other bits among other numbers of tokens.

    gate_up, down: of an expert; if ranks split its outputs, this rank's part, and down has the other ranks' columns too
    used: experts that a token takes; dtype: of the tokens' vectors
    """
    generator = torch.Generator(device).manual_seed(0)
    weights = gate_up.draw(used, dtype, generator), down.draw(used, dtype, generator)
    x = torch.randn(TOKENS, gate_up.columns, generator=generator, device=device, dtype=dtype)
    shares = torch.rand(TOKENS, used, generator=generator, device=device)
    experts = shares.argsort(dim=1).int()
    ranks = down.columns // (gate_up.rows // 2)

    def gather(own: Tensor) -> Tensor:  # stands in for that of several ranks
        return own.repeat(1, ranks)

    multiply = partial(expert_mlps_triton, activation=activation, in_order=True, gather=gather if ranks > 1 else None)

    def results(at_once: int) -> Tensor:
        parts = zip(*(tensor.split(at_once) for tensor in (x, experts, shares)), strict=True)
        return torch.cat([multiply(vectors, Routes(*routes), *weights) for vectors, *routes in parts])

    expected = results(TOKENS)
    if not all(torch.equal(results(at_once), expected) for at_once in AT_ONCE):
        raise ValueError(
            "deterministic=True: this GPU adds up the products with experts in other orders for other numbers of"
            " tokens; device='cpu' does not"
        )
