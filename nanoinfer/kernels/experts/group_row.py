"""How the kernels for a single token multiply a tile of words of a GroupWeight.

The memory sends about 29 numbers of four bits in the time in which a multiprocessor does 128 operations, and only half
as many of those on integers. So a number may take no more than three, two of them on integers: two numbers at a time
become float16, by their bits alone, and are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.linear.groups.scales import scale_dots
from nanoinfer.kernels.look_up import is_looked_up, look_up_pairs
from nanoinfer.kernels.unpacking import bits_of, dot_words, middle_of, split_places

# A small integer's bits below the exponent of 1024 are the sum of both. An e2m1's bits are those of a float16 that is
# 2^14 times smaller; the vector is as many times larger. Its even places become four bytes that are the upper halves of
# float16s, and so do the odd ones.
INT4 = tl.constexpr(
    """
    {
        .reg .b32 high, a, b, c, d, sixteenth, less, excess, low_sum, high_sum;
        mov.b32 sixteenth, 0x2C002C00;
        mov.b32 less, 0xD480D480;
        mov.b32 excess, 0x64086408;
        shr.u32 high, $2, 8;
        lop3.b32 a, $2, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 b, $2, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 c, high, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 d, high, 0x00F000F0, 0x64006400, 0xEA;
        sub.rn.f16x2 a, a, excess;
        fma.rn.f16x2 b, b, sixteenth, less;
        sub.rn.f16x2 c, c, excess;
        fma.rn.f16x2 d, d, sixteenth, less;
        mul.rn.f16x2 low_sum, a, $3;
        fma.rn.f16x2 $0, b, $4, low_sum;
        mul.rn.f16x2 high_sum, c, $5;
        fma.rn.f16x2 $1, d, $6, high_sum;
    }
    """
)
_BYTES = """
    {
        .reg .b32 high, a, b, excess;
        mov.b32 excess, EXCESS;
        shr.u32 high, $2, 8;
        lop3.b32 a, $2, 0x00FF00FF, 0x64006400, 0xEA;
        lop3.b32 b, high, 0x00FF00FF, 0x64006400, 0xEA;
        sub.rn.f16x2 a, a, excess;
        sub.rn.f16x2 b, b, excess;
        mul.rn.f16x2 $0, a, $3;
        mul.rn.f16x2 $1, b, $4;
    }
    """
INT8 = tl.constexpr(_BYTES.replace("EXCESS", "0x64806480"))
INT6 = tl.constexpr(_BYTES.replace("EXCESS", "0x64206420"))
E2M1 = tl.constexpr(
    """
    {
        .reg .b32 signs, rest, even, odd, a, b, c, d, low_sum, high_sum;
        shl.b32 signs, $2, 4;
        shl.b32 rest, $2, 1;
        and.b32 rest, rest, 0x0E0E0E0E;
        lop3.b32 even, signs, 0x80808080, rest, 0xEA;
        shr.u32 rest, $2, 3;
        and.b32 rest, rest, 0x0E0E0E0E;
        lop3.b32 odd, $2, 0x80808080, rest, 0xEA;
        prmt.b32 a, even, 0, 0x2404;
        prmt.b32 b, odd, 0, 0x2404;
        and.b32 c, even, 0xFF00FF00;
        and.b32 d, odd, 0xFF00FF00;
        mul.rn.f16x2 low_sum, a, $3;
        fma.rn.f16x2 $0, b, $4, low_sum;
        mul.rn.f16x2 high_sum, c, $5;
        fma.rn.f16x2 $1, d, $6, high_sum;
    }
    """
)
LOOKED_UP = tl.constexpr(
    """
    {
        .reg .b32 low_sum, high_sum;
        mul.rn.f16x2 low_sum, $2, $6;
        fma.rn.f16x2 $0, $3, $7, low_sum;
        mul.rn.f16x2 high_sum, $4, $8;
        fma.rn.f16x2 $1, $5, $9, high_sum;
    }
    """
)


@triton.jit
def prepare_places(
    x,
    largest,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    NUMBERS: tl.constexpr,
    ZEROS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return a token's vector x, [SIZE] float32, as multiply_words wants it; x is at most `largest`.

    The vector becomes what each place of the words multiplies, divided by size_of_places: in pairs of float16 if
    NATIVE, else in float32. Where products need them, such as for ZEROS, the second result are the sums of its units. A
    unit is what four words have, or half of that.
    """
    if NATIVE:
        power: tl.constexpr = 16384.0 if NUMBERS == "e2m1" else 64.0
        halves = (x * (power / tl.maximum(largest, 1e-30))).to(tl.float16)
        places = _pairs(halves, SIZE, NUMBERS)
        x = halves.to(tl.float32)
    else:
        places = split_places(x, SIZE, NUMBERS)
    HAS_SUMS: tl.constexpr = ZEROS or not (NATIVE or middle_of(NUMBERS) == 0)
    return places, tl.sum(tl.reshape(x, [SIZE // UNIT, UNIT]), axis=1) if HAS_SUMS else 0.0


@triton.jit
def size_of_places(largest, NUMBERS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the factor of all products with what prepare_places returns."""
    if not NATIVE:
        return 1.0
    elif NUMBERS == "e2m1":  # these numbers are smaller by what the vector is larger
        return tl.maximum(largest, 1e-30)
    else:
        return tl.maximum(largest, 1e-30) / 64


@triton.jit
def multiply_words(
    tile, places, sums, scales, zeros, factors, NUMBERS: tl.constexpr, HALVES: tl.constexpr, NATIVE: tl.constexpr
):
    """Return the products of a tile's rows with a token's vector, [rows] float32.

    tile: [rows, words] int32; places, sums: from prepare_places
    scales, zeros, factors: those of each unit, [rows, units]; factors: of its block, from scales.load_factors, or None
    HALVES: a unit is half of what four words have
    """
    ROWS: tl.constexpr = tile.shape[0]
    FOURS: tl.constexpr = tile.shape[1] // 4
    MOST: tl.constexpr = 32 // bits_of(NUMBERS)
    if NATIVE:
        first, second = _multiply_halves(tile, places, NUMBERS)
        if HALVES:
            first, second = _add_pair(first), _add_pair(second)
        else:
            dots = _add_pair(_add_halves(first, second))
    elif HALVES:
        first = dot_words(tile, places, NUMBERS, 0, MOST // 2, False)
        second = dot_words(tile, places, NUMBERS, MOST // 2, MOST, False)
    else:
        dots = dot_words(tile, places, NUMBERS, 0, MOST, False)
    if HALVES:
        by_half = tl.reshape(tl.join(first, second), [ROWS, FOURS, 4, 2])
        of_units = tl.reshape(tl.sum(by_half, axis=2), [ROWS, 2 * FOURS])
    else:
        of_units = tl.sum(tl.reshape(dots, [ROWS, FOURS, 4]), axis=2)
    LESS: tl.constexpr = middle_of(NUMBERS) if NATIVE else 0
    if zeros is not None or (not NATIVE and middle_of(NUMBERS) > 0):
        sums = sums[None, :]
    return tl.sum(scale_dots(of_units, sums, scales, zeros, NUMBERS, LESS, factors), axis=1)


@triton.jit
def _pairs(x, SIZE: tl.constexpr, NUMBERS: tl.constexpr):
    """Return neighbours of x, [SIZE] float16, as an int32, in the order of split_places: [words] each."""
    PAIRS: tl.constexpr = 16 // bits_of(NUMBERS)  # of a word
    bits = x.to(tl.uint16, bitcast=True).to(tl.int32) << tl.arange(0, SIZE) % 2 * 16
    pairs = tl.sum(tl.reshape(bits, [SIZE // 2, 2]), axis=1)
    by_word = tl.permute(tl.reshape(pairs, [SIZE // (8 * PAIRS), PAIRS, 4]), (0, 2, 1))
    if PAIRS == 2:
        return tl.split(tl.reshape(by_word, [SIZE // 4, 2]))
    else:
        even, odd = tl.split(tl.reshape(by_word, [SIZE // 8, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _multiply_halves(words, pairs, NUMBERS: tl.constexpr):
    """Return the sums of each word's products, of the first half of its places and of the second, as two float16 each.

    words: [rows, words] int32; pairs: from _pairs, [words] each
    """
    if bits_of(NUMBERS) == 8:
        return tl.inline_asm_elementwise(
            INT8 if NUMBERS == "int8" else INT6,
            constraints="=&r,=&r,r,r,r",
            args=[words, pairs[0][None, :], pairs[1][None, :]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    elif is_looked_up(NUMBERS):
        a, b, c, d = look_up_pairs(words, NUMBERS, False)
        return tl.inline_asm_elementwise(
            LOOKED_UP,
            constraints="=&r,=&r,r,r,r,r,r,r,r,r",
            args=[a, b, c, d, pairs[0][None, :], pairs[1][None, :], pairs[2][None, :], pairs[3][None, :]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            INT4 if NUMBERS == "int4" else E2M1,
            constraints="=&r,=&r,r,r,r,r,r",
            args=[words, pairs[0][None, :], pairs[1][None, :], pairs[2][None, :], pairs[3][None, :]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _add_halves(a, b):
    """Return the sums of two float16 in each int32."""
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _add_pair(pair):
    """Return the sum of the two float16 in each int32, float32."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b16 even, odd;
            .reg .f32 evens, odds;
            mov.b32 {even, odd}, $1;
            cvt.f32.f16 evens, even;
            cvt.f32.f16 odds, odd;
            add.f32 $0, evens, odds;
        }
        """,
        constraints="=f,r",
        args=[pair],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
