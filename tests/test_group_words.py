"""Words of four or eight bits: packed and unpacked in torch, and unpacked in kernels."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from conftest import DEVICE
from torch import Tensor

from nanoinfer.kernels.groups import BITS, BITSANDBYTES, MIDDLES, TABLES, Numbers, pack, unpack
from nanoinfer.kernels.linear.groups.scales import factors_of, scale_dots
from nanoinfer.kernels.look_up import PERMUTATIONS
from nanoinfer.kernels.unpacking import dot_words, split_places, unpack_tile

ROWS, INPUTS = 16, 64
ALL: tuple[Numbers, ...] = ("int4", "int6", "int8", "e2m1", "nf4", "fp4")
IN_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]  # the interpreter has plain numbers


@pytest.mark.parametrize("numbers", ALL)
@pytest.mark.parametrize("in_features", [1, 31, 32, 33, 64])
def test_what_is_packed_is_unpacked(numbers: Numbers, in_features: int) -> None:
    bits = BITS[numbers]
    drawn = torch.randint(1 << bits, (3, 2, in_features))
    words = pack(drawn, bits)
    assert words.dtype == torch.int32
    assert words.shape == (3, 2, 4 * -(-in_features * bits // 128))
    assert torch.equal(unpack(words, bits, in_features), drawn.byte())


def test_a_word_has_neighbours_in_its_halves() -> None:
    """The second of a block's four words has the numbers 2, 3, 10, 11, 18, 19, 26 and 27."""
    assert pack(torch.arange(32) % 16, 4)[1] & 0xFFFFFFFF == 0xB3B3A2A2


def count_of(numbers: Numbers) -> int:
    return 2 * MIDDLES[numbers] if numbers in MIDDLES else 1 << BITS[numbers]


def values(drawn: Tensor, numbers: Numbers, zeros: Tensor | None) -> Tensor:
    """zeros: broadcasts with `drawn`"""
    if numbers in TABLES:
        return torch.tensor(TABLES[numbers], device=DEVICE)[drawn]
    return (drawn - (MIDDLES[numbers] if zeros is None else zeros)).float()


@triton.jit
def _unpack_kernel(
    words_ptr,
    zeros_ptr,
    scales_ptr,
    out_ptr,
    NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, word, k = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, INPUTS)
    words = tl.load(words_ptr + row[:, None] * WORDS + word[None, :])
    zeros, scales = None, None
    if zeros_ptr is not None:
        zero, other = tl.load(zeros_ptr + row), tl.load(zeros_ptr + ROWS + row)
        zeros = zero[:, None].to(tl.int32), other[:, None].to(tl.int32)
    if scales_ptr is not None:
        first, second = tl.load(scales_ptr + row), tl.load(scales_ptr + ROWS + row)
        scales = factors_of(first[:, None], DTYPE, NATIVE), factors_of(second[:, None], DTYPE, NATIVE)
    tile = unpack_tile(words, zeros, scales, NUMBERS, DTYPE, NATIVE)
    tl.store(out_ptr + row[:, None] * INPUTS + k[None, :], tile)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize(("numbers", "with_zeros"), [*((n, False) for n in ALL), ("int4", True), ("int8", True)])
def test_a_kernel_unpacks_a_tile(numbers: Numbers, with_zeros: bool, with_scales: bool, dtype: torch.dtype) -> None:
    bits = BITS[numbers]
    drawn = torch.arange(ROWS * INPUTS, device=DEVICE).view(ROWS, INPUTS) * 7 % count_of(numbers)
    zeros = torch.randint(1 << bits, (2, ROWS), device=DEVICE) if with_zeros else None  # of the blocks' halves
    scales = torch.rand(2, ROWS, device=DEVICE).to(dtype) if with_scales else None  # of these, too
    words, out = pack(drawn, bits), torch.empty(ROWS, INPUTS, device=DEVICE, dtype=dtype)
    in_bytes = None if zeros is None else zeros.to(torch.uint8)
    _unpack_kernel[(1,)](
        words, in_bytes, scales, out, numbers, IN_TRITON[dtype], DEVICE == "cuda", ROWS, INPUTS, words.shape[1]
    )

    def of_inputs(of_halves: Tensor) -> Tensor:
        block = 128 // bits
        return of_halves.T.repeat_interleave(block // 2, dim=1).repeat(1, INPUTS // block)

    expected = values(drawn, numbers, None if zeros is None else of_inputs(zeros)).to(dtype)
    assert torch.equal(out, expected if scales is None else expected * of_inputs(scales))


@triton.jit
def _dot_kernel(
    words_ptr,
    zeros_ptr,
    x_ptr,
    out_ptr,
    NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    words = tl.load(words_ptr + row[:, None] * WORDS + word[None, :])
    zeros, ones, x = None, tl.full([ROWS, 1], 1.0, tl.float32), tl.load(x_ptr + tl.arange(0, INPUTS))
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + row)[:, None]
    xs = split_places(x, INPUTS, NUMBERS)
    MOST: tl.constexpr = INPUTS // WORDS  # numbers of a word
    first = dot_words(words, xs, NUMBERS, 0, MOST // 2, NATIVE)
    second = dot_words(words, xs, NUMBERS, MOST // 2, MOST, NATIVE)
    dots = tl.sum(first + second, axis=1, keep_dims=True)
    out = scale_dots(dots, tl.sum(x, axis=0), ones, zeros, NUMBERS)
    tl.store(out_ptr + row, tl.sum(out, axis=1))


@pytest.mark.parametrize(("numbers", "with_zeros"), [*((n, False) for n in ALL), ("int4", True), ("int8", True)])
def test_a_kernel_multiplies_words_by_a_vector(numbers: Numbers, with_zeros: bool) -> None:
    bits = BITS[numbers]
    drawn = torch.randint(count_of(numbers), (ROWS, INPUTS), device=DEVICE)
    zeros = torch.randint(1 << bits, (ROWS,), device=DEVICE) if with_zeros else None
    x = torch.randint(-9, 9, (INPUTS,), device=DEVICE).float()  # whose products and sums float32 has
    words, out = pack(drawn, bits), torch.empty(ROWS, device=DEVICE)
    in_bytes = None if zeros is None else zeros.to(torch.uint8)
    _dot_kernel[(1,)](words, in_bytes, x, out, numbers, ROWS, INPUTS, words.shape[1], DEVICE == "cuda")
    own = values(drawn, numbers, None if zeros is None else zeros[:, None])
    if numbers in BITSANDBYTES and DEVICE == "cuda":
        own = own.half().float()
    # float32 rounds these numbers and their products.
    torch.testing.assert_close(out, own @ x, rtol=0, atol=1e-4 if numbers in BITSANDBYTES else 0)


def run(instructions: str, word: int) -> list[int]:
    """Run what a GPU does with a word: its instructions, one by one; returns the four results."""
    held = {"$4": word}

    def read(operand: str) -> int:
        return held[operand] if operand in held else int(operand, 0) & 0xFFFFFFFF

    for line in filter(None, map(str.strip, re.sub(r"\.reg[^;]*;", "", instructions).strip("{ }").split(";"))):
        name, rest = line.split(" ", 1)
        target, *operands = map(str.strip, rest.split(","))
        a, b, *more = map(read, operands)
        if name == "and.b32":
            held[target] = a & b
        elif name == "shr.u32":
            held[target] = a >> b
        elif name == "lop3.b32":
            assert more[1] == 0xEA
            held[target] = a & b | more[0]
        else:
            assert name == "prmt.b32"
            places = [more[0] >> 4 * byte & 15 for byte in range(4)]
            assert max(places) < 8, "an eighth bit repeats a sign"
            both = (b << 32 | a).to_bytes(8, "little")
            held[target] = int.from_bytes(bytes(both[place] for place in places), "little")
    return [held[f"${place}"] for place in range(4)]


@pytest.mark.parametrize("numbers", BITSANDBYTES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_looks_up_pairs_by_permutations(numbers: Numbers, dtype: torch.dtype) -> None:
    drawn = torch.cat([torch.arange(16), torch.randint(16, (48,))])
    looked_up = [
        run(PERMUTATIONS[numbers, dtype == torch.bfloat16], word & 0xFFFFFFFF) for word in pack(drawn, 4).tolist()
    ]
    pairs = torch.tensor(looked_up).to(torch.uint32).view(torch.int16).view(dtype).view(-1, 4, 4, 2)
    assert torch.equal(pairs.transpose(1, 2).flatten(), torch.tensor(TABLES[numbers]).to(dtype)[drawn])
