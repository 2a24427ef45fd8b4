"""How the kernels for a single token multiply a tile of a weight, above all one in FP8.

A program that converts each FP8 number by itself cannot keep up with the memory. A GPU converts two of them to float16
in one instruction, and multiplies two in another. So there a thread loads words of eight FP8 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from nanoinfer.kernels.fp8 import BLOCK, Fp8Weight
from nanoinfer.kernels.launch import next_power_of_2
from nanoinfer.kernels.linear.activation import gated_row
from nanoinfer.kernels.linear.operands.operand import RowOperand
from nanoinfer.kernels.linear.operands.plain import MIN_TILE, PER_MULTIPROCESSOR, load_rows


@triton.jit
def prepare_row(x, SIZE: tl.constexpr, IN_WORDS: tl.constexpr):
    """Return the token's vector x, [SIZE], as multiply_tile wants it, and a factor of all its products.

    The vector becomes float32, [SIZE], or if IN_WORDS two vectors of four float16 in an int64, [SIZE / 8] each.
    """
    wide = x.to(tl.float32)
    return _pack_halves(wide, SIZE) if IN_WORDS else (wide, 1.0)


@triton.jit
def multiply_tile(
    tile,
    x,
    factor,
    scales,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_FP8: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """Return the products of a tile's rows with a token's vector, [BLOCK_N] float32.

    tile: [BLOCK_N, BLOCK_K], or if IN_WORDS [BLOCK_N, BLOCK_K / 8] int64; x, factor: from prepare_row
    scales: if IN_FP8, [BLOCK_N, BLOCK_K / BLOCK]
    """
    products = _multiply_halves(tile, x) if IN_WORDS else tile.to(tl.float32) * x[None, :]
    if IN_FP8:
        of_blocks = tl.reshape(products, [BLOCK_N, BLOCK_K // BLOCK, products.shape[1] // (BLOCK_K // BLOCK)])
        return tl.sum(tl.sum(of_blocks, axis=2) * scales, axis=1) * factor
    else:
        return tl.sum(products, axis=1)


@dataclass(frozen=True)
class Fp8RowForm:
    """What the functions of a weight in FP8 are compiled for. in_words: eight numbers are an int64"""

    height: int
    width: int
    in_words: bool


def fp8_row(weight: Fp8Weight) -> RowOperand:
    """Return the operand of a weight for a single token."""
    assert weight.numbers.is_contiguous()
    *_, rows, in_features = weight.numbers.shape
    row = next_power_of_2(in_features)
    tile = max(2 * MIN_TILE, 2 * row)  # half the bytes of 16 bits; and fewer warps wait for each other
    programs = tile // row, 2 * PER_MULTIPROCESSOR // tile, 4 if tile == 2 * MIN_TILE else 8
    form = Fp8RowForm(*weight.block, weight.numbers.is_cuda)
    functions = _load_tile, _load_scales, _prepare, _multiply
    return RowOperand(Fp8Weight(*weight), form, *functions, rows, in_features, programs, None)


@triton.jit
def _load_tile(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """See linear.plain.load_row_tile; if in_words, [block_n, block_k / 8] int64."""
    PER_WORD: tl.constexpr = 8 if HOW.form.in_words else 1
    numbers, width = parts.numbers, in_features // PER_WORD
    if HOW.form.in_words:
        numbers = numbers.to(tl.pointer_type(tl.int64))
    return load_rows(numbers, first_row, tile, width, width, weight_rows, HOW.block_k // PER_WORD, HOW)


@triton.jit
def _load_scales(parts, first_row, tile, in_features, weight_rows, HOW: tl.constexpr):
    """Load the scales of what _load_tile loads, [block_n, block_k / BLOCK]."""
    FORM: tl.constexpr = HOW.form
    n = tile * HOW.block_n + tl.arange(0, HOW.block_n)
    first = tl.arange(0, HOW.block_k // BLOCK) * BLOCK
    mask = (n < weight_rows)[:, None] & (first < in_features)[None, :]
    if HOW.activation is not None:
        n = gated_row(n, weight_rows)
    row = (first_row.to(tl.int32) + n) // FORM.height * (in_features // FORM.width)
    return tl.load(parts.scales + row[:, None] + first // FORM.width, mask=mask, other=0.0)


@triton.jit
def _prepare(x, HOW: tl.constexpr):
    return prepare_row(x, HOW.block_k, HOW.form.in_words)


@triton.jit
def _multiply(parts, tile, vector, scales, first_row, index, weight_rows, HOW: tl.constexpr):
    x, factor = vector
    return multiply_tile(tile, x, factor, scales, HOW.block_n, HOW.block_k, True, HOW.form.in_words)


@triton.jit
def _pack_halves(x, SIZE: tl.constexpr):
    """Divide x, [SIZE], by its largest number and round it to float16, [SIZE / 8] int64 twice; return the number too.

    The first has the first four of each eight, the other the last four.
    """
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30)
    x *= 1 / largest
    bits = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int64) << (tl.arange(0, SIZE) % 4 * 16).to(tl.int64)
    fours = tl.sum(tl.reshape(bits, [SIZE // 4, 4]), axis=1)
    return tl.split(tl.reshape(fours, [SIZE // 8, 2])), largest


@triton.jit
def _multiply_halves(tile, fours):
    """Return the product of each eight FP8 numbers, [rows, eights] int64, with x's, [eights] int64 twice, as float32.

    A GPU converts two FP8 numbers to float16 in one instruction, and multiplies two of these in another. Only sums of
    four products are rounded to float16; x is at most 1, and so they are below its largest number.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 first, second, x0, x1, x2, x3, pair, sums;
            .reg .b16 a, b, c, d, even, odd;
            .reg .f32 evens, odds;
            mov.b64 {first, second}, $1;
            mov.b64 {x0, x1}, $2;
            mov.b64 {x2, x3}, $3;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.rn.f16x2.e4m3x2 pair, a;
            mul.rn.f16x2 sums, pair, x0;
            cvt.rn.f16x2.e4m3x2 pair, b;
            fma.rn.f16x2 sums, pair, x1, sums;
            cvt.rn.f16x2.e4m3x2 pair, c;
            fma.rn.f16x2 sums, pair, x2, sums;
            cvt.rn.f16x2.e4m3x2 pair, d;
            fma.rn.f16x2 sums, pair, x3, sums;
            mov.b32 {even, odd}, sums;
            cvt.f32.f16 evens, even;
            cvt.f32.f16 odds, odd;
            add.f32 $0, evens, odds;
        }
        """,
        constraints="=f,l,l,l",
        args=[tile, fours[0][None, :], fours[1][None, :]],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
