"""Products that add up an output's terms in the order of the inputs, whatever the number of tokens.

The tile kernel does so for tiles of any size, if it neither cuts the inputs into pieces nor, where sums have scales,
rounds a product and a sum once together. cuBLAS, which is faster for many tokens and a plain weight, does so wherever
it does not divide the inputs. Neither is promised anywhere: see linear.in_order.order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK, Fp8Tokens, Fp8Weight, quantize
from nanoinfer.kernels.groups import GroupWeight
from nanoinfer.kernels.launch import cdiv, num_multiprocessors, recording
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.linear.fp8.linear import can_multiply_fp8, fp8_linear_triton, has_copies, own_config
from nanoinfer.kernels.linear.groups.one_wave import BLOCK as GROUP_BLOCK
from nanoinfer.kernels.linear.groups.one_wave import can_multiply, one_wave_triton
from nanoinfer.kernels.linear.in_order.order import AnyNumbers, Multiply, WeightShape, sizes_alike
from nanoinfer.kernels.linear.operands.plain import plain_operand
from nanoinfer.kernels.linear.operands.weight import Weight
from nanoinfer.kernels.linear.tiles import Epilogue, TileConfig, multiply_tiles, stages_that_fit

FEW_TOKENS = 16  # up to here our kernel, which is launched early, is as fast as cuBLAS (measured on an H200)
GROUP_CONFIGS = (
    TileConfig(16, 64),
    TileConfig(32, 64),
    TileConfig(64, 128, warps=8),
)  # for up to so many tokens, the last for all others
A_SIZE_OF_EACH_CONFIG = (1, 16, 32, 64)  # tokens, of a weight with scales


class InOrderWeight(Weight):
    """A weight whose products add up in the order of the inputs."""

    def __init__(self, weight: AnyNumbers, dtype: torch.dtype, has_bias: bool, sizes: Iterable[int]) -> None:
        """Compare bits of these numbers of tokens, and find out for which of them cuBLAS has the same ones.

        weight: [out_features, in_features]
        dtype: of the tokens' vectors
        Raises ValueError as check_multiplies does, and if our kernels have other bits for some numbers of tokens.
        """
        check_multiplies(dtype, weight)
        self.dtype, self._weight = dtype, weight
        self._for_cublas = find_sizes(weight, dtype, has_bias, tuple(sizes))

    def product(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        may_split: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear; of a plain weight without an activation, into `out` if given."""
        weight = self._weight
        if isinstance(weight, GroupWeight):
            return group_in_order(x, weight, bias, activation)
        if isinstance(weight, Fp8Weight):
            out = fp8_in_order(quantize(x), weight, bias)
        elif len(x) in self._for_cublas:
            out = _cublas(x, weight, bias, out)
        elif len(x) > FEW_TOKENS:
            out = in_order_triton(x, weight, bias, out)
        else:  # a launch more would take as long as the activation
            return in_order_triton(x, weight, bias, out, activation)
        return out if activation is None else gate_mul(out, activation)


def check_multiplies(dtype: torch.dtype, weight: AnyNumbers) -> None:
    """Raise ValueError if no kernel for several tokens multiplies a weight with tokens of a dtype."""
    here = f"here dtype is {str(dtype).removeprefix('torch.')}, and"
    if isinstance(weight, Fp8Weight) and not can_multiply_fp8(dtype, weight):
        raise ValueError(
            "deterministic=True: with weights in FP8, a GPU must multiply FP8 (from compute capability 8.9 on), dtype"
            f" must have 16 bits, and inputs must share scales by multiples of {BLOCK.value}; {here} {weight.block[1]}"
            f" of {weight.numbers.shape[-1]} inputs share a scale; device='cpu' takes all"
        )
    if isinstance(weight, GroupWeight) and not can_multiply(dtype, weight):
        raise ValueError(
            f"deterministic=True: with weights in {weight.numbers}, dtype must have 16 bits, and a multiple of"
            f" {GROUP_BLOCK} inputs must share a scale; {here} {weight.group} of {weight.in_features} inputs share"
            " one; device='cpu' takes all"
        )


def find_sizes(weight: AnyNumbers, dtype: torch.dtype, has_bias: bool, sizes: tuple[int, ...]) -> frozenset[int]:
    """Return for how many tokens cuBLAS is to multiply by such a weight: it has the bits of our kernel.

    sizes: the numbers of tokens to try
    Raises ValueError if our kernel has not the same bits for all of them. It computes those that cuBLAS does not.
    """
    scaled = not isinstance(weight, Tensor)
    sizes = tuple(sorted({*sizes, *(A_SIZE_OF_EACH_CONFIG if scaled else ())}))
    alike = partial(sizes_alike, shape=WeightShape.like(weight), dtype=dtype, has_bias=has_bias, device=_device(weight))
    # A switch of torch may let cuBLAS round float32 at any later time.
    many = () if scaled or dtype == torch.float32 else tuple(size for size in sizes if size > FEW_TOKENS)
    for_cublas = alike(_cublas, in_order_triton, sizes=many) if many else frozenset()
    ours, named = _ours(weight)
    others = tuple(size for size in sizes if size not in for_cublas or size == sizes[-1])  # the last: to compare with
    for multiply in ours:
        if {*others} - alike(multiply, ours[0], sizes=others):
            raise ValueError(
                f"deterministic=True: this GPU adds up products{named} in other orders for other numbers of tokens;"
                " device='cpu' does not"
            )
    return for_cublas


def _device(weight: AnyNumbers) -> torch.device:
    return (weight if isinstance(weight, Tensor) else weight[0]).device


def _ours(weight: AnyNumbers) -> tuple[list[Multiply], str]:
    """Return the ways in which our kernel multiplies, and what an error calls their products."""
    if isinstance(weight, Fp8Weight):
        return [_round_and_multiply, _in_graphs], " in FP8"
    if isinstance(weight, GroupWeight):
        return [group_in_order], f" in {weight.numbers}"
    return [in_order_triton], ""


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def fp8_in_order(x: Fp8Tokens, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute the product of a weight in FP8 without an activation; a single token's vector is in FP8, too."""
    return fp8_linear_triton(x, weight, own_config(x, weight), bias, has_copies(x), in_order=True)


def _round_and_multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    return fp8_in_order(quantize(x), weight, bias)


def _in_graphs(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    with recording():
        return _round_and_multiply(x, weight, bias)


def group_in_order(
    x: Tensor, weight: GroupWeight, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """Compute the product of a GroupWeight."""
    config = next((config for config in GROUP_CONFIGS if len(x) <= config.block_m), GROUP_CONFIGS[-1])
    return one_wave_triton(x, weight, config, bias, activation, in_order=True)


CONFIGS = {  # of many tokens, and the time of an output, relative to that in the largest tile, measured on an H200
    TileConfig(128, 256, 64, warps=8, stages=5): 1.0,
    TileConfig(128, 128, 64, warps=8, stages=5): 1.1,
    TileConfig(64, 128, 64, stages=5): 1.4,
    TileConfig(64, 64, 128, stages=5): 1.6,
    TileConfig(64, 32, 128, stages=5): 2.2,
}
SOME = TileConfig(32, 64, 128, stages=5)  # for more than few tokens, and at most its own number
FEW = TileConfig(16, 64, 128, stages=9, fetched=4)
NARROW = TileConfig(16, 16, 256, stages=9, fetched=4)  # for few tokens and few outputs
WIDE = TileConfig(16, 128, 128, stages=9, fetched=4)  # for few tokens and many outputs of many inputs
MIN_BUSY = 1 / 4  # of the multiprocessors, so many have a tile, or narrow ones are faster
MANY_INPUTS = 4096  # from here on, more programs cost less than multiprocessors that have more outputs than others
MIN_STAGES = 3  # of wide tiles, or they are slow
MOST_IN_FLOAT32 = 64 * 128  # outputs of a tile, so that a thread's registers hold its share


def choose_config(x: Tensor, out_features: int) -> TileConfig:
    """Return the tiles with which the multiprocessors would be done first, if each computed one at a time."""
    tokens, multiprocessors = len(x), num_multiprocessors(x.device)
    if tokens <= FEW_TOKENS:
        return _choose_for_few(x, out_features, multiprocessors)
    if tokens <= SOME.block_m:
        return SOME

    def seconds(config: TileConfig) -> float:
        return (
            cdiv(config.programs(tokens, out_features), multiprocessors)
            * config.block_m
            * config.block_n
            * CONFIGS[config]
        )

    return min((config for config in CONFIGS if x.itemsize == 2 or fits_float32(config)), key=seconds)


def _choose_for_few(x: Tensor, out_features: int, multiprocessors: int) -> TileConfig:
    """Return the tiles for up to FEW_TOKENS tokens: reading the weight takes longest, so all should read evenly."""
    if out_features < FEW.block_n * multiprocessors * MIN_BUSY:
        return NARROW
    share = cdiv(out_features, multiprocessors * 16) * 16
    if x.shape[1] < MANY_INPUTS or share > WIDE.block_n:
        return FEW
    if share <= FEW.block_n:
        return FEW._replace(used=share)
    return WIDE._replace(used=share) if _stages(WIDE, x, gated=True) >= MIN_STAGES else FEW


def _stages(config: TileConfig, x: Tensor, gated: bool) -> int:
    """Return how many blocks of inputs of the tokens' vectors and of the weight are on their way at once."""
    bytes_at_once = (config.block_m + config.block_n * (2 if gated else 1)) * config.block_k * 2
    return stages_that_fit(config.stages, bytes_at_once, x.device)


def fits_float32(config: TileConfig) -> bool:
    """Return whether a program can have such a tile of float32 numbers."""
    return config.block_m * config.block_n <= MOST_IN_FLOAT32


def in_order_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    activation: Activation | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """Compute the product of a plain weight in one launch. config: None: choose_config's own"""
    gated = activation is not None
    out_features = len(weight) // 2 if gated else len(weight)
    assert x.is_contiguous()
    if out is None:
        out = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    config = config or choose_config(x, out_features)
    config = config._replace(block_k=config.block_k * 2 // x.itemsize, stages=_stages(config, x, gated))
    multiply_tiles(x, plain_operand(weight), config, out[None], Epilogue(bias=bias), activation)
    return out
