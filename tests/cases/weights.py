"""Weights of every format: tests draw one, ask for the matrix that it stands for, and compare its products."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from conftest import DEVICE
from torch import Tensor

from nanoinfer.kernels.experts.operand import group_linear
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import FP8, LARGEST, Fp8Tokens, Fp8Weight, quantize
from nanoinfer.kernels.groups import BITS, MIDDLES, SPREADS, TABLES, GroupWeight, pack, unpack
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.linear.activation import Activation, gate_mul_reference
from nanoinfer.kernels.linear.fp8.linear import Fp8LinearWeight
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight
from nanoinfer.kernels.linear.in_order.order import AnyNumbers, Grouping

Block = tuple[int, int]  # of a weight in FP8, the height and the most that its width may be; 0: a whole row
Form = Grouping | Block | None  # a group of 0 is a whole row; None: a plain weight

BLOCKS: list[Block] = [(128, 128), (64, 256), (1, 0)]
MXFP4 = Grouping("e2m1", 32, torch.uint8, has_zeros=False, has_factors=False)
NVFP4 = Grouping("e2m1", 16, FP8, has_zeros=False, has_factors=True)
NF4 = Grouping("nf4", 64, torch.float32, has_zeros=False, has_factors=False)
FP4 = NF4._replace(numbers="fp4")
INT4 = Grouping("int4", 32, torch.bfloat16, has_zeros=False, has_factors=False)
INT8 = Grouping("int8", 64, torch.float32, has_zeros=True, has_factors=True)
Q4_1 = INT4._replace(scales=torch.float16, has_zeros=True, has_minima=True)
Q5_1 = Q4_1._replace(numbers="int6")
Q4_K = Q4_1._replace(scales=torch.bfloat16, block=256)
Q5_K = Q4_K._replace(numbers="int6")
Q6_K = Grouping("int6", 16, torch.bfloat16, has_zeros=False, has_factors=False, block=256)
GROUPINGS = [
    INT4._replace(size=128),
    INT4._replace(size=64, has_zeros=True, has_factors=True),
    INT8._replace(size=32, scales=torch.bfloat16, has_factors=False),
    NVFP4,
    MXFP4,
    INT4._replace(size=128, scales=torch.float16, has_zeros=True),
    INT4._replace(scales=torch.float16),
    INT4._replace(size=0, scales=torch.float32, has_zeros=True),
    INT8._replace(size=128, scales=torch.bfloat16, has_zeros=False, has_factors=False),
    MXFP4._replace(size=64, scales=torch.bfloat16),
    NF4,
    FP4,
    Q4_1,
    Q5_1,
    Q4_K,
    Q5_K._replace(block=128),
    Q6_K,
]
SMALL_GROUPS = [
    INT4._replace(size=16, scales=torch.float16, has_zeros=True),
    INT4._replace(size=8, scales=torch.float16),
]
FOR_EXPERTS = [MXFP4, NVFP4, INT4, INT8, Q4_K, Q6_K, NF4]
SELDOM_FOR_EXPERTS = [
    INT4._replace(size=16, has_zeros=True),
    INT4._replace(size=128, scales=torch.float16, has_zeros=True, has_factors=True),
    INT8._replace(size=16),
    INT8._replace(size=128, has_zeros=False),
    Q5_1,
    MXFP4._replace(size=64, scales=torch.bfloat16),
]

# The interpreter has no products of bfloat16. On a GPU, results with FP8 are rounded to it up to four times.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def draw(form: Form, *shape: int, dtype: torch.dtype = DTYPE) -> AnyNumbers:
    """Draw a weight, [rows, inputs], or those of experts, [experts, rows, inputs]; their products are no larger than x.

    dtype: of a plain weight
    """
    *outer, inputs = shape
    if form is None:
        weight = torch.randn(shape, device=DEVICE).to(dtype) / inputs**0.5
    elif isinstance(form, Grouping):
        weight = draw_groups(form, outer, inputs)
    else:
        height, width = form[0], min(form[1] or inputs, inputs)
        numbers = (torch.randn(shape, device=DEVICE) * 100).clamp(-LARGEST, LARGEST).to(FP8)
        scales = torch.rand(*outer[:-1], outer[-1] // height, inputs // width, device=DEVICE) * 2e-3 + 1e-4
        weight = Fp8LinearWeight(numbers, scales)
    if DEVICE == "cuda":  # kernels load weights early, so some other kernel must run between what writes them and these
        launch_in_between(torch.device(DEVICE))
    return weight


def draw_groups(form: Grouping, outer: list[int], inputs: int) -> GroupWeight:
    most = 2 * MIDDLES[form.numbers] if form.numbers in MIDDLES else 1 << BITS[form.numbers]
    size = SPREADS[form.numbers] * inputs**0.5
    numbers = torch.randint(most, (*outer, inputs), device=DEVICE)
    scales = torch.rand(*outer, inputs // (form.size or inputs), device=DEVICE) + 0.5
    factors = (torch.rand(outer, device=DEVICE) + 0.5) / size if form.has_factors else None
    if form.scales == torch.uint8:
        scales = torch.randint_like(scales, -3, 3) + 127 - round(torch.tensor(size).log2().item())
    elif not form.has_factors:
        scales /= size
    zeros = torch.randint_like(scales, most).to(torch.uint8) if form.has_zeros else None
    if form.has_minima:
        zeros = (torch.rand_like(scales) * scales * most).to(form.scales)
    blocks = None
    if form.block:  # six bits, and what a block's are counted in
        scales = torch.randint(1 if form.has_minima else -64, 64, scales.shape, device=DEVICE)
        zeros = torch.randint_like(scales, 64).to(form.scales) if form.has_minima else None
        shape = *outer, inputs // math.gcd(form.block, inputs), 2 if form.has_minima else 1
        blocks = ((torch.rand(shape, device=DEVICE) + 0.5) / (40 * size)).half()
    made = GroupLinearWeight if len(outer) == 1 else GroupWeight
    words = pack(numbers, BITS[form.numbers])
    return made(words, scales.to(form.scales), zeros, factors, form.numbers, inputs, blocks)


def matrix_of(weight: AnyNumbers) -> Tensor:
    """Return what a weight stands for, in float64, by the definition of its format."""
    if isinstance(weight, Tensor):
        return weight.double()
    scales = weight.scales.double()
    if isinstance(weight, Fp8Weight):
        height, width = weight.block
        return weight.numbers.double() * scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
    drawn = unpack(weight.words, BITS[weight.numbers], weight.in_features)
    if weight.numbers in TABLES:
        values = torch.tensor(TABLES[weight.numbers], device=drawn.device, dtype=torch.float64)[drawn.long()]
    else:
        half = torch.full_like(scales, 0 if weight.has_minima else MIDDLES[weight.numbers])
        counted = weight.zeros is not None and not weight.has_minima
        values = drawn - (weight.zeros.double() if counted else half).repeat_interleave(weight.group, -1)
    minima = weight.zeros.double().repeat_interleave(weight.group, -1) if weight.has_minima else 0.0
    if weight.blocks is not None:
        of_blocks = weight.blocks.double().repeat_interleave(weight.block // weight.group, -2)
        scales = scales * of_blocks[..., 0]
        if weight.has_minima:
            minima = minima * of_blocks[..., 1].repeat_interleave(weight.group, -1)
    widened = 2.0 ** (scales - 127) if weight.scales.dtype == torch.uint8 else scales
    factors = 1.0 if weight.factors is None else weight.factors.double().unsqueeze(-1)
    return values * widened.repeat_interleave(weight.group, -1) * factors - minima


def matrices_of(weights: AnyNumbers) -> Tensor:
    """Return what experts' weights stand for, in float32, one after the other: that of all takes much memory."""
    if isinstance(weights, GroupWeight):
        return torch.stack([matrix_of(group_linear(weights, i)).float() for i in range(len(weights.words))])
    return matrix_of(weights).float()


def routes_of(tokens: int, count: int, used: int) -> Routes:
    """Draw the experts that tokens choose, and their shares."""
    experts = torch.rand(tokens, count, device=DEVICE).argsort()[:, :used].int().contiguous()
    return Routes(experts, torch.rand(tokens, used, device=DEVICE))


def dequantized(x: Fp8Tokens) -> Tensor:
    return (x.numbers.double() * x.scales.T.double().repeat_interleave(128, 1))[: x.tokens]


def expected(
    x: Tensor,
    weight: AnyNumbers,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    in_order: bool = False,
) -> Tensor:
    """Return the product in float64. A weight in FP8 multiplies several tokens, or `in_order` one, that are in FP8."""
    rounds = isinstance(weight, Fp8Weight) and (in_order or len(x) > 1)
    read = dequantized(quantize(x)) if rounds else x.double()
    out = F.linear(read, matrix_of(weight), None if bias is None else bias.double())
    return gate_mul_reference(out, activation) if activation else out


def most_error(weight: AnyNumbers) -> float:
    """Return how much of a whole product may be wrong."""
    if DEVICE == "cpu":
        return 1e-6
    return 0.01 if isinstance(weight, Fp8Weight) else 0.006


def assert_near(out: Tensor, reference: Tensor, most: float) -> None:
    assert out.shape == reference.shape
    assert (out.double() - reference).norm() / reference.norm() < most
