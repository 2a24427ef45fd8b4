"""How kernels turn the words of a GroupWeight into numbers, in registers.

A GPU converts integers to floating point at a fraction of the rate of its other operations. So nothing here converts:
the bits of a small integer, below the exponent of a power of two, are already the sum of both, and one subtraction
leaves the integer. The bits of an e2m1 are those of a tiny floating-point number, and one product makes it as large.
Other numbers are looked up in a table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.groups import BITS, MIDDLES
from nanoinfer.kernels.look_up import is_looked_up, look_up, look_up_pairs

TO_X = tl.constexpr(2.0**63)  # twice this exponent makes an e2m1 of its bits in a float32
TO_CODES = tl.constexpr(2.0**86)  # and with it, a code of its bits: see dot_words
PRODUCT_BF16 = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
CONVERT_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $2;")
CONVERT_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $2;")
DIFFERENCE_BF16 = tl.constexpr("{ .reg .b32 minus; mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 $0, $2, minus, $1; }")

BITS_OF = dict[str, int](BITS.items())
MIDDLE_OF = dict[str, int](dict.fromkeys(BITS, 0).items()) | dict[str, int](MIDDLES.items())


@triton.constexpr_function
def bits_of(numbers: str) -> int:
    """Return the bits that a number takes in a word."""
    return BITS_OF[numbers]


@triton.constexpr_function
def mask_of(numbers: str) -> int:
    """Return the bits of an integer."""
    return 2 * MIDDLE_OF[numbers] - 1


@triton.constexpr_function
def middle_of(numbers: str) -> int:
    """Return what integers without zeros have too much; 0: the numbers are of another kind."""
    return MIDDLE_OF[numbers]


@triton.jit
def unpack_tile(
    words,
    zeros,
    scales,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_RAISED: tl.constexpr = False,
    FROM_0: tl.constexpr = False,
):
    """Return a tile's numbers in their order, [rows, words] int32 to [rows, inputs] of DTYPE, each exact or nearest.

    words: whole blocks of groups.pack
    zeros: what integers have too much, int32, of the first halves of the blocks and of their second ones; both
        broadcast with `words`; None: half of what they count to. Or minima, float32, see groups.GroupWeight
    scales: None, or factors of the numbers, of DTYPE, for both halves as well; the products are rounded to DTYPE. If
        NATIVE, they are int32, which have each twice. Or they are float32, as with minima they must be: then a number,
        scaled and less its minimum, is rounded once
    NATIVE: by instructions of a GPU for float16 or bfloat16; no layout is converted on the way to a tensor core
    IS_RAISED: an e2m1 counts 2^-126 of what it is, as the scales are larger
    FROM_0: integers have nothing too much. Then scales, if any, have at most six bits in float16
    """
    BITS: tl.constexpr = bits_of(NUMBERS)
    if NATIVE:
        pairs = _in_order(
            _pairs(words, zeros, scales, NUMBERS, DTYPE, IS_RAISED, FROM_0), words.shape[0], words.shape[1], BITS
        )
        first = (pairs & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
        second = (pairs >> 16 & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        evens = _halves(words, zeros, scales, 0, NUMBERS, DTYPE, IS_RAISED, FROM_0)
        odds = _halves(words, zeros, scales, 1, NUMBERS, DTYPE, IS_RAISED, FROM_0)
        first = _in_order(evens, words.shape[0], words.shape[1], BITS)
        second = _in_order(odds, words.shape[0], words.shape[1], BITS)
    return tl.reshape(tl.join(first, second), [words.shape[0], words.shape[1] * (32 // BITS)])


@triton.jit
def dot_words(words, xs, NUMBERS: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, NATIVE: tl.constexpr):
    """Return each word's products with a vector, added up: [rows, words] int32 to [rows, words] float32.

    Integers count from 0, which scales.scale_dots makes good. So their bits alone are tiny numbers, 2^149 times smaller
    or less, by their places, and one instruction takes a number out of its word.

    xs: from split_places, [words] each
    FIRST, END: of the places in the words; the first half of a block's inputs are at the first half of the places
    NATIVE: by instructions of a GPU
    """
    if NUMBERS == "e2m1" or is_looked_up(NUMBERS):
        dots = number_at(words, None, FIRST, NUMBERS, NATIVE) * xs[FIRST][None, :]
        for place in tl.static_range(FIRST + 1, END):
            dots += number_at(words, None, place, NUMBERS, NATIVE) * xs[place][None, :]
        return dots * TO_X if NUMBERS == "e2m1" else dots
    else:
        dots = _code_times(words, xs[FIRST], FIRST, NUMBERS)
        for place in tl.static_range(FIRST + 1, END):
            dots += _code_times(words, xs[place], place, NUMBERS)
        return dots * TO_CODES


@triton.jit
def _code_times(words, x, PLACE: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the code at a place of each word times a number of the vector, and divided by TO_CODES."""
    BITS: tl.constexpr = bits_of(NUMBERS)
    BIT: tl.constexpr = PLACE % 2 * 16 + PLACE // 2 * BITS
    IS_HIGH: tl.constexpr = BIT + BITS > 23  # too high for the 23 bits below an exponent
    SHIFTED: tl.constexpr = BIT - 12 if IS_HIGH else BIT
    bits = (words >> 12 if IS_HIGH else words) & (mask_of(NUMBERS) << SHIFTED)
    return bits.to(tl.float32, bitcast=True) * (x * (TO_X / (1 << SHIFTED)))[None, :]


@triton.jit
def split_places(x, SIZE: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the numbers of a vector that dot_words multiplies by those at each place of the words, [words] each.

    x: [SIZE] float32, whole blocks of groups.pack
    """
    if NUMBERS == "e2m1":
        x *= TO_X  # and the sums again: the numbers are tiny, and their product with a small x would lose bits
    PAIRS: tl.constexpr = 16 // bits_of(NUMBERS)  # of a word
    BLOCK: tl.constexpr = 8 * PAIRS
    by_word = tl.permute(tl.reshape(x, [SIZE // BLOCK, PAIRS, 4, 2]), (0, 2, 1, 3))
    first, second = tl.split(tl.reshape(by_word, [SIZE // BLOCK * 4, PAIRS, 2]))
    if PAIRS == 2:
        first_0, first_1 = tl.split(first)
        second_0, second_1 = tl.split(second)
        return first_0, second_0, first_1, second_1
    else:
        first_0, first_1, first_2, first_3 = _split_four(first)
        second_0, second_1, second_2, second_3 = _split_four(second)
        return first_0, second_0, first_1, second_1, first_2, second_2, first_3, second_3


@triton.jit
def load_places(x_ptr, start, row_words, WORDS: tl.constexpr, NUMBERS: tl.constexpr, NATIVE: tl.constexpr):
    """Load what split_places returns of a vector in memory: for WORDS words, from `start` on, of a row's."""
    PAIRS: tl.constexpr = 16 // bits_of(NUMBERS)  # of a word
    word = start + tl.arange(0, WORDS)
    pair = word // 4 * (4 * PAIRS) + word % 4
    mask = word < row_words
    first_0, second_0 = _load_pair(x_ptr, pair, mask, NUMBERS, NATIVE)
    first_1, second_1 = _load_pair(x_ptr, pair + 4, mask, NUMBERS, NATIVE)
    if PAIRS == 2:
        return first_0, second_0, first_1, second_1
    else:
        first_2, second_2 = _load_pair(x_ptr, pair + 8, mask, NUMBERS, NATIVE)
        first_3, second_3 = _load_pair(x_ptr, pair + 12, mask, NUMBERS, NATIVE)
        return first_0, second_0, first_1, second_1, first_2, second_2, first_3, second_3


@triton.jit
def _load_pair(x_ptr, pair, mask, NUMBERS: tl.constexpr, NATIVE: tl.constexpr):
    """Load neighbours of a vector as float32. NATIVE: two numbers of 16 bits are one word"""
    if NATIVE:
        both = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pair, mask=mask, other=0)
        first = (both & 0xFFFF).to(tl.uint16).to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        second = (both >> 16 & 0xFFFF).to(tl.uint16).to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        first = tl.load(x_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    if NUMBERS == "e2m1":
        first, second = first * TO_X, second * TO_X
    return first, second


@triton.jit
def number_at(words, zeros, PLACE: tl.constexpr, NUMBERS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the number at a place of each word, float32: the first of its pair PLACE // 2, or the second.

    An e2m1 is returned times 2^-126. Of other tables, NATIVE has float16's nearest number. zeros: float32, otherwise
    as for unpack_tile; NATIVE: as for dot_words
    """
    BITS: tl.constexpr = bits_of(NUMBERS)
    BIT: tl.constexpr = PLACE % 2 * 16 + PLACE // 2 * BITS
    if NUMBERS == "e2m1":
        magnitude = (words << 22 - BIT if BIT < 22 else words >> BIT - 22) & 0x01C00000
        sign = (words << 28 - BIT) & -0x80000000
        return (magnitude | sign).to(tl.float32, bitcast=True)
    elif is_looked_up(NUMBERS):
        if NATIVE:
            pair = look_up_pairs(words, NUMBERS, False)[PLACE // 2] >> PLACE % 2 * 16
            return pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            return look_up(words >> BIT & 15, NUMBERS)
    else:
        IS_HIGH: tl.constexpr = BIT + BITS > 23  # too high for the 23 bits below an exponent
        SHIFTED: tl.constexpr = BIT - 16 if IS_HIGH else BIT
        bits = words >> 16 if IS_HIGH else words
        sums = _take(bits, mask_of(NUMBERS) << SHIFTED, 150 - SHIFTED << 23, NATIVE)
        POWER: tl.constexpr = 1 << 23 - SHIFTED
        return sums.to(tl.float32, bitcast=True) - (POWER + (middle_of(NUMBERS) if zeros is None else zeros))


@triton.jit
def _take(words, MASK: tl.constexpr, EXPONENT: tl.constexpr, NATIVE: tl.constexpr):
    """Return words & MASK | EXPONENT, in one instruction, which a compiler does not find for two constants."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [words, MASK, EXPONENT],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return words & MASK | EXPONENT


@triton.jit
def _halves(
    words,
    zeros,
    scales,
    HALF: tl.constexpr,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_RAISED: tl.constexpr,
    FROM_0: tl.constexpr,
):
    """Return the first or second numbers of the words' pairs, [rows, words, 2] or [rows, words, 2, 2]."""
    a = _plain(words, zeros, scales, HALF, 0, NUMBERS, DTYPE, IS_RAISED, FROM_0)
    b = _plain(words, zeros, scales, 2 + HALF, bits_of(NUMBERS) == 8, NUMBERS, DTYPE, IS_RAISED, FROM_0)
    if bits_of(NUMBERS) == 8:
        return tl.join(a, b)
    else:
        c = _plain(words, zeros, scales, 4 + HALF, 1, NUMBERS, DTYPE, IS_RAISED, FROM_0)
        d = _plain(words, zeros, scales, 6 + HALF, 1, NUMBERS, DTYPE, IS_RAISED, FROM_0)
        return _join_four(a, b, c, d)


@triton.jit
def _plain(
    words,
    zeros,
    scales,
    PLACE: tl.constexpr,
    HALF: tl.constexpr,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_RAISED: tl.constexpr,
    FROM_0: tl.constexpr,
):
    return _scaled_at(words, zeros, scales, PLACE, HALF, NUMBERS, False, IS_RAISED, FROM_0).to(DTYPE)


@triton.jit
def _scaled_at(
    words,
    zeros,
    scales,
    PLACE: tl.constexpr,
    HALF: tl.constexpr,
    NUMBERS: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_RAISED: tl.constexpr,
    FROM_0: tl.constexpr,
):
    """Return the number at a place of each word, float32, scaled and less its minimum if there are any."""
    zero = zeros if zeros is None else zeros[HALF]
    if zero is not None and zero.dtype.is_floating():
        return number_at(words, 0, PLACE, NUMBERS, NATIVE) * scales[HALF].to(tl.float32) - zero
    else:
        number = number_at(words, 0 if FROM_0 else zero, PLACE, NUMBERS, NATIVE)
        if NUMBERS == "e2m1" and not IS_RAISED:
            number = number * TO_X * TO_X
        return number if scales is None else number * scales[HALF].to(tl.float32)


@triton.jit
def _pairs(
    words,
    zeros,
    scales,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_RAISED: tl.constexpr,
    FROM_0: tl.constexpr,
):
    """Return the words' pairs as two halves of DTYPE in an int32 each, [rows, words, 2] or [rows, words, 2, 2]."""
    a = _pair(words, zeros, scales, 0, NUMBERS, DTYPE, IS_RAISED, FROM_0)
    b = _pair(words, zeros, scales, 1, NUMBERS, DTYPE, IS_RAISED, FROM_0)
    if bits_of(NUMBERS) == 8:
        return tl.join(a, b)
    else:
        c = _pair(words, zeros, scales, 2, NUMBERS, DTYPE, IS_RAISED, FROM_0)
        d = _pair(words, zeros, scales, 3, NUMBERS, DTYPE, IS_RAISED, FROM_0)
        return _join_four(a, b, c, d)


@triton.jit
def _pair(
    words,
    zeros,
    scales,
    PAIR: tl.constexpr,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_RAISED: tl.constexpr,
    FROM_0: tl.constexpr,
):
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    BITS: tl.constexpr = bits_of(NUMBERS)
    HALF: tl.constexpr = PAIR // (8 // BITS)
    IS_WIDE: tl.constexpr = NUMBERS != "e2m1" and scales is not None and scales[HALF].dtype == tl.float32
    if NUMBERS == "e2m1":
        # The lowest bit of a magnitude goes to the highest one below the exponent, and the sign to the highest of all.
        LEFT: tl.constexpr = (6 if IS_BF16 else 9) - 4 * PAIR
        magnitudes = (words << LEFT if LEFT >= 0 else words >> -LEFT) & (0x01C001C0 if IS_BF16 else 0x0E000E00)
        pair = magnitudes | (words << 12 - 4 * PAIR) & -0x7FFF8000
        if not IS_RAISED:
            pair = _multiply(pair, 0x7E807E80 if IS_BF16 else 0x74007400, IS_BF16)  # 2^126 or 2^14
    elif IS_WIDE or (NUMBERS == "int8" and IS_BF16):  # the latter has no room for eight bits below an exponent
        factors = scales if IS_WIDE else None
        first = _scaled_at(words, zeros, factors, 2 * PAIR, HALF, NUMBERS, True, False, FROM_0)
        second = _scaled_at(words, zeros, factors, 2 * PAIR + 1, HALF, NUMBERS, True, False, FROM_0)
        pair = tl.inline_asm_elementwise(
            CONVERT_BF16 if IS_BF16 else CONVERT_FP16,
            "=r,f,f",
            [second, first],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif is_looked_up(NUMBERS):
        pair = look_up_pairs(words, NUMBERS, IS_BF16)[PAIR]
    else:
        POWER: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400  # 2^7 or 2^10, whose last bit is a one
        sums = _take(words >> PAIR * BITS, mask_of(NUMBERS) * 0x00010001, POWER, True)
        if FROM_0 and scales is not None:  # one instruction, which rounds once
            less = _multiply(scales[HALF], (0xC300C300 if IS_BF16 else 0xE400E400), IS_BF16)  # -2^7 or -2^10
            return _multiply_add(sums, scales[HALF], less, IS_BF16)
        excess = POWER + (0 if FROM_0 else middle_of(NUMBERS) if zeros is None else zeros[HALF]) * 0x00010001
        pair = _subtract(sums, excess, IS_BF16)
    return pair if scales is None or IS_WIDE else _multiply(pair, scales[HALF], IS_BF16)


@triton.jit
def _multiply(a, b, IS_BF16: tl.constexpr):
    """Return the products of two pairs of halves in int32s."""
    # The instruction for a product of bfloat16 alone came with sm_90.
    return _of_pairs(a, b, PRODUCT_BF16 if IS_BF16 else "mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def _multiply_add(a, b, c, IS_BF16: tl.constexpr):
    """Return the products of two pairs of halves in int32s, and a third pair more."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;" if IS_BF16 else "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, c],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _subtract(a, b, IS_BF16: tl.constexpr):
    """Return the differences of two pairs of halves in int32s."""
    return _of_pairs(a, b, DIFFERENCE_BF16 if IS_BF16 else "sub.rn.f16x2 $0, $1, $2;")


@triton.jit
def _of_pairs(a, b, INSTRUCTIONS: tl.constexpr):
    return tl.inline_asm_elementwise(INSTRUCTIONS, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _in_order(by_word, ROWS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Bring what the words of each row have, [rows, words, ...], into the order of the inputs, [rows, inputs / 2]."""
    PAIRS: tl.constexpr = 16 // BITS
    by_block = tl.reshape(by_word, [ROWS, WORDS // 4, 4, PAIRS])
    return tl.reshape(tl.permute(by_block, (0, 1, 3, 2)), [ROWS, WORDS * PAIRS])


@triton.jit
def _join_four(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _split_four(x):
    """Split [size, 4] into four of [size]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
