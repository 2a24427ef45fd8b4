"""The activation of an MLP, and of a gated one: act(gate) * up (Shazeer, 2020), such as SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK as FP8_BLOCK
from nanoinfer.kernels.fp8 import Fp8Tokens, quantize_blocks
from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

BLOCK, UNGATED_BLOCK = 1024, 2048  # numbers that a program writes; smaller ones than these take longer to start
# Numbers of a token, in 16 bits, from which on the next product starts when this kernel has ended. Started earlier, it
# divides its multiprocessors' memory otherwise (see launch.py), and took up to 12 µs longer on an H200.
WIDE = 8192


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit`, and an up from -limit to limit."""

    alpha: float
    limit: float


Function = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2"]


@dataclass(frozen=True)
class ScaledGate:
    """function(factor * gate) * up."""

    function: Function
    factor: float


@dataclass(frozen=True)
class Ungated:
    """An activation of all projections: no gate is among them."""

    function: Function


Activation: TypeAlias = Function | ClampedSwiGLU | ScaledGate  # of gates
AnyActivation: TypeAlias = Activation | Ungated


def split_activation(activation: AnyActivation | None) -> tuple[Activation | None, Function | None]:
    """Return the activation of gates, and the function of projections without gates: one at most is given."""
    return (None, activation.function) if isinstance(activation, Ungated) else (activation, None)


def rows_per_output(activation: AnyActivation) -> int:
    """Return how many rows of a weight make one number: a gate's and its up's, or without gates an up's alone."""
    return 1 if isinstance(activation, Ungated) else 2


_FUNCTIONS: dict[Function, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: Tensor, activation: Function) -> Tensor:
    """Compute act(x), of [tokens, size].

    activation: "silu", x / (1 + exp(-x)); "gelu", x / 2 * (1 + erf(x / sqrt(2))), or "gelu_tanh", its approximation
        x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), or "quick_gelu", x / (1 + exp(-1.702 * x)), all three
        by Hendrycks and Gimpel, 2016; "relu", max(x, 0); or "relu2", its square (So et al., 2021)
    """
    return activate_triton(x, activation) if x.is_cuda else _FUNCTIONS[activation](x)


def activate_triton(x: Tensor, activation: Function) -> Tensor:
    """activate as one launch."""
    out = torch.empty_like(x)
    _launch(x, out, activation, is_gated=False)
    return out


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Compute xIELU (Huang and Schlag, 2024) of [tokens, size], in float32.

    numbers: [4] float32: a, b, beta and eps, of which eps is at most 0
    That is softplus(a) * x^2 + beta * x where x is above 0; elsewhere, with m = min(x, eps),
    (beta + softplus(b)) * (exp(m) - 1 - x) + beta * x.
    """
    return xielu_triton(x, numbers) if x.is_cuda else xielu_reference(x, numbers)


def xielu_reference(x: Tensor, numbers: Tensor) -> Tensor:
    """xielu in torch."""
    a, b, beta, eps = numbers
    wide = x.float()
    below = (beta + F.softplus(b)) * (wide.minimum(eps).expm1() - wide)
    return (torch.where(wide > 0, F.softplus(a) * wide.square(), below) + beta * wide).to(x.dtype)


def xielu_triton(x: Tensor, numbers: Tensor) -> Tensor:
    """xielu as one launch."""
    out = torch.empty_like(x)
    _launch(x, out, "xielu", is_gated=False, numbers=numbers)
    return out


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute act(gate) * up: [tokens, 2 * size], gate before up, to [tokens, size].

    activation: as for activate; or a ClampedSwiGLU, the product with the up included, as in gpt-oss (OpenAI, 2025); or
        a ScaledGate, as in Falcon-H1 (TII, 2025)
    """
    return gate_mul_triton(gate_up, activation) if gate_up.is_cuda else gate_mul_reference(gate_up, activation)


def gate_mul_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_mul in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (gate * activation.alpha).sigmoid_().mul_(gate).mul_(up + 1)
    if isinstance(activation, ScaledGate):
        gate, activation = gate * activation.factor, activation.function
    return _FUNCTIONS[activation](gate).mul_(up)


def gate_mul_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_mul as one launch."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(gate_up, out, activation)
    return out


def fp8_gate_mul_triton(gate_up: Tensor, activation: Activation) -> Fp8Tokens:
    """Return gate_mul's result in FP8, as one launch; its size is a multiple of kernels.fp8.BLOCK."""
    assert gate_up.shape[1] % (2 * FP8_BLOCK.value) == 0
    out = Fp8Tokens.empty(gate_up.shape[0], gate_up.shape[1] // 2, gate_up)
    _launch(gate_up, out, activation)
    return out


def _launch(
    x: Tensor,
    out: Tensor | Fp8Tokens,
    activation: Activation | Literal["xielu"],
    is_gated: bool = True,
    numbers: Tensor | None = None,
) -> None:
    """numbers: xIELU's"""
    assert x.is_contiguous()
    tokens, size = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    written, scales = (out.numbers, out.scales) if isinstance(out, Fp8Tokens) else (out, None)
    block = BLOCK if is_gated else min(UNGATED_BLOCK, next_power_of_2(size))
    _activation_kernel[(tokens, cdiv(size, block))](
        x,
        written,
        scales,
        numbers,
        len(written),
        size,
        ACTIVATION=activation,
        GATED=is_gated,
        IN_FP8=scales is not None,
        MAKE_WAY=scales is not None or size < WIDE,
        BLOCK=block,
        num_warps=4,
        **launch_options(x),
    )


@triton.jit(do_not_specialize=["room"])
def _activation_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    numbers_ptr,
    room,
    size,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    IN_FP8: tl.constexpr,
    MAKE_WAY: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY, START_SUCCESSOR=MAKE_WAY)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    if GATED:
        gate = tl.load(x_ptr + token * 2 * size + offsets, mask=mask, other=0.0)
        up = tl.load(x_ptr + token * 2 * size + size + offsets, mask=mask, other=0.0)
        out = gate_mul_block(gate, up, ACTIVATION)
    elif ACTIVATION == "xielu":
        x = tl.load(x_ptr + token * size + offsets, mask=mask, other=0.0)
        out = _xielu_block(x.to(tl.float32), numbers_ptr).to(x.dtype)
    else:
        x = tl.load(x_ptr + token * size + offsets, mask=mask, other=0.0)
        out = activate_block(x.to(tl.float32), ACTIVATION).to(x.dtype)
    if IN_FP8:
        numbers, scales = quantize_blocks(tl.reshape(out.to(tl.float32), [BLOCK // FP8_BLOCK, FP8_BLOCK]))
        out = tl.reshape(numbers, [BLOCK]).to(out_ptr.dtype.element_ty)
        block = tl.program_id(1) * (BLOCK // FP8_BLOCK) + tl.arange(0, BLOCK // FP8_BLOCK)
        tl.store(scales_ptr + block * room + token, scales, mask=block < size // FP8_BLOCK)
    tl.store(out_ptr + token * size + offsets, out, mask=mask)


@triton.jit
def _xielu_block(x, numbers_ptr):
    a, b = _softplus(tl.load(numbers_ptr)), _softplus(tl.load(numbers_ptr + 1))
    beta, eps = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    m = tl.minimum(x, eps, propagate_nan=tl.PropagateNan.ALL)
    # exp(m) - 1 - m: near 0, the difference would have few digits, and four terms of its series have all.
    series = m * m * (0.5 + m * (0.16666666666666666 + m * (0.041666666666666664 + m * 0.008333333333333333)))
    bend = tl.where(m > -0.125, series, tl.exp(m) - 1.0 - m)
    return tl.where(x > 0.0, a * x * x, (beta + b) * (bend + (m - x))) + beta * x


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def gated_row(n, weight_rows):
    """Return the row of a weight with all gates first that is row n where each gate precedes its up."""
    return n // 2 + n % 2 * (weight_rows // 2)


@triton.jit
def gate_mul_block(gate, up, ACTIVATION: tl.constexpr):
    """Compute gate_mul inside a kernel, of blocks in the model's dtype; round act(gate) to it, as transformers does."""
    wide = gate.to(tl.float32)
    if _is_clamped(ACTIVATION):
        wide = tl.minimum(wide, ACTIVATION.limit)
        act = wide * tl.sigmoid(ACTIVATION.alpha * wide)
        up = tl.minimum(tl.maximum(up, -ACTIVATION.limit), ACTIVATION.limit) + 1.0
    elif _is_scaled(ACTIVATION):
        act = activate_block(wide * ACTIVATION.factor, tl.constexpr(ACTIVATION.function))
    else:
        act = activate_block(wide, ACTIVATION)
    return act.to(gate.dtype) * up


@triton.constexpr_function
def _is_clamped(activation):
    return isinstance(activation, ClampedSwiGLU)


@triton.constexpr_function
def _is_scaled(activation):
    return isinstance(activation, ScaledGate)


@triton.jit
def activate_block(wide, ACTIVATION: tl.constexpr):
    """Compute activate inside a kernel, in float32."""
    if ACTIVATION == "silu":
        return wide * tl.sigmoid(wide)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 * u), in which an exp that overflows gives a 0 and no NaN.
        return wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    elif ACTIVATION == "gelu":
        return wide * _normal_share(wide)
    elif ACTIVATION == "quick_gelu":
        return wide * tl.sigmoid(1.702 * wide)
    else:
        act = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return act * act if ACTIVATION == "relu2" else act


@triton.jit
def _normal_share(x):
    """Compute (1 + erf(x / sqrt(2))) / 2 (Abramowitz and Stegun, 1964, formula 7.1.26), within 4e-7 in float32.

    With tl.erf, arithmetic takes longer than memory.
    """
    t = 1.0 / (1.0 + 0.23164188826636045 * tl.abs(x))
    series = -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    beyond = t * (0.127414796 + t * series) * tl.exp(-0.5 * x * x)
    return tl.where(x > 0.0, 1.0 - beyond, beyond)
