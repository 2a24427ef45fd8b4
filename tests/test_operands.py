"""A format that only this file knows multiplies with any number of tokens, dense, with experts and in order.

It has six bits: four in one tensor and two in another. That takes a tuple of what the kernels read, a JIT function for
tiles of tokens, and two for a single token, which otherwise would be a tile, too.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from cases.weights import expected, routes_of
from conftest import DEVICE, whole_only
from test_kernels import SHORT, assert_close, randn
from torch import Tensor

from nanoinfer.kernels.experts.products import choices_in_a_tile, expert_mlps_reference
from nanoinfer.kernels.launch import launch_in_between, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gated_row
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.operands.operand import Operand, RowOperand
from nanoinfer.kernels.linear.operands.plain import add_product, load_bias
from nanoinfer.kernels.linear.tiles import Chosen, Epilogue, TileConfig, multiply_tiles
from nanoinfer.kernels.norm.norm import Norm, normalize_reference
from nanoinfer.kernels.sorting import group_triton

CONFIGS = [
    TileConfig(16, 64, 32),
    TileConfig(64, 64, 64),
    TileConfig(128, 32, 32, warps=8),
    TileConfig(32, 64, 32, used=48),
]


class SixBits(NamedTuple):
    """A weight, [out_features, in_features], or that of several experts: (number - 32) * scale.

    lows: [..., out_features, in_features / 2] uint8, the lower four bits of two neighbours
    highs: [..., out_features, in_features / 4] uint8, the upper two bits of four
    scales: [..., out_features] float32
    """

    lows: Tensor
    highs: Tensor
    scales: Tensor

    @classmethod
    def of(cls, *shape: int) -> tuple[SixBits, Tensor]:
        """Draw a weight; return it, and in float64 what it stands for."""
        numbers = torch.randint(64, shape, device=DEVICE)
        pairs, fours = (numbers & 15).unflatten(-1, (-1, 2)), (numbers >> 4).unflatten(-1, (-1, 4))
        lows = sum(pairs[..., i] << 4 * i for i in range(2))
        highs = sum(fours[..., i] << 2 * i for i in range(4))
        scales = torch.rand(shape[:-1], device=DEVICE) / 100
        weight = cls(lows.to(torch.uint8), highs.to(torch.uint8), scales)
        if DEVICE == "cuda":
            launch_in_between(lows.device)
        return weight, (numbers - 32).double() * scales.double().unsqueeze(-1)

    def operand(self) -> Operand:
        *_, rows, halves = self.lows.shape
        return Operand(self.lows, self, None, add_products, rows, 2 * halves, apart=False)

    def row_operand(self) -> RowOperand:
        parts, (*_, rows, halves) = RowParts(*self), self.lows.shape
        functions = load, load_scales, prepare, multiply_row
        return RowOperand(parts, None, *functions, rows, 2 * halves, (8, 2, 4), None)


class RowParts(NamedTuple):
    numbers: Tensor
    highs: Tensor
    scales: Tensor


@triton.jit
def add_products(x_ptr, lows_ptr, product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile: see linear.plain.add_products."""
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    parts, in_features, row, k = product.parts, product.in_features, tile.rows[:, None], tl.arange(0, HOW.block_k)
    wait_for_predecessor(EARLY)
    acc = tl.zeros([N, M], tl.float32)
    for start in range(tile.begin, tile.stop, HOW.block_k):
        place = (start + k)[None, :]
        inside, has_row = place < in_features, tile.has_row[:, None]
        x_ptrs = x_ptr + tile.sources.to(tl.int64)[:, None] * in_features + place
        x = tl.load(x_ptrs, mask=tile.exists[:, None] & inside, other=0.0)
        low = tl.load(lows_ptr + row * (in_features // 2) + place // 2, mask=has_row & inside, other=0)
        high = tl.load(parts.highs + row * (in_features // 4) + place // 4, mask=has_row & inside, other=0)
        low, high = low.to(tl.int32) >> place % 2 * 4 & 15, high.to(tl.int32) >> place % 4 * 2 & 3
        acc = add_product(acc, x, (low + high * 16 - 32).to(x.dtype), False)
    acc *= tl.load(parts.scales + tile.rows, mask=tile.has_row, other=0.0)[:, None]
    return acc, acc


@triton.jit
def load(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """Load the numbers of a tile's rows: see linear.plain.load_row_tile."""
    n, k = tile.to(tl.int64) * HOW.block_n + tl.arange(0, HOW.block_n), tl.arange(0, HOW.block_k)[None, :]
    mask = (n < weight_rows)[:, None] & (k < in_features)
    row = first_row + (gated_row(n, weight_rows) if HOW.activation is not None else n)[:, None]
    low = tl.load(parts.numbers + row * (in_features // 2) + k // 2, mask=mask, other=0).to(tl.int32)
    high = tl.load(parts.highs + row * (in_features // 4) + k // 4, mask=mask, other=0).to(tl.int32)
    return (low >> k % 2 * 4 & 15) + (high >> k % 4 * 2 & 3) * 16 - 32


@triton.jit
def load_scales(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    return load_bias(parts.scales + first_row, tile, weight_rows, HOW.block_n, HOW.activation is not None)


@triton.jit
def prepare(x, HOW: tl.constexpr):
    return x.to(tl.float32)


@triton.jit
def multiply_row(parts, tile, x, scales, first_row, index, weight_rows, HOW: tl.constexpr):
    return tl.sum(tile.to(tl.float32) * x[None, :], axis=1) * scales


def multiply(
    x: Tensor, weight: SixBits, config: TileConfig, epilogue: Epilogue, activation: Activation | None = None
) -> Tensor:
    rows = weight.lows.shape[0] // (2 if activation else 1)
    dtype = x.dtype if config.pieces == 1 else torch.float32
    out = torch.empty((config.pieces, len(x), rows), dtype=dtype, device=DEVICE)
    return multiply_tiles(x, weight.operand(), config, out, epilogue, activation, fused=False)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 20, *whole_only([5, 130])])
def test_a_dense_weight(tokens: int, config: TileConfig) -> None:
    """With a bias, and without and with an activation; 136 inputs and 100 rows fill no block."""
    (weight, matrix), x, bias = SixBits.of(100, 136), randn(tokens, 136, dtype=SHORT), randn(100, dtype=SHORT)
    assert_close(multiply(x, weight, config, Epilogue(bias=bias)), expected(x, matrix, bias))
    if config.used is None:
        assert_close(multiply(x, weight, config, Epilogue(bias=bias), "silu"), expected(x, matrix, bias, "silu"))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_row(activation: Activation | None) -> None:
    """With a bias, and with the sum and the norm before."""
    (weight, matrix), x, bias = SixBits.of(100, 136), randn(1, 136, dtype=SHORT), randn(100, dtype=SHORT)
    norm = Norm(torch.rand(136, device=DEVICE).to(SHORT), 1e-6)
    assert_close(one_row_linear(x, weight.row_operand(), bias, activation), expected(x, matrix, bias, activation))
    out, total = one_row_norm_linear(x, x, norm, weight.row_operand(), bias, activation)
    assert_close(out, expected(normalize_reference(total, norm), matrix, bias, activation))


def test_pieces_add_up_to_the_product() -> None:
    (weight, matrix), x, bias = SixBits.of(64, 160), randn(3, 160, dtype=SHORT), randn(64, dtype=SHORT)
    out = multiply(x, weight, TileConfig(16, 64, 32, pieces=2), Epilogue(bias=bias))
    assert out.shape == (2, 3, 64)
    assert_close(out.sum(0), expected(x, matrix, bias))


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts(tokens: int) -> None:
    (gate_up, wide), (down, wide_down) = SixBits.of(5, 2 * 32, 64), SixBits.of(5, 64, 32)
    x, routes, size = randn(tokens, 64, dtype=SHORT), routes_of(tokens, 5, 2), choices_in_a_tile(2 * tokens, 5)
    chosen, config = Chosen(group_triton(routes.experts, 5, size), 2), TileConfig(size, 64, 32, persistent=True)
    gated, out = x.new_empty(2 * tokens, 32), x.new_empty(2, tokens, 64)
    multiply_tiles(x, gate_up.operand(), config, gated, Epilogue(), "silu", chosen)
    multiply_tiles(gated, down.operand(), config, out, Epilogue(shares=routes.weights), None, chosen)
    assert_close(out.float().sum(0).to(SHORT), expert_mlps_reference(x.double(), routes, wide, wide_down, "silu"))


@pytest.mark.gpu
def test_a_token_has_the_same_bits_in_any_company() -> None:
    """Tiles have 64 rows of the weight or more: an instruction for fewer may add up otherwise."""
    (weight, _), x = SixBits.of(512, 1024), randn(300, 1024, dtype=torch.bfloat16)
    whole = multiply(x, weight, CONFIGS[0], Epilogue())
    for tokens, block_m in product((1, 16, 100, 300), (16, 32, 64, 128)):
        config = TileConfig(block_m, 64, 32)
        assert torch.equal(multiply(x[:tokens], weight, config, Epilogue()), whole[:tokens])
