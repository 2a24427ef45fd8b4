"""Compares every Triton kernel with its torch reference: interpreted on the CPU, compiled and in bfloat16 on a GPU.

The references get float32 copies of the inputs, so a kernel may differ by its dtype's rounding and no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from conftest import DEVICE, HAS_CUDA, of_each_kind, plan_ahead, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from nanoinfer.attention import BACKENDS, choose_backend, make_backend
from nanoinfer.attention.cache_layout import Pages, lay_out
from nanoinfer.attention.context import Context, GroupContext, PackedQueries, Scoring
from nanoinfer.kernels.attention.decode.decode_plan import FEW_ROWS, choose_programs, plan_decode
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference, paged_decode_triton
from nanoinfer.kernels.attention.output_gate import gate_heads_reference, gate_heads_triton
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference, paged_prefill_triton
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.attention.projected.qkv import Parts, norm_rotate_store_reference, norm_rotate_store_triton
from nanoinfer.kernels.attention.projected.sum_squares import sum_squares_reference, sum_squares_triton
from nanoinfer.kernels.attention.scores import in_log2, scores_in_log2
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.linear import one_wave
from nanoinfer.kernels.linear.activation import (
    Activation,
    AnyActivation,
    ClampedSwiGLU,
    Function,
    ScaledGate,
    Ungated,
    activate,
    activate_triton,
    gate_mul_reference,
    gate_mul_triton,
    xielu,
    xielu_triton,
)
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.linear.gated import gated_linear
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.one_wave import config_of, one_wave_linear
from nanoinfer.kernels.norm.norm import (
    Norm,
    add_norm_reference,
    add_norm_triton,
    add_residual_reference,
    add_residual_triton,
    norm_add_norm_reference,
    norm_add_norm_triton,
    normalize,
    normalize_reference,
    normalize_triton,
)
from nanoinfer.kernels.ranks.all_reduce_norm import all_reduce_add_norm
from nanoinfer.kernels.ranks.best_of_ranks import best_of_ranks
from nanoinfer.kernels.ranks.gather import gather_features
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.kernels.rotation import rotate_heads_reference, rotate_heads_triton
from nanoinfer.kernels.rows import (
    advance_rows_reference,
    advance_rows_triton,
    locate_rows_reference,
    locate_rows_triton,
)
from nanoinfer.kernels.sampling.cutoff import Cutoff, find_cutoff_reference, find_cutoff_triton
from nanoinfer.kernels.sampling.draw import (
    NO_TOKEN,
    NONE_LEFT,
    DrawnLines,
    draw_lines_reference,
    draw_lines_triton,
    draw_reference,
    draw_triton,
    gumbel_noise,
    noise_key,
)
from nanoinfer.kernels.sampling.token_logprobs import token_logprobs_reference, token_logprobs_triton

DTYPES = [torch.float32, torch.bfloat16] if HAS_CUDA else [torch.float32]
SHORT = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter's products of bfloat16 are wrong
ACTIVATIONS = ["silu", "gelu_tanh", ClampedSwiGLU(1.702, 1.5), "gelu", ScaledGate("silu", 0.6)]
UNGATED = [Ungated("gelu"), Ungated("relu")]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Check the relative error of the whole tensor; NaN never passes."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCE[out.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 192, 1024, 5120])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight, x, residual = randn(size, dtype=dtype), randn(5, size, dtype=dtype), randn(5, size, dtype=dtype)
    norm, wide_norm = Norm(weight, 1e-6), Norm(weight.float(), 1e-6)
    assert_close(normalize_triton(x, norm), normalize_reference(x.float(), wide_norm))
    out, total = add_norm_triton(x, residual, norm)
    expected, expected_total = add_norm_reference(x.float(), residual.float(), wide_norm)
    assert_close(out, expected)
    assert_close(total, expected_total)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Apply torch's own norm in float32, or none."""
    if norm is None:
        return x.float()
    if norm.centred:
        bias = None if norm.bias is None else norm.bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], norm.weight.float() + norm.plus_one, bias, norm.eps)
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight.float() + norm.plus_one, norm.eps)


def norms(size: int, dtype: torch.dtype) -> list[Norm]:
    """Return a norm of each kind; their eps are large enough to count."""
    weights = [randn(size, dtype=dtype) for _ in range(6)]
    return [
        Norm(weights[0], 0.1),
        Norm(weights[1], 0.2, plus_one=True),
        Norm(weights[2], 0.1, centred=True),
        Norm(weights[3], 0.2, plus_one=True, centred=True, bias=weights[4]),
        Norm(weights[5], 0.2, centred=True, bias=weights[4]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize(("num_pieces", "are_short"), [(1, True), (3, False), (3, True)])
def test_norms_before_and_after_a_branch(num_pieces: int, are_short: bool, dtype: torch.dtype) -> None:
    """Both the kernels and their references agree with torch's norm."""
    pieces, residual = randn(num_pieces, 5, 96), randn(5, 96, dtype=dtype)
    if are_short:
        pieces = pieces.to(dtype)
    x = pieces if num_pieces > 1 else pieces[0].to(dtype)
    whole = pieces.float().sum(dim=0)
    for pre in norms(96, dtype):
        for out in (normalize_triton(x, pre), normalize(x, pre)):
            assert out.dtype == dtype
            assert_close(out, normed(whole, pre))
        for add in (add_norm_triton, add_norm_reference):
            out, total = add(x, residual, pre)
            assert_close(total, whole + residual.float())
            assert_close(out, normed(whole + residual.float(), pre))
        for post in norms(96, dtype)[:: 1 if pre.centred else 3]:
            expected = normed(whole, post) + residual.float()
            for norm_add in (norm_add_norm_triton, norm_add_norm_reference):
                out, total = norm_add(x, residual, post, pre)
                assert out.dtype == total.dtype == dtype
                assert_close(total, expected)
                assert_close(out, normed(expected, pre))
    for post_or_none in (None, *norms(96, dtype)):
        for add in (add_residual_triton, add_residual_reference):
            total = add(x, residual, post_or_none)
            assert total.dtype == dtype
            assert_close(total, normed(whole, post_or_none) + residual.float())


@pytest.mark.parametrize(
    "oracle",
    [LlamaRMSNorm, Gemma2RMSNorm, torch.nn.LayerNorm, NemotronLayerNorm1P, CohereLayerNorm],
)
def test_norms_round_as_transformers_does(oracle: Callable[..., torch.nn.Module]) -> None:
    layer = oracle(96, eps=1e-6).to(DEVICE, torch.bfloat16)
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = randn(5, 96, dtype=torch.bfloat16)
    plus_one, centred = oracle in (Gemma2RMSNorm, NemotronLayerNorm1P), oracle not in (LlamaRMSNorm, Gemma2RMSNorm)
    norm = Norm(layer.weight.data, 1e-6, plus_one, None, centred, getattr(layer, "bias", None))
    assert torch.equal(normalize_reference(x, norm), layer(x))


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_the_mean_is_taken_off_before_squares_are_added(offset: float) -> None:
    """So large means cost no digits."""
    x, norm = randn(5, 96) + offset, Norm(torch.ones(96, device=DEVICE), 1e-6, centred=True)
    torch.testing.assert_close(normalize_triton(x, norm), normed(x.double(), norm), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "oracle"),
    [
        ("silu", "silu"),
        ("gelu_tanh", "gelu_new"),
        ("gelu_tanh", "gelu_fast"),
        ("gelu", "gelu"),
        ("quick_gelu", "quick_gelu"),
        ("relu", "relu"),
        ("relu2", "relu2"),
    ],
)
def test_activations_are_those_of_transformers(activation: Function, oracle: str, dtype: torch.dtype) -> None:
    x = randn(7, 1100, dtype=dtype)
    x[0, :3] = torch.tensor([3e4, -3e4, float("nan")])
    expected = ACT2FN[oracle](x.float())
    for out in (activate(x.cpu(), activation).to(DEVICE), activate_triton(x, activation)):
        assert out[0, 2].isnan()
        assert_close(out[1:], expected[1:])
        torch.testing.assert_close(out[0, :2].float(), expected[0, :2], rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", [(0.2, -0.9, 0.5, -1e-6), (30.0, -30.0, 0.25, -0.2)])
def test_xielu(numbers: tuple[float, ...], dtype: torch.dtype) -> None:
    """Numbers of all sizes, near 0 too, where exp(x) - 1 - x would have few digits."""
    x = randn(7, 1100) * torch.logspace(-6, 1, 1100, device=DEVICE)
    x[0, :4] = torch.tensor([3e4, -3e4, float("nan"), 0.0])
    x = x.to(dtype)
    oracle = XIELUActivation(dtype=torch.float64).to(DEVICE)
    for parameter, number in zip((oracle.alpha_p, oracle.alpha_n, oracle.beta, oracle.eps), numbers, strict=True):
        parameter.data.fill_(number)
    expected = oracle(x.double()).to(dtype)
    given = torch.tensor(numbers, device=DEVICE)
    for out in (xielu(x.cpu(), given.cpu()).to(DEVICE), xielu_triton(x, given)):
        accuracy = {torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(out[0, :4], expected[0, :4], rtol=accuracy, atol=0, equal_nan=True)
        sizes = torch.maximum(expected.abs(), x.abs() / 8)[:, 4:]  # near -2 it crosses 0: its terms are larger
        assert ((out - expected)[:, 4:].abs() <= accuracy * sizes).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "size"), of_each_kind(product(ACTIVATIONS, [96, 1024, 3000]), 0, 2, 3, 6))
def test_gate_mul(activation: Activation, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(7, 2 * size, dtype=dtype)
    assert_close(gate_mul_triton(gate_up, activation), gate_mul_reference(gate_up.float(), activation))
    assert_close(gate_mul_triton(gate_up, activation), activated(gate_up.float(), activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 40])
def test_gate_heads(heads: int, dtype: torch.dtype) -> None:
    """The gates are some columns of a wider matrix."""
    x, wide = randn(5, heads, 64, dtype=dtype), randn(5, 4 + heads, 64, dtype=dtype)
    expected = (x.double() * wide[:, 4:].double().sigmoid()).flatten(1)
    for gate_heads in (gate_heads_triton, gate_heads_reference):
        assert_close(gate_heads(x, wide[:, 4:]), expected)


@pytest.mark.parametrize(
    ("activation", "shape"),
    of_each_kind(product(ACTIVATIONS, [(1, 64, 16), (300, 96, 200), (1200, 136, 384)]), 0, 1, 2, 4, 7),
)
def test_gated_linear(activation: Activation, shape: tuple[int, int, int]) -> None:
    """Tiles that are not full; of the last shape, programs have many, and groups of tiles are of both heights."""
    tokens, in_features, size = shape
    x = randn(tokens, in_features, dtype=SHORT)
    weight = (randn(2 * size, in_features) / in_features**0.5).to(SHORT)
    out = gated_linear(x, weight, activation)
    assert_close(out, activated(F.linear(x.float(), weight.float()), activation))


def activated(out: torch.Tensor, activation: AnyActivation | None) -> torch.Tensor:
    if activation is None:
        return out
    if isinstance(activation, Ungated):
        return ACT2FN[activation.function.replace("gelu_tanh", "gelu_pytorch_tanh")](out)
    gate, up = out.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if isinstance(activation, ScaledGate):
        gate, activation = gate * activation.factor, activation.function
    oracles = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
    return oracles[activation](gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 16), (6, 72)])
def test_rotate_heads(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """The heads lie among others, which stay as they are."""
    x, angles = randn(5, 3, heads // 2, head_dim, dtype=dtype), randn(5, head_dim)
    ours, theirs = x.clone(), x.clone()
    rotate_heads_triton(ours[:, :2].flatten(1, 2), angles.cos(), angles.sin())
    rotate_heads_reference(theirs[:, :2].flatten(1, 2), angles.cos(), angles.sin())
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[:, 2], x[:, 2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_every_size(activation: Activation) -> None:
    gate = torch.tensor([[-3e38, -1e13, -1e4, -90.0, -10.0, -1.0, -1e-3, -0.0, 1e-3, 1.0, 10.0, 1e4, 3e38]])
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=-1).to(DEVICE)
    torch.testing.assert_close(gate_mul_triton(gate_up, activation), activated(gate_up.double(), activation).float())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 40, 256, 3000])
@pytest.mark.parametrize("function", ["gelu_tanh", "relu", "gelu"])
def test_functions_behind_products(function: Function, tokens: int) -> None:
    """Some are applied by cuBLAS, others in a launch of their own; numbers that are none stay so."""
    x, weight, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((tokens, 256), (512, 256), (512,)))
    x[-1, 7] = float("nan")
    out = linear(x, weight, bias, Ungated(function))
    assert_close(out[:-1], activated(F.linear(x.double(), weight.double(), bias.double())[:-1], Ungated(function)))
    assert out[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 32), (96, 9), (2500, 50), (12288, 15)])
def test_one_row_linear(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """When interpreted, the last two shapes have more tiles than programs."""
    weight = randn(out_features, in_features, dtype=dtype)
    x, residual = (randn(1, in_features, dtype=dtype) for _ in range(2))
    norm_weight = randn(in_features, dtype=dtype)
    norm, wide_norm, wide = Norm(norm_weight, 1e-6), Norm(norm_weight.float(), 1e-6), weight.float()
    assert_close(one_row_linear(x, weight), x.float() @ wide.T)
    out, total = one_row_norm_linear(x, None, norm, weight)
    assert_close(out, normalize_reference(x.float(), wide_norm) @ wide.T)
    assert total is x
    out, total = one_row_norm_linear(x, residual, norm, weight)
    normed, expected_total = add_norm_reference(x.float(), residual.float(), wide_norm)
    assert_close(out, normed @ wide.T)
    assert_close(total, expected_total)
    if out_features % 2 == 0:
        out, _ = one_row_norm_linear(x, residual, norm, weight, activation="silu")
        assert_close(out, gate_mul_reference(normed @ wide.T, "silu"))
        assert_close(one_row_linear(x, weight, activation="silu"), gate_mul_reference(x.float() @ wide.T, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "shape"),
    of_each_kind(product([None, "silu", "gelu_tanh", *UNGATED], [(64, 32), (96, 10), (2500, 50)]), 0, 2, 4, 7, 10, 14),
)
def test_one_row_linear_with_a_bias(
    activation: AnyActivation | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    in_features, out_features = shape
    x, bias = randn(1, in_features, dtype=dtype), randn(out_features, dtype=dtype)
    weight = (randn(out_features, in_features) / in_features**0.5).to(dtype)
    out = one_row_linear(x, weight, bias, activation)
    assert_close(out, activated(F.linear(x.float(), weight.float(), bias.float()), activation))


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_a_scale_of_the_residual_stream(dtype: torch.dtype) -> None:
    """It multiplies the sum that the norm reads, and that goes on as the stream."""
    x, residual, weight = (randn(1, 96, dtype=dtype), randn(1, 96, dtype=dtype), randn(8, 96, dtype=dtype))
    post, plain, *_ = norms(96, dtype)
    pre = plain._replace(stream_scale=torch.tensor([0.3], dtype=dtype, device=DEVICE))
    for branch, summed in ((x, x.float()), (randn(3, 1, 96), None)):
        summed = branch.sum(dim=0) if summed is None else summed
        for norm_add in (norm_add_norm_triton, norm_add_norm_reference):
            out, total = norm_add(branch, residual, post, pre)
            assert_close(total, 0.3 * (normed(summed, post) + residual.float()))
            assert_close(out, normed(total, plain))
        for add in (add_norm_triton, add_norm_reference):
            out, total = add(branch, residual, pre)
            assert_close(total, 0.3 * (summed + residual.float()))
            assert_close(out, normed(total, plain))
    for function in (one_row_norm_linear, norm_linear):
        out, total = function(x, residual, pre, weight, None, None, post)
        assert_close(total, 0.3 * (normed(x, post) + residual.float()))
        assert_close(out, F.linear(normed(total, plain), weight.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "activation"),
    of_each_kind(
        product(["one_row", "one token", "three tokens", "pieces"], [None, "silu", "gelu_tanh", *UNGATED]),
        *(0, 1, 2, 3, 6, 9, 11, 15),
    ),
)
def test_norm_linear(kernel: str, activation: AnyActivation | None, dtype: torch.dtype) -> None:
    """Every combination of norms, with and without a residual and a bias. The roundings of many outputs even out."""
    in_pieces = kernel == "pieces"
    x = randn(2, 3, 96) if in_pieces else randn(3 if kernel == "three tokens" else 1, 96, dtype=dtype)
    whole = x.sum(dim=0).to(dtype).float() if in_pieces else x.float()
    weight = (randn(160, 96) / 96**0.5).to(dtype)
    bias, residual = randn(160, dtype=dtype), randn(len(whole), 96, dtype=dtype)
    function = one_row_norm_linear if kernel == "one_row" else norm_linear
    for norm in (None, *norms(96, dtype)):
        for post in (None, *norms(96, dtype)):
            out, total = function(x, residual, norm, weight, bias, activation, post)
            assert out.dtype == total.dtype == dtype
            assert_close(total, normed(whole, post) + residual.float())
            expected = F.linear(normed(total.float(), norm), weight.float(), bias.float())
            assert_close(out, activated(expected, activation))
        if not in_pieces:
            out, total = function(x, None, norm, weight, None, activation)
            assert total is x
            assert_close(out, activated(F.linear(normed(whole, norm), weight.float()), activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_linear(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(tokens, 96, dtype=dtype), randn(10, 96, dtype=dtype) / 8, randn(10, dtype=dtype)
    for activation in (None, "silu", "gelu_tanh"):
        for bias_or_none in (None, bias):
            expected = x.float() @ weight.float().T + (0 if bias_or_none is None else bias.float())
            assert_close(linear(x, weight, bias_or_none, activation), activated(expected, activation))


@pytest.mark.parametrize(
    ("shape", "tokens"),
    of_each_kind(product([(64, 128), (100, 512), (128, 1152)], [2, 17, 64, 100]), 0, 4, 5, 6, 7, 9),
)
def test_one_wave_linear(shape: tuple[int, int], tokens: int) -> None:
    """Products are whole or in pieces, with or without gates; the last tile of tokens and of outputs may be partial."""
    (out_features, in_features), dtype = shape, SHORT
    x, weight = randn(tokens, in_features, dtype=dtype), randn(2 * out_features, in_features, dtype=dtype)
    in_pieces = config_of(tokens, out_features, in_features, 8, may_split=True)
    assert in_pieces.pieces == {128: 1, 512: 2 if tokens > 64 else 4, 1152: 1 if tokens > 64 else 3}[in_features]
    expected = x.float() @ weight.float().T
    out = one_wave_linear(x, weight[:out_features], in_pieces)
    assert out.dim() == (3 if in_pieces.pieces > 1 else 2)
    assert_close(out.view(-1, tokens, out_features).sum(dim=0), expected[:, :out_features])
    whole = config_of(tokens, out_features, in_features, 8, may_split=False)
    assert whole.pieces == 1
    assert_close(one_wave_linear(x, weight, whole, activation="silu"), gate_mul_reference(expected, "silu"))


@pytest.mark.parametrize(("shape", "tokens"), of_each_kind(product([(100, 512), (128, 1152)], [2, 17, 64]), 0, 1, 2, 4))
def test_one_wave_linear_with_a_bias(shape: tuple[int, int], tokens: int) -> None:
    """Of several pieces, the first has the bias."""
    out_features, in_features = shape
    x, bias = randn(tokens, in_features, dtype=SHORT), randn(2 * out_features, dtype=SHORT)
    weight = (randn(2 * out_features, in_features) / in_features**0.5).to(SHORT)
    expected = F.linear(x.float(), weight.float(), bias.float())
    in_pieces = config_of(tokens, out_features, in_features, 8, may_split=True)
    assert in_pieces.pieces > 1
    out = one_wave_linear(x, weight[:out_features], in_pieces, bias[:out_features])
    assert_close(out.sum(dim=0), expected[:, :out_features])
    without = one_wave_linear(x, weight[:out_features], in_pieces)
    assert torch.equal(out[1:], without[1:])
    whole = config_of(tokens, out_features, in_features, 8, may_split=False)
    assert_close(one_wave_linear(x, weight[:out_features], whole, bias[:out_features]), expected[:, :out_features])
    for activation in ("silu", "gelu_tanh"):
        assert_close(one_wave_linear(x, weight, whole, bias, activation), activated(expected, activation))
        unbiased = activated(F.linear(x.float(), weight.float()), activation)
        assert_close(one_wave_linear(x, weight, whole, activation=activation), unbiased)


@pytest.mark.parametrize(
    ("tokens", "rows", "in_features", "gated", "tiles"),
    [
        (8, 24576, 4096, True, 192),  # two on a multiprocessor
        (17, 24576, 4096, True, None),
        (8, 51200, 5120, True, None),
        (8, 12288, 4096, False, None),
        (8, 4096, 4096, False, 64),
        (16, 6144, 1024, True, 48),
    ],
)
def test_products_of_one_wave(
    tokens: int, rows: int, in_features: int, gated: bool, tiles: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an H100 chooses, which has 132 multiprocessors; cuBLAS computes the others."""
    monkeypatch.setattr(one_wave, "can_launch_early", lambda _: True)
    monkeypatch.setattr(one_wave, "num_multiprocessors", lambda _: 132)
    x, weight = (torch.empty(n, in_features, dtype=torch.bfloat16, device="meta") for n in (tokens, rows))
    wave = one_wave.find_one_wave(x, weight, gated)
    assert (wave and wave.programs(tokens, rows // 2 if gated else rows)) == tiles


def empty_inbox(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, -0.0, device=DEVICE, dtype=dtype)


def is_empty(inbox: torch.Tensor) -> torch.Tensor:
    return (inbox == 0) & inbox.signbit()


@pytest.mark.parametrize(
    ("dtype", "ranks", "one_owner"), of_each_kind(product([torch.float32, SHORT], [2, 4], [False, True]), 0, 5, 7)
)
def test_all_reduce_add_rms_norm(dtype: torch.dtype, ranks: int, one_owner: bool) -> None:
    """Ranks run one after another, each with the messages in its inbox that the other ranks would have sent."""
    tokens, size = 6, 96
    parts, residual, weight = randn(ranks, tokens, size, dtype=dtype), randn(tokens, size), randn(size, dtype=dtype)
    parts[:, :, ::7], parts[:, :, 1::7], residual = -0.0, 0.0, residual.to(dtype)  # a zero is a message as well
    expected, expected_total = add_norm_reference(
        parts.float().sum(dim=0), residual.float(), Norm(weight.float(), 1e-6)
    )
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    owners = torch.arange(tokens, device=DEVICE) % ranks

    for rank in range(ranks):
        inboxes = [empty_inbox(ranks, tokens, size, dtype=dtype) for _ in range(ranks)]
        for peer in (peer for peer in range(ranks) if peer != rank):
            rows = owners == rank if one_owner else owners >= 0
            inboxes[rank][peer, rows] = parts[peer, rows] + 0.0
            if one_owner:
                inboxes[rank][peer, owners == peer] = expected[owners == peer].to(dtype) + 0.0
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
        x = parts[rank].clone()
        out, total = all_reduce_add_norm(x, residual, Norm(weight, 1e-6), addresses, rank, stop, one_owner)

        ours = owners == rank if one_owner else owners >= 0
        assert_close(out, expected)
        assert_close(total[ours], expected_total[ours])
        assert is_empty(inboxes[rank]).all()
        for peer in (peer for peer in range(ranks) if peer != rank):
            sent = inboxes[peer][rank]
            if one_owner:
                assert torch.equal(sent[owners == peer], parts[rank, owners == peer])
                assert torch.equal(sent[ours], out[ours])
                assert is_empty(sent[(owners != peer) & ~ours]).all()
            else:
                assert torch.equal(sent, parts[rank])
                assert not is_empty(sent).any()
            others = [source for source in range(ranks) if source != rank]
            assert is_empty(inboxes[peer][others]).all()


@pytest.mark.parametrize(("dtype", "ranks"), of_each_kind(product([torch.float32, SHORT], [2, 4]), 0, 3))
def test_gather_features(dtype: torch.dtype, ranks: int) -> None:
    tokens, share = 6, 90
    shares = randn(ranks, tokens, share, dtype=dtype)
    shares[:, :, ::7] = -0.0  # a zero is a message as well
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for rank in range(ranks):
        others = [peer for peer in range(ranks) if peer != rank]
        inboxes = [empty_inbox(ranks, tokens, share, dtype=dtype) for _ in range(ranks)]
        inboxes[rank][others] = shares[others] + 0.0
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
        gathered = gather_features(shares[rank].clone(), addresses, rank, stop)
        assert torch.equal(gathered, shares.transpose(0, 1).flatten(1))
        assert is_empty(inboxes[rank]).all()
        for peer in others:
            assert torch.equal(inboxes[peer][rank], shares[rank])
            assert not is_empty(inboxes[peer][rank]).any()
            assert is_empty(inboxes[peer][[source for source in range(ranks) if source != rank]]).all()


@pytest.mark.parametrize(
    ("dtype", "ranks", "has_residual"), of_each_kind(product([torch.float32, SHORT], [2, 3], [False, True]), 0, 5, 7)
)
def test_one_row_norm_linear_adds_up_the_ranks_parts(dtype: torch.dtype, ranks: int, has_residual: bool) -> None:
    """The messages stay in this rank's inbox, for all programs to read, and those of the sum before leave it."""
    size, out_features = 96, 600
    parts, weight = randn(ranks, 1, size, dtype=dtype), randn(out_features, size, dtype=dtype)
    parts[:, :, ::7] = -0.0
    norm, post = Norm(randn(size, dtype=dtype), 1e-6), Norm(randn(size, dtype=dtype), 1e-6)
    residual = randn(1, size, dtype=dtype) if has_residual else None
    expected_total = parts.float().sum(dim=0)
    if residual is not None:
        expected_total = normed(expected_total, post) + residual.float()
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    for rank in range(ranks):
        inboxes = [empty_inbox(ranks, size, dtype=dtype) for _ in range(ranks)]
        stale = [randn(ranks, size, dtype=dtype) for _ in range(ranks)]
        unread = [box.clone() for box in stale]
        peers = [peer for peer in range(ranks) if peer != rank]
        for peer in peers:
            inboxes[rank][peer] = parts[peer] + 0.0
        lanes = (torch.tensor([box.data_ptr() for box in boxes], device=DEVICE) for boxes in (inboxes, stale))
        kept, x = torch.empty(1, size, dtype=dtype, device=DEVICE), parts[rank].clone()
        lane = VectorLane(*lanes, rank, stop)
        out, total = one_row_norm_linear(
            x, residual, norm, weight, post=post if has_residual else None, lane=lane, normed=kept
        )
        assert_close(total, expected_total)
        assert_close(kept, normed(total, norm))
        assert_close(out, kept.float() @ weight.float().T)
        assert is_empty(stale[rank][peers]).all()
        for peer in peers:
            assert torch.equal(inboxes[rank][peer], (parts[peer] + 0.0)[0])
            assert torch.equal(inboxes[peer][rank], parts[rank, 0])
            assert not is_empty(inboxes[peer][rank]).any()
            assert is_empty(inboxes[peer][peers]).all()
            assert torch.equal(stale[peer], unread[peer])


def test_all_reduce_empties_the_lane_of_a_vector() -> None:
    x, inboxes, stale = randn(1, 96), empty_inbox(2, 2, 1, 96, dtype=torch.float32), randn(2, 2, 96)
    inboxes[0, 1] = 1.0
    lanes = [torch.tensor([box.data_ptr() for box in boxes], device=DEVICE) for boxes in (inboxes, stale)]
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    all_reduce_add_norm(x, None, Norm(randn(96), 1e-6), lanes[0], 0, stop, stale=lanes[1])
    assert is_empty(stale[0, 1]).all()
    assert not is_empty(stale[1]).any()


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("one_owner", [False, True])
def test_all_reduce_and_norm_without_a_residual(one_owner: bool, plus_one: bool) -> None:
    """As after the embedding, a rank's x is zero for tokens whose ids another rank holds."""
    x, norm = randn(6, 96), Norm(randn(96), 1e-6, plus_one)
    x[1::2] = 0.0
    expected = normed(x, norm)
    inboxes = empty_inbox(2, 2, 6, 96, dtype=torch.float32)
    inboxes[0, 1] = expected + 0.0 if one_owner else 0.0
    if one_owner:
        inboxes[0, 1, ::2] = 0.0  # the other rank's part of the tokens that we own
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out, total = all_reduce_add_norm(x, None, norm, addresses, 0, stop, one_owner)
    assert_close(out, expected)
    assert_close(total[::2], x[::2])


@pytest.mark.parametrize(("ranks", "rows"), of_each_kind(product([2, 4], [1, 5, 300]), 0, 2, 4))
def test_best_of_ranks(ranks: int, rows: int) -> None:
    """Scores have only a few values, so that there are ties: on every rank, the lowest rank wins them."""
    scores = torch.randint(-1, 2, (ranks, rows), device=DEVICE).float() * -0.5  # -0.0 among them
    ids = torch.randint(0, 200_000, (ranks, rows), device=DEVICE, dtype=torch.int32)
    ids[0, 0] = 0
    winners = [scores[:, row].tolist().index(scores[:, row].max()) for row in range(rows)]
    expected = ids.gather(0, torch.tensor([winners], device=DEVICE))[0]
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for rank in range(ranks):
        inboxes = [empty_inbox(ranks, 2, rows, dtype=torch.float32) for _ in range(ranks)]
        for peer in (peer for peer in range(ranks) if peer != rank):
            inboxes[rank][peer] = torch.stack([scores[peer], ids[peer].float()]) + 0.0
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
        assert torch.equal(best_of_ranks(scores[rank], ids[rank], addresses, rank, stop), expected)
        assert is_empty(inboxes[rank]).all()
        for peer in (peer for peer in range(ranks) if peer != rank):
            assert torch.equal(inboxes[peer][rank], torch.stack([scores[rank], ids[rank].float()]))
            assert not is_empty(inboxes[peer][rank]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 300])
def test_messages_that_come_late(rows: int) -> None:
    """All of a kernel's threads see a message, even if it comes between their looks.

    The threads look in step until they have first read `stop`, after about 1 ms. So the messages come later.
    """
    inboxes = empty_inbox(2, 2, 2, rows, dtype=torch.float32)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    scores, ids = torch.zeros(rows, device=DEVICE), torch.zeros(rows, device=DEVICE, dtype=torch.int32)
    message = torch.ones(2, rows, device=DEVICE)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    peer = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        out = best_of_ranks(scores, ids, addresses, 0, stop)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.003)
        with torch.cuda.stream(peer):
            inboxes[0, 1].copy_(message)
        deadline = time.monotonic() + 5
        while not done.query() and stop[0] == 0:
            stop[0] = time.monotonic() > deadline
        assert stop[0] == 0
        assert (out == 1).all()
        peer.synchronize()
    assert is_empty(inboxes[0]).all()


@pytest.mark.parametrize("one_owner", [False, True])
def test_all_reduce_add_rms_norm_ends_when_told_that_nothing_will_come(one_owner: bool) -> None:
    x, weight = randn(1, 64), randn(64)
    inboxes = empty_inbox(2, 2, 1, 64, dtype=torch.float32)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=DEVICE)
    stop = torch.ones(1, dtype=torch.int32, pin_memory=HAS_CUDA)
    out, _ = all_reduce_add_norm(x, x, Norm(weight, 1e-6), addresses, 1, stop, one_owner)
    assert out.cpu().shape == (1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_add_rms_norm_of_pieces(dtype: torch.dtype) -> None:
    pieces, residual, weight = randn(4, 5, 96), randn(5, 96, dtype=dtype), randn(96, dtype=dtype)
    for out, expected in zip(
        add_norm_triton(pieces, residual, Norm(weight, 1e-6)),
        add_norm_reference(pieces, residual.float(), Norm(weight.float(), 1e-6)),
        strict=True,
    ):
        assert out.dtype == dtype
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (16, 8, 128), (3, 1, 96), (5, 5, 64)])
def test_norm_rotate_store(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = randn(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
    weights = [randn(head_dim, dtype=dtype) for _ in range(2)]
    angles = randn(40, head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 1, 39, 5, -1, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 47, 15, 16, -1, 31], dtype=torch.int32, device=DEVICE)
    caches = [randn(3, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    expected_caches = [cache.float() for cache in caches]
    norms, wide = ([Norm(weight.to(kind), 1e-6) for weight in weights] for kind in (dtype, torch.float32))
    rotation = (None, cos_sin, False, None, positions)
    q = norm_rotate_store_triton(qkv, *norms, *rotation, *caches, slots)
    assert_close(q, norm_rotate_store_reference(qkv.float(), *wide, *rotation, *expected_caches, slots))
    assert_close(caches[0], expected_caches[0])
    assert torch.equal(caches[1].float(), expected_caches[1])  # values are copied; nothing else is written


@pytest.mark.parametrize("parts", ["qkv", "qk"])
@pytest.mark.parametrize("cached", [*DTYPES, FP8], ids=str)
def test_of_a_value_that_is_not_finite_the_key_says_so(cached: torch.dtype, parts: Parts) -> None:
    """Heads of keys and of values are of different programs. Triton's interpreter converts no NaN to FP8."""
    heads, kv_heads, head_dim, tokens = 5, 4, 32, 4
    in_fp8 = cached == FP8
    qkv = randn(tokens, heads + (len(parts) - 1) * kv_heads, head_dim, dtype=SHORT if in_fp8 else cached)
    values, first_head = qkv[:, -kv_heads:], heads + (len(parts) - 2) * kv_heads
    places = [(0, 1, 3, math.nan), (1, 3, 31, math.inf), (2, 0, 0, -math.inf)]  # a token, a KV head, a number
    for token, head, number, bad in places:
        qkv[token, first_head + head, number] = bad
    wanted = values.nan_to_num(0, 0, 0)
    slots, norm = torch.arange(tokens, dtype=torch.int32, device=DEVICE), Norm(randn(head_dim, dtype=qkv.dtype), 1e-6)
    scales = torch.ones(2, device=DEVICE) if in_fp8 else None
    compiled = [norm_rotate_store_triton] if HAS_CUDA or not in_fp8 else []
    for function in (norm_rotate_store_reference, *compiled):
        k_cache, v_cache = (torch.zeros(1, tokens, kv_heads, head_dim, device=DEVICE).to(cached) for _ in range(2))
        function(qkv, norm, norm, None, None, False, None, slots, k_cache, v_cache, slots, scales, parts)
        bad = k_cache[0].float().isnan()
        assert bad.all(dim=-1).nonzero().tolist() == [[token, head] for token, head, *_ in places]
        assert bad.sum() == len(places) * head_dim
        assert torch.equal(v_cache[0].float(), wanted.to(cached).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotate_store_of_tokens_that_lie_apart(dtype: torch.dtype) -> None:
    """Behind the values, a projection may have gates."""
    wide, weight = randn(6, 5 + 2 * 2 + 5, 32, dtype=dtype), randn(32, dtype=dtype)
    rows, norm, angles = torch.arange(6, dtype=torch.int32, device=DEVICE), Norm(weight, 1e-6), randn(6, 16)
    results = []
    for qkv in (wide[:, :9], wide[:, :9].contiguous()):
        caches = [torch.zeros(1, 6, 2, 32, dtype=dtype, device=DEVICE) for _ in range(2)]
        q = norm_rotate_store_triton(qkv, norm, norm, None, angles, False, None, rows, *caches, rows)
        results.append((q, *caches))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def dense_norm_rotate(
    x: torch.Tensor, norm: Norm | None, full: bool, matrices: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Normalise and rotate in float64. x: [tokens, heads, head_dim]; matrices: [tokens, head_dim, head_dim]"""
    x = x.double()
    if norm is not None:
        size = tuple(x.shape[1:] if full else x.shape[2:])
        weight = norm.weight.double().view(size) + norm.plus_one
        x = torch.nn.functional.rms_norm(x, size, weight, norm.eps)
    return torch.einsum("tij,thj->thi", matrices, x) * scales[:, None, None]


def rotation_matrices(angles: torch.Tensor, interleaved: bool, head_dim: int) -> torch.Tensor:
    """Return [tokens, head_dim, head_dim] from angles, [tokens, pairs]; numbers beyond the pairs stay as they are."""
    tokens, pairs = angles.shape
    out = torch.eye(head_dim, dtype=torch.float64, device=DEVICE).repeat(tokens, 1, 1)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        out[:, a, a] = out[:, b, b] = angles[:, i].double().cos()
        out[:, b, a] = angles[:, i].double().sin()
        out[:, a, b] = -out[:, b, a]
    return out


ROTARY = [(0, False), (20, False), (20, True), (10, False), (10, True)]  # rotary_dim of 20, interleaved
VARIANTS = [  # head_dim, norm, rotary_dim, interleaved, scaled
    *((20, norm, *rotary, rotary[0] == 10) for norm in ("none", "head", "full plus one") for rotary in ROTARY),
    (20, "head plus one", 20, False, False),
    (20, "full", 0, False, False),
    (8, "head", 4, False, False),
    (8, "head", 8, True, True),
    (32, "head", 8, False, True),
    (32, "full", 8, True, False),
    (32, "full", 32, False, True),
    (80, "head plus one", 20, False, False),
    (96, "full plus one", 72, False, True),
    (96, "head plus one", 72, True, True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "norm", "rotary_dim", "interleaved", "scaled"),
    of_each_kind(VARIANTS, 1, 5, 6, 7, 8, 9, 12, 15, 16, 17, 22, 24),
)
def test_variants_of_norm_rotate_store(
    head_dim: int, norm: str, rotary_dim: int, interleaved: bool, scaled: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads = 7, 2  # the first group of a kernel's heads ends within the keys
    qkv = randn(4, heads + 2 * kv_heads, head_dim, dtype=dtype)
    full, plus_one = norm.startswith("full"), norm.endswith("plus one")
    norms: list[Norm | None] = [None, None]
    if norm != "none":
        sizes = [count * head_dim if full else head_dim for count in (heads, kv_heads)]
        norms = [Norm(randn(size, dtype=dtype), 1e-2, plus_one) for size in sizes]
    counts = torch.tensor([heads * head_dim, kv_heads * head_dim], device=DEVICE)
    angles = randn(40, rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) if rotary_dim else None
    query_scales = torch.rand(40, device=DEVICE) + 0.5 if scaled else None
    positions = torch.tensor([1, 39, -1, -1], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([47, -1, 16, -1], dtype=torch.int32, device=DEVICE)

    at = positions.clamp(min=0)
    matrices = rotation_matrices(angles[at], interleaved, head_dim)
    ones = torch.ones(len(at), device=DEVICE)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    expected_q = dense_norm_rotate(q, norms[0], full, matrices, ones if query_scales is None else query_scales[at])
    expected_k = dense_norm_rotate(k, norms[1], full, matrices, ones)
    before = [randn(3, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    expected_caches = [cache.double().flatten(0, 1) for cache in before]
    for cache, rows in zip(expected_caches, (expected_k, v.double()), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot] = rows[token]
    for norm_rotate_store, sum_squares in (
        (norm_rotate_store_triton, sum_squares_triton),
        (norm_rotate_store_reference, sum_squares_reference),
    ):
        caches = [cache.clone() for cache in before]
        mean_squares = sum_squares(qkv, heads, kv_heads) / counts if full else None
        q = norm_rotate_store(qkv, *norms, mean_squares, cos_sin, interleaved, query_scales, positions, *caches, slots)
        assert q.dtype == dtype
        assert_close(q, expected_q)
        assert_close(caches[0].flatten(0, 1), expected_caches[0])
        assert torch.equal(caches[1].double().flatten(0, 1), expected_caches[1])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 24)])
def test_norm_rotate_store_of_tokens_with_three_positions(head_dim: int, rotary_dim: int) -> None:
    """Each pair turns by the position that its section names. Equal ones turn it as a single one does, to the bit."""
    qkv, angles = randn(5, 9 + 2 * 2, head_dim, dtype=SHORT), randn(40, rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    sections = torch.arange(rotary_dim // 2, dtype=torch.int32, device=DEVICE) % 3
    norm, slots = Norm(randn(head_dim, dtype=SHORT), 1e-6), torch.arange(5, dtype=torch.int32, device=DEVICE)
    positions = torch.randint(40, (3, 5), device=DEVICE).int()

    def run(function: Callable[..., torch.Tensor], at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        caches = [torch.zeros(1, 5, 2, head_dim, dtype=SHORT, device=DEVICE) for _ in range(2)]
        q = function(qkv, norm, norm, None, cos_sin, False, None, at, *caches, slots, sections=sections)
        return q, caches[0][0]

    turned = torch.stack([angles[positions[part], pair] for pair, part in enumerate(sections.tolist())], dim=-1)
    matrices, ones = rotation_matrices(turned, False, head_dim), torch.ones(5, device=DEVICE)
    expected = dense_norm_rotate(qkv[:, :11], norm, False, matrices, ones).split([9, 2], dim=1)
    for function in (norm_rotate_store_triton, norm_rotate_store_reference):
        for out, wanted in zip(run(function, positions), expected, strict=True):
            assert_close(out, wanted)
        same = zip(run(function, positions[:1].repeat(3, 1)), run(function, positions[0]), strict=True)
        assert all(torch.equal(*both) for both in same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "value_norm"), [("qkv", True), ("qk", True), ("qk", False), ("q", True)])
def test_norm_rotate_store_of_values_that_are_normalised_or_keys_or_another_layers(
    parts: Parts, value_norm: bool, dtype: torch.dtype
) -> None:
    """Values that are keys are these before their norm and rotation. With queries alone, nothing is written."""
    heads, kv_heads, head_dim = 7, 2, 32
    qkv = randn(3, heads + (len(parts) - 1) * kv_heads, head_dim, dtype=dtype)
    q_norm, k_norm = (Norm(randn(head_dim, dtype=dtype), 1e-2) for _ in range(2))
    angles = randn(40, head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([1, 39, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([47, -1, 16], dtype=torch.int32, device=DEVICE)

    matrices, ones = rotation_matrices(angles[positions], False, head_dim), torch.ones(3, device=DEVICE)
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, -kv_heads:].double()
    expected_q = dense_norm_rotate(qkv[:, :heads], q_norm, False, matrices, ones)
    before = [randn(3, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    expected_k, expected_v = (cache.double().flatten(0, 1) for cache in before)
    if parts != "q":
        expected_k[[47, 16]] = dense_norm_rotate(k, k_norm, False, matrices, ones)[[0, 2]]
        expected_v[[47, 16]] = (torch.nn.functional.rms_norm(v, (head_dim,), eps=1e-2) if value_norm else v)[[0, 2]]
    norms = q_norm, None if parts == "q" else k_norm
    for function in (norm_rotate_store_triton, norm_rotate_store_reference):
        caches = [cache.clone() for cache in before]
        rest = None, cos_sin, False, None, positions, *caches, slots, None
        assert_close(function(qkv, *norms, *rest, parts, value_norm), expected_q)
        assert_close(caches[0].flatten(0, 1), expected_k)
        assert_close(caches[1].flatten(0, 1), expected_v)


@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_rotate_store_rounds_as_the_checkpoints_of_its_norm_expect(plus_one: bool) -> None:
    """It rounds to the dtype before it applies the weight; with plus_one it rounds once, after the weight."""
    qkv, weight = randn(4, 4, 32, dtype=SHORT), randn(32, dtype=SHORT)
    caches = [torch.zeros(1, 4, 1, 32, dtype=SHORT, device=DEVICE) for _ in range(2)]
    norm, rows = Norm(weight, 1e-6, plus_one), torch.arange(4, dtype=torch.int32, device=DEVICE)
    wide = torch.nn.functional.rms_norm(qkv.float(), (32,), eps=1e-6)
    rounded = (wide * (1 + weight.float())).to(SHORT) if plus_one else wide.to(SHORT) * weight
    for function in (norm_rotate_store_triton, norm_rotate_store_reference):
        q = function(qkv, norm, norm, None, None, False, None, rows, *caches, rows)
        for out, expected in ((q, rounded[:, :2]), (caches[0][0], rounded[:, 2:3])):
            assert (out == expected).float().mean() > 0.98  # the last bit of the float32 root may differ


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (5, 5, 20), (1, 3, 96), (40, 8, 128)])
def test_sum_squares(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = randn(3, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, _ = qkv.double().square().sum(dim=-1).split([heads, kv_heads, kv_heads], dim=1)
    for sum_squares in (sum_squares_triton, sum_squares_reference):
        sums = sum_squares(qkv, heads, kv_heads)
        assert sums.dtype == torch.float32
        assert_close(sums, torch.stack([q.sum(dim=1), k.sum(dim=1)], dim=1))


def test_two_ranks_share_a_norm_over_all_heads() -> None:
    """Each rank has half the heads, their weights, and the sums of squares over both ranks."""
    whole, rows = randn(3, 8, 16), torch.arange(3, dtype=torch.int32, device=DEVICE)
    norms = [Norm(randn(64), 1e-6), Norm(randn(32), 1e-6)]

    def run(qkv: torch.Tensor, norms: list[Norm], mean_squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        caches = [torch.zeros(1, 3, qkv.shape[1] // 4, 16, device=DEVICE) for _ in range(2)]
        q = norm_rotate_store_triton(qkv, *norms, mean_squares, None, False, None, rows, *caches, rows)
        return q, caches[0][0]

    counts = torch.tensor([64, 32], device=DEVICE)
    expected = run(whole, norms, sum_squares_triton(whole, 4, 2) / counts)
    shares = [torch.cat([x.chunk(2, dim=1)[rank] for x in whole.split([4, 2, 2], dim=1)], 1) for rank in (0, 1)]
    mean_squares = sum(sum_squares_triton(share, 2, 1) for share in shares) / counts
    outs = [
        run(share, [norm._replace(weight=norm.weight.chunk(2)[rank]) for norm in norms], mean_squares)
        for rank, share in enumerate(shares)
    ]
    for of_ranks, wanted in zip(zip(*outs, strict=True), expected, strict=True):
        assert_close(torch.cat(of_ranks, dim=1), wanted)


def test_rows_advance() -> None:
    positions = torch.tensor([5, 0, 31, -1, 16, -1], dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 100, (6, 3), device=DEVICE).int()
    deltas = torch.tensor([-3, 0, -30, -4, 2, 9], dtype=torch.int32, device=DEVICE)
    for where in (positions, tables, 16), (positions, tables, 16, deltas):
        for out, expected in zip(locate_rows_triton(*where), locate_rows_reference(*where), strict=True):
            assert torch.equal(out, expected)
    assert locate_rows_triton(*where)[2].tolist() == [2, 0, 1, -1, 18, -1]
    sampled = torch.arange(10, 16, device=DEVICE).int()
    for advance in (advance_rows_triton, advance_rows_reference):
        tokens, moved = torch.zeros_like(positions), positions.clone()
        advance(tokens, moved, sampled)
        assert torch.equal(tokens, sampled)
        assert moved.tolist() == [6, 1, 32, -1, 17, -1]


def paged(
    context_lens: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make caches and block tables for the contexts, blocks in random order; NaN where no context has a token."""
    blocks = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(blocks), device=DEVICE).int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=DEVICE)
    caches = [randn(sum(blocks), block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    for row, (table, length) in enumerate(zip(order.split(blocks), context_lens, strict=True)):
        tables[row, : len(table)] = table
        if length % block_size:
            for cache in caches:
                cache[table[-1], length % block_size :] = float("nan")
    return caches[0], caches[1], tables


SHAPES = [(4, 4, 32, 16), (8, 4, 64, 256), (4, 1, 128, 48), (3, 3, 96, 32)]  # heads, kv_heads, head_dim, block_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_prefill(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, _, head_dim, _ = shape
    query_lens, context_lens = [1, 16, 70, 3, 130], [1, 16, 100, 64, 130]
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
    cu_query_lens = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    out = paged_prefill_triton(q, k_cache, v_cache, tables, cu_query_lens, lens, max(query_lens), head_dim**-0.5)
    expected = paged_prefill_reference(
        q.float(), k_cache.float(), v_cache.float(), tables, query_lens, context_lens, head_dim**-0.5
    )
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [3, *whole_only([1, 8, None])])
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_decode(shape: tuple[int, int, int, int], workers: int | None, dtype: torch.dtype) -> None:
    """Some rows have one worker, some several; some begin or end inside a worker's share; one has no context."""
    heads, _, head_dim, _ = shape
    context_lens = [1, 16, 100, 300, 64, 0]
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), heads, head_dim, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    plan = plan_ahead(lens, k_cache, workers)
    k, v = (cache.float().nan_to_num() for cache in (k_cache, v_cache))
    expected = paged_decode_reference(q.float(), k, v, tables, lens, 300, head_dim**-0.5)
    for _ in range(2):  # two layers: the first must leave the plan unchanged
        out = paged_decode_triton(q, k_cache, v_cache, tables, lens, head_dim**-0.5, plan)
        assert_close(out[:5], expected[:5])
        assert plan.arrivals.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_of_many_rows(dtype: torch.dtype) -> None:
    """Beyond FEW_ROWS the tiles are larger, and the loop over them has fewer stages."""
    context_lens = [1 + 37 * row % 200 for row in range(FEW_ROWS + 8)]
    shape = (4, 2, 128, 256)
    k_cache, v_cache, tables = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), 4, 128, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    out = paged_decode_triton(q, k_cache, v_cache, tables, lens, 0.1, plan_ahead(lens, k_cache))
    k, v = (cache.float().nan_to_num() for cache in (k_cache, v_cache))
    assert_close(out, paged_decode_reference(q.float(), k, v, tables, lens, 200, 0.1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 64, 300])
@pytest.mark.parametrize("shape", [SHAPES[1], *whole_only((shape,) for shape in SHAPES if shape is not SHAPES[1])])
def test_paged_decode_of_a_row_makes_way(shape: tuple[int, int, int, int], length: int, dtype: torch.dtype) -> None:
    """A row that is alone lets the next kernel start early: another row, or a guess, and it would not."""
    heads, _, head_dim, _ = shape
    k_cache, v_cache, tables = paged([length], *shape, dtype)
    q = randn(1, heads, head_dim, dtype=dtype)
    lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    plan = plan_ahead(lens, k_cache)
    assert plan.programs.make_way
    assert not choose_programs(2, k_cache).make_way
    assert not choose_programs(1, k_cache, are_bundles=True).make_way
    k, v = (cache.float().nan_to_num() for cache in (k_cache, v_cache))
    out = paged_decode_triton(q, k_cache, v_cache, tables, lens, 0.1, plan)
    assert_close(out, paged_decode_reference(q.float(), k, v, tables, lens, length, 0.1))
    assert plan.arrivals.eq(0).all()


def forget(
    k_cache: torch.Tensor, v_cache: torch.Tensor, tables: torch.Tensor, starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return copies in which each sequence's tokens before its start are NaN.

    The tables name another block, all NaN, instead of each block that lies wholly before the start.
    """
    block_size, tables = k_cache.shape[1], tables.clone()
    caches = [torch.cat([cache, torch.full_like(cache[:1], float("nan"))]) for cache in (k_cache, v_cache)]
    for table, start in zip(tables, starts, strict=True):
        for cache in caches:
            cache[table[: start // block_size].long()] = float("nan")
            if start % block_size:
                cache[table[start // block_size], : start % block_size] = float("nan")
        table[: start // block_size] = len(caches[0]) - 1
    return caches[0], caches[1], tables


def attend_densely(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scoring: Scoring,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in float64 with all scores of every sequence; a sequence without context gets zeros.

    ends: as for paged_prefill_reference
    """
    group, outs = q.shape[1] // k_cache.shape[2], []
    own_ends = [None] * len(query_lens) if ends is None else ends.split(query_lens)
    for some, table, length, own in zip(
        q.double().split(query_lens), tables.long(), context_lens, own_ends, strict=True
    ):
        k, v = (
            cache[table].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1) for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", some, k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        key = torch.arange(length, device=DEVICE)
        query = torch.arange(length - len(some), length, device=DEVICE)[:, None]
        if scoring.slopes is not None:
            scores = scores + scoring.slopes.double()[:, None, None] * (key - query)
        seen = (key < (query + 1 if own is None else own[:, None])) & (key > query - (scoring.window or length))
        scores = scores.masked_fill(~seen, float("-inf"))
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks.double()[:, None, None].expand(-1, len(some), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


WINDOWS_AND_SOFTCAPS = [(1, None), (16, 2.0), (50, None), (300, 0.5), (None, 2.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), of_each_kind(WINDOWS_AND_SOFTCAPS, 0, 4))
@pytest.mark.parametrize("shape", [SHAPES[1], *whole_only((shape,) for shape in SHAPES if shape is not SHAPES[1])])
def test_paged_prefill_of_windows_and_soft_caps(
    shape: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels ignore tokens that no query sees, here NaN. Windows begin at a tile's border and inside one."""
    monkeypatch.setattr("nanoinfer.kernels.attention.prefill.paged_prefill.QUERIES_AT_ONCE", 60)
    heads, _, head_dim, _ = shape
    query_lens, context_lens = [1, 16, 70, 3, 130, 1], [1, 16, 100, 66, 130, 112]
    pages = paged(context_lens, *shape, dtype)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
    cu_query_lens = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    how = Scoring(head_dim**-0.5, window, softcap)
    expected = attend_densely(q, *pages, query_lens, context_lens, how)
    starts = [
        0 if window is None else max(0, length - queries + 1 - window)
        for queries, length in zip(query_lens, context_lens, strict=True)
    ]
    k_cache, v_cache, tables = forget(*pages, starts)
    assert_close(
        paged_prefill_triton(
            q, k_cache, v_cache, tables, cu_query_lens, lens, max(query_lens), how.scale, window, softcap
        ),
        expected,
    )
    k, v = k_cache.float(), v_cache.float()
    assert_close(
        paged_prefill_reference(q.float(), k, v, tables, query_lens, context_lens, how.scale, window, softcap), expected
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(40, None), *whole_only([(None, None), (16, 2.0), (None, 2.0)])])
@pytest.mark.parametrize("shape", [SHAPES[1], *whole_only((shape,) for shape in SHAPES if shape is not SHAPES[1])])
def test_paged_prefill_of_tokens_that_see_beyond_themselves(
    shape: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images begin before a chunk, at a tile's border and inside one, are longer than a tile, and end with a chunk."""
    monkeypatch.setattr("nanoinfer.kernels.attention.prefill.paged_prefill.QUERIES_AT_ONCE", 60)
    heads, _, head_dim, _ = shape
    query_lens, context_lens = [1, 16, 70, 3, 230], [1, 16, 100, 66, 300]
    pages = paged(context_lens, *shape, dtype)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype)
    own = [list(range(end - count + 1, end + 1)) for count, end in zip(query_lens, context_lens, strict=True)]
    for row, start, end in ((1, 3, 9), (2, 20, 44), (2, 60, 100), (3, 50, 66), (4, 128, 290)):
        own[row] = [end if start < place <= end else place for place in own[row]]
    ends = torch.tensor([place for places in own for place in places], dtype=torch.int32, device=DEVICE)
    cu_query_lens = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    scale = head_dim**-0.5
    expected = attend_densely(q, *pages, query_lens, context_lens, Scoring(scale, window, softcap), ends)
    how = scale, window, softcap, None, None, ends
    assert_close(paged_prefill_triton(q, *pages, cu_query_lens, lens, max(query_lens), *how), expected)
    k, v = pages[0].float(), pages[1].float()
    assert_close(paged_prefill_reference(q.float(), k, v, pages[2], query_lens, context_lens, *how), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), of_each_kind(WINDOWS_AND_SOFTCAPS, 0, 4))
@pytest.mark.parametrize("shape", [SHAPES[1], *whole_only((shape,) for shape in SHAPES if shape is not SHAPES[1])])
def test_paged_decode_of_windows_and_soft_caps(
    shape: tuple[int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Rows are as in test_paged_decode. Kernels ignore tokens before a window, here NaN."""
    heads, _, head_dim, _ = shape
    context_lens = [1, 16, 100, 300, 64, 0, 112]
    rows = [row for row, length in enumerate(context_lens) if length]
    pages = paged(context_lens, *shape, dtype)
    q = randn(len(context_lens), heads, head_dim, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    how = Scoring(head_dim**-0.5, window, softcap)
    expected = attend_densely(q, *pages, [1] * len(lens), context_lens, how)[rows]
    starts = [0 if window is None else max(0, length - window) for length in context_lens]
    k_cache, v_cache, tables = forget(*pages, starts)
    for workers in (2, 7):
        plan = plan_ahead(lens, k_cache, workers, window)
        out = paged_decode_triton(q, k_cache, v_cache, tables, lens, how.scale, plan, softcap)
        assert_close(out[rows], expected)
        assert plan.arrivals.eq(0).all()
    k, v = k_cache.float(), v_cache.float()
    out = paged_decode_reference(q.float(), k, v, tables, lens, 300, how.scale, window, softcap)
    assert_close(out[rows], expected)


def check_attention(
    shape: tuple[int, int, int, int], query_lens: list[int], context_lens: list[int], dtype: torch.dtype
) -> None:
    """Check prefill, and decode from the contexts' last tokens."""
    heads, _, head_dim, _ = shape
    pages = paged(context_lens, *shape, dtype)
    q, how = randn(sum(query_lens), heads, head_dim, dtype=dtype), Scoring(head_dim**-0.5)
    expected = attend_densely(q, *pages, query_lens, context_lens, how)
    ends = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    assert_close(paged_prefill_triton(q, *pages, ends, lens, max(query_lens), how.scale), expected)
    last = ends[1:].long() - 1
    out = paged_decode_triton(q[last], *pages, lens, how.scale, plan_ahead(lens, pages[0]))
    assert_close(out, expected[last])


LARGE_HEADS = [(16, 1, 512, 32), (8, 2, 512, 64)]  # as in SHAPES


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize("shape", of_each_kind(zip(LARGE_HEADS), 0))
def test_attention_of_large_heads(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """For more than 256 numbers in a head, the kernels have programs of their own."""
    check_attention(shape, [1, 40, 20], [1, 70, 20], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 80])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_of_gemma_4s_large_heads(kv_heads: int, rows: int) -> None:
    lens = [9000 // row + row for row in range(1, rows + 1)]
    check_attention((16, kv_heads, 512, 256), [min(length, 1500) for length in lens], lens, torch.bfloat16)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_serves_layers_of_different_windows(name: str) -> None:
    context_lens, query_lens, head_dim = [300, 90, 17], [20, 90, 1], 64
    try:
        choose_backend(name, DEVICE, SHORT, 256, head_dim)
    except ValueError as problem:
        pytest.skip(str(problem))
    windows = [None, 32, 400]
    layout = lay_out([Pages(2, head_dim, window) for window in windows], 256, 256)
    backend = make_backend(name, layout)
    k_cache, v_cache, tables = paged(context_lens, 4, 2, head_dim, 256, SHORT)
    kv_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    q = randn(sum(query_lens), 4, head_dim, dtype=SHORT)
    lens, cu_query_lens, cu_context_lens = (
        torch.tensor(numbers, device=DEVICE, dtype=torch.int32)
        for numbers in (context_lens, [0, 20, 110, 111], [0, 300, 390, 407])
    )
    packed = PackedQueries(query_lens, context_lens, cu_query_lens, cu_context_lens, [False] * len(query_lens))
    last = cu_query_lens[1:].long() - 1
    groups = [GroupContext(lens, tables) for _ in windows]
    layers = dict.fromkeys(range(len(windows)), kv_cache)
    prefill = Context(layers, groups, lens, lens, 300, packed)
    decode = Context(layers, groups, lens, lens, 300)
    backend.prepare_decode(decode)
    for window, softcap in ((32, None), (None, 1.0), (400, None), (32, 1.0), (None, None)):
        scoring, group = Scoring(0.1, window, softcap), groups[windows.index(window)]
        expected = attend_densely(q, *kv_cache, tables, query_lens, context_lens, scoring)
        assert_close(backend.prefill(q, *kv_cache, prefill, group, scoring), expected)
        assert_close(backend.decode(q[last], *kv_cache, decode, group, scoring), expected[last])


@triton.jit
def _capped_kernel(x_ptr, out_ptr, factor, CAP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, scores_in_log2(tl.load(x_ptr + i), factor, CAP))


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exp2 overflows to infinity, as it should
def test_soft_caps_are_exact_near_zero_and_far_from_it() -> None:
    x = torch.cat([torch.linspace(-300, 300, 1024), torch.logspace(-9, 30, 512), -torch.logspace(-9, 30, 512)])
    x = x.to(DEVICE)
    for softcap in (0.5, 50.0):
        factor, cap = in_log2(0.3, softcap)
        out = torch.empty_like(x)
        _capped_kernel[(1,)](x, out, factor, CAP=cap, BLOCK=len(x))
        expected = torch.tanh(0.3 * x.double() / softcap)
        assert (out.double() / cap - expected).abs().max() < 5e-7


@settings(max_examples=70, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=9),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 120)),
    st.one_of(st.none(), st.tuples(st.integers(0, 8), st.integers(0, 200))),
)
def test_a_decode_plan_deals_out_every_tile_once(
    lens: list[int], workers: int, window: int | None, ahead: tuple[int, int] | None
) -> None:
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    k_cache = torch.empty(1, 16, 2, 32, device=DEVICE)
    prefixes = None
    if ahead is not None:
        prefixes, window = SharedPrefixes(len(lens), 2, k_cache), None
        prefixes.num_tiles.fill_(ahead[0])
        prefixes.head_start.fill_(ahead[1])
    plan = plan_decode(context_lens, k_cache, workers, window, prefixes)
    row_tiles = [len({key // plan.programs.tile for key in range(length)[-(window or 100) :]}) for length in lens]
    dealt = []
    share, late_share, first_late = plan.share_tiles.tolist()
    for worker, (first_row, last_row, tile, left) in enumerate(plan.shares.tolist()):
        assert left <= (share if worker < first_late else late_share)
        for row in range(first_row, last_row + 1):
            took = min(row_tiles[row] - tile, left)
            dealt += [(row, tile + i) for i in range(took)]
            tile, left = 0, left - took
        assert left == 0
    assert dealt == [(row, tile) for row, tiles in enumerate(row_tiles) for tile in range(tiles)]


@pytest.mark.parametrize("vocabulary", [100, 4096, 10000])
def test_sample(vocabulary: int) -> None:
    logits = randn(8, vocabulary) * 3
    temperatures = torch.tensor([0, 0, 0.5, 1, 1, 2, 0.01, 1e-6], device=DEVICE)
    seeds = torch.tensor([0, 1, 2, 3, 2**63 - 1, 2**40, 5, 6], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 2**20, 7], dtype=torch.int32, device=DEVICE)
    best, ids = draw_triton(logits, temperatures, seeds, positions, first_id=1000)
    expected_best, expected_ids = draw_reference(logits, temperatures, seeds, positions, first_id=1000)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(best, expected_best, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:2], (logits[:2].argmax(dim=1) + 1000).int())


@pytest.mark.parametrize(("top_k", "ties"), of_each_kind(product([1, 50, 4097, 2**31 - 1], [False, True]), 0, 3, 4, 7))
def test_find_cutoff(top_k: int, ties: bool) -> None:
    """The vocabulary has several blocks; the logits include -0.0, NaN and -inf."""
    rows = 4
    logits = randn(rows, 9001) * 3
    logits = (logits * 4).round() / 4 if ties else logits
    logits[:, 5], logits[:, 9000], logits[0, 4096] = float("nan"), float("-inf"), 20.0
    temperatures = torch.tensor([0.6, 1.0, 1.0, 1.7], device=DEVICE)
    columns = (
        torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor([0.9, 0.2, 1.0, 0.995], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.01, 0.001], device=DEVICE),
    )
    expected, found = (f(logits, temperatures, *columns) for f in (find_cutoff_reference, find_cutoff_triton))
    assert torch.equal(above(expected, logits), above(found, logits))


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (2**31 - 1, 0.51)])
def test_find_cutoff_among_neighbours(top_k: int, top_p: float) -> None:
    """The logits are neighbouring float32 numbers, so that pivots may fall between none of them."""
    rows = 12
    neighbours = [-torch.rand(rows, 1, device=DEVICE) * 16]
    for _ in range(6):
        neighbours.append(torch.nextafter(neighbours[-1], torch.full_like(neighbours[-1], float("inf"))))
    logits = torch.cat(neighbours, dim=1).gather(1, torch.randint(7, (rows, 40)).to(DEVICE))
    settings = [torch.full((rows,), value, device=DEVICE) for value in (1.0, top_k, top_p, 0.0)]
    expected, found = (f(logits, *settings) for f in (find_cutoff_reference, find_cutoff_triton))
    assert torch.equal(above(expected, logits), above(found, logits))


def above(cutoff: Cutoff, logits: torch.Tensor) -> torch.Tensor:
    """Return which tokens stay."""
    lowest, first_ids = (column[:, None] for column in cutoff)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (logits > lowest) | ((logits == lowest) & (ids >= first_ids))


def test_draw_takes_what_is_above_the_cutoff_alone() -> None:
    logits = randn(3, 9000)
    logits[:, 4000:4010] = 5.0
    cutoff = torch.tensor([5.0, 5.0, -9.0], device=DEVICE), torch.tensor([4003, 0, 0], device=DEVICE).int()
    temperatures, seeds = torch.full((3,), 100.0, device=DEVICE), torch.arange(3, device=DEVICE)
    for position in range(8):
        positions = torch.full((3,), position, dtype=torch.int32, device=DEVICE)
        ids = [f(logits, temperatures, seeds, positions, 0, cutoff)[1] for f in (draw_triton, draw_reference)]
        assert torch.equal(*ids)
        assert 4003 <= ids[0][0] < 4010
        assert 4000 <= ids[0][1] < 4010


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), of_each_kind(product([60, 9000], [torch.float32, torch.bfloat16]), 0, 3)
)
def test_draw_lines_replaces_the_tokens_of_its_places_alone(vocabulary: int, dtype: torch.dtype) -> None:
    """Lines come in any order, and several take one row's settings. A mask may leave no token, or one that is NaN.

    A fault that is known already stays.
    """
    logits = (randn(6, vocabulary + 3) * 3).to(dtype)[:, :vocabulary]  # rows need not lie side by side
    logits[4, 7] = float("nan")
    masks = torch.randint(-(2**31), 2**31, (5, -(-vocabulary // 32)), dtype=torch.int32, device=DEVICE)
    masks[1], masks[2, 0], masks[3, 0] = 0, masks[2, 0] & ~(1 << 7), masks[3, 0] | 1 << 7
    places = torch.tensor([5, 0, 4, 3, 1], device=DEVICE)
    settings = torch.tensor([0.0, 0.7, 1.3], device=DEVICE), torch.tensor([5, 2**40, 9], device=DEVICE)
    positions = torch.arange(6, dtype=torch.int32, device=DEVICE)
    lines, drawn = DrawnLines(places, torch.tensor([0, 1, 1, 2, 0], device=DEVICE), masks), []
    for function in (draw_lines_triton, draw_lines_reference):
        token_ids = torch.full((6,), vocabulary, dtype=torch.int32, device=DEVICE)
        token_ids[1] = NO_TOKEN
        function(logits, *settings, positions, lines, token_ids)
        assert token_ids[:3].tolist() == [NONE_LEFT, NO_TOKEN, vocabulary]
        for place, mask in zip(places[[0, 2, 3]].tolist(), masks[[0, 2, 3]], strict=True):
            token = int(token_ids[place])
            assert mask[token // 32] >> token % 32 & 1
        drawn.append(token_ids)
    assert torch.equal(*drawn)


def test_sample_takes_nan_for_impossible() -> None:
    """A row whose logits overflowed gets a token like any other; no id may leave the vocabulary."""
    logits = torch.full((3, 5000), float("nan"), device=DEVICE)
    logits[1, 4321] = -1.0
    temperatures, seeds = torch.tensor([0.0, 0.0, 1.0], device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for function in (draw_triton, draw_reference):
        assert function(logits, temperatures, seeds, seeds.int())[1].tolist() == [0, 4321, 0]


def test_sample_takes_the_smallest_id_among_equals() -> None:
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [4000, 5000, 8999]] = 1
    zeros = torch.zeros(1, device=DEVICE)
    for function in (draw_triton, draw_reference):
        assert function(logits, zeros, zeros.long(), zeros.int())[1].item() == 4000


@pytest.mark.parametrize(
    ("shape", "dtype"),
    of_each_kind(product([(1, 5), (3, 4096), (5, 10000), (33, 4097)], [torch.float32, torch.bfloat16]), 0, 2, 5, 6),
)
def test_token_logprobs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Also where nearly all tokens are forbidden, or all logits are far below 0."""
    rows, vocabulary = shape
    logits = (randn(rows, vocabulary + 3) * 4).to(dtype)[:, :vocabulary]  # rows need not lie side by side
    token_ids = torch.randint(vocabulary, (rows,), device=logits.device).int()
    few = torch.full_like(logits, float("-inf"))
    few.scatter_(1, token_ids[:, None].long(), logits.gather(1, token_ids[:, None].long()) - 300)
    for case in (logits, logits - 3000, few):
        ours, expected = token_logprobs_triton(case, token_ids), token_logprobs_reference(case, token_ids)
        wide = case.double().log_softmax(dim=1).gather(1, token_ids[:, None].long()).squeeze(1)
        assert torch.equal(ours.ranks, expected.ranks)
        for found in (ours, expected):
            torch.testing.assert_close(found.values.double(), wide, atol=4e-6 * float(case.max().abs()) + 1e-6, rtol=0)
    logits[0] = float("nan")
    assert token_logprobs_triton(logits, token_ids).values[0].isnan()


def test_gumbel_noise_has_the_gumbel_distribution_and_no_memory_of_its_neighbours() -> None:
    seeds = torch.arange(4)[:, None, None]
    positions = torch.arange(50)[None, :, None]
    noise = gumbel_noise(seeds, positions, torch.arange(1000)).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.02)  # Euler's constant
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.04)
    for dim in range(3):
        shifted = noise.roll(1, dim)
        correlation = torch.corrcoef(torch.stack([noise.flatten(), shifted.flatten()]))[0, 1]
        assert abs(correlation) < 0.015


ODD = 0x1E3779B97F4A7C15  # a seed's distance from the next one, of all bits


@pytest.mark.parametrize(
    ("position", "step"),
    [(1, ODD), *whole_only([(position, ODD) for position in (0, 4095, 2**31 - 1)] + [(1, 2**n) for n in (0, 20, 43)])],
)
def test_no_two_of_a_million_seeds_share_their_noise(position: int, step: int) -> None:
    """The seeds differ in their lowest bits, in their middle bits, in the highest of the 63, or in all."""
    seeds = torch.arange(1_000_000) * step & 2**63 - 1
    key, factor = noise_key(seeds, torch.tensor(position, dtype=torch.int32))
    assert (factor % 2 == 1).all()
    assert len(np.unique(key.astype(np.uint64) << 32 | factor)) == len(seeds)


@pytest.mark.parametrize(
    ("first_seed", "shape"),
    of_each_kind(product([0, 2**62 + 12345], [(100_000, 2, 3), (3, 100_000, 2), (2, 3, 100_000)]), 0, 4, 5),
    ids=str,
)
def test_noise_is_independent_of_that_of_the_next_seed_position_or_token(
    first_seed: int, shape: tuple[int, int, int]
) -> None:
    """Chi-squared of pairs of neighbours, in 16 by 16 equal shares; the 99.9999th percentile of 255 degrees is 377."""
    seeds, positions, ids = (torch.arange(size) for size in shape)
    noise = gumbel_noise(first_seed + seeds[:, None, None], positions[:, None], ids).double()
    share = (torch.exp(-torch.exp(-noise)) * 16).long()
    for dim in range(3):
        before, after = share.narrow(dim, 0, shape[dim] - 1), share.narrow(dim, 1, shape[dim] - 1)
        counts = torch.bincount((before * 16 + after).flatten(), minlength=256)
        expected = before.numel() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 377


def test_samples_follow_the_softmax() -> None:
    """Chi-squared over 20,000 draws from 8 tokens: the 99.99th percentile of 7 degrees of freedom is 29.9."""
    draws, temperature = 20_000, 0.7
    logits = torch.randn(8)
    rows = logits.expand(draws, -1)
    seeds = torch.arange(draws)
    _, ids = draw_reference(rows, torch.full((draws,), temperature), seeds, torch.full((draws,), 11).int())
    expected = torch.softmax(logits / temperature, dim=0) * draws
    chi_squared = ((torch.bincount(ids, minlength=8) - expected) ** 2 / expected).sum()
    assert chi_squared < 29.9
