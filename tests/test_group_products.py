"""Products with weights of four and eight bits in groups: each way against float64 of what the operands stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, of_each_kind, whole_only
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.groups import BITS, E2M1, GroupWeight, Numbers, dequantize_reference, pack, unpack
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.activation import Activation, gate_mul_reference
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.linear.groups import cpu, dense, one_row, scales
from nanoinfer.kernels.linear.groups.cpu import cpu_linear
from nanoinfer.kernels.linear.groups.dense import dense_linear, dequantize, dequantize_triton
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight
from nanoinfer.kernels.linear.groups.one_row import can_multiply_row, group_row_linear
from nanoinfer.kernels.linear.groups.one_wave import can_multiply, find_config, one_wave_triton
from nanoinfer.kernels.linear.groups.row import has_row_kernel
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight, group_in_order
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.tiles import TileConfig
from nanoinfer.kernels.norm.rms_norm import Norm, rms_norm_reference

# The interpreter has no products of bfloat16. On a GPU only results are rounded to it.
DTYPE, CLOSE = (torch.bfloat16, 0.006) if DEVICE == "cuda" else (torch.float32, 1e-6)
Kind = tuple[Numbers, int, torch.dtype, bool, bool]  # numbers, group (0: a row), scales, zeros, factors
KINDS: list[Kind] = [
    ("int4", 128, torch.bfloat16, False, False),
    ("int4", 128, torch.float16, True, False),
    ("int4", 64, torch.bfloat16, True, True),
    ("int4", 32, torch.float16, False, False),
    ("int4", 0, torch.float32, True, False),
    ("int8", 128, torch.bfloat16, False, False),
    ("int8", 32, torch.bfloat16, True, False),
    ("e2m1", 16, FP8, False, True),
    ("e2m1", 32, torch.uint8, False, False),
    ("e2m1", 64, torch.bfloat16, False, False),
]
SMALL_GROUPS: list[Kind] = [("int4", 16, torch.float16, True, False), ("int4", 8, torch.float16, False, False)]
of_kinds = pytest.mark.parametrize("kind", of_each_kind(zip(KINDS), 0, 2, 6, 7, 8), ids=str)


def make(kind: Kind, rows: int, columns: int) -> GroupLinearWeight:
    numbers, group, dtype, has_zeros, has_factors = kind
    bits, groups = BITS[numbers], columns // (group or columns)
    drawn = torch.randint(1 << bits, (rows, columns), device=DEVICE)
    if dtype == torch.uint8:
        scales = torch.randint(117, 123, (rows, groups), device=DEVICE).to(dtype)
    else:
        scales = (torch.rand(rows, groups, device=DEVICE) * 0.1 + 0.05).to(dtype)
    zeros = torch.randint(1 << bits, (rows, groups), device=DEVICE).to(torch.uint8) if has_zeros else None
    factors = torch.rand(rows, device=DEVICE) + 0.5 if has_factors else None
    weight = GroupLinearWeight(pack(drawn, bits), scales, zeros, factors, numbers, columns)
    if DEVICE == "cuda":
        launch_in_between(weight.words.device)
    return weight


def on_cpu(weight: GroupLinearWeight) -> GroupLinearWeight:
    return GroupLinearWeight(*(part.cpu() if isinstance(part, Tensor) else part for part in weight))


def matrix_of(weight: GroupWeight) -> Tensor:
    """The weight in float64, by the definition of its formats."""
    drawn, scales = unpack(weight.words, BITS[weight.numbers], weight.in_features), weight.scales
    if weight.numbers == "e2m1":
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=DEVICE, dtype=torch.float64)[drawn.long()]
    else:
        half = torch.full_like(scales, 1 << BITS[weight.numbers] - 1, dtype=torch.uint8)
        zeros = half if weight.zeros is None else weight.zeros
        values = drawn.double() - zeros.double().repeat_interleave(weight.group, 1)
    widened = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    factors = 1.0 if weight.factors is None else weight.factors.double()[:, None]
    return values * widened.repeat_interleave(weight.group, 1) * factors


def expected(x: Tensor, weight: GroupWeight, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    out = F.linear(x.double(), matrix_of(weight), None if bias is None else bias.double())
    return gate_mul_reference(out, activation) if activation else out


def assert_near(out: Tensor, reference: Tensor, most: float = CLOSE) -> None:
    assert out.shape == reference.shape
    assert (out.double() - reference).norm() / reference.norm() < most


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("kind", [*KINDS, *SMALL_GROUPS], ids=str)
class TestReference:
    def test_it_is_what_the_operands_stand_for(self, kind: Kind) -> None:
        weight = make(kind, 24, 256)
        assert_near(dequantize_reference(weight, torch.float32), matrix_of(weight), 1e-7)

    @pytest.mark.parametrize("columns", [256, 384, *whole_only([200, 72])])
    def test_the_kernel_makes_the_same_copy(self, kind: Kind, columns: int) -> None:
        if columns % (kind[1] or 1):
            pytest.skip("no whole groups")
        weight = make(kind, 37, columns)
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(dequantize_triton(weight, dtype, 256), dequantize_reference(weight, dtype))


@pytest.mark.parametrize("activation", [*whole_only([None]), "silu"])
@of_kinds
class TestProducts:
    @pytest.mark.parametrize("columns", [256, *whole_only([384])])
    def test_one_token(
        self, kind: Kind, activation: Activation | None, columns: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With and without the norm before; 204 rows fill no tile, and 384 inputs leave a part of it empty."""
        monkeypatch.setattr(one_row, "INPUTS", 256)
        weight, bias, x = make(kind, 204, columns), draw(204), draw(1, columns)
        assert_near(one_row_linear(x, weight, bias, activation), expected(x, weight, bias, activation))
        assert_near(group_row_linear(x, weight, bias, activation), expected(x, weight, bias, activation))
        norm = Norm(torch.rand(columns, device=DEVICE).to(DTYPE), 1e-6)
        out, total = one_row_norm_linear(x, 300 * x, norm, weight, None, activation)
        assert_near(out, expected(rms_norm_reference(total, norm), weight, None, activation), 2 * CLOSE)

    @pytest.mark.parametrize(
        ("tokens", "config"),
        [
            (5, TileConfig(16, 64)),
            *whole_only([(20, TileConfig(32, 64)), (40, TileConfig(64, 64)), (70, TileConfig(64, 128, warps=8))]),
        ],
    )
    def test_several_tokens(self, kind: Kind, activation: Activation | None, tokens: int, config: TileConfig) -> None:
        """288 inputs end within a step, wherever a step has several groups."""
        columns = 288 if kind[1] in (16, 32) else 384
        weight, bias, x = make(kind, 200, columns), draw(200), draw(tokens, columns)
        out = one_wave_triton(x, weight, config, bias, activation)
        assert_near(out, expected(x, weight, bias, activation))


@of_kinds
def test_pieces_add_up_to_the_product(kind: Kind) -> None:
    """The first has the bias; five pieces of three or six steps are no equal ones."""
    weight, bias, x = make(kind, 128, 384), draw(128), draw(3, 384)
    out = one_wave_triton(x, weight, TileConfig(16, 64, pieces=2), bias)
    assert out.dtype == torch.float32
    assert out.shape == (2, 3, 128)
    assert_near(out.sum(0), expected(x, weight, bias), 1e-6)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [(("int4", 96, torch.float16, False, False), 288), (("int4", 0, torch.float16, False, False), 352)],
)
def test_groups_that_are_no_power_of_two(kind: Kind, columns: int) -> None:
    weight, x = make(kind, 64, columns), draw(3, columns)
    assert_near(one_wave_triton(x, weight, TileConfig(16, 64)), expected(x, weight, None))
    assert_near(group_row_linear(x[:1], weight), expected(x[:1], weight, None))


def test_scales_in_fp8_are_bytes_where_triton_lacks_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that FP8 has, in each kernel; such a GPU is before compute capability 8.9."""
    monkeypatch.setattr(scales, "_lacks_fp8", lambda _: True)
    weight, x = make(("e2m1", 16, FP8, False, True), 64, 256), draw(3, 256)
    every = torch.arange(weight.scales.numel(), device=DEVICE) % 256
    every[every & 0x7F == 0x7F] = 0  # they are NaN
    weight = weight._replace(scales=every.to(torch.uint8).view(FP8).view_as(weight.scales))
    assert torch.equal(dequantize_triton(weight, torch.float32, 256), dequantize_reference(weight, torch.float32))
    assert_near(one_row_linear(x[:1], weight), expected(x[:1], weight, None))
    assert_near(group_row_linear(x[:1], weight), expected(x[:1], weight, None))
    assert_near(one_wave_triton(x, weight, TileConfig(16, 64)), expected(x, weight, None))


class TestChoices:
    def test_which_weights_the_kernels_multiply(self) -> None:
        for kind in KINDS:
            assert can_multiply(torch.bfloat16, make(kind, 16, 256))
            assert has_row_kernel(make(kind, 16, 256))
            assert can_multiply_row(make(kind, 16, 256))
        for kind in SMALL_GROUPS:
            assert not can_multiply(torch.bfloat16, make(kind, 16, 256))
        assert not can_multiply(torch.float32, make(KINDS[0], 16, 256))
        assert not can_multiply(torch.float16, make(("int4", 0, torch.float16, False, False), 16, 72))
        assert not can_multiply_row(make(SMALL_GROUPS[1], 16, 256))
        assert not has_row_kernel(make(("int4", 96, torch.float16, False, False), 16, 288))

    @pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 300])
    @pytest.mark.parametrize("may_split", [False, True])
    def test_a_cut_has_whole_pieces(self, tokens: int, may_split: bool) -> None:
        weight = make(KINDS[0], 64, 6144)
        config = find_config(draw(tokens, 6144), weight, may_split)
        assert config.pieces == 1 or may_split
        assert 48 % config.pieces == 0


@of_kinds
class TestLinear:
    """As dispatch sees it: the CPU's way here, on a GPU that for so many tokens."""

    @pytest.mark.parametrize("tokens", [1, 3, *whole_only([600])])
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_linear(self, kind: Kind, tokens: int, activation: Activation | None) -> None:
        weight, bias, x = make(kind, 96, 384), draw(96), draw(tokens, 768)
        gated = gate_mul_reference(x, "gelu_tanh")
        out = linear(x, weight, bias, activation, before="gelu_tanh")
        assert_near(out, expected(gated, weight, bias, activation), 3 * CLOSE)

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_norm_linear(self, kind: Kind, tokens: int) -> None:
        weight, x, residual = make(kind, 96, 384), draw(tokens, 384), draw(tokens, 384)
        norm = Norm(torch.rand(384, device=DEVICE).to(DTYPE), 1e-6)
        out, total = norm_linear(x, residual, norm, weight)
        torch.testing.assert_close(total, x + residual)
        assert_near(out, expected(rms_norm_reference(total, norm), weight, None), 2 * CLOSE)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("kind", "columns"), [*((kind, 384) for kind in SMALL_GROUPS), (("int4", 0, torch.float16, False, False), 71)]
)
def test_what_no_kernel_multiplies_has_a_dense_copy(kind: Kind, columns: int, tokens: int) -> None:
    weight, bias, x = make(kind, 64, columns), draw(64), draw(tokens, columns)
    assert_near(linear(x, weight, bias), expected(x, weight, bias), 3 * CLOSE)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_dense_copy_is_made_of_some_rows_at_a_time(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "COPY", 1)
    weight, bias, x = make(KINDS[2], 600, 256), draw(600) if with_bias else None, draw(5, 256)
    assert dequantize(weight, DTYPE).dtype == DTYPE
    assert_near(dense_linear(x, weight, bias), expected(x, weight, bias), 3 * CLOSE)


class TestOnTheCpu:
    @pytest.mark.parametrize("kind", [*KINDS, *SMALL_GROUPS], ids=str)
    def test_some_rows_at_a_time(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "NUMBERS_AT_ONCE", 10_000)
        weight, bias, x = on_cpu(make(kind, 100, 384)), torch.randn(100), torch.randn(3, 384)
        reference = F.linear(x.double(), dequantize_reference(weight, torch.float64), bias.double())
        assert_near(cpu_linear(x, weight, bias), reference, 1e-6)
        assert cpu_linear(x.bfloat16(), weight, bias.bfloat16()).dtype == torch.bfloat16

    def test_parts_are_the_same_on_any_number_of_ranks(self, one_thread: None) -> None:
        weight, x = on_cpu(make(KINDS[1], 96, 256)), torch.randn(3, 256)
        whole = WeightInParts(weight, [(96, 96)]).product(x)
        first, second = (WeightInParts(half, [(48, 96)]).product(x) for half in weight.split(48))
        assert torch.equal(whole, torch.cat([first, second], dim=1))


class TestInOrder:
    @of_kinds
    @pytest.mark.parametrize("tokens", [1, 20, *whole_only([70])])
    def test_the_product_is_right(self, kind: Kind, tokens: int) -> None:
        weight, bias, x = make(kind, 100, 384), draw(100), draw(tokens, 384)
        assert_near(group_in_order(x, weight, bias), expected(x, weight, bias))

    def test_what_the_kernel_does_not_multiply_is_refused(self) -> None:
        message = r"in int4, .* here dtype is bfloat16, and 8 of 256 inputs share one; device='cpu' takes all"
        with pytest.raises(ValueError, match=message):
            InOrderWeight(make(SMALL_GROUPS[1], 8, 256), torch.bfloat16, False, [1])
        with pytest.raises(ValueError, match="here dtype is float32"):
            InOrderWeight(make(KINDS[0], 8, 256), torch.float32, False, [1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float16)), 0), ids=str)
@of_kinds
@pytest.mark.parametrize(
    ("columns", "rows", "activation", "may_split"),
    [
        *[(4096, 24576, "silu", False), (12288, 4096, None, True)],
        *whole_only([(4096, 6144, None, False), (4096, 4096, None, True)]),
    ],
)
def test_real_sizes(
    columns: int, rows: int, activation: Activation | None, may_split: bool, kind: Kind, dtype: torch.dtype
) -> None:
    weight = make(kind, rows, columns)
    matrix = matrix_of(weight)
    for tokens in (1, 2, 8, 16, 32, 64, 256, 600):
        x = (torch.randn(tokens, columns, device=DEVICE) * 0.05).to(dtype)  # float16 has products of gates and ups
        out = linear(x, weight, None, activation, may_split)
        reference = F.linear(x.double(), matrix)
        reference = gate_mul_reference(reference, activation) if activation else reference
        assert_near(out.sum(0) if out.dim() == 3 else out, reference, 0.006)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gpu_adds_up_in_order(kind: Kind) -> None:
    """For 1 to 512 tokens, in any order, with and without an activation."""
    weight = InOrderWeight(make(kind, 4096, 4096), torch.bfloat16, True, [1, 2, 17, 64, 100, 256, 512])
    x, bias = draw(512, 4096), draw(4096)
    whole, gated = weight.product(x, bias), weight.product(x, bias, "silu")
    for tokens in (1, 2, 17, 64, 100, 256, 512):
        order = torch.randperm(512, device=DEVICE)[:tokens]
        assert torch.equal(weight.product(x[order], bias), whole[order])
        assert torch.equal(weight.product(x[order], bias, "silu"), gated[order])
