"""Looks up what the codes of a GroupWeight stand for, where a table says it: those of nf4 and fp4.

No memory holds the table. A GPU's permutation of bytes takes four out of eight, by four codes of three bits, in one
instruction. So it looks up one byte of four numbers, once in each half of the table, and then chooses between both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.groups import BITSANDBYTES, TABLES


@triton.jit
def look_up(codes, NUMBERS: tl.constexpr, FIRST: tl.constexpr = 0, COUNT: tl.constexpr = 16):
    """Return the numbers of codes of any shape, int32, as float32. FIRST, COUNT: the part of the table that has them"""
    if COUNT == 1:
        return tl.full(codes.shape, _number_of(NUMBERS, FIRST), tl.float32)
    else:
        HALF: tl.constexpr = COUNT // 2
        low, high = look_up(codes, NUMBERS, FIRST, HALF), look_up(codes, NUMBERS, FIRST + HALF, HALF)
        return tl.where((codes & HALF) != 0, high, low)


VALUES: dict[str, tuple[float, ...]] = {numbers: TABLES[numbers] for numbers in BITSANDBYTES}


@triton.constexpr_function
def is_looked_up(numbers: str) -> bool:
    """Return whether functions here are for these numbers."""
    return numbers in VALUES


@triton.constexpr_function
def _number_of(numbers: str, code: int) -> float:
    return VALUES[numbers][code]


@triton.jit
def look_up_pairs(words, NUMBERS: tl.constexpr, IS_BF16: tl.constexpr):
    """Return the four pairs of numbers in words, as groups.pack has them: two of 16 bits in an int32 each.

    IS_BF16: bfloat16, else float16. Each call with the same words costs nothing more: the compiler sees that.
    """
    return tl.inline_asm_elementwise(
        _permutations_of(NUMBERS, IS_BF16),
        constraints="=&r,=&r,=&r,=&r,r",
        args=[words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


def _permutations(values: tuple[float, ...], dtype: torch.dtype) -> str:
    """Return the instructions of look_up_pairs, 25 for eight numbers.

    values: of all codes. "a" are the codes in a word's lower half, "b" the others
    """
    table = torch.tensor(values).to(dtype)
    lower, upper = table.view(torch.uint8).view(16, 2).T.contiguous().view(torch.int32).tolist()  # bytes of all numbers

    def bytes_of(half: str, name: str, entries: list[int]) -> str:
        return (
            f"prmt.b32 first, {entries[0]}, {entries[1]}, codes_{half};"
            f"prmt.b32 second, {entries[2]}, {entries[3]}, codes_{half};"
            f"prmt.b32 {name}_{half}, first, second, choice_{half};"
        )

    def pairs_of(places: str, outputs: tuple[int, int]) -> str:
        return (
            f"prmt.b32 first, lower_a, upper_a, {places}; prmt.b32 second, lower_b, upper_b, {places};"
            f"prmt.b32 ${outputs[0]}, first, second, 0x5410; prmt.b32 ${outputs[1]}, first, second, 0x7632;"
        )

    return (
        "{ .reg .b32 codes_a, codes_b, choice_a, choice_b, first, second, lower_a, upper_a, lower_b, upper_b;"
        "and.b32 codes_a, $4, 0x77777777; shr.u32 codes_b, codes_a, 16;"
        # A code's fourth bit chooses between the bytes that both halves of the table have in its place.
        "shr.u32 choice_a, $4, 1; lop3.b32 choice_a, choice_a, 0x44444444, 0x32103210, 0xEA;"
        "shr.u32 choice_b, choice_a, 16;"
        + "".join(bytes_of(half, *some) for half in "ab" for some in (("lower", lower), ("upper", upper)))
        + pairs_of("0x5140", (0, 1))
        + pairs_of("0x7362", (2, 3))
        + "}"
    )


PERMUTATIONS = {
    (numbers, dtype == torch.bfloat16): _permutations(values, dtype)
    for numbers, values in VALUES.items()
    for dtype in (torch.float16, torch.bfloat16)
}


@triton.constexpr_function
def _permutations_of(numbers: str, is_bf16: bool) -> str:
    return PERMUTATIONS[numbers, is_bf16]
