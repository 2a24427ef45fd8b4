"""Products with experts of any format, against those with the matrices that their weights stand for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from cases.weights import (
    BLOCKS,
    FOR_EXPERTS,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    SELDOM_FOR_EXPERTS,
    Form,
    assert_near,
    dequantized,
    draw,
    matrices_of,
    routes_of,
)
from conftest import DEVICE, whole_only
from test_kernels import DTYPES, SHORT, TOLERANCE, assert_close, randn
from torch import Tensor

from nanoinfer.kernels.experts.products import expert_mlps, expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import Fp8Weight, quantize
from nanoinfer.kernels.linear.activation import (
    Activation,
    AnyActivation,
    ClampedSwiGLU,
    Ungated,
    gate_mul_reference,
    rows_per_output,
)
from nanoinfer.kernels.linear.groups import scales
from nanoinfer.kernels.linear.in_order.order import AnyNumbers, Grouping
from nanoinfer.kernels.linear.operands.weight import Weight

CLAMPED = ClampedSwiGLU(1.702, 7.0)  # of gpt-oss
ALL_DTYPES = list(dict.fromkeys([*DTYPES, SHORT]))
# On the CPU integers are multiplied in 16 bits as they are in 32.
OFTEN = [(form, dtype) for form, dtype in product(FOR_EXPERTS, ALL_DTYPES) if dtype in DTYPES or form.numbers == "e2m1"]
SELDOM = [case for case in product([*FOR_EXPERTS, *SELDOM_FOR_EXPERTS], ALL_DTYPES) if case not in OFTEN]
Sizes = tuple[int, int, int, int, int]  # tokens, experts, those of a token, the hidden size, and their own
PLAIN: list[Sizes] = [(1, 4, 1, 64, 32), (1, 60, 4, 72, 40), (16, 8, 2, 64, 64), (100, 4, 1, 64, 64)]
MORE_PLAIN: list[Sizes] = [
    *[(1, 128, 8, 128, 96), (7, 40, 10, 64, 48), (5, 60, 4, 72, 40)],
    *[(40, 4, 2, 96, 64), (1, 4, 2, 64, 8200), (200, 4, 3, 64, 72)],
]
LARGE: list[Sizes] = [(33, 512, 10, 64, 48), (4096, 60, 4, 512, 360), (4096, 128, 8, 256, 256)]
IN_FP8: list[Sizes] = [
    *[(1, 8, 2, 256, 128), (40, 4, 2, 128, 256)],
    *[(1, 8, 3, 512, 256), (5, 60, 4, 256, 128), (100, 4, 3, 128, 128), (130, 2, 2, 256, 256)],
]
GPT_OSS: list[Sizes] = [(tokens, 32, 4, 2880, 2880) for tokens in (1, 8, 64, 256, 2048)]
QWEN3: list[Sizes] = [(tokens, 128, 8, 2048, 768) for tokens in (1, 8, 512, 128, 3000)]  # Qwen3-30B-A3B
NEMOTRON_3: list[Sizes] = [(tokens, 128, 6, 2688, 1856) for tokens in (1, 8, 128, 3000)]  # its Nano
ONE_GROUP_A_ROW = INT4._replace(size=0, scales=torch.float32, has_zeros=True)
QWEN3_GROUPS = [INT4._replace(size=128), NVFP4]


def on_a_gpu(cases: Iterable[tuple]) -> list[ParameterSet]:
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


def of_tokens(*counts: int, size: int = 0) -> list[Sizes]:
    return [(tokens, 4, 2, 128, max(size, 64)) for tokens in counts]


class Rounding(Weight):
    """A matrix that multiplies vectors in FP8, as kernels do by a weight in FP8."""

    def __init__(self, matrix: Tensor, dtype: torch.dtype) -> None:
        """dtype: that of gates and ups; a GPU rounds them to it."""
        self._matrix, self._dtype = matrix.double(), dtype

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, may_split: bool = False
    ) -> Tensor:
        out = F.linear(dequantized(quantize(x)), self._matrix)
        return gate_mul_reference(out.to(self._dtype), activation) if activation else out


class Layer(NamedTuple):
    """The weights and biases of a layer's experts, and what they stand for."""

    weights: tuple[AnyNumbers, AnyNumbers]
    wide: tuple[Tensor, Tensor]
    biases: tuple[Tensor, Tensor]

    @classmethod
    def draw(
        cls,
        form: Form,
        count: int,
        hidden_size: int,
        size: int,
        dtype: torch.dtype = DTYPES[-1],
        activation: AnyActivation = "silu",
    ) -> Layer:
        rows = rows_per_output(activation) * size
        gate_up = draw(form, count, rows, hidden_size, dtype=dtype)
        down = draw(form, count, hidden_size, size, dtype=dtype)
        wide = matrices_of(gate_up), matrices_of(down)
        return cls((gate_up, down), wide, (randn(count, rows), randn(count, hidden_size)))


def compare(
    form: Form, sizes: Sizes, dtype: torch.dtype, activation: AnyActivation = "silu", biased: bool = False
) -> None:
    """Compare the kernels' results of random tokens with the products of what the weights stand for.

    In FP8, one token is not rounded, unless in order; else the input is, and the activation's result.
    """
    tokens, count, used, hidden_size, size = sizes
    layer, x, routes = (
        Layer.draw(form, count, hidden_size, size, dtype, activation),
        randn(tokens, hidden_size, dtype=dtype),
        routes_of(tokens, count, used),
    )
    names = ("gate_up_bias", "down_bias") if biased else ()
    biases = {name: bias.to(dtype) for name, bias in zip(names, layer.biases, strict=False)}
    wide_biases = [bias.float() for bias in biases.values()]
    # All but groups also get tokens that all take the first experts.
    first = Routes(torch.arange(used, device=DEVICE).int().repeat(tokens, 1), routes.weights)
    for chosen, ways in [(routes, (False, True)), (first, (True, False))][: 1 if isinstance(form, Grouping) else 2]:
        exact = rounded = expert_mlps_reference(x.float(), chosen, *layer.wide, activation, None, *wide_biases)
        if isinstance(layer.weights[0], Fp8Weight):
            rounding = ([Rounding(matrix, dtype) for matrix in matrices] for matrices in layer.wide)
            rounded = expert_mlps_reference(x.double(), chosen, *rounding, activation)
        for in_order, may_split in zip((False, True), ways, strict=True):
            how = {"in_order": in_order, "may_split": may_split, **biases}
            out = expert_mlps_triton(x, chosen, *layer.weights, activation, **how)
            assert out.shape == ((used, *x.shape) if may_split and tokens > 1 and used > 1 else x.shape)
            out = out.float().sum(dim=0).to(dtype) if out.dim() == 3 else out
            if rounded is exact or (tokens == 1 and not in_order):
                assert_close(out, exact)
                continue
            # A gate that rounds to its neighbour may change its block's scale, and so what FP8 makes of the others.
            assert_near(out, rounded, 0.04 if DEVICE == "cuda" else 0.001)
            errors = [(values - exact).norm() / exact.norm() for values in (out, rounded)]
            assert errors[0] < 1.25 * errors[1] + TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("form", "sizes", "dtype"),
    [
        *product([None], PLAIN, DTYPES),
        *whole_only(product([None], MORE_PLAIN, DTYPES)),
        *on_a_gpu(product([None], LARGE, DTYPES)),
        *product(BLOCKS[:1], IN_FP8[:2], DTYPES[-1:]),
        *whole_only(product(BLOCKS[:1], IN_FP8[2:], DTYPES[-1:])),
        *whole_only(product(BLOCKS[1:], IN_FP8, DTYPES[-1:])),
        *((form, sizes, dtype) for (form, dtype), sizes in product(OFTEN, of_tokens(1, 5))),
        *product([ONE_GROUP_A_ROW], [(20, 6, 3, 48, 32)], DTYPES),
        *whole_only((form, sizes, dtype) for (form, dtype), sizes in product(OFTEN, of_tokens(40, 100, 160))),
        *whole_only((form, sizes, dtype) for form, dtype in SELDOM for sizes in of_tokens(1, 5, 100, size=form.size)),
        *on_a_gpu(product(QWEN3_GROUPS, QWEN3[:3], [torch.bfloat16])),
        *whole_only(on_a_gpu(product(QWEN3_GROUPS, QWEN3[3:], [torch.bfloat16]))),
    ],
    ids=str,
)
def test_experts(form: Form, sizes: Sizes, dtype: torch.dtype) -> None:
    compare(form, sizes, dtype)


@pytest.mark.parametrize(
    ("form", "sizes", "dtype"),
    [
        *product([MXFP4, INT4], [(1, 4, 3, 96, 64), (70, 4, 3, 96, 64)], [torch.float32]),
        *on_a_gpu(product([MXFP4], GPT_OSS, [torch.bfloat16])),
        *whole_only(on_a_gpu(product([MXFP4], GPT_OSS, [torch.float16]))),
    ],
    ids=str,
)
def test_biases_and_clamped_gates(form: Grouping, sizes: Sizes, dtype: torch.dtype) -> None:
    compare(form, sizes, dtype, CLAMPED, biased=True)


@pytest.mark.parametrize(
    ("form", "sizes", "dtype", "biased"),
    [
        *product([None], PLAIN[1:], DTYPES, [True]),
        *whole_only(product([None], [*PLAIN, *MORE_PLAIN], DTYPES, [False])),
        *product(BLOCKS[:1], IN_FP8[:2], DTYPES[-1:], [False]),
        *whole_only(product(BLOCKS, IN_FP8[2:], DTYPES[-1:], [False])),
        *((form, sizes, dtype, True) for (form, dtype), sizes in product(OFTEN, of_tokens(1, 5))),
        *whole_only((form, sizes, dtype, False) for (form, dtype), sizes in product(OFTEN, of_tokens(40, 160))),
        *on_a_gpu(product([None], NEMOTRON_3, [torch.bfloat16], [False])),
        *whole_only(on_a_gpu(product(QWEN3_GROUPS, NEMOTRON_3, [torch.bfloat16], [False]))),
    ],
    ids=str,
)
def test_experts_without_gates(form: Form, sizes: Sizes, dtype: torch.dtype, biased: bool) -> None:
    compare(form, sizes, dtype, Ungated("relu2"), biased)


@pytest.mark.parametrize("tokens", [1, 5])
def test_scales_in_fp8_are_bytes_where_triton_lacks_the_type(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "_lacks_fp8", lambda _: True)
    for dtype in ALL_DTYPES:
        compare(NVFP4, (tokens, 4, 2, 128, 64), dtype)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("form", [INT4, INT8], ids=str)
def test_channels_of_sizes_that_no_block_divides(form: Grouping, tokens: int) -> None:
    """One scale for a row: the words of its end have room for more numbers."""
    form = form._replace(size=0, scales=torch.float32, has_zeros=True, has_factors=False)
    compare(form, (tokens, 3, 2, 88, 72), torch.float32)


@pytest.mark.parametrize("tokens", [1, 5])
def test_ranks_gather_the_shares_of_the_outputs(tokens: int) -> None:
    """Here both ranks have the same share, so that either's stands for the other's."""
    x, routes = randn(tokens, 64), routes_of(tokens, 4, 2)
    weights = draw(MXFP4, 4, 64, 64), draw(MXFP4, 4, 32, 64)

    def gather(share: Tensor) -> Tensor:
        return share.repeat(1, 2)

    expected = expert_mlps_reference(x, routes, *map(matrices_of, weights), "silu", gather)
    assert_close(expert_mlps_triton(x, routes, *weights, "silu", in_order=True, gather=gather), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [MXFP4, INT4], ids=str)
def test_the_cpu_multiplies_by_one_expert_after_the_other(form: Grouping, dtype: torch.dtype) -> None:
    layer, routes = Layer.draw(form, 4, 96, 64), Routes(*(part.cpu() for part in routes_of(7, 4, 2)))
    weights = [weight._replace(words=weight.words.cpu(), scales=weight.scales.cpu()) for weight in layer.weights]
    wide, biases = [weight.cpu() for weight in layer.wide], [bias.cpu() for bias in layer.biases]
    x = randn(7, 96).cpu().to(dtype)
    out = expert_mlps(x, routes, *weights, CLAMPED, False, False, None, *(bias.to(dtype) for bias in biases))
    assert_close(out, expert_mlps_reference(x.float(), routes, *wide, CLAMPED, None, *biases))
