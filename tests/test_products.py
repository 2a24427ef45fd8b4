"""Products with weights in FP8 and in groups, against float64 of the numbers that the operands stand for.

Those of plain weights are in test_kernels.py.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
import torch
from cases.weights import (
    BLOCKS,
    DTYPE,
    GROUPINGS,
    INT4,
    MXFP4,
    NVFP4,
    Q4_K,
    Q5_K,
    Q6_K,
    SMALL_GROUPS,
    Block,
    Form,
    assert_near,
    dequantized,
    draw,
    expected,
    matrix_of,
    most_error,
)
from conftest import DEVICE, HAS_CUDA, of_each_kind, whole_only
from test_kernels import randn
from torch import Tensor

from nanoinfer.kernels.fp8 import (
    FP8,
    LARGEST,
    Fp8Tokens,
    Fp8Weight,
    as_bytes,
    quantize,
    quantize_reference,
    quantize_triton,
)
from nanoinfer.kernels.groups import LARGEST_POWER, GroupWeight, dequantize_reference
from nanoinfer.kernels.launch import is_recording, recording
from nanoinfer.kernels.linear.activation import Activation, fp8_gate_mul_triton, gate_mul_reference, gate_mul_triton
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.linear.fp8 import linear as fp8
from nanoinfer.kernels.linear.groups import cpu, dense, one_row, one_wave, scales
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight
from nanoinfer.kernels.linear.groups.one_row import can_multiply_row, group_row_linear
from nanoinfer.kernels.linear.groups.one_wave import one_wave_triton
from nanoinfer.kernels.linear.groups.row import has_row_kernel
from nanoinfer.kernels.linear.groups.tiles import group_operand
from nanoinfer.kernels.linear.in_order.order import Grouping
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.operands.joined import JoinedWeight
from nanoinfer.kernels.linear.tiles import Epilogue, TileConfig, multiply_tiles
from nanoinfer.kernels.norm.norm import Norm, fp8_norm_triton, norm_add_norm_reference, normalize_reference

of_groupings = pytest.mark.parametrize("form", of_each_kind(zip(GROUPINGS), 0, 1, 2, 3, 4, 10, 12, 14, 16), ids=str)
of_all_groupings = pytest.mark.parametrize("form", [*GROUPINGS, *SMALL_GROUPS], ids=str)
LOW: Block = (8, 128)
WAYS = [(False, True), (True, True), (True, False)]  # whether a product may be in pieces, and whether blocks are copied
LARGE_TILES = [(20, TileConfig(32, 64)), (40, TileConfig(64, 64)), (70, TileConfig(64, 128, warps=8))]  # for tokens
GPU_SHAPES = [(6144, 4096), (1024, 3072), (1152, 1280), (4096, 12288)]


def norm_of(inputs: int, dtype: torch.dtype = DTYPE) -> Norm:
    return Norm(torch.rand(inputs, device=DEVICE).to(dtype), 1e-6)


def assert_same(out: Fp8Tokens, reference: Fp8Tokens) -> None:
    """Compare all bits of the tokens; behind them is anything."""
    tokens = reference.tokens
    assert out.scales.shape == reference.scales.shape
    assert torch.equal(out.scales[:, :tokens], reference.scales[:, :tokens])
    assert torch.equal(as_bytes(out.numbers)[:tokens], as_bytes(reference.numbers)[:tokens])


class TestTokensInFp8:
    @pytest.mark.parametrize(("tokens", "size"), [(1, 128), (3, 640), (5, 4096)])
    def test_the_kernel_rounds_like_the_reference(self, tokens: int, size: int) -> None:
        x = randn(tokens, size) * torch.logspace(-5, 5, size, device=DEVICE)
        x[0, :128] = 0
        assert_same(quantize_triton(x), quantize_reference(x))

    def test_a_number_loses_no_more_than_a_sixteenth(self) -> None:
        x = randn(7, 512)
        x[2] *= 1e5
        largest = x.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1)
        error = (dequantized(quantize(x)) - x).abs()
        assert (error <= torch.maximum(x.abs() / 16, largest * 2**-9 / LARGEST) * 1.0001).all()

    @pytest.mark.parametrize("pieces", [1, 3])
    @pytest.mark.parametrize("with_post", [False, True])
    def test_the_norm_rounds_its_result(self, pieces: int, with_post: bool) -> None:
        """One launch adds, normalises and rounds to FP8."""
        x, residual = randn(pieces, 5, 384), randn(5, 384, dtype=DTYPE)
        norm, post = (norm_of(384) for _ in range(2))
        summed = x.sum(0).to(DTYPE)
        out, total = fp8_norm_triton(x if pieces > 1 else summed, residual, norm, post if with_post else None)
        if with_post:
            normed, sums = norm_add_norm_reference(summed, residual, post, norm)
        else:
            sums = summed + residual
            normed = normalize_reference(sums, norm)
        torch.testing.assert_close(total, sums, rtol=0.02, atol=0.02)
        assert_near(dequantized(out), normed.double(), 0.05)
        assert out.dtype == total.dtype
        alone, same = fp8_norm_triton(total, None, norm, None)
        assert same is total
        assert_near(dequantized(alone), normalize_reference(total, norm).double(), 0.05)

    @pytest.mark.parametrize("tokens", [1, 6])
    @pytest.mark.parametrize("size", [128, 1152])
    def test_the_activation_rounds_its_result(self, tokens: int, size: int) -> None:
        """One launch multiplies gates and ups, and rounds to FP8."""
        gate_up = randn(tokens, 2 * size, dtype=DTYPE)
        out = fp8_gate_mul_triton(gate_up, "silu")
        assert out.dtype == DTYPE
        assert_same(out, quantize_triton(gate_mul_triton(gate_up, "silu")))

    @pytest.mark.gpu
    def test_what_is_no_number_stays_none(self) -> None:
        """Triton's interpreter makes a number of it."""
        x = randn(2, 256)
        x[1, 5] = float("nan")
        assert dequantized(quantize_triton(x))[1, 5].isnan()
        assert not dequantized(quantize_triton(x))[0].isnan().any()


@pytest.mark.parametrize("has_bias", [*whole_only([False]), True])
@pytest.mark.parametrize("inputs", [512, *whole_only([768])])
@pytest.mark.parametrize(
    ("form", "activation"),
    [
        *product([*BLOCKS, LOW], [None, "silu"]),
        *of_each_kind(product(GROUPINGS, ["silu", None]), 0, 2, 4, 6, 8, 20, 22, 24, 28, 32),
    ],
    ids=str,
)
def test_one_token(
    form: Form, inputs: int, activation: Activation | None, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without the sum and the norm before; 136 rows fill no tile, and 768 inputs leave a part of one empty."""
    monkeypatch.setattr(one_row, "INPUTS", 256)
    rows = 256 if form in BLOCKS else 136
    weight, x = draw(form, rows, inputs), randn(1, inputs, dtype=DTYPE)
    bias, most = randn(rows, dtype=DTYPE) if has_bias else None, most_error(weight)
    assert_near(one_row_linear(x, weight, bias, activation), expected(x, weight, bias, activation), most)
    if isinstance(weight, GroupWeight):
        assert_near(group_row_linear(x, weight, bias, activation), expected(x, weight, bias, activation), most)
    out, total = one_row_norm_linear(x, 300 * x, norm := norm_of(inputs), weight, bias, activation)
    normed = normalize_reference(total, norm)
    assert_near(out, expected(normed, weight, bias, activation), most if form in BLOCKS else 2 * most)


@pytest.mark.parametrize("has_bias", [*whole_only([False]), True])
@pytest.mark.parametrize(
    ("block", "tokens", "way"),
    [
        *product(BLOCKS, [2], WAYS),
        *product([LOW], [5, 70], [(False, False), (False, True)]),
        *whole_only(product(BLOCKS, [20, 40, 130], WAYS)),
    ],
    ids=str,
)
def test_several_tokens_in_fp8(block: Block, tokens: int, way: tuple[bool, bool], has_bias: bool) -> None:
    """200 rows fill no tile."""
    rows, inputs = 256 if HAS_CUDA else 128, 4096 if tokens > 64 else 2048  # the interpreter is slow
    rows, inputs = (200, 512) if block == LOW else (rows, inputs)
    may_split, copies = way
    weight, x = draw(block, rows, inputs), randn(tokens, inputs, dtype=DTYPE)
    bias = randn(rows, dtype=DTYPE) if has_bias else None
    config = fp8.find_config(quantize(x), weight, may_split)
    assert config is not None
    assert (config.pieces > 1) == may_split
    out = fp8.fp8_linear_triton(quantize(x), weight, config, bias, copies)
    assert out.shape == (() if config.pieces == 1 else (config.pieces,)) + (tokens, rows)
    assert_near(out.sum(0) if may_split else out, expected(x, weight, bias), most_error(weight))


@pytest.mark.parametrize(
    ("tokens", "config", "activation"),
    [
        (3, TileConfig(16, 64, pieces=2), None),
        (5, TileConfig(16, 64), "silu"),
        *whole_only((*tile, "silu") for tile in LARGE_TILES),
        *whole_only((*tile, None) for tile in [(5, TileConfig(16, 64)), *LARGE_TILES]),
    ],
)
@of_groupings
def test_several_tokens_in_groups(
    form: Grouping, tokens: int, config: TileConfig, activation: Activation | None
) -> None:
    """288 inputs end within a step, wherever a step has several groups. Of several pieces, the first has the bias."""
    inputs = 288 if form.size in (16, 32) else 384  # two pieces of three or five steps are no equal ones
    weight, bias, x = draw(form, 200, inputs), randn(200, dtype=DTYPE), randn(tokens, inputs, dtype=DTYPE)
    out = one_wave_triton(x, weight, config, bias, activation)
    if config.pieces > 1:
        assert out.dtype == torch.float32
        assert out.shape == (config.pieces, tokens, 200)
        out = out.sum(0)
    most = 1e-6 if config.pieces > 1 else most_error(weight)
    assert_near(out, expected(x, weight, bias, activation), most)


@pytest.mark.parametrize("tokens", [9, 70])  # of more than 64, scales and minima multiply numbers, not sums
@pytest.mark.parametrize("form", [Q4_K, Q5_K._replace(block=128), Q6_K], ids=str)
def test_blocks_with_factors(form: Grouping, tokens: int) -> None:
    """Each of three pieces has a block, or two; 48 rows fill no tile."""
    weight, bias, x = draw(form, 48, 768), randn(48, dtype=DTYPE), randn(tokens, 768, dtype=DTYPE)
    for pieces in (1, 3):
        config = TileConfig(16 if tokens < 16 else 128, 64, pieces=pieces)
        out = one_wave_triton(x, weight, config, bias)
        assert_near(out if pieces == 1 else out.sum(0), expected(x, weight, bias), most_error(weight))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_token_with_weights_side_by_side(activation: Activation | None) -> None:
    weights = [draw(form, rows, 256) for form, rows in ((Q4_K, 40), (Q6_K, 24), (None, 16))]
    bias, x, norm = randn(80, dtype=DTYPE), randn(1, 256, dtype=DTYPE), norm_of(256)
    row = JoinedWeight(weights).for_row(x, alone=False)
    assert row is not None
    out, total = one_row_norm_linear(x, 300 * x, norm, row, bias, activation)
    normed = normalize_reference(total, norm).double()
    reference = normed @ torch.cat([matrix_of(weight) for weight in weights]).T + bias.double()
    reference = gate_mul_reference(reference, activation) if activation else reference
    assert_near(out, reference, 2 * most_error(weights[0]))


@pytest.mark.parametrize(("size", "inputs"), [(96, 288), (0, 352)])
def test_groups_that_are_no_power_of_two(size: int, inputs: int) -> None:
    weight, x = draw(INT4._replace(size=size, scales=torch.float16), 64, inputs), randn(3, inputs, dtype=DTYPE)
    assert_near(one_wave_triton(x, weight, TileConfig(16, 64)), expected(x, weight), most_error(weight))
    assert_near(group_row_linear(x[:1], weight), expected(x[:1], weight), most_error(weight))


def test_scales_in_fp8_are_bytes_where_triton_lacks_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that FP8 has, in each kernel; such a GPU is before compute capability 8.9."""
    monkeypatch.setattr(scales, "_lacks_fp8", lambda _: True)
    weight, x = draw(NVFP4, 64, 256), randn(3, 256, dtype=DTYPE)
    every = torch.arange(weight.scales.numel(), device=DEVICE) % 256
    every[every & 0x7F == 0x7F] = 0  # they are NaN
    weight = weight._replace(scales=every.to(torch.uint8).view(FP8).view_as(weight.scales))
    most, one = most_error(weight), expected(x[:1], weight)
    assert torch.equal(dense.dequantize_triton(weight, torch.float32, 256), dequantize_reference(weight, torch.float32))
    assert_near(one_row_linear(x[:1], weight), one, most)
    assert_near(group_row_linear(x[:1], weight), one, most)
    assert_near(one_wave_triton(x, weight, TileConfig(16, 64)), expected(x, weight), most)


def test_powers_of_two_are_exact_from_the_least_to_the_largest_of_a_weight() -> None:
    """Each is a row's. Of any other, a product with an e2m1 is beyond bfloat16's range where kernels compute it."""
    powers = torch.arange(-68, 66, device=DEVICE)
    weight = draw(MXFP4, len(powers), 64)
    weight = weight._replace(scales=(powers + 127).to(torch.uint8)[:, None].expand(-1, 2).contiguous())
    assert 2.0 ** powers[-1].item() == LARGEST_POWER
    x = torch.eye(64, device=DEVICE, dtype=DTYPE)[:8]
    operand = group_operand(weight, x, 64, scales_first=True)
    out = x.new_empty(1, 8, len(powers))
    multiply_tiles(x, operand, TileConfig(16, 64, 64), out, Epilogue())
    assert torch.equal(out[0], dequantize_reference(weight, DTYPE)[:, :8].T)


class TestEveryWay:
    """As dispatch sees it: the CPU's ways here, on a GPU those for so many tokens."""

    @pytest.mark.parametrize("tokens", [1, 3, *whole_only([600])])
    @pytest.mark.parametrize(
        ("form", "inputs"),
        [
            *((form, 384) for form in SMALL_GROUPS),  # which have a dense copy
            *((INT4._replace(size=0, scales=torch.float16), inputs) for inputs in (32, 71)),
            *of_each_kind(product(GROUPINGS, [384]), 0, 1, 2, 3, 4, 10, 11, 12, 14, 16),
        ],
        ids=str,
    )
    def test_in_groups(self, form: Grouping, inputs: int, tokens: int) -> None:
        check_every_way(form, (96, inputs), tokens, DTYPE, "gelu_tanh")

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("shape", "tokens"),
        of_each_kind(product(GPU_SHAPES, [1, 2, 16, 17, 33, 64, 65, 128, 200, 300]), *range(10), 10, 22, 36),
        ids=str,
    )
    def test_in_fp8(self, shape: tuple[int, int], tokens: int) -> None:
        """cuBLAS multiplies many tokens, if it can."""
        assert fp8.can_multiply_fp8(torch.bfloat16, draw(BLOCKS[0], 128, 128))
        for dtype in (torch.bfloat16, torch.float16):
            check_every_way(BLOCKS[0], shape, tokens, dtype, "silu")


def check_every_way(form: Form, shape: tuple[int, int], tokens: int, dtype: torch.dtype, before: Activation) -> None:
    """Check a product with each activation, and with `before`; one that may be in pieces; and one behind a norm."""
    rows, inputs = shape
    weight, bias, x = draw(form, rows, inputs), randn(rows, dtype=dtype), randn(tokens, inputs, dtype=dtype)
    gate_up = randn(tokens, 2 * inputs, dtype=dtype)
    gated, norm, residual = gate_mul_triton(gate_up, before), norm_of(inputs, dtype), randn(tokens, inputs, dtype=dtype)
    most = (once := most_error(weight)) * (1 if isinstance(weight, Fp8Weight) else 3)
    for activation in (None, "silu"):
        out = linear(x, weight, bias, activation)
        assert out.dtype == dtype
        assert_near(out, expected(x, weight, bias, activation), most)
        out = linear(gate_up, weight, bias, activation, before=before)
        assert_near(out, expected(gated, weight, bias, activation), most)
    pieces = linear(x, weight, may_split=True)
    assert_near(pieces.view(-1, tokens, rows).sum(0), expected(x, weight), most)
    out, total = norm_linear(x, residual, norm, weight)
    torch.testing.assert_close(total, x + residual)
    assert_near(out, expected(normalize_reference(total, norm), weight), min(2 * once, most))


@of_all_groupings
class TestADenseCopy:
    def test_the_reference_is_what_the_operands_stand_for(self, form: Grouping) -> None:
        weight = draw(form, 24, 256)
        assert_near(dequantize_reference(weight, torch.float32), matrix_of(weight), 1e-7)

    @pytest.mark.parametrize("inputs", [256, 384, *whole_only([200, 72])])
    def test_the_kernel_makes_the_same(self, form: Grouping, inputs: int) -> None:
        if inputs % (form.size or 1):
            pytest.skip("no whole groups")
        weight = draw(form, 37, inputs)
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(dense.dequantize_triton(weight, dtype, 256), dequantize_reference(weight, dtype))

    def test_the_kernel_looks_up_rows(self, form: Grouping) -> None:
        weight, rows = draw(form, 37, 256), torch.tensor([36, 0, 5, 5, 17], dtype=torch.int32, device=DEVICE)
        whole = dequantize_reference(weight, torch.float32)
        assert torch.equal(dense.dequantize_triton(weight, torch.float32, 256, rows), whole[rows])
        assert torch.equal(dense.dequantize(weight, torch.float32, rows), whole[rows])


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_dense_copy_is_made_of_some_rows_at_a_time(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "COPY", 1)
    weight, bias = draw(GROUPINGS[1], 600, 256), randn(600, dtype=DTYPE) if has_bias else None
    x = randn(5, 256, dtype=DTYPE)
    assert dense.dequantize(weight, DTYPE).dtype == DTYPE
    assert_near(dense.dense_linear(x, weight, bias), expected(x, weight, bias), 3 * most_error(weight))


class TestChoices:
    def test_which_groups_the_kernels_multiply(self) -> None:
        for form in GROUPINGS:
            weight = draw(form, 16, 256)
            assert one_wave.can_multiply(torch.bfloat16, weight)
            assert has_row_kernel(weight)
            assert can_multiply_row(weight)
        for form in SMALL_GROUPS:
            assert not one_wave.can_multiply(torch.bfloat16, draw(form, 16, 256))
        odd = INT4._replace(scales=torch.float16)
        assert not one_wave.can_multiply(torch.float32, draw(GROUPINGS[0], 16, 256))
        assert not one_wave.can_multiply(torch.float16, draw(odd._replace(size=0), 16, 72))
        assert not can_multiply_row(draw(SMALL_GROUPS[1], 16, 256))
        assert not has_row_kernel(draw(odd._replace(size=96), 16, 288))

    @pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 300])
    @pytest.mark.parametrize("may_split", [False, True])
    def test_a_cut_has_whole_pieces(self, tokens: int, may_split: bool) -> None:
        config = one_wave.find_config(randn(tokens, 6144, dtype=DTYPE), draw(GROUPINGS[0], 64, 6144), may_split)
        assert config.pieces == 1 or may_split
        assert 48 % config.pieces == 0

    @pytest.mark.gpu
    def test_which_blocks_no_kernel_multiplies(self) -> None:
        """Such weights become 16-bit numbers for each product, or 32-bit ones."""
        weight = draw(BLOCKS[0], 256, 256)
        assert not fp8.can_multiply_fp8(torch.float32, weight)
        narrow = Fp8Weight(weight.numbers, torch.ones(4, 4, device=DEVICE))
        assert not fp8.can_multiply_fp8(torch.bfloat16, narrow)
        assert not fp8.can_multiply_fp8(torch.bfloat16, Fp8Weight(weight.numbers.cpu(), weight.scales.cpu()))


def on_cpu(form: Grouping, rows: int, inputs: int) -> GroupLinearWeight:
    return GroupLinearWeight(*(part.cpu() if isinstance(part, Tensor) else part for part in draw(form, rows, inputs)))


class TestOnTheCpu:
    @of_all_groupings
    def test_some_rows_at_a_time(self, form: Grouping, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "NUMBERS_AT_ONCE", 10_000)
        weight, bias, x = on_cpu(form, 100, 384), torch.randn(100), torch.randn(3, 384)
        assert_near(cpu.cpu_linear(x, weight, bias), expected(x, weight, bias), 1e-6)
        assert cpu.cpu_linear(x.bfloat16(), weight, bias.bfloat16()).dtype == torch.bfloat16

    def test_parts_are_the_same_on_any_number_of_ranks(self, one_thread: None) -> None:
        weight, x = on_cpu(GROUPINGS[5], 96, 256), torch.randn(3, 256)
        whole = WeightInParts(weight, [(96, 96)]).product(x)
        first, second = (WeightInParts(half, [(48, 96)]).product(x) for half in weight.split(48))
        assert torch.equal(whole, torch.cat([first, second], dim=1))


def test_recording_ends_with_its_block() -> None:
    with suppress(KeyError), recording():
        assert is_recording()
        raise KeyError
    assert not is_recording()


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float16)), 0), ids=str)
    @of_groupings
    @pytest.mark.parametrize(
        ("inputs", "rows", "activation", "may_split"),
        [
            *[(4096, 24576, "silu", False), (12288, 4096, None, True)],
            *whole_only([(4096, 6144, None, False), (4096, 4096, None, True)]),
        ],
    )
    def test_real_sizes_in_groups(
        self, inputs: int, rows: int, activation: Activation | None, may_split: bool, form: Grouping, dtype: torch.dtype
    ) -> None:
        weight = draw(form, rows, inputs)
        matrix = matrix_of(weight)
        for tokens in (1, 2, 8, 16, 32, 64, 256, 600):
            x = randn(tokens, inputs, dtype=dtype)
            out = linear(x, weight, None, activation, may_split)
            assert_near(out.sum(0) if out.dim() == 3 else out, expected(x, matrix, None, activation), 0.006)

    @pytest.mark.parametrize("tokens", [5, 20, 60, 200])
    def test_what_a_graph_records_in_fp8(self, tokens: int) -> None:
        """There, other instructions fetch the same numbers."""
        weight, x = draw(BLOCKS[0], 1024, 4096), randn(tokens, 4096, dtype=DTYPE)
        with recording():
            recorded = linear(x, weight)
        assert_near(recorded, linear(x, weight).double(), most_error(weight))

    @pytest.mark.parametrize("block", [(1, 0), (256, 0), (128, 128)], ids=str)
    def test_many_tokens_in_fp8(self, block: Block) -> None:
        """Where cuBLAS has no such scales, our kernel multiplies prompts too."""
        weight, x = draw(block, 1024, 512), randn(5000, 512, dtype=torch.bfloat16)
        assert_near(linear(x, weight), expected(x, weight), most_error(weight))

    def test_one_token_may_be_far_from_1(self) -> None:
        """Its numbers are divided by the largest before they become float16."""
        weight = draw(BLOCKS[0], 256, 1024)
        for scale in (1e-30, 1e-6, 1e6, 1e20):
            x = (randn(1, 1024) * scale).bfloat16()
            assert_near(linear(x, weight), expected(x, weight), most_error(weight))
        assert not linear(randn(1, 1024).bfloat16() * 0, weight).any()
