"""Products with a weight in FP8 that add up the blocks of inputs in their order, whatever the number of tokens.

Our kernel for several tokens does so if it neither cuts the inputs into pieces nor rounds a product and a sum once
together. A single token takes it, too, and is rounded to FP8 as several are. As for matrices of 16 bits, we compare
bits at the start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK, FP8, Fp8Tokens, Fp8Weight, quantize
from nanoinfer.kernels.launch import recording
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.fp8_linear import can_multiply_fp8, fp8_linear_triton, has_copies, own_cut
from nanoinfer.kernels.linear.weight import OwnProduct

A_SIZE_OF_EACH_TILE = (1, 32, 64)  # tokens


class Fp8InOrderWeight(OwnProduct):
    """A weight in FP8 whose products add up in one order."""

    def __init__(self, weight: Fp8Weight, dtype: torch.dtype, has_bias: bool, sizes: Iterable[int]) -> None:
        """Compare bits of these and some more numbers of tokens, and raise what check_multiplies and check_order raise.

        dtype: of the tokens' vectors
        """
        check_multiplies(dtype, weight)
        self._weight = weight
        numbers, sizes = weight.numbers, tuple(sorted({*sizes, *A_SIZE_OF_EACH_TILE}))
        check_order(*numbers.shape, weight.block, dtype, has_bias, numbers.device, sizes)

    def product(self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        out = fp8_in_order(quantize(x), self._weight, bias)
        return out if activation is None else gate_mul(out, activation)


def fp8_in_order(x: Fp8Tokens, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute Fp8InOrderWeight.product of vectors that are in FP8, without an activation."""
    return fp8_linear_triton(x, weight, own_cut(x, weight), bias, has_copies(x), in_order=True)


def check_multiplies(dtype: torch.dtype, weight: Fp8Weight) -> None:
    """Raise ValueError if no kernel for FP8 multiplies this weight with tokens of a dtype."""
    if not can_multiply_fp8(dtype, weight):
        raise ValueError(
            "deterministic=True: with weights in FP8, a GPU must multiply FP8 (from compute capability 8.9 on), dtype"
            f" must have 16 bits, and inputs must share scales by multiples of {BLOCK.value}; here dtype is"
            f" {str(dtype).removeprefix('torch.')}, and {weight.block[1]} of {weight.numbers.shape[-1]} inputs share"
            " a scale; device='cpu' takes all"
        )


@functools.cache
def check_order(
    out_features: int,
    in_features: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device,
    sizes: tuple[int, ...],
) -> None:
    """Raise ValueError if the kernel has other bits for some numbers of tokens, in graphs or outside of them.

    block: the height and the width of the weight's blocks; sizes: the numbers of tokens to try
    """
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    height, width = block
    x, weight = numbers(max(sizes), in_features), numbers(out_features, in_features)
    scales = numbers(out_features // height, in_features // width).float().abs()
    together = BLOCK.value if width == in_features else width  # inputs
    if half := in_features // together // 2 * together:
        # The second half of a product undoes the first, so that the result is what was rounded away.
        x[:, half : 2 * half] = x[:, :half]
        weight[:, half : 2 * half] = -weight[:, :half]
        weight[:, 2 * half :] = 0
        of_half = half // width
        scales[:, of_half : 2 * of_half] = scales[:, :of_half]
    bias = numbers(out_features) * 1e-6 if has_bias else None
    in_fp8 = Fp8Weight(weight.to(FP8), scales)
    expected = fp8_in_order(quantize(x), in_fp8, bias)

    def has_these_bits(size: int) -> bool:
        return torch.equal(fp8_in_order(quantize(x[:size]), in_fp8, bias), expected[:size])

    with recording():
        in_graphs = all(map(has_these_bits, sizes))
    if not in_graphs or not all(map(has_these_bits, sizes)):
        raise ValueError(
            "deterministic=True: this GPU adds up products in FP8 in other orders for other numbers of tokens;"
            " device='cpu' does not"
        )
