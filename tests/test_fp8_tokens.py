"""Tokens' vectors in FP8: rounded by a launch of its own, by the norm before a product, and by the activation."""

from __future__ import annotations

import pytest
import torch
from cases.weights import DTYPE, assert_near, dequantized
from conftest import DEVICE
from test_kernels import randn

from nanoinfer.kernels.fp8 import LARGEST, Fp8Tokens, as_bytes, quantize, quantize_reference, quantize_triton
from nanoinfer.kernels.linear.activation import fp8_gate_mul_triton, gate_mul_triton
from nanoinfer.kernels.norm.rms_norm import Norm, fp8_norm_triton, norm_add_rms_norm_reference, rms_norm_reference


def assert_equal(out: Fp8Tokens, reference: Fp8Tokens) -> None:
    """Compare all bits of the tokens; behind them is anything."""
    tokens = reference.tokens
    assert out.scales.shape == reference.scales.shape
    assert torch.equal(out.scales[:, :tokens], reference.scales[:, :tokens])
    assert torch.equal(as_bytes(out.numbers)[:tokens], as_bytes(reference.numbers)[:tokens])


@pytest.mark.parametrize(("tokens", "size"), [(1, 128), (3, 640), (5, 4096)])
def test_the_kernel_rounds_like_the_reference(tokens: int, size: int) -> None:
    x = randn(tokens, size) * torch.logspace(-5, 5, size, device=DEVICE)
    x[0, :128] = 0
    assert_equal(quantize_triton(x), quantize_reference(x))


def test_a_number_loses_no_more_than_a_sixteenth() -> None:
    x = randn(7, 512)
    x[2] *= 1e5
    largest = x.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1)
    error = (dequantized(quantize(x)) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, largest * 2**-9 / LARGEST) * 1.0001).all()


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("with_post", [False, True])
def test_the_norm_rounds_its_result(pieces: int, with_post: bool) -> None:
    """One launch adds, normalises and rounds to FP8."""
    x, residual = randn(pieces, 5, 384), randn(5, 384, dtype=DTYPE)
    norm, post = (Norm(torch.rand(384, device=DEVICE).to(DTYPE), 1e-6) for _ in range(2))
    summed = x.sum(0).to(DTYPE)
    out, total = fp8_norm_triton(x if pieces > 1 else summed, residual, norm, post if with_post else None)
    if with_post:
        normed, sums = norm_add_rms_norm_reference(summed, residual, post, norm)
    else:
        sums = summed + residual
        normed = rms_norm_reference(sums, norm)
    torch.testing.assert_close(total, sums, rtol=0.02, atol=0.02)
    assert_near(dequantized(out), normed.double(), 0.05)
    assert out.dtype == total.dtype
    alone, same = fp8_norm_triton(total, None, norm, None)
    assert same is total
    assert_near(dequantized(alone), rms_norm_reference(total, norm).double(), 0.05)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("size", [128, 1152])
def test_the_activation_rounds_its_result(tokens: int, size: int) -> None:
    """One launch multiplies gates and ups, and rounds to FP8."""
    gate_up = randn(tokens, 2 * size, dtype=DTYPE)
    out = fp8_gate_mul_triton(gate_up, "silu")
    assert out.dtype == DTYPE
    assert_equal(out, quantize_triton(gate_mul_triton(gate_up, "silu")))


@pytest.mark.gpu
def test_what_is_no_number_stays_none() -> None:
    """Triton's interpreter makes a number of it."""
    x = randn(2, 256)
    x[1, 5] = float("nan")
    assert dequantized(quantize_triton(x))[1, 5].isnan()
    assert not dequantized(quantize_triton(x))[0].isnan().any()
