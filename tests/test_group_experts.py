"""Experts whose weights are in groups of four or eight bits: the kernels against the products with what they stand for.

Those are computed from the dequantized weights, in float32.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from conftest import whole_only
from test_kernels import DEVICE, DTYPES, SHORT, assert_close, randn
from torch import Tensor

from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.operand import group_linear
from nanoinfer.kernels.experts.products import expert_mlps, expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.groups import BITS, GroupWeight, dequantize_reference
from nanoinfer.kernels.linear.activation import Activation, ClampedSwiGLU
from nanoinfer.kernels.linear.groups import scales
from nanoinfer.kernels.linear.in_order.order import Grouping, WeightShape

MXFP4 = Grouping("e2m1", 32, torch.uint8, has_zeros=False, has_factors=False)
NVFP4 = Grouping("e2m1", 16, FP8, has_zeros=False, has_factors=True)
INT4 = Grouping("int4", 32, torch.bfloat16, has_zeros=False, has_factors=False)
INT8 = Grouping("int8", 64, torch.float32, has_zeros=True, has_factors=True)
FIRST = [MXFP4, NVFP4, INT4, INT8]
OTHERS = [
    INT4._replace(size=16, has_zeros=True),
    INT4._replace(size=128, scales=torch.float16, has_zeros=True, has_factors=True),
    INT8._replace(size=16),
    INT8._replace(size=128, has_zeros=False),
    MXFP4._replace(size=64, scales=torch.bfloat16),
]
KINDS = [*FIRST, *whole_only(OTHERS)]
ALL_DTYPES = list(dict.fromkeys([*DTYPES, SHORT]))
# On the CPU integers are multiplied in 16 bits as they are in 32.
OFTEN = [(kind, dtype) for kind, dtype in product(FIRST, ALL_DTYPES) if dtype in DTYPES or kind.numbers == "e2m1"]
CLAMPED = ClampedSwiGLU(1.702, 7.0)  # of gpt-oss


class Layer(NamedTuple):
    """The weights and biases of a layer's experts, and what they stand for."""

    weights: tuple[GroupWeight, GroupWeight]
    wide: tuple[Tensor, Tensor]
    biases: tuple[Tensor, Tensor]


def dequantized(weights: GroupWeight) -> Tensor:
    """Return what experts' weights stand for, one after the other: large ones take much memory meanwhile."""
    return torch.stack(
        [dequantize_reference(group_linear(weights, i), torch.float32) for i in range(len(weights.words))]
    )


def draw(grouping: Grouping, count: int, rows: int, columns: int) -> GroupWeight:
    """As the check of the order does, but with any zeros."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = WeightShape(rows, columns, None, grouping).draw_experts(count, torch.float16, generator)
    assert isinstance(weight, GroupWeight)
    if weight.zeros is None:
        return weight
    return weight._replace(zeros=torch.randint_like(weight.zeros, 1 << BITS[weight.numbers]))


def make(grouping: Grouping, count: int, hidden_size: int, size: int) -> Layer:
    gate_up, down = draw(grouping, count, 2 * size, hidden_size), draw(grouping, count, hidden_size, size)
    wide = tuple(dequantized(weight) for weight in (gate_up, down))
    return Layer((gate_up, down), (wide[0], wide[1]), (randn(count, 2 * size), randn(count, hidden_size)))


def routes_of(tokens: int, count: int, used: int) -> Routes:
    experts = torch.rand(tokens, count, device=DEVICE).argsort()[:, :used].int().contiguous()
    return Routes(experts, torch.rand(tokens, used, device=DEVICE))


def compare(
    layer: Layer, tokens: int, used: int, dtype: torch.dtype, activation: Activation = "silu", biased: bool = False
) -> None:
    """Compare the kernels' results of random tokens with the products of what the weights stand for."""
    count, hidden_size, _ = layer.wide[1].shape
    x, routes = randn(tokens, hidden_size, dtype=dtype), routes_of(tokens, count, used)
    biases = [bias.to(dtype) if biased else None for bias in layer.biases]
    wide_biases = [None if bias is None else bias.float() for bias in biases]
    expected = expert_mlps_reference(x.float(), routes, *layer.wide, activation, None, *wide_biases)
    multiply = partial(expert_mlps_triton, x, routes, *layer.weights, activation)
    named = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
    assert_close(multiply(**named), expected)
    pieces = multiply(in_order=True, may_split=True, **named)
    assert_close(pieces if pieces.dim() == 2 else pieces.float().sum(dim=0).to(dtype), expected)


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        *product(OFTEN, (1, 5)),
        *whole_only(product(OFTEN, (40, 100, 160))),
        *whole_only(
            product([case for case in product([*FIRST, *OTHERS], ALL_DTYPES) if case not in OFTEN], (1, 5, 100))
        ),
    ],
    ids=str,
)
def test_experts_in_groups(case: tuple[Grouping, torch.dtype], tokens: int) -> None:
    grouping, dtype = case
    compare(make(grouping, 4, 128, max(grouping.size, 64)), tokens, 2, dtype)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("grouping", [MXFP4, INT4], ids=str)
def test_biases_and_clamped_gates(grouping: Grouping, tokens: int) -> None:
    compare(make(grouping, 4, 96, 64), tokens, 3, torch.float32, CLAMPED, biased=True)


@pytest.mark.parametrize("tokens", [1, 5])
def test_scales_in_fp8_are_bytes_where_triton_lacks_the_type(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "_lacks_fp8", lambda _: True)
    for dtype in ALL_DTYPES:
        compare(make(NVFP4, 4, 128, 64), tokens, 2, dtype)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("numbers", ["int4", "int8"])
def test_channels_of_sizes_that_no_block_divides(numbers: str, tokens: int) -> None:
    """One scale for a row: the words of its end have room for more numbers."""
    grouping = INT4._replace(numbers=numbers, scales=torch.float32, has_zeros=True)
    weights = draw(grouping._replace(size=88), 3, 2 * 72, 88), draw(grouping._replace(size=72), 3, 88, 72)
    wide = tuple(dequantized(weight) for weight in weights)
    compare(Layer(weights, (wide[0], wide[1]), (randn(0), randn(0))), tokens, 2, torch.float32)


@pytest.mark.parametrize("tokens", [1, 5])
def test_ranks_gather_the_shares_of_the_outputs(tokens: int) -> None:
    """Here both ranks have the same share, so that either's stands for the other's."""
    layer, routes = make(MXFP4, 4, 64, 64), routes_of(tokens, 4, 2)
    x = randn(tokens, 64)
    own = layer.weights[1]
    halves = own._replace(words=own.words[:, :32].contiguous(), scales=own.scales[:, :32].contiguous())
    first = layer.weights[0]
    rows = torch.cat([torch.arange(32), 64 + torch.arange(32)])
    shares = first._replace(words=first.words[:, rows].contiguous(), scales=first.scales[:, rows].contiguous())

    def gather(share: Tensor) -> Tensor:
        return share.repeat(1, 2)

    wide = [dequantized(weight) for weight in (shares, halves)]
    expected = expert_mlps_reference(x, routes, *wide, "silu", gather)
    assert_close(expert_mlps_triton(x, routes, shares, halves, "silu", in_order=True, gather=gather), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouping", [MXFP4, INT4], ids=str)
def test_the_cpu_multiplies_by_one_expert_after_the_other(grouping: Grouping, dtype: torch.dtype) -> None:
    layer, routes = make(grouping, 4, 96, 64), routes_of(7, 4, 2)
    weights = [weight._replace(words=weight.words.cpu(), scales=weight.scales.cpu()) for weight in layer.weights]
    wide = [weight.cpu() for weight in layer.wide]
    biases = [bias.cpu() for bias in layer.biases]
    x, routes = randn(7, 96).cpu().to(dtype), Routes(*(part.cpu() for part in routes))
    out = expert_mlps(x, routes, *weights, CLAMPED, False, False, None, *(bias.to(dtype) for bias in biases))
    assert_close(out, expert_mlps_reference(x.float(), routes, *wide, CLAMPED, None, *biases))


@pytest.mark.gpu
class TestRealSizes:
    @pytest.mark.parametrize("tokens", [1, 8, 64, 256, 2048])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, *whole_only([torch.float16])])
    def test_gpt_oss(self, dtype: torch.dtype, tokens: int) -> None:
        compare(make(MXFP4, 32, 2880, 2880), tokens, 4, dtype, CLAMPED, biased=True)

    @pytest.mark.parametrize("tokens", [1, 8, 512, *whole_only([128, 3000])])
    @pytest.mark.parametrize("grouping", [INT4._replace(size=128), NVFP4], ids=str)
    def test_qwen3_30b_a3b(self, grouping: Grouping, tokens: int) -> None:
        compare(make(grouping, 128, 2048, 768), tokens, 8, torch.bfloat16)

    @pytest.mark.parametrize("grouping", KINDS, ids=str)
    def test_the_check_passes(self, grouping: Grouping) -> None:
        gate_up, down = WeightShape(2 * 768, 2048, None, grouping), WeightShape(2048, 768, None, grouping)
        check_order.__wrapped__(gate_up, down, 8, "silu", torch.bfloat16, torch.device(DEVICE))

    @pytest.mark.parametrize("grouping", KINDS, ids=str)
    def test_tokens_have_the_same_bits_in_any_company(self, grouping: Grouping) -> None:
        layer, x, routes = make(grouping, 16, 512, 256), randn(3000, 512, dtype=torch.bfloat16), routes_of(3000, 16, 4)
        multiply = partial(expert_mlps_triton, activation="silu", in_order=True)
        expected = multiply(x, routes, *layer.weights)
        for tokens in (1, 2, 9, 33, 100, 700):
            order = torch.randperm(3000, device=DEVICE)[:tokens]
            own = Routes(routes.experts[order], routes.weights[order])
            assert torch.equal(multiply(x[order], own, *layer.weights), expected[order])
